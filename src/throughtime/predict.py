"""Evaluation and streaming: chunk by chunk, state carried, no graph, the training state never
touched.

Shapes: `T` steps, `B` lanes, `D` input features, `C` outputs.
"""

import math
from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from throughtime import state as trees
from throughtime.carry.carried import Carried, require_carried
from throughtime.chunk import Chunk
from throughtime.distributed import ranks_of, shards_of, unsharded_weights
from throughtime.errors import DataError, StateError
from throughtime.gradient import LossFn, Objective
from throughtime.metrics import Metrics, Score
from throughtime.state import State
from throughtime.stream import Recording, Stream
from throughtime.stream.recording import as_recording


@dataclass(frozen=True)
class Evaluation:
    """What `tt.evaluate` found.

    Attributes:
        loss: mean over all valid steps; NaN without a `loss_fn`.
        steps: number of valid steps.
        metrics: the score over all recordings together; empty without `metrics`.
        recordings: the same figures by recording's name; a recording cut into parts counts as one.
    """

    loss: float
    steps: int
    metrics: Metrics
    recordings: dict[str, Metrics]


def evaluate(
    net: Carried, stream: Stream, loss_fn: LossFn | None = None, *, metrics: Score | None = None
) -> Evaluation:
    """Loss and scores of one epoch of the stream, with the state carried as in training.

    The net runs in evaluation mode under `no_grad` and is put back; the carried state of a training
    in progress is a value elsewhere and cannot be disturbed. Give as many lanes as there are
    recordings at most: a recording cut into parts starts each part from the initial state.

    On several ranks each plays its share, and all return the loss over all of them.

    Args:
        net: made by `tt.carry`.
        stream: a stream of its own, not the one that training iterates.
        loss_fn: as for `tt.updates`; its means are weighted by valid steps, those of torch's losses
            of classes by the weights of the classes, so that the cut into chunks changes nothing.
        metrics: `throughtime.metrics.Classification(classes)`, `Regression()`, or anything with that
            protocol.

    Raises:
        DataError: the stream has no targets, or a score is asked for and it plays only a rank's
            share.

    Cost: one forward pass; memory for one chunk.

    Example:
        >>> import torch, throughtime as tt
        >>> stream = tt.Stream({"inputs": torch.zeros(50, 3), "targets": torch.zeros(50)}, lanes=1, chunk=20)
        >>> net = tt.carry(torch.nn.Sequential(torch.nn.GRU(3, 8), torch.nn.Linear(8, 1)))
        >>> tt.evaluate(net, stream, torch.nn.MSELoss()).steps
        50
    """
    evaluator = Evaluator(net, loss_fn, metrics=metrics)
    evaluator.check(stream)
    for chunk in stream:
        evaluator.add(chunk)
    return evaluator.result(stream)


