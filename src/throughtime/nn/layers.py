"""LSTM, GRU and RNN as in `torch.nn`, run by the compiled kernels, with resets.

Shapes: `T` steps, `B` lanes, `D` input features, `H` hidden, `P` = `H` or the size of a projection,
`L` layers times directions.
"""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain, pairwise
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import (
    get_eval_frame_callback as compiler,
)  # there is no public way to ask whether it is at work
from torch.nn.utils.rnn import PackedSequence

from throughtime.errors import DataError, ModelError
from throughtime.kernels import operators, recurrent, reference
from throughtime.kernels.dispatch import (
    LOWERED,
    PLAIN,
    Choice,
    around,
    choose,
    lowers,
    products_in,
    tracing,
)
from throughtime.kernels.layer import GATES, Kind, Weights

KINDS: dict[str, Kind] = {
    "LSTM": "lstm",
    "GRU": "gru",
    "RNN_TANH": "rnn_tanh",
    "RNN_RELU": "rnn_relu",
}
State: TypeAlias = tuple[Tensor, Tensor | None]  # h and c of one layer in one direction
Run: TypeAlias = Callable[
    [Kind, Tensor, Tensor, Tensor | None, Weights, Tensor | None],
    tuple[Tensor, Tensor, Tensor | None],
]


class Watch(Protocol):
    """Who looks on while a layer plays, as `tt.trace` does."""

    def over(self, run: Run) -> Run:
        """What is to run in place of this: called for every layer and, where there are two, direction, in the order of play."""
        ...

    def by_torch(self, play: Callable[..., Any], *given: Any) -> Any:
        """`play(*given)`, a call that goes to torch.nn."""
        ...


WATCHES: dict[
    nn.Module, Watch
] = {}  # by layer; in the layer itself it would be copied and saved with it


