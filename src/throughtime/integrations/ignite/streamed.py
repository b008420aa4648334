"""Training on a `tt.Stream` with Ignite, under any gradient policy."""

from typing import Literal

import torch

import throughtime as tt
from throughtime.gradient import LossFn, Policy
from throughtime.integrations.ignite.stepping import Stepping
from throughtime.integrations.ignite.trainer import StreamTrainer


def stream_trainer(
    net: tt.Carried,
    optimizer: torch.optim.Optimizer,
    loss_fn: LossFn,
    *,
    gradient: Policy,
    chunks: int = 1,
    accumulate: int = 1,
    max_norm: float | None = None,
    amp_mode: Literal["amp"] | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> StreamTrainer:
    """An Ignite engine that trains on a stream: `trainer.run(stream, max_epochs=5)`.

    The state is carried over the whole stream and reset where recordings start. Where batches come
    from a loader of your own, take `create_supervised_tbptt_trainer`.

    Args:
        net: made by `tt.carry`.
        optimizer: any; stepped once per update.
        loss_fn: as for `tt.updates`.
        gradient: `tt.Truncated(...)`, `tt.Exact(...)` or another policy.
        chunks: how many chunks of the stream an iteration plays, with as many updates as the policy
            makes of them. More of them make Ignite's own cost per iteration matter less.
        accumulate: as for `tt.updates`: so many of the policy's updates are one.
        max_norm: the gradient is clipped to this global norm.
        amp_mode: "amp" runs net and loss under `torch.autocast`.
        scaler: a `torch.amp.GradScaler`; only with `amp_mode`.

    Returns:
        The engine. `state.output` of an iteration is the mean loss over its valid steps; an
        iteration in which no update fell due keeps that of the one before. Each update fires
        `StreamEvents`; handlers find it in `state.update`, and the number of updates in
        `state.updates`. `terminate()` in a handler stops after the present update. `state_dict()`
        holds the carried state, the place in the stream and torch's random state; an epoch that was
        terminated and not loaded again starts anew.

    Raises:
        ConfigError: settings that contradict each other. Running on anything but a `tt.Stream` or a
            `Loader` of one raises `DataError`.

    Cost: that of `tt.updates`, and Ignite's per iteration.

    Example:
        >>> import torch, throughtime as tt
        >>> from throughtime.integrations.ignite import stream_trainer
        >>> stream = tt.Stream({"inputs": torch.randn(50, 3), "targets": torch.randn(50)}, lanes=1, chunk=20)
        >>> net = tt.carry(torch.nn.Sequential(torch.nn.GRU(3, 8), torch.nn.Linear(8, 1)))
        >>> optimizer = torch.optim.Adam(net.parameters())
        >>> trainer = stream_trainer(net, optimizer, torch.nn.MSELoss(), gradient=tt.Truncated(stride=10))
        >>> state = trainer.run(stream, max_epochs=2)
        >>> state.iteration, state.updates
        (6, 10)
    """
    return StreamTrainer(
        net, loss_fn, gradient, Stepping(optimizer, max_norm, amp_mode, scaler), chunks, accumulate
    )
