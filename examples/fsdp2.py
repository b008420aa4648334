"""Train a net that `fully_shard` shards over the ranks; a second start resumes.

torchrun --nproc-per-node 2 examples/fsdp2.py --updates 200
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import throughtime as tt
from throughtime.carry import Carried
from throughtime.updates import Updates

LANES = 4  # of all ranks together
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def save(
    net: Carried, optimizer: torch.optim.Optimizer, updates: Updates, done: int, path: Path
) -> None:
    """Replace the file in one step; every rank takes part, the first one writes."""
    # of the module: torch saves weights without the `module.` of a carried net, and moments with it
    weights, moments = get_state_dict(net.module, optimizer, options=WHOLE)
    positions: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(positions, updates.state_dict())
    if distributed.get_rank() == 0:
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        with temporary.open("wb") as file:
            torch.save(
                {"net": weights, "optimizer": moments, "done": done, "positions": positions}, file
            )
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)


def train(path: Path, last: int, every: int) -> None:
    """Make updates up to number `last`, with a checkpoint after every `every` of them."""
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    torch.manual_seed(0)  # the same recordings and the same weights on every rank
    recordings = [
        {"inputs": torch.randn(n, 3), "targets": torch.randn(n)}
        for n in (700, 90, 400, 35, 555, 210)
    ]
    stream = tt.Stream(recordings, lanes=LANES // ranks, chunk=50)
    net = tt.carry(nn.Sequential(nn.LSTM(3, 16), nn.Linear(16, 1)))
    fully_shard(net, mesh=init_device_mesh("cpu", (ranks,)))  # "cuda" where every rank has a GPU
    optimizer, done = torch.optim.Adam(net.parameters(), lr=1e-3), 0
    saved: dict[str, Any] | None = torch.load(path) if path.exists() else None
    if saved is not None:
        set_state_dict(
            net.module,
            optimizer,
            model_state_dict=saved["net"],
            optim_state_dict=saved["optimizer"],
            options=WHOLE,
        )
        done = saved["done"]
    while done < last:
        updates = tt.updates(
            net, stream, nn.MSELoss(), gradient=tt.Truncated(stride=20, horizon=50)
        )
        if saved is not None:
            updates.load_state_dict(saved["positions"][rank])
            saved = None
        for _ in updates:
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            if done % every == 0 or done == last:
                save(net, optimizer, updates, done, path)
            if done == last:
                break


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint.pt"))
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--every", type=int, default=50, help="updates between two checkpoints")
    arguments = parser.parse_args()
    distributed.init_process_group("gloo")
    train(arguments.checkpoint, arguments.updates, arguments.every)
    distributed.barrier()  # nobody leaves while another one still writes
    distributed.destroy_process_group()