class Recurrent(nn.RNNBase):
    """What `tt.nn.LSTM`, `tt.nn.GRU` and `tt.nn.RNN` share: which code runs, and the way through layers and directions."""

    # torch's name
    def forward(self, input: Any, hx: Any = None, resets: Tensor | None = None) -> Any:
        """As `torch.nn`, with resets.

        Args:
            input: `(T, B, D)`, `(B, T, D)` if `batch_first`, `(T, D)` unbatched, or a
                PackedSequence.
            hx: the state entering the first step, `(L, B, P)`, of an LSTM the pair of it and `(L,
                B, H)`; default: zeros.
            resets: bool, one for each step and lane, in the order of `input`: true where the state
                entering the step is zeros, whatever it was, NaN included. No gradient crosses.
                Backwards in time, in a bidirectional layer, it is the state entering the step
                before that is zeros: no direction sees beyond the recording.

        Returns:
            As `torch.nn`: the outputs of all steps, and the state after the last. Under autocast
            both are float32, whatever comes in.

        Raises:
            DataError: resets that are no bools of the inputs' steps and lanes.
            RuntimeError, ValueError: what torch refuses, in its words.
        """
        if torch.compiler.is_compiling():
            return self._compiled(input, hx, resets)
        return (
            self._eager(input, hx, resets)
            if compiler() in {None, False}
            else _uncompiled()(self, input, hx, resets)
        )

    def _eager(self, given: Any, hx: Any, resets: Tensor | None) -> Any:
        if resets is not None:
            _check_resets(given, resets)
        weights, watch = self._weights(), WATCHES.get(self) if WATCHES else None
        runs, lowered = self._choice(given, hx, weights).runs, lowers(weights[0].ih)
        if runs == "torch.nn" and not self._whole(given, resets):
            found = (
                self._by_torch(given, hx, resets)
                if watch is None
                else watch.by_torch(self._by_torch, given, hx, resets)
            )
            return _widened(found) if lowered else found
        if lowered:
            given, hx = _widened(given), _widened(hx)
        run = recurrent.run if runs == "fused" else _defined
        return self._play(
            run if watch is None or runs == "reference" else watch.over(run),
            given,
            hx,
            resets,
            weights,
        )

    def _compiled(self, given: Any, hx: Any, resets: Tensor | None) -> Any:
        """The same as one operator of a graph, or as torch.nn's own."""
        weights = self._weights()
        lowered = lowers(weights[0].ih)
        takes = operators.takes(
            KINDS[self.mode], self.hidden_size, self.proj_size > 0, given, _leaves(hx), weights
        )
        if not takes and resets is None:
            found = super().forward(given, hx)
            return _widened(found) if lowered else found
        if lowered:
            given, hx = _widened(given), _widened(hx)
        return self._play(operators.run if takes else _defined, given, hx, resets, weights)

    def _weights(self) -> list[Weights]:
        """By layer and direction, as they are now: `torch.func.functional_call` and wrappers put others in their place."""
        own, bias = self._parameters, self.bias
        found: list[Weights] = []
        for names in self._all_weights:
            try:
                ih, hh, hr = (
                    own[names[0]],
                    own[names[1]],
                    own[names[-1]] if self.proj_size else None,
                )
                b_ih, b_hh = (own[names[2]], own[names[3]]) if bias else (None, None)
            except KeyError:  # parametrized, or pruned: made of parameters of other names
                ih, hh, hr = (
                    getattr(self, names[0]),
                    getattr(self, names[1]),
                    getattr(self, names[-1]) if self.proj_size else None,
                )
                b_ih, b_hh = (
                    (getattr(self, names[2]), getattr(self, names[3])) if bias else (None, None)
                )
            # registered, so not None
            found.append(Weights(ih, hh, b_ih, b_hh, hr))  # pyright: ignore[reportArgumentType]
        return found

    def _choice(self, given: Any, hx: Any, weights: Sequence[Weights]) -> Choice:
        """Which code runs, and why."""
        if not isinstance(given, Tensor):
            packed = isinstance(given, PackedSequence)
            return Choice(
                "torch.nn",
                (
                    "packed input; recordings side by side need resets instead"
                    if packed
                    else f"inputs are a {type(given).__name__}"
                ),
            )
        watched = around()
        if watched is not None:
            return watched
        if not self._fits(given, hx, weights):
            return Choice(
                "torch.nn", "inputs, state or weights do not fit the layer; torch says which"
            )
        lanes = 1 if given.dim() == 2 else given.shape[0 if self.batch_first else 1]
        own = weights[0] if len(weights) == 1 else chain(*weights)
        return choose(
            KINDS[self.mode], self.hidden_size, self.proj_size > 0, given, lanes, own, _leaves(hx)
        )

    def _fits(self, given: Tensor, hx: Any, weights: Sequence[Weights]) -> bool:
        """Whether all sizes are what the layer says, so that a kernel reads what is there and nothing else."""
        shape, dims = given.shape, given.dim()
        if dims not in {2, 3} or shape[-1] != self.input_size:
            return False
        if hx is not None:
            hidden, rows = (
                self.hidden_size,
                (
                    (len(weights),)
                    if dims == 2
                    else (len(weights), shape[0 if self.batch_first else 1])
                ),
            )
            if self.mode != "LSTM":
                if not isinstance(hx, Tensor) or hx.shape != (*rows, hidden):
                    return False
            elif (
                len(hx) != 2
                or hx[0].shape != (*rows, self.proj_size or hidden)
                or hx[1].shape != (*rows, hidden)
            ):
                return False
        sizes = weight_sizes(
            KINDS[self.mode], self.input_size, self.hidden_size, self.proj_size, self.bidirectional
        )
        for k, layer in enumerate(weights):
            expected = sizes[k >= 1 + self.bidirectional]
            for weight, size in zip(layer, expected, strict=True):
                if weight is not None and weight.shape != size:
                    return False
        return True

    def _play(
        self, run: Run, given: Tensor, hx: Any, resets: Tensor | None, weights: Sequence[Weights]
    ) -> Any:
        """Layer by layer through `run`, dropout between them."""
        batched = given.dim() == 3
        turned = batched and self.batch_first
        x = given.transpose(0, 1) if turned else given if batched else given.unsqueeze(1)
        if resets is not None:
            resets = (
                resets.transpose(0, 1) if turned else resets if batched else resets.unsqueeze(1)
            )
        kind, states = KINDS[self.mode], self._entering(x, hx, batched, len(weights))
        ends: list[State] = []
        for k in range(self.num_layers):
            if k and self.dropout and self.training:
                x = torch.dropout(x, self.dropout, True)  # as torch's own layers draw it
            if self.bidirectional:
                both = slice(2 * k, 2 * k + 2)
                x, after = _both_ways(run, kind, x, states[both], weights[both], resets)
                ends += after
            else:
                x, h, c = run(kind, x, *states[k], weights[k], resets)
                ends.append((h, c))
        y = x.transpose(0, 1) if turned else x if batched else x.squeeze(1)
        return y, _ended(ends, batched)

    def _entering(self, x: Tensor, hx: Any, batched: bool, count: int) -> list[State]:
        """The state of each layer and direction, `(B, P)` and `(B, H)`."""
        if hx is None:
            h = x.new_zeros(x.shape[1], self.proj_size or self.hidden_size)
            c = (
                None
                if self.mode != "LSTM"
                else x.new_zeros(x.shape[1], self.hidden_size)
                if self.proj_size
                else h
            )
            return [(h, c)] * count
        rows = [(leaf if batched else leaf.unsqueeze(1)).unbind(0) for leaf in _leaves(hx)]
        return list(zip(*rows, strict=True)) if len(rows) == 2 else [(h, None) for h in rows[0]]

    def _whole(self, given: Any, resets: Tensor | None) -> bool:
        """Whether torch.nn cannot stand in: with resets there are no stretches, or none that can be told."""
        return resets is not None and (self.bidirectional or tracing() or type(given) not in PLAIN)

    def _by_torch(self, given: Any, hx: Any, resets: Tensor | None) -> Any:
        """As torch.nn plays it.

        With resets one call for each stretch between them, which no gradient leaves.
        """
        if resets is None:
            return super().forward(given, hx)
        time = 1 if self.batch_first and given.dim() == 3 else 0
        fresh = resets.movedim(time, 0)
        starts = sorted(
            {0, *(fresh.any(1) if fresh.dim() == 2 else fresh).nonzero().flatten().tolist()}
        )
        state, own = self._zeros(given) if hx is None else hx, self._weights()[0].ih.dtype
        outputs: list[Tensor] = []
        for start, stop in pairwise([*starts, len(fresh)]):
            y, after = super().forward(
                given.narrow(time, start, stop - start), _each(_fresh_where(fresh[start]), state)
            )
            state = _each(lambda leaf: leaf.to(own), after)  # autocast's are not
            outputs.append(y)
        return torch.cat(outputs, time), state

    def _zeros(self, given: Tensor) -> Any:
        """The state that torch.nn starts from."""
        rows = (
            (self.num_layers,)
            if given.dim() == 2
            else (self.num_layers, given.shape[0 if self.batch_first else 1])
        )
        h = given.new_zeros(*rows, self.proj_size or self.hidden_size)
        return (h, given.new_zeros(*rows, self.hidden_size)) if self.mode == "LSTM" else h


