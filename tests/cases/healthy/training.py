"""Loops that clip, freeze, validate and share parameters as they should."""

import warnings

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_


def critic_with_an_optimizer_of_its_own():
    """Two optimizers take turns; each steps after its own backward, and one starts late."""
    torch.manual_seed(55)
    x = torch.randn(121, 2, 3).cumsum(0) / 8
    actor, critic = nn.GRU(3, 3), nn.Linear(3, 1)
    of_actor = torch.optim.Adam(actor.parameters())
    of_critic = torch.optim.Adam(critic.parameters())
    h = torch.zeros(1, 2, 3)
    for i in range(0, 120, 12):
        y, h = actor(x[i : i + 12], h.detach())
        of_critic.zero_grad()
        F.mse_loss(critic(y.detach())[..., 0], x[i : i + 12].mean(-1)).backward()
        clip_grad_norm_(critic.parameters(), 1.0)
        of_critic.step()
        if i >= 36:
            of_actor.zero_grad()
            F.mse_loss(y, x[i + 1 : i + 13]).backward()
            clip_grad_norm_(actor.parameters(), 1.0)
            of_actor.step()


class Dropped(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.norm, self.drop = nn.GRU(3, 6), nn.BatchNorm1d(6), nn.Dropout(0.2)
        self.out = nn.Linear(6, 3)

    def forward(self, x, h):
        y, h = self.rnn(x, h)
        return self.out(self.drop(self.norm(y.flatten(0, 1)).view(y.shape))), h


def trains_again_after_validation():
    """Each validation ends with train(); at last the statistics of the norm are frozen."""
    torch.manual_seed(58)
    x = torch.randn(121, 2, 3).cumsum(0) / 8
    model = Dropped()
    optimizer = torch.optim.Adam(model.parameters())
    for epoch in range(4):
        h = torch.zeros(1, 2, 6)
        if epoch == 3:
            model.norm.eval()
        for i in range(0, 80, 10):
            y, h = model(x[i : i + 10], h.detach())
            optimizer.zero_grad()
            F.mse_loss(y, x[i + 1 : i + 11]).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            h = torch.zeros(1, 2, 6)
            for i in range(80, 120, 10):
                y, h = model(x[i : i + 10], h)
        model.train()


def fine_tuned_in_evaluation():
    """After a validation, another optimizer trains on, with dropout off by intention."""
    torch.manual_seed(58)
    x = torch.randn(241, 2, 3).cumsum(0) / 8
    model = nn.ModuleList([nn.Dropout(0.2), nn.GRU(3, 6), nn.Linear(6, 3)])
    net = Chained(model)
    for rate in (1e-2, 1e-4):
        optimizer, h = torch.optim.SGD(net.parameters(), rate), torch.zeros(1, 2, 6)
        for i in range(0, 240, 12):
            y, h = net(x[i : i + 12], h.detach())
            optimizer.zero_grad()
            F.mse_loss(y, x[i + 1 : i + 13]).backward()
            optimizer.step()
        net.eval()
        with torch.no_grad():
            print(F.mse_loss(net(x[:-1], torch.zeros(1, 2, 6))[0], x[1:]))


class Chained(nn.Module):
    def __init__(self, parts):
        super().__init__()
        self.parts = parts

    def forward(self, x, h):
        dropout, gru, out = self.parts
        y, h = gru(dropout(x), h)
        return out(y), h


class Elman(nn.Module):
    def __init__(self):
        super().__init__()
        self.data, self.state = nn.Linear(3, 6), nn.Linear(6, 6)
        self.out = nn.Linear(6, 3)

    def forward(self, x, h):
        ys = []
        for step in x:
            h = torch.tanh(self.data(step) + self.state(h))
            ys.append(self.out(h))
        return torch.stack(ys), h


def cleared_by_hand():
    """Gradients are cleared by hand, in a long loop that no layer of torch takes part in."""
    torch.manual_seed(151)
    x = torch.randn(201, 2, 3).cumsum(0) / 8
    model = Elman()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    h = torch.zeros(2, 6)
    for i in range(0, 200, 5):
        y, h = model(x[i : i + 5], h.detach())
        F.mse_loss(y, x[i + 1 : i + 6]).backward()
        optimizer.step()
        for p in model.parameters():
            p.grad.zero_()


def multiplied_by_zero():
    """Gradients are cleared by a product and by an assignment."""
    torch.manual_seed(152)
    x = torch.randn(121, 2, 3).cumsum(0) / 8
    model = nn.GRU(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    h = torch.zeros(1, 2, 3)
    for i in range(0, 120, 10):
        y, h = model(x[i : i + 10], h.detach())
        F.mse_loss(y, x[i + 1 : i + 11]).backward()
        optimizer.step()
        for p in model.parameters():
            if i % 20:
                p.grad *= 0
            else:
                p.grad[:] = 0


def longer_chunks_with_a_new_optimizer():
    """The chunks grow from phase to phase; each phase has an optimizer of its own."""
    torch.manual_seed(153)
    x = torch.randn(121, 2, 3).cumsum(0) / 8
    model = nn.GRU(3, 3)
    for length in (10, 20, 40):
        optimizer = torch.optim.Adam(model.parameters())
        h = torch.zeros(1, 2, 3)
        for i in range(0, 120, length):
            y, h = model(x[i : i + length], h.detach())
            loss = F.mse_loss(y, x[i + 1 : i + length + 1])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def evaluation_without_effect():
    """eval() is not undone, but dropout of 0, or below the only layer, does nothing."""
    torch.manual_seed(154)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Sequential(nn.Dropout(0.0), nn.GRU(3, 3, dropout=0.2))
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(4):
        for x in torch.randn(4, 10, 2, 3):
            optimizer.zero_grad()
            F.mse_loss(model(x)[0], x).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            model(torch.randn(10, 2, 3))