class Evaluator:
    """An evaluation chunk by chunk, for loops that hand out the chunks themselves; `tt.evaluate`
    plays a whole stream.

    Args:
        net: made by `tt.carry`.
        loss_fn: as for `tt.evaluate`.
        metrics: as for `tt.evaluate`.

    Cost: one forward pass; memory for one chunk.

    Example:
        >>> import torch, throughtime as tt
        >>> stream = tt.Stream({"inputs": torch.zeros(50, 3), "targets": torch.zeros(50)}, lanes=1, chunk=20)
        >>> evaluator = tt.Evaluator(tt.carry(torch.nn.Sequential(torch.nn.GRU(3, 8), torch.nn.Linear(8, 1))), torch.nn.MSELoss())
        >>> [tuple(evaluator.add(chunk).shape) for chunk in stream]
        [(20, 1, 1), (20, 1, 1), (10, 1, 1)]
        >>> evaluator.result(stream).steps
        50
    """

    def __init__(
        self, net: Carried, loss_fn: LossFn | None = None, *, metrics: Score | None = None
    ) -> None:
        self._player = Predictor(net)
        self._objective = None if loss_fn is None else Objective(loss_fn)
        self._whole = None if metrics is None else metrics.new()
        self._apart: dict[int, Score] = {}
        self._total = self._mass = self._steps = 0.0

    def check(self, stream: Stream) -> None:
        """Refuses a score where the stream plays only a rank's share.

        Raises:
            DataError: it does, and a score is asked for.
        """
        ranks = ranks_of(self._player.net, stream)
        if ranks.count > 1 and self._whole is not None:
            raise DataError(
                f"the stream plays the share of rank {ranks.rank} of {ranks.count}, and scores are"
                " not added up over ranks: give it tt.Stream(..., rank=0, ranks=1), which plays"
                " everything"
            )

    def add(self, chunk: Chunk) -> Tensor:
        """Plays the next chunk, from the initial state if it is the first; its outputs `(T, B, C)`.

        Raises:
            DataError: the chunk has no targets.
        """
        if chunk.targets is None:
            raise DataError(
                "the recordings of this stream have no targets; to run the net without scoring it"
                " use tt.predict"
            )
        chunk = chunk.to(self._player.device)
        self._player.lanes = chunk.lanes
        outputs = self._player(chunk.inputs, chunk.resets if chunk.any_reset else None)
        if not chunk.valid:
            return outputs
        self._steps += chunk.valid
        if self._objective is not None and (weighs := self._objective.loss_weight(chunk)):
            self._total += self._objective.loss(outputs, chunk).item() * weighs
            self._mass += weighs
        if self._whole is not None:
            self._whole.update(*chunk.valid_pairs(outputs))
            _add_apart(self._apart, self._whole, outputs, chunk)
        return outputs

    def result(self, stream: Stream) -> Evaluation:
        """What all chunks of this stream gave, those of other ranks too: each must ask."""
        self.check(stream)
        total, mass, steps = self._total, self._mass, self._steps
        ranks = ranks_of(self._player.net, stream)
        if ranks.count > 1:
            total, mass, steps = ranks.total([total, mass, steps])
        loss = total / mass if mass else math.nan
        names = Counter(recording.name for recording in stream.recordings)
        by_name = {
            _unique(stream.recordings[i].name, i, names): self._apart[i].compute()
            for i in sorted(self._apart)
        }
        return Evaluation(
            loss, int(steps), self._whole.compute() if self._whole is not None else {}, by_name
        )


def _unique(name: str, index: int, names: Counter[str]) -> str:
    """The name, with its place in the stream where several recordings share it."""
    return name if names[name] == 1 else f"{name} (#{index})"


def _add_apart(apart: dict[int, Score], kind: Score, outputs: Tensor, chunk: Chunk) -> None:
    """Adds the rows of each recording to a score of its own."""
    rows, targets = chunk.valid_pairs(outputs)
    owners = chunk.recording[chunk.mask]
    for index in owners.unique().tolist():
        mine = owners == index
        apart.setdefault(index, kind.new()).update(rows[mine], targets[mine])


