"""What a checkpoint holds of a training, and how a training takes it over."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import LambdaLR

from throughtime._device import generators, set_generators
from throughtime.app.dataset import changed_data
from throughtime.app.model import check_layout, statistics_of
from throughtime.app.run_folder import plain_settings
from throughtime.errors import DataError, RunError, ThroughtimeError, counted, one_line
from throughtime.state import leaves
from throughtime.stream.manifest import join_faults

if TYPE_CHECKING:
    from throughtime.app.train import Training


def rank_position(training: "Training") -> dict[str, Any]:
    """The position of this rank in the stream, and the state of its random generators."""
    updates = training._updates
    return {
        "updates": None if updates is None else updates.state_dict(),
        "stream": training.stream.state_dict(),
        "random": generators(training.device),
        "waited": training._waited + training.stream.wait_seconds,
    }


def content(training: "Training", positions: list[dict[str, Any]]) -> dict[str, Any]:
    """The content of a checkpoint, with the positions of all ranks."""
    return {
        "net": dict(training.net.state_dict()),
        "optimizer": training.optimizer.state_dict(),
        "schedule": training.schedule.state_dict(),
        "selection": training.selection.state_dict(),
        "ranks": positions,
        "counts": [training.count, training.rows, training.frames, training._loss_steps],
        "seconds": [training.seconds, training._overhead],
        "loss_sum": training._loss_sum,
        "finished": training.finished,
        "spec": asdict(training.dataset.spec),
        "settings": plain_settings(training.config),
        "code": training.code,
    }


def restore(training: "Training", saved: Mapping[str, Any]) -> None:
    """Take over a checkpoint.

    Raises:
        RunError: it is that of another run or of other ranks, or damaged.
        DataError: the data have changed since it was written.
    """
    try:
        _restore(training, saved)
    except ThroughtimeError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, RuntimeError) as error:
        raise RunError(
            f"{training.folder.checkpoint}: not a checkpoint of this run"
            f" ({type(error).__name__}: {one_line(error)}); put back a copy, or begin the run"
            " again with another --out"
        ) from error


def _restore(training: "Training", saved: Mapping[str, Any]) -> None:
    position = _own_position(training, saved)
    net, optimizer = training.net, training.optimizer
    spec, statistics = training.dataset.spec, statistics_of(net)
    if faults := changed_data(spec, statistics, saved["spec"], saved["net"]):
        raise DataError(
            f"the data of {training.folder.path} have changed since the run was started: "
            + join_faults(faults)
        )
    expected = net.module.state_dict()
    check_layout(saved["net"], expected)
    net.load_state_dict(saved["net"])
    moments = saved["optimizer"]["state"]  # its settings are those of the run
    parameters = [weight for group in optimizer.param_groups for weight in group["params"]]
    for i, values in moments.items():
        for name in (name for name, value in values.items() if getattr(value, "ndim", 0)):
            check_layout({name: values[name]}, {name: parameters[i]})
    optimizer.load_state_dict(optimizer.state_dict() | {"state": moments})
    if saved["selection"]["weights"]:
        check_layout(saved["selection"]["weights"], expected)
    training.selection.load_state_dict(saved["selection"])
    schedule = training.schedule
    own = {k: v for k, v in saved["schedule"].items() if k != "base_lrs"}
    schedule.load_state_dict(schedule.state_dict() | own)
    rates = schedule.get_last_lr()
    if isinstance(schedule, LambdaLR):  # of the settings now, which may name another end
        rates = [training.config.lr * schedule.lr_lambdas[0](schedule.last_epoch)] * len(rates)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    training.count, training.rows, training.frames, training._loss_steps = saved["counts"]
    training.seconds, training._overhead = saved["seconds"]
    training._loss_sum.copy_(saved["loss_sum"])
    training.finished = saved["finished"]
    training._waited = position["waited"]
    training.stream.load_state_dict(position["stream"])
    if position["updates"] is not None:
        updates = training._updates = training._new_updates()
        updates.load_state_dict(position["updates"])
        if updates.state is not None:
            initial = net.initial_state(training.stream.lanes)
            check_layout(dict(leaves(updates.state)), dict(leaves(initial)))
    set_generators(position["random"], training.device)


def _own_position(training: "Training", saved: Mapping[str, Any]) -> dict[str, Any]:
    """The saved position of this rank."""
    count, positions, folder = training.team.count, saved["ranks"], training.folder
    if len(positions) != count:
        raise RunError(
            f"{folder.checkpoint}: holds the positions of {counted(len(positions), 'rank')}, each"
            f" in its own share of the recordings, and there {'is' if count == 1 else 'are'}"
            f" {count} now: go on with as many as before, by torchrun -m throughtime train"
            f" --resume {folder.path}"
        )
    return positions[training.team.rank]
