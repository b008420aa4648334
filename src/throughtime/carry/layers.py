"""Recurrent layers and cells of torch.nn, layers of tt.nn, nn.Sequential, and any other module.

Shapes: `T` steps, `B` lanes, `H` hidden, `L` layers.
"""

import contextlib
import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor, nn

from throughtime import state as trees
from throughtime._device import cudnn_rules
from throughtime.carry._adapter import Adapter, LaneLayout, input_kind
from throughtime.carry._calls import (
    LANES_FIRST,
    ORDERS,
    TIME_FIRST,
    Convention,
    Hints,
    ModuleAdapter,
    OutputLayout,
    layer_zeros,
    state_shapes,
)
from throughtime.carry._inside import RECURRENT, parameters_of
from throughtime.carry._laws import MISFIT_ERRORS, Laboratory, Law
from throughtime.carry._refusal import (
    bidirectional_error,
    broken,
    refusal,
)
from throughtime.carry._search import CALL_ERRORS, Search, remembered, twins_of
from throughtime.carry._trial import (
    LANES,
    LONG_STEPS,
    STEPS,
    Snapshot,
    guessed_inputs,
    is_sharded,
    long_steps,
    modes_of,
    quiet,
    set_modes,
    trial_inputs,
)
from throughtime.errors import ModelError, StateError
from throughtime.nn.affine import Difference, Standardise
from throughtime.nn.layers import Recurrent
from throughtime.state import State

RecurrentModule: TypeAlias = nn.RNNBase | nn.RNNCellBase
STEPWISE = (nn.Linear, nn.Embedding, nn.Dropout, nn.Tanh, nn.ReLU, nn.Identity)  # known to be so


@dataclass(frozen=True)
class LayerAdapter(Adapter):
    """nn.LSTM, nn.GRU, nn.RNN."""

    module: nn.RNNBase

    def initial_state(self, lanes: int, like: Tensor | None) -> State:
        del like
        layer = self.module
        # registered by name, typed Tensor | Module
        weight: Tensor = layer.weight_ih_l0  # pyright: ignore[reportAssignmentType]
        h = weight.new_zeros(lanes, layer.num_layers, layer.proj_size or layer.hidden_size)
        if not isinstance(layer, nn.LSTM):
            return h
        return h, weight.new_zeros(lanes, layer.num_layers, layer.hidden_size)

    def takes_resets(self) -> bool:
        return isinstance(self.module, Recurrent)

    def leaf_names(self, state: State) -> list[str]:
        return ["h"] if isinstance(state, Tensor) else ["h", "c"]

    def explain(self) -> str:
        order = ORDERS[LANES_FIRST if self.module.batch_first else TIME_FIRST]
        state = self.initial_state(1, None)
        return (
            f"{type(self.module).__name__}: called with {order.format(self.module.input_size)}: one"
            " call for each chunk\n  state, lanes first:"
            f" {state_shapes(self.leaf_names(state), state)}\n  start: zeros"
        )

    def run(self, x: Tensor, state: State, resets: Tensor | None = None) -> tuple[Tensor, State]:
        # (L, B, H) to (B, L, H) and back, without a call: every chunk passes here
        is_single = isinstance(state, Tensor)
        entering = (
            state.transpose(0, 1)
            if is_single
            else (state[0].transpose(0, 1), state[1].transpose(0, 1))
        )
        if not x.is_cpu and cudnn_rules(x):  # which refuses a strided state
            entering = trees.map_leaves(Tensor.contiguous, entering)
        batch_first = self.module.batch_first
        options = () if resets is None else (resets.transpose(0, 1) if batch_first else resets,)
        y, after = self.module(x.transpose(0, 1) if batch_first else x, entering, *options)
        after = (
            after.transpose(0, 1)
            if is_single
            else (after[0].transpose(0, 1), after[1].transpose(0, 1))
        )
        return y.transpose(0, 1) if batch_first else y, after


