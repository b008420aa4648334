"""Every few chunks a text is sampled, with a state of its own and without gradients; training goes
on from the state where it was.
"""

import torch
from torch import nn

TEXT = "round the rugged rocks the ragged rascal ran and ran and ran until he could not run " * 4
CHARS = sorted(set(TEXT))


class CharRNN(nn.Module):
    def __init__(self, n=16):
        super().__init__()
        self.embed = nn.Embedding(len(CHARS), n)
        self.lstm = nn.LSTM(n, n, 2, dropout=0.1)
        self.out = nn.Linear(n, len(CHARS))

    def forward(self, x, hidden):
        y, hidden = self.lstm(self.embed(x), hidden)
        return self.out(y), hidden


@torch.no_grad()
def sample(net, prime, size):
    net.eval()
    hidden, text = None, prime
    for c in prime:
        logits, hidden = net(torch.tensor([[CHARS.index(c)]]), hidden)
    for _ in range(size):
        i = torch.multinomial(logits[-1, 0].softmax(-1), 1).item()
        text += CHARS[i]
        logits, hidden = net(torch.tensor([[i]]), hidden)
    net.train()
    return text


def main():
    torch.manual_seed(2012)
    ids = torch.tensor([CHARS.index(c) for c in TEXT])
    rows = ids[: len(ids) // 3 * 3].view(3, -1).t()
    net = CharRNN()
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    hidden = None
    for step, i in enumerate(range(0, len(rows) - 13, 12)):
        logits, hidden = net(rows[i : i + 12], hidden)
        hidden = tuple(h.data for h in hidden)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), rows[i + 1 : i + 13].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 4 == 3:
            print(sample(net, "ra", 20))


if __name__ == "__main__":
    main()
