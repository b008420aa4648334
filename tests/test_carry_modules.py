"""Modules as their authors write them are carried as their authors call them, or refused.

Every module of the corpus in `modules` has an oracle in plain torch. Shapes: `T` steps, `B` lanes.
"""

import ast
import random
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import throughtime as tt
from modules import BY_NAME, CASES
from modules.case import Case
from modules.check import build, error, errors, gradients, lengths_of, restarted
from throughtime.carry import Carried
from throughtime.errors import ModelError, StateError

EXACT, FUSED = 1e-12, 1e-6
# Two sequences through one layer: the text of the refusal is tested below.
TWO_SEQUENCES = "shared_layer_twice"
CARRIED = [c for c in CASES if c.verdict != "refuse" and c.name != TWO_SEQUENCES]
# Their forward requires a mark of restarts: refused with a line, which is followed here.
PRINTED = ("masked_base",)


pytestmark = pytest.mark.usefixtures("float64")


def rows(cases: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in cases])


def with_features(x: Tensor) -> Tensor:
    """Numbers `(T, B)` as a stream delivers them, `(T, B, 1)`."""
    return x.unsqueeze(-1) if x.dim() == 2 and x.is_floating_point() else x


class Contents(NamedTuple):
    """Everything that a carried module must keep, and the random states."""

    attributes: dict[str, dict[str, Any]]
    weights: dict[str, Tensor]
    modes: list[bool]
    draws: Tensor
    python_draws: object


def contents(module: nn.Module) -> Contents:
    return Contents(
        {
            name: {key: value for key, value in vars(part).items() if "hook" not in key}
            | {f"_buffers.{key}": value for key, value in part._buffers.items()}
            for name, part in module.named_modules()
        },
        {name: value.clone() for name, value in module.state_dict().items()},
        [part.training for part in module.modules()],
        torch.get_rng_state(),
        random.getstate(),
    )


class Subject(NamedTuple):
    """A carried net, the same module by itself, a stream, and what carrying has left as it was."""

    net: Carried
    alone: nn.Module
    x: Tensor
    before: Contents
    after: Contents


def carry(case: Case, module: nn.Module, x: Tensor, **options: Any) -> Carried:
    """The carried module: as it is, with its keywords, or by the line that its refusal prints."""
    if case.name in PRINTED:
        with pytest.raises(ModelError) as refused:
            tt.carry(module, x)
        line = re.search(r"Write: tt\.carry\(module, (.*)\), where call", str(refused.value))
        assert line is not None
        options |= eval(f"dict({line[1]})", {"torch": torch})
    return tt.carry(module, x, **case.keywords, **options)


@cache
def carried(case: Case) -> Subject:
    """Carry a module in training mode, as a training loop does; then evaluate."""
    module, x = build(case)
    before = contents(module.train())
    net = carry(case, module, with_features(x))
    net.initial_state(x.shape[1])
    after = contents(module)
    module.eval()
    return Subject(net, build(case)[0], x, before, after)


def play(net: Carried, x: Tensor, lengths: list[int], resets: Tensor | None = None) -> Tensor:
    """The outputs `(T, B, C)` in chunks, with the state carried."""
    x = with_features(x)
    state, outputs = net.initial_state(x.shape[1], like=x), list[Tensor]()
    starts = [None] * len(lengths) if resets is None else resets.split(lengths)
    for part, flags in zip(x.split(lengths), starts, strict=True):
        y, state = net(part, state, flags)
        outputs.append(y)
    return torch.cat(outputs)


def flat(y: Tensor) -> Tensor:
    return y.reshape(*y.shape[:2], -1)


class Expected:
    """The outputs of an oracle and their gradients."""

    def __init__(self, module: nn.Module, y: Tensor) -> None:
        self.y = flat(y)
        self.grads = gradients(self.y, module)

    def deviation(self, net: Carried, y: Tensor) -> float:
        """The largest difference of outputs and gradients."""
        y = flat(y)
        if y.shape != self.y.shape:
            return float("inf")
        return max(error(y, self.y), errors(gradients(y, net.module), self.grads))


