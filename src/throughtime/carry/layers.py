"""Recurrent layers and cells of torch.nn, layers of tt.nn, nn.Sequential, and any other module.

Shapes: `T` steps, `B` lanes, `H` hidden, `L` layers.
"""

import contextlib
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from throughtime import state as trees
from throughtime._device import cudnn_rules
from throughtime.carry._adapter import Adapter, LaneLayout
from throughtime.carry._calls import BoundModule, Convention
from throughtime.carry._inside import RECURRENT, parameters_of
from throughtime.carry._refusal import (
    ambiguous_error,
    bidirectional_error,
    broken,
    convention_lines,
    refusal,
    state_shapes,
)
from throughtime.carry._search import Hints, Search, is_method, stepwise_law
from throughtime.carry._trial import (
    LANES,
    STEPS,
    Snapshot,
    guessed_inputs,
    is_sharded,
    quiet,
    set_modes,
    trial_inputs,
)
from throughtime.errors import ModelError, StateError
from throughtime.nn.affine import Standardise
from throughtime.nn.layers import Recurrent
from throughtime.state import State

RecurrentModule: TypeAlias = nn.RNNBase | nn.RNNCellBase
InputKind: TypeAlias = tuple[bool, int, torch.Size, bool]
# The exceptions that a module raises for inputs or a state that do not fit it.
MISFIT_ERRORS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError)
STEPWISE = (nn.Linear, nn.Embedding, nn.Dropout, nn.Tanh, nn.ReLU, nn.Identity)  # known to be so


def _hidden_names(state: State) -> list[str]:
    return ["h"] if isinstance(state, Tensor) else ["h", "c"]


def _layer_lines(adapter: Adapter, layer: RecurrentModule, called: str) -> str:
    """How a layer is called; its contract is known, so nothing is tried."""
    state = adapter.initial_state(1, None)
    shapes = state_shapes(adapter.leaf_names(state), state)
    return f"{type(layer).__name__}: {called}\n  state, lanes first: {shapes}\n  start: zeros"


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
        return _hidden_names(state)

    def explain(self) -> str:
        order = "(B, T, {})" if self.module.batch_first else "(T, B, {})"
        called = f"called with {order.format(self.module.input_size)}: one call for each chunk"
        return _layer_lines(self, self.module, called)

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


@dataclass(frozen=True)
class CellAdapter(Adapter):
    """nn.LSTMCell, nn.GRUCell, nn.RNNCell, looped over time."""

    module: nn.RNNCellBase

    def initial_state(self, lanes: int, like: Tensor | None) -> State:
        del like
        h = self.module.weight_hh.new_zeros(lanes, self.module.hidden_size)
        return (h, torch.zeros_like(h)) if isinstance(self.module, nn.LSTMCell) else h

    def leaf_names(self, state: State) -> list[str]:
        return _hidden_names(state)

    def explain(self) -> str:
        called = f"called with (B, {self.module.input_size}): one call for each step"
        return _layer_lines(self, self.module, called)

    def run(self, x: Tensor, state: State, resets: Tensor | None = None) -> tuple[Tensor, State]:
        del resets
        outputs: list[Tensor] = []
        for step in x.unbind(0):
            state = self.module(step, state)
            outputs.append(state if isinstance(state, Tensor) else state[0])
        return torch.stack(outputs), state


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


