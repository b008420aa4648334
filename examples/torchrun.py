"""Train on the ranks that torchrun starts; a restart resumes from the last checkpoint.

torchrun --nproc-per-node 2 examples/torchrun.py --updates 200
"""

import argparse
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

import throughtime as tt

POLICIES = {"truncated": tt.Truncated(stride=20, horizon=50), "exact": tt.Exact(cut_every=60)}
LANES = 4  # of all ranks together


def save(content: object, path: Path) -> None:
    """Replace the file in one step: it is the old one or the new one, whenever the process ends."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    with temporary.open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def join_group(limit: timedelta) -> None:
    """Join the process group under a key of its own for each restart.

    torchrun's store outlives a restart, and gloo would wait for the addresses of ranks that have
    ended. Every machine counts its own restarts; on several machines set
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, so that torchrun opens a store for each start.
    """
    store, rank, ranks = next(rendezvous("env://", timeout=limit))
    if os.environ.get("GROUP_WORLD_SIZE") == "1":
        store = PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
    # "nccl" if every rank has a GPU
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=limit)


def train(path: Path, last: int, gradient: Any, every: int) -> None:
    """Make updates up to number `last`, with a checkpoint after every `every` of them."""
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    torch.manual_seed(0)  # the same recordings and the same weights on every rank
    recordings = [
        {"inputs": torch.randn(n, 3), "targets": torch.randn(n)}
        for n in (700, 90, 400, 35, 555, 210)
    ]
    stream = tt.Stream(recordings, lanes=LANES // ranks, chunk=50)  # every rank plays its share
    net = tt.carry(
        nn.Sequential(nn.LSTM(3, 16), nn.Linear(16, 1))
    )  # bare: the ranks add gradients up themselves
    optimizer, done = torch.optim.Adam(net.parameters(), lr=1e-3), 0
    saved: dict[str, Any] | None = torch.load(path) if path.exists() else None
    if saved is not None:
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["done"]
    while done < last:
        updates = tt.updates(net, stream, nn.MSELoss(), gradient=gradient)
        if saved is not None:
            updates.load_state_dict(saved["positions"][rank])
            saved = None
        for _ in updates:
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            if done % every == 0 or done == last:
                positions: list[Any] = [None] * ranks
                distributed.all_gather_object(positions, updates.state_dict())
                if rank == 0:
                    save(
                        {
                            "net": net.state_dict(),
                            "optimizer": optimizer.state_dict(),
                            "done": done,
                            "positions": positions,
                        },
                        path,
                    )
            if done == last:
                break


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint.pt"))
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--every", type=int, default=10, help="updates between two checkpoints")
    parser.add_argument("--gradient", choices=POLICIES, default="truncated")
    arguments = parser.parse_args()
    join_group(timedelta(minutes=5))
    train(arguments.checkpoint, arguments.updates, POLICIES[arguments.gradient], arguments.every)
    distributed.barrier()  # nobody leaves while another one still writes
    distributed.destroy_process_group()
