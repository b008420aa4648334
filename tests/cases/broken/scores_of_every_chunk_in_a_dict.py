"""The results of each chunk go into a history, the loss and the last logits as they are, with their
graphs.
"""

import torch
from torch import nn


class Monitor:
    def __init__(self):
        self.history = {"loss": [], "logits": []}

    def log(self, **values):
        for key, value in values.items():
            self.history[key].append(value)


def main():
    torch.manual_seed(1214)
    lstm, head = nn.LSTM(4, 8), nn.Linear(8, 3)
    optimizer = torch.optim.Adam([*lstm.parameters(), *head.parameters()], lr=1e-3)
    monitor = Monitor()
    signal = torch.randn(150, 2, 4).cumsum(0) / 10
    label = signal[..., :3].argmax(-1)
    state = None
    for x, y in zip(signal.split(15), label.split(15)):
        out, state = lstm(x, state)
        state = tuple(s.detach() for s in state)
        logits = head(out)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())  # <- TT104
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.log(loss=loss, logits=logits[-1])  # <- TT104
    print(torch.stack(monitor.history["loss"]).mean().item())


if __name__ == "__main__":
    main()
