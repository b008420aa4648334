"""Ignite: the state lives on engine.state and enters the next iteration with its graph."""

# raises: second time

import torch
from ignite.engine import Engine, Events
from torch import nn


def main():
    torch.manual_seed(61)
    gru, head = nn.GRU(2, 8), nn.Linear(8, 2)
    optimizer = torch.optim.Adam([*gru.parameters(), *head.parameters()], lr=1e-3)
    walk = torch.randn(101, 3, 2).cumsum(0) / 10

    def update(engine, batch):
        x, y = batch
        optimizer.zero_grad()
        out, engine.state.hidden = gru(x, engine.state.hidden)  # <- TT101
        loss = nn.functional.mse_loss(head(out), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    trainer = Engine(update)

    @trainer.on(Events.EPOCH_STARTED)
    def reset(engine):
        engine.state.hidden = torch.zeros(1, 3, 8)

    trainer.run(list(zip(walk[:-1].split(10), walk[1:].split(10))), max_epochs=1)


if __name__ == "__main__":
    main()
