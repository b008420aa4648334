"""The running loss for the log is summed as tensors, so that every chunk's graph stays reachable
from it.
"""

import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self, vocab=13):
        super().__init__()
        self.emb = nn.Embedding(vocab, 6)
        self.rnn = nn.GRU(6, 12, batch_first=True)
        self.fc = nn.Linear(12, vocab)

    def forward(self, x, h=None):
        y, h = self.rnn(self.emb(x), h)
        return self.fc(y), h


def train(model, tokens, optimizer, criterion, seq_len=9):
    model.train()
    running_loss, h, batches = 0.0, None, 0
    for i in range(0, tokens.size(1) - 1, seq_len):
        x, y = tokens[:, i : i + seq_len], tokens[:, i + 1 : i + 1 + seq_len]
        if h is not None:
            h = h.detach()
        logits, h = model(x, h)
        loss = criterion(logits.transpose(1, 2), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        running_loss += loss  # <- TT104
        batches += 1
    return running_loss / batches


def main():
    torch.manual_seed(19)
    model = Model()
    tokens = torch.randint(13, (4, 14 * 9 + 1))
    average = train(model, tokens, torch.optim.Adam(model.parameters()), nn.CrossEntropyLoss())
    print("train loss", average.item())


if __name__ == "__main__":
    main()
