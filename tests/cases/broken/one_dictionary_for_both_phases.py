"""The loop over the phases "train" and "val" shares one dictionary of states."""

import torch
from torch import nn


def main():
    torch.manual_seed(35)
    B, H = 2, 6
    cells = nn.ModuleList([nn.LSTMCell(1, H), nn.LSTMCell(H, H)])
    head = nn.Linear(H, 1)
    optimizer = torch.optim.SGD([*cells.parameters(), *head.parameters()], lr=0.02)
    t = torch.arange(151) * 0.1
    wave = torch.stack([t.sin(), (2 * t).sin()], 1).unsqueeze(-1)
    data = {"train": wave[:101], "val": wave[110:151] * 0.5}
    memory = {i: (torch.zeros(B, H), torch.zeros(B, H)) for i in range(2)}
    for phase in ("train", "val"):
        cells.train(phase == "train")
        head.train(phase == "train")
        with torch.set_grad_enabled(phase == "train"):
            for start in range(0, len(data[phase]) - 1, 10):
                loss = torch.tensor(0.0)
                for k in range(start, start + 10):
                    z = data[phase][k]
                    for i, cell in enumerate(cells):
                        memory[i] = cell(z, memory[i])  # <- TT205
                        z = memory[i][0]
                    loss = loss + (head(z) - data[phase][k + 1]).square().mean() / 10
                if phase == "train":
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                memory = {i: (h.detach(), c.detach()) for i, (h, c) in memory.items()}
        print(phase, loss.item())


if __name__ == "__main__":
    main()
