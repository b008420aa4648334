"""Ranks through Lightning Fabric: it starts them on this machine, or finds that torchrun, Slurm or
another launcher has.

Nothing else of it is used: streams take their shares from the process group that is up then, and
ranks add gradients up themselves.
"""

import os
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import distributed

from throughtime.errors import ConfigError

PATIENCE = 30.0  # seconds that a rank started here is given to end, once the process group is gone


@contextmanager
def launched(device: str, devices: int, nodes: int) -> Generator[torch.device]:
    """A process group of `devices * nodes` ranks, and the device of this one.

    Where no launcher has started the processes of this machine, this one starts the others with its
    own command line, and waits for them in the end.

    Args:
        device: `cpu` or `cuda`.
        devices: processes on each node.
        nodes: how many of them.

    Returns:
        The device of this rank; for `cuda` it is the current one, too.

    Raises:
        ConfigError: a number of processes that is not the launcher's, devices that are not there,
            or nodes that cannot meet.

    Example:
        >>> from throughtime.integrations.lightning.launch import launched
        >>> with launched("cpu", devices=1, nodes=1) as device:
        ...     print(device, torch.distributed.get_world_size())
        cpu 1
    """
    before = dict(os.environ)
    try:
        fabric = _joined(device, devices, nodes)
        if "OMP_NUM_THREADS" not in before:
            os.environ.pop(
                "OMP_NUM_THREADS", None
            )  # Lightning's guess would pass for the user's word
        children = _started(fabric)
        try:
            yield fabric.device
        finally:
            if distributed.get_backend() == "gloo":
                # a rank that still waits for this one hears that it is gone
                distributed.destroy_process_group()
                _wait_for(children)
    finally:
        # Lightning leaves this rank's place in it, where the next launch would take it for its own
        os.environ.clear()
        os.environ.update(before)


def _joined(device: str, devices: int, nodes: int) -> Fabric:
    try:
        fabric = Fabric(accelerator=device, devices=devices, num_nodes=nodes, strategy="ddp")
        _refuse_unmet(fabric, nodes)
        fabric.launch()
    except ConfigError:
        raise
    except (ValueError, RuntimeError, MisconfigurationException) as error:
        raise ConfigError(
            f"strategy='ddp' with device={device}, devices={devices} on each of nodes={nodes} does"
            f" not fit how this process was started, or the machine: {error}"
        ) from error
    return fabric


def _refuse_unmet(fabric: Fabric, nodes: int) -> None:
    """Several nodes and nobody who says where the first one is: each would wait for the others, half an hour."""
    alone = isinstance(getattr(fabric.strategy, "cluster_environment", None), LightningEnvironment)
    if nodes > 1 and alone and not {"MASTER_ADDR", "NODE_RANK"} <= os.environ.keys():
        raise ConfigError(
            f"nodes={nodes}: nothing says where the other machines are. Start it on each of them"
            f" with torchrun --nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint HOST:PORT, under"
            " Slurm with srun, or set MASTER_ADDR, MASTER_PORT and NODE_RANK"
        )


def _started(fabric: Fabric) -> list["subprocess.Popen[Any]"]:
    """The ranks that this process has started, taken over from Lightning.

    Lightning's own watch looks every five seconds, and kills this process without a word when
    another has failed. Over gloo a lost rank is heard of at once, and said with what to do; NCCL
    may hear of it late, so there the watch stays.
    """
    watched: list[subprocess.Popen[Any]] = getattr(fabric.strategy.launcher, "procs", [])
    mine = list(watched)
    if distributed.get_backend() == "gloo":
        watched.clear()
    return mine


def _wait_for(children: list["subprocess.Popen[Any]"]) -> None:
    for child in children:
        try:
            child.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
