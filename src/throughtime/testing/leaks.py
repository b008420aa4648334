"""A check that no recording's outputs depend on another's, on a user's own stream and net.

The epoch runs twice side by side from the initial state: once as it is, and once with other inputs
in one recording. Any change in another recording's outputs crossed an edge between recordings, or
between lanes.

Shapes: `T` steps, `B` lanes.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from throughtime._device import fork_rng, seed_generators
from throughtime.carry.carried import Carried, require_carried
from throughtime.chunk import Chunk
from throughtime.errors import DataError, LawError, ModelError
from throughtime.predict import Predictor
from throughtime.stream import Stream

DEFAULT_RECORDINGS = 3  # recordings changed unless the user names some
MAX_TOKENS = 10_000  # different integers that replacements are drawn from


@dataclass(frozen=True)
class LeakReport:
    """One recording that was changed, and the changes in the outputs.

    Attributes:
        recording: its name.
        others: how many other recordings were compared.
        followers: how many of them came after it on a lane, where a missing reset would show.
        steps: how many outputs of others were compared, over all lanes.
        own_deviation: the largest change in its own outputs: not 0, so its inputs have an effect.
        deviation: the largest change in the outputs of others.
        tolerance: the largest change allowed.
    """

    recording: str
    others: int
    followers: int
    steps: int
    own_deviation: float
    deviation: float
    tolerance: float


def check_no_leak(
    stream: Stream,
    net: Carried,
    *,
    recordings: Sequence[int | str] | None = None,
    steps: int | None = None,
    tolerance: float = 0.0,
    seed: int = 0,
) -> list[LeakReport]:
    """Check on your own data that no recording's outputs depend on another's.

    Changes all inputs of one recording at a time. Noise of three times their spread is added to
    floating inputs; integers (tokens) become others that occur. The net runs as a copy in
    evaluation mode, and the stream keeps its position. `check_carry` checks the net alone, on
    random inputs.

    Args:
        stream: its present epoch is read, as this rank reads it.
        net: made by `tt.carry`.
        recordings: which to change, by index or name; default: three of those that others follow on
            a lane.
        steps: how many first steps of the epoch to use; default: all of them.
        tolerance: largest change allowed in another recording's outputs; 0 means equal to the bit.
        seed: for the replacements, and for a net that draws random numbers.

    Returns:
        One report for each recording that was changed. Parts of the same recording on other lanes
        are not compared.

    Raises:
        LawError: a recording leaks: the message says into which, where first, how much, and the
            usual cause. Or its own outputs did not change either, so that nothing is checked.
        DataError: the steps contain one recording only, or not one that was named.
        ModelError: the net is not carried, or cannot be copied.

    Cost: a forward pass for each recording that is changed, and one more; reads the data twice;
    memory for one chunk.

    Example:
        >>> import torch, throughtime as tt
        >>> stream = tt.Stream(
        ...     [{"inputs": torch.randn(n, 3), "name": f"day {n}"} for n in (50, 30, 40)],
        ...     lanes=1,
        ...     chunk=20,
        ... )
        >>> net = tt.carry(torch.nn.GRU(3, 8))
        >>> report = tt.testing.check_no_leak(stream, net, recordings=["day 50"])[0]
        >>> report.recording, report.others, report.deviation
        ('day 50', 2, 0.0)
    """
    require_carried(net)
    excerpt = EpochExcerpt.survey(
        stream, stream.steps if steps is None else min(steps, stream.steps)
    )
    perturbations = [
        Perturbation(stream, net, excerpt, index, tolerance, seed)
        for index in excerpt.choose(stream, recordings)
    ]
    run = _SeededPredictor(net, stream.lanes, seed)
    for begin, chunk in _read_chunks(stream, excerpt.steps):
        outputs = run(chunk.inputs, chunk)
        for perturbation in perturbations:
            perturbation.compare(begin, chunk, outputs)
    return [perturbation.report() for perturbation in perturbations]


@dataclass(frozen=True)
class EpochExcerpt:
    """The first steps of an epoch: their recordings, and statistics of their inputs."""

    steps: int
    followers: dict[int, set[int]]  # the recordings that come after each on a lane, in order
    tokens: Tensor

    @classmethod
    def survey(cls, stream: Stream, steps: int) -> "EpochExcerpt":
        if steps < 1:
            raise DataError(f"steps={steps}: expected at least 1 step to look at")
        lanes: list[list[int]] = [[] for _ in range(stream.lanes)]
        tokens = torch.zeros(0, dtype=torch.long, device="cpu")
        for _, chunk in _read_chunks(stream, steps):
            for lane, column in zip(lanes, chunk.recording.T, strict=True):
                for i in column.unique_consecutive().tolist():
                    if i >= 0 and lane[-1:] != [i]:
                        lane.append(i)
            rows = chunk.inputs[chunk.recording >= 0]
            if not rows.is_floating_point():
                tokens = torch.cat([tokens, rows.flatten()]).unique()[:MAX_TOKENS]
        followers: dict[int, set[int]] = {i: set() for lane in lanes for i in lane}
        for lane in lanes:
            for at, i in enumerate(lane):
                followers[i] |= set(lane[at + 1 :]) - {i}
        return cls(steps, followers, tokens)

    def choose(self, stream: Stream, requested: Sequence[int | str] | None) -> list[int]:
        """The recordings to change: those requested, or a few that others follow."""
        names = [recording.name for recording in stream.recordings]
        if len(self.followers) < 2:
            raise DataError(
                f"the first {self.steps} steps of the epoch play one recording only: there is no"
                " other that it could leak into. Use more steps, or a stream of several recordings."
            )
        if requested is None:
            return sorted(self.followers, key=lambda i: not self.followers[i])[:DEFAULT_RECORDINGS]
        chosen = [names.index(r) if isinstance(r, str) and r in names else r for r in requested]
        missing = [r for r in chosen if r not in self.followers]
        if missing or not chosen:
            raise DataError(
                f"recordings {missing} are not played in the first {self.steps} steps of this epoch"
                f" (by this rank); expected some of {[names[i] for i in self.followers][:8]}"
            )
        return [int(r) for r in chosen]

    def replacements(self, inputs: Tensor, generator: torch.Generator) -> Tensor:
        """Other inputs of the same shape and kind."""
        if inputs.is_floating_point():
            noise = torch.randn(inputs.shape, generator=generator, device="cpu").to(inputs)
            spread = inputs.std(dim=0, correction=0)
            return inputs + 3 * noise * spread.where(spread > 0, 1.0)
        count = len(self.tokens)
        if count < 2:
            raise DataError(
                f"all inputs are {self.tokens.tolist()}: there is no other token to put in their"
                " place; use more steps"
            )
        index = torch.searchsorted(self.tokens, inputs.contiguous()).clamp(max=count - 1)
        shift = torch.randint(1, count, inputs.shape, generator=generator, device="cpu")
        return self.tokens[(index + shift) % count]


class Perturbation:
    """One recording with other inputs, run beside the unchanged stream."""

    def __init__(
        self,
        stream: Stream,
        net: Carried,
        excerpt: EpochExcerpt,
        index: int,
        tolerance: float,
        seed: int,
    ) -> None:
        self.names = [recording.name for recording in stream.recordings]
        self.excerpt, self.index, self.tolerance = excerpt, index, tolerance
        self.run = _SeededPredictor(net, stream.lanes, seed)
        self.generator = torch.Generator().manual_seed(seed + index)
        self.own_deviation = self.deviation = 0.0
        self.steps = 0

    def compare(self, begin: int, chunk: Chunk, expected: Tensor) -> None:
        """Run the chunk with the recording changed.

        Raises:
            LawError: another recording's outputs changed.
        """
        own = chunk.recording == self.index
        others = (chunk.recording >= 0) & ~own
        inputs = chunk.inputs.clone()
        if own.any():
            inputs[own] = self.excerpt.replacements(inputs[own], self.generator)
        change = _largest_change(self.run(inputs, chunk), expected)
        self.steps += int(others.sum())
        if own.any():
            self.own_deviation = max(self.own_deviation, change[own].max().item())
        if not others.any():
            return
        self.deviation = max(self.deviation, change[others].max().item())
        if self.deviation > self.tolerance:
            step, lane = ((change > self.tolerance) & others).nonzero()[0].tolist()
            raise self._leak(begin, chunk, step, lane, same_lane=bool(own[:, lane].any()))

    def _leak(self, begin: int, chunk: Chunk, step: int, lane: int, *, same_lane: bool) -> LawError:
        other = int(chunk.recording[step, lane])
        if same_lane or other in self.excerpt.followers[self.index]:
            cause = (
                "It plays after it on a lane: a reset ignored, or a state kept in the module (an"
                " attribute, a buffer) instead of the one that it takes and returns"
            )
        else:
            cause = (
                "It plays on another lane: BatchNorm or another mean over lanes in training mode"
                " (or without running statistics), a reshape that mixes lanes, or a state kept in"
                " the module"
            )
        return LawError(
            f"recording '{self.names[self.index]}' leaks into '{self.names[other]}': with other"
            f" inputs in the former, outputs of the latter move by {self.deviation:.3g} (allowed"
            f" {self.tolerance:g}), first at its step {int(chunk.position[step, lane])} (lane"
            f" {lane}, step {begin + step} of the epoch). {cause}."
            " throughtime.testing.check_carry says which law the module breaks."
        )

    def report(self) -> LeakReport:
        """The result.

        Raises:
            LawError: not even its own outputs changed.
        """
        name = self.names[self.index]
        if not self.own_deviation > 0:
            raise LawError(
                f"other inputs in recording '{name}' change none of its own outputs either: the net"
                " does not use its inputs, and nothing is checked"
            )
        return LeakReport(
            name,
            len(self.excerpt.followers) - 1,
            len(self.excerpt.followers[self.index]),
            self.steps,
            self.own_deviation,
            self.deviation,
            self.tolerance,
        )


class _SeededPredictor:
    """A copy of the net in evaluation mode that draws the same random numbers in every copy."""

    def __init__(self, net: Carried, lanes: int, seed: int) -> None:
        try:
            self.predictor = Predictor(copy.deepcopy(net).eval(), lanes)
        except RuntimeError as error:
            raise ModelError(
                f"the net cannot be copied ({error}); a tensor with a graph kept in the module is a"
                " state that no reset reaches: return it as part of the state instead"
            ) from error
        self.seed = seed

    def __call__(self, inputs: Tensor, chunk: Chunk) -> Tensor:
        device = self.predictor.device
        with fork_rng(device):
            seed_generators(self.seed, device)
            return self.predictor(inputs.to(device), chunk.resets.to(device)).cpu()


def _read_chunks(stream: Stream, steps: int) -> Iterator[tuple[int, Chunk]]:
    """Each chunk of the first steps of the epoch, after its first step.

    A stream that a net was trained on gives chunks on the net's device.
    """
    for begin in range(0, steps, stream.chunk):
        chunk = stream.read(begin, min(begin + stream.chunk, steps))
        yield begin, chunk.to(torch.device("cpu"))


def _largest_change(a: Tensor, b: Tensor) -> Tensor:
    """`(T, B)`, the largest difference over outputs: 0 for NaN in both, infinite for one NaN."""
    same = (a == b) | (a.isnan() & b.isnan())
    change = (a - b).abs().double().nan_to_num(nan=float("inf")).masked_fill(same, 0.0)
    return change[..., None].flatten(2).amax(2)
