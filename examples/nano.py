"""Training on unbroken streams with a carried state, in one file that needs PyTorch alone.

    python examples/nano.py                         # truncated BPTT, k1 = 20, k2 = 60
    python examples/nano.py --exact                 # the exact gradient of whole recordings
    python examples/nano.py --resume                # goes on from nano.pt, to the bit

It has five parts: a stream plays recordings on the lanes of a batch; a net carries its state and
forgets it where a recording starts; a plan says which steps each update uses; one function adds
the gradient of such a window; and a loop makes the updates. The library computes the same numbers
(`tests/test_nano.py`) and adds what is left out here: files, other modules, dropout, devices,
ranks, checks and speed. `docs/explanation/in-one-file.md` reads this file aloud.

Shapes: `T` steps, `B` lanes, `D` inputs, `H` units.
"""

import argparse
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

# ---- 1. The stream: recordings on lanes ----


class Chunk(NamedTuple):
    """Consecutive steps of all lanes."""

    inputs: Tensor  # (T, B, D)
    targets: Tensor  # (T, B)
    resets: Tensor  # (T, B), true where a lane starts a recording
    mask: Tensor  # (T, B), true where a lane plays a step whose target is known


class Stream:
    """Recordings `(inputs, targets)`, one after another on each lane, without a gap."""

    def __init__(self, recordings: list[tuple[Tensor, Tensor]], lanes: int) -> None:
        self.lanes: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(lanes)]
        self.starts: list[list[int]] = [[0] for _ in range(lanes)]  # of recordings; last: the end
        for recording in recordings:
            lane = min(range(lanes), key=lambda i: self.starts[i][-1])  # the first that is free
            self.lanes[lane].append(recording)
            self.starts[lane].append(self.starts[lane][-1] + len(recording[0]))
        self.steps = max(starts[-1] for starts in self.starts)

    def read(self, start: int, stop: int) -> Chunk:
        """The steps `start` to before `stop`; a lane that has ended is padded."""
        inputs, targets = self.lanes[0][0]
        steps, lanes = stop - start, len(self.lanes)
        chunk = Chunk(
            inputs.new_zeros(steps, lanes, inputs.shape[1]),
            targets.new_full((steps, lanes), torch.nan),
            torch.zeros(steps, lanes, dtype=torch.bool),
            torch.zeros(steps, lanes, dtype=torch.bool),
        )
        for lane, recordings in enumerate(self.lanes):
            for begin, (inputs, targets) in zip(self.starts[lane], recordings, strict=False):
                a, b = max(start, begin), min(stop, begin + len(inputs))
                if a < b:
                    chunk.inputs[a - start : b - start, lane] = inputs[a - begin : b - begin]
                    chunk.targets[a - start : b - start, lane] = targets[a - begin : b - begin]
                    chunk.resets[a - start, lane] = a == begin
        return chunk._replace(mask=~chunk.targets.isnan())


# ---- 2. The net: a state goes in, a state comes out ----

State = list[Tensor]


