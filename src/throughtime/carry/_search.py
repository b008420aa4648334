"""Find how a module is called: try the usual ways first, accept one that obeys every law.

Shapes: `T` steps, `B` lanes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, get_args

from torch import Tensor, nn

from throughtime import state as trees
from throughtime.carry._adapter import LaneDim, LaneLayout, is_state
from throughtime.carry._convention import (
    Call,
    Convention,
    InputLayout,
    MisfitError,
    OutputLayout,
    Path,
    StateSource,
    item_at,
    path_name,
    tensor_paths,
)
from throughtime.carry._laws import (
    NOT_FINITE,
)
from throughtime.carry._names import RESTARTS, names_state
from throughtime.carry._ports import LAYER, is_torch
from throughtime.carry._sources import proposals
from throughtime.carry._subject import CALL_ERRORS, Failure, Hints, Subject
from throughtime.carry._trial import (
    LANES,
    copy_of,
    perturb,
    quiet,
    restore_modes,
    shrink,
)
from throughtime.errors import ModelError, StateError
from throughtime.state import State

HIDDEN_LAWS = ("inputs", "memory")  # that fail where a layer hides the state


@dataclass
class Search:
    """The search for the convention of one module.

    Args:
        module: the user's; it is copied.
        x: example inputs `(T, B, ...)`.
        hints: what the user says.
    """

    module: nn.Module
    x: Tensor
    hints: Hints
    failures: list[Failure] = field(default_factory=list[Failure])

    def find(self) -> Convention | None:
        """The first convention that obeys every law; None if there is none.

        A layer that starts at zero, or saturated by large inputs, may hide the state: then weights
        of another copy are perturbed and inputs are standard normal. Where large weights saturate,
        or make outputs overflow, those of a third copy are made smaller.
        """
        with quiet(self.x.device):
            convention = self._find_on(copy_of(self.module), hidden=False)
            hidden = any(f.name in HIDDEN_LAWS for f in self.failures)
            overflows = any(NOT_FINITE in str(f) for f in self.failures)
            changes = [perturb] * hidden + [shrink] * (hidden or overflows)
            for change in changes if convention is None else ():
                twin = copy_of(self.module)
                if twin is not None and convention is None:
                    change(twin)
                    convention = self._find_on(twin, hidden=hidden)
        return convention

    def _find_on(self, twin: nn.Module | None, *, hidden: bool) -> Convention | None:
        """The convention, by trials on a copy, or on the module itself if it has none."""
        module = self.module if twin is None else twin
        subject = Subject(module, self.module, self.x, self.hints, standardize=hidden)
        try:
            return _Trials(subject).find()
        finally:
            self.failures += subject.failures
            if twin is None:
                subject.reset()
                restore_modes(self.module, subject.modes)


class _Trials:
    """The trials on one copy of a module."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject

    def find(self) -> Convention | None:
        """The first convention that obeys every law."""
        subject = self.subject
        own = subject.example.shape[1]  # a module may be made for a number of lanes
        attempts = [(LANES, False), (LANES, True), (own, True), (1, True)]
        for lanes, contiguous in dict.fromkeys(attempts):
            if (lanes, contiguous) == (LANES, True) and not self._needs_contiguous():
                continue
            subject.one_lane = lanes == 1
            x = subject.inputs(lanes)
            for call, layout in self._layouts(x, contiguous):
                for group in self._candidates(call, layout, x):
                    accepted = [c for c in (self._first(g, x) for g in group) if c is not None]
                    if len(accepted) > 1:
                        raise self._ambiguous(accepted)
                    if accepted:
                        return accepted[0]
                    if self._is_decided():
                        return None
            if any(f.rank > 0 for f in subject.failures) and not self._needs_contiguous():
                return None  # it takes several lanes, and breaks a law
        return None

    def _first(self, conventions: list[Convention], x: Tensor) -> Convention | None:
        """The first of some readings of one tensor that obeys every law."""
        accepted = (c for c in conventions if self.subject.accepts(c, x))
        convention = next(accepted, None)
        return None if convention is None else self.subject.with_resets(convention, x)

    def _is_decided(self) -> bool:
        """Whether the last way that was tried is right but for a cut gradient or a long lag."""
        failures = self.subject.failures
        return bool(failures) and failures[-1].name in ("credit", "long")

    def _needs_contiguous(self) -> bool:
        """Whether a call failed since it got a view of the inputs."""
        return any("view size is not compatible" in str(f.error) for f in self.subject.failures)

    def _ambiguous(self, accepted: list[Convention]) -> ModelError:
        choices = ", ".join(
            f"{path_name(c.outputs.path)} with features {c.outputs.features}" for c in accepted
        )
        path = accepted[0].outputs.path
        return ModelError(
            f"{type(self.subject.module).__name__} returns several tensors with one output per"
            f" step: {choices}. Choose the one that the loss gets: tt.carry(module,"
            f' output={path if path[1:] else path[0]!r}), or output="all"'
        )

    # ------------------------------------------------------------ shapes

    def _layouts(self, x: Tensor, contiguous: bool) -> Iterator[tuple[Call, InputLayout]]:
        """Calls and layouts of inputs, the usual ones first."""
        hints = self.subject.hints
        for call in self._calls():
            if hints.inputs is not None:
                yield call, InputLayout("B" if call == "step" else "TB", transform=hints.inputs)
                continue
            is_univariate = x.dim() == 3 and x.shape[2] == 1
            for order, drop in product(self._orders(call, x), (False, True)):
                if not drop or (is_univariate and order != "BDT"):
                    yield call, InputLayout(order, drop, contiguous)

    def _calls(self) -> tuple[Call, ...]:
        hint = self.subject.hints.call
        if not isinstance(hint, str) or self.subject.method != "forward":
            return get_args(Call)
        for call in get_args(Call):
            if call == hint:
                return (call,)
        raise ModelError(
            f"call={hint!r}: expected 'chunk', 'step', 'last' or a method of the module"
        )

    def _orders(self, call: Call, x: Tensor) -> list[str]:
        subject = self.subject
        batch_first = subject.hints.batch_first
        if call == "step":
            return ["B", ""] if subject.one_lane else ["B"]
        if batch_first is None:
            layers = [m for m in subject.module.modules() if isinstance(m, nn.RNNBase)]
            orders = ["BT", "TB"] if any(m.batch_first for m in layers) else ["TB", "BT"]
            orders += ["BDT"] if x.dim() == 3 and x.is_floating_point() else []
        else:
            orders = ["BT"] if batch_first else ["TB"]
        if call == "chunk" and any(p.name in RESTARTS for p in subject.parameters):
            orders.append("flat")
        return [*orders, "T"] if subject.one_lane else orders

    # ------------------------------------------------------------ candidates

    def _candidates(
        self, call: Call, layout: InputLayout, x: Tensor
    ) -> Iterator[list[list[Convention]]]:
        """Conventions that fit in shape; a group has a list for each tensor of the result."""
        subject = self.subject
        steps = x if call in ("chunk", "every") else x[:1]
        common = Convention(
            call,
            layout,
            sizes=subject.sizes,
            context=subject.hints.context,
            method=subject.method,
            input_name=subject.input_name,
        )
        for base in proposals(subject, common, x):
            if call != "every":
                yield from self._complete(base, steps)
                continue
            ports = base.source.ports if base.source.arguments is None else {}
            for name in reversed([n for n, port in ports.items() if port == LAYER]):
                yield from self._complete(replace(base, every=name), steps)

    def _complete(self, base: Convention, x: Tensor) -> Iterator[list[list[Convention]]]:
        """Conventions with the places of outputs, state and lanes, from calls of the module."""
        try:
            result, after, single = self.subject.call(base, x)
        except CALL_ERRORS as error:
            self.subject.note(base, None, error)
            return
        for source in _located(base.source, result):
            located = replace(base, source=source, single=single)
            state = source.next_state(result, after)
            outputs = self._outputs(located, result, state, x)
            if not outputs:
                self.subject.note(located, None, MisfitError(_no_outputs(result, x)))
                continue
            for layout in self._lane_layouts(located, x, state):
                placed = replace(located, lanes=layout)
                if base.start.kind == "tensors":
                    names = _start_tensors(self.subject.module, layout)
                    if not names:
                        continue
                    placed = replace(placed, start=replace(base.start, methods=names))
                yield [[replace(placed, outputs=o) for o in group] for group in outputs.values()]

    def _outputs(
        self, convention: Convention, result: Any, state: State, x: Tensor
    ) -> dict[Path, list[OutputLayout]]:
        """The tensors of a result that could be the outputs, with the orders that fit."""
        hint = self.subject.hints.output
        several = isinstance(hint, list) or (hint == "all" and not isinstance(result, Tensor))
        held = {id(leaf) for leaf in trees.tensors(state)}
        if hint is None or hint == "all":
            leaves = list(tensor_paths(result))
            leaves = [pair for pair in leaves if id(pair[1]) not in held] or leaves[:1]
        else:
            items = hint if isinstance(hint, list) else [hint]
            paths = [item if isinstance(item, tuple) else (item,) for item in items]
            try:
                leaves = [leaf for p in paths for leaf in tensor_paths(item_at(result, p), p)]
            except MisfitError:
                return {}
        choices: dict[Path, list[OutputLayout]] = {}
        for order in _output_orders(convention.call, x.shape[1]):
            fits = (_fit(OutputLayout(path, order), result, x) for path, _ in leaves)
            layouts = [*filter(None, fits)]
            if several:
                row = _fit(OutputLayout((), order, None, tuple(layouts)), result, x)
                layouts = [row] if row and len(layouts) == len(leaves) else []
            for layout in layouts:
                choices.setdefault(layout.path, []).append(layout)
        return choices

    def _lane_layouts(self, convention: Convention, x: Tensor, state: State) -> list[LaneLayout]:
        """Where the lanes of the state are: as torch.nn has them, or by a call with fewer lanes."""
        lanes, source, weight = x.shape[1], convention.source, self.subject.weight
        if lanes == 1:
            return [LaneLayout.infer({1: state}, weight)]
        dims = _torch_lanes(source, state, lanes)
        if dims is None:
            try:
                result, after, _ = self.subject.call(convention, x[:, : lanes - 1])
                other = source.next_state(result, after)
                shapes = [[leaf.shape for leaf in trees.tensors(s)] for s in (state, other)]
                if shapes[0] == shapes[1]:
                    raise MisfitError("has a state without a dimension for lanes")
                dims = LaneLayout.infer({lanes: state, lanes - 1: other}, weight).dims
            except CALL_ERRORS as error:
                if source.arguments is not None and source.result == ():
                    error = MisfitError(f"is no state as a whole: {error}")
                self.subject.note(convention, None, error)
                if isinstance(error, (MisfitError, ModelError, StateError)):
                    return []
                dims = _only_dims(state, lanes)  # it was made for a number of lanes
        layouts = [] if dims is None else [LaneLayout.of(dims, state, weight)]
        if dims is not None and any(dim.rows > 1 for dim in dims):
            minor = tuple(replace(dim, lane_major=False) for dim in dims)
            layouts.append(LaneLayout.of(minor, state, weight))
        return layouts


