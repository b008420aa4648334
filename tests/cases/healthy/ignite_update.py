"""Ignite with an update function: the state is detached before use and made anew at every epoch;
evaluation has its own.
"""

import torch
from ignite.engine import Engine, Events
from torch import nn


def main():
    torch.manual_seed(134)
    gru, head = nn.GRU(2, 8), nn.Linear(8, 2)
    optimizer = torch.optim.Adam([*gru.parameters(), *head.parameters()], lr=1e-3)

    def update(engine, batch):
        x, y = batch
        optimizer.zero_grad()
        out, engine.state.hidden = gru(x, engine.state.hidden.detach())
        loss = nn.functional.mse_loss(head(out), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def inference(engine, batch):
        x, y = batch
        out, engine.state.hidden = gru(x, engine.state.hidden)
        return nn.functional.mse_loss(head(out), y).item()

    trainer, evaluator = Engine(update), Engine(inference)

    @trainer.on(Events.EPOCH_STARTED)
    @evaluator.on(Events.EPOCH_STARTED)
    def reset(engine):
        engine.state.hidden = torch.zeros(1, 3, 8)

    @trainer.on(Events.EPOCH_COMPLETED)
    def validate(engine):
        print(engine.state.epoch, engine.state.output, evaluator.run(valid).output)

    walk, other = torch.randn(81, 3, 2).cumsum(0) / 10, torch.randn(41, 3, 2).cumsum(0) / 10
    valid = list(zip(other[:-1].split(10), other[1:].split(10)))
    trainer.run(list(zip(walk[:-1].split(10), walk[1:].split(10))), max_epochs=2)


if __name__ == "__main__":
    main()