def cell_adapter(cell: nn.RNNCellBase) -> ModuleAdapter:
    """An adapter of nn.LSTMCell, nn.GRUCell or nn.RNNCell, which is called for each step."""
    adapter, is_pair = ModuleAdapter(cell), isinstance(cell, nn.LSTMCell)
    lanes = LaneLayout.infer({n: layer_zeros(cell, n) for n in (3, 2)}, cell.weight_hh)
    outputs = OutputLayout((0,) if is_pair else (), features=(cell.hidden_size,))
    x = cell.weight_hh.new_zeros(1, 1, cell.input_size)
    adapter.bind(Convention(Hints(), "step", arguments=("hx",), outputs=outputs, lanes=lanes), x)
    return adapter


@dataclass(frozen=True)
class StandardiseAdapter(Adapter):
    """Standardise: what it has counted is its state."""

    module: Standardise

    def initial_state(self, lanes: int, like: Tensor | None) -> State:
        del like
        return self.module.initial_state(lanes)

    def run(self, x: Tensor, state: State, resets: Tensor | None = None) -> tuple[Tensor, State]:
        del resets
        return self.module(x, state)

    def explain(self) -> str:
        return f"Standardise: by the first {self.module.steps} steps of each recording"


@dataclass(frozen=True)
class StatelessAdapter(Adapter):
    """A child of a chain that carries nothing: it runs on all steps at once."""

    module: nn.Module

    def initial_state(self, lanes: int, like: Tensor | None) -> State:
        del lanes, like
        return ()

    def takes_resets(self) -> bool:
        return True

    def run(self, x: Tensor, state: State, resets: Tensor | None = None) -> tuple[Tensor, State]:
        del resets
        return self.module(x), state


def stepwise_law(module: nn.Module, x: Tensor, steps: int) -> Law | None:
    """The law broken by a module that is to compute each step of each lane alone; None if none is.

    Args:
        module: a child of a chain; it is copied.
        x: its inputs `(T, B, ...)`.
        steps: of the chunks of the stream.
    """
    modes = modes_of(module)
    for twin in twins_of(module, x):
        x = twin.inputs(LANES)
        try:
            if remembered([twin], Convention(), x.split((2, 2, 3)))[1]:
                return Law("repeat", math.inf, 0.0)
            laboratory = Laboratory(StatelessAdapter(twin.module), twin.module, x)
            laws = [*laboratory.measure()]
            long = twin.inputs(LANES, max(LONG_STEPS, long_steps(steps, module)))
            laws += [laboratory.measure_long(long)]
            laws += laboratory.measure(modes) if modes.get("") else ()
        except CALL_ERRORS as error:
            return Law("whole", math.nan, 0.0, str(error).split("\n")[0])
        for law in laws:
            if not law.holds and law.name not in ("inputs", "memory", "credit"):
                return law
    return None


@dataclass(frozen=True)
class DifferenceAdapter(Adapter):
    """Difference: its state is that of its module."""

    module: Difference
    link: "Link"

    def prepare(self, x: Tensor) -> None:
        self.link.prepare(x)

    def initial_state(self, lanes: int, like: Tensor | None) -> State:
        return self.link.initial_state(lanes, like)

    def takes_resets(self) -> bool:
        return self.link.takes_resets()

    def starts_from_zeros(self) -> bool:
        return self.link.starts_from_zeros()

    def leaf_names(self, state: State) -> list[str]:
        return self.link.leaf_names(state)

    def explain(self) -> str:
        columns = self.module.columns.tolist()
        return f"Difference: outputs are added to the input columns {columns}\n" + (
            self.link.explain()
        )

    def run(self, x: Tensor, state: State, resets: Tensor | None = None) -> tuple[Tensor, State]:
        changes, after = self.link.run(x, state, resets)
        return self.module.restore(changes, x), after


@dataclass(frozen=True)
class Trials:
    """Binds an adapter to the convention that obeys the laws of carrying a state.

    Args:
        hints: what the user says.
    """

    hints: Hints

    def __call__(self, adapter: ModuleAdapter, x: Tensor | None) -> bool:
        """As `Find`.

        Raises:
            ModelError: no way of calling the module obeys the laws.
            StateError: trials are impossible.
        """
        if x is None:
            _guess(adapter)
            return False
        if not _can_be_measured(adapter, x):
            return False
        search = Search(adapter.module, x, self.hints)
        convention = search.find()
        if convention is None or len(search.choices) > 1:
            error = refusal(search, convention)
            if adapter.example is not None:
                carried = ", ".join(["T", "B", *map(str, adapter.example.shape[2:])])
                error.add_note(f"throughtime: the module was carried with inputs ({carried})")
            raise error
        if adapter.example is None or adapter.convention.where != convention.where:
            adapter.bind(convention, x)
        if x.shape[1] > 1:
            adapter.initial_state(x.shape[1], None)  # refused where it takes one lane
        return True


