"""Resume with hand-off, and what else a training in progress must not notice:
to the bit.

Shapes: `T` steps, `B` lanes.
"""

import io
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import throughtime as tt
from strategies import HidesLayer, LearntStart, recordings, weights
from test_updates import same_bits
from throughtime.carry import Carried
from throughtime.errors import DataError
from throughtime.gradient import Policy
from throughtime.stream.recording import StepArrays
from throughtime.updates import Updates

LENGTHS = [17, 5, 11, 2, 7]
LONG = [41]
EPOCHS = 3
OPTIONS: dict[str, tuple[list[int], dict[str, Any]]] = {
    "plain": (LENGTHS, {}),
    "hand-off": (LONG, {"hand_off": True, "warm_up": 2}),
    "hand-off-of-two": ([27, 11], {"hand_off": True}),
    "hand-off-without-parts": (LENGTHS, {"hand_off": True}),
}
POLICIES: dict[str, Policy] = {
    "horizon": tt.Truncated(6, 15),
    "segment": tt.Exact(cut_every=9, chunk=4),
}
settings_of = pytest.mark.parametrize(
    ("lengths", "options"), list(OPTIONS.values()), ids=list(OPTIONS)
)


def stream_of(lengths: list[int], options: dict[str, Any]) -> tt.Stream:
    return tt.Stream(recordings(lengths), 3, 8, **options)


@dataclass
class Training:
    """Everything that a training consists of, and the loop that users write around it."""

    stream: tt.Stream
    policy: Policy
    net: Carried
    optimizer: torch.optim.Optimizer
    done: int = 0

    @classmethod
    def of(
        cls,
        lengths: list[int],
        options: dict[str, Any],
        policy: Policy,
        make: Callable[[], nn.Module] = HidesLayer,
    ) -> "Training":
        net = tt.carry(make().double())
        return cls(
            stream_of(lengths, options), policy, net, torch.optim.Adam(net.parameters(), lr=0.02)
        )

    def updates(self) -> Updates:
        return tt.updates(self.net, self.stream, nn.MSELoss(), gradient=self.policy)

    def until(
        self,
        stop: int | None,
        run: Updates | None = None,
        between: Callable[["Training"], object] | None = None,
    ) -> bytes:
        """Goes on to update `stop`, or to the end of epoch `-stop`, or of the last.

        Returns a checkpoint.
        """
        run = run or self.updates()
        while True:
            for _ in run:
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.done += 1
                if between is not None:
                    between(self)
                if self.done == stop:
                    return self.saved(run)
            if self.stream.epoch == EPOCHS or (stop is not None and self.stream.epoch == -stop):
                return self.saved(run)
            run = self.updates()

    def saved(self, run: Updates) -> bytes:
        file = io.BytesIO()
        saved_position = {
            "net": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "updates": run.state_dict(),
        }
        torch.save(saved_position, file)
        return file.getvalue()

    def restored(self, checkpoint: bytes) -> Updates:
        loaded = torch.load(io.BytesIO(checkpoint), weights_only=True)
        self.net.load_state_dict(loaded["net"])
        self.optimizer.load_state_dict(loaded["optimizer"])
        run = self.updates()
        run.load_state_dict(loaded["updates"])
        return run


def uninterrupted(
    lengths: list[int], options: dict[str, Any], policy: Policy
) -> tuple[Training, dict[str, Tensor]]:
    torch.manual_seed(1)
    training = Training.of(lengths, options, policy)
    training.until(None)
    return training, weights(training.net)


