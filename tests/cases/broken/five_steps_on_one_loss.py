"""The loss of a batch is computed once and sent backward five times, to "fit each batch well"."""

# raises: second time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(20, 8)
        self.lstm = nn.LSTM(8, 8, batch_first=True, bidirectional=True)
        self.tags = nn.Linear(16, 4)

    def forward(self, sentence):
        return self.tags(self.lstm(self.emb(sentence))[0])


def main():
    torch.manual_seed(1011)
    sentences = torch.randint(20, (24, 9))
    loader = DataLoader(TensorDataset(sentences, sentences % 4), batch_size=8, shuffle=True)
    tagger = Tagger()
    optimizer = torch.optim.SGD(tagger.parameters(), lr=0.1)
    for sentence, tag in loader:
        scores = tagger(sentence)
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), tag.flatten())
        for _ in range(5):
            optimizer.zero_grad()
            loss.backward()  # <- TT105
            optimizer.step()


if __name__ == "__main__":
    main()
