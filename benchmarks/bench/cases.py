"""The cases of the bench: sizes, goals, and the least arithmetic of an update.

Shapes: `T` steps, `B` lanes, `D` input features, `H` hidden, `C` classes.
"""

import difflib
import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from throughtime.errors import ConfigError

Kind = Literal["train", "horizon", "resets", "trace", "class", "exact"]
Cell = Literal["LSTM", "GRU", "RNN"]
GATES: dict[Cell, int] = {"LSTM": 4, "GRU": 3, "RNN": 1}
NARROW_GOAL = 1.0  # with two threads, or a narrower instruction set: nothing slower than torch.nn


@dataclass(frozen=True)
class Case:
    """One segment of workload.

    Attributes:
        name: as `--cases` takes it.
        kind: "train", whole updates; "horizon", gradients of overlapping windows at fixed weights,
            without a step of the optimizer; "resets", one step in a hundred begins a recording;
            "trace", the norm of every state's gradient is captured; "class", the net is a class
            of the user's instead of an `nn.Sequential`; "exact", the gradient of a whole recording
            at fixed weights, beside those of every hundred steps of it.
        cell: of the recurrent layers.
        dtype: float32 or float64.
        lanes: B.
        inputs: D, or the width of the embedding.
        hidden: H.
        classes: C.
        goal: for "train" and "horizon" how many times as fast as by hand, at least, on one thread;
            for the others how many times the time without, at most; None: the cost is shown alone.
        layers: recurrent ones.
        steps: T of a chunk, or the horizon.
        stride: steps between two updates of "horizon"; default T.
        vocabulary: number of words where inputs are words.
        chunk: steps that a graph of "exact" holds; default: as many as `tt.Exact()` takes.
        fused: whether the layers of "exact" are those of `tt.nn`; of other kinds they are.
        stretch: a goal beyond the goal.
        quick: whether `--quick` takes it.
    """

    name: str
    kind: Kind
    cell: Cell
    dtype: torch.dtype
    lanes: int
    inputs: int
    hidden: int
    classes: int
    goal: float | None
    layers: int = 1
    steps: int = 100
    stride: int = 0
    vocabulary: int = 0
    chunk: int | None = None
    fused: bool = True
    stretch: float | None = None
    quick: bool = True

    @property
    def type(self) -> str:
        """`float32` or `float64`."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def every(self) -> int:
        """Steps between two updates."""
        return self.stride or self.steps

    @property
    def at_most(self) -> bool:
        """Whether the goal is a price, at most, and not a gain, at least."""
        return self.kind in {"resets", "trace", "class", "exact"}

    def goal_at(self, threads: int, narrow: bool) -> float | None:
        """What is aimed at with so many threads; `narrow`: without AVX-512."""
        return self.goal if self.at_most or (threads == 1 and not narrow) else NARROW_GOAL

    @property
    def flops(self) -> float:
        """Floating-point operations of the matrix products of an update.

        Each weight counts once forward, and backward once for its gradient and once for that of its
        input, unless that is data. Of a horizon only the new steps run forward.
        """
        new, back, gates = self.every * self.lanes, self.steps * self.lanes, GATES[self.cell]
        total = 0.0
        for layer in range(self.layers):
            width = self.hidden if layer else self.inputs
            wanted = layer > 0 or self.vocabulary > 0
            into, own = 2.0 * gates * self.hidden * width, 2.0 * gates * self.hidden * self.hidden
            total += new * (into + own) + back * (into * (2 if wanted else 1) + 2 * own)
        return total + new * 3 * 2.0 * self.hidden * self.classes


def _sized(
    name: str, goals: dict[tuple[Cell, str], tuple[float, float | None]], like: Case
) -> list[Case]:
    """A case for each cell and type."""
    types = {"f32": torch.float32, "f64": torch.float64}
    return [
        replace(
            like,
            name=f"{cell.lower()}-{name}-{kind}",
            cell=cell,
            dtype=types[kind],
            goal=goal,
            stretch=stretch,
        )
        for (cell, kind), (goal, stretch) in goals.items()
    ]


_ONE = Case("", "train", "LSTM", torch.float32, lanes=1, inputs=16, hidden=50, classes=5, goal=1.0)
_MANY = Case(
    "", "train", "LSTM", torch.float32, lanes=32, inputs=32, hidden=128, classes=10, goal=1.0
)
_WIDE = Case(
    "",
    "train",
    "LSTM",
    torch.float32,
    lanes=20,
    inputs=650,
    hidden=650,
    classes=10,
    goal=1.0,
    layers=2,
    steps=35,
    quick=False,
)
_ONE_GOALS: dict[tuple[Cell, str], tuple[float, float | None]] = {
    ("LSTM", "f64"): (13, 19),
    ("LSTM", "f32"): (2.5, 4.5),
    ("GRU", "f64"): (15, 22),
    ("GRU", "f32"): (15, 22),
    ("RNN", "f64"): (9, None),
    ("RNN", "f32"): (9, None),
}
_MANY_GOALS: dict[tuple[Cell, str], tuple[float, float | None]] = {
    ("LSTM", "f32"): (1.3, None),
    ("GRU", "f32"): (3, None),
    ("RNN", "f32"): (2.8, None),
    ("LSTM", "f64"): (2.6, None),
    ("GRU", "f64"): (2.6, None),
    ("RNN", "f64"): (2.6, None),
}
_PLAIN: dict[tuple[Cell, str], tuple[float, float | None]] = {
    ("LSTM", "f32"): (1.0, None),
    ("GRU", "f32"): (1.0, None),
}


def _priced(kind: Kind, goal: float | None) -> list[Case]:
    """What is paid beside plain updates, at both sizes."""
    result: list[Case] = []
    for name, like in (("b1-h50", _ONE), ("b32-h128", _MANY)):
        result += [
            replace(case, kind=kind, name=f"{kind}-{case.name}", goal=goal)
            for case in _sized(name, _PLAIN, like)
        ]
    return result


def _strides() -> list[Case]:
    """Horizon 100, credit through windows that overlap."""
    goals: dict[tuple[Cell, str], tuple[float, float | None]] = {
        ("LSTM", "f64"): (25, None),
        ("LSTM", "f32"): (25, None),
    }
    result = [
        case
        for s in (10, 50)
        for case in _sized(f"stride{s}", goals, replace(_ONE, kind="horizon", stride=s))
    ]
    return [replace(case, name=f"horizon-{case.name}") for case in result]


def _exact() -> list[Case]:
    """The exact gradient of 5,000 steps: nets of torch.nn, and small fused ones."""
    like, result = replace(_ONE, kind="exact", steps=5_000), list[Case]()
    for layer, widths, goal in (("lstm", (8, 32, 128), 1.8), ("fused-lstm", (8, 32), 7.0)):
        for hidden in widths:
            case = replace(like, hidden=hidden, fused=layer != "lstm")
            name = f"{layer}-h{hidden}-f32"
            result += [
                replace(case, name=f"exact-{name}", goal=1.3),
                replace(case, name=f"exact-chunk100-{name}", chunk=100, goal=goal),
            ]
    return result


_ALL = [
    *_sized("b1-h50", _ONE_GOALS, _ONE),
    *_sized("b32-h128", _MANY_GOALS, _MANY),
    *_sized("2x650", {("LSTM", "f32"): (1.1, None), ("GRU", "f32"): (2.3, None)}, _WIDE),
    replace(_WIDE, name="words-lstm-2x650-f32", classes=10_000, vocabulary=10_000, goal=1.4),
    *_strides(),
    *_priced("resets", 1.05),
    *_priced("trace", None),  # runs layers step by step under autograd
    *_priced("class", 1.15),
    *_exact(),
]
CASES: dict[str, Case] = {case.name: case for case in _ALL}


def select_cases(patterns: Sequence[str], quick: bool) -> list[Case]:
    """The cases of these names, in the order of `CASES`; all of them where there are none.

    Args:
        patterns: names, or patterns such as `lstm-*`.
        quick: without patterns, only those that take little time.

    Raises:
        ConfigError: a pattern that fits no case, with the nearest name.

    Example:
        >>> [case.name for case in select_cases(["gru-b1-*"], quick=False)]
        ['gru-b1-h50-f64', 'gru-b1-h50-f32']
    """
    if not patterns:
        return [case for case in CASES.values() if case.quick or not quick]
    result: set[str] = set()
    for pattern in patterns:
        fitting = fnmatch.filter(CASES, pattern)
        if not fitting:
            near = difflib.get_close_matches(pattern, CASES, n=1, cutoff=0.3)
            raise ConfigError(
                f"cases={pattern!r}: no such case{f', the nearest is {near[0]!r}' if near else ''}."
                f" Expected names or patterns, separated by commas, of: {', '.join(CASES)}"
            )
        result.update(fitting)
    return [case for name, case in CASES.items() if name in result]