@pytest.mark.covering
@settings_of
@pytest.mark.parametrize("policy", list(POLICIES.values()), ids=list(POLICIES))
def test_resume_after_an_update_of_any_epoch_gives_the_same_weights_to_the_bit(
    lengths: list[int], options: dict[str, Any], policy: Policy
) -> None:
    """In the midst of epochs and between them, where the states that enter the next one matter."""
    training, expected = uninterrupted(lengths, options, policy)
    for stop in (2, training.done // 2, training.done - 1, -1):
        torch.manual_seed(1)
        first = Training.of(lengths, options, policy)
        checkpoint = first.until(stop)
        torch.manual_seed(99)
        second = Training.of(lengths, options, policy)
        second.until(None, second.restored(checkpoint))
        assert same_bits(weights(second.net), expected), stop
        assert second.done == training.done - first.done


@pytest.mark.parametrize("lost", ["entering", "handed"])
def test_resume_that_forgets_what_is_handed_on_gives_other_weights(lost: str) -> None:
    """The mutants of the laws above."""
    lengths, options = OPTIONS["hand-off"]
    training, expected = uninterrupted(lengths, options, tt.Truncated(6, 15))
    torch.manual_seed(1)
    checkpoint = Training.of(lengths, options, tt.Truncated(6, 15)).until(
        training.done // EPOCHS + 1
    )
    loaded = torch.load(io.BytesIO(checkpoint), weights_only=True)
    saved_position = loaded["updates"]
    loaded["updates"] = saved_position | (
        {"policy": saved_position["policy"] | {"carried": None, "edge": None}}
        if lost == "entering"
        else {"stream": saved_position["stream"] | {"handed_off": False}}
    )
    file = io.BytesIO()
    torch.save(loaded, file)
    second = Training.of(lengths, options, tt.Truncated(6, 15))
    if lost == "entering":
        with pytest.raises(DataError, match="no state came with it"):
            second.until(None, second.restored(file.getvalue()))
        return
    second.until(None, second.restored(file.getvalue()))
    assert not same_bits(weights(second.net), expected)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "lanes": ({"lanes": 2}, "lanes is 3 there and 2 here"),
    "hand_off": ({"hand_off": True}, "hand_off is False there and True here"),
    "ranks": ({"rank": 0, "ranks": 2}, "ranks is 1 there and 2 here"),
    "missing": ({"missing": "mask"}, "missing is 'error' there and 'mask' here"),
    "dtype": ({"dtype": torch.float32}, "dtype is 'None' there and 'torch.float32' here"),
    "names": (
        {"recordings": [one | {"name": "x"} for one in recordings(LENGTHS)]},
        "names_and_lengths is '[0-9a-f]+' there and",
    ),
}


@pytest.mark.parametrize(("change", "difference"), list(REFUSED.values()), ids=list(REFUSED))
def test_position_in_another_stream_is_refused_naming_the_difference(
    change: dict[str, Any], difference: str
) -> None:
    setting: dict[str, Any] = {"recordings": recordings(LENGTHS), "lanes": 3, "chunk": 8}
    saved_position = tt.Stream(**setting).state_dict()
    with pytest.raises(
        DataError, match=f"the saved position belongs to another stream: .*{difference}"
    ):
        tt.Stream(**{**setting, **change}).load_state_dict(saved_position)
    setting |= {"chunk": 5}
    tt.Stream(**setting).load_state_dict(saved_position)


def labelled(lengths: list[int], *, static: float = 0.0) -> list[dict[str, Any]]:
    return [
        one | {"targets": np.arange(n) % 3, "static": np.array([static])}
        for one, n in zip(recordings(lengths), lengths, strict=True)
    ]


def with_other(key: str, index: int, values: np.ndarray) -> list[dict[str, Any]]:
    data = labelled(LENGTHS)
    data[index] |= {key: values}
    return data


FIRST = labelled(LENGTHS)[0]
OTHER_DATA: dict[str, tuple[list[dict[str, Any]], int]] = {
    "one number": (with_other("inputs", 0, FIRST["inputs"] + np.eye(17, 3, k=-8)), 0),
    "labels reversed": (with_other("targets", 4, np.arange(7)[::-1] % 3), 4),
    "other static": (labelled(LENGTHS, static=1.0), 0),
}


@pytest.mark.parametrize(("data", "index"), list(OTHER_DATA.values()), ids=list(OTHER_DATA))
def test_position_in_other_data_of_equal_length_is_refused(
    data: list[dict[str, Any]], index: int
) -> None:
    saved = tt.Stream(labelled(LENGTHS), 3, 8).state_dict()
    name = data[index]["name"]
    with pytest.raises(DataError, match=rf"checksum of recording {index} \('{name}'\) is '.*there"):
        tt.Stream(data, 3, 8).load_state_dict(saved)
    tt.Stream(labelled(LENGTHS), 3, 8).load_state_dict(saved)


@dataclass
class Reads:
    """A recording that notes its reads and those that overlap, and adds noise if asked to."""

    steps: int
    name: str = "reads"
    noise: float = 0.0
    shift: float = 0.0
    count: int = 0
    during: Callable[[], object] | None = None
    reading: bool = False
    overlaps: int = 0

    def __len__(self) -> int:
        return self.steps

    def read(self, start: int, stop: int) -> StepArrays:
        self.overlaps += self.reading
        self.reading, self.count = True, self.count + stop - start
        if self.during is not None:
            self.during()
        inputs = np.arange(start, stop)[:, None] + self.shift + self.noise * self.count
        self.reading = False
        return StepArrays(inputs, np.zeros(stop - start))


