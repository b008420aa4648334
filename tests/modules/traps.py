"""Second parameters that are no state, outputs that look like one, coinciding sizes, slips."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import Case, chunked, floats, prefixes, stepped, swap, tokens

D = 3
V = 11


class WithTargets(nn.Module):
    """Small-GPT style around a GRU: forward(idx, targets=None) gives (logits, loss)."""

    def __init__(self, dim: int = 5, hidden: int = 6) -> None:
        super().__init__()
        self.wte = nn.Embedding(V, dim)
        self.gru = nn.GRU(dim, hidden, batch_first=True)
        self.lm_head = nn.Linear(hidden, V)

    def forward(self, idx: Tensor, targets: Tensor | None = None):
        x, _ = self.gru(self.wte(idx))
        logits = self.lm_head(x)
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1))
        return logits, loss


class LastWithTargets(WithTargets):
    """Small-GPT style: without targets only the last step goes through the head, (B, 1, V)."""

    def forward(self, idx: Tensor, targets: Tensor | None = None):
        x, _ = self.gru(self.wte(idx))
        if targets is not None:
            logits = self.lm_head(x)
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1))
        else:
            logits, loss = self.lm_head(x[:, [-1], :]), None
        return logits, loss


def _targets_step(m: WithTargets, x: Tensor, state):
    y, state = m.gru(m.wte(swap(x)), state)
    return swap(m.lm_head(y)), state


class OptionalMask(nn.Module):
    """Tagging style: mask=None multiplies the outputs, no state in or out."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.lstm = nn.LSTM(D, hidden)
        self.fc = nn.Linear(hidden, 2)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y, _ = self.lstm(x)
        if mask is not None:
            y = y * mask.unsqueeze(-1)
        return self.fc(y)


def _mask_step(m: OptionalMask, x: Tensor, state):
    y, state = m.lstm(x, state)
    return m.fc(y), state


class GateOutput(nn.Module):
    """An auxiliary output (B, D) of the size of the optional mask: no state, though it fits."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.gru = nn.GRU(D, hidden, batch_first=True)
        self.fc, self.gate = nn.Linear(hidden, 2), nn.Linear(hidden, D)

    def forward(self, x: Tensor, mask: Tensor | None = None):
        if mask is not None:
            x = x * mask.unsqueeze(1)
        y, h = self.gru(x)
        return self.fc(y), torch.sigmoid(self.gate(h[-1]))


def _gate_step(m: GateOutput, x: Tensor, state):
    y, state = m.gru(swap(x), state)
    return swap(m.fc(y)), state


class HiddenAside(nn.Module):
    """Encoder style: (outputs, hidden) come back, but no hidden can be given."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.gru = nn.GRU(D, hidden, batch_first=True)
        self.fc = nn.Linear(hidden, 2)

    def forward(self, x: Tensor):
        y, hidden = self.gru(x)
        return self.fc(y), hidden


class MeanAndScale(nn.Module):
    """Probabilistic-forecast style: a mean and a deviation of one shape, zeros inside."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.lstm = nn.LSTM(D, hidden, batch_first=True)
        self.mu, self.sigma = nn.Linear(hidden, 2), nn.Linear(hidden, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, _ = self.lstm(x)
        return self.mu(y), F.softplus(self.sigma(y))


def _mean_step(m: MeanAndScale, x: Tensor, state):
    y, state = m.lstm(swap(x), state)
    return swap(F.softplus(m.sigma(y))), state


class ListOutput(nn.Module):
    """Loop style: the outputs come back as a Python list of (B, C), one entry a step."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.cell = nn.GRUCell(D, hidden)
        self.fc = nn.Linear(hidden, 2)

    def forward(self, x: Tensor, h: Tensor) -> tuple[list[Tensor], Tensor]:
        outputs = []
        for frame in x:
            h = self.cell(frame, h)
            outputs.append(self.fc(h))
        return outputs, h


