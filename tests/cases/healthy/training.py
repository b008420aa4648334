"""Loops that clip, freeze, validate and share parameters as they should."""

import copy
import warnings

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_


def bidirectional_recordings():
    """A bidirectional layer reads each recording whole, from zeros."""
    torch.manual_seed(51)
    model, out = nn.LSTM(3, 6, bidirectional=True), nn.Linear(12, 3)
    optimizer = torch.optim.Adam([*model.parameters(), *out.parameters()])
    for x in [torch.randn(20, 2, 3).cumsum(0) / 5 for _ in range(8)]:
        optimizer.zero_grad()
        F.mse_loss(out(model(x)[0]), x).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def forward_half_carried():
    """Of a bidirectional layer's state only the forward half goes on."""
    torch.manual_seed(52)
    x = torch.randn(121, 2, 3).cumsum(0) / 8
    model = nn.GRU(3, 6, bidirectional=True)
    optimizer = torch.optim.Adam(model.parameters())
    h = torch.zeros(2, 2, 6)
    for i in range(0, 120, 12):
        y, h = model(x[i : i + 12], h)
        h = torch.cat([h[:1].detach(), torch.zeros(1, 2, 6)])
        optimizer.zero_grad()
        y.square().mean().backward()
        optimizer.step()


def flat_rows_viewed():
    """A linear layer on all rows at once, and the sizes that they had before."""
    torch.manual_seed(53)
    x = torch.randn(96, 4, 3).cumsum(0) / 8
    embed, model = nn.Linear(3, 5), nn.GRU(5, 6)
    optimizer = torch.optim.Adam([*embed.parameters(), *model.parameters()])
    h = torch.zeros(1, 4, 6)
    for chunk in x.split(12):
        z = embed(chunk.reshape(-1, 3)).view(12, 4, 5)
        y, h = model(z, h.detach())
        optimizer.zero_grad()
        y.square().mean().backward()
        optimizer.step()


def frozen_backbone_and_teacher():
    """The optimizer has the head alone, by intention; a teacher gets no gradient at all."""
    torch.manual_seed(54)
    x = torch.randn(121, 2, 3).cumsum(0) / 8
    backbone, head = nn.GRU(3, 6), nn.Linear(6, 3)
    teacher = copy.deepcopy(backbone).eval()
    optimizer = torch.optim.Adam(head.parameters())
    h = g = torch.zeros(1, 2, 6)
    for i in range(0, 120, 12):
        y, h = backbone(x[i : i + 12], h.detach())
        with torch.no_grad():
            z, g = teacher(x[i : i + 12], g)
        optimizer.zero_grad()
        (F.mse_loss(head(y), x[i + 1 : i + 13]) + F.mse_loss(y, z)).backward()
        optimizer.step()


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


def norm_measured_after_the_step():
    """The norm of the gradients is printed, and nothing is clipped."""
    torch.manual_seed(56)
    x = torch.randn(121, 2, 3).cumsum(0) / 8
    model = nn.GRU(3, 3)
    optimizer = torch.optim.Adam(model.parameters())
    h = torch.zeros(1, 2, 3)
    for i in range(0, 120, 12):
        y, h = model(x[i : i + 12], h.detach())
        optimizer.zero_grad()
        F.mse_loss(y, x[i + 1 : i + 13]).backward()
        optimizer.step()
        print(float(clip_grad_norm_(model.parameters(), float("inf"))))


def clipped_at_every_part():
    """Four chunks make one step, and the sum so far is clipped after each."""
    torch.manual_seed(57)
    x = torch.randn(161, 2, 3).cumsum(0) / 8
    model = nn.GRU(3, 3)
    optimizer = torch.optim.Adam(model.parameters())
    h = torch.zeros(1, 2, 3)
    for n, i in enumerate(range(0, 160, 10)):
        y, h = model(x[i : i + 10], h.detach())
        (F.mse_loss(y, x[i + 1 : i + 11]) / 4).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        if n % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()


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


def gradients_collected():
    """Each chunk's gradients are read before they are cleared; a step uses their mean."""
    torch.manual_seed(155)
    x = torch.randn(161, 2, 3).cumsum(0) / 8
    model = nn.GRU(3, 3)
    optimizer = torch.optim.Adam(model.parameters())
    total, h = [0.0 for _ in model.parameters()], torch.zeros(1, 2, 3)
    for i in range(16):
        optimizer.zero_grad()
        y, h = model(x[10 * i : 10 * i + 10], h.detach())
        F.mse_loss(y, x[10 * i + 1 : 10 * i + 11]).backward()
        total = [a + p.grad / 4 for a, p in zip(total, model.parameters(), strict=True)]
        if i % 4 == 3:
            for p, grad in zip(model.parameters(), total, strict=True):
                p.grad = grad
            optimizer.step()
            total = [0.0 for _ in total]


def gradients_collected_by_hooks():
    """The same, where hooks collect them."""
    torch.manual_seed(156)
    x = torch.randn(161, 2, 3).cumsum(0) / 8
    model = nn.GRU(3, 3)
    optimizer = torch.optim.Adam(model.parameters())
    total, h = {}, torch.zeros(1, 2, 3)
    for p in model.parameters():
        p.register_hook(lambda grad, p=p: total.update({p: total.get(p, 0) + grad / 4}))
    for i in range(16):
        optimizer.zero_grad()
        y, h = model(x[10 * i : 10 * i + 10], h.detach())
        F.mse_loss(y, x[10 * i + 1 : 10 * i + 11]).backward()
        if i % 4 == 3:
            for p in model.parameters():
                p.grad = total.pop(p)
            optimizer.step()


def steps_left_out():
    """Some steps are left out, at no interval."""
    torch.manual_seed(157)
    x = torch.randn(161, 2, 3).cumsum(0) / 8
    model = nn.GRU(3, 3)
    optimizer = torch.optim.Adam(model.parameters())
    h = torch.zeros(1, 2, 3)
    for i in range(16):
        optimizer.zero_grad()
        y, h = model(x[10 * i : 10 * i + 10], h.detach())
        F.mse_loss(y, x[10 * i + 1 : 10 * i + 11]).backward()
        if i not in {2, 5, 7, 10, 11}:
            optimizer.step()
