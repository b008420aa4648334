"""Reinforcement learning: one step per call, done and masks, flattened sequences, memories."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .case import Case, chunked, floats, swap

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


def _zeros6(m: nn.Module, x: Tensor) -> Tensor:
    return x.new_zeros(x.size(1), 6)


CASES = [
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