class ForgottenState(nn.Module):
    """A slip: forward(x, h) returns a state but never hands h to the layer."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.gru = nn.GRU(D, hidden)
        self.fc = nn.Linear(hidden, 2)

    def forward(self, x: Tensor, h: Tensor | None = None):
        y, h = self.gru(x)
        return self.fc(y), h


class OverwrittenState(nn.Module):
    """A slip: the state argument is set to zeros before the loop, the last one comes back."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.W, self.U = nn.Linear(D, hidden), nn.Linear(hidden, hidden)
        self.fc = nn.Linear(hidden, 2)

    def forward(self, x: Tensor, h: Tensor):
        h = torch.zeros_like(h)
        outputs = []
        for frame in x:
            h = torch.tanh(self.W(frame) + self.U(h))
            outputs.append(self.fc(h))
        return torch.stack(outputs), h


def _ignores(m: nn.Module, x: Tensor, *shape: int) -> bool:
    """Whether two different states give the same outputs."""
    one, two = (m(x, torch.randn(*shape))[0] for _ in range(2))
    return bool((one - two).abs().max() == 0)


class HalfDetached(nn.Module):
    """Truncation style: the cell state is detached inside, the hidden state is not."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.lstm = nn.LSTM(D, hidden)
        self.fc = nn.Linear(hidden, 2)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]):
        h, c = state
        y, state = self.lstm(x, (h, c.detach()))
        return self.fc(y), state


class SlowTrace(nn.Module):
    """Slow-memory style: a trace detached at every step, so chunks lose nothing more."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.hidden = hidden
        self.front = nn.Linear(D, hidden)
        self.fc = nn.Linear(2 * hidden, 2)

    def init_state(self, batch_size: int) -> Tensor:
        return torch.zeros(batch_size, self.hidden)

    def forward(self, x: Tensor, trace: Tensor):
        outputs = []
        for frame in x:
            z = torch.tanh(self.front(frame))
            trace = (0.8 * trace + 0.2 * z).detach()
            outputs.append(self.fc(torch.cat([z, trace], -1)))
        return torch.stack(outputs), trace


class StepMLP(nn.Module):
    """No recurrence at all: the same net on every step, with the name of a recurrent one."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.rnn = nn.Sequential(nn.Linear(D, hidden), nn.Tanh())
        self.fc = nn.Linear(hidden, 2)

    def forward(self, x: Tensor, hidden: Tensor | None = None):
        return self.fc(self.rnn(x)), hidden


class Centred(nn.Module):
    """A slip: the mean over the lanes is taken out of every step."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.gru = nn.GRU(D, hidden)
        self.fc = nn.Linear(hidden, 2)

    def forward(self, x: Tensor, h: Tensor | None = None):
        y, h = self.gru(x - x.mean(dim=1, keepdim=True), h)
        return self.fc(y), h


class WrongView(nn.Module):
    """A slip: (T, B, D) becomes (B, T, D) by view instead of transpose."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.lstm = nn.LSTM(D, hidden, batch_first=True)
        self.fc = nn.Linear(hidden, 2)

    def forward(self, x: Tensor) -> Tensor:
        steps, lanes, _ = x.shape
        y, _ = self.lstm(x.reshape(lanes, steps, -1))
        return self.fc(y).reshape(steps, lanes, -1)


class SoftmaxOverTime(nn.Module):
    """A slip: log_softmax(dim=1) on (B, T, V) normalises over the steps."""

    def __init__(self, dim: int = 5, hidden: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, dim)
        self.gru = nn.GRU(dim, hidden, batch_first=True)
        self.fc = nn.Linear(hidden, V)

    def forward(self, x: Tensor, h: Tensor | None = None):
        y, h = self.gru(self.embed(x), h)
        return F.log_softmax(self.fc(y), dim=1), h


class SoftmaxOverLanes(nn.Module):
    """The same slip on (T, B, V): log_softmax(dim=1) normalises over the lanes."""

    def __init__(self, dim: int = 5, hidden: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, dim)
        self.gru = nn.GRU(dim, hidden)
        self.fc = nn.Linear(hidden, V)

    def forward(self, x: Tensor, h: Tensor | None = None):
        y, h = self.gru(self.embed(x), h)
        return F.log_softmax(self.fc(y), dim=1), h


class GroupNormOverTime(nn.Module):
    """Separation-net style: GroupNorm(1, C) on (B, C, T) takes its statistics over the steps."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.gru = nn.GRU(D, hidden, batch_first=True)
        self.norm = nn.GroupNorm(1, hidden)
        self.fc = nn.Linear(hidden, 2)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.gru(x)
        y = self.norm(y.transpose(1, 2)).transpose(1, 2)
        return self.fc(y)


