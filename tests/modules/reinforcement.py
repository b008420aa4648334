"""Reinforcement learning: one step per call, done and masks, flattened sequences, memories."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import Case, chunked, floats, stepped, swap

OBS, ACTIONS = 5, 4


class FlatAgent(nn.Module):
    """Single-file PPO style: flat (T*B, D) observations, done zeroes the state before a step."""

    def __init__(self, units: int = 6) -> None:
        super().__init__()
        self.front = nn.Sequential(nn.Linear(OBS, 7), nn.Tanh())
        self.lstm = nn.LSTM(7, units)
        self.actor = nn.Linear(units, ACTIONS)

    def get_states(self, x: Tensor, lstm_state, done: Tensor):
        lanes = lstm_state[0].size(1)
        frames = self.front(x).reshape(-1, lanes, 7)
        alive = (1.0 - done).reshape(-1, 1, lanes, 1)
        seen = []
        for frame, going in zip(frames, alive, strict=True):
            lstm_state = tuple(going * part for part in lstm_state)
            out, lstm_state = self.lstm(frame[None], lstm_state)
            seen.append(out[0])
        return torch.cat(seen), lstm_state

    def forward(self, x: Tensor, lstm_state, done: Tensor):
        features, lstm_state = self.get_states(x, lstm_state, done)
        return self.actor(features), lstm_state


def _flat_agent(m: FlatAgent, x: Tensor, state, done: Tensor | None = None):
    steps, lanes = x.shape[:2]
    done = x.new_zeros(steps * lanes) if done is None else done.to(x.dtype).flatten()
    y, state = m(x.reshape(steps * lanes, -1), state, done)
    return y.view(steps, lanes, -1), state


def _lstm_zeros(m: nn.Module, x: Tensor):
    return x.new_zeros(1, x.size(1), 6), x.new_zeros(1, x.size(1), 6)


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


class RNNAgent(nn.Module):
    """Multi-agent Q-learning style: GRUCell, hidden reshaped, init_hidden() of one row."""

    def __init__(self, units: int = 6) -> None:
        super().__init__()
        self.units = units
        self.front = nn.Linear(OBS, units)
        self.cell = nn.GRUCell(units, units)
        self.values = nn.Linear(units, ACTIONS)

    def init_hidden(self) -> Tensor:
        return self.front.weight.new_zeros(1, self.units)

    def forward(self, observation: Tensor, hidden_state: Tensor):
        before = hidden_state.reshape(-1, self.units)
        after = self.cell(F.relu(self.front(observation)), before)
        return self.values(after), after


class StepWithDone(nn.Module):
    """Actor style: one observation, (h, c) and done per call."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.hidden_size = hidden
        self.encoder = nn.Sequential(nn.Linear(OBS, 7), nn.ReLU(inplace=True))
        self.cell = nn.LSTMCell(7, hidden)
        self.policy = nn.Linear(hidden, ACTIONS)

    def get_initial_state(self, batch_size: int):
        zeros = torch.zeros(batch_size, self.hidden_size)
        return zeros, zeros.clone()

    def forward(self, obs: Tensor, state, done: Tensor):
        h, c = state
        keep = (~done.bool()).to(h.dtype).unsqueeze(-1)
        h, c = self.cell(self.encoder(obs), (h * keep, c * keep))
        return self.policy(h), (h, c)


def _done_step(m: StepWithDone, x: Tensor, state):
    return m(x, state, torch.zeros(len(x), dtype=torch.bool))


def _with_done(m: StepWithDone, x: Tensor, starts: Tensor) -> Tensor:
    state, outputs = m.get_initial_state(x.size(1)), []
    for frame, done in zip(x, starts, strict=True):
        y, state = m(frame, state, done)
        outputs.append(y)
    return torch.stack(outputs)


class IsFirstAgent(nn.Module):
    """World-model style: batch-first sequences, is_first resets the carry, dict-free."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.hidden = hidden
        self.cell = nn.GRUCell(OBS, hidden)
        self.head = nn.Linear(hidden, ACTIONS)

    def initial(self, batch_size: int) -> Tensor:
        return torch.zeros(batch_size, self.hidden)

    def forward(self, obs: Tensor, carry: Tensor, is_first: Tensor):
        outputs = []
        for t in range(obs.shape[1]):
            carry = torch.where(is_first[:, t, None].bool(), torch.zeros_like(carry), carry)
            carry = self.cell(obs[:, t], carry)
            outputs.append(self.head(carry))
        return torch.stack(outputs, 1), carry


def _is_first(m: IsFirstAgent, x: Tensor, state, starts: Tensor | None = None):
    starts = torch.zeros(x.shape[:2], dtype=torch.bool) if starts is None else starts
    y, state = m(swap(x), state, swap(starts))
    return swap(y), state


class PolicyMemory(nn.Module):
    """Robot-learning style: hidden states in an attribute, one step per call, reset(dones)."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.rnn = nn.LSTM(OBS, hidden, num_layers=1)
        self.actor = nn.Sequential(nn.Linear(hidden, 7), nn.ELU(), nn.Linear(7, ACTIONS))
        self.hidden_states = None

    def forward(self, observations: Tensor) -> Tensor:
        out, self.hidden_states = self.rnn(observations.unsqueeze(0), self.hidden_states)
        return self.actor(out.squeeze(0))

    def reset(self, dones: Tensor | None = None) -> None:
        if dones is None:
            self.hidden_states = None
        elif self.hidden_states is not None:
            for state in self.hidden_states:
                state[..., dones, :] = 0.0


