"""Train on the workers of Ray Train; a second start, or a failure, resumes from a checkpoint.

    python examples/ray_train.py --storage runs --name first --workers 2 --updates 200

On several machines the storage must be one that all of them share.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train import Checkpoint, CheckpointConfig, FailureConfig, Result, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, get_device
from torch import nn

import throughtime as tt
from throughtime.carry import Carried

LANES = 4  # of all workers together


def report(loss: float, done: int, position: dict[str, Any], model: dict[str, Any]) -> None:
    """Report a checkpoint: shared values from the first worker, and the position of each."""
    rank = ray.train.get_context().get_world_rank()
    with tempfile.TemporaryDirectory() as name:
        torch.save(position, Path(name, f"position-{rank}.pt"))
        if rank == 0:
            torch.save({**model, "done": done}, Path(name, "model.pt"))
        ray.train.report({"loss": loss, "update": done}, checkpoint=Checkpoint.from_directory(name))


def read(kind: str) -> Any:
    """A file of the newest checkpoint; `None` if there is no checkpoint yet."""
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return None
    with checkpoint.as_directory() as name:
        return torch.load(Path(name, f"{kind}.pt"), map_location=get_device())


def parts(lanes: int) -> tuple[tt.Stream, Carried, torch.optim.Optimizer]:
    """Stream, net and optimizer, equal on every worker."""
    torch.manual_seed(0)  # the same recordings and the same weights
    recordings = [
        {"inputs": torch.randn(n, 3), "targets": torch.randn(n)}
        for n in (700, 90, 400, 35, 555, 210)
    ]
    stream = tt.Stream(recordings, lanes, chunk=50)  # each worker reads its share
    net = tt.carry(nn.Sequential(nn.LSTM(3, 16), nn.Linear(16, 1))).to(
        get_device()
    )  # bare: prepare_model would add gradients up too
    return stream, net, torch.optim.Adam(net.parameters(), lr=1e-3)


def train(config: dict[str, Any]) -> None:
    """The training function of each worker: updates up to number `config["updates"]`."""
    context, done = ray.train.get_context(), 0
    stream, net, optimizer = parts(LANES // context.get_world_size())
    model, position = read("model"), read(f"position-{context.get_world_rank()}")
    if model is not None:
        net.load_state_dict(model["net"])
        optimizer.load_state_dict(model["optimizer"])
        done = model["done"]
    while done < config["updates"]:
        updates = tt.updates(
            net, stream, nn.MSELoss(), gradient=tt.Truncated(stride=20, horizon=50)
        )
        if position is not None:
            updates.load_state_dict(position)
            position = None
        for update in updates:
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            if done % config["every"] == 0 or done == config["updates"]:
                both = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
                report(update.loss.item(), done, updates.state_dict(), both)
            if done == config["updates"]:
                break


def fit(
    storage: Path, name: str, workers: int, updates: int, every: int, use_gpu: bool = False
) -> Result:
    """Starts the workers, or starts them again."""
    run = RunConfig(
        name=name,
        storage_path=str(storage.resolve()),
        checkpoint_config=CheckpointConfig(num_to_keep=2),
        failure_config=FailureConfig(max_failures=3),
    )
    scaling = ScalingConfig(num_workers=workers, use_gpu=use_gpu)
    return TorchTrainer(
        train,
        train_loop_config={"updates": updates, "every": every},
        scaling_config=scaling,
        run_config=run,
    ).fit()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--storage", type=Path, default=Path("runs"))
    parser.add_argument("--name", default="ray")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--every", type=int, default=50, help="updates between two checkpoints")
    parser.add_argument("--gpu", action="store_true", help="one for each worker")
    arguments = parser.parse_args()
    print(
        fit(
            arguments.storage,
            arguments.name,
            arguments.workers,
            arguments.updates,
            arguments.every,
            arguments.gpu,
        ).metrics
    )
