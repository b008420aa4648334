"""The losses of docs/how-to/losses.md equal the same losses by plain autograd.

The reference runs the module itself over the runs of recordings that the stream plays, and knows
neither chunks nor policies. Every loss is written a second time, for a list of runs.

Shapes: `T` steps, `B` lanes, `C` outputs.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import throughtime as tt
from test_docs import blocks
from throughtime.chunk import Chunk, join

EXACT = 1e-12


class Run(NamedTuple):
    """The steps of a recording that a lane plays without a reset, and the outputs `(T, C)`."""

    data: dict[str, Tensor]
    y: Any
    whole: bool


class Example(NamedTuple):
    """A net, a stream and a loss of the page."""

    net: Any
    stream: tt.Stream
    loss_fn: Any


Reference = Callable[[list[Run]], tuple[Tensor, float]]


def examples() -> dict[str, Example]:
    """What the page trains, by the name of its loss."""
    found: dict[str, Example] = {}
    names: dict[str, Any] = {}
    for block in blocks("docs/how-to/losses.md", "python"):
        exec(block, names)
        names["train"] = Note(found)
    return found


class Note:
    """Stands in for the function of the page that trains."""

    def __init__(self, found: dict[str, Example]) -> None:
        self.found = found

    def __call__(self, net: Any, stream: Any, loss_fn: Any, gradient: Any = None) -> None:
        del gradient
        name = getattr(getattr(loss_fn, "fn", loss_fn), "__name__", type(loss_fn).__name__)
        ordered = tt.Stream(stream.recordings, stream.lanes, 50, seed=None)  # as in every epoch
        self.found.setdefault(name, Example(net, ordered, loss_fn))


def plain(module: nn.Module, x: Tensor, state: Tensor) -> tuple[Any, Tensor]:
    """Outputs `(T, C)` of one lane and the state after it, by the module itself."""
    if isinstance(module, nn.Sequential):
        gru, linear = module
        y, state = gru(x[:, None], state)
        return linear(y)[:, 0], state
    outputs, state = module(x[:, None], state)
    return {name: y[:, 0] for name, y in outputs.items()}, state


def windows(example: Example, stride: int | None) -> list[list[Run]]:
    """The runs of every window of so many steps, or of the epoch; states are carried."""
    net, stream, _ = example
    plan: Chunk = join(list(stream))
    data = [series_of(recording) for recording in stream.recordings]
    states = [torch.zeros(1, 1, 8, dtype=torch.float64) for _ in range(plan.lanes)]
    every = stride or plan.steps
    result: list[list[Run]] = []
    for begin in range(0, plan.steps, every):
        runs: list[Run] = []
        for lane in range(plan.lanes):
            steps = range(begin, min(begin + every, plan.steps))
            steps = [t for t in steps if plan.recording[t, lane] >= 0]
            cuts = [t for t in steps if t == steps[0] or plan.resets[t, lane]]
            for start, stop in pairwise([*cuts, steps[-1] + 1] if steps else []):
                if plan.resets[start, lane]:
                    states[lane] = torch.zeros_like(states[lane])
                index, at = int(plan.recording[start, lane]), int(plan.position[start, lane])
                part = {name: v[at : at + stop - start] for name, v in data[index].items()}
                y, after = plain(net.module, part["inputs"], states[lane])
                states[lane] = after.detach()
                whole = at == 0 and stop - start == len(data[index]["inputs"])
                runs.append(Run(part, y, whole))
        result.append(runs)
    return result


def series_of(recording: Any) -> dict[str, Tensor]:
    """All series of a recording, in double precision."""
    arrays = recording.read(0, len(recording))
    named = {"inputs": arrays.inputs, "targets": arrays.targets, **arrays.series}
    tensors = {name: torch.as_tensor(v) for name, v in named.items() if v is not None}
    return {name: t.double() if t.is_floating_point() else t for name, t in tensors.items()}


def over_steps(errors: Callable[[Run], Tensor], weigh: Callable[[Run], Tensor]) -> Reference:
    """A loss that is a weighted mean over steps."""

    def reference(runs: list[Run]) -> tuple[Tensor, float]:
        weights = [weigh(run) for run in runs]
        total = sum((w * errors(run)).sum() for w, run in zip(weights, runs, strict=True))
        return torch.as_tensor(total), float(sum(w.sum() for w in weights))

    return reference


def ones(run: Run) -> Tensor:
    return torch.ones(len(run.data["inputs"]), dtype=torch.float64)


def by_run(loss: Callable[[Run], tuple[Tensor, float]]) -> Reference:
    """A loss of each run: its mean, and its weight."""

    def reference(runs: list[Run]) -> tuple[Tensor, float]:
        results = [(mean, w) for mean, w in map(loss, runs) if w]
        total = sum((mean * w for mean, w in results), torch.zeros((), dtype=torch.float64))
        return total, float(sum(w for _, w in results))

    return reference


def error_to_signal(run: Run) -> tuple[Tensor, float]:
    y, t = run.y[:, 0], run.data["targets"][:, 0]
    if len(y) < 2:
        return y.sum(), 0.0
    error, signal = ((v[1:] - 0.95 * v[:-1]).square().sum() for v in (t - y, t))
    return error / (signal + 1e-8), float(len(y))


def spectra(run: Run) -> tuple[Tensor, float]:
    y, t = run.y[:, 0], run.data["targets"][:, 0]
    if len(y) < 32:
        return y.sum(), 0.0
    window = torch.hann_window(32, dtype=torch.float64)
    own, target = (
        torch.stft(v, 32, hop_length=8, window=window, return_complex=True).abs() for v in (y, t)
    )
    logarithms = ((own + 1e-3).log() - (target + 1e-3).log()).abs().mean()
    return (own - target).square().sum().sqrt() / target.square().sum().sqrt() + logarithms, len(y)


def ctc(run: Run) -> tuple[Tensor, float]:
    labels = run.data["labels"][run.data["labels"] >= 0]
    if not run.whole:
        return run.y.sum(), 0.0
    loss = functional.ctc_loss(
        run.y.log_softmax(-1)[:, None],
        labels[None],
        torch.tensor([len(run.y)]),
        torch.tensor([len(labels)]),
        reduction="sum",
    )
    return loss / len(labels), float(len(labels))


def clipped(run: Run) -> Tensor:
    chances = run.y.softmax(-1)[torch.arange(len(run.y)), run.data["action"]]
    ratio, gain = chances / run.data["log_chance"].exp(), run.data["advantage"]
    return -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain)


def two_losses(run: Run) -> Tensor:
    kind = functional.cross_entropy(run.y["kind"], run.data["targets"], reduction="none")
    return kind + (run.y["height"] - run.data["height"]).square()


REFERENCES: dict[str, Reference] = {
    "weighted": over_steps(
        lambda run: (run.y - run.data["targets"]).square()[:, 0], lambda run: run.data["weight"]
    ),
    "BCEWithLogitsLoss": over_steps(
        lambda run: functional.binary_cross_entropy_with_logits(
            run.y, run.data["targets"], reduction="none"
        ).mean(-1),
        ones,
    ),
    "two_losses": over_steps(two_losses, ones),
    "error_to_signal": by_run(error_to_signal),
    "spectra": by_run(spectra),
    "ctc": by_run(ctc),
    "efficiency": over_steps(
        lambda run: ((run.y - run.data["targets"])[:, 0] / (run.data["scale"] + 0.1)).square(), ones
    ),
    "clipped": over_steps(clipped, ones),
}
EXAMPLES = examples()
POLICIES: dict[str, Any] = {
    "exact": tt.Exact(),
    "exact by 7": tt.Exact(chunk=7),
    "exact by 40": tt.Exact(chunk=40),
    "strides": tt.Truncated(45),
    "long strides": tt.Truncated(150),
}


def test_every_loss_of_the_page_has_a_reference() -> None:
    assert EXAMPLES.keys() - {"root", "<lambda>"} == REFERENCES.keys()


def gradients(example: Example, policy: Any) -> list[tuple[float, float, list[Tensor]]]:
    """The loss, the weight and the gradient of every update, at fixed weights."""
    net, stream, loss_fn = example
    results: list[tuple[float, float, list[Tensor]]] = []
    for update in tt.updates(net, stream, loss_fn, gradient=policy):
        grads = [w.grad.clone() for w in net.parameters() if w.grad is not None]
        results.append((update.loss.item(), update.weight, grads))
        net.zero_grad()
    return results


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", REFERENCES)
def test_a_loss_equals_that_of_plain_autograd(name: str, policy: str) -> None:
    example, stride = EXAMPLES[name], getattr(POLICIES[policy], "stride", None)
    example.net.double()
    own = gradients(example, POLICIES[policy])
    expected: list[tuple[float, float, list[Tensor]]] = []
    weights = list(example.net.module.parameters())
    for runs in windows(example, stride):
        total, weight = REFERENCES[name](runs)
        if weight:
            loss = total / weight
            grads = torch.autograd.grad(loss, weights)
            expected.append((loss.item(), weight, list(grads)))
    assert len(own) == len(expected)
    assert expected or (name, policy) == ("ctc", "strides")  # no recording fits into a stride
    for (loss, weight, grads), (true_loss, true_weight, true_grads) in zip(
        own, expected, strict=True
    ):
        assert loss == pytest.approx(true_loss, rel=EXACT)
        assert weight == pytest.approx(true_weight, rel=EXACT)
        size = torch.cat([g.flatten() for g in true_grads]).norm()
        apart = torch.cat(
            [(a - b).flatten() for a, b in zip(grads, true_grads, strict=True)]
        ).norm()
        assert apart <= EXACT * size


def test_a_mutant_that_weighs_no_parts_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def unweighted(parts: Any, outputs: Tensor) -> tuple[Tensor, float]:
        del outputs
        means = [mean for mean, weight in parts if weight]
        return torch.stack(means).mean(), float(sum(weight for _, weight in parts))

    monkeypatch.setattr("throughtime.gradient.objective.pooled", unweighted)
    with pytest.raises(AssertionError):
        test_a_loss_equals_that_of_plain_autograd("error_to_signal", "exact by 7")