class BatchNormOutput(nn.Module):
    """Sequence-tagging style: BatchNorm1d on (B*T, H) rows behind an LSTM with its state out."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.lstm = nn.LSTM(D, hidden, batch_first=True)
        self.bn = nn.BatchNorm1d(hidden)
        self.fc = nn.Linear(hidden, 2)

    def forward(self, x: Tensor, state=None):
        y, state = self.lstm(x, state)
        rows = self.bn(y.reshape(-1, y.size(-1)))
        return self.fc(rows).view(*y.shape[:2], -1), state


class FrozenBatchNorm(BatchNormOutput):
    """Fine-tuning style: train() keeps the batch norm in evaluation mode."""

    def train(self, mode: bool = True):
        super().train(mode)
        self.bn.eval()
        return self


class AlwaysDropping(nn.Module):
    """Monte-Carlo dropout style: functional dropout stays on when evaluating."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.gru = nn.GRU(D, hidden)
        self.fc = nn.Linear(hidden, 2)

    def forward(self, x: Tensor, h: Tensor | None = None):
        y, h = self.gru(x, h)
        return self.fc(F.dropout(y, 0.3, training=True)), h


class TeacherForced(nn.Module):
    """Translation style: encode all of src, then decode as many steps, teacher_forcing=0.5."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.encoder = nn.GRU(D, hidden, batch_first=True)
        self.decoder = nn.GRUCell(2, hidden)
        self.fc = nn.Linear(hidden, 2)

    def forward(
        self, src: Tensor, trg: Tensor | None = None, teacher_forcing: float = 0.5
    ) -> Tensor:
        _, h = self.encoder(src)
        h, y, outputs = h[0], src.new_zeros(src.size(0), 2), []
        for t in range(src.size(1)):
            h = self.decoder(y, h)
            y = self.fc(h)
            outputs.append(y)
            if trg is not None and torch.rand(()) < teacher_forcing:
                y = trg[:, t]
        return torch.stack(outputs, 1)


class FixedWindow(nn.Module):
    """Window style: all outputs of 7 steps are flattened into one Linear."""

    def __init__(self, window: int = 7, hidden: int = 6) -> None:
        super().__init__()
        self.lstm = nn.LSTM(D, hidden, batch_first=True)
        self.fc = nn.Linear(window * hidden, 2)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.lstm(x)
        return self.fc(y.flatten(1))


class BiLast(nn.Module):
    """Sentiment style: the last states of both directions joined, one answer a text."""

    def __init__(self, dim: int = 5, hidden: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, dim)
        self.rnn = nn.LSTM(dim, hidden, bidirectional=True)
        self.fc = nn.Linear(2 * hidden, 2)

    def forward(self, text: Tensor) -> Tensor:
        _, (hidden, _) = self.rnn(self.embedding(text))
        return self.fc(torch.cat((hidden[-2], hidden[-1]), dim=1))


class ReversedLast(nn.Module):
    """Clinical-visits style: the newest visit is read first, the last output is kept."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.gru = nn.GRU(D, hidden, batch_first=True)
        self.fc = nn.Linear(hidden, 2)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.gru(torch.flip(x, dims=[1]))
        return self.fc(y[:, -1])


