"""A user's own gradient policy: trained, saved, and resumed to the bit.

Shapes: `T` steps, `B` lanes.
"""

import io
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import throughtime as tt
from strategies import apart, named, recordings, weights
from throughtime.chunk import Source
from throughtime.errors import ConfigError
from throughtime.gradient import CarriedState, Objective, Policy


@dataclass(frozen=True)
class EveryStride:
    """Truncation after every stride, written as a user would write it."""

    stride: int

    def init(self, carried: Any, previous: CarriedState | None) -> CarriedState:
        return CarriedState(carried)

    def update(
        self, net: tt.Carried, source: Source, objective: Objective, state: CarriedState
    ) -> tuple[tt.Update | None, CarriedState]:
        chunk = source.take(self.stride)
        if chunk is None:
            return None, state
        before = state.carried or net.initial_state(chunk.lanes, like=chunk.inputs)
        outputs, after = net(chunk.inputs, before, chunk.resets)
        loss = objective.loss(outputs, chunk)
        loss.backward()
        after = tt.state.detach(after)
        update = tt.Update(loss.detach(), chunk.valid_steps, after, outputs.detach(), chunk)
        return update, CarriedState(after)

    def state_dict(self, state: CarriedState) -> dict[str, Any]:
        return {"carried": state.carried}

    def load_state_dict(self, values: Mapping[str, Any], source: Source) -> CarriedState:
        return CarriedState(values["carried"])


@dataclass(frozen=True)
class GrowingState:
    """The state of `Growing`."""

    carried: Any
    stride: int
    updates: int = 0


@dataclass(frozen=True)
class Growing:
    """A stride that grows by one step with every update, from epoch to epoch."""

    first: int

    def init(self, carried: Any, previous: GrowingState | None) -> GrowingState:
        if previous is None:
            return GrowingState(carried, self.first)
        return GrowingState(carried, previous.stride, previous.updates)

    def update(
        self, net: tt.Carried, source: Source, objective: Objective, state: GrowingState
    ) -> tuple[tt.Update | None, GrowingState]:
        inner = EveryStride(state.stride)
        update, after = inner.update(net, source, objective, CarriedState(state.carried))
        if update is None:
            return None, state
        return update, GrowingState(after.carried, state.stride + 1, state.updates + 1)

    def state_dict(self, state: GrowingState) -> dict[str, Any]:
        return {"carried": state.carried, "stride": state.stride, "updates": state.updates}

    def load_state_dict(self, values: Mapping[str, Any], source: Source) -> GrowingState:
        return GrowingState(values["carried"], values["stride"], values["updates"])


@dataclass
class Training:
    """A net, its optimizer and two epochs of updates, the state of the policy handed on."""

    net: tt.Carried
    optimizer: torch.optim.Optimizer
    stream: tt.Stream
    policy: Policy[Any]
    updates: tt.Updates[Any]

    @classmethod
    def begin(cls, policy: Policy[Any]) -> "Training":
        net, stream = named("hides-layer").net(), tt.Stream(recordings([40, 31, 17]), 2, 8)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
        updates = tt.updates(net, stream, nn.MSELoss(), gradient=policy)
        return cls(net, optimizer, stream, policy, updates)

    def run(self, most: int = 1000) -> list[tuple[int, float]]:
        """Steps and loss of each update, to the end of the second epoch."""
        told: list[tuple[int, float]] = []
        while True:
            for update in itertools.islice(self.updates, most - len(told)):
                self.optimizer.step()
                self.optimizer.zero_grad()
                told.append((update.steps, update.loss.item()))
            if len(told) == most or self.stream.epoch == 2:
                return told
            learnt = self.updates.policy_state
            self.updates = tt.updates(
                self.net,
                self.stream,
                nn.MSELoss(),
                gradient=self.policy,
                policy_state=learnt,
            )

    def saved(self) -> bytes:
        file = io.BytesIO()
        parts = self.net, self.optimizer, self.updates
        torch.save([part.state_dict() for part in parts], file)
        return file.getvalue()

    def load(self, checkpoint: bytes) -> None:
        values = torch.load(io.BytesIO(checkpoint), weights_only=True)
        for part, own in zip((self.net, self.optimizer, self.updates), values, strict=True):
            part.load_state_dict(own)


@pytest.mark.covering
@pytest.mark.parametrize("policy", [EveryStride(5), Growing(3)], ids=["stride", "growing"])
@pytest.mark.parametrize("done", [1, 4, 9, 11])
def test_own_policy_resumes_to_the_bit(policy: Policy[Any], done: int) -> None:
    first = Training.begin(policy)
    assert len(first.run(done)) == done
    checkpoint = first.saved()
    rest = first.run()
    assert rest
    again = Training.begin(policy)
    again.load(checkpoint)
    assert again.run() == rest
    assert apart(weights(again.net), weights(first.net)) == 0


