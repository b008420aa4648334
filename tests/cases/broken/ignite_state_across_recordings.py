"""Ignite: every batch is a recording, the update function walks through it, and the state is reset
only when the run starts.
"""

import torch
from ignite.engine import Engine, Events
from torch import nn


def main():
    torch.manual_seed(65)
    lstm, head = nn.LSTM(2, 8, batch_first=True), nn.Linear(8, 3)
    optimizer = torch.optim.Adam([*lstm.parameters(), *head.parameters()], lr=1e-3)

    def update(engine, recording):
        x, y = recording["signal"], recording["label"]
        losses = []
        for start in range(0, x.shape[1], 10):
            out, state = lstm(x[:, start : start + 10], engine.state.carried)  # <- TT204
            engine.state.carried = tuple(s.detach() for s in state)
            loss = nn.functional.cross_entropy(head(out).transpose(1, 2), y[:, start : start + 10])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return sum(losses) / len(losses)

    trainer = Engine(update)

    @trainer.on(Events.STARTED)
    def start(engine):
        engine.state.carried = (torch.zeros(1, 1, 8), torch.zeros(1, 1, 8))

    @trainer.on(Events.ITERATION_COMPLETED)
    def log(engine):
        print(engine.state.iteration, engine.state.output)

    recordings = []
    for steps in (50, 30, 40, 60):
        signal = torch.randn(1, steps, 2).cumsum(1) / 6
        recordings.append({"signal": signal, "label": (signal > 0).sum(-1)})
    trainer.run(recordings, max_epochs=1)


if __name__ == "__main__":
    main()