def _located(source: StateSource, result: Any) -> Iterator[StateSource]:
    """The source, with each place of the next state in the result that is possible."""
    if source.arguments is None:
        yield source
        return
    count = len(source.arguments)
    for path in _state_paths(result, count):
        state = item_at(result, path)
        fits = count <= 1 or (isinstance(state, (tuple, list)) and len(state) == count)
        if fits and is_state(state):
            yield replace(source, result=path)


def _start_tensors(module: nn.Module, layout: LaneLayout) -> tuple[str, ...]:
    """Parameters or buffers, one for each tensor of a state, from which it may start."""
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    names: list[str] = []
    for leaf in trees.tensors(layout.example):
        fits = [
            name
            for name, tensor in tensors.items()
            if name not in names
            and tensor.numel() == leaf.numel()
            and (names_state(name.rpartition(".")[2]) or name.endswith("0") or "init" in name)
        ]
        names += fits[:1]
    return tuple(names) if len(names) == len(layout.dims) else ()


def _torch_lanes(source: StateSource, state: State, lanes: int) -> tuple[LaneDim, ...] | None:
    """The dimensions of lanes in the states of torch's layers and cells; None for others."""
    if source.arguments is not None or source.attributes:
        return None
    dims: list[LaneDim] = []
    for name, port in source.ports.items():
        if not is_torch(port):
            return None
        for leaf in trees.tensors(state[name]):
            dim = int(port == LAYER)
            if leaf.dim() <= dim or leaf.shape[dim] % lanes:
                return None
            dims.append(LaneDim(dim, leaf.shape[dim] // lanes))
    return tuple(dims)


def _only_dims(state: State, lanes: int) -> tuple[LaneDim, ...] | None:
    """In each tensor the only dimension of the size of the lanes; None if one has no such."""
    dims: list[LaneDim] = []
    for leaf in trees.tensors(state):
        fits = [dim for dim, size in enumerate(leaf.shape) if size == lanes]
        if len(fits) != 1:
            return None
        dims.append(LaneDim(fits[0]))
    return tuple(dims)


def _output_orders(call: Call, lanes: int) -> list[str]:
    one_lane = lanes == 1
    match call:
        case "chunk":
            return ["TB", "BT", "flat TB", "flat BT", "BCT", *(["T"] if one_lane else [])]
        case "every":
            return ["flat BT", "flat TB"]
        case _:
            return ["B", "TB", "BT", *([""] if one_lane else [])]


def _state_paths(result: Any, count: int) -> Iterator[Path]:
    """Where the next state may be in a result, the usual places first."""
    if isinstance(result, Mapping):
        names = sorted(map(str, result), key=lambda name: not names_state(name))
        yield from ((name,) for name in names)
    elif isinstance(result, (tuple, list)):
        size = len(result)
        if count > 1:
            yield (slice(size - count, None),)
        if size > 1:
            yield (size - 1,)
        if size > 2 and count <= 1:
            yield (slice(1, None),)
        yield from ((i,) for i in range(size - 1))
        yield ()
    elif hasattr(result, "__dataclass_fields__"):
        yield from ((name,) for name in result.__dataclass_fields__)
    else:
        yield ()


def _fit(layout: OutputLayout, result: Any, x: Tensor) -> OutputLayout | None:
    """The layout with the features of the outputs; None if the result does not fit."""
    try:
        y = layout.read(result, x.shape[0], x.shape[1])
    except MisfitError:
        return None
    return replace(layout, features=tuple(y.shape[2:])) if y.is_floating_point() else None


def _no_outputs(result: Any, x: Tensor) -> str:
    shapes = [tuple(leaf.shape) for _, leaf in tensor_paths(result)]
    return (
        f"returned tensors of shapes {shapes} for {x.shape[0]} steps of {x.shape[1]} lanes, without"
        " one output per step in what is to be the outputs"
    )