def test_own_policy_that_forgets_its_state_gives_other_updates() -> None:
    """The mutant."""
    first = Training.begin(Growing(3))
    first.run(4)
    checkpoint = first.saved()
    rest = first.run()
    again = Training.begin(Growing(3))
    again.load(checkpoint)
    again.updates = tt.updates(
        again.net,
        again.stream,
        nn.MSELoss(),
        gradient=Growing(3),
        state=again.updates.state,
    )
    assert again.run() != rest


def test_own_policy_equals_the_truncation_that_it_repeats() -> None:
    own, ours = Training.begin(EveryStride(5)), Training.begin(tt.Truncated(5))
    for a, b in zip(own.run(), ours.run(), strict=True):
        assert a == pytest.approx(b, rel=1e-12)
    assert apart(weights(own.net), weights(ours.net)) < 1e-12


def test_own_policy_learns_from_epoch_to_epoch() -> None:
    training = Training.begin(Growing(3))
    steps = [valid for valid, _ in training.run()]
    assert training.updates.policy_state.stride == 3 + len(steps)
    assert training.updates.policy_state.updates == len(steps)


def test_own_policy_is_accumulated() -> None:
    net, stream = named("hides-layer").net(), tt.Stream(recordings([40, 40]), 2, 8)
    run = tt.updates(net, stream, nn.MSELoss(), gradient=Growing(3), accumulate=2)
    assert next(run).steps == 2 * (3 + 4)
    assert run.policy_state.stride == 5


class Halves:
    """Half a policy."""

    def __repr__(self) -> str:
        return "Halves()"

    def init(self, carried: Any, previous: CarriedState | None) -> CarriedState:
        return CarriedState(carried)

    def update(
        self, net: tt.Carried, source: Source, objective: Objective, state: CarriedState
    ) -> tuple[tt.Update | None, CarriedState]:
        return None, state


@pytest.mark.parametrize(
    ("policy", "fault"),
    [
        (Halves(), r"Halves\(\) has no method state_dict, load_state_dict: expected a policy"),
        (tt.Truncated, "is a class, not a policy: .*tt.Truncated"),
        ("truncated", "'truncated' has no method init, update, state_dict, load_state_dict"),
    ],
)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_what_is_no_policy_is_refused_before_any_step(
    policy: Any, fault: str, accumulate: int
) -> None:
    stream = tt.Stream(recordings((20,), outputs=1), lanes=1, chunk=5)
    net = named("lstm").net()
    with pytest.raises(ConfigError, match=fault):
        tt.updates(net, stream, nn.MSELoss(), gradient=policy, accumulate=accumulate)


@dataclass(frozen=True)
class Broken(EveryStride):
    """A policy whose first result, or that at the end of an epoch, is `result`."""

    result: Any
    at_end: bool = False

    def update(
        self, net: tt.Carried, source: Source, objective: Objective, state: CarriedState
    ) -> Any:
        update, after = super().update(net, source, objective, state)
        return self.result if self.at_end == (update is None) else (update, after)


@pytest.mark.parametrize(
    ("result", "at_end", "outline"),
    [
        (None, True, "None"),
        (None, False, "None"),
        (torch.zeros(()), False, "a Tensor"),
        ((1.0, CarriedState()), False, r"\(float, CarriedState\)"),
        ((None, {"carried": None}), False, r"\(NoneType, dict\)"),
        ((None, CarriedState(), 3), False, r"\(NoneType, CarriedState, int\)"),
    ],
)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_update_that_returns_something_else_is_named(
    result: Any, at_end: bool, outline: str, accumulate: int
) -> None:
    net, stream = named("hides-layer").net(), tt.Stream(recordings([20]), 1, 5)
    policy = Broken(5, result, at_end)
    run = tt.updates(net, stream, nn.MSELoss(), gradient=policy, accumulate=accumulate)
    with pytest.raises(ConfigError, match=rf"Broken.update returned {outline}, expected a tt.Upd"):
        list(run)


class StartsWithDict(EveryStride):
    """A policy whose first state has no attribute `carried`."""

    def init(self, carried: Any, previous: Any) -> Any:
        return {"carried": carried}


def test_a_state_without_a_carried_state_is_named_before_any_step() -> None:
    net, stream = named("hides-layer").net(), tt.Stream(recordings([20]), 1, 5)
    with pytest.raises(ConfigError, match="state of StartsWithDict is a dict, expected a value"):
        tt.updates(net, stream, nn.MSELoss(), gradient=StartsWithDict(5))