@pytest.mark.parametrize("count", [1, 100])
def test_a_position_reads_some_blocks_of_some_recordings_once(count: int) -> None:
    sources = [Reads(1_000_000, str(i)) for i in range(count)]
    stream = tt.Stream(sources, 1, 8)
    assert sum(source.count for source in sources) == 0
    saved = stream.state_dict()
    read = sum(source.count for source in sources)
    assert 0 < read <= 2 * 97 * 64
    stream.take(8)
    before = sum(source.count for source in sources)
    assert stream.state_dict() == saved | {"position": 8}
    assert sum(source.count for source in sources) == before
    others = [Reads(1_000_000, str(i), shift=1.0) for i in range(count)]
    with pytest.raises(DataError, match=r"checksum of recording 0 \('0'\)") as caught:
        tt.Stream(others, 1, 8).load_state_dict(saved)
    assert str(caught.value).count(" there and ") <= 12


def test_a_position_saved_while_a_disk_is_gone_resumes_once_it_is_back() -> None:
    def gone() -> None:
        raise OSError("no such device")

    saved = tt.Stream(Reads(100, during=gone), 1, 8).state_dict()
    tt.Stream(Reads(100), 1, 8).load_state_dict(saved)
    saved = tt.Stream(Reads(100), 1, 8).state_dict()
    with pytest.raises(DataError, match="OSError: no such device"):
        tt.Stream(Reads(100, during=gone), 1, 8).load_state_dict(saved)


def test_a_position_saved_within_a_read_has_no_checksums() -> None:
    """As in the handler of a signal: the read goes on after it."""
    saved: list[dict[str, Any]] = []
    source = Reads(100, during=lambda: saved.append(stream.state_dict()))
    stream = tt.Stream(source, 1, 8)
    stream.take(8)
    assert not any("checksum" in key for key in saved[0])
    source.during = None
    assert any("checksum" in key for key in stream.state_dict())
    tt.Stream(Reads(100), 1, 8).load_state_dict(saved[0])


OTHERS: dict[str, Callable[[Training], object]] = {
    "evaluate": lambda t: tt.evaluate(t.net, stream_of(LENGTHS, {}), nn.MSELoss()),
    "predict": lambda t: tt.predict(t.net, recordings([13])[0]),
    "predictor": lambda t: tt.Predictor(t.net).step(torch.zeros(1, 3, dtype=torch.float64)),
    "places": lambda t: (t.stream.state_dict(), t.stream.read(0, 5), repr(t.stream), len(t.stream)),
    "no leak": lambda t: tt.testing.check_no_leak(t.stream, t.net, recordings=[0], tolerance=1.0),
    "reach": lambda t: tt.reach(t.net, stream_of(LENGTHS, {}), nn.MSELoss(), max_lag=4, anchors=2),
    "audit": lambda t: tt.audit(t.net, stream_of(LENGTHS, {}), nn.MSELoss(), horizons=[4]),
}


@cache
def trained(policy: Policy, between: Callable[[Training], object] | None) -> dict[str, Tensor]:
    """Weights after three epochs with dropout and a learnt start."""
    torch.manual_seed(1)
    training = Training.of(
        [19, 7, 12, 3],
        {},
        policy,
        lambda: nn.Sequential(HidesLayer(outputs=3, dropout=0.3), LearntStart()),
    )
    training.until(None, None, between)
    return weights(training.net)


@pytest.mark.covering
@pytest.mark.parametrize("between", list(OTHERS.values()), ids=list(OTHERS))
@pytest.mark.parametrize("policy", list(POLICIES.values()), ids=list(POLICIES))
def test_what_is_measured_between_updates_leaves_the_training_untouched(
    between: Callable[[Training], object], policy: Policy
) -> None:
    assert same_bits(trained(policy, between), trained(policy, None))


def test_what_changes_a_weight_between_updates_does_not() -> None:
    """The mutant of the law above."""

    def spoil(t: Training) -> None:
        with torch.no_grad():
            next(t.net.parameters()).add_(1e-9)

    for policy in POLICIES.values():
        assert not same_bits(trained(policy, spoil), trained(policy, None))


@pytest.mark.parametrize("step", [0, -1])
def test_the_first_and_the_last_step_of_a_long_recording_are_compared(step: int) -> None:
    values = np.zeros(9000)
    saved_position = tt.Stream(values, 2, 400).state_dict()
    values[step] = 1
    with pytest.raises(DataError, match="checksum of recording 0"):
        tt.Stream(values, 2, 400).load_state_dict(saved_position)
