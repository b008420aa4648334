"""Ignite's trainer for truncated backpropagation through time, made right: change the import.

With default arguments it computes what `ignite.contrib.engines.create_supervised_tbptt_trainer`
computes, to the bit.

Shapes: `T` steps, `B` lanes, `C` outputs, `N` steps times lanes.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from ignite.engine import Engine
from torch import nn

import throughtime as tt
from throughtime.errors import ConfigError
from throughtime.integrations.ignite.batches import lanes_of
from throughtime.integrations.ignite.batches import prepare_batch as _prepare_batch
from throughtime.integrations.ignite.chunked import LossFn, Plain, Resets, Way, Windowed
from throughtime.integrations.ignite.iteration import Iteration
from throughtime.integrations.ignite.stepping import Stepping


def create_supervised_tbptt_trainer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: LossFn,
    tbtt_step: int,
    dim: int = 0,
    device: str | torch.device | None = None,
    non_blocking: bool = False,
    prepare_batch: Callable[..., tuple[Any, Any]] = _prepare_batch,
    *,
    static: Sequence[str] = (),
    carry: bool = False,
    resets: Resets = None,
    horizon: int | None = None,
    max_norm: float | None = None,
    amp_mode: Literal["amp"] | None = None,
    scaler: torch.amp.GradScaler | None = None,
    weighted: bool = False,
) -> Engine:
    """An Ignite engine that trains on chunks of `tbtt_step` steps of each batch, an update after
    each.

    Takes the place of the function of the same name in `ignite.contrib.engines`. Where recordings
    are longer than a batch can hold, or another policy than truncation is wanted, take
    `stream_trainer`.

    Args:
        model: maps `x` to `(outputs, hidden)`, and `(x, hidden)` as well; any nested `hidden`, see
            `tt.state`. One made by `tt.carry` is played as with `horizon`.
        optimizer: any.
        loss_fn: of `(outputs, targets)` of a chunk. With `resets` or `horizon` it is as for
            `tt.updates`: a mean over the rows `(N, C)` and `(N,)` or `(N, C)`.
        tbtt_step: steps of a chunk; the last one of a batch may be shorter.
        dim: the time dimension of the batches.
        device: where batches are moved to; the model stays where it is.
        non_blocking: copies to the device need not be waited for.
        prepare_batch: of `(chunk, device, non_blocking)`, gives `(x, y)`. The default takes pairs
            and mappings of `inputs` and `targets`.
        static: places of tensors without time, as `"speaker"` or `"0.age"`, that go whole into each
            chunk; all others are cut.
        carry: row i of a batch goes on where row i of the one before it ended; every epoch starts
            anew. The state is `trainer.state.hidden`, and `trainer.state_dict()` has it.
        resets: rows whose recording starts with the batch: the batch's key of, or a function
            giving, `(B,)` bool.
        horizon: steps that credit flows back, within the batch, at least `tbtt_step`; default
            `tbtt_step`.
        max_norm: the gradient is clipped to this global norm.
        amp_mode: "amp" runs model and loss under `torch.autocast`.
        scaler: a `torch.amp.GradScaler`; only with `amp_mode`.
        weighted: `state.output` of an iteration is the mean over steps; default: over chunks, a
            short last one counting as any other.

    Returns:
        The engine. Chunks fire `Tbptt_Events`; handlers see the loss of the chunk in `state.output`
        and the number of chunks in `state.time_iteration`. `terminate()` stops after the present
        chunk.

    Raises:
        ConfigError: arguments that contradict each other.
        ModelError: `resets` or `horizon` with a model that cannot be carried. A batch that does not
            fit raises `DataError`.

    Cost: that of the loop by hand; with `horizon` `horizon / tbtt_step` times as much.

    Example:
        >>> import torch
        >>> from throughtime.integrations.ignite import create_supervised_tbptt_trainer
        >>> gru = torch.nn.GRU(3, 1)
        >>> optimizer = torch.optim.SGD(gru.parameters(), lr=0.1)
        >>> trainer = create_supervised_tbptt_trainer(gru, optimizer, torch.nn.MSELoss(), tbtt_step=4, carry=True)
        >>> trainer.run([(torch.zeros(10, 2, 3), torch.zeros(10, 2, 1))] * 2).time_iteration
        6

    References: R. J. Williams and J. Peng, Neural Computation 2 (1990).
    """
    stepping = Stepping(optimizer, max_norm, amp_mode, scaler)
    places = (*static, resets) if isinstance(resets, str) else tuple(static)
    _check(tbtt_step, dim, static, carry, resets, horizon)
    prepare = partial(prepare_batch, device=device, non_blocking=non_blocking)
    way: Way = Plain(model, loss_fn, stepping, prepare, tbtt_step, dim, tuple(static))
    if resets is not None or horizon is not None or isinstance(model, tt.Carried):
        net = tt.carry(model, batch_first=dim == 1)
        way = Windowed(
            net,
            loss_fn,
            stepping,
            prepare,
            tt.Truncated(tbtt_step, horizon),
            dim,
            tuple(static),
            resets,
        )
    return Iteration(way, partial(lanes_of, dim=dim, static=places), carry, weighted).engine()


def _check(
    tbtt_step: int,
    dim: int,
    static: Sequence[str],
    carry: bool,
    resets: Resets,
    horizon: int | None,
) -> None:
    """Refuses what cannot be meant."""
    faults: list[str] = []
    # a user's 1e2 is a float
    if not isinstance(tbtt_step, int) or tbtt_step < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        faults.append(f"tbtt_step={tbtt_step!r}: expected a number of steps, at least 1")
    if isinstance(static, str):
        faults.append(f"static={static!r} is a string, expected several: static=({static!r},)")
    if resets is not None and not carry:
        faults.append(
            "resets without carry=True: without it every row of every batch starts from the initial"
            " state anyway"
        )
    if (resets is not None or horizon is not None) and dim not in (0, 1):
        faults.append(
            f"dim={dim} with resets or horizon: expected 0 for (T, B, ...) or 1 for (B, T, ...)"
        )
    if faults:
        raise ConfigError("; ".join(faults))
