"""A user's own gradient policy: trained, saved, and resumed to the bit.

Shapes: `T` steps, `B` lanes.
"""

import io
import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import throughtime as tt
from strategies import apart, named, recordings, weights
from throughtime.carry import Carried
from throughtime.chunk import Source
from throughtime.gradient import Objective, Policy, Probe, Progress, Update, UpdatePolicy, Window
from throughtime.updates import Updates


@dataclass(frozen=True)
class EveryStride:
    """Truncation after every stride, written as a user would write it."""

    stride: int

    def plan(self, source: Source, at: Progress, probe: Probe) -> tuple[Window | None, Any]:
        steps = source.remaining(self.stride)
        stop = at.step + steps
        return Window(at.step, at.step, at.step, stop, stop) if steps else None, at.memory


@dataclass(frozen=True)
class Growing:
    """A stride that grows by one step with every update, from epoch to epoch."""

    first: int

    def plan(self, source: Source, at: Progress, probe: Probe) -> tuple[Window | None, Any]:
        updates = at.memory or 0
        window, _ = EveryStride(self.first + updates).plan(source, at, probe)
        return window, updates + (window is not None)


@dataclass(frozen=True)
class Clipped:
    """The exact gradient of windows of 20 steps, the credit clipped to a norm and noted."""

    most: float
    norms: list[Tensor] = field(default_factory=list[Tensor], repr=False)

    def plan(self, source: Source, at: Progress, probe: Probe) -> tuple[Window | None, Any]:
        window, memory = EveryStride(20).plan(source, at, probe)
        return window and window._replace(chunk=5, gate=self.gate), memory

    def gate(self, step: int, credit: list[Tensor | None]) -> list[Tensor | None]:
        parts = [part.flatten(1) for part in credit if part is not None]
        norms = torch.cat(parts, dim=1).norm(dim=1)
        self.norms.append(norms)
        factors = (self.most / norms).clamp(max=1)
        return [None if c is None else c * factors.view(-1, *[1] * (c.dim() - 1)) for c in credit]


@dataclass(frozen=True)
class ByHand:
    """`EveryStride` as a policy that no window describes; counts its updates."""

    stride: int

    def update(
        self, net: Carried, source: Source, objective: Objective, at: Progress
    ) -> tuple[Update | None, Progress]:
        chunk = source.take(self.stride)
        if chunk is None:
            return None, at
        before = at.carried or net.initial_state(chunk.lanes, like=chunk.inputs)
        outputs, after = net(chunk.inputs, before, chunk.resets)
        loss, weight = objective(outputs, chunk)
        loss.backward()
        after, stop = tt.state.detach(after), at.step + chunk.steps
        update = Update(loss.detach(), chunk.valid_steps, after, outputs.detach(), chunk, weight)
        return update, Progress(stop, after, stop, after, (at.memory or 0) + 1)


@dataclass
class Training:
    """A net, its optimizer and two epochs of updates, the policy's memory handed on."""

    net: Carried
    optimizer: torch.optim.Optimizer
    stream: tt.Stream
    policy: Policy | UpdatePolicy
    updates: Updates

    @classmethod
    def begin(cls, policy: Policy | UpdatePolicy) -> "Training":
        net, stream = named("hides-layer").net(), tt.Stream(recordings([40, 31, 17]), 2, 8)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
        updates = tt.updates(net, stream, nn.MSELoss(), gradient=policy)
        return cls(net, optimizer, stream, policy, updates)

    def run(self, most: int = 1000) -> list[tuple[int, float]]:
        """Steps and loss of each update, to the end of the second epoch."""
        results: list[tuple[int, float]] = []
        while True:
            for update in itertools.islice(self.updates, most - len(results)):
                self.optimizer.step()
                self.optimizer.zero_grad()
                results.append((update.steps, update.loss.item()))
            if len(results) == most or self.stream.epoch == 2:
                return results
            memory = self.updates.policy_state
            self.updates = tt.updates(
                self.net, self.stream, nn.MSELoss(), gradient=self.policy, policy_state=memory
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


POLICIES: dict[str, Policy | UpdatePolicy] = {
    "stride": EveryStride(5),
    "growing": Growing(3),
    "clipped": Clipped(1e-3),
    "by hand": ByHand(5),
}


@pytest.mark.covering
@pytest.mark.parametrize("policy", list(POLICIES.values()), ids=list(POLICIES))
@pytest.mark.parametrize("done", [1, 2, 4])
def test_own_policy_resumes_to_the_bit(policy: Policy | UpdatePolicy, done: int) -> None:
    first = Training.begin(policy)
    assert len(first.run(done)) == done
    checkpoint = first.saved()
    rest = first.run()
    assert rest
    again = Training.begin(policy)
    again.load(checkpoint)
    assert again.run() == rest
    assert apart(weights(again.net), weights(first.net)) == 0


@pytest.mark.parametrize("policy", [EveryStride(5), ByHand(5)], ids=["plan", "update"])
def test_own_policy_equals_the_truncation_that_it_repeats(policy: Policy | UpdatePolicy) -> None:
    own, ours = Training.begin(policy), Training.begin(tt.Truncated(5))
    for a, b in zip(own.run(), ours.run(), strict=True):
        assert a == pytest.approx(b, rel=1e-12)
    assert apart(weights(own.net), weights(ours.net)) < 1e-12


def test_own_gate_gets_the_credit_of_every_boundary_and_changes_it() -> None:
    """Norms that are only noted change nothing; clipped ones do as much as those of `tt.Exact`."""
    policy = Clipped(1e9)
    exact = Training.begin(tt.Exact(chunk=5, cut_every=20)).run()
    assert Training.begin(policy).run() == exact
    assert len(policy.norms) >= 3 * 4
    assert all(norms.shape == (2,) for norms in policy.norms)
    assert max(float(norms.max()) for norms in policy.norms) > 1e-3
    clipped = Training.begin(tt.Exact(chunk=5, cut_every=20, clip_adjoint=1e-3)).run()
    own = Training.begin(Clipped(1e-3)).run()
    for a, b in zip(own, clipped, strict=True):
        assert a == pytest.approx(b, rel=1e-9)
    assert own[-1] != pytest.approx(exact[-1], rel=1e-6)


def test_own_policy_learns_from_epoch_to_epoch() -> None:
    training = Training.begin(Growing(3))
    steps = [valid for valid, _ in training.run()]
    assert training.updates.policy_state == len(steps)


def test_own_policy_is_accumulated() -> None:
    net, stream = named("hides-layer").net(), tt.Stream(recordings([40, 40]), 2, 8)
    run = tt.updates(net, stream, nn.MSELoss(), gradient=Growing(3), accumulate=2)
    assert next(run).steps == 2 * (3 + 4)
    assert run.policy_state == 2
