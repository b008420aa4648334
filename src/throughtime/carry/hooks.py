"""A module that keeps its recurrent layers to itself: the states go in and come out by hooks.

Shapes: `T` steps, `B` lanes, `D` input features, `H` hidden, `L` layers.
"""

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from throughtime import state as trees
from throughtime.carry._adapter import NotWholeError, outputs_of, quietly
from throughtime.carry.layers import plain, turned
from throughtime.errors import ModelError
from throughtime.nn.layers import Recurrent
from throughtime.state import State


@dataclass(eq=False)
class _Exchange:
    """The states that go into the layers of one forward call, and come out."""

    owner: "Hiding"
    before: dict[str, State]
    shape: torch.Size  # (T, B)
    resets: Tensor | None
    after: dict[str, State] = field(default_factory=dict[str, State])
    whole: bool = True  # each layer is called once, with all steps of all lanes

    def see(self, name: str, layer: nn.Module, sequence: Tensor, own: Tensor | None) -> None:
        """A call of a layer, perhaps with resets of the module's own."""
        order = slice(1, None, -1) if getattr(layer, "batch_first", False) else slice(2)
        self.whole = (
            self.whole
            and own is None
            and name not in self.after
            and sequence.shape[:2] == self.shape[order]
        )
        if self.resets is not None and not self.whole:
            raise NotWholeError


_exchange: ContextVar[_Exchange | None] = ContextVar(
    "_exchange", default=None
)  # one for each thread


@dataclass(eq=False)
class Hiding:
    """A user module that keeps recurrent layers to itself and returns outputs only.

    While its forward runs here, hooks hand each layer its carried state on the layer's first call
    and take the state that the last call returned; at any other time they do nothing. A state that
    the module passes itself must be zeros on the first call: it is replaced. Resets are handed to
    layers of `tt.nn`, if a trial shows that each plays all steps in one call.
    """

    module: nn.Module
    layers: Mapping[str, nn.Module]
    batch_first: bool
    _whole: bool | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        for name, layer in self.layers.items():
            layer.register_forward_pre_hook(partial(self._put, name), with_kwargs=True)
            layer.register_forward_hook(partial(self._take, name))

    def initial(self, lanes: int, like: Tensor | None) -> State:
        return {name: plain(layer).initial(lanes, like) for name, layer in self.layers.items()}

    def needs_trial(self) -> bool:
        return False

    def takes_resets(self, x: Tensor | None) -> bool | None:
        if not all(isinstance(layer, Recurrent) for layer in self.layers.values()):
            return False
        if self._whole is None and x is not None and len(x):
            self._whole = self._try(x)
        return self._whole

    def _try(self, x: Tensor) -> bool:
        """A trial says it, not the calls so far, which a resumed run does not know: it would take other sums, of other bits."""
        lanes = x.shape[1]
        steps = 3 if lanes == 2 else 2  # as many as lanes would not tell one from the other
        exchange = _Exchange(self, self.initial(lanes, x), torch.Size((steps, lanes)), None)
        try:
            quietly(
                self.module, lambda: (self._called(exchange, x[:1].expand(steps, *x.shape[1:])), ())
            )
        except ModelError:
            return False
        return exchange.whole and len(exchange.after) > 0

    def run(self, x: Tensor, state: State, resets: Tensor | None = None) -> tuple[Tensor, State]:
        exchange = _Exchange(self, state, x.shape[:2], resets)
        y = self._called(exchange, x)
        if not exchange.after:
            raise ModelError(
                f"none of the recurrent layers {list(self.layers)} ran in"
                f" {type(self.module).__name__}.forward: they were replaced after tt.carry (carry"
                " it again), or are not used"
            )
        return outputs_of(self.module, y, x, self.batch_first), {**state, **exchange.after}

    def _called(self, exchange: _Exchange, x: Tensor) -> Any:
        """What the module returns for inputs, its layers fed from the exchange."""
        token = _exchange.set(exchange)
        try:
            return self.module(x.transpose(0, 1) if self.batch_first else x)
        except NotWholeError:
            self._whole = False
            raise
        except RuntimeError as error:
            error.add_note(
                f"throughtime: the layers of {type(self.module).__name__} were given the carried"
                f" state of {x.shape[1]} lanes, and inputs"
                f" {'(B, T, D)' if self.batch_first else '(T, B, D)'}. If the module wants it the"
                f" other way round, say tt.carry(module, batch_first={not self.batch_first}); if it"
                " folds time into the batch, let forward(x, state) return (y, state)."
            )
            raise
        finally:
            _exchange.reset(token)

    def _put(
        self, name: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        exchange = _exchange.get()
        if exchange is None or exchange.owner is not self:
            _refuse_recompute(name)
            return None
        sequence = args[0] if args else kwargs.pop("input")
        given = args[1] if len(args) > 1 else kwargs.pop("hx", None)
        own = {"resets": args[2]} if len(args) > 2 else kwargs
        if not isinstance(sequence, Tensor):
            raise ModelError(
                f"layer '{name}' is given a {type(sequence).__name__}; a stream needs no packing:"
                " pass the tensor of its steps"
            )
        before = exchange.before[name]
        exchange.see(name, layer, sequence, own.get("resets"))
        if name in exchange.after:
            _check_goes_on(name, given, exchange.after[name])
            return (sequence, given), {**kwargs, **own}
        if given is not None:
            _check_fresh(name, given)
        kwargs = {**kwargs, **own}
        if exchange.resets is not None:
            kwargs = {
                **kwargs,
                "resets": (
                    exchange.resets.transpose(0, 1)
                    if getattr(layer, "batch_first", False)
                    else exchange.resets
                ),
            }
        return (sequence, turned(before) if isinstance(layer, nn.RNNBase) else before), kwargs

    def _take(self, name: str, layer: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        del args
        exchange = _exchange.get()
        if exchange is not None and exchange.owner is self:
            exchange.after[name] = turned(result[1]) if isinstance(layer, nn.RNNBase) else result


def _refuse_recompute(name: str) -> None:
    """A checkpointed forward runs a second time in the backward pass, where no state is handed in."""
    # As torch.utils.checkpoint itself asks whether a backward pass runs; there is no public way.
    if torch._C._current_graph_task_id() != -1:
        raise ModelError(
            f"layer '{name}' is run again inside a backward pass, by activation checkpointing: its"
            " carried state is not there any more. Let forward(x, state) return (y, state), so"
            " that the state is an argument of what is checkpointed."
        )


def _check_goes_on(name: str, given: State, last: State) -> None:
    """A layer's second call in one forward goes on from its first, and does not start another sequence."""
    if given is not None and all(
        a is b for a, b in zip(trees.tensors(given), trees.tensors(last), strict=True)
    ):
        return  # the usual loop over a cell, without looking at a number
    if given is None or (_is_fresh(given) and not _is_fresh(last)):
        raise ModelError(
            f"layer '{name}' runs twice in one forward, the second time from no state: two"
            " sequences through one layer have two states. Let forward(x, state) return (y,"
            " state)."
        )


def _is_fresh(state: State) -> bool:
    """Zeros that nothing was learnt for: what a module makes itself where it has no state."""
    return not any(leaf.requires_grad or bool(leaf.any()) for leaf in trees.tensors(state))


def _check_fresh(name: str, given: State) -> None:
    if not _is_fresh(given):
        raise ModelError(
            f"the module hands layer '{name}' a state of its own that is not zeros: one kept in an"
            " attribute, learnt, or made by an encoder. A carried state cannot replace it"
            " silently; let forward(x, state) return (y, state), and give the module an"
            " initial_state(lanes) method if it learns where to start."
        )
