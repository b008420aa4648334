"""LSTM, GRU and RNN as in `torch.nn`, run by the compiled kernels, with resets.

Shapes: `T` steps, `B` lanes, `D` input features, `H` hidden, `P` = `H` or the size of a projection,
`L` layers times directions.
"""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain, pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

# torch has no public function that says whether its compiler is active
from torch._C._dynamo.eval_frame import get_eval_frame_callback as compiler_callback
from torch.nn.utils.rnn import PackedSequence

from throughtime._metadata import reset_positions
from throughtime.errors import DataError, ModelError
from throughtime.kernels import operators, recurrent, reference
from throughtime.kernels.cells import BY_MODE, Cell, Weights
from throughtime.kernels.dispatch import (
    AUTOCAST_TYPES,
    PLAIN,
    Backend,
    active_torch_modes,
    autocast_applies,
    choose,
    product_type,
    tracing,
)
from throughtime.kernels.reference import States
from throughtime.state import map_leaves

# One layer in one direction: cell, x (T, B, D), entering states (1, B, P) and (1, B, H), weights,
# resets -> y, last states
Run: TypeAlias = Callable[
    [Cell, Tensor, States, Weights, Tensor | None], tuple[Tensor, tuple[Tensor, ...]]
]


class Recurrent(nn.RNNBase):
    """The forward of `tt.nn.LSTM`, `tt.nn.GRU` and `tt.nn.RNN`: choose a backend and call it."""

    def forward(
        self,
        input: Any,  # noqa: A002  # torch's name
        hx: Any = None,
        resets: Tensor | None = None,
    ) -> Any:
        """As `torch.nn`, with resets.

        Args:
            input: `(T, B, D)`, `(B, T, D)` if `batch_first`, `(T, D)` unbatched, or a
                PackedSequence.
            hx: the state entering the first step: `(L, B, P)`, for an LSTM the pair of it and
                `(L, B, H)`. Default: zeros.
            resets: bool, one for each step and lane, in the layout of `input`: true where the state
                entering the step becomes zeros, even if it was NaN. No gradient crosses a reset.
                The backward direction of a bidirectional layer starts from zeros at the last step
                before a reset, so neither direction reads another recording.

        Returns:
            As `torch.nn`: the outputs of all steps, and the state after the last. Under autocast
            both are float32, whatever the type of the inputs. Without steps the outputs are empty
            and the state is the one that entered, where torch.nn raises.

        Raises:
            DataError: resets are not bools, one for each step and lane of the inputs.
            RuntimeError, ValueError: torch's own errors.
        """
        if torch.compiler.is_compiling():
            return self._compiled(input, hx, resets)
        if compiler_callback() in {None, False}:
            return self._eager(input, hx, resets)
        return _eager_without_dynamo()(self, input, hx, resets)

    def _eager(self, inputs: Any, hx: Any, resets: Tensor | None) -> Any:
        if resets is not None:
            _check_resets(inputs, resets)
        weights = layer_weights(self)
        backend = self._backend(inputs, hx, weights, resets).name
        run = recurrent.run if backend == "fused" else _run_reference
        if backend == "torch.nn" and (
            resets is None  # or calls of torch.nn can be split at them
            or (type(inputs) in PLAIN and not self.bidirectional and not tracing())
        ):
            run = None
        return self._run(run, inputs, hx, resets, weights)

    def _compiled(self, inputs: Any, hx: Any, resets: Tensor | None) -> Any:
        """Record one operator for each layer and direction, or torch.nn's own call."""
        cell, weights, projected = BY_MODE[self.mode], layer_weights(self), self.proj_size > 0
        run = None if resets is None else _run_reference
        if operators.takes(cell, self.hidden_size, projected, inputs, _leaves(hx), weights):
            run = operators.run
        return self._run(run, inputs, hx, resets, weights)

    def _run(
        self,
        run: Run | None,
        inputs: Any,
        hx: Any,
        resets: Tensor | None,
        weights: Sequence[Weights],
    ) -> Any:
        """By `run`, or by torch.nn; what autocast has narrowed becomes float32 again."""
        autocast = autocast_applies(weights[0].ih)
        if run is None:
            result = self._by_torch(inputs, hx, resets)
            return _to_float32(result) if autocast else result
        if autocast:
            inputs, hx = _to_float32((inputs, hx))
        return run_layers(self, run, inputs, hx, resets, weights)

    def _backend(
        self, inputs: Any, hx: Any, weights: Sequence[Weights], resets: Any = None
    ) -> Backend:
        if not isinstance(inputs, Tensor):
            if isinstance(inputs, PackedSequence):
                return Backend(
                    "torch.nn", "packed input; pass recordings side by side with resets instead"
                )
            return Backend("torch.nn", f"inputs are a {type(inputs).__name__}")
        empty = not tracing() and type(inputs) in PLAIN and not inputs.numel()
        if empty and self._fits(inputs, hx, weights):
            return Backend("reference", "nothing to compute")
        backend = active_torch_modes()
        if backend is not None:
            return backend
        if not self._fits(inputs, hx, weights):
            return Backend(
                "torch.nn", "inputs, state or weights do not fit the layer; torch reports which"
            )
        lanes = 1 if inputs.dim() == 2 else inputs.shape[0 if self.batch_first else 1]
        return choose(
            BY_MODE[self.mode],
            self.hidden_size,
            self.proj_size > 0 or resets is not None,
            inputs,
            lanes,
            weights[0] if len(weights) == 1 else chain(*weights),
            _leaves(hx),
        )

    def _fits(self, inputs: Tensor, hx: Any, weights: Sequence[Weights]) -> bool:
        """Whether all sizes are those of the layer, so that a kernel reads within bounds."""
        shape, proj = inputs.shape, self.proj_size
        if len(shape) not in {2, 3} or shape[-1] != self.input_size:
            return False
        widths, *shapes = layer_shapes(
            self.mode, self.input_size, self.hidden_size, proj, self.bidirectional
        )
        if hx is not None:
            rows = (len(weights),)
            if len(shape) == 3:
                rows = (*rows, shape[0 if self.batch_first else 1])
            leaves = _leaves(hx)
            if len(leaves) != len(widths) or isinstance(hx, Tensor) != (len(widths) == 1):
                return False
            if [leaf.shape for leaf in leaves] != [(*rows, width) for width in widths]:
                return False
        for k, layer in enumerate(weights):
            for weight, size in zip(layer, shapes[k > self.bidirectional], strict=True):
                if weight is not None and weight.shape != size:
                    return False
        return True

    def _by_torch(self, inputs: Any, hx: Any, resets: Tensor | None) -> Any:
        """Call torch.nn; with resets, one call for each run of steps between them."""
        if resets is None:
            return super().forward(inputs, hx)
        time = 1 if self.batch_first and inputs.dim() == 3 else 0
        if time:
            resets = resets.movedim(time, 0)
        starts = sorted({0, *reset_positions(resets)})
        dtype = layer_weights(self)[0].ih.dtype  # autocast returns another one
        state, outputs = hx, list[Tensor]()
        for start, stop in pairwise([*starts, len(resets)]):
            if state is not None:
                lanes = resets[start].unsqueeze(-1)
                state = map_leaves(lambda leaf, lanes=lanes: leaf.masked_fill(lanes, 0), state)
            y, state = super().forward(inputs.narrow(time, start, stop - start), state)
            state = map_leaves(lambda leaf: leaf.to(dtype), state)
            outputs.append(y)
        return torch.cat(outputs, time), state