@rows(CARRIED)
def test_a_module_computes_what_its_author_computes(case: Case) -> None:
    net, alone, x, *_ = carried(case)
    expected = Expected(alone, case.oracle(alone, x, [len(x)]))
    for lengths in lengths_of(len(x)):
        assert expected.deviation(net, play(net, x, lengths)) <= EXACT, lengths


@rows(CARRIED)
def test_resets_give_separate_recordings(case: Case) -> None:
    net, alone, x, *_ = carried(case)
    resets = torch.rand(x.shape[:2], generator=torch.Generator().manual_seed(3)) < 0.3
    expected = Expected(alone, restarted(case, alone, x, resets))
    for lengths in lengths_of(len(x)):
        assert expected.deviation(net, play(net, x, lengths, resets)) <= EXACT, lengths


@rows([case for case in CARRIED if any(isinstance(m, nn.RNNBase) for m in case.make().modules())])
def test_a_fused_module_computes_the_same_in_float32(case: Case) -> None:
    """Deviations are relative to the largest number, from the oracle in float64."""
    module, x = build(case)
    alone = build(case)[0]
    expected = Expected(alone, case.oracle(alone, x, [len(x)]))
    torch.set_default_dtype(torch.float32)
    x = x.float() if x.is_floating_point() else x
    net = carry(case, module.float().train(), with_features(x), fused=True)
    module.eval()
    assert expected.deviation(net, play(net, x, lengths_of(len(x))[1])) <= FUSED


@rows(CARRIED)
def test_the_module_of_a_carried_net_is_unchanged(case: Case) -> None:
    net, _, x, before, after = carried(case)
    assert after.modes == before.modes
    assert torch.equal(after.draws, before.draws)
    assert after.python_draws == before.python_draws
    for name, values in after.attributes.items():
        assert values.keys() == before.attributes[name].keys(), name
        for key, value in values.items():
            old = before.attributes[name][key]
            assert value is old or value == old, f"{name}.{key}"
    play(net, x, lengths_of(len(x))[1])
    weights = net.module.state_dict()
    assert weights.keys() == before.weights.keys()
    assert all(torch.equal(value, before.weights[name]) for name, value in weights.items())


# ------------------------------------------------------------ refusals

LAWS = {  # what the text of a refusal says, by the reason of the case
    "bidirectional": "is bidirectional",
    "attention": "attention|Attention",
    "convolution": "convolves over time",
    "batch_statistics": "batch statistics",
    "lookahead": "changes the outputs of earlier steps|made for whole sequences",
    "detach": "no gradient, or a part of it, flows",
    "no_state": "do not depend on the state|nothing to carry",
    "ignored_state": "do not depend on the state",
    "time_normalisation": "normalises over time|normalisation over time",
    "random": "two equal calls in evaluation mode give different outputs",
    "mixes_lanes": "the inputs of one lane change another lane",
    "ambiguous_output": "returns several tensors",
    "hidden_state_local": "hidden where it cannot be reached|a variable of forward",
    "other": "cannot be carried|one output per step",
}
LINES = (  # what the text tells to write
    r"tt\.carry\(module, \w+=|forward\(x, state\)|bidirectional=False|Remove \.detach|lanes=1"
    r"|module\.\w+\.eval\(\)|Normalise the features of each step|Use what has passed only"
    r"|dropout belongs on outputs"
)
REFUSED = [case for case in CASES if case.verdict == "refuse"]
# One lane would be right, and the text says so.
ONE_LANE = "forgotten_batch_first"
# What the text says first is a line to write; the law comes when that is followed.
SECOND: dict[str, dict[str, Any]] = {
    "overwritten_state": {"start": lambda lanes: torch.zeros(lanes, 6)},
}


