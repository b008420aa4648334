"""A module that maps `(x, state)` to `(y, state)` itself.

Shapes: `T` steps, `B` lanes, `D` input features.
"""

import inspect
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from throughtime.carry._adapter import (
    Adapter,
    LaneLayout,
    check_outputs,
    custom_initial_state,
    trial_call,
)
from throughtime.errors import ModelError, StateError
from throughtime.state import State


@dataclass
class ExplicitAdapter(Adapter):
    """The adapter of a module whose forward maps `(x, state)` to `(y, state)`.

    Trials with two and three lanes find the lane dimension of each state tensor.
    """

    module: nn.Module
    batch_first: bool
    # by the dtype of the weights, which `.half()` or `.to()` may change
    _layouts: dict[torch.dtype | None, LaneLayout] = field(init=False, repr=False)
    _weight: Tensor | None = field(init=False, repr=False)
    _takes_resets: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._layouts = {}
        self._weight = next(self.module.parameters(), None)
        self._takes_resets = "resets" in inspect.signature(self.module.forward).parameters

    def initial_state(self, lanes: int, like: Tensor | None) -> State:
        layout = self._layout(like)
        custom = custom_initial_state(self.module)
        if custom is not None:
            return layout.lanes_first(custom(lanes))
        weight = next(self.module.parameters(), like)
        return layout.zeros(lanes, None if weight is None else weight.device)

    def needs_trial(self) -> bool:
        return self._dtype() not in self._layouts and custom_initial_state(self.module) is None

    def takes_resets(self, x: Tensor | None) -> bool | None:
        del x
        return self._takes_resets

    def read_outputs(self, result: Any, x: Tensor) -> Tensor:
        return check_outputs(self.module, result, x, self.batch_first)

    def forward_arguments(self, x: Tensor, state: State) -> tuple[Any, ...] | None:
        if self._takes_resets:
            return None
        return x.transpose(0, 1) if self.batch_first else x, state

    def starts_from_zeros(self) -> bool:
        return custom_initial_state(self.module) is None

    def run(self, x: Tensor, state: State, resets: Tensor | None = None) -> tuple[Tensor, State]:
        layout = self._layout(x)
        y, after = self._call(x, layout.to_module(state), resets)
        return y, layout.lanes_first(after)

    def _call(self, x: Tensor, state: State, resets: Tensor | None = None) -> tuple[Tensor, State]:
        options: dict[str, Any] = {}
        if resets is not None:
            options["resets"] = resets.transpose(0, 1) if self.batch_first else resets
        result = self.module(x.transpose(0, 1) if self.batch_first else x, state, **options)
        if not (isinstance(result, tuple) and len(result) == 2):
            raise ModelError(
                f"{type(self.module).__name__}.forward takes a second argument, so it must return"
                f" the pair (y, state); it returned a {type(result).__name__}. If that argument is"
                " not a state, wrap the module so that its forward takes only x."
            )
        return check_outputs(self.module, result[0], x, self.batch_first), result[1]

    def _dtype(self) -> torch.dtype | None:
        return None if self._weight is None else self._weight.dtype

    def _layout(self, like: Tensor | None) -> LaneLayout:
        dtype = self._dtype()
        if dtype not in self._layouts:
            custom = custom_initial_state(self.module)
            with torch.no_grad():
                self._layouts[dtype] = (
                    self._infer_layout(like)
                    if custom is None
                    else LaneLayout.infer(custom(2), custom(3))
                )
        return self._layouts[dtype]

    def _infer_layout(self, like: Tensor | None) -> LaneLayout:
        """Find the layout by trials, and check that a state of None means zeros."""
        name = type(self.module).__name__
        if like is None:
            raise StateError(
                f"the layout of the state of {name} is not known yet: call net.initial_state(lanes,"
                " like=inputs), or give the module an initial_state(lanes) method"
            )
        two, three = (like[:1, :1].expand(1, n, *like.shape[2:]) for n in (2, 3))
        y_none, state_two = trial_call(self.module, partial(self._call, two, None))
        _, state_three = trial_call(self.module, partial(self._call, three, None))
        layout = LaneLayout.infer(state_two, state_three)
        zeros = layout.to_module(layout.zeros(2, like.device))
        y_zeros, _ = trial_call(self.module, partial(self._call, two, zeros))
        if not torch.equal(y_none, y_zeros):
            raise StateError(
                f"{name} gives different outputs for the state None and for a zero state. If its"
                " initial state is not zero, give it an initial_state(lanes) method that returns"
                " it. Otherwise its forward is not deterministic (random numbers, a counter)"
            )
        return layout