def predict(
    net: Carried,
    recording: Recording | Mapping[str, Any] | str | Path,
    *,
    chunk: int = 1024,
    state: State = None,
    out: Any = None,
    dtype: torch.dtype | None = None,
    missing: Literal["error", "mask"] = "error",
) -> tuple[Any, State]:
    """The outputs of a whole recording, and the state after it.

    Use `Predictor` where steps arrive one by one.

    Args:
        net: made by `tt.carry`.
        recording: as for `tt.Stream`; targets are not looked at.
        chunk: steps per forward call; it changes memory and speed only.
        state: the state entering the first step; default: the initial state.
        out: where to write, anything that takes `out[start:stop] = array` of shape `(n, C)`, a
            memory-mapped array for one; default: a new tensor.
        dtype: type of the inputs; default: as they are.
        missing: as for `tt.Stream`.

    Returns:
        `out`, or a tensor `(T, C)`; and the state, one lane.

    Cost: one forward pass; memory for one chunk, and for the outputs unless `out` is given.

    Example:
        >>> import torch, throughtime as tt
        >>> outputs, state = tt.predict(tt.carry(torch.nn.GRU(3, 8)), {"inputs": torch.zeros(50, 3)})
        >>> outputs.shape
        torch.Size([50, 8])
    """
    stream = Stream(
        [as_recording(recording, 0)],
        lanes=1,
        chunk=chunk,
        seed=None,
        dtype=dtype,
        missing=missing,
        rank=0,
        ranks=1,
    )
    player = Predictor(net, lanes=1, state=state)
    start = 0
    for part in stream:
        outputs = player(part.inputs.to(player.device)).squeeze(1).cpu()
        if out is None:
            out = outputs.new_empty(stream.steps, *outputs.shape[1:])
        rows: Any = outputs if isinstance(out, Tensor) else outputs.numpy()
        out[start : start + len(outputs)] = rows
        start += len(outputs)
    return out, player.state


class Predictor:
    """A net running on a live stream: takes one step or any number at a time, keeps the state.

    Args:
        net: made by `tt.carry`; runs in evaluation mode under `no_grad` and is put back after each
            call.
        lanes: B, streams side by side.
        state: where to start; default: the initial state.

    Attributes:
        state: the state after the last step; `None` before the first. A value: keep it, set it.

    Several threads may share a net that is in evaluation mode already (`net.eval()`), each with a
    predictor of its own.

    Cost: one forward call per call.

    Example:
        >>> import torch, throughtime as tt
        >>> predictor = tt.Predictor(tt.carry(torch.nn.GRU(3, 8)))
        >>> predictor(torch.zeros(5, 1, 3)).shape, predictor.step(torch.zeros(1, 3)).shape
        (torch.Size([5, 1, 8]), torch.Size([1, 8]))
    """

    def __init__(self, net: Carried, lanes: int = 1, *, state: State = None) -> None:
        require_carried(net)
        self.net, self.lanes, self.state = net, lanes, state
        weight = next(net.parameters(), None)
        self.device = torch.device("cpu") if weight is None else weight.device
        shards = shards_of(net)
        self._whole = partial(unsharded_weights, net, shards) if shards else nullcontext

    def __call__(self, inputs: Tensor, resets: Tensor | None = None) -> Tensor:
        """Outputs `(T, B, C)` for inputs `(T, B, D)`.

        `resets` `(T, B)` marks lanes that start a recording.
        """
        with self._whole(), running(self.net):
            if self.state is None:
                self.state = self.net.initial_state(self.lanes, like=inputs)
            outputs, self.state = self.net(inputs, self.state, resets)
        return outputs

    def step(self, inputs: Tensor) -> Tensor:
        """Outputs `(B, C)` for the inputs `(B, D)` of a single step."""
        return self(inputs.unsqueeze(0)).squeeze(0)

    def save(self, path: str | Path) -> None:
        """Writes the state as safetensors; `load` in another process goes on to the bit.

        Raises:
            StateError: nothing has been played yet.
        """
        if self.state is None:
            raise StateError(
                "there is no state to save before the first step; call the predictor on some inputs"
                " first"
            )
        trees.save(self.state, path)

    def load(self, path: str | Path, *, like: Tensor | None = None) -> None:
        """Reads a state written by `save`, for the same net and number of lanes.

        Args:
            path: the file.
            like: inputs `(T, B, D)`, for nets whose `initial_state` needs them.

        Raises:
            StateError: the file holds no state of this net and lane count.
        """
        self.state = trees.load(path, trees.detach(self.net.initial_state(self.lanes, like=like)))


@contextmanager
def running(net: nn.Module) -> Generator[None]:
    """Evaluation mode without a graph; every submodule gets its own mode back."""
    modes = [m for m in net.modules() if m.training]
    for m in modes:
        m.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for m in modes:
            m.training = True