class LSTM(Recurrent, nn.LSTM):
    """`torch.nn.LSTM` on the compiled kernel: same arguments, parameters, `state_dict` and results.

    Its forward takes `resets` as well. Use it in a new model; `tt.fuse` swaps the layers of a model
    that exists. `tt.nn.backend(layer, inputs)` says what runs.

    Args:
        *args: those of `torch.nn.LSTM`: `input_size`, `hidden_size`, `num_layers`, `bias`,
            `batch_first`, `dropout`, `bidirectional`, `proj_size`, `device`, `dtype`.
        **kwargs: the same by name.

    Example:
        >>> import torch, throughtime as tt
        >>> lstm = tt.nn.LSTM(3, 8)
        >>> resets = torch.zeros(5, 2, dtype=torch.bool)
        >>> resets[3, 0] = True
        >>> y, (h, c) = lstm(torch.randn(5, 2, 3), resets=resets)
        >>> y.shape, h.shape
        (torch.Size([5, 2, 8]), torch.Size([1, 2, 8]))

    References: S. Hochreiter and J. Schmidhuber, Long short-term memory, Neural Computation 9
    (1997).
    """


class GRU(Recurrent, nn.GRU):
    """`torch.nn.GRU` on the compiled kernel: same arguments, parameters, `state_dict` and results.

    Its forward takes `resets` as well. Use it in a new model; `tt.fuse` swaps the layers of a model
    that exists. `tt.nn.backend(layer, inputs)` says what runs.

    Args:
        *args: those of `torch.nn.GRU`: `input_size`, `hidden_size`, `num_layers`, `bias`,
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
    """`torch.nn.RNN` on the compiled kernel: same arguments, parameters, `state_dict` and results.

    Its forward takes `resets` as well. Use it in a new model; `tt.fuse` swaps the layers of a model
    that exists. `tt.nn.backend(layer, inputs)` says what runs.

    Args:
        *args: those of `torch.nn.RNN`: `input_size`, `hidden_size`, `num_layers`, `nonlinearity`,
            `bias`, `batch_first`, `dropout`, `bidirectional`, `device`, `dtype`.
        **kwargs: the same by name.

    Example:
        >>> import torch, throughtime as tt
        >>> y, h = tt.nn.RNN(3, 8, nonlinearity="relu")(torch.randn(5, 2, 3))
        >>> y.shape, h.shape
        (torch.Size([5, 2, 8]), torch.Size([1, 2, 8]))

    References: J. L. Elman, Finding structure in time, Cognitive Science 14 (1990).
    """


def backend(layer: nn.Module, input: Any, hx: Any = None) -> Backend:  # noqa: A002  # as forward
    """The code that would run this call of a layer, and why nothing faster does.

    Args:
        layer: a recurrent layer, of `tt.nn` or `torch.nn`.
        input: the first argument of its forward.
        hx: the second one.

    Returns:
        What runs without resets: with them, the kernel also does where torch.nn is faster.
        `name` is "fused" (the compiled kernel), "torch.nn" or "reference" (plain PyTorch step by
        step, under transforms of `torch.func`). `reason` explains it. `str` gives both.

    Raises:
        ModelError: the module is not a recurrent layer.

    Example:
        >>> import torch, throughtime as tt
        >>> str(tt.nn.backend(torch.nn.GRU(3, 8), torch.zeros(5, 2, 3)))
        'torch.nn: the layer is a torch.nn.GRU; tt.fuse(module) makes it a tt.nn.GRU'
    """
    if isinstance(layer, Recurrent):
        return layer._backend(input, hx, layer_weights(layer))
    name = type(layer).__name__
    if isinstance(layer, nn.RNNBase):
        return Backend(
            "torch.nn", f"the layer is a torch.nn.{name}; tt.fuse(module) makes it a tt.nn.{name}"
        )
    raise ModelError(
        f"{name} is not a recurrent layer; expected an LSTM, GRU or RNN of tt.nn or torch.nn, such"
        " as net.lstm"
    )


def layer_weights(layer: nn.RNNBase) -> list[Weights]:
    """The current weights of a layer of torch.nn or tt.nn, by layer and direction.

    `torch.func.functional_call`, parametrizations and wrappers replace them between calls.
    """
    own = layer._parameters  # attribute access would search three dicts
    projected = layer.proj_size > 0
    result: list[Weights] = []
    for names in layer._all_weights:  # torch's own list
        try:
            ih, hh, *others = [own[name] for name in names]
        except KeyError:  # parametrized or pruned: computed from parameters of other names
            ih, hh, *others = [getattr(layer, name) for name in names]
        hr = others.pop() if projected else None
        b_ih, b_hh = others or (None, None)
        # registered, so not None
        result.append(Weights(ih, hh, b_ih, b_hh, hr))  # pyright: ignore[reportArgumentType]
    return result


@cache
def layer_shapes(
    mode: str, inputs: int, hidden: int, projection: int, bidirectional: bool
) -> tuple[tuple[Any, ...], ...]:
    """The widths of the states, and the shapes of `Weights` of the first layer and those after."""
    cell = BY_MODE[mode]
    rows, outputs = len(cell.gates) * hidden, projection or hidden
    rest = (rows, outputs), (rows,), (rows,), (projection, hidden)
    after = (rows, (1 + bidirectional) * outputs)
    return cell.widths(hidden, projection), ((rows, inputs), *rest), (after, *rest)


def run_layers(
    layer: nn.RNNBase,
    run: Run,
    inputs: Tensor,
    hx: Any,
    resets: Tensor | None,
    weights: Sequence[Weights],
) -> Any:
    """The forward of a whole `nn.RNNBase`, with `run` for each layer and direction in order.

    Handles layouts, dropout between layers, and both directions. The backward direction comes after
    the forward one and receives its inputs reversed in time.

    Args:
        layer: of torch.nn or tt.nn.
        run: computes one layer in one direction.
        inputs: as of forward.
        hx: as of forward.
        resets: as of `Recurrent.forward`, in the layout of the inputs.
        weights: `layer_weights(layer)`.

    Returns:
        As `torch.nn`: outputs and the state after the last step.
    """
    cell, batched, count = BY_MODE[layer.mode], inputs.dim() == 3, len(weights)

    def turned(tensor: Tensor) -> Tensor:
        """Time first, then lanes."""
        if batched:
            return tensor.transpose(0, 1) if layer.batch_first else tensor
        return tensor.unsqueeze(1)

    x, resets = turned(inputs), None if resets is None else turned(resets)
    if hx is None:
        widths = cell.widths(layer.hidden_size, layer.proj_size)
        leaves = [x.new_zeros(count, x.shape[1], width) for width in widths]
    else:
        leaves = _leaves(hx) if batched else [leaf.unsqueeze(1) for leaf in _leaves(hx)]
    entering: list[States] = [tuple(leaves)]
    if count > 1:
        entering = list(zip(*[leaf.split(1) for leaf in leaves], strict=True))
    ends: list[States] = []
    for k in range(layer.num_layers):
        if k and layer.dropout and layer.training:
            x = torch.dropout(x, layer.dropout, True)  # draws as torch's own layers do
        if layer.bidirectional:
            pair = slice(2 * k, 2 * k + 2)
            x, states = _run_both_directions(run, cell, x, entering[pair], weights[pair], resets)
            ends += states
        else:
            x, state = run(cell, x, entering[k], weights[k], resets)
            ends.append(state)
    y = turned(x) if batched else x.squeeze(1)
    return y, _joined_states(ends, batched)


def _run_both_directions(
    run: Run,
    cell: Cell,
    x: Tensor,
    states: Sequence[States],
    weights: Sequence[Weights],
    resets: Tensor | None,
) -> tuple[Tensor, list[States]]:
    """One bidirectional layer. Reversed in time, a recording starts one step before the next."""
    reverse = resets
    if resets is not None:
        reverse = torch.cat([torch.zeros_like(resets[:1]), resets[1:].flip(0)])
    y, last = run(cell, x, states[0], weights[0], resets)
    z, first = run(cell, x.flip(0), states[1], weights[1], reverse)
    return torch.cat([y, z.flip(0)], 2), [last, first]


def _joined_states(ends: Sequence[States], batched: bool) -> Any:
    """The state as torch.nn returns it: `(L, B, P)`, for an LSTM with `(L, B, H)`."""
    if len(ends) > 1 or not batched:
        # copies: users may call detach_() on a state, which refuses a view
        rows = zip(*ends, strict=True)
        ends = [tuple([torch.cat([t if batched else t.squeeze(1) for t in row]) for row in rows])]
    (h, *others), *_ = ends
    return (h, *others) if others else h


@cache
def _eager_without_dynamo() -> Callable[..., Any]:
    """After a graph break at this call, the compiler would try each function inside, in vain."""
    return torch.compiler.disable(Recurrent._eager)


def _leaves(hx: Any) -> Any:
    return () if hx is None else (hx,) if isinstance(hx, Tensor) else hx


def _run_reference(
    cell: Cell, x: Tensor, states: States, weights: Weights, resets: Tensor | None
) -> tuple[Tensor, States]:
    """The reference, with the products that a kernel would make."""
    products = None
    if autocast_applies(weights.ih):
        products = product_type(weights.ih.dtype, x.shape[1])
    return reference.run(cell, x, states, weights, resets, products)


def _to_float32(values: Any) -> Any:
    """Autocast's narrow inputs, outputs or states as float32; everything else unchanged."""
    if isinstance(values, Tensor):
        return values.float() if values.dtype in AUTOCAST_TYPES else values
    if isinstance(values, PackedSequence):
        return values._replace(data=_to_float32(values.data))
    return tuple(map(_to_float32, values)) if isinstance(values, tuple | list) else values


def _check_resets(inputs: Any, resets: Any) -> None:
    """Require bools, one for each step and lane of the inputs, on their device."""
    if not isinstance(inputs, Tensor):
        raise DataError(
            f"resets came with a {type(inputs).__name__}, expected a tensor of inputs: each packed"
            " sequence starts from its own state already. Pad the sequences, and pass resets where"
            " a lane starts another recording"
        )
    expected = [inputs.shape[:-1], torch.bool, inputs.device]
    got = [getattr(resets, name, None) for name in ("shape", "dtype", "device")]
    if got != expected:
        raise DataError(
            f"resets are a {type(resets).__name__} of {got}, expected {expected}: one flag for each"
            " step and lane, in the order of the inputs; write resets.bool(), and"
            " resets.transpose(0, 1) if only the order differs"
        )
