"""The loss of a chunk: of its rows, as users write it, or of its sequences.

Outputs and targets of the valid steps are flattened as users do by hand. The mean of the parts'
losses is that of all steps only if the loss is a mean over rows, which the first calls check. A
`SequenceLoss` gets the steps in their order, with all that the chunk holds.

Shapes: `T` steps, `B` lanes, `C` outputs, `N` valid steps.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, Protocol, SupportsFloat, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from throughtime._metadata import attach, attached
from throughtime.carry.carried import device_of, dtype_of
from throughtime.chunk import Chunk, Placement
from throughtime.errors import ConfigError, ModelError, warn_caller
from throughtime.gradient._mean import is_additive, is_mean, pairs_rows

IGNORED = -100  # torch's own ignore_index; a stream masks such steps
MOST_TRIALS = 5  # of the laws of a loss, where a chunk does not tell

LossFn: TypeAlias = Callable[[Any, Tensor], Tensor]


class Scaler(Protocol):
    """Scales a loss before its backward pass, as `torch.amp.GradScaler` does."""

    def scale(self, outputs: Tensor) -> Tensor:
        """The loss times the current scale."""
        ...


# losses of torch, as modules and as functions
_CLASSES = "CrossEntropyLoss NLLLoss MultiMarginLoss cross_entropy nll_loss multi_margin_loss"
_NUMBERS = (
    "MSELoss L1Loss SmoothL1Loss HuberLoss BCELoss BCEWithLogitsLoss PoissonNLLLoss mse_loss"
    " l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits"
    " poisson_nll_loss"
)
_TORCH = {nn.MSELoss.__module__, functional.__name__}
_LINE = "tt.SequenceLoss(lambda outputs, chunk: loss_fn(*chunk.valid_pairs(outputs)))"
_WHOLE = f"For the loss of a whole window, or of a whole recording, write {_LINE}"
_NO_MEAN = (
    "loss_fn is no mean over its rows: that of all rows is not the weighted mean of those of parts"
    " of them, so its value and gradient depend on how chunks, ranks or accumulated updates split"
    " them"
)
_NOT_ADDITIVE = (
    "the function of a SequenceLoss with additive=True is not: the sum (the mean times its weight)"
    " over some steps, or the weight, is not that of the first half and of the second together."
    " Return a sum over steps and its weight, or leave out additive=True"
)


def target_kind(loss_fn: object) -> Literal["classes", "numbers"] | None:
    """The targets that a loss of torch takes, as a module or a function; `None` for others.

    Example:
        >>> target_kind(nn.CrossEntropyLoss()), target_kind(nn.functional.mse_loss)
        ('classes', 'numbers')
    """
    while isinstance(loss_fn, partial):
        loss_fn = loss_fn.func
    kinds = [loss_fn, *inspect.getmro(type(loss_fn))]
    known = (kind for kind in kinds if getattr(kind, "__module__", "") in _TORCH)
    names = {getattr(kind, "__name__", "") for kind in known}
    if names & {*_CLASSES.split()}:
        return "classes"
    return "numbers" if names & {*_NUMBERS.split()} else None


class SequenceLoss(nn.Module):
    """A loss of outputs in their order, `(T, B, ...)`, and of all that the chunk holds.

    For what no mean over rows can say: a spectrum, the error of a whole recording, connectionist
    temporal classification (CTC), several series or several outputs.

    `fn(outputs, chunk)` gets all steps whose loss counts, and no others: those of a stride under
    `tt.Truncated`, of a recording under `tt.Exact`. None is masked: `chunk.mask` says which are
    valid. It returns a mean, which weighs as many as the valid steps; or a pair, a sum and its
    weight, such as the number of labels. Updates, lanes, ranks and `accumulate` are weighted so.
    They call it for their own steps, and the mean of the results is not the loss of all together.

    Args:
        fn: a function or a module.
        over: what it is called for: all lanes of a window; or each run of a recording's steps in a
            lane, `(T', 1, ...)`, without padding. A window may cut a recording, down to a single
            step: then it is the loss of pieces, and `chunk.starts` and `chunk.ends` say which ends
            are real. Return the weight 0 for a piece that says nothing.
        additive: whether the sum over steps is the sum of those of its parts, in any parts, as that
            of a mean is. Then it is called for each segment, and holds no more than that; the
            first call checks it. Otherwise once for each window, whose outputs, inputs and series
            it then holds. `tt.Randomized`, `tt.reach`, and `tt.Adaptive` and `tt.audit` without a
            stride need an additive one.

    Raises:
        ConfigError: `fn` cannot be called, or `over` is unknown.

    Example:
        >>> import torch, throughtime as tt
        >>> def ratio(outputs, chunk):  # the error-to-signal ratio
        ...     return (outputs - chunk.targets).square().sum() / chunk.targets.square().sum()
        >>> recording = {"inputs": torch.randn(60, 3), "targets": torch.randn(60, 1)}
        >>> stream = tt.Stream(recording, lanes=1, chunk=20)
        >>> net = tt.carry(torch.nn.Sequential(torch.nn.GRU(3, 8), torch.nn.Linear(8, 1)))
        >>> loss_fn = tt.SequenceLoss(ratio)
        >>> [update.steps for update in tt.updates(net, stream, loss_fn, gradient=tt.Exact(20))]
        [60]
    """

    def __init__(
        self,
        fn: Callable[[Any, Chunk], Any],
        over: Literal["window", "recording"] = "window",
        additive: bool = False,
    ) -> None:
        super().__init__()
        if not callable(fn) or over not in ("window", "recording"):
            raise ConfigError(
                f"SequenceLoss({fn!r}, over={over!r}): expected a function of outputs and chunk,"
                " and over='window' or over='recording'"
            )
        self.fn, self.over, self.additive = fn, over, additive

    def forward(self, outputs: Tensor, chunk: Chunk) -> tuple[Tensor, float]:
        """The mean loss, and its weight.

        Raises:
            ModelError: the function returns neither one number, nor a pair of a sum and a weight.
        """
        if self.over == "window":
            return self._call(outputs, chunk)
        runs = (run for run in chunk.runs() if run[1].valid_steps)
        return pooled([self._call(outputs[at], run) for at, run in runs], outputs)

    def _call(self, outputs: Tensor, chunk: Chunk) -> tuple[Tensor, float]:
        result: Any = self.fn(outputs, chunk)
        paired = type(result) is tuple and len(result) == 2
        loss, weight = result if paired else (result, chunk.valid_steps)
        fixed = isinstance(weight, SupportsFloat) and not getattr(weight, "requires_grad", 0)
        size = float(weight) if fixed and not getattr(weight, "ndim", 0) else math.nan
        if not (torch.is_tensor(loss) and not loss.dim() and 0 <= size < math.inf):
            raise ModelError(
                f"the function of a SequenceLoss returned {result!r:.200}, expected one number in a"
                " tensor, the mean over the valid steps; or a pair: their sum, and its weight, a"
                " constant of at least 0 without a gradient"
            )
        if paired:
            loss = loss / size if size else outputs.new_zeros(())
        return loss, size


def _of_items(fn: Any, unpack: Any, outputs: Tensor, other: Any) -> Any:
    """The loss of several outputs, which lie side by side; `other` are targets, or the chunk."""
    return fn(unpack(outputs), other)


def pooled(parts: Sequence[tuple[Tensor, float]], outputs: Tensor) -> tuple[Tensor, float]:
    """The mean of some mean losses by their weights, and its weight."""
    total = sum(weight for _, weight in parts)
    shares = (loss * (weight / total) for loss, weight in parts if weight)
    return sum(shares, outputs.new_zeros(())), total


class Objective:
    """A user's loss function over the valid steps of a chunk.

    Args:
        loss_fn: the user's function or module.
        scaler: a `torch.amp.GradScaler`, or None.
        split: whether the loss is going to be a mean of several.

    Attributes:
        joins: whether the loss of a window is that of all its steps together, and no mean of those
            of its segments.

    Raises:
        ModelError: a loss module that sums.
    """

    def __init__(
        self,
        loss_fn: LossFn | SequenceLoss,
        scaler: Scaler | None = None,
        *,
        split: bool = False,
    ) -> None:
        own: Any = loss_fn
        self.loss_fn = self.call = own  # `call` takes outputs in one tensor
        self.scaler, self.split = scaler, split
        self.sequences = isinstance(own, SequenceLoss)
        self.function = own.fn if self.sequences else own
        self.joins: bool = self.sequences and not own.additive
        self.stride: int | None = None
        self.unpack: Any = None  # of a net with several outputs
        # how often the law of this loss was tried, and whether it holds, once known
        self._trials, self._lawful = 0, self.joins or type(own).__module__ in _TORCH or None
        if getattr(own, "reduction", "mean") == "sum":
            raise ModelError(
                "loss_fn has reduction='sum', expected 'mean': chunks, lanes and updates are"
                " weighted by their valid steps, which takes the mean over the rows of each"
            )

    def placement(self, net: nn.Module, device: torch.device | None = None) -> Placement:
        """Where the net and the loss need chunks: on this device, or that of the weights."""
        return Placement(device or device_of(net), dtype_of(net), target_kind(self.loss_fn))

    def __call__(
        self, outputs: Tensor, chunk: Chunk, weight: float | None = None
    ) -> tuple[Tensor, float]:
        """The mean loss over the valid steps of a chunk, and its weight in that of several.

        Args:
            outputs: `(T, B, C)`, of the steps of the chunk.
            chunk: with targets.
            weight: `self.weight(chunk)`, if it is known.

        Returns:
            A scalar with a graph, a zero without one if no step counts; and the weight.

        Raises:
            ModelError: the function returns no scalar, or the targets need another number of
                outputs; or its first calls show that it is no mean over rows where parts of it are
                added up, or that it pairs rows: it broadcasts `(N,)` against `(N, 1)`.
        """
        weight = self.weight(chunk) if weight is None else weight
        if not weight:
            return outputs.new_zeros(()), 0.0
        if self.sequences:
            return self._of_sequences(outputs, chunk)
        rows, targets = chunk.valid_pairs(outputs)
        if self._lawful is None:
            self._check_mean(rows, targets)
        try:
            loss = self.call(rows, targets)
        except (RuntimeError, ValueError, IndexError) as error:
            classes, width = targets.dim() == 1, rows.shape[-1]
            needed = int(targets.max()) + 1 if classes else targets.shape[1]
            fits = needed <= width if classes else needed == width
            if target_kind(self.loss_fn) and not fits:
                raise ModelError(
                    f"the net has {width} outputs in each step, and the targets of the stream need"
                    f" {needed}, one for each class or column: build its last layer for them"
                ) from error
            error.add_note(
                f"throughtime: loss_fn got outputs {tuple(rows.shape)} of {rows.dtype} on"
                f" {rows.device} and targets {tuple(targets.shape)} of {targets.dtype} on"
                f" {targets.device}, one row for each valid step. A loss over classes takes indexes"
                " (N,), one over numbers the shape of the outputs"
            )
            raise
        known = torch.is_tensor(loss)  # a user's loss_fn may return anything
        if not known or loss.dim():
            got = f"tensor of shape {tuple(loss.shape)}" if known else type(loss).__name__
            raise ModelError(
                f"loss_fn returned a {got}, expected one number in a tensor: the mean over its"
                f" {len(rows)} rows. Is it made with reduction='none'?"
            )
        return loss, weight

    def _of_sequences(self, outputs: Tensor, chunk: Chunk) -> tuple[Tensor, float]:
        """The loss of steps in their order, or the mean of those of every stride."""
        if self._lawful is None and chunk.steps > 1:
            self._judge(is_additive(self.call, outputs, chunk))
            self.require_parts()
        every = self.stride or chunk.steps
        spans = [slice(begin, begin + every) for begin in range(0, chunk.steps, every)]
        parts = [self.call(outputs[at], chunk[at]) for at in spans if chunk[at].valid_steps]
        return pooled(parts, outputs)

    def bind(self, unpack: Any) -> None:
        """Let the loss have the items of several outputs, which lie side by side until then.

        Raises:
            ModelError: it is one of torch's, which take one tensor.
        """
        if self.unpack is None and unpack is not None:
            own, self.unpack = self.loss_fn, unpack
            if target_kind(own):
                raise ModelError(
                    "the net has several outputs, and this loss takes one tensor: write"
                    " tt.SequenceLoss(lambda y, chunk: loss_fn(*chunk.valid_pairs(y[0])),"
                    " additive=True), with the number or the name of the output that it is for"
                )
            self.call = partial(_of_items, self.function, unpack)
            if self.sequences:
                self.call = SequenceLoss(self.call, own.over, own.additive)

    def set_stride(self, stride: int | None, policy: str) -> None:
        """Call a loss of whole windows for every stride, where another policy is compared.

        Raises:
            ConfigError: there is no fixed stride.
        """
        if not self.joins:
            return
        self.stride = stride
        if stride is None:
            raise ConfigError(
                f"{policy} takes the loss of strides of several lengths, on which that of a"
                " SequenceLoss depends: give a stride, or take one with additive=True"
            )

    def require_parts(self, per: float | None = None) -> None:
        """From now on the loss is that of parts of what belongs together.

        Args:
            per: of the window; the loss of a window with one cannot be taken as a whole.

        Raises:
            ModelError: it is known that the loss of parts is another.
            ConfigError: the policy needs an additive loss.
        """
        if self.joins:
            if per is not None:
                raise ConfigError(
                    "a policy whose updates are sums over a number of steps, as tt.Randomized,"
                    " takes a SequenceLoss only with additive=True: a loss of whole windows would"
                    " depend on where they end by chance"
                )
            return
        self.split = True
        if self._lawful is False:
            raise ModelError(_NOT_ADDITIVE if self.sequences else f"{_NO_MEAN}. {_WHOLE}")

    def _judge(self, verdict: bool | None) -> None:
        """Keep a verdict; a loss that no chunk judges is trusted in the end."""
        self._trials += 1
        self._lawful = True if verdict is None and self._trials == MOST_TRIALS else verdict

    def _check_mean(self, rows: Tensor, targets: Tensor) -> None:
        """Try the law of the mean: refuse a loss that breaks it where it is split, else warn."""
        verdict = is_mean(self.call, rows, targets, self._weigh)
        if verdict is False and pairs_rows(self.call, rows, targets):
            raise ModelError(
                "loss_fn pairs each row with every other: it is the mean over all pairs of an"
                f" output and a target. The outputs are {tuple(rows.shape)} and the targets"
                f" {tuple(targets.shape)}, one row for each valid step, and (N,) beside (N, 1)"
                " broadcasts to (N, N). Write outputs[:, 0] beside"
                f" {'targets' if targets.dim() == 1 else 'targets[:, 0]'}. If all pairs are meant:"
                f" {_LINE}"
            )
        self._judge(verdict)
        if self.split:
            self.require_parts()
        elif verdict is False:
            warn_caller(
                f"{_NO_MEAN}. Here it is taken over the steps of each update; tt.evaluate, and"
                f" windows of several segments, refuse it. {_WHOLE}"
            )

    def weight(self, chunk: Chunk) -> float:
        """The weight of this chunk's mean loss in that of several: its valid steps.

        For torch's losses over classes, ignored classes do not count, and the others count with
        their class weights.
        """
        fn, valid = self.loss_fn, chunk.valid_steps
        if not valid or not isinstance(fn, (nn.CrossEntropyLoss, nn.NLLLoss)):
            return float(valid)
        weight, own = fn._buffers["weight"], chunk._targets
        changed = own is not None and not own.is_inference() and own._version
        if weight is None and fn.ignore_index == IGNORED and not changed:
            return float(valid)  # a chunk masks such steps
        targets = chunk.host_targets
        if targets is None or targets.is_floating_point():
            return float(valid)
        if valid < chunk.steps * chunk.lanes:
            targets = targets[chunk.metadata.mask[chunk.span]]
        return self._weigh(targets)

    def _weigh(self, targets: Tensor) -> float:
        """The weight of the loss of rows with these targets."""
        fn = self.loss_fn
        if not isinstance(fn, (nn.CrossEntropyLoss, nn.NLLLoss)) or targets.is_floating_point():
            return float(len(targets))
        counted, weight = targets[targets != fn.ignore_index], fn._buffers["weight"]
        if weight is None:
            return float(counted.numel())
        return float(_on_host(weight)[counted.cpu()].sum(dtype=torch.float64))

    def recordings_at_fault(self, outputs: Tensor | None, chunk: Chunk) -> list[int]:
        """The recordings whose own loss is not finite; if there are none, all of the chunk."""
        at_fault = list[int]()
        if outputs is not None and not self.sequences:
            rows, targets = chunk.valid_pairs(outputs.detach())
            owners = chunk.recording[chunk.mask]
            with torch.no_grad():
                at_fault = [
                    index
                    for index in owners.unique().tolist()
                    if not self.call(rows[owners == index], targets[owners == index]).isfinite()
                ]
        return at_fault or chunk.recording[chunk.recording >= 0].unique().tolist()


def _on_host(weight: Tensor) -> Tensor:
    """Class weights on the host: read from a device once, unless they are changed or replaced."""
    if weight.is_cpu:
        return weight
    known, alias = attached(weight) or (None, weight)
    if known is None or alias.data_ptr() != weight.data_ptr():
        known = weight.cpu()
        attach(weight, (known, weight.detach()))  # which keeps the memory: no others get it
    return known


def require_gradient(reached: bool) -> None:
    """Refuse a loss that depends on no parameter."""
    if not reached:
        raise ModelError(
            "the loss depends on no parameter that requires a gradient: is every parameter frozen,"
            " or does the net or loss_fn detach its outputs?"
        )


def trainable_weights(net: nn.Module, loss_fn: object = None) -> dict[str, Tensor]:
    """The parameters that require a gradient, by name: of the net, and of a loss that has its own.

    The name has no leading `module.`; that of a loss's parameter begins with `loss_fn.`.
    """
    weights, met = dict[str, Tensor](), set[int]()
    _collect(net, "", weights, met)
    if isinstance(loss_fn, nn.Module):
        _collect(loss_fn, "loss_fn.", weights, met)
    return weights


def _collect(module: nn.Module, path: str, weights: dict[str, Tensor], met: set[int]) -> None:
    """As `named_parameters`, in half its time: every update asks for them."""
    for name, weight in module._parameters.items():
        if weight is not None and weight.requires_grad and id(weight) not in met:
            met.add(id(weight))
            weights[(path + name).removeprefix("module.")] = weight
    for name, child in module._modules.items():
        if child is not None and id(child) not in met:
            met.add(id(child))
            _collect(child, f"{path}{name}.", weights, met)


def sizes(tensors: list[Tensor]) -> Tensor:
    """A number for each tensor that is finite if all of it is, but for an overflow; no wait."""
    if tensors[0].is_cpu or any(type(t) is not Tensor or t.is_sparse for t in tensors):
        return torch.stack([tensor.detach().sum() for tensor in tensors])
    # as torch's clip_grad_norm_ does: one kernel there, on a CPU slower than sums
    norms = torch._foreach_norm(tensors, math.inf)  # pyright: ignore[reportPrivateImportUsage]
    return torch.stack([norm.to(tensors[0].device, torch.float32) for norm in norms])