class Dilated(nn.Module):
    """Dilated-RNN style: every second step in a batch of its own, zeros appended to fit."""

    def __init__(self, rate: int = 2, hidden: int = 6) -> None:
        super().__init__()
        self.rate = rate
        self.gru = nn.GRU(D, hidden)
        self.fc = nn.Linear(hidden, 2)

    def forward(self, x: Tensor) -> Tensor:
        steps = len(x)
        x = F.pad(x, (0, 0, 0, 0, 0, -steps % self.rate))
        folded = torch.cat([x[j :: self.rate] for j in range(self.rate)], dim=1)
        y, _ = self.gru(folded)
        y = torch.stack(y.chunk(self.rate, dim=1), dim=1).flatten(0, 1)
        return self.fc(y[:steps])


class TopState(nn.Module):
    """A slip: takes (layers, B, H), gives back the top layer's (B, H)."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.gru = nn.GRU(D, hidden, 2)
        self.fc = nn.Linear(hidden, 2)

    def forward(self, x: Tensor, h: Tensor | None = None):
        y, h = self.gru(x, h)
        return self.fc(y), h[-1]


def _layer_step(m, x: Tensor, state):
    y, state = m.gru(x, state)
    return m.fc(y), state


class Plain(nn.Module):
    """A plain two-layer GRU, used where sizes coincide."""

    def __init__(self, hidden: int = 6, layers: int = 2) -> None:
        super().__init__()
        self.gru = nn.GRU(D, hidden, layers)
        self.fc = nn.Linear(hidden, 2)

    def forward(self, x: Tensor, h: Tensor | None = None):
        y, h = self.gru(x, h)
        return self.fc(y), h


class SqueezeAll(nn.Module):
    """Regression style: .squeeze() without a dimension on (B, 1)."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.gru = nn.GRU(D, hidden, batch_first=True)
        self.fc = nn.Linear(hidden, 1)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.gru(x)
        return self.fc(y[:, -1]).squeeze()


def _squeeze_step(m: SqueezeAll, x: Tensor, state):
    y, state = m.gru(x[:, None], state)
    return m.fc(y[:, 0])[:, 0], state