class LSTM(Recurrent, nn.LSTM):
    """`torch.nn.LSTM` by the compiled kernel: same arguments, parameters, `state_dict` and results,
    and `resets`.

    For a new model; `tt.fuse` swaps the layers of one that exists. `tt.nn.backend(layer, inputs)`
    says what runs.

    Args:
        *args: as of `torch.nn.LSTM`: `input_size`, `hidden_size`, `num_layers`, `bias`,
            `batch_first`, `dropout`, `bidirectional`, `proj_size`, `device`, `dtype`.
        **kwargs: the same by name.

    Example:
        >>> import torch, throughtime as tt
        >>> lstm = tt.nn.LSTM(3, 8)
        >>> y, (h, c) = lstm(torch.randn(5, 2, 3), resets=torch.tensor([[True, True], *[[False, False]] * 3, [True, False]]))
        >>> y.shape, h.shape
        (torch.Size([5, 2, 8]), torch.Size([1, 2, 8]))

    References: S. Hochreiter and J. Schmidhuber, Long short-term memory, Neural Computation 9
    (1997).
    """


class GRU(Recurrent, nn.GRU):
    """`torch.nn.GRU` by the compiled kernel: same arguments, parameters, `state_dict` and results,
    and `resets`.

    For a new model; `tt.fuse` swaps the layers of one that exists. `tt.nn.backend(layer, inputs)`
    says what runs.

    Args:
        *args: as of `torch.nn.GRU`: `input_size`, `hidden_size`, `num_layers`, `bias`,
            `batch_first`, `dropout`, `bidirectional`, `device`, `dtype`.
        **kwargs: the same by name.

    Example:
        >>> import torch, throughtime as tt
        >>> y, h = tt.nn.GRU(3, 8)(torch.randn(5, 2, 3))
        >>> y.shape, h.shape
        (torch.Size([5, 2, 8]), torch.Size([1, 2, 8]))

    References: K. Cho et al., Learning phrase representations using RNN encoder-decoder, EMNLP
    (2014).
    """


