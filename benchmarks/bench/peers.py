"""The same training by the libraries of others, each as its documentation says, and in JAX.

Ignite and tsfast drop the state between batches, so the recordings are one batch. Ignite's trainer
cannot clip; here its optimizer does.
"""

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from benchmarks.bench.implementation import Implementation, Loop, Trainer
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


def jax(workload: Workload) -> Implementation:
    """A scan over the steps, the whole update jitted, its buffers donated, the state carried."""
    if torch.get_num_threads() == 1:  # read when JAX starts
        one = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
        os.environ.setdefault("XLA_FLAGS", one)
    # optional, and no extra of ours
    import jax  # pyright: ignore[reportMissingImports]

    jax.config.update("jax_enable_x64", True)
    net = Net(workload.modules())
    return Loop(net, _by_jax(jax, net, workload))


def _by_jax(jax: Any, net: Net, workload: Workload) -> Iterator[Tensor]:
    jnp, case = jax.numpy, workload.case
    steps: dict[str, Callable[[Any, Any], Any]] = {
        "LSTM": partial(_lstm_step, jax),
        "GRU": partial(_gru_step, jax),
        "RNN": lambda _, sums: jnp.tanh(sums[0] + sums[1]),
    }

    def loss(weights: Any, states: Any, x: Any, target: Any) -> Any:
        y, after = weights["words.weight"][x] if case.vocabulary else x, list[Any]()
        for k, state in enumerate(states):
            ih, hh, b_ih, b_hh = (
                weights[f"layer.{name}_l{k}"]
                for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
            )

            def step(state: Any, row: Any, hh: Any = hh, b_hh: Any = b_hh) -> Any:
                h = state[0] if case.cell == "LSTM" else state
                state = steps[case.cell](state, (row, h @ hh.T + b_hh))
                return state, state[0] if case.cell == "LSTM" else state

            last, y = jax.lax.scan(step, state, y @ ih.T + b_ih)
            after.append(last)
        scores = jax.nn.log_softmax(y @ weights["head.weight"].T + weights["head.bias"])
        return -jnp.take_along_axis(scores, target[..., None], -1).mean(), after

    def update(weights: Any, means: Any, squares: Any, states: Any, count: Any, data: Any) -> Any:
        (value, states), grads = jax.value_and_grad(loss, has_aux=True)(weights, states, *data)
        norm = jnp.sqrt(sum((g * g).sum() for g in jax.tree.leaves(grads)))
        grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, NORM / (norm + 1e-6)), grads)
        means = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, means, grads)
        squares = jax.tree.map(lambda s, g: 0.999 * s + 0.001 * g * g, squares, grads)
        rate, root = RATE / (1 - 0.9**count), jnp.sqrt(1 - 0.999**count)
        weights = jax.tree.map(
            lambda w, m, s: (w - rate * m / (jnp.sqrt(s) / root + 1e-8)).astype(w.dtype),
            *(weights, means, squares),
        )
        return weights, means, squares, states, value

    weights = {name: jnp.array(w.detach().numpy()) for name, w in net.named_parameters()}
    means, squares = (jax.tree.map(jnp.zeros_like, weights) for _ in range(2))
    zeros = jnp.zeros((case.lanes, case.hidden), workload.case.type)
    start = [(zeros, zeros) if case.cell == "LSTM" else zeros for _ in range(case.layers)]
    run, count = jax.jit(update, donate_argnums=(0, 1, 2)), 0
    x, targets = workload.inputs.numpy(), workload.targets.numpy()
    while True:
        states = start
        for at in range(0, len(x), case.steps):
            data, count = (x[at : at + case.steps], targets[at : at + case.steps]), count + 1
            weights, means, squares, states, value = run(
                weights, means, squares, states, float(count), data
            )
            yield torch.tensor(float(value), dtype=case.dtype)


def _lstm_step(jax: Any, state: Any, sums: Any) -> Any:
    i, f, g, o = jax.numpy.split(sums[0] + sums[1], 4, -1)
    c = jax.nn.sigmoid(f) * state[1] + jax.nn.sigmoid(i) * jax.numpy.tanh(g)
    return jax.nn.sigmoid(o) * jax.numpy.tanh(c), c


def _gru_step(jax: Any, h: Any, sums: Any) -> Any:
    (r, z, n), (hr, hz, hn) = (jax.numpy.split(rows, 3, -1) for rows in sums)
    r, z = jax.nn.sigmoid(r + hr), jax.nn.sigmoid(z + hz)
    return (1 - z) * jax.numpy.tanh(n + r * hn) + z * h


PEERS: dict[str, Callable[[Workload], Implementation]] = {
    "ignite": ignite,
    "lightning": lightning,
    "tsfast": tsfast,
    "jax": jax,
}
