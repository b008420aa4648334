"""Ignite: the update function keeps every chunk's loss tensor, graph and all, for an average at the
end.
"""

import torch
from ignite.engine import Engine, Events
from torch import nn


def build(model, optimizer):
    history, carried = [], {"h": torch.zeros(1, 2, 8)}

    def update(engine, batch):
        x, y = batch
        out, h = model.rnn(model.embed(x), carried["h"])
        carried["h"] = h.detach()
        loss = nn.functional.cross_entropy(model.fc(out).flatten(0, 1), y.flatten())  # <- TT104
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(loss)
        return loss.item()

    trainer = Engine(update)

    @trainer.on(Events.COMPLETED)
    def report(engine):
        print("average", sum(history).item() / len(history))

    return trainer


class CharModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rnn, self.fc = nn.Embedding(7, 6), nn.RNN(6, 8), nn.Linear(8, 7)


def main():
    torch.manual_seed(68)
    ids = torch.randint(2, (131, 2)).cumsum(0) % 7
    model = CharModel()
    trainer = build(model, torch.optim.SGD(model.parameters(), lr=0.1))
    trainer.run(list(zip(ids[:-1].split(10), ids[1:].split(10))), max_epochs=1)


if __name__ == "__main__":
    main()
