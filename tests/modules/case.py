"""A case of the corpus, and the helpers that the oracles share.

A case holds a module as its author would write it and an oracle in plain torch that calls the
module as its author does. Outputs are compared as `y.reshape(T, B, -1)`: a squeezed feature stays
squeezed in the oracle.

Shapes: `T` steps, `B` lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

VERDICTS = ("carry", "lane", "keyword", "refuse")
REASONS = (
    "bidirectional",
    "attention",
    "convolution",
    "batch_statistics",
    "lookahead",
    "detach",
    "no_state",
    "ignored_state",
    "time_normalisation",
    "random",
    "mixes_lanes",
    "ambiguous_output",
    "hidden_state_local",
    "other",
)

Oracle = Callable[[nn.Module, Tensor, Sequence[int]], Tensor]
Step = Callable[[Any, Tensor, Any], tuple[Tensor, Any]]
Start = Callable[[Any, Tensor], Any]


def unknown(module: nn.Module, x: Tensor, lengths: Sequence[int]) -> Tensor:
    """The oracle of a module that nothing can carry."""
    raise AssertionError(f"{type(module).__name__} is accepted")


@dataclass(frozen=True, eq=False)
class Case:
    """A module, a stream for it, and the outputs that are right.

    Attributes:
        oracle: needed unless the module is refused whatever it is given.
        verdict: "carry" (without an edit), "lane" (with one lane only), "keyword" (with `keywords`,
            and refused without them), "refuse" (for `reason`, or for one of `also`).
        either: a refused case that may be carried, or a keyword case that may be carried without
            its keywords, if it agrees with the oracle.
        lanes: the number of lanes at which the case makes its point, if that matters.
        steps: the number of steps, the same.

    Cases of "batch_statistics" are refused in training mode; in evaluation they follow the oracle.
    """

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[int, int], Tensor]
    verdict: str
    oracle: Oracle = unknown
    keywords: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    also: tuple[str, ...] = ()
    either: bool = False
    lanes: int | None = None
    steps: int | None = None

    def __post_init__(self) -> None:
        assert self.verdict in VERDICTS, self.name
        assert (self.verdict == "refuse") == bool(self.reason), self.name
        assert not self.reason or self.reason in REASONS, self.name
        assert all(reason in REASONS for reason in self.also), self.name
        assert (self.verdict == "keyword") == bool(self.keywords), self.name


def floats(*features: int) -> Callable[[int, int], Tensor]:
    """A stream of standard normal numbers: (T, B, *features)."""
    return lambda T, B: torch.randn(T, B, *features)


def tokens(vocabulary: int) -> Callable[[int, int], Tensor]:
    """A stream of token numbers: (T, B) int64."""
    return lambda T, B: torch.randint(0, vocabulary, (T, B))


def one_hots(size: int) -> Callable[[int, int], Tensor]:
    """A stream of one-hot characters: (T, B, size)."""
    return lambda T, B: torch.eye(size)[torch.randint(0, size, (T, B))]


def nothing(module: Any, x: Tensor) -> None:
    """The start of a module that gets no state at first."""
    return None


def chunked(step: Step, start: Start = nothing) -> Oracle:
    """Call `y, state = step(module, part, state)` for every chunk; y is (t, B, ...)."""

    def oracle(module: nn.Module, x: Tensor, lengths: Sequence[int]) -> Tensor:
        state = start(module, x)
        outputs = []
        for part in x.split(list(lengths)):
            y, state = step(module, part, state)
            outputs.append(y)
        return torch.cat(outputs)

    return oracle


def stepped(step: Step, start: Start = nothing) -> Oracle:
    """Call `y, state = step(module, x[t], state)` for every step; y is (B, ...)."""

    def oracle(module: nn.Module, x: Tensor, lengths: Sequence[int]) -> Tensor:
        assert sum(lengths) == len(x)
        state = start(module, x)
        outputs = []
        for frame in x:
            y, state = step(module, frame, state)
            outputs.append(y)
        return torch.stack(outputs)

    return oracle


def prefixes(call: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """Call an N-to-1 module on x[:1], x[:2], ... from its own start."""
    return lambda module, x: torch.stack([call(module, x[: t + 1]) for t in range(len(x))])


def swap(x: Tensor) -> Tensor:
    """(T, B, ...) to (B, T, ...) and back, in memory of its own."""
    return x.transpose(0, 1).contiguous()
