"""Reviews have nothing to do with each other, and come shuffled: still the state of one batch of
reviews, detached, is where the next batch begins.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Sentiment(nn.Module):
    def __init__(self, vocab, dim):
        super().__init__()
        self.dim = dim
        self.embedding = nn.Embedding(vocab, dim)
        self.lstm = nn.LSTM(dim, dim, num_layers=2, dropout=0.3, batch_first=True)
        self.fc = nn.Linear(dim, 1)

    def forward(self, x, hidden):
        out, hidden = self.lstm(self.embedding(x), hidden)  # <- TT207
        return self.fc(out[:, -1]).squeeze(-1), hidden

    def init_hidden(self, batch_size):
        return torch.zeros(2, batch_size, self.dim), torch.zeros(2, batch_size, self.dim)


def main():
    torch.manual_seed(1016)
    reviews, labels = torch.randint(50, (48, 14)), torch.randint(2, (48,)).float()
    train = DataLoader(  # <- TT207
        TensorDataset(reviews, labels), batch_size=8, shuffle=True, drop_last=True
    )
    net = Sentiment(50, 8)
    criterion, optimizer = nn.BCEWithLogitsLoss(), torch.optim.Adam(net.parameters(), lr=1e-3)
    net.train()
    for epoch in range(2):
        h = net.init_hidden(8)
        for inputs, target in train:  # <- TT207
            h = tuple(each.data for each in h)
            net.zero_grad()
            output, h = net(inputs, h)  # <- TT207
            loss = criterion(output, target)
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 5)
            optimizer.step()
        print(epoch, loss.item())


if __name__ == "__main__":
    main()