@cache
def refusal(case: Case, **options: Any) -> str | None:
    """The text of the refusal; None if the module is carried, as its oracle says."""
    module, x = build(case)
    try:
        net = tt.carry(module.train(), with_features(x), **options)
        net.initial_state(x.shape[1])
    except (ModelError, StateError) as error:
        return str(error)
    module.eval()
    for lengths in lengths_of(len(x)):
        for reference in (lengths, [len(x)]):
            alone = build(case)[0]
            expected = Expected(alone, case.oracle(alone, x, reference))
            assert expected.deviation(net, play(net, x, lengths)) <= EXACT, "accepted and wrong"
    return None


@rows(REFUSED)
def test_a_refusal_names_the_law_and_a_line_to_write(case: Case) -> None:
    text = refusal(case, **SECOND.get(case.name, {}))
    if text is None:
        assert case.either
        return
    reasons = (case.reason, *case.also)
    laws = "one lane at a time" if case.name == ONE_LANE else "|".join(LAWS[r] for r in reasons)
    assert re.search(laws, text), text
    assert re.search(LINES, text), text


def test_two_sequences_through_one_layer_are_refused() -> None:
    assert "chunks with the state carried do not give" in (refusal(BY_NAME[TWO_SEQUENCES]) or "")


@rows([case for case in CASES if case.verdict == "keyword"])
def test_a_keyword_is_asked_for(case: Case) -> None:
    """Without its keywords a module is refused by a text with one of them, or carried as it is."""
    text = refusal(case)
    assert text is None or any(f"{keyword}=" in text for keyword in case.keywords), text


@rows([case for case in CASES if case.verdict == "lane"])
def test_a_module_of_one_lane_is_refused_for_more(case: Case) -> None:
    module, _ = build(case)
    x = with_features(case.inputs(7, 3))
    with pytest.raises(
        ModelError, match=r"one lane at a time, got 3.*tt\.Stream\(\.\.\., lanes=1\)"
    ):
        tt.carry(module, x).initial_state(3)


# ------------------------------------------------------------ lines of refusals, followed


def assert_carried(case: Case, net: Carried, alone: nn.Module, x: Tensor) -> None:
    expected = Expected(alone, case.oracle(alone, x, [len(x)]))
    for lengths in lengths_of(len(x)):
        assert expected.deviation(net, play(net, x, lengths)) <= EXACT, lengths


def pad_left(convolution: Any, steps: int) -> None:
    """Replace the padding of a convolution by past steps only, as the text says."""
    convolution.padding = (0,)
    convolution.register_forward_pre_hook(lambda _, x: nn.functional.pad(x[0], (steps, 0)))


@pytest.mark.parametrize("name", ["causal_conv_no_state", "valid_conv_context", "padded_conv"])
def test_the_context_that_a_refusal_names_is_right(name: str) -> None:
    case = BY_NAME[name]
    text = refusal(case) or ""
    match = re.search(r"tt\.carry\(module, context=(\d+)\)", text)
    assert match is not None, text
    (module, x), (alone, _) = build(case), build(case)
    for part in (module, alone) if name == "padded_conv" else ():
        pad = re.search(r"[Pp]ad it on the left only, F\.pad\(x, \((\d+), 0\)\)", text)
        assert pad is not None, text
        pad_left(part.get_submodule("conv"), int(pad[1]))
    assert_carried(case, tt.carry(module, context=int(match[1])), alone, x)


def test_the_norm_that_a_refusal_names_can_be_frozen() -> None:
    case = BY_NAME["batch_norm_lstm"]
    match = re.search(r"module\.(\w+)\.eval\(\)", refusal(case) or "")
    assert match is not None
    (module, x), (alone, _) = build(case), build(case)
    for part in (module, alone):
        part.train().get_submodule(match[1]).eval()
    assert_carried(case, tt.carry(module), alone, x)


