"""The same training by the libraries of others, each as its documentation says.

Ignite and tsfast drop the state between batches, so the recordings are one batch. Ignite's trainer
cannot clip; here its optimizer does.
"""

import logging
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from benchmarks.bench.implementation import Implementation, Trainer
from benchmarks.bench.workload import NORM, RATE, Net, Workload, detach_state
from torch import Tensor, nn


def _recorded(losses: list[Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Cross-entropy of outputs and targets whose lanes and steps are apart."""
    loss_fn = nn.CrossEntropyLoss()

    def record(y: Tensor, target: Tensor) -> Tensor:
        loss = loss_fn(y.flatten(0, 1), target.flatten())
        losses.append(loss.detach())
        return loss

    return record


def ignite(workload: Workload) -> Implementation:
    """`create_supervised_tbptt_trainer`."""
    from ignite.contrib.engines.tbptt import create_supervised_tbptt_trainer

    net, losses = Net(workload.modules()), list[Tensor]()
    optimizer = torch.optim.Adam(net.parameters(), lr=RATE)

    def clip(*_: object) -> None:
        nn.utils.clip_grad_norm_(net.parameters(), NORM)

    optimizer.register_step_pre_hook(clip)
    loss_fn: Any = _recorded(losses)  # any callable works
    trainer = create_supervised_tbptt_trainer(net, optimizer, loss_fn, workload.case.steps)
    # `Trainer.close` ends it by an exception that it would log; errors are raised all the same
    trainer.logger.setLevel(logging.CRITICAL)
    return Trainer(
        net,
        optimizer,
        lambda: trainer.run([(workload.inputs, workload.targets)], max_epochs=1),
        losses,
    )


class _Endless:
    """The one batch, again and again."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield self.batch


def lightning(workload: Workload) -> Implementation:
    """Manual optimization with the loop in `training_step`, as Lightning documents since 2.0."""
    import lightning.pytorch as pl

    net, losses = Net(workload.modules()), list[Tensor]()
    optimizer, loss_fn, steps = (
        torch.optim.Adam(net.parameters(), lr=RATE),
        _recorded(losses),
        workload.case.steps,
    )

    class Manual(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.automatic_optimization = net, False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            del batch_idx
            own, state = self.optimizers(), None
            for x, target in zip(batch[0].split(steps), batch[1].split(steps), strict=True):
                y, state = self.net(x, state)
                self.manual_backward(loss_fn(y, target))
                # one optimizer, no list
                self.clip_gradients(own, gradient_clip_val=NORM, gradient_clip_algorithm="norm")  # pyright: ignore[reportArgumentType]
                own.step()  # pyright: ignore[reportAttributeAccessIssue]  # the same
                own.zero_grad()  # pyright: ignore[reportAttributeAccessIssue]  # the same
                state = detach_state(state)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer

    return Trainer(
        net,
        optimizer,
        lambda: _fitted(pl, Manual(), _Endless((workload.inputs, workload.targets))),
        losses,
    )


def _fitted(pl: Any, module: Any, batches: _Endless) -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", module="lightning"
        )  # it advises a bare Trainer to load with more workers
        pl.Trainer(max_epochs=1, accelerator="cpu", **quiet).fit(module, batches)


def tsfast(workload: Workload) -> Implementation:
    """`TbpttLearner`; lanes come first, as it wants them."""
    # optional, and no extra of ours
    from tsfast.training import TbpttLearner  # pyright: ignore[reportMissingImports]

    net, losses = Net(workload.modules(batch_first=True)), list[Tensor]()
    batch = (
        workload.inputs.transpose(0, 1).contiguous(),
        workload.targets.transpose(0, 1).contiguous(),
    )
    learner = TbpttLearner(
        net,
        SimpleNamespace(train=[batch]),
        _recorded(losses),
        lr=RATE,
        opt_func=torch.optim.Adam,
        grad_clip=NORM,
        device=torch.device("cpu"),
        show_bar=False,
        sub_seq_len=workload.case.steps,
    )
    learner.setup()
    return Trainer(net, learner.opt, learner.train_one_epoch, losses)


PEERS: dict[str, Callable[[Workload], Implementation]] = {
    "ignite": ignite,
    "lightning": lightning,
    "tsfast": tsfast,
}
