"""Reinforcement learning and spiking nets."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from .case import Case, chunked, floats, stepped, swap

OBS, ACTIONS = 5, 4


class MaskedBase(nn.Module):
    """A2C-PPO-collection style: masks are 1 where an episode goes on; one step or T*N rows."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.hidden = hidden
        self.gru = nn.GRU(OBS, hidden)
        self.head = nn.Linear(hidden, ACTIONS)

    def forward(self, inputs: Tensor, rnn_hxs: Tensor, masks: Tensor):
        if inputs.size(0) == rnn_hxs.size(0):
            x, rnn_hxs = self.gru(inputs.unsqueeze(0), (rnn_hxs * masks).unsqueeze(0))
            return self.head(x.squeeze(0)), rnn_hxs.squeeze(0)
        lanes = rnn_hxs.size(0)
        steps = inputs.size(0) // lanes
        x = inputs.view(steps, lanes, -1)
        masks = masks.view(steps, lanes, 1)
        outputs = []
        for t in range(steps):
            out, hxs = self.gru(x[t : t + 1], (rnn_hxs * masks[t]).unsqueeze(0))
            rnn_hxs = hxs.squeeze(0)
            outputs.append(out)
        return self.head(torch.cat(outputs).view(steps * lanes, -1)), rnn_hxs


def _masked(m: MaskedBase, x: Tensor, state, starts: Tensor | None = None):
    steps, lanes = x.shape[:2]
    masks = x.new_ones(steps * lanes, 1)
    if starts is not None:
        masks = 1 - starts.to(x.dtype).reshape(-1, 1)
    y, state = m(x.reshape(steps * lanes, -1), state, masks)
    return y.view(steps, lanes, -1), state


class ActorCritic(nn.Module):
    """Recurrent actor-critic style: logits, value and (h, c) come back together."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.lstm = nn.LSTM(OBS, hidden)
        self.actor, self.critic = nn.Linear(hidden, ACTIONS), nn.Linear(hidden, 1)

    def forward(self, obs: Tensor, state=None):
        x, state = self.lstm(obs, state)
        return self.actor(x), self.critic(x), state


def _actor_step(m: ActorCritic, x: Tensor, state):
    logits, _, state = m(x, state)
    return logits, state


class DictAgent(nn.Module):
    """RL-library style: a dict comes back, its keys name the logits, the value and the state."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.gru = nn.GRU(OBS, hidden, batch_first=True)
        self.pi, self.vf = nn.Linear(hidden, ACTIONS), nn.Linear(hidden, 1)

    def forward(self, obs: Tensor, state: Tensor | None = None) -> dict[str, Tensor]:
        x, state = self.gru(obs, state)
        return {"logits": self.pi(x), "value": self.vf(x).squeeze(-1), "state": state}


def _dict_step(m: DictAgent, x: Tensor, state):
    out = m(swap(x), state)
    return swap(out["logits"]), out["state"]


def _zeros6(m: nn.Module, x: Tensor) -> Tensor:
    return x.new_zeros(x.size(1), 6)


CASES = [
    # Masks are inverted: 1 goes on; (T*N, 1).
    Case(
        "masked_base",
        MaskedBase,
        floats(OBS),
        "carry",
        oracle=chunked(_masked, _zeros6),
    ),
    Case(
        "actor_critic_tuple",
        ActorCritic,
        floats(OBS),
        "keyword",
        keywords={"output": 0},
        oracle=chunked(_actor_step),
    ),
    # The state comes back under the name of its parameter.
    Case(
        "dict_agent",
        DictAgent,
        floats(OBS),
        "keyword",
        keywords={"output": "logits"},
        oracle=chunked(_dict_step),
    ),
]


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


def _recorded_step(m: RecordedNet, x: Tensor, state):
    mem1, mem2 = state
    spk1, mem1 = m.lif1(2 * m.fc1(x), mem1)
    _, mem2 = m.lif2(m.fc2(spk1), mem2)
    return mem2, (mem1, mem2)


def _recorded_start(m: RecordedNet, x: Tensor):
    return m.lif1.init_leaky(), m.lif2.init_leaky()


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


CASES += [
    # One step per call; a whole chunk broadcasts silently; spikes as outputs.
    Case(
        "leaky_elementwise",
        LeakyLayer,
        floats(D),
        "carry",
        oracle=stepped(lambda m, x, s: m(x, s), lambda m, x: m.init_leaky(x.size(1))),
    ),
    # Voltages are attributes of submodules and plain numbers before the first step.
    Case(
        "nodes_with_voltage",
        NodeNet,
        floats(D),
        "carry",
        oracle=stepped(lambda m, x, _: (m(x), None), _node_start),
    ),
    # Two recordings of one shape; state in locals, through the neurons.
    Case(
        "recorded_spikes",
        RecordedNet,
        floats(D),
        "keyword",
        keywords={
            "call": _recorded_step,
            "start": lambda m, lanes: (torch.zeros(lanes, 8), torch.zeros(lanes, 4)),
        },
        oracle=stepped(_recorded_step, _recorded_start),
    ),
    # The first input reaches the output two steps later.
    Case(
        "current_named_tuples",
        CurrentNet,
        floats(D),
        "carry",
        oracle=chunked(lambda m, x, s: m(x, s)),
    ),
]