def test_the_order_that_a_refusal_names_is_right() -> None:
    case = BY_NAME["kept_output"]
    (module, x), (alone, _) = build(case), build(case)
    with pytest.raises(ModelError, match=r"tt\.carry\(module, batch_first=True\)"):
        tt.carry(module, x, batch_first=False)
    assert_carried(case, tt.carry(module, batch_first=True), alone, x)


@rows([case for case in CASES if "output" in case.keywords and not case.either])
def test_the_outputs_that_a_refusal_lists_can_be_chosen(case: Case) -> None:
    text = refusal(case)
    if text is None:
        return
    choices = [ast.literal_eval(key) for key in re.findall(r"\[([^\]]+)\] with features", text)]
    assert case.keywords["output"] in choices
    match = re.search(r"tt\.carry\(module, output=(.+)\)", text)
    assert match is not None
    assert ast.literal_eval(match[1]) in choices
    for output in choices:
        module, x = build(case)
        net = tt.carry(module, output=output)
        y = play(net, x, lengths_of(len(x))[1])
        if output == case.keywords["output"]:
            assert error(flat(y), flat(case.oracle(build(case)[0], x, [len(x)]))) <= EXACT


def test_a_start_as_a_refusal_asks_for_is_taken() -> None:
    case = BY_NAME["random_start_inside"]
    assert "tt.carry(module, start=lambda m, lanes: " in (refusal(case) or "")
    module, x = build(case)
    net = tt.carry(module, x, start=lambda lanes: {"lstm": (torch.zeros(1, lanes, 6),) * 2})
    whole, *others = [play(net, x, lengths) for lengths in lengths_of(len(x))]
    assert all(error(y, whole) <= EXACT for y in others)
    assert torch.equal(play(net, x, [len(x)]), whole)


# ------------------------------------------------------------ forms that are easy to get wrong

FORMS = (
    "targets_none",
    "reset_flag",
    "gate_beside_output",
    "outputs_equal_stride",
    "outputs_lanes_equal_stride",
    "half_detached",
    "detached_hidden",
    "forgotten_state",
    "overwritten_state",
    "leaky_elementwise",
    "dropped_state_local",
    "average_beside_state",
    "instance_norm_gru",
)


@pytest.mark.parametrize("name", FORMS)
def test_a_form_is_never_silently_wrong(name: str) -> None:
    """Right or refused without a keyword, where 20 lanes at stride 20 coincide as well."""
    text = refusal(replace(BY_NAME[name], lanes=20, steps=20))
    assert text is None or BY_NAME[name].verdict != "carry"


def test_dropout_on_a_cell_s_state_is_refused_in_training() -> None:
    """A cell gets what dropout made of its state: step by step it would get the state itself."""
    text = refusal(BY_NAME["dropped_state_local"]) or ""
    assert "in training mode" in text
    assert "dropout belongs on outputs" in text


# ------------------------------------------------------------ faults in training mode


class WrongInTraining(nn.Module):
    """A recurrence that is right in evaluation mode only."""

    def __init__(self, fault: str = "", mix: Callable[[Tensor], Tensor] = torch.zeros_like) -> None:
        super().__init__()
        self.inner, self.outer, self.fault, self.mix = nn.Linear(4, 4), nn.Linear(3, 4), fault, mix

    def forward(self, x: Tensor, h: Tensor | None = None) -> tuple[Tensor, Tensor]:
        fault = self.fault if self.training else ""
        h = x.new_zeros(x.shape[1], 4) if h is None or fault == "forgets" else h
        outputs: list[Tensor] = []
        for step in x:
            h = torch.tanh(self.inner(h) + self.outer(step))
            h = h + 0.3 * self.mix(h) if self.training else h
            outputs.append(h * 2)
        return torch.stack(outputs), h.detach() if fault == "detaches" else h


MIXED = "the inputs of one lane change another"


