"""Spiking nets: membranes and currents as arguments, decay beta, init_leaky, attributes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from .case import Case, broadcasts, chunked, floats, stepped, swap

D = 5


class Spike(torch.autograd.Function):
    """A step forward, a fast sigmoid's slope backward."""

    @staticmethod
    def forward(ctx, potential: Tensor) -> Tensor:
        ctx.save_for_backward(potential)
        return (potential > 0).to(potential.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (potential,) = ctx.saved_tensors
        return grad / (1 + 5 * potential.abs()) ** 2


class Leaky(nn.Module):
    """A leaky integrate-and-fire neuron: (current, mem) to (spike, mem), reset by subtraction."""

    def __init__(self, beta: float, threshold: float = 0.5) -> None:
        super().__init__()
        self.beta = nn.Parameter(torch.tensor(beta))
        self.threshold = threshold

    @staticmethod
    def init_leaky() -> Tensor:
        return torch.zeros(1)

    def forward(self, current: Tensor, mem: Tensor):
        reset = Spike.apply(mem - self.threshold).detach()
        mem = self.beta * mem + current - reset * self.threshold
        return Spike.apply(mem - self.threshold), mem


class TwoLeaky(nn.Module):
    """Spiking-library style: mem1 and mem2 as arguments, all come back, one step per call."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.lif1 = nn.Linear(D, 9), Leaky(0.9, 0.3)
        self.fc2, self.lif2 = nn.Linear(9, 8), Leaky(0.8, 0.3)
        nn.init.normal_(self.fc1.weight)
        nn.init.normal_(self.fc2.weight)

    def init_leaky(self) -> tuple[Tensor, Tensor]:
        return self.lif1.init_leaky(), self.lif2.init_leaky()

    def forward(self, x: Tensor, mem1: Tensor, mem2: Tensor):
        spk1, mem1 = self.lif1(self.fc1(x), mem1)
        spk2, mem2 = self.lif2(self.fc2(spk1), mem2)
        return spk2, mem1, mem2


def _two_leaky_step(m: TwoLeaky, x: Tensor, state):
    spk, mem1, mem2 = m(x, *state)
    return spk, (mem1, mem2)


class LeakyLayer(nn.Module):
    """One elementwise neuron with a beta per channel: works on any shape it is given."""

    def __init__(self, channels: int = D) -> None:
        super().__init__()
        self.beta = nn.Parameter(torch.linspace(0.5, 0.9, channels))
        self.gain = nn.Parameter(torch.ones(channels))

    def init_leaky(self, batch_size: int) -> Tensor:
        return torch.zeros(batch_size, self.beta.numel())

    def forward(self, input_: Tensor, mem: Tensor):
        mem = self.beta * mem + self.gain * input_
        spk = Spike.apply(mem - 0.5)
        return spk, mem - 0.5 * spk


class LeakyReadout(nn.Module):
    """Elementwise leaky integrator before a Linear: broadcasts over (T, B, D) silently."""

    def __init__(self, channels: int = D) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.linspace(-1.0, 2.0, channels))
        self.readout = nn.Linear(channels, 3)

    def forward(self, x: Tensor, mem: Tensor | None = None):
        if mem is None:
            mem = torch.zeros_like(x)
        keep = torch.sigmoid(self.decay)
        mem = keep * mem + (1 - keep) * x
        return self.readout(torch.tanh(mem)), mem


class SynapticNet(nn.Module):
    """Second-order neuron style: synaptic current and membrane, alpha and beta."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.hidden = hidden
        self.fc = nn.Linear(D, hidden)
        nn.init.normal_(self.fc.weight)
        self.alpha, self.beta = 0.9, 0.8
        self.out = nn.Linear(hidden, 3)

    def init_synaptic(self, batch_size: int) -> tuple[Tensor, Tensor]:
        zeros = torch.zeros(batch_size, self.hidden)
        return zeros, zeros.clone()

    def forward(self, x: Tensor, syn: Tensor, mem: Tensor):
        syn = self.alpha * syn + self.fc(x)
        mem = self.beta * mem + syn
        spk = Spike.apply(mem - 0.5)
        mem = mem * (1 - spk.detach())
        return self.out(spk), syn, mem


def _synaptic_step(m: SynapticNet, x: Tensor, state):
    y, syn, mem = m(x, *state)
    return y, (syn, mem)


class LIFNode(nn.Module):
    """A neuron that keeps its voltage in an attribute, a plain number at first."""

    def __init__(self, tau: float = 2.0) -> None:
        super().__init__()
        self.tau = tau
        self.v: float | Tensor = 0.0

    def reset(self) -> None:
        self.v = 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.v = self.v + (x - self.v) / self.tau
        spike = Spike.apply(self.v - 0.4)
        self.v = self.v * (1 - spike)
        return spike


class NodeNet(nn.Module):
    """Stateful-neuron library style: voltages in the nodes' attributes, reset between samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(D, 8), LIFNode(), nn.Linear(8, 6), LIFNode(3.0))
        with torch.no_grad():
            self.layers[0].weight *= 3
            self.layers[2].weight *= 3

    def reset(self) -> None:
        for layer in self.layers:
            if hasattr(layer, "reset"):
                layer.reset()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def _node_start(m: NodeNet, x: Tensor) -> None:
    m.reset()


class RecordedNet(nn.Module):
    """Spiking-tutorial style: a loop over the steps, spikes and membranes recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.lif1 = nn.Linear(D, 8), Leaky(0.9)
        self.fc2, self.lif2 = nn.Linear(8, 4), Leaky(0.8)

    def forward(self, x: Tensor):
        below, above = self.lif1.init_leaky(), self.lif2.init_leaky()
        spikes, membranes = [], []
        for frame in x:
            spike, below = self.lif1(2 * self.fc1(frame), below)
            spike, above = self.lif2(self.fc2(spike), above)
            spikes.append(spike)
            membranes.append(above)
        return torch.stack(spikes), torch.stack(membranes)


class MembraneNet(RecordedNet):
    """Spiking-regression style: the loop returns the last layer's membranes only."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)[1]


def _recorded_step(m: RecordedNet, x: Tensor, state):
    mem1, mem2 = state
    spk1, mem1 = m.lif1(2 * m.fc1(x), mem1)
    _, mem2 = m.lif2(m.fc2(spk1), mem2)
    return mem2, (mem1, mem2)


def _recorded_start(m: RecordedNet, x: Tensor):
    return m.lif1.init_leaky(), m.lif2.init_leaky()


class StaticInput(nn.Module):
    """Image-classification style: the same frame is shown for 5 inner steps at every call."""

    def __init__(self, num_steps: int = 5) -> None:
        super().__init__()
        self.num_steps = num_steps
        self.fc, self.lif = nn.Linear(D, 4), Leaky(0.9)

    def forward(self, x: Tensor) -> Tensor:
        mem = self.lif.init_leaky()
        total = 0
        for _ in range(self.num_steps):
            spk, mem = self.lif(self.fc(x), mem)
            total = total + spk
        return total + 0.1 * mem


class LIFState(NamedTuple):
    """Voltage and current of a layer."""

    v: Tensor
    i: Tensor


class CurrentLIF(nn.Module):
    """Functional-spiking style: a NamedTuple of voltage and current, made when None."""

    def __init__(self, inputs: int, size: int) -> None:
        super().__init__()
        self.inp = nn.Linear(inputs, size, bias=False)
        self.rec = nn.Linear(size, size, bias=False)
        nn.init.normal_(self.inp.weight, std=2.0)

    def forward(self, x: Tensor, state: LIFState | None = None):
        if state is None:
            zeros = x.new_zeros(x.size(0), self.rec.in_features)
            state = LIFState(v=zeros, i=zeros)
        v = state.v + 0.3 * (state.i - state.v)
        z = Spike.apply(v - 0.2)
        v = (1 - z) * v
        i = 0.8 * state.i + self.inp(x) + self.rec(z)
        return z, LIFState(v=v, i=i)


class CurrentNet(nn.Module):
    """Functional-spiking style: time first, a list of NamedTuple states, leaky readout."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList([CurrentLIF(D, 8), CurrentLIF(8, 6)])
        self.readout = nn.Linear(6, 3)

    def forward(self, x: Tensor, states: list[LIFState | None] | None = None):
        states = [None] * len(self.cells) if states is None else list(states)
        outputs = []
        for frame in x:
            for i, cell in enumerate(self.cells):
                frame, states[i] = cell(frame, states[i])
            outputs.append(self.readout(frame + 0.1 * states[-1].v))
        return torch.stack(outputs), states


class Adaptive(nn.Module):
    """Adaptive-threshold style: a dict of membrane, adaptation and spikes; batch first."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.hidden = hidden
        self.inp = nn.Linear(D, hidden)
        self.rec = nn.Linear(hidden, hidden, bias=False)
        self.out = nn.Linear(hidden, 3)

    def zero_state(self, batch_size: int) -> dict[str, Tensor]:
        return {k: torch.zeros(batch_size, self.hidden) for k in ("mem", "b", "spk")}

    def forward(self, x: Tensor, state: dict[str, Tensor] | None = None):
        if state is None:
            state = self.zero_state(x.size(0))
        outputs = []
        for t in range(x.size(1)):
            b = 0.9 * state["b"] + 0.1 * state["spk"]
            threshold = 0.3 + 1.8 * b
            mem = 0.8 * state["mem"] + self.inp(x[:, t]) + self.rec(state["spk"])
            mem = mem - threshold * state["spk"]
            spk = Spike.apply(mem - threshold)
            state = {"mem": mem, "b": b, "spk": spk}
            outputs.append(self.out(spk + 0.1 * mem))
        return torch.stack(outputs, 1), state


def _first(m: nn.Module, x: Tensor, state):
    y, state = m(swap(x), state)
    return swap(y), state


CASES = [
    Case(
        "two_leaky_step",
        TwoLeaky,
        floats(D),
        "carry",
        oracle=stepped(_two_leaky_step, lambda m, x: m.init_leaky()),
        note="starts of one number that broadcast; two state arguments; spikes as outputs",
    ),
    Case(
        "leaky_elementwise",
        LeakyLayer,
        floats(D),
        "carry",
        oracle=stepped(lambda m, x, s: m(x, s), lambda m, x: m.init_leaky(x.size(1))),
        evidence=lambda m, x: broadcasts(m, x, m.init_leaky(x.size(1))),
        note="one step per call; a whole chunk broadcasts silently; spikes as outputs",
    ),
    Case(
        "leaky_readout_elementwise",
        LeakyReadout,
        floats(D),
        "carry",
        oracle=stepped(lambda m, x, s: m(x, s)),
        evidence=lambda m, x: broadcasts(m, x, None),
        note="zeros_like(x) as a start: a whole chunk runs through without recurrence",
    ),
    Case(
        "synaptic_step",
        SynapticNet,
        floats(D),
        "carry",
        oracle=stepped(_synaptic_step, lambda m, x: m.init_synaptic(x.size(1))),
        note="start method init_synaptic",
    ),
    Case(
        "nodes_with_voltage",
        NodeNet,
        floats(D),
        "carry",
        oracle=stepped(lambda m, x, _: (m(x), None), _node_start),
        note="voltages are attributes of submodules and plain numbers before the first step",
    ),
    Case(
        "recorded_spikes",
        RecordedNet,
        floats(D),
        "keyword",
        keywords={"output": 1},
        oracle=stepped(_recorded_step, _recorded_start),
        plain=lambda m, x: m(x)[1],
        note="two recordings of one shape; state in locals, through the neurons",
    ),
    Case(
        "recorded_membranes",
        MembraneNet,
        floats(D),
        "carry",
        oracle=stepped(_recorded_step, _recorded_start),
        plain=lambda m, x: m(x),
        note="state in locals, carried by data flow through the neurons",
    ),
    Case(
        "current_named_tuples",
        CurrentNet,
        floats(D),
        "carry",
        oracle=chunked(lambda m, x, s: m(x, s)),
        note="the first input reaches the output two steps later",
    ),
    Case("adaptive_dict", Adaptive, floats(D), "carry", oracle=chunked(_first)),
    Case(
        "static_input_repeated",
        StaticInput,
        floats(D),
        "refuse",
        reason="no_state",
        also=("hidden_state_local",),
        oracle=stepped(lambda m, x, _: (m(x), None)),
        shows=("no_state",),
        note="the inner steps are no time of the stream",
    ),
]
