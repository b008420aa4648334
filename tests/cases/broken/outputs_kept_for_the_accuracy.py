"""The outputs of all chunks are kept with their graphs, to compute an accuracy at the end of the
epoch.
"""

import torch
from torch import nn


class Labeller(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTMCell(2, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, frames, state):
        logits = []
        for frame in frames.unbind(1):
            state = self.lstm(frame, state)
            logits.append(self.head(state[0]))
        return torch.stack(logits, dim=1), state  # <- TT104


def main():
    torch.manual_seed(20)
    frames = torch.randn(5, 100, 2).cumsum(1) / 4
    labels = (frames[..., 0] > 0).long() + (frames[..., 1] > 0).long()
    model = Labeller()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    outputs = []
    state = (torch.zeros(5, 8), torch.zeros(5, 8))
    for x, y in zip(frames.split(10, dim=1), labels.split(10, dim=1)):
        state = tuple(s.detach() for s in state)
        logits, state = model(x, state)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        outputs.append(logits)
    accuracy = (torch.cat(outputs, dim=1).argmax(-1) == labels).float().mean()
    print(f"accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