def _guess(adapter: ModuleAdapter) -> None:
    """Prepare an adapter for inputs that the first layer of its module declares.

    Raises:
        StateError: none does, or they are not those that the module takes.
    """
    refused, x = None, guessed_inputs(adapter.module)
    try:
        if x is not None:
            adapter.prepare(x)
    except ModelError as error:  # it may take other inputs
        refused = error
    if adapter.example is None:
        raise StateError(
            f"the layout of the state of {type(adapter.module).__name__} is not known yet: call"
            " net.initial_state(lanes, like=inputs), or net = tt.carry(module, inputs)"
        ) from refused


def _can_be_measured(adapter: ModuleAdapter, x: Tensor) -> bool:
    """Whether trials are possible now; they were made before where they are not.

    Raises:
        ModelError, StateError: they are impossible.
    """
    module, name = adapter.module, type(adapter.module).__name__
    if torch.compiler.is_compiling() or is_sharded(module):
        if adapter.example is None:
            raise StateError(
                f"how {name} is called is not known yet. It is found by trials on a copy, which is"
                " impossible while torch compiles or exports, and for weights that are spread over"
                " ranks: call net = tt.carry(module, x) with example inputs first, before"
                " fully_shard(net)"
            )
        return False
    if x.is_meta or any(p.is_meta for p in module.parameters()):
        raise ModelError(
            f"{name} or its inputs are on the meta device, where nothing can be measured:"
            " module.to_empty(device=...), load its weights, then carry it"
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise ModelError(
            "the module is TorchScript, whose layers have no hooks and whose attributes cannot"
            " be set. Carry the module that was scripted: net = tt.carry(module)"
        )
    return True


@dataclass(frozen=True)
class ChainAdapter(Adapter):
    """nn.Sequential: the outputs of each child are the inputs of the next.

    The state is a dict by the child's name. A child of the user's has none if it is shown to
    compute each step of each lane alone; otherwise it is carried by the search for any module.
    """

    module: nn.Sequential
    children: tuple[nn.Module, ...]
    links: dict[str, "Link"]
    _tried: set[Hashable] = field(default_factory=set[Hashable], init=False, repr=False)

    def prepare(self, x: Tensor) -> None:
        kind = input_kind(self.module, x)
        if kind in self._tried or not x.numel() or torch.compiler.is_compiling():
            return
        if is_sharded(self.module):
            return  # its layers are known; what stands between them is taken as it is
        steps, x = len(x), trial_inputs(x, self.module, LANES, STEPS)
        for name, link in self.links.items():
            with quiet(x.device):
                x = self._outputs(name, link, x, steps)
        _require_state(self.links)
        self._tried.add(kind)

    def _outputs(self, name: str, link: "Link", x: Tensor, steps: int) -> Tensor:
        """What a child makes of inputs, once it is known whether and how it carries a state."""
        module, law = link.module, None
        is_open = (
            isinstance(link, ModuleAdapter) and link.example is None and not has_layers(module)
        )
        if is_open or (isinstance(link, StatelessAdapter) and type(module) not in STEPWISE):
            law = stepwise_law(module, x, steps)
            if law is None:
                self.links[name] = link = StatelessAdapter(module)
            elif not is_open:
                raise ModelError(f"'{name}' of this nn.Sequential {broken(module, law)}")
        try:
            link.prepare(x)
        except ModelError as error:
            if law is None or len(parameters_of(module.forward)) > 1:
                raise
            raise ModelError(f"'{name}' of this nn.Sequential {broken(module, law)}") from error
        snapshot = Snapshot(module)
        try:
            set_modes(module, None)
            with torch.no_grad():
                y, _ = link.run(x, link.initial_state(LANES, x))
        finally:
            snapshot.restore()
        _require_steps(name, x, y)
        return y

    def initial_state(self, lanes: int, like: Tensor | None) -> State:
        if like is not None:
            self.prepare(like)
        elif not self._tried and any(isinstance(c, ModuleAdapter) for c in self.links.values()):
            guess = guessed_inputs(self.module)
            with contextlib.suppress(ModelError, *MISFIT_ERRORS):  # it may take other inputs
                if guess is not None:
                    self.prepare(guess)
        return {name: link.initial_state(lanes, None) for name, link in self.links.items()}

    def leaf_names(self, state: State) -> list[str]:
        return [f"{k}.{leaf}" for k, v in self.links.items() for leaf in v.leaf_names(state[k])]

    def explain(self) -> str:
        lines = ["Sequential: each module gets the outputs (T, B, ...) of the one before"]
        for name, link in self.links.items():
            if not isinstance(link, StatelessAdapter):
                first, *others = link.explain().split("\n")
                lines += [f"'{name}', {first}", *others]
        stateless = [n for n, link in self.links.items() if isinstance(link, StatelessAdapter)]
        if stateless:
            lines.append(f"no state, one call for each chunk: {', '.join(map(repr, stateless))}")
        return "\n  ".join(lines)

    def takes_resets(self) -> bool:
        return all(link.takes_resets() for link in self.links.values())

    def run(self, x: Tensor, state: State, resets: Tensor | None = None) -> tuple[Tensor, State]:
        if (*self.module._modules.values(),) != self.children:
            raise ModelError(
                "a module of this nn.Sequential was replaced after tt.carry; carry it again: net ="
                " tt.carry(module)"
            )
        after: dict[str, State] = {}
        for name, link in self.links.items():
            y, after[name] = link.run(x, state[name], resets)
            _require_steps(name, x, y)
            x = y
        return x, after


Link: TypeAlias = (
    LayerAdapter
    | StandardiseAdapter
    | DifferenceAdapter
    | StatelessAdapter
    | ModuleAdapter
    | ChainAdapter
)


def _require_steps(name: str, x: Tensor, y: Tensor) -> None:
    if y.shape[:2] != x.shape[:2]:
        raise ModelError(
            f"module '{name}' of this nn.Sequential turns {tuple(x.shape)} into {tuple(y.shape)},"
            " expected one output per step and lane. A carried recurrent layer returns its outputs"
            " only: drop a module that picks them out of a tuple, or the last step."
        )


def _require_state(links: dict[str, Link]) -> None:
    if all(isinstance(link, StatelessAdapter) for link in links.values()):
        raise ModelError(
            "none of the modules in this nn.Sequential carries a state; nothing to carry"
        )


def has_layers(module: nn.Module) -> bool:
    """Whether a module is, or has inside, a recurrent layer or cell of torch.nn."""
    return any(isinstance(part, RECURRENT) for part in module.modules())


def adapter_for(module: nn.Module, hints: Hints, name: str = "") -> Link:
    """The adapter that fits a module."""
    is_script = isinstance(module, torch.jit.ScriptModule)
    if hints == Hints(batch_first=hints.batch_first) and not is_script:
        # not the forward of a subclass
        home = type(module).forward.__module__ or ""  # of a class without a file
        is_known = home.startswith(("torch.nn.", "throughtime.nn."))
        if isinstance(module, nn.RNNBase) and is_known:
            if module.bidirectional:
                raise bidirectional_error(name or type(module).__name__)
            return LayerAdapter(module)
        if isinstance(module, nn.RNNCellBase) and is_known:
            return cell_adapter(module)
        if type(module) is Standardise:
            return StandardiseAdapter(module)
        if type(module) is Difference:
            return DifferenceAdapter(module, adapter_for(module.module, hints, name))
        if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
            links: dict[str, Link] = {}
            # named_children leaves out the second position of a module
            for key, child in zip(module._modules, module, strict=True):
                is_plain = all(type(m).__module__.startswith("torch.") for m in child.modules())
                plain = StatelessAdapter(child) if is_plain and not has_layers(child) else None
                links[key] = plain or adapter_for(child, hints, key)
            _require_state(links)
            return ChainAdapter(module, tuple(module), links)
    return ModuleAdapter(module, Trials(hints), hints)
