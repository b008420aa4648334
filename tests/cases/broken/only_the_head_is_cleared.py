"""Two optimizers step at every chunk, but only the head's gradients are cleared.

Those of the core pile up.
"""

import torch
from torch import nn


def train(core, head, tokens, chunk):
    core_optimizer = torch.optim.SGD(core.parameters(), lr=0.01)
    head_optimizer = torch.optim.Adam(head.parameters(), lr=1e-3)
    h = torch.zeros(1, tokens.shape[1], 12)
    for k in range((len(tokens) - 1) // chunk):
        x, y = tokens[k * chunk : (k + 1) * chunk], tokens[k * chunk + 1 : (k + 1) * chunk + 1]
        out, h = core(nn.functional.one_hot(x, 6).float(), h)
        h = h.detach()
        loss = nn.functional.cross_entropy(head(out).flatten(0, 1), y.flatten())
        head_optimizer.zero_grad()
        loss.backward()
        core_optimizer.step()  # <- TT302
        head_optimizer.step()
        print(k, loss.item())


def main():
    torch.manual_seed(47)
    tokens = torch.randint(2, (121, 4)).cumsum(0) % 6
    train(nn.GRU(6, 12), nn.Linear(12, 6), tokens, chunk=10)


if __name__ == "__main__":
    main()
