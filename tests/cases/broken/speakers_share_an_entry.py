"""Chunks of two speakers come in turn, and the dict of states has one entry for both: each goes on
where the other one stopped.
"""

import torch
from torch import nn


class Online:
    def __init__(self):
        self.lstm, self.fc = nn.LSTM(4, 8), nn.Linear(8, 3)
        self.optimizer = torch.optim.Adam([*self.lstm.parameters(), *self.fc.parameters()], lr=1e-3)
        self.cache = {"state": None}

    def learn(self, speaker, x, y):
        out, state = self.lstm(x, self.cache["state"])  # <- TT204
        self.cache["state"] = tuple(s.detach() for s in state)  # <- TT204
        loss = nn.functional.cross_entropy(self.fc(out).flatten(0, 1), y.flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return f"{speaker} {loss.item():.3f}"


def main():
    torch.manual_seed(1225)
    speech = {name: torch.randn(80, 1, 4).cumsum(0) / 9 for name in ("amy", "joe")}
    labels = {name: x[..., :3].argmax(-1) for name, x in speech.items()}
    online = Online()
    for i in range(0, 80, 16):
        for name, x in speech.items():
            print(online.learn(name, x[i : i + 16], labels[name][i : i + 16]))  # <- TT204


if __name__ == "__main__":
    main()
