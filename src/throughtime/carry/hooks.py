"""A module with recurrent layers inside: hooks set and read the layers' states.

Shapes: `T` steps, `B` lanes, `D` input features.
"""

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from throughtime import state as trees
from throughtime.carry._adapter import Adapter, ResetsUnsupportedError, check_outputs, trial_call
from throughtime.carry.layers import RecurrentModule, layer_adapter, swap_lane_dim
from throughtime.errors import ModelError
from throughtime.nn.layers import Recurrent
from throughtime.state import State


@dataclass(eq=False)
class _ForwardCall:
    """One forward call of the module: the states that its layers take and return."""

    adapter: "HookAdapter"
    before: Mapping[str, State]
    shape: torch.Size  # (T, B)
    resets: Tensor | None
    after: dict[str, State] = field(default_factory=dict[str, State])
    single_calls: bool = True  # each layer was called once, with all steps of all lanes


_active_call: ContextVar[_ForwardCall | None] = ContextVar("_active_call", default=None)


@dataclass(eq=False)
class HookAdapter(Adapter):
    """A module that contains recurrent layers and returns outputs only.

    The hooks act only while `run` calls the module. A layer's first call takes the carried state;
    the state that its last call returns is carried on. A state that the module itself passes to a
    layer must be zeros on the first call, because the carried state replaces it. Layers of `tt.nn`
    get the resets, if a trial shows that each runs all steps in one call.
    """

    module: nn.Module
    layers: Mapping[str, RecurrentModule]
    batch_first: bool
    _single_calls: bool | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        for name, layer in self.layers.items():
            layer.register_forward_pre_hook(partial(self._set_state, name), with_kwargs=True)
            layer.register_forward_hook(partial(self._read_state, name))

    def initial_state(self, lanes: int, like: Tensor | None) -> State:
        return {k: layer_adapter(v).initial_state(lanes, like) for k, v in self.layers.items()}

    def leaf_names(self, state: State) -> list[str]:
        adapters = {name: layer_adapter(layer) for name, layer in self.layers.items()}
        return [f"{k}.{leaf}" for k, v in adapters.items() for leaf in v.leaf_names(state[k])]

    def read_outputs(self, result: Any, x: Tensor) -> Tensor:
        return check_outputs(self.module, result, x, self.batch_first)

    def forward_arguments(self, x: Tensor, state: State) -> tuple[Any, ...] | None:
        del state
        return (x.transpose(0, 1) if self.batch_first else x,)

    def takes_resets(self, x: Tensor | None) -> bool | None:
        if not all(isinstance(layer, Recurrent) for layer in self.layers.values()):
            return False
        if self._single_calls is None and x is not None and len(x):
            self._single_calls = self._try_single_calls(x)
        return self._single_calls

    def _try_single_calls(self, x: Tensor) -> bool:
        """Whether a trial calls each layer once, with all steps.

        The calls so far must not decide this: a resumed run has made none, and would sum in another
        order.
        """
        lanes = x.shape[1]
        steps = 3 if lanes == 2 else 2  # steps and lanes must differ to be told apart
        call = _ForwardCall(self, self.initial_state(lanes, x), torch.Size((steps, lanes)), None)
        inputs = x[:1].expand(steps, *x.shape[1:])
        try:
            trial_call(self.module, lambda: (self._call_module(call, inputs), ()))
        except ModelError:
            return False
        return call.single_calls and len(call.after) > 0

    def run(self, x: Tensor, state: State, resets: Tensor | None = None) -> tuple[Tensor, State]:
        call = _ForwardCall(self, state, x.shape[:2], resets)
        y = self._call_module(call, x)
        if not call.after:
            raise ModelError(
                f"none of the recurrent layers {list(self.layers)} ran in"
                f" {type(self.module).__name__}.forward: they were replaced after tt.carry (carry"
                " it again), or are not used"
            )
        return check_outputs(self.module, y, x, self.batch_first), {**state, **call.after}

    def _call_module(self, call: _ForwardCall, x: Tensor) -> Any:
        token = _active_call.set(call)
        try:
            return self.module(x.transpose(0, 1) if self.batch_first else x)
        except ResetsUnsupportedError:
            self._single_calls = False
            raise
        except RuntimeError as error:
            error.add_note(
                f"throughtime: the layers of {type(self.module).__name__} got the carried state of"
                f" {x.shape[1]} lanes, and inputs"
                f" {'(B, T, D)' if self.batch_first else '(T, B, D)'}. If the module expects the"
                f" other order, write tt.carry(module, batch_first={not self.batch_first}); if it"
                " folds time into the batch, let forward(x, state) return (y, state)."
            )
            raise
        finally:
            _active_call.reset(token)

    def _set_state(
        self, name: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Pass the carried state, and resets, to the layer's first call."""
        call = _active_call.get()
        if call is None or call.adapter is not self:
            _refuse_recompute(name)
            return None
        sequence = args[0] if args else kwargs.pop("input")
        passed = args[1] if len(args) > 1 else kwargs.pop("hx", None)
        if len(args) > 2:
            kwargs = {**kwargs, "resets": args[2]}
        if not isinstance(sequence, Tensor):
            raise ModelError(
                f"layer '{name}' gets a {type(sequence).__name__}; a stream needs no packing: pass"
                " the tensor of its steps"
            )
        batch_first = getattr(layer, "batch_first", False)
        shape = call.shape[::-1] if batch_first else call.shape
        if kwargs.get("resets") is not None or name in call.after or sequence.shape[:2] != shape:
            call.single_calls = False
        if call.resets is not None and not call.single_calls:
            raise ResetsUnsupportedError
        if name in call.after:
            _check_continues(name, passed, call.after[name])
            return (sequence, passed), kwargs
        if passed is not None and not _is_untouched(passed):
            raise ModelError(
                f"the module passes layer '{name}' a state of its own that is not zeros: one kept"
                " in an attribute, learned, or made by an encoder. A carried state cannot replace"
                " it silently; let forward(x, state) return (y, state), and give the module an"
                " initial_state(lanes) method if it learns its initial state."
            )
        if call.resets is not None:
            resets = call.resets.transpose(0, 1) if batch_first else call.resets
            kwargs = {**kwargs, "resets": resets}
        before = call.before[name]
        return (
            sequence,
            swap_lane_dim(before) if isinstance(layer, nn.RNNBase) else before,
        ), kwargs

    def _read_state(self, name: str, layer: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        """Keep the state that the layer returned."""
        del args
        call = _active_call.get()
        if call is not None and call.adapter is self:
            call.after[name] = swap_lane_dim(result[1]) if isinstance(layer, nn.RNNBase) else result


def _refuse_recompute(name: str) -> None:
    """Refuse a checkpointed forward that runs again in the backward pass, without its state."""
    # torch.utils.checkpoint itself detects a running backward pass so; there is no public way.
    if torch._C._current_graph_task_id() != -1:
        raise ModelError(
            f"layer '{name}' is run again inside a backward pass, by activation checkpointing: its"
            " carried state is gone by then. Let forward(x, state) return (y, state), so that the"
            " state is an argument of what is checkpointed."
        )


def _check_continues(name: str, passed: State, last: State) -> None:
    """Check that a layer's second call in one forward continues the sequence of its first."""
    if passed is not None:
        pairs = zip(trees.tensors(passed), trees.tensors(last), strict=True)
        if all(a is b for a, b in pairs):
            return  # the usual loop over a cell, decided without reading a value
    if passed is None or (_is_untouched(passed) and not _is_untouched(last)):
        raise ModelError(
            f"layer '{name}' runs twice in one forward, the second time without a state: two"
            " sequences through one layer have two states. Let forward(x, state) return (y,"
            " state)."
        )


def _is_untouched(state: State) -> bool:
    """Whether a state is zeros that nothing is learned for, as modules make when they get none."""
    return not any(leaf.requires_grad or bool(leaf.any()) for leaf in trees.tensors(state))
