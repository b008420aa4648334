"""A module that maps `(x, state)` to `(y, state)` itself.

Shapes: `T` steps, `B` lanes, `D` input features, `H` hidden, `L` layers.
"""

import inspect
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from throughtime.carry._adapter import HasInitialState, outputs_of, own_start, quietly
from throughtime.carry._lane_dim import Layout
from throughtime.errors import ModelError, StateError
from throughtime.state import State


@dataclass
class Explicit:
    """A module that maps `(x, state)` to `(y, state)`.

    Its state's lane dimensions are found by a trial with 2 and 3 lanes.
    """

    module: nn.Module
    batch_first: bool
    _known: tuple[torch.dtype | None, Layout] | None = field(default=None, init=False, repr=False)
    _weight: Tensor | None = field(default=None, init=False, repr=False)
    _takes: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        self._weight = next(self.module.parameters(), None)
        self._takes = "resets" in inspect.signature(self.module.forward).parameters

    def initial(self, lanes: int, like: Tensor | None) -> State:
        layout = self._layout(like)
        own = own_start(self.module)
        if own is not None:
            return layout.inward(own.initial_state(lanes))
        weight = next(self.module.parameters(), like)
        return layout.zeros(lanes, None if weight is None else weight.device)

    def needs_trial(self) -> bool:
        known = self._known is not None and self._known[0] == self._dtype()
        return not known and own_start(self.module) is None

    def takes_resets(self, x: Tensor | None) -> bool | None:
        del x
        return self._takes

    def run(self, x: Tensor, state: State, resets: Tensor | None = None) -> tuple[Tensor, State]:
        layout = self._layout(x)
        y, after = self._call(x, layout.outward(state), resets)
        return y, layout.inward(after)

    def _call(self, x: Tensor, state: State, resets: Tensor | None = None) -> tuple[Tensor, State]:
        given = (
            {}
            if resets is None
            else {"resets": resets.transpose(0, 1) if self.batch_first else resets}
        )
        result = self.module(x.transpose(0, 1) if self.batch_first else x, state, **given)
        if not (isinstance(result, tuple) and len(result) == 2):
            raise ModelError(
                f"{type(self.module).__name__}.forward takes a second argument, so it must return"
                f" the pair (y, state); it returned a {type(result).__name__}. If that argument is"
                " no state, wrap the module in one whose forward takes x alone."
            )
        return outputs_of(self.module, result[0], x, self.batch_first), result[1]

    def _dtype(self) -> torch.dtype | None:
        return None if self._weight is None else self._weight.dtype

    def _layout(self, like: Tensor | None) -> Layout:
        """As learnt before; learnt anew after the module changed its type."""
        if self._known is None or self._known[0] != self._dtype():
            own = own_start(self.module)
            layout = self._try(like) if own is None else self._ask(own)
            self._known = (self._dtype(), layout)
        return self._known[1]

    @staticmethod
    def _ask(module: HasInitialState) -> Layout:
        with torch.no_grad():
            return Layout.compare(module.initial_state(2), module.initial_state(3))

    def _try(self, like: Tensor | None) -> Layout:
        if like is None:
            raise StateError(
                f"the state of {type(self.module).__name__} is known after a trial:"
                " net.initial_state(lanes, like=inputs), or give the module an"
                " initial_state(lanes) method"
            )
        two, three = (like[:1, :1].expand(1, n, *like.shape[2:]) for n in (2, 3))
        y_none, s_two = quietly(self.module, partial(self._call, two, None))
        _, s_three = quietly(self.module, partial(self._call, three, None))
        layout = Layout.compare(s_two, s_three)
        y_zeros, _ = quietly(
            self.module, partial(self._call, two, layout.outward(layout.zeros(2, like.device)))
        )
        if not torch.equal(y_none, y_zeros):
            raise StateError(
                f"{type(self.module).__name__} starts from something else than zeros when its state"
                " is None; give it an initial_state(lanes) method that returns where its"
                " recordings start (or it gives other outputs each time, from random numbers or a"
                " counter of calls)"
            )
        return layout
