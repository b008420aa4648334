"""Several ranks: real processes over gloo give the weights of one process that plays all of their
lanes.

Shapes: `T` steps, `B` lanes, `D` input features.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import throughtime as tt
from plain_loop import plain_loop
from processes import in_processes
from strategies import apart, named, recordings
from throughtime.carry import Carried
from throughtime.distributed import Ranks
from throughtime.errors import DataError, RunError
from throughtime.gradient import Policy, Update, UpdatePolicy

LANES = 2  # of each rank
LENGTHS = (30, 15, 33, 8, 3, 19, 15)
MANY = 2**25 + 1  # steps; float32 rounds it


def classes() -> list[dict[str, Any]]:
    """Three classes, some steps without one."""
    found = recordings(LENGTHS)
    for one in found:
        one["targets"] = np.where(
            one["targets"][:, 0] > 1.2,
            -100,
            (one["inputs"][:, 0] > 0) + (one["inputs"][:, 1] > 0.5),
        )
    return found


class Case(NamedTuple):
    """A training, played by ranks or by one process."""

    policy: Policy | UpdatePolicy
    data: Callable[[], list[dict[str, Any]]] = lambda: recordings(LENGTHS, outputs=1)
    options: Mapping[str, Any] = MappingProxyType({})
    loss_fn: Callable[[], nn.Module] = nn.MSELoss
    outputs: int = 1
    epochs: int = 2
    accumulate: int = 1

    def net(self) -> Carried:
        torch.manual_seed(3)
        return tt.carry(nn.Sequential(nn.LSTM(3, 4), nn.Linear(4, self.outputs))).double()

    def stream(self, lanes: int) -> tt.Stream:
        return tt.Stream(self.data(), lanes, 10, **self.options)

    def train(
        self, lanes: int, made: tt.Stream | None = None, stop: int | None = None
    ) -> dict[str, Any]:
        """Weights at the end, and the loss and steps of every update.

        After `stop` updates the loop goes on with a new stream, from the saved position.
        """
        net, stream = self.net(), self.stream(lanes) if made is None else made
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        options: dict[str, Any] = {
            "loss_fn": self.loss_fn().double(),
            "epochs": self.epochs,
            "accumulate": self.accumulate,
            "resume": stop and (stop, lambda: self.stream(lanes)),
        }
        torch.manual_seed(11)
        told = plain_loop(net, stream, optimizer, self.policy, **options)
        return {"weights": {name: p.detach() for name, p in net.named_parameters()}, "told": told}


def weighted() -> nn.Module:
    return nn.CrossEntropyLoss(torch.tensor([0.2, 1.0, 5.0]))


def ratio(outputs: Tensor, chunk: Any) -> Tensor:
    """A loss of steps that is no mean over them."""
    return (chunk.targets - outputs).square().sum() / (1 + outputs.square().sum())


def over_recordings() -> nn.Module:
    return tt.SequenceLoss(ratio, over="recording")


SEGMENT = tt.Exact(cut_every=20, chunk=7)
CASES: dict[str, Case] = {
    "stride": Case(tt.Truncated(7)),
    "horizon": Case(tt.Truncated(7, 15)),
    "exact": Case(tt.Exact(chunk=11), epochs=3),
    "handed-on": Case(
        tt.Truncated(7), lambda: recordings([123], outputs=1), {"hand_off": True}, epochs=4
    ),
    "accumulated-classes": Case(SEGMENT, classes, loss_fn=weighted, outputs=3, accumulate=2),
    "randomized": Case(tt.Randomized(20)),
    "adaptive": Case(tt.Adaptive(0.1, 5, 40, every=1)),
    "by recording-segment": Case(SEGMENT, loss_fn=over_recordings),
}
STOPS = {"horizon": 3, "handed-on": 11}  # updates before a resume
SCORED = CASES["accumulated-classes"]


def refused(call: Callable[[], object]) -> str:
    try:
        call()
    except (DataError, RunError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def first_update(
    stream: tt.Stream, net: Carried | None = None, stride: int = 7, **options: Any
) -> str:
    """What the first update says."""
    net, policy = net or CASES["stride"].net(), tt.Truncated(stride)
    run = tt.updates
    return refused(lambda: next(run(net, stream, nn.MSELoss(), gradient=policy, **options)))


def plans_apart(rank: int) -> dict[str, tuple[tt.Stream, int]]:
    """Streams and strides that differ between the ranks in one thing."""
    data = CASES["stride"].data()
    settings: dict[str, Any] = {
        "lanes": LANES,
        "chunk": 7,
        "dtype": torch.float64,
        "missing": "mask",
    }
    return {
        "other seed": (tt.Stream(data, seed=rank, **settings), 7),
        "other stride": (tt.Stream(data, **settings), 7 + rank),
        "other values": (tt.Stream(changed(data, rank), **settings), 7),
    }


def changed(data: list[dict[str, Any]], rank: int) -> list[dict[str, Any]]:
    """The same names and lengths; on the second rank one value of a target differs."""
    targets = np.array(data[1]["targets"])
    targets[-1] += rank
    return [data[0], data[1] | {"targets": targets}, *data[2:]]


def steps_apart(rank: int) -> str:
    """What the second update says after a first step at another learning rate on each rank."""
    case = CASES["stride"]
    net = case.net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1 * (rank + 1))

    def train() -> None:
        for _ in tt.updates(net, case.stream(LANES), nn.MSELoss(), gradient=tt.Truncated(7)):
            optimizer.step()
            optimizer.zero_grad()

    return refused(train)


def one_fails(rank: int) -> tuple[str, bool]:
    """Messages of all ranks when one has NaN inputs; are grads unchanged?"""
    case = CASES["stride"]
    net = case.net()
    for weight in net.parameters():
        weight.grad = torch.full_like(weight, rank + 1.0)
    bad = [
        {
            "inputs": torch.full((30, 3), torch.nan if i == 0 else 1.0).double(),
            "targets": torch.zeros(30).double(),
        }
        for i in range(2)
    ]
    told = first_update(tt.Stream(bad, 1, 7, seed=None), net)
    kept = all(w.grad is not None and bool((w.grad == rank + 1.0).all()) for w in net.parameters())
    return told, kept


def reduced(rank: int) -> tuple[int, float, list[Tensor | None]]:
    """Steps, loss and gradients of an update of gradients of several types.

    The last weight has a gradient on no rank, the one before it on the first alone. float32 does
    not hold the number of steps.
    """
    types = (torch.float32, torch.bfloat16, torch.complex64, torch.float32, torch.float32)
    weights = [torch.zeros(2, 3, dtype=dtype) for dtype in types]
    for i, weight in enumerate(weights[: 4 - rank]):
        weight.grad = torch.full_like(weight, (i + 1) * (1 - 2 * rank))
    weights[2].grad = torch.full((2, 3), 1.0 + rank * 1j)
    chunk = next(iter(CASES["stride"].stream(LANES)))
    steps = (MANY, MANY // 2)[rank]
    update = Update(torch.tensor(1.5), steps, None, chunk.inputs, chunk, steps)
    result = Ranks(rank, 2, torch.device("cpu")).reduce_update(update, weights)
    assert result is not None
    return result.steps, result.loss.item(), [weight.grad for weight in weights]


def scores(data: Any) -> tuple[dict[str, float], Any]:
    result = tt.evaluate(SCORED.net(), data, metrics=tt.metrics.Classification(3))
    return result.metrics, result.recordings


def before_the_group() -> tuple[tt.Stream, tt.Stream]:
    """Streams made early: one that plays for the first time on ranks, and one that has played."""
    played = CASES["stride"].stream(LANES)
    next(iter(played))
    return CASES["stride"].stream(LANES), played


def ranks_work(rank: int, early: tuple[tt.Stream, tt.Stream]) -> Iterator[tuple[str, Any]]:
    """Everything that ranks do in these tests, one name after another."""
    for name, case in CASES.items():
        yield name, case.train(LANES)
    for name, stop in STOPS.items():
        yield f"{name}, resumed", CASES[name].train(LANES, stop=stop)
    case = CASES["stride"]
    for name, (stream, stride) in plans_apart(rank).items():
        yield name, first_update(stream, stride=stride)
    yield "other rate", steps_apart(rank)
    yield "more ranks", first_update(tt.Stream(case.data(), LANES, 7, rank=rank, ranks=4))
    told, kept = one_fails(rank)
    yield from (("one fails", told), ("kept", kept))
    yield "early", case.train(LANES, early[0])
    yield "early and played", refused(lambda: next(iter(early[1])))
    place = case.stream(LANES).state_dict() | {"rank": 1 - rank}
    yield "place", refused(lambda: case.stream(LANES).load_state_dict(place))
    # of its share of a stream, and of recordings, which every rank has
    yield "scores", [scores(SCORED.stream(LANES)), scores(SCORED.data())]
    yield "reduced", reduced(rank)


@cache
def found() -> list[dict[str, Any]]:
    """What each of two ranks found; the processes are started once."""
    return in_processes(2, before_the_group, ranks_work)


def deviation(told: dict[str, Any], expected: dict[str, Any]) -> float:
    """Of weights, and losses; infinite if the updates differ in number or steps."""
    if [steps for _, steps in told["told"]] != [steps for _, steps in expected["told"]]:
        return float("inf")
    losses = max(
        abs(p - q) / max(1.0, abs(q))
        for (p, _), (q, _) in zip(told["told"], expected["told"], strict=True)
    )
    return max(losses, apart(told["weights"], expected["weights"]))


@pytest.mark.parametrize("name", list(CASES))
def test_ranks_give_the_weights_losses_and_steps_of_one_process(name: str) -> None:
    expected = CASES[name].train(LANES * 2)
    assert len(expected["told"]) > 1
    for told in found():
        assert deviation(told[name], expected) < 1e-12
        assert deviation(told[name], found()[0][name]) == 0


@pytest.mark.parametrize("name", STOPS)
def test_resume_on_ranks_gives_the_same_weights_to_the_bit(name: str) -> None:
    for told in found():
        assert deviation(told[f"{name}, resumed"], told[name]) == 0


PLAN = "RankError: rank 1 would not play its share of the plan of rank 0: "
FAILED = "RankError: 1 of 2 ranks could not make this update; their own output says why"
REFUSED: dict[str, tuple[str, ...]] = {  # by rank; nobody waits for the other
    "other seed": (PLAN, "seed is 0 there and 1 here"),
    "other stride": (PLAN, "gradient is Truncated(stride=7"),
    "other values": (PLAN, "checksum of recording 1 ('r1') is '"),
    "other rate": ("RankError: rank 1 has after the first update other weights",) * 2,
    "more ranks": ("plays rank 0 of 4, and this process is rank 0 of 2", "rank 1 of 4"),
    "one fails": ("DataError: recording '0' has", FAILED),
    "early and played": ("has played for rank 0 of 1", "this process is rank 1 of 2 now"),
    "place": ("rank is 1 there and 0 here", "rank is 0 there and 1 here"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_go_apart_is_refused_on_every_rank(name: str) -> None:
    for told, reason in zip(found(), REFUSED[name], strict=True):
        assert reason in told[name]


def test_a_failure_on_one_rank_changes_nothing() -> None:
    assert [told["kept"] for told in found()] == [True, True]


def test_gradients_of_all_types_are_added_up_and_counts_are_exact() -> None:
    for told in found():
        steps, loss, grads = told["reduced"]
        assert (steps, loss) == (MANY + MANY // 2, 1.5)
        third = (MANY - MANY // 2) / steps  # of what is the opposite on the second rank
        expected = torch.tensor([third, 2 * third, 1 + 1j * (1 - third) / 2, 4 * MANY / steps])
        for grad, value in zip(grads[:4], expected, strict=True):
            like = torch.zeros(2, 3, dtype=grad.dtype) + (
                value if grad.is_complex() else value.real
            )
            torch.testing.assert_close(grad, like)
        assert [grad.dtype for grad in grads[:3]] == [
            torch.float32,
            torch.bfloat16,
            torch.complex64,
        ]
        assert grads[4] is None


def test_ranks_score_as_one_process() -> None:
    metrics, recordings = scores(SCORED.data())
    assert len(recordings) > 1
    for told in found():
        for values, by_recording in told["scores"]:
            assert values == pytest.approx(metrics, nan_ok=True)
            assert by_recording.keys() == recordings.keys()
            for recording, own in recordings.items():
                assert by_recording[recording] == pytest.approx(own, nan_ok=True)


def test_stream_made_before_the_group_takes_its_place_in_it() -> None:
    for told in found():
        assert deviation(told["early"], told["stride"]) == 0


def test_ranks_without_a_group_or_that_make_no_sense_are_refused() -> None:
    stream = tt.Stream(recordings(LENGTHS), 1, 10, rank=0, ranks=2)
    with pytest.raises(DataError, match=r"in no process group.*init_process_group"):
        tt.updates(named("gru").net(), stream, nn.MSELoss(), gradient=tt.Truncated(7))
    assert len(list(stream)) > 1  # what is read needs no group
    for rank, ranks in ((0, None), (2, 2)):
        with pytest.raises(DataError, match=r"expected a rank below ranks, or neither"):
            tt.Stream(recordings(LENGTHS), 1, 10, rank=rank, ranks=ranks)