class RNN(Recurrent, nn.RNN):
    """`torch.nn.RNN` by the compiled kernel: same arguments, parameters, `state_dict` and results,
    and `resets`.

    For a new model; `tt.fuse` swaps the layers of one that exists. `tt.nn.backend(layer, inputs)`
    says what runs.

    Args:
        *args: as of `torch.nn.RNN`: `input_size`, `hidden_size`, `num_layers`, `nonlinearity`,
            `bias`, `batch_first`, `dropout`, `bidirectional`, `device`, `dtype`.
        **kwargs: the same by name.

    Example:
        >>> import torch, throughtime as tt
        >>> y, h = tt.nn.RNN(3, 8, nonlinearity="relu")(torch.randn(5, 2, 3))
        >>> y.shape, h.shape
        (torch.Size([5, 2, 8]), torch.Size([1, 2, 8]))

    References: J. L. Elman, Finding structure in time, Cognitive Science 14 (1990).
    """


# as forward calls it
def backend(layer: nn.Module, input: Any, hx: Any = None) -> Choice:
    """Which code would run this call of a layer, and why it and nothing faster.

    Args:
        layer: a recurrent layer, of `tt.nn` or `torch.nn`.
        input: as of its forward.
        hx: the same.

    Returns:
        `runs` is "fused" (the compiled kernel), "torch.nn" or "reference" (plain PyTorch step by
        step, under transforms of `torch.func`), `why` the reason; `str` gives both.

    Raises:
        ModelError: no recurrent layer.

    Example:
        >>> import torch, throughtime as tt
        >>> str(tt.nn.backend(torch.nn.GRU(3, 8), torch.zeros(5, 2, 3)))
        'torch.nn: the layer is a torch.nn.GRU; tt.fuse(module) makes it a tt.nn.GRU'
    """
    if isinstance(layer, Recurrent):
        return layer._choice(input, hx, layer._weights())  # of the same file
    if isinstance(layer, nn.RNNBase):
        name = type(layer).__name__
        return Choice(
            "torch.nn", f"the layer is a torch.nn.{name}; tt.fuse(module) makes it a tt.nn.{name}"
        )
    raise ModelError(
        f"{type(layer).__name__} is no recurrent layer; expected an LSTM, GRU or RNN of tt.nn or"
        " torch.nn, such as net.lstm"
    )


