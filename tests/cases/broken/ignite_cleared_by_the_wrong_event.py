"""Ignite: zero_grad hangs on an event that fires between backward and step, so nothing is ever
learnt.
"""

import torch
from ignite.engine import Engine, EventEnum, Events
from torch import nn


class Gradient(EventEnum):
    READY = "gradient_ready"


def main():
    torch.manual_seed(67)
    model = nn.ModuleDict({"gru": nn.GRU(2, 8), "fc": nn.Linear(8, 1)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def update(engine, batch):
        x, y = batch
        out, h = model["gru"](x, engine.state.h)
        engine.state.h = h.detach()
        loss = nn.functional.mse_loss(model["fc"](out), y)
        loss.backward()
        engine.fire_event(Gradient.READY)
        optimizer.step()
        return loss.item()

    trainer = Engine(update)
    trainer.register_events(*Gradient)

    @trainer.on(Events.STARTED)
    def begin(engine):
        engine.state.h = torch.zeros(1, 2, 8)

    @trainer.on(Gradient.READY)
    def clear(engine):
        optimizer.zero_grad()  # <- TT302

    x = torch.randn(100, 2, 2).cumsum(0) / 10
    trainer.run(list(zip(x.split(10), x.mean(-1, keepdim=True).split(10))), max_epochs=1)


if __name__ == "__main__":
    main()
