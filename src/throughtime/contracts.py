"""How each kind of module is run as `(x, state) -> (y, state)`: one contract per kind.

Layer        nn.LSTM, nn.GRU, nn.RNN            state (B, L, H), one or two of them
Cell         nn.LSTMCell, nn.GRUCell, nn.RNNCell  a loop over time with `unbind`: indexing `x[t]` in a loop
             has a quadratic backward, because each index allocates a gradient for all of x
Chain        nn.Sequential                      a dict of its children's states
Hiding       a module with layers inside        a dict of the layers' states, put in and taken out by hooks
Explicit     a module that maps (x, state) to (y, state)   whatever it returns, lanes turned to the front

Shapes: `T` steps, `B` lanes, `D` input features, `H` hidden, `L` layers.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from throughtime import state as trees
from throughtime.errors import ModelError, StateError
from throughtime.layout import Layout
from throughtime.state import State

RECURRENT = (nn.RNNBase, nn.RNNCellBase)


class Contract(Protocol):
    """One way of running a module with its state made explicit."""

    def initial(self, lanes: int, like: Tensor | None) -> State:
        """The state entering the first step of a recording."""
        ...

    def needs_trial(self) -> bool:
        """Whether `initial` must see inputs first, to learn the state's layout from a trial."""
        ...

    def run(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """`(T, B, ...)` to `(T, B, C)` and the state after it, without resets."""
        ...


class HasInitialState(Protocol):
    """A user module that says what its recordings start from."""

    def initial_state(self, lanes: int) -> State:
        """The state for `lanes` lanes, as the module's forward takes it."""
        ...


def contract_of(module: nn.Module, batch_first: bool | None) -> Contract:
    """The contract that fits a module; a module that cannot be carried is refused with the reason."""
    layers = {name: m for name, m in module.named_modules() if isinstance(m, RECURRENT)}
    for name, layer in layers.items():
        if isinstance(layer, nn.RNNBase) and layer.bidirectional:
            raise ModelError(
                f"layer '{name or type(layer).__name__}' is bidirectional: its backward direction starts at the end of the recording, "
                "and a stream has none, so no state can be carried into it. Use bidirectional=False."
            )
    if isinstance(module, nn.RNNBase):
        return Layer(module)
    if isinstance(module, nn.RNNCellBase):
        return Cell(module)
    if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
        return _chain(module, batch_first)
    if _own_start(module) is not None or _takes_state(module):
        return Explicit(module, _batch_first(layers, batch_first))
    if layers:
        return Hiding(module, layers, _batch_first(layers, batch_first))
    raise ModelError(
        f"{type(module).__name__} has no recurrent layer of torch.nn inside, and its forward takes no state: there is nothing to "
        "carry, or it is hidden where it cannot be reached. Let forward(x, state) return (y, state)."
    )


def _own_start(module: nn.Module) -> HasInitialState | None:
    """The module, if it has a method `initial_state`; a parameter of that name is none."""
    return cast("HasInitialState", module) if callable(getattr(module, "initial_state", None)) else None


def _batch_first(layers: Mapping[str, nn.Module], asked: bool | None) -> bool:
    found = {layer.batch_first for layer in layers.values() if isinstance(layer, nn.RNNBase)}
    if asked is None and len(found) > 1:
        raise ModelError(
            f"the layers {sorted(layers)} disagree about batch_first; say what forward(x) of your module wants: "
            "tt.carry(module, batch_first=True)"
        )
    return found == {True} if asked is None else asked


def _takes_state(module: nn.Module) -> bool:
    """Whether forward has a second positional parameter."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [p for p in inspect.signature(module.forward).parameters.values() if p.kind in kinds]
    return len(positional) > 1


def _turned(state: State) -> State:
    """`(L, B, H)` to `(B, L, H)`, or back."""
    if isinstance(state, Tensor):
        return state.transpose(0, 1)
    return tuple(leaf.transpose(0, 1) for leaf in state)


@dataclass(frozen=True)
class Layer:
    """nn.LSTM, nn.GRU, nn.RNN."""

    module: nn.RNNBase

    def initial(self, lanes: int, like: Tensor | None) -> State:
        del like
        layer = self.module
        weight: Tensor = layer.weight_ih_l0  # pyright: ignore[reportAssignmentType]  # registered by name, typed Tensor | Module
        h = weight.new_zeros(lanes, layer.num_layers, layer.proj_size or layer.hidden_size)
        return (h, weight.new_zeros(lanes, layer.num_layers, layer.hidden_size)) if isinstance(layer, nn.LSTM) else h

    def needs_trial(self) -> bool:
        return False

    def run(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        turned = _turned(state)
        if x.is_cuda:  # cuDNN refuses a strided state
            turned = trees.map_leaves(Tensor.contiguous, turned)
        if self.module.batch_first:
            y, after = self.module(x.transpose(0, 1), turned)
            return y.transpose(0, 1), _turned(after)
        y, after = self.module(x, turned)
        return y, _turned(after)


@dataclass(frozen=True)
class Cell:
    """nn.LSTMCell, nn.GRUCell, nn.RNNCell, looped over time."""

    module: nn.RNNCellBase

    def initial(self, lanes: int, like: Tensor | None) -> State:
        del like
        h = self.module.weight_hh.new_zeros(lanes, self.module.hidden_size)
        return (h, torch.zeros_like(h)) if isinstance(self.module, nn.LSTMCell) else h

    def needs_trial(self) -> bool:
        return False

    def run(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        outputs: list[Tensor] = []
        for step in x.unbind(0):
            state = self.module(step, state)
            outputs.append(state if isinstance(state, Tensor) else state[0])
        return torch.stack(outputs), state


def leaf_names(contract: Contract, state: State, path: str = "") -> Iterator[str]:
    """The leaves of a state by name: `h` and `c` of torch's layers, a user module's own names for its own."""
    if isinstance(contract, (Layer, Cell)):
        yield from (f"{path}{name}" for name, _ in zip("hc", trees.tensors(state), strict=False))
    elif isinstance(contract, Chain):
        for name, link in contract.links.items():
            yield from leaf_names(link, state[name], f"{path}{name}.")
    elif isinstance(contract, Hiding):
        for name, layer in contract.layers.items():
            yield from leaf_names(_plain(layer), state[name], f"{path}{name}.")
    else:
        yield from (f"{path}{name}" for name, _ in trees.leaves(state))


@dataclass(frozen=True)
class Stateless:
    """A child of a chain that carries nothing: applied to all steps at once."""

    module: nn.Module

    def initial(self, lanes: int, like: Tensor | None) -> State:
        del lanes, like
        return ()

    def needs_trial(self) -> bool:
        return False

    def run(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        return self.module(x), state


@dataclass(frozen=True)
class Chain:
    """nn.Sequential: each child's outputs are the next one's inputs; its state a dict by the child's place."""

    module: nn.Sequential
    children: tuple[nn.Module, ...]
    links: dict[str, Contract]

    def initial(self, lanes: int, like: Tensor | None) -> State:
        if like is not None and self.needs_trial():
            step = like[:1, :1].expand(1, lanes, *like.shape[2:])
            for link in self.links.values():
                step, _ = _quietly(self.module, partial(link.run, step, link.initial(lanes, step)))
        return {name: link.initial(lanes, like) for name, link in self.links.items()}

    def needs_trial(self) -> bool:
        return any(link.needs_trial() for link in self.links.values())

    def run(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        if tuple(self.module) != self.children:
            raise ModelError("a module of this nn.Sequential was replaced after tt.carry; carry it again: net = tt.carry(module)")
        after: dict[str, State] = {}
        for name, link in self.links.items():
            y, after[name] = link.run(x, state[name])
            if y.shape[:2] != x.shape[:2]:
                raise ModelError(
                    f"module '{name}' of this nn.Sequential turns {tuple(x.shape)} into {tuple(y.shape)}, expected one output per "
                    "step and lane. A carried recurrent layer hands on its outputs only: drop a module that picks them out of a "
                    "tuple, or the last step."
                )
            x = y
        return x, after


def _chain(module: nn.Sequential, batch_first: bool | None) -> Contract:
    links: dict[str, Contract] = {}
    places = zip(
        (name for name, _ in module.named_modules(remove_duplicate=False) if name and "." not in name), module, strict=True
    )  # named_children leaves out a module's second place
    for name, child in places:
        recurrent = any(isinstance(m, RECURRENT) for m in child.modules())
        carried = recurrent or _own_start(child) is not None or (_takes_state(child) and not _of_torch(child))
        links[name] = contract_of(child, batch_first) if carried else Stateless(child)
    if all(isinstance(link, Stateless) for link in links.values()):
        raise ModelError("none of the modules in this nn.Sequential carries a state; nothing to carry")
    return Chain(module, tuple(module), links)


def _of_torch(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.")


@dataclass(eq=False)
class _Exchange:
    """The states that go into the layers of one forward call, and come out."""

    owner: "Hiding"
    before: dict[str, State]
    after: dict[str, State] = field(default_factory=dict[str, State])


_exchange: ContextVar[_Exchange | None] = ContextVar("_exchange", default=None)  # one for each thread


@dataclass(eq=False)
class Hiding:
    """A user module that keeps recurrent layers to itself and returns outputs only.

    While its forward runs here, hooks hand each layer its carried state on the layer's first call and take the state that the
    last call returned; at any other time they do nothing. A state that the module passes itself must be zeros on the first
    call: it is replaced.
    """

    module: nn.Module
    layers: Mapping[str, nn.Module]
    batch_first: bool

    def __post_init__(self) -> None:
        for name, layer in self.layers.items():
            layer.register_forward_pre_hook(partial(self._put, name), with_kwargs=True)
            layer.register_forward_hook(partial(self._take, name))

    def initial(self, lanes: int, like: Tensor | None) -> State:
        return {name: _plain(layer).initial(lanes, like) for name, layer in self.layers.items()}

    def needs_trial(self) -> bool:
        return False

    def run(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        exchange = _Exchange(self, state)
        token = _exchange.set(exchange)
        try:
            y = self.module(x.transpose(0, 1) if self.batch_first else x)
        except RuntimeError as error:
            error.add_note(
                f"throughtime: the layers of {type(self.module).__name__} were given the carried state of {x.shape[1]} lanes, and inputs "
                f"{'(B, T, D)' if self.batch_first else '(T, B, D)'}. If the module wants it the other way round, say "
                f"tt.carry(module, batch_first={not self.batch_first}); if it folds time into the batch, let forward(x, state) return "
                "(y, state)."
            )
            raise
        finally:
            _exchange.reset(token)
        if not exchange.after:
            raise ModelError(
                f"none of the recurrent layers {list(self.layers)} ran in {type(self.module).__name__}.forward: they were replaced "
                "after tt.carry (carry it again), or are not used"
            )
        return _outputs(self.module, y, x, self.batch_first), {**state, **exchange.after}

    def _put(
        self, name: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        exchange = _exchange.get()
        if exchange is None or exchange.owner is not self:
            _refuse_recompute(name)
            return None
        sequence = args[0] if args else kwargs.pop("input")
        given = args[1] if len(args) > 1 else kwargs.pop("hx", None)
        if not isinstance(sequence, Tensor):
            raise ModelError(
                f"layer '{name}' is given a {type(sequence).__name__}; a stream needs no packing: pass the tensor of its steps"
            )
        before = exchange.before[name]
        if name in exchange.after:
            _check_goes_on(name, given, exchange.after[name])
            return (sequence, given), kwargs
        if given is not None:
            _check_fresh(name, given)
        return (sequence, _turned(before) if isinstance(layer, nn.RNNBase) else before), kwargs

    def _take(self, name: str, layer: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        del args
        exchange = _exchange.get()
        if exchange is not None and exchange.owner is self:
            exchange.after[name] = _turned(result[1]) if isinstance(layer, nn.RNNBase) else result


def _refuse_recompute(name: str) -> None:
    """A checkpointed forward runs a second time in the backward pass, where no state is handed in."""
    # As torch.utils.checkpoint itself asks whether a backward pass runs; there is no public way.
    if torch._C._current_graph_task_id() != -1:  # noqa: SLF001
        raise ModelError(
            f"layer '{name}' is run again inside a backward pass, by activation checkpointing: its carried state is not there any "
            "more. Let forward(x, state) return (y, state), so that the state is an argument of what is checkpointed."
        )


def _check_goes_on(name: str, given: State, last: State) -> None:
    """A layer's second call in one forward goes on from its first, and does not start another sequence."""
    if given is not None and all(a is b for a, b in zip(trees.tensors(given), trees.tensors(last), strict=True)):
        return  # the usual loop over a cell, without looking at a number
    if given is None or (_is_fresh(given) and not _is_fresh(last)):
        raise ModelError(
            f"layer '{name}' runs twice in one forward, the second time from no state: two sequences through one layer have two "
            "states. Let forward(x, state) return (y, state)."
        )


def _is_fresh(state: State) -> bool:
    """Zeros that nothing was learnt for: what a module makes itself where it has no state."""
    return not any(leaf.requires_grad or bool(leaf.any()) for leaf in trees.tensors(state))


def _plain(layer: nn.Module) -> Contract:
    return Layer(layer) if isinstance(layer, nn.RNNBase) else Cell(layer)  # pyright: ignore[reportArgumentType]  # layers are RECURRENT


def _check_fresh(name: str, given: State) -> None:
    if not _is_fresh(given):
        raise ModelError(
            f"the module hands layer '{name}' a state of its own that is not zeros: one kept in an attribute, learnt, or made by an "
            "encoder. A carried state cannot replace it silently; let forward(x, state) return (y, state), and give the "
            "module an initial_state(lanes) method if it learns where to start."
        )


def _outputs(module: nn.Module, y: Any, x: Tensor, batch_first: bool) -> Tensor:
    """The outputs, time first; one row per step and lane, or a clear refusal."""
    if not isinstance(y, Tensor):
        raise ModelError(
            f"{type(module).__name__} returned a {type(y).__name__}, expected one tensor of outputs (T, B, C). If it returns its state as "
            "well, let its forward take it: forward(x, state) -> (y, state)."
        )
    turned = y.transpose(0, 1) if batch_first and y.dim() > 1 else y
    if turned.shape[:2] != x.shape[:2]:
        raise ModelError(
            f"{type(module).__name__} returned outputs of shape {tuple(y.shape)} for {x.shape[0]} steps of {x.shape[1]} lanes, expected "
            f"{'(B, T, C)' if batch_first else '(T, B, C)'}: one output per step; the stream's mask says which of them count."
        )
    return turned


@dataclass
class Explicit:
    """A module that maps `(x, state)` to `(y, state)`; its state's lane dimensions are found by a trial with 2 and 3 lanes."""

    module: nn.Module
    batch_first: bool
    _known: tuple[torch.dtype | None, Layout] | None = field(default=None, init=False, repr=False)
    _weight: Tensor | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self._weight = next(self.module.parameters(), None)

    def initial(self, lanes: int, like: Tensor | None) -> State:
        layout = self._layout(like)
        own = _own_start(self.module)
        if own is not None:
            return layout.inward(own.initial_state(lanes))
        weight = next(self.module.parameters(), like)
        return layout.zeros(lanes, None if weight is None else weight.device)

    def needs_trial(self) -> bool:
        known = self._known is not None and self._known[0] == self._dtype()
        return not known and _own_start(self.module) is None

    def run(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        layout = self._layout(x)
        y, after = self._call(x, layout.outward(state))
        return y, layout.inward(after)

    def _call(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        result = self.module(x.transpose(0, 1) if self.batch_first else x, state)
        if not (isinstance(result, tuple) and len(result) == 2):
            raise ModelError(
                f"{type(self.module).__name__}.forward takes a second argument, so it must return the pair (y, state); it returned a "
                f"{type(result).__name__}. If that argument is no state, wrap the module in one whose forward takes x alone."
            )
        return _outputs(self.module, result[0], x, self.batch_first), result[1]

    def _dtype(self) -> torch.dtype | None:
        return None if self._weight is None else self._weight.dtype

    def _layout(self, like: Tensor | None) -> Layout:
        """As learnt before; learnt anew after the module changed its type."""
        if self._known is None or self._known[0] != self._dtype():
            own = _own_start(self.module)
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
                f"the state of {type(self.module).__name__} is known after a trial: net.initial_state(lanes, like=inputs), or give the "
                "module an initial_state(lanes) method"
            )
        two, three = (like[:1, :1].expand(1, n, *like.shape[2:]) for n in (2, 3))
        y_none, s_two = _quietly(self.module, partial(self._call, two, None))
        _, s_three = _quietly(self.module, partial(self._call, three, None))
        layout = Layout.compare(s_two, s_three)
        y_zeros, _ = _quietly(self.module, partial(self._call, two, layout.outward(layout.zeros(2, like.device))))
        if not torch.equal(y_none, y_zeros):
            raise StateError(
                f"{type(self.module).__name__} starts from something else than zeros when its state is None; give it an "
                "initial_state(lanes) method that returns where its recordings start (or it gives other outputs each time, from random "
                "numbers or a counter of calls)"
            )
        return layout


def _quietly(module: nn.Module, call: Callable[[], tuple[Any, State]]) -> tuple[Any, State]:
    """A trial of a user's module in evaluation mode that leaves no trace."""
    modes = [(m, m.training) for m in module.modules()]
    module.eval()
    try:
        device = next((p.device.type for p in module.parameters()), "cpu")
        with torch.no_grad(), torch.random.fork_rng(), torch.autocast(device, enabled=False):
            return call()
    except (ModelError, StateError):
        raise
    except Exception as error:
        raise ModelError(
            f"{type(module).__name__}.forward(x, None) failed in a trial of one step ({error}); let it take None for the state at "
            "the start of a recording, or give it an initial_state(lanes) method"
        ) from error
    finally:
        for m, mode in modes:
            m.training = mode