@cache
def weight_sizes(
    kind: Kind, inputs: int, hidden: int, projection: int, bidirectional: bool
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """The shapes of the weights, of the first layer and of those after it."""
    rows, outputs = GATES[kind] * hidden, projection or hidden
    rest = (rows, outputs), (rows,), (rows,), (projection, hidden)
    return ((rows, inputs), *rest), ((rows, (1 + bidirectional) * outputs), *rest)


@cache
def _uncompiled() -> Callable[..., Any]:
    """Where the compiler gave up on the call itself, it would try each function inside, for nothing."""
    return torch.compiler.disable(Recurrent._eager)  # of the same file


def _both_ways(
    run: Run,
    kind: Kind,
    x: Tensor,
    states: Sequence[State],
    weights: Sequence[Weights],
    resets: Tensor | None,
) -> tuple[Tensor, list[State]]:
    """A layer that also plays from the end: there a recording ends where, in time, the next one starts."""
    back = None if resets is None else torch.cat([torch.zeros_like(resets[:1]), resets[1:].flip(0)])
    y, h_after, c_after = run(kind, x, *states[0], weights[0], resets)
    z, h_before, c_before = run(kind, x.flip(0), *states[1], weights[1], back)
    return torch.cat([y, z.flip(0)], 2), [(h_after, c_after), (h_before, c_before)]


def _ended(ends: Sequence[State], batched: bool) -> Any:
    """The state as torch.nn gives it: `(L, B, P)`, of an LSTM with `(L, B, H)`; unbatched without `B`."""
    if len(ends) == 1:  # the usual case, without a list
        h, c = ends[0]
        return (_first(h, batched), _first(c, batched)) if c is not None else _first(h, batched)
    join = torch.stack if batched else torch.cat
    h, c = join([h for h, _ in ends]), [c for _, c in ends if c is not None]
    return (h, join(c)) if c else h


def _first(leaf: Tensor, batched: bool) -> Tensor:
    return leaf.unsqueeze(0) if batched else leaf


def _leaves(state: Any) -> Any:
    return () if state is None else (state,) if isinstance(state, Tensor) else state


def _defined(
    kind: Kind, x: Tensor, h: Tensor, c: Tensor | None, weights: Weights, resets: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The definition, with the products that a kernel would make."""
    return reference.run(
        kind,
        x,
        h,
        c,
        weights,
        resets,
        products_in(weights.ih.dtype, x.shape[1]) if lowers(weights.ih) else None,
    )


def _widened(given: Any) -> Any:
    """What autocast has made of float32, inputs, outputs or states, as float32.

    All else as it is.
    """
    if isinstance(given, Tensor):
        return given.float() if given.dtype in LOWERED else given
    if isinstance(given, PackedSequence):
        return given._replace(data=_widened(given.data))
    return tuple(map(_widened, given)) if isinstance(given, tuple | list) else given


def _each(change: Callable[[Tensor], Tensor], state: Any) -> Any:
    return change(state) if isinstance(state, Tensor) else tuple(change(leaf) for leaf in state)


def _fresh_where(resets: Tensor) -> Callable[[Tensor], Tensor]:
    """Zeros in the lanes that start a recording, whatever was there."""
    return lambda leaf: leaf.masked_fill(resets.unsqueeze(-1), 0)


def _check_resets(given: Any, resets: Any) -> None:
    """Resets are bools, one for each step and lane of the inputs, on their device."""
    if not isinstance(given, Tensor):
        raise DataError(
            f"resets came with a {type(given).__name__}, expected a tensor of inputs: packed"
            " sequences start anew by themselves. Pad them, with resets where a lane starts"
            " another recording"
        )
    shape, device = given.shape[:-1], given.device
    if (
        not isinstance(resets, Tensor)
        or resets.dtype is not torch.bool
        or resets.shape != shape
        or resets.device != device
    ):
        got = (
            f"{tuple(resets.shape)} {resets.dtype} on {resets.device}"
            if isinstance(resets, Tensor)
            else type(resets).__name__
        )
        raise DataError(
            f"resets are {got}, expected {tuple(shape)} torch.bool on {device}: one flag for each"
            " step and lane, in the order of the inputs; write resets.bool(), and"
            " resets.transpose(0, 1) if only the order differs"
        )