@pytest.mark.parametrize(
    ("module", "law"),
    [
        (WrongInTraining("forgets"), "chunks with the state carried do not"),
        (WrongInTraining("detaches"), r"no gradient, .* Remove \.detach"),
        (WrongInTraining(mix=lambda h: h[:1]), MIXED),
        (WrongInTraining(mix=lambda h: h[-1:]), MIXED),
        (WrongInTraining(mix=lambda h: nn.functional.pad(h, (0, 0, 1, 0))[:-1]), MIXED),
        (WrongInTraining(mix=lambda h: nn.functional.pad(h, (0, 0, 0, 1))[1:]), MIXED),
    ],
)
def test_a_fault_in_training_only_is_noticed(module: nn.Module, law: str) -> None:
    with pytest.raises(ModelError, match=f"in training mode, {law}"):
        tt.carry(module.double(), torch.randn(7, 3, 3))


class MeanOfCall(nn.Module):
    """Keeps a mean over the steps of a call in its state, beside a number that is infinite."""

    def __init__(self, beside: float) -> None:
        super().__init__()
        self.inner, self.outer, self.beside = nn.Linear(4, 4), nn.Linear(3, 4), beside

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        h, kept = (x.new_zeros(x.shape[1], n) for n in (4, 2)) if state is None else state
        outputs: list[Tensor] = []
        for step in x:
            h = torch.tanh(self.inner(h) + self.outer(step))
            outputs.append(h)
        mean = kept[:, :1] / 2 + x.mean(0)[:, :1]
        return torch.stack(outputs), (h, torch.cat([mean, torch.full_like(mean, self.beside)], 1))


@pytest.mark.parametrize("beside", [7.0, float("inf"), float("nan")])
def test_numbers_that_are_not_finite_hide_no_other_number_of_a_state(beside: float) -> None:
    with pytest.raises(ModelError, match="chunks with the state carried do not give"):
        tt.carry(MeanOfCall(beside), torch.randn(7, 3, 3))


# ------------------------------------------------------------ lags that are longer than a trial


class LongDilation(nn.Module):
    """A causal convolution that reads the step 8 steps before, with zeros at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.gru = nn.Conv1d(3, 5, 2, dilation=8), nn.GRU(5, 6, batch_first=True)

    def forward(self, x: Tensor, h: Tensor | None = None) -> tuple[Tensor, Tensor]:
        features = self.conv(nn.functional.pad(x.transpose(1, 2), (8, 0))).transpose(1, 2)
        y, after = self.gru(features, h)
        return y, after


class LongLag(nn.Module):
    """Adds the inputs of 20 steps before, of the same call."""

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.pad(x, (0, 0, 0, 0, 20, 0))[: len(x)]


class LagInside(nn.Module):
    """A lag beside a GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.lag, self.gru = LongLag(), nn.GRU(3, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(self.lag(x))[0]


class LastOfLongDilation(LongDilation):
    """Returns the last output only."""

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(x)[0][:, -1]


WHOLE = "chunks with the state carried do not give what one"


@pytest.mark.parametrize(
    ("make", "steps", "law"),
    [
        (LongDilation, 7, WHOLE),
        (LagInside, 50, WHOLE),
        (lambda: nn.Sequential(LongLag(), nn.GRU(3, 6)), 50, WHOLE),
        (LastOfLongDilation, 7, "steps one by one do not end"),
    ],
)
def test_a_lag_beyond_the_trial_is_noticed_in_a_chunk_of_the_stream(
    make: Callable[[], nn.Module], steps: int, law: str
) -> None:
    with pytest.raises(ModelError, match=law):
        tt.carry(make(), torch.randn(steps, 2, 3))


def test_the_context_of_a_convolution_with_a_long_lag_is_right() -> None:
    x = torch.randn(60, 2, 3)
    net = tt.carry(LongDilation(), x, context=8)
    assert error(play(net, x, [30, 30]), play(net, x, [60])) < EXACT
    with pytest.raises(ModelError, match="long chunks with the state carried do not give what one"):
        tt.carry(LongDilation(), x, context=7)
