"""System identification: state-space models, separate h and c, learned initial states."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .case import Case, chunked, floats, stepped, swap

NU, NX, NY = 2, 4, 3


class SeparateStates(nn.Module):
    """Deployment style: h and c as separate arguments, all three come back."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.lstm = nn.LSTM(NU, hidden, batch_first=True)
        self.out = nn.Linear(hidden, NY)

    def forward(self, u: Tensor, h: Tensor, c: Tensor):
        y, (h, c) = self.lstm(u, (h, c))
        return self.out(y), h, c


def _separate_step(m: SeparateStates, x: Tensor, state):
    y, h, c = m(swap(x), *state)
    return swap(y), (h, c)


class LearnedStart(nn.Module):
    """Identification style: a learned initial state, used when none is given."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.rnn = nn.GRU(NU, hidden, batch_first=True)
        self.h0 = nn.Parameter(torch.randn(1, 1, hidden) * 0.5)
        self.out = nn.Linear(hidden, NY)

    def forward(self, u: Tensor, state: Tensor | None = None):
        if state is None:
            state = self.h0.expand(-1, u.size(0), -1).contiguous()
        y, state = self.rnn(u, state)
        return self.out(y), state


class Simulator(nn.Module):
    """Simulation-library style: forward(x_0, u) returns the trajectory of states."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Sequential(nn.Linear(NX + NU, 6), nn.Tanh(), nn.Linear(6, NX))

    def forward(self, x_0: Tensor, u: Tensor) -> Tensor:
        x_step, trajectory = x_0, []
        for u_step in u.split(1):
            trajectory.append(x_step)
            x_step = x_step + self.f(torch.cat([x_step, u_step[0]], dim=-1))
        return torch.stack(trajectory)


class Residual(nn.Module):
    """State-space style with the state second and batch-first sequences: (y, x) back."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Sequential(nn.Linear(NX + NU, 6), nn.Tanh(), nn.Linear(6, NX))
        self.g = nn.Linear(NX + NU, NY)
        self.register_buffer("x0", torch.full((NX,), 0.1))

    def forward(self, u: Tensor, x: Tensor | None = None):
        if x is None:
            x = self.x0.expand(u.shape[0], -1)
        outputs = []
        for u_t in u.unbind(1):
            z = torch.cat([x, u_t], dim=-1)
            outputs.append(self.g(z))
            x = x + 0.3 * self.f(z)
        return torch.stack(outputs, 1), x


class Autoregressive(nn.Module):
    """NARX style: the next output is predicted from the input and the last output."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(NU + NY, 6), nn.Tanh(), nn.Linear(6, NY))

    def forward(self, u: Tensor, y_prev: Tensor) -> Tensor:
        return y_prev + self.net(torch.cat([u, y_prev], dim=-1))


def _autoregressive_step(m: Autoregressive, x: Tensor, y: Tensor):
    y = m(x, y)
    return y, y


class RandomStart(nn.Module):
    """Early-tutorial style: random initial states drawn at every call."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.hidden = hidden
        self.lstm = nn.LSTM(NU, hidden, batch_first=True)
        self.out = nn.Linear(hidden, NY)

    def forward(self, u: Tensor) -> Tensor:
        h0 = torch.randn(1, u.size(0), self.hidden)
        c0 = torch.randn(1, u.size(0), self.hidden)
        y, _ = self.lstm(u, (h0, c0))
        return self.out(y)


def _first(m: nn.Module, x: Tensor, state):
    y, state = m(swap(x), state)
    return swap(y), state


CASES = [
    Case(
        "separate_h_c",
        SeparateStates,
        floats(NU),
        "carry",
        oracle=chunked(
            _separate_step,
            lambda m, x: (x.new_zeros(1, x.size(1), 6), x.new_zeros(1, x.size(1), 6)),
        ),
    ),
    Case("learned_start", LearnedStart, floats(NU), "carry", oracle=chunked(_first)),
    Case(
        "state_space_buffer_start",
        Residual,
        floats(NU),
        "keyword",
        keywords={"start": lambda m, lanes: m.x0},
        oracle=chunked(_first),
    ),
    Case(
        "narx_output_is_state",
        Autoregressive,
        floats(NU),
        "keyword",
        keywords={"start": lambda lanes: torch.zeros(lanes, NY)},
        oracle=stepped(_autoregressive_step, lambda m, x: x.new_zeros(x.size(1), NY)),
        note="one tensor comes back: output and state at once; its size is the module's secret",
    ),
    Case(
        "simulator_state_first",
        Simulator,
        floats(NU),
        "refuse",
        reason="hidden_state_local",
        also=("other", "ambiguous_output", "no_state", "ignored_state"),
        oracle=chunked(lambda m, x, _: (m(x.new_zeros(x.size(1), NX), x), None)),
        shows=("chunks",),
        note="the state after the last step never comes back",
    ),
    Case(
        "random_start_inside",
        RandomStart,
        floats(NU),
        "refuse",
        reason="random",
        also=("other",),
        oracle=chunked(lambda m, x, _: (swap(m(swap(x))), None)),
        shows=("random",),
        note="could be carried from a start that the user gives",
    ),
]
