"""repackage_hidden detaches a tensor and gives everything else back as it is, also the pair of an
LSTM.
"""

# raises: second time

import torch
from torch import nn

CORPUS = "it was the best of times it was the worst of times it was the age of wisdom " * 5


def repackage_hidden(h):
    if isinstance(h, torch.Tensor):
        h = h.detach()
    return h  # <- TT101


class LanguageModel(nn.Module):
    def __init__(self, ntoken, nhid):
        super().__init__()
        self.encoder = nn.Embedding(ntoken, nhid)
        self.rnn = nn.LSTM(nhid, nhid, 2)
        self.decoder = nn.Linear(nhid, ntoken)

    def forward(self, tokens, hidden):
        output, hidden = self.rnn(self.encoder(tokens), hidden)
        return self.decoder(output).flatten(0, 1), hidden


def main():
    torch.manual_seed(1006)
    vocab = sorted(set(CORPUS))
    ids = torch.tensor([vocab.index(c) for c in CORPUS])
    data = ids[: len(ids) // 4 * 4].view(4, -1).t().contiguous()
    model = LanguageModel(len(vocab), 12)
    criterion = nn.CrossEntropyLoss()
    hidden = (torch.zeros(2, 4, 12), torch.zeros(2, 4, 12))
    for i in range(0, 90, 10):
        model.zero_grad()
        hidden = repackage_hidden(hidden)  # <- TT101
        output, hidden = model(data[i : i + 10], hidden)  # <- TT101
        loss = criterion(output, data[i + 1 : i + 11].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(p.grad, alpha=-1.0)


if __name__ == "__main__":
    main()
