"""Checks of the corpus itself: every oracle is right for a stream, every fault is real.

Shapes: `T` steps, `B` lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from .case import Case

TOLERANCE = 1e-12
STARTS = torch.zeros(7, 3, dtype=torch.bool)
STARTS[3, 0] = STARTS[2, 1] = STARTS[6, 1] = True


def lengths_of(steps: int) -> list[list[int]]:
    """The whole stream, two chunks, single steps."""
    return [[steps], [steps // 2, steps - steps // 2], [1] * steps]


def build(case: Case, seed: int = 0) -> tuple[nn.Module, Tensor]:
    """The module in evaluation mode, and a stream for it."""
    torch.manual_seed(seed)
    module = case.make().eval()
    lanes = case.lanes if case.lanes is not None else 1 if case.verdict == "lane" else 3
    torch.manual_seed(seed + 1)
    return module, case.inputs(case.steps or 7, lanes)


def changed(x: Tensor, where: tuple[slice, slice]) -> Tensor:
    """The stream with some steps and lanes replaced by other, valid ones."""
    other = x.clone()
    if x.is_floating_point():
        other[where] = torch.randn_like(other[where]) * 2 + 0.5
    else:
        other[where] = (other[where] + 1) % (int(x.max()) + 1)
    return other


def error(a: Tensor, b: Tensor) -> float:
    """The largest difference relative to the size of the numbers."""
    if a.shape != b.shape:
        return float("inf")
    if a.numel() == 0:
        return 0.0
    a, b = a.detach(), b.detach()
    return float((a - b).abs().max() / (1 + b.abs().max()))


def errors(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """The largest of some differences."""
    return max((error(p, q) for p, q in zip(a, b, strict=True)), default=0.0)


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two results are equal up to rounding."""
    return error(a, b) <= TOLERANCE


def gradients(y: Tensor, module: nn.Module) -> list[Tensor]:
    """Gradients of a fixed random projection of the outputs."""
    leaves = [p for p in module.parameters() if p.requires_grad]
    if not y.requires_grad:
        return [torch.zeros_like(p) for p in leaves]
    generator = torch.Generator().manual_seed(5)
    weights = torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype)
    return list(torch.autograd.grad((y * weights).sum(), leaves, materialize_grads=True))


def restarted(case: Case, module: nn.Module, x: Tensor, starts: Tensor = STARTS) -> Tensor:
    """The oracle run anew on every piece of every lane between two starts."""
    lanes = []
    for b in range(x.size(1)):
        cuts = [t for t in range(1, len(x)) if starts[t, b]]
        bounds = zip([0, *cuts], [*cuts, len(x)], strict=True)
        pieces = [case.oracle(module, x[i:j, b : b + 1], [j - i]) for i, j in bounds]
        lanes.append(torch.cat(pieces))
    return torch.cat(lanes, dim=1)


def faults(case: Case, seed: int = 0) -> list[str]:
    """What is wrong with a case."""
    if case.verdict == "refuse":
        missing = [f"cannot show {kind}" for kind in case.shows if not shows(case, kind)]
        missing += [] if case.shows or case.either else ["shows nothing"]
        return missing + (faults_of_oracle(case, seed) if case.either else [])
    if case.evidence is not None and not case.evidence(*build(case)):
        return ["the evidence fails"]
    return faults_of_oracle(case, seed)


def faults_of_oracle(case: Case, seed: int) -> list[str]:
    """Where an oracle breaks a law of a stream: of chunks, time, lanes or memory."""
    module, x = build(case, seed)
    steps, lanes = x.shape[:2]
    whole = case.oracle(module, x, [steps])
    grads = gradients(whole, module)
    if whole.shape[:2] != (steps, lanes):
        return [f"outputs are {tuple(whole.shape)} for {steps} steps, {lanes} lanes"]
    results = {str(lengths): case.oracle(module, x, lengths) for lengths in lengths_of(steps)}
    if case.plain is not None:
        results["the author's own call"] = case.plain(module, x)
    broken = {
        "not finite": not whole.isfinite().all(),
        "no gradient at all": not any(g.abs().max() > 0 for g in grads),
    }
    for name, y in results.items():
        broken[f"{name}: other outputs"] = not same(y, whole)
        broken[f"{name}: other gradients"] = errors(gradients(y, module), grads) > TOLERANCE
    if case.done is not None:
        separate = restarted(case, module, x)
        broken["done is no start"] = not same(case.done(module, x, STARTS), separate)
    for t in (1, steps // 2, steps - 1):
        other = case.oracle(module, changed(x, (slice(t, None), slice(None))), [steps])
        broken[f"steps from {t} change earlier outputs"] = not same(other[:t], whole[:t])
        if t < steps - 1:  # a net may answer two steps later
            broken[f"steps from {t} change nothing"] = same(other[t:], whole[t:])
    for b in range(lanes if lanes > 1 else 0):
        other = case.oracle(module, changed(x, (slice(None), slice(b, b + 1))), [steps])
        rest = [lane for lane in range(lanes) if lane != b]
        broken[f"lane {b} changes other lanes"] = not same(other[:, rest], whole[:, rest])
        broken[f"lane {b} changes nothing"] = same(other[:, b], whole[:, b])
    if forgets(case, module, x):
        with torch.no_grad():
            for parameter in module.parameters():  # a head of zeros hides the state
                parameter += 0.1 * torch.randn_like(parameter)
        broken["no state"] = forgets(case, module, x)
    return [name for name, is_broken in broken.items() if is_broken]


def forgets(case: Case, module: nn.Module, x: Tensor) -> bool:
    """Whether other first steps leave all later outputs as they are."""
    other = changed(x, (slice(0, 2), slice(None)))
    after = case.oracle(module, other, [len(x)])[2:]
    return same(after, case.oracle(module, x, [len(x)])[2:])


def shows(case: Case, kind: str) -> bool:
    """Whether a refused case has the fault that it claims."""
    module, x = build(case)
    steps, lanes = x.shape[:2]
    two, last, all_ = [steps // 2, steps - steps // 2], slice(steps - 1, None), slice(None)

    def call(x: Tensor, lengths: Sequence[int] = (steps,)) -> Tensor:
        return case.oracle(module, x, lengths)

    def mixes_lanes() -> bool:
        return not same(call(changed(x, (all_, slice(0, 1))))[:, 1:], call(x)[:, 1:])

    def detaches() -> bool:
        grads = [gradients(call(x, lengths), module) for lengths in ((steps,), two)]
        return same(call(x, two), call(x)) and errors(*grads) > TOLERANCE

    def raises() -> bool:
        try:
            call(x, two)
        except (RuntimeError, ValueError):
            return True
        return False

    module.train(kind == "mixes_lanes_training")
    kinds: dict[str, Callable[[], bool]] = {
        "lookahead": lambda: not same(call(changed(x, (last, all_)))[:-1], call(x)[:-1]),
        "mixes_lanes": mixes_lanes,
        "mixes_lanes_training": mixes_lanes,
        "chunks": lambda: not same(call(x, two), call(x)),
        "detach": detaches,
        "random": lambda: not same(call(x), call(x)),
        "length": lambda: call(x).shape[:2] != (steps, lanes),
        "no_state": lambda: same(call(changed(x, (slice(0, steps - 1), all_)))[-1], call(x)[-1]),
        "raises": raises,
        "evidence": lambda: case.evidence is not None and case.evidence(module, x),
    }
    return kinds[kind]()
