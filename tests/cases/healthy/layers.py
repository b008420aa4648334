"""Healthy loops of recurrent layers."""

import torch
from torch import nn

import throughtime as tt


@torch.no_grad()
def update(average, model, decay=0.9):
    for a, p in zip(average.parameters(), model.parameters()):
        a.mul_(decay).add_(p, alpha=1 - decay)


def early_exits():
    """Each layer has a head of its own, and their losses go backward one by one through the one
    graph that they share.
    """
    torch.manual_seed(204)
    layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(9)])
    heads = nn.ModuleList([nn.Linear(8, 2) for _ in range(9)])
    optimizer = torch.optim.SGD([*layers.parameters(), *heads.parameters()], lr=0.01)
    for _ in range(4):
        x, label = torch.randn(16, 8), torch.randint(2, (16,))
        optimizer.zero_grad()
        for i, (layer, head) in enumerate(zip(layers, heads, strict=True)):
            x = torch.relu(layer(x))
            nn.functional.cross_entropy(head(x), label).backward(retain_graph=i < 8)
        optimizer.step()


def encoder_behind_a_leaf():
    """A costly encoder is run once per recording. Its output, detached with a gradient of its own,
    collects the gradients of all chunks, which then go through the encoder in one backward.
    """
    torch.manual_seed(2005)
    encoder = nn.Sequential(nn.Conv1d(1, 6, 5, padding=2), nn.Tanh())
    decoder, head = nn.GRU(6, 8), nn.Linear(8, 1)
    modules = nn.ModuleList([encoder, decoder, head])
    optimizer = torch.optim.Adam(modules.parameters(), lr=1e-3)
    recordings = [torch.randn(2, 1, 121).cumsum(-1) / 10 for _ in range(3)]
    for recording in recordings:
        optimizer.zero_grad()
        codes = encoder(recording[..., :-1]).permute(2, 0, 1)
        leaf = codes.detach().requires_grad_()
        target = recording[..., 1:].permute(2, 0, 1)
        h = None
        for x, y in zip(leaf.split(30), target.split(30)):
            out, h = decoder(x, h)
            h = h.detach()
            (nn.functional.mse_loss(head(out), y) / 4).backward()
        codes.backward(leaf.grad)
        optimizer.step()


def project(a, b):
    dot = (a * b).sum()
    return a - dot / b.pow(2).sum() * b if dot < 0 else a


def gradients_assigned_by_hand():
    """Conflicting gradients of two tasks are projected and put into .grad by hand before the step:
    no backward is called at all.
    """
    torch.manual_seed(2026)
    trunk = nn.GRU(2, 8)
    heads = nn.ModuleList([nn.Linear(8, 2), nn.Linear(8, 1)])
    shared = list(trunk.parameters())
    optimizer = torch.optim.Adam([*shared, *heads.parameters()], lr=1e-3)
    walk = torch.randn(101, 3, 2).cumsum(0) / 10
    h = torch.zeros(1, 3, 8)
    for i in range(0, 100, 20):
        x, y = walk[i : i + 20], walk[i + 1 : i + 21]
        out, h = trunk(x, h.detach())
        losses = (
            nn.functional.mse_loss(heads[0](out), y),
            nn.functional.mse_loss(heads[1](out), y.norm(dim=-1, keepdim=True)),
        )
        rows = []
        for loss, head in zip(losses, heads):
            own = list(head.parameters())
            gradients = torch.autograd.grad(loss, shared + own, retain_graph=loss is losses[0])
            rows.append(torch.cat([g.flatten() for g in gradients[: len(shared)]]))
            for p, g in zip(own, gradients[len(shared) :]):
                p.grad = g
        merged = project(rows[0], rows[1]) + project(rows[1], rows[0])
        for p, g in zip(shared, merged.split([p.numel() for p in shared])):
            p.grad = g.view_as(p)
        optimizer.step()


STRIDE, HORIZON = 5, 15


def ragged_utterances():
    """Utterances of many lengths lie one after another in one tensor. Each is a thing of its own
    and begins from zero.
    """
    torch.manual_seed(207)
    lstm, head = nn.LSTM(5, 8), nn.Linear(8, 2)
    optimizer = torch.optim.Adam([*lstm.parameters(), *head.parameters()])
    frames = torch.randn(200, 5).cumsum(0) / 10
    for utterance in frames.split([11, 13, 9, 20, 17, 30, 40, 60]):
        y, _ = lstm(utterance.unsqueeze(1))
        optimizer.zero_grad()
        nn.functional.cross_entropy(head(y[-1]), torch.tensor([1])).backward()
        optimizer.step()


def throughtime_updates():
    """throughtime's own loop: stream, carried state, horizon of two strides."""
    torch.manual_seed(113)
    recordings = [
        {"inputs": torch.randn(n, 3), "targets": torch.randint(2, (n,))} for n in (90, 60, 75)
    ]
    stream = tt.Stream(recordings, lanes=2, chunk=15)
    net = tt.carry(torch.nn.Sequential(torch.nn.LSTM(3, 8), torch.nn.Linear(8, 2)))
    optimizer = torch.optim.Adam(net.parameters())
    for update in tt.updates(
        net, stream, torch.nn.CrossEntropyLoss(), gradient=tt.Truncated(stride=15, horizon=30)
    ):
        optimizer.step()
        optimizer.zero_grad()
        print(update.loss, update.steps)


class Neurons(nn.Module):
    def __init__(self, inputs, n):
        super().__init__()
        self.synapses = nn.Linear(inputs, n)

    def forward(self, x, voltage, current):
        voltage = voltage + 0.2 * (current - voltage)
        current = 0.7 * current + self.synapses(x)
        rate = torch.sigmoid(4 * voltage - 2)
        return rate, voltage * (1 - rate), current


def two_layers_of_currents():
    """Two layers of one class carry a voltage, which reads the current of the step before."""
    torch.manual_seed(59)
    drive = torch.rand(97, 3, 4)
    first, second, readout = Neurons(4, 10), Neurons(10, 6), nn.Linear(6, 4)
    modules = nn.ModuleList([first, second, readout])
    optimizer = torch.optim.Adam(modules.parameters(), lr=5e-3)
    a, b = [torch.zeros(3, 10)] * 2, [torch.zeros(3, 6)] * 2
    for begin in range(0, 96, 12):
        loss = 0.0
        for t in range(begin, begin + 12):
            rate, *a = first(drive[t], *a)
            rate, *b = second(rate, *b)
            loss = loss + nn.functional.mse_loss(readout(rate), drive[t + 1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        a, b = [s.detach() for s in a], [s.detach() for s in b]