def _memory_start(m: PolicyMemory, x: Tensor) -> None:
    m.reset()


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


class ValueMethod(nn.Module):
    """Actor-critic style whose policy is a method of its own: pi(obs, h)."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.body = nn.GRU(OBS, hidden)
        self.policy = nn.Linear(hidden, ACTIONS)
        self.value = nn.Linear(hidden, 1)

    def pi(self, obs: Tensor, hidden: Tensor):
        x, hidden = self.body(obs, hidden)
        return F.log_softmax(self.policy(x), dim=-1), hidden

    def v(self, obs: Tensor, hidden: Tensor) -> Tensor:
        x, _ = self.body(obs, hidden)
        return self.value(x)


class DecisionTransformer(nn.Module):
    """Decision-transformer style: causal self-attention over the steps of the call."""

    def __init__(self, dim: int = 6) -> None:
        super().__init__()
        self.embed = nn.Linear(OBS, dim)
        layer = nn.TransformerEncoderLayer(dim, 2, 8, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)
        self.act = nn.Linear(dim, ACTIONS)

    def forward(self, obs: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(obs.size(1), dtype=obs.dtype)
        return self.act(self.encoder(self.embed(obs), mask=mask))


class PreviousAction(nn.Module):
    """Meta-learning style: the last (soft) action is part of the input and so of the state."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.hidden = hidden
        self.cell = nn.GRUCell(OBS + ACTIONS, hidden)
        self.pi = nn.Linear(hidden, ACTIONS)

    def initial_state(self, batch_size: int):
        return torch.zeros(batch_size, self.hidden), torch.zeros(batch_size, ACTIONS)

    def forward(self, obs: Tensor, state):
        h, action = state
        h = self.cell(torch.cat([obs, action], dim=-1), h)
        action = torch.softmax(self.pi(h), dim=-1)
        return action, (h, action)


def _zeros6(m: nn.Module, x: Tensor) -> Tensor:
    return x.new_zeros(x.size(1), 6)


CASES = [
    Case(
        "ppo_flat_done",
        FlatAgent,
        floats(OBS),
        "carry",
        oracle=chunked(_flat_agent, _lstm_zeros),
        done=lambda m, x, starts: _flat_agent(m, x, _lstm_zeros(m, x), starts)[0],
        note="flat input and output, done as floats (T*B,)",
    ),
    Case(
        "masked_base",
        MaskedBase,
        floats(OBS),
        "carry",
        oracle=chunked(_masked, _zeros6),
        done=lambda m, x, starts: _masked(m, x, _zeros6(m, x), starts)[0],
        note="masks are inverted: 1 goes on; (T*N, 1)",
    ),
    Case(
        "gru_agent_step",
        RNNAgent,
        floats(OBS),
        "carry",
        oracle=stepped(lambda m, x, h: m(x, h), lambda m, x: m.init_hidden().expand(x.size(1), -1)),
        note="init_hidden() gives one row",
    ),
    Case(
        "step_with_done",
        StepWithDone,
        floats(OBS),
        "carry",
        oracle=stepped(_done_step, lambda m, x: m.get_initial_state(x.size(1))),
        done=_with_done,
    ),
    Case(
        "is_first_sequences",
        IsFirstAgent,
        floats(OBS),
        "carry",
        oracle=chunked(_is_first, lambda m, x: m.initial(x.size(1))),
        done=lambda m, x, starts: _is_first(m, x, m.initial(x.size(1)), starts)[0],
        note="start method named initial()",
    ),
    Case(
        "policy_memory_attribute",
        PolicyMemory,
        floats(OBS),
        "carry",
        oracle=stepped(lambda m, x, _: (m(x), None), _memory_start),
    ),
    Case(
        "actor_critic_tuple",
        ActorCritic,
        floats(OBS),
        "keyword",
        keywords={"output": 0},
        oracle=chunked(_actor_step),
    ),
    Case(
        "dict_agent",
        DictAgent,
        floats(OBS),
        "keyword",
        keywords={"output": "logits"},
        oracle=chunked(_dict_step),
        note="the state comes back under the name of its parameter",
    ),
    Case(
        "policy_method",
        ValueMethod,
        floats(OBS),
        "keyword",
        keywords={"call": lambda m, x, h: m.pi(x, h)},
        oracle=chunked(lambda m, x, h: m.pi(x, h), lambda m, x: x.new_zeros(1, x.size(1), 6)),
        note="no forward at all",
    ),
    Case(
        "previous_action",
        PreviousAction,
        floats(OBS),
        "carry",
        oracle=stepped(lambda m, x, s: m(x, s), lambda m, x: m.initial_state(x.size(1))),
        note="the output is one of the state's leaves",
    ),
    Case(
        "decision_transformer",
        DecisionTransformer,
        floats(OBS),
        "refuse",
        reason="attention",
        oracle=chunked(lambda m, x, _: (swap(m(swap(x))), None)),
        shows=("chunks",),
        note="causal, but over all the steps of a call",
    ),
]
