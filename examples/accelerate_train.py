"""Train under Hugging Face Accelerate; a second start resumes from the newest checkpoint.

accelerate launch --multi_gpu examples/accelerate_train.py
torchrun --nproc-per-node 2 examples/accelerate_train.py --cpu
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn

import throughtime as tt
from throughtime.carry import Carried
from throughtime.integrations.accelerate import prepare, updates

LANES = 4  # of all processes together


def save(accelerator: Accelerator, folder: Path) -> None:
    """Write a checkpoint; its folder gets its name when it is complete."""
    unfinished = folder.with_suffix(".unfinished")
    accelerator.save_state(str(unfinished))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        unfinished.rename(folder)


def train(accelerator: Accelerator, checkpoints: Path, last: int, every: int) -> Carried:
    """Make updates up to number `last`, with a checkpoint after every `every` of them."""
    torch.manual_seed(0)  # the same recordings and the same weights in every process
    recordings = [
        {"inputs": torch.randn(n, 3), "targets": torch.randn(n)}
        for n in (700, 90, 400, 35, 555, 210)
    ]
    # after Accelerator(), and not prepared
    stream = tt.Stream(recordings, lanes=LANES // accelerator.num_processes, chunk=50)
    net = tt.carry(nn.Sequential(nn.LSTM(3, 16), nn.Linear(16, 1)))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=last)
    net, optimizer, scheduler = prepare(accelerator, net, optimizer, scheduler)
    run = updates(
        accelerator, net, stream, nn.MSELoss(), gradient=tt.Truncated(stride=20, horizon=50)
    )
    accelerator.register_for_checkpointing(run)
    done = 0
    if saved := sorted(checkpoints.glob("update-[0-9]*[0-9]")):
        accelerator.load_state(str(saved[-1]))
        done = int(saved[-1].name.removeprefix("update-"))
    while done < last:
        for update in run:  # an epoch, or the rest of one
            accelerator.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            done += 1
            if done % every == 0:
                accelerator.print(f"update {done}: loss {update.loss:.4f}")
                save(accelerator, checkpoints / f"update-{done:08d}")
            if done == last:
                break
    return net


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints"))
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--every", type=int, default=50, help="updates between two checkpoints")
    parser.add_argument("--cpu", action="store_true", help="where there are GPUs too")
    arguments = parser.parse_args()
    train(
        Accelerator(cpu=arguments.cpu, gradient_accumulation_steps=2),
        arguments.checkpoints,
        arguments.updates,
        arguments.every,
    )
