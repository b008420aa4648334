"""A module of the user's, called as its author wrote it.

The way of calling it is found by trials on a copy, at the first inputs. Shapes: `T` steps, `B`
lanes.
"""

from typing import Any

import torch
from torch import Tensor, nn

from throughtime.carry._adapter import Adapter, LaneLayout
from throughtime.carry._bound import BoundModule
from throughtime.carry._convention import Convention
from throughtime.carry._explain import convention_lines
from throughtime.carry._refusal import refusal
from throughtime.carry._search import Search
from throughtime.carry._subject import Hints
from throughtime.carry._trial import guessed_inputs, is_sharded
from throughtime.errors import ModelError, StateError
from throughtime.state import State

InputKind = tuple[bool, int, torch.Size, bool]


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
        if torch.compiler.is_compiling():
            if self.bound is None:
                raise StateError(
                    "how the module is called is not known yet, and cannot be found while torch"
                    " compiles or exports: call net = tt.carry(module, x) with example inputs first"
                )
            return
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
            return
        search = Search(self.module, x, self.hints)
        convention = search.find()
        if convention is None:
            error = refusal(self.module, search)
            if self.bound is not None:
                carried = ", ".join(["T", "B", *map(str, self.bound.example.shape[2:])])
                error.add_note(f"throughtime: the module was carried with inputs ({carried})")
            raise error
        self._bind(convention, x)
        self._tried |= {kind, (*kind[:3], False)}  # in training mode, both modes are measured

    def _bind(self, convention: Convention, x: Tensor) -> None:
        if self.bound is not None:
            if self.bound.convention.source == convention.source:
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
        method = getattr(self.module, "initial_state", None)
        if like is None and self.bound is None and callable(method) and self.hints == Hints():
            states: dict[int, State] = {n: method(n) for n in (3, 2)}
            return LaneLayout.infer(states, None).lanes_first(method(lanes))
        return self._ready(like).initial_state(lanes, like)

    def takes_resets(self) -> bool:
        return self.bound is not None and self.bound.takes_resets()

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