class ModuleAdapter(Adapter):
    """Calls a module by the convention that obeys the laws of carrying a state.

    Args:
        module: shared, not copied.
        hints: what the user says about it.
    """

    def __init__(self, module: nn.Module, hints: Hints) -> None:
        self.module, self.hints = module, hints
        self.bound: BoundModule | None = None
        self._tried: set[InputKind] = set()

    def prepare(self, x: Tensor) -> None:
        kind = (x.is_floating_point(), x.dim(), x.shape[2:], self.module.training)
        if kind in self._tried or not x.numel():
            return
        if not self._can_be_measured(x):
            return
        search = Search(self.module, x, self.hints)
        convention = search.find()
        if convention is not None and len(search.choices) > 1:
            raise ambiguous_error(search)
        if convention is None:
            error = refusal(search)
            if self.bound is not None:
                carried = ", ".join(["T", "B", *map(str, self.bound.example.shape[2:])])
                error.add_note(f"throughtime: the module was carried with inputs ({carried})")
            raise error
        self._bind(convention, x)
        if convention.lanes.dims and x.shape[1] > 1:
            self.initial_state(x.shape[1], None)  # refused where it takes one lane
        self._tried |= {kind, (*kind[:3], False)}  # in training mode, both modes are measured

    def _can_be_measured(self, x: Tensor) -> bool:
        """Whether trials are possible now; they were made before where they are not.

        Raises:
            ModelError, StateError: they are impossible.
        """
        if torch.compiler.is_compiling():
            if self.bound is None:
                raise StateError(
                    "how the module is called is not known yet, and cannot be found while torch"
                    " compiles or exports: call net = tt.carry(module, x) with example inputs first"
                )
            return False
        if x.is_meta or any(p.is_meta for p in self.module.parameters()):
            raise ModelError(
                f"{type(self.module).__name__} or its inputs are on the meta device, where nothing"
                " can be measured: module.to_empty(device=...), load its weights, then carry it"
            )
        if isinstance(self.module, torch.jit.ScriptModule):
            raise ModelError(
                "the module is TorchScript, whose layers have no hooks and whose attributes cannot"
                " be set. Carry the module that was scripted: net = tt.carry(module)"
            )
        if is_sharded(self.module):
            if self.bound is None:
                raise StateError(
                    f"how {type(self.module).__name__} is called is found by trials on a copy, and"
                    " weights that are spread over ranks cannot be copied: call net ="
                    " tt.carry(module, x) before fully_shard(net)"
                )
            return False
        return True

    def _bind(self, convention: Convention, x: Tensor) -> None:
        if self.bound is not None:
            if self.bound.convention.where == convention.where:
                return
            self.bound.release()
        self.bound = BoundModule(self.module, convention, torch.zeros_like(x[:1, :1]))
        self.unpack = convention.outputs.unpack if convention.outputs.several else None

    def _ready(self, like: Tensor | None) -> BoundModule:
        if like is not None:
            self.prepare(like)
        refused = self._guess() if self.bound is None else None
        if self.bound is None:
            raise StateError(
                f"the layout of the state of {type(self.module).__name__} is not known yet: call"
                " net.initial_state(lanes, like=inputs), or net = tt.carry(module, inputs)"
            ) from refused
        return self.bound

    def _guess(self) -> ModelError | None:
        """Prepare for inputs that the first layer declares; why not, if that is impossible."""
        inputs = guessed_inputs(self.module)
        if inputs is None:
            return None
        try:
            self.prepare(inputs)
        except ModelError as refused:  # it may take other inputs
            return refused
        return None

    def initial_state(self, lanes: int, like: Tensor | None) -> State:
        method: Any = getattr(self.module, "initial_state", None)
        is_own = is_method(self.module, "initial_state") and self.hints == Hints()
        if like is None and self.bound is None and is_own:
            states: dict[int, State] = {n: method(n) for n in (3, 2)}
            return LaneLayout.infer(states, None).lanes_first(method(lanes))
        return self._ready(like).initial_state(lanes, like)

    def forward_arguments(self, x: Tensor, state: State) -> tuple[Any, ...] | None:
        return None if self.bound is None else self.bound.forward_arguments(x, state)

    def read_outputs(self, result: Any, x: Tensor) -> Tensor:
        return self._ready(None).read_outputs(result, x)

    def starts_from_zeros(self) -> bool:
        return self.bound is not None and self.bound.starts_from_zeros()

    def leaf_names(self, state: State) -> list[str]:
        return self._ready(None).leaf_names(state)

    def run(self, x: Tensor, state: State, resets: Tensor | None = None) -> tuple[Tensor, State]:
        bound = self._ready(x) if self.bound is None else self.bound  # every chunk passes here
        return bound.run(x, state, resets)

    def explain(self) -> str:
        name = type(self.module).__name__
        if self.bound is None:
            return (
                f"{name}: how it is called is found by trials at the first inputs;"
                " tt.carry(module, x) finds it at once"
            )
        called, *others = convention_lines(self.bound)
        return "\n  ".join([f"{name}: {called}", *others])


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
        kind = (x.is_floating_point(), x.dim(), x.shape[2:], self.module.training)
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
        is_open = isinstance(link, ModuleAdapter) and link.bound is None and not has_layers(module)
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
    | CellAdapter
    | StandardiseAdapter
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
            return CellAdapter(module)
        if type(module) is Standardise:
            return StandardiseAdapter(module)
        if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
            links: dict[str, Link] = {}
            # named_children leaves out the second position of a module
            for key, child in zip(module._modules, module, strict=True):
                is_plain = all(type(m).__module__.startswith("torch.") for m in child.modules())
                plain = StatelessAdapter(child) if is_plain and not has_layers(child) else None
                links[key] = plain or adapter_for(child, hints, key)
            _require_state(links)
            return ChainAdapter(module, tuple(module), links)
    return ModuleAdapter(module, hints)
