"""System identification: state-space models, separate h and c, learned initial states."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .case import Case, broadcasts, chunked, floats, stepped, swap

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


class SeparateDefaults(nn.Module):
    """Simulator style: hidden=None, cell=None, time first, two layers."""

    def __init__(self, hidden: int = 5) -> None:
        super().__init__()
        self.hidden = hidden
        self.lstm = nn.LSTM(NU, hidden, 2)
        self.out = nn.Linear(hidden, NY)

    def forward(self, u: Tensor, hidden: Tensor | None = None, cell: Tensor | None = None):
        if hidden is None:
            hidden = torch.zeros(2, u.size(1), self.hidden, dtype=u.dtype)
        if cell is None:
            cell = torch.zeros(2, u.size(1), self.hidden, dtype=u.dtype)
        y, (hidden, cell) = self.lstm(u, (hidden, cell))
        return self.out(y), hidden, cell


def _defaults_step(m: SeparateDefaults, x: Tensor, state):
    y, h, c = m(x) if state is None else m(x, *state)
    return y, (h, c)


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


class LearnedInside(nn.Module):
    """Identification style: learned h0 and c0 handed to the layer at every call, y alone."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.h0 = nn.Parameter(torch.randn(2, 1, hidden) * 0.5)
        self.c0 = nn.Parameter(torch.randn(2, 1, hidden) * 0.5)
        self.lstm = nn.LSTM(NU, hidden, 2)
        self.out = nn.Linear(hidden, NY)

    def forward(self, u: Tensor) -> Tensor:
        lanes = u.size(1)
        start = (self.h0.repeat(1, lanes, 1), self.c0.repeat(1, lanes, 1))
        y, _ = self.lstm(u, start)
        return self.out(y)


def _learned_inside(m: LearnedInside, x: Tensor, state):
    if state is None:
        lanes = x.size(1)
        state = (m.h0.repeat(1, lanes, 1), m.c0.repeat(1, lanes, 1))
    y, state = m.lstm(x, state)
    return m.out(y), state


class StateSpaceStep(nn.Module):
    """Linear state-space style: x+ = Ax + Bu, y = Cx + Du, one step per call."""

    def __init__(self) -> None:
        super().__init__()
        self.A = nn.Linear(NX, NX, bias=False)
        self.B = nn.Linear(NU, NX, bias=False)
        self.C = nn.Linear(NX, NY, bias=False)
        self.D = nn.Linear(NU, NY, bias=False)

    def init_state(self, batch_size: int, device=None) -> Tensor:
        return torch.zeros(batch_size, self.A.in_features, device=device)

    def forward(self, u: Tensor, x: Tensor):
        y = self.C(x) + self.D(u)
        x = self.A(x) + self.B(u)
        return y, x


class NeuralODE(nn.Module):
    """Neural state-space style: Euler steps in forward from a learned x0, state in locals."""

    def __init__(self) -> None:
        super().__init__()
        self.x0 = nn.Parameter(torch.randn(NX) * 0.3)
        self.f = nn.Sequential(nn.Linear(NX + NU, 6), nn.Tanh(), nn.Linear(6, NX))
        self.g = nn.Linear(NX, NY)
        self.dt = 0.2

    def forward(self, u: Tensor) -> Tensor:
        x = self.x0.expand(u.size(0), -1)
        outputs = []
        for t in range(u.size(1)):
            outputs.append(self.g(x))
            x = x + self.dt * self.f(torch.cat([x, u[:, t]], dim=-1))
        return torch.stack(outputs, dim=1)


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


class RandomMethod(nn.Module):
    """Early-tutorial style: init_hidden(batch) draws random numbers, state explicit."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.hidden = hidden
        self.rnn = nn.GRU(NU, hidden)
        self.out = nn.Linear(hidden, NY)

    def init_hidden(self, batch: int) -> Tensor:
        return torch.randn(1, batch, self.hidden)

    def forward(self, u: Tensor, hidden: Tensor):
        y, hidden = self.rnn(u, hidden)
        return self.out(y), hidden


class EncoderStart(nn.Module):
    """Subspace-encoder style: the first 3 steps give the initial state, the rest is simulated."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.encode = nn.Linear(3 * NU, hidden)
        self.rnn = nn.GRU(NU, hidden, batch_first=True)
        self.out = nn.Linear(hidden, NY)

    def forward(self, u: Tensor) -> Tensor:
        past = u[:, :3].flatten(1)
        if past.size(1) < self.encode.in_features:
            past = nn.functional.pad(past, (0, self.encode.in_features - past.size(1)))
        y, _ = self.rnn(u, torch.tanh(self.encode(past)).unsqueeze(0))
        return self.out(y)


class KeywordState(nn.Module):
    """Simulator style: the state is a keyword-only argument."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.rnn = nn.GRU(NU, hidden, batch_first=True)
        self.out = nn.Linear(hidden, NY)

    def forward(self, u: Tensor, *, x0: Tensor | None = None):
        y, x0 = self.rnn(u, x0)
        return self.out(y), x0


def _first(m: nn.Module, x: Tensor, state):
    y, state = m(swap(x), state)
    return swap(y), state


def _keyword_step(m: KeywordState, x: Tensor, state):
    y, state = m(swap(x), x0=state)
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
    Case(
        "separate_h_c_defaults",
        SeparateDefaults,
        floats(NU),
        "carry",
        oracle=chunked(_defaults_step),
    ),
    Case("learned_start", LearnedStart, floats(NU), "carry", oracle=chunked(_first)),
    Case(
        "learned_start_inside",
        LearnedInside,
        floats(NU),
        "carry",
        oracle=chunked(_learned_inside),
        plain=lambda m, x: m(x),
        note="the start is what the module itself hands to its layer, with its gradient",
    ),
    Case(
        "linear_state_space_step",
        StateSpaceStep,
        floats(NU),
        "carry",
        oracle=stepped(lambda m, x, s: m(x, s), lambda m, x: m.init_state(x.size(1))),
        evidence=lambda m, x: broadcasts(m, x, m.init_state(x.size(1))),
        note="broadcasts over (T, B, NU) silently if called with a whole chunk",
    ),
    Case(
        "state_space_buffer_start",
        Residual,
        floats(NU),
        "keyword",
        keywords={"start": lambda m, lanes: m.x0},
        oracle=chunked(_first),
    ),
    Case(
        "keyword_only_state",
        KeywordState,
        floats(NU),
        "carry",
        oracle=chunked(_keyword_step),
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
        "euler_from_learned_x0",
        NeuralODE,
        floats(NU),
        "refuse",
        reason="hidden_state_local",
        also=("no_state",),
        oracle=chunked(lambda m, x, _: (swap(m(swap(x))), None)),
        shows=("chunks",),
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
    Case(
        "random_start_method",
        RandomMethod,
        floats(NU),
        "keyword",
        keywords={"start": lambda lanes: torch.zeros(1, lanes, 6)},
        oracle=chunked(lambda m, x, h: m(x, h), lambda m, x: x.new_zeros(1, x.size(1), 6)),
        note="without the keyword: a random start, or a question; zeros are the keyword's",
    ),
    Case(
        "start_from_first_steps",
        EncoderStart,
        floats(NU),
        "refuse",
        reason="lookahead",
        also=("other",),
        oracle=chunked(lambda m, x, _: (swap(m(swap(x))), None)),
        shows=("chunks", "evidence"),
        evidence=lambda m, x: bool(
            (m(swap(x))[:, 0] - m(swap(torch.cat([x[:1], x[1:] + 1])))[:, 0]).abs().max() > 1e-6
        ),
        note="the first outputs read the first three inputs",
    ),
]