class OutputsOnly(nn.Module):
    """Sequential helper style: a layer that drops the state its LSTM returns."""

    def __init__(self, size: int, hidden: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(size, hidden, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


def _sequence() -> nn.Sequential:
    """Sequential style: LSTMs wrapped to return their outputs only, between Linears."""
    return nn.Sequential(
        nn.Linear(D, 5), nn.Tanh(), OutputsOnly(5, 6), OutputsOnly(6, 4), nn.Linear(4, 2)
    )


def _sequence_step(m: nn.Sequential, x: Tensor, state):
    one, two = state if state is not None else (None, None)
    a, one = m[2].lstm(m[1](m[0](swap(x))), one)
    b, two = m[3].lstm(a, two)
    return swap(m[4](b)), (one, two)


class WeightNormed(nn.Module):
    """Regularised style: the recurrent weights are weight-normalised by a parametrization."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        lstm = nn.LSTM(D, hidden)
        self.lstm = nn.utils.parametrizations.weight_norm(lstm, "weight_hh_l0")
        self.fc = nn.Linear(hidden, 2)

    def forward(self, x: Tensor, state=None):
        y, state = self.lstm(x, state)
        return self.fc(y), state


class ZeroHead(nn.Module):
    """Fine-tuning style: the head starts at zero, so the outputs hide the state at first."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.gru = nn.GRU(D, hidden, batch_first=True)
        self.skip, self.fc = nn.Linear(D, 2), nn.Linear(hidden, 2)
        nn.init.zeros_(self.fc.weight)
        nn.init.zeros_(self.fc.bias)

    def forward(self, x: Tensor, h: Tensor | None = None):
        y, h = self.gru(x, h)
        return self.skip(x) + self.fc(y), h


class FlatState(nn.Module):
    """Flat-state style: one (B, 24) tensor holds h and c of two layers, no start is offered."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.one, self.two = nn.LSTMCell(D, hidden), nn.LSTMCell(hidden, hidden)
        self.fc = nn.Linear(hidden, 2)

    def forward(self, x: Tensor, state: Tensor):
        h1, c1, h2, c2 = state.chunk(4, dim=1)
        h1, c1 = self.one(x, (h1, c1))
        h2, c2 = self.two(h1, (h2, c2))
        return self.fc(h2), torch.cat([h1, c1, h2, c2], dim=1)


class TwoInputs(nn.Module):
    """World-model style: observation and action are two arguments, both from the stream."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.gru = nn.GRU(D + 2, hidden)
        self.fc = nn.Linear(hidden, 2)

    def forward(self, obs: Tensor, action: Tensor, h: Tensor | None = None):
        y, h = self.gru(torch.cat([obs, action], dim=-1), h)
        return self.fc(y), h


class DictInput(nn.Module):
    """Batch-dict style: forward(batch) reads batch["values"], zeros inside."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.lstm = nn.LSTM(D, hidden, batch_first=True)
        self.fc = nn.Linear(hidden, 2)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        y, _ = self.lstm(batch["values"])
        return self.fc(y)


def _dict_step(m: DictInput, x: Tensor, state):
    y, state = m.lstm(swap(x), state)
    return swap(m.fc(y)), state


class Holder:
    """A plain object, no module, that holds a state."""

    def __init__(self) -> None:
        self.h: Tensor | None = None


class StateInHolder(nn.Module):
    """Game style: the state is an attribute of a plain helper object."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.cell = nn.RNNCell(D, hidden)
        self.fc = nn.Linear(hidden, 2)
        self.holder = Holder()

    def forward(self, x: Tensor) -> Tensor:
        self.holder.h = self.cell(x, self.holder.h)
        return self.fc(self.holder.h)


def _holder_start(m: StateInHolder, x: Tensor) -> None:
    m.holder.h = None


def _first(m: nn.Module, x: Tensor, state):
    y, state = m(swap(x), state)
    return swap(y), state


def _time_first(m: nn.Module, x: Tensor, state):
    return m(x, state)


def _alone(m: nn.Module, x: Tensor, _: None):
    return swap(m(swap(x))), None


def _bi_last(m: BiLast, x: Tensor, _: None):
    return torch.stack([m(x[: t + 1]) for t in range(len(x))]), None


CASES = [
    Case(
        "targets_none",
        WithTargets,
        tokens(V),
        "carry",
        oracle=chunked(_targets_step),
        plain=lambda m, x: swap(m(swap(x))[0]),
        note="(logits, None) comes back; targets=None is no state",
    ),
    Case(
        "targets_none_last",
        LastWithTargets,
        tokens(V),
        "carry",
        oracle=chunked(_targets_step),
        plain=prefixes(lambda m, x: m(swap(x))[0][:, 0]),
        note="(B, 1, V) for a call of any length",
    ),
    Case(
        "mask_none",
        OptionalMask,
        floats(D),
        "carry",
        oracle=chunked(_mask_step),
        plain=lambda m, x: m(x),
        note="mask=None is no state",
    ),
    Case(
        "gate_beside_output",
        GateOutput,
        floats(D),
        "keyword",
        keywords={"output": 0},
        oracle=chunked(_gate_step),
        plain=lambda m, x: swap(m(swap(x))[0]),
        note="the second output fits the mask argument and must not be fed back",
    ),
    Case(
        "hidden_aside",
        HiddenAside,
        floats(D),
        "keyword",
        keywords={"output": 0},
        either=True,
        oracle=chunked(_gate_step),
        plain=lambda m, x: swap(m(swap(x))[0]),
    ),
    Case(
        "mean_and_scale",
        MeanAndScale,
        floats(D),
        "keyword",
        keywords={"output": 1},
        oracle=chunked(_mean_step),
        plain=lambda m, x: swap(m(swap(x))[1]),
        note="two outputs of one shape, no state: the second is asked for",
    ),
    Case(
        "list_of_outputs",
        ListOutput,
        floats(D),
        "refuse",
        reason="ambiguous_output",
        also=("other",),
        either=True,
        oracle=chunked(
            lambda m, x, h: (lambda y, h: (torch.stack(y), h))(*m(x, h)),
            lambda m, x: x.new_zeros(x.size(1), 6),
        ),
    ),
    Case(
        "forgotten_state",
        ForgottenState,
        floats(D),
        "refuse",
        reason="ignored_state",
        either=True,
        oracle=chunked(_layer_step),
        plain=lambda m, x: m(x)[0],
        shows=("evidence",),
        evidence=lambda m, x: _ignores(m, x, 1, x.size(1), 6),
        note="right only if carried by the layer",
    ),
    Case(
        "overwritten_state",
        OverwrittenState,
        floats(D),
        "refuse",
        reason="ignored_state",
        also=("hidden_state_local",),
        oracle=chunked(_time_first, lambda m, x: x.new_zeros(x.size(1), 6)),
        shows=("chunks", "evidence"),
        evidence=lambda m, x: _ignores(m, x, x.size(1), 6),
    ),
    Case(
        "half_detached",
        HalfDetached,
        floats(D),
        "refuse",
        reason="detach",
        oracle=chunked(
            _time_first, lambda m, x: (x.new_zeros(1, x.size(1), 6), x.new_zeros(1, x.size(1), 6))
        ),
        shows=("detach",),
    ),
    Case(
        "slow_trace",
        SlowTrace,
        floats(D),
        "carry",
        oracle=chunked(_time_first, lambda m, x: m.init_state(x.size(1))),
        note="detaches at every step: two chunks give the gradient of one, nothing to refuse",
    ),
    Case(
        "step_mlp",
        StepMLP,
        floats(D),
        "refuse",
        reason="no_state",
        also=("ignored_state",),
        oracle=chunked(_time_first),
        shows=("no_state",),
    ),
    Case(
        "centred_over_lanes",
        Centred,
        floats(D),
        "refuse",
        reason="mixes_lanes",
        also=("batch_statistics",),
        oracle=chunked(_time_first),
        shows=("mixes_lanes",),
    ),
    Case(
        "view_for_transpose",
        WrongView,
        floats(D),
        "refuse",
        reason="mixes_lanes",
        also=("lookahead",),
        oracle=chunked(lambda m, x, _: (m(x), None)),
        shows=("mixes_lanes",),
        note="with one lane it is right",
    ),
    Case(
        "softmax_over_time",
        SoftmaxOverTime,
        tokens(V),
        "refuse",
        reason="time_normalisation",
        also=("lookahead",),
        oracle=chunked(_first),
        shows=("lookahead", "chunks"),
    ),
    Case(
        "softmax_over_lanes",
        SoftmaxOverLanes,
        tokens(V),
        "refuse",
        reason="mixes_lanes",
        oracle=chunked(_time_first),
        shows=("mixes_lanes",),
        note="called with (T, B), as its layer wants it",
    ),
    Case(
        "group_norm_over_time",
        GroupNormOverTime,
        floats(D),
        "refuse",
        reason="time_normalisation",
        also=("lookahead",),
        oracle=chunked(_alone),
        shows=("lookahead",),
    ),
    Case(
        "batch_norm_output",
        BatchNormOutput,
        floats(D),
        "refuse",
        reason="batch_statistics",
        also=("mixes_lanes", "lookahead"),
        oracle=chunked(_first),
        shows=("mixes_lanes_training",),
    ),
    Case(
        "frozen_batch_norm",
        FrozenBatchNorm,
        floats(D),
        "carry",
        oracle=chunked(_first),
        note="its batch norm never trains: nothing to refuse",
    ),
    Case(
        "dropout_always_on",
        AlwaysDropping,
        floats(D),
        "refuse",
        reason="random",
        also=("other",),
        oracle=chunked(_time_first),
        shows=("random",),
        note="fixed masks would make it repeatable",
    ),
    Case(
        "teacher_forcing",
        TeacherForced,
        floats(D),
        "refuse",
        reason="lookahead",
        also=("other", "hidden_state_local"),
        oracle=chunked(_alone),
        shows=("lookahead", "chunks"),
    ),
    Case(
        "fixed_window",
        FixedWindow,
        floats(D),
        "refuse",
        reason="other",
        also=("ambiguous_output",),
        oracle=chunked(lambda m, x, _: (m(swap(x))[None].expand(len(x), -1, -1), None)),
        shows=("raises",),
        steps=7,
    ),
    Case(
        "bidirectional_last",
        BiLast,
        tokens(V),
        "refuse",
        reason="bidirectional",
        oracle=chunked(_bi_last),
        shows=("chunks",),
        note="N-to-1: each output is causal, but the backward half has no carried state",
    ),
    Case(
        "reversed_last",
        ReversedLast,
        floats(D),
        "refuse",
        reason="lookahead",
        also=("bidirectional", "other"),
        oracle=chunked(lambda m, x, _: (prefixes(lambda m, x: m(swap(x)))(m, x), None)),
        shows=("chunks",),
        note="the newest step is read first",
    ),
    Case(
        "dilated_by_batch",
        Dilated,
        floats(D),
        "refuse",
        reason="other",
        also=("mixes_lanes", "hidden_state_local"),
        oracle=chunked(lambda m, x, _: (m(x), None)),
        shows=("chunks",),
    ),
    Case(
        "top_state_only",
        TopState,
        floats(D),
        "refuse",
        reason="other",
        also=("ambiguous_output", "ignored_state"),
        either=True,
        oracle=chunked(_layer_step),
        plain=lambda m, x: m(x)[0],
        note="what comes back cannot be given again; right only if carried by the layer",
    ),
    Case(
        "lanes_equal_hidden",
        Plain,
        floats(D),
        "carry",
        oracle=chunked(_time_first),
        lanes=6,
        note="6 lanes, 6 units",
    ),
    Case(
        "lanes_equal_layers",
        Plain,
        floats(D),
        "carry",
        oracle=chunked(_time_first),
        lanes=2,
        note="2 lanes, 2 layers, 2 outputs",
    ),
    Case(
        "lanes_steps_features_equal",
        Plain,
        floats(D),
        "carry",
        oracle=chunked(_time_first),
        lanes=3,
        steps=3,
        note="3 steps, 3 lanes, 3 features",
    ),
    Case(
        "squeeze_without_dim",
        SqueezeAll,
        floats(D),
        "carry",
        oracle=stepped(_squeeze_step),
        plain=lambda m, x: prefixes(lambda m, x: m(swap(x)).reshape(-1))(m, x),
        note="with one lane its output is a number",
    ),
    Case(
        "sequential_outputs_only",
        _sequence,
        floats(D),
        "carry",
        oracle=chunked(_sequence_step),
        plain=lambda m, x: swap(m(swap(x))),
    ),
    Case(
        "weight_normed_lstm",
        WeightNormed,
        floats(D),
        "carry",
        oracle=chunked(_time_first),
        note="the layer's class is a parametrized one; deepcopy fails after a call",
    ),
    Case(
        "zero_head",
        ZeroHead,
        floats(D),
        "carry",
        oracle=chunked(_first),
        note="the state matters only once the head has learnt",
    ),
    Case(
        "flat_state_start",
        FlatState,
        floats(D),
        "keyword",
        keywords={"start": lambda lanes: torch.zeros(lanes, 24)},
        oracle=stepped(_time_first, lambda m, x: x.new_zeros(x.size(1), 24)),
        note="nothing but its author knows the state's size",
    ),
    Case(
        "observation_and_action",
        TwoInputs,
        floats(D + 2),
        "keyword",
        keywords={"inputs": lambda x: (x[..., :D], x[..., D:])},
        oracle=chunked(lambda m, x, h: m(x[..., :D], x[..., D:], h)),
        note="inputs gives a tuple: two arguments",
    ),
    Case(
        "dict_of_values",
        DictInput,
        floats(D),
        "keyword",
        keywords={"inputs": lambda x: {"values": x.transpose(0, 1)}},
        oracle=chunked(_dict_step),
        plain=lambda m, x: swap(m({"values": swap(x)})),
        note="inputs turns the layout as well",
    ),
    Case(
        "state_in_plain_object",
        StateInHolder,
        floats(D),
        "refuse",
        reason="other",
        also=("hidden_state_local",),
        either=True,
        oracle=stepped(lambda m, x, _: (m(x), None), _holder_start),
        note="the state lives outside any module",
    ),
]