class Net(nn.Module):
    """An LSTM and a linear layer, with one output per step."""

    def __init__(self, inputs: int, units: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(inputs, units)
        self.head = nn.Linear(units, 1)

    def initial_state(self, lanes: int) -> State:
        """Zeros, the same for every recording."""
        return [self.head.weight.new_zeros(1, lanes, self.lstm.hidden_size) for _ in range(2)]

    def forward(self, chunk: Chunk, state: State, keep: int) -> tuple[Tensor, State, State]:
        """Outputs `(T, B)`, the state after the last step, and the state entering step `keep`."""
        outputs, kept = [], state
        resets = chunk.resets.any(dim=1).nonzero()[:, 0].tolist()
        for start, stop in pairwise(sorted({0, keep, *resets, len(chunk.inputs)})):
            if start == keep:
                kept = state
            fresh = chunk.resets[start].unsqueeze(1)  # (B, 1)
            state = [leaf.masked_fill(fresh, 0.0) for leaf in state]
            y, after = self.lstm(chunk.inputs[start:stop], tuple(state))
            outputs.append(self.head(y).squeeze(2))
            state = list(after)
        return torch.cat(outputs), state, state if keep == len(chunk.inputs) else kept


# ---- 3. The plan: which steps does an update use? ----


class Window(NamedTuple):
    """The steps of one update.

    It runs `start` to `stop`, counts the losses from `counted` on, and keeps the state entering
    `keep`, where the next window starts. A graph holds one segment, the last of which has `keep`.
    """

    start: int
    counted: int
    stop: int
    keep: int
    segment: int


def truncated(stream: Stream, stride: int, horizon: int) -> list[Window]:
    """An update every `stride` steps (k1), whose gradient flows back `horizon` steps (k2)."""
    stops = [*range(stride, stream.steps, stride), stream.steps]
    counted = [0, *stops[:-1]]
    starts = counted if horizon == stride else [max(0, stop - horizon) for stop in stops]
    keep = [*starts[1:], stream.steps]
    rows = zip(starts, counted, stops, keep, strict=True)
    return [Window(*steps, segment=horizon) for steps in rows]


def exact(stream: Stream, segment: int) -> list[Window]:
    """An update wherever all lanes start a recording or have ended: nothing crosses that step."""
    stops = [
        step
        for step in sorted({step for starts in stream.starts for step in starts[1:]})
        if all(step in starts or step > starts[-1] for starts in stream.starts)
    ]
    return [Window(a, a, b, keep=b, segment=segment) for a, b in pairwise([0, *stops])]


# ---- 4. The gradient of a window, segment by segment ----

LossSum = Callable[[Tensor, Tensor], Tensor]


def add_gradient(
    net: Net, stream: Stream, window: Window, state: State, loss_sum: LossSum
) -> tuple[float | None, State]:
    """Add the gradient of the window's mean loss to `.grad`.

    Returns the loss, `None` if no step counts, and the state entering the next window.
    """
    parts = list(pairwise([*range(window.start, window.stop, window.segment), window.stop]))
    entering = [state]
    for start, stop in parts[:-1]:  # forward: store the state that enters each segment
        with torch.no_grad():
            _, state, _ = net(stream.read(start, stop), entering[-1], keep=0)
        entering.append(state)
    count = int(stream.read(window.counted, window.stop).mask.sum())
    total, credit, following = 0.0, [], state
    for start, stop in reversed(parts):  # back: run each segment again, with its graph
        leaves = [leaf.detach().requires_grad_() for leaf in entering.pop()]
        chunk, is_last = stream.read(start, stop), stop == window.stop
        outputs, after, kept = net(chunk, leaves, keep=window.keep - start if is_last else 0)
        mask = chunk.mask.clone()
        mask[: max(0, window.counted - start)] = False
        loss = loss_sum(outputs[mask], chunk.targets[mask]) / max(1, count)
        if is_last:  # no later loss of this window depends on the state after it
            following = [leaf.detach() for leaf in kept]
            loss.backward()
        else:
            torch.autograd.backward([loss, *after], [None, *credit])
        credit = [leaf.grad for leaf in leaves]
        total += loss.item()
    return (total if count else None), following


# ---- 5. The loop, and what a checkpoint needs ----


class Progress(NamedTuple):
    """Where an epoch is between two updates."""

    window: int  # the number of the next one
    state: State  # that enters it, without a graph


def train(
    net: Net,
    optimizer: torch.optim.Optimizer,
    stream: Stream,
    windows: list[Window],
    loss_sum: LossSum,
    progress: Progress,
) -> Iterator[tuple[float | None, Progress]]:
    """The rest of an epoch: the loss of each update, and the progress after it."""
    state = progress.state
    for number in range(progress.window, len(windows)):
        loss, state = add_gradient(net, stream, windows[number], state, loss_sum)
        if loss is not None:
            optimizer.step()
        optimizer.zero_grad()
        yield loss, Progress(number + 1, state)


def switches(steps: int, seed: int) -> tuple[Tensor, Tensor]:
    """A task: pulses up and down in noise; the target is the direction of the last pulse."""
    random = torch.Generator().manual_seed(seed)
    pulses = torch.where(torch.rand(steps, generator=random) < 0.02, 1.0, 0.0)
    pulses[0] = 1.0
    signs = torch.randint(0, 2, (steps,), generator=random).float()
    last = torch.where(pulses > 0, torch.arange(steps), 0).cummax(0).values
    inputs = 0.1 * torch.randn(steps, generator=random) + 3 * pulses * (2 * signs - 1)
    return inputs.unsqueeze(1), signs[last]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--checkpoint", type=Path, default=Path("nano.pt"))
    options = parser.parse_args()
    torch.manual_seed(0)
    stream = Stream([switches(400 + 100 * i, seed=i) for i in range(8)], lanes=4)
    net = Net(inputs=1, units=16)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    windows = exact(stream, segment=100) if options.exact else truncated(stream, 20, 60)
    loss_sum = nn.BCEWithLogitsLoss(reduction="sum")
    first, progress = 0, Progress(0, net.initial_state(lanes=4))
    if options.resume:
        saved = torch.load(options.checkpoint, weights_only=True)
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
        first, progress = saved["epoch"], Progress(*saved["progress"])
    for epoch in range(first, options.epochs):
        losses = []
        for loss, after in train(net, optimizer, stream, windows, loss_sum, progress):
            losses.append(loss)
            saved = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(saved | {"epoch": epoch, "progress": tuple(after)}, options.checkpoint)
        progress = Progress(0, net.initial_state(lanes=4))
        if losses:  # else the checkpoint was the end of its epoch
            print(f"epoch {epoch}: loss {sum(losses) / len(losses):.3f}")


if __name__ == "__main__":
    main()
