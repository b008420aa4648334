"""A language model on adjacent batches: the corpus lies in lanes, and row i of each batch goes on
with row i of the one before.
"""

import torch
from torch import nn

CORPUS = (
    "so much depends upon a red wheel barrow glazed with rain water beside the white chickens " * 6
)


class RNNModel(nn.Module):
    def __init__(self, vocab, hidden=16):
        super().__init__()
        self.encoder, self.drop = nn.Embedding(vocab, hidden), nn.Dropout(0.2)
        self.rnn = nn.LSTM(hidden, hidden, num_layers=2, dropout=0.2)
        self.decoder = nn.Linear(hidden, vocab)
        self.decoder.weight = self.encoder.weight
        self.hidden = hidden

    def forward(self, ids, state):
        y, state = self.rnn(self.drop(self.encoder(ids)), state)
        return self.decoder(self.drop(y)), state

    def init_state(self, lanes):
        return torch.zeros(2, lanes, self.hidden), torch.zeros(2, lanes, self.hidden)


def repackage(state):
    return state.detach() if isinstance(state, torch.Tensor) else tuple(map(repackage, state))


def main():
    torch.manual_seed(117)
    letters = {c: i for i, c in enumerate(sorted(set(CORPUS)))}
    ids = torch.tensor([letters[c] for c in CORPUS])
    lanes, bptt = 4, 10
    source = ids[: len(ids) // lanes * lanes].view(lanes, -1).t().contiguous()
    model, criterion = RNNModel(len(letters)), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model.train()
    state = model.init_state(lanes)
    for i in range(0, len(source) - 1, bptt):
        length = min(bptt, len(source) - 1 - i)
        state = repackage(state)
        model.zero_grad()
        logits, state = model(source[i : i + length], state)
        loss = criterion(logits.flatten(0, 1), source[i + 1 : i + 1 + length].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()


if __name__ == "__main__":
    main()
