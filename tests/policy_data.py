"""Data, oracles by plain autograd, and policies with altered data, for the tests of gradients.

Shapes: `T` steps, `B` lanes, `D` input features, `C` outputs.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import throughtime as tt
from strategies import (
    Weights,
    apart,
    gradients,
    inputs,
    start,
)
from throughtime.carry import Carried
from throughtime.chunk import Chunk
from throughtime.gradient import Policy, UpdatePolicy
from throughtime.updates import Updates


@dataclass(frozen=True)
class PolicyData:
    """Everything a gradient depends on besides the weights."""

    x: Tensor
    targets: Tensor
    resets: Tensor
    mask: Tensor

    @classmethod
    def draw(
        cls,
        steps: int,
        lanes: int,
        seed: int,
        resets: float = 0.0,
        masked: float = 0.0,
        outputs: int = 2,
    ) -> "PolicyData":
        draw = torch.Generator().manual_seed(seed)
        first = torch.zeros(steps, lanes, dtype=torch.bool)
        first[0] = True
        starts = torch.rand(steps, lanes, generator=draw) < resets
        mask = torch.rand(steps, lanes, generator=draw) >= masked
        return cls(
            inputs(steps, lanes, seed=seed) * 0.3,
            inputs(steps, lanes, seed=seed + 1, features=outputs),
            starts | first,
            mask,
        )

    @classmethod
    def of(cls, chunk: Chunk) -> "PolicyData":
        assert chunk.targets is not None
        return cls(chunk.inputs, chunk.targets, chunk.resets, chunk.mask)

    @property
    def chunk(self) -> Chunk:
        return Chunk.from_tensors(self.x, self.targets, resets=self.resets, mask=self.mask)


UpdateGrads = list[tuple[int, float, Weights]]  # for each update: valid steps, loss, gradients


def plain(
    net: Carried, data: PolicyData, bounds: Sequence[int] | None = None, loss_fn: Any = None
) -> UpdateGrads:
    """One forward and one backward pass for every stretch.

    The state is carried between them, without its graph.
    """
    bounds = [0, len(data.x)] if bounds is None else bounds
    loss_fn = loss_fn or nn.MSELoss()
    state, results = start(net, data.x), list[tuple[int, float, Weights]]()
    for begin, end in pairwise(bounds):
        y, state = net(data.x[begin:end], state, data.resets[begin:end])
        valid = data.mask[begin:end]
        if valid.any():
            net.zero_grad()
            loss = loss_fn(y[valid], data.targets[begin:end][valid])
            loss.backward()
            results.append((int(valid.sum()), loss.item(), gradients(net)))
        state = tt.state.detach(state)
    net.zero_grad()
    return results


def data_for(
    net: Carried, steps: int, lanes: int, seed: int = 0, resets: float = 0.0, masked: float = 0.0
) -> PolicyData:
    """Data with as many targets as the net has outputs."""
    x = inputs(1, lanes)
    with torch.no_grad():
        width = net(x, start(net, x))[0].shape[2]
    return PolicyData.draw(steps, lanes, seed, resets, masked, width)


def policy_gradients(
    net: Carried,
    source: tt.Stream | Sequence[Chunk],
    policy: Policy | UpdatePolicy,
    loss_fn: Any = None,
) -> UpdateGrads:
    """The gradient of every update at fixed weights."""
    return gradients_of(net, tt.updates(net, source, loss_fn or nn.MSELoss(), gradient=policy))


def gradients_of(net: Carried, run: Updates) -> UpdateGrads:
    """The gradient of every update of a run whose weights stay as they are."""
    results: UpdateGrads = []
    for update in run:
        results.append((update.steps, update.loss.item(), gradients(net)))
        net.zero_grad()
    return results


def summed(results: UpdateGrads) -> Weights:
    """The gradient of the mean loss over all valid steps, from the updates' means."""
    total = sum(steps for steps, *_ in results)
    return {
        name: torch.stack([g[name] * (steps / total) for steps, _, g in results]).sum(0)
        for name in results[0][2]
    }


POLICIES: dict[str, Policy] = {
    "exact": tt.Exact(chunk=4),
    "segments": tt.Exact(chunk=4, cut_every=10),
    "truncated": tt.Truncated(10),
    "overlapping": tt.Truncated(10, 15),
    "randomized": tt.Randomized(10, grain=5),
}
every_policy = pytest.mark.parametrize("policy", list(POLICIES.values()), ids=list(POLICIES))


class Tempered(nn.Module):
    """A loss with a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, y: Tensor, t: Tensor) -> Tensor:
        return (y / self.temperature - t).square().mean()


def deviation(a: UpdateGrads, b: UpdateGrads) -> float:
    """How far two lists of updates are apart.

    Infinite if they differ in number or in valid steps.
    """
    if [steps for steps, *_ in a] != [steps for steps, *_ in b]:
        return float("inf")
    return max(
        (max(abs(p - q), apart(g, h)) for (_, p, g), (_, q, h) in zip(a, b, strict=True)),
        default=0.0,
    )


class Allocated(NamedTuple):
    """Bytes of the tensors made while something ran and alive: at most, and at the end."""

    most: int
    kept: int


class Living(TorchDispatchMode):
    """Counts every storage from the operation that made it until it is freed."""

    def __init__(self) -> None:
        super().__init__()
        self.most = self.held = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        del types
        result = func(*args, **(kwargs or {}))
        given = {storage._cdata for storage in _storages((args, kwargs))}
        if "from_file" not in str(func):  # mapped, not allocated
            for storage in _storages(result):
                if storage._cdata not in given | self._sizes.keys():
                    self._sizes[storage._cdata] = storage.nbytes()
                    self.held += storage.nbytes()
                    self.most = max(self.most, self.held)
                    weakref.finalize(storage, self._forget, storage._cdata)
        return result

    def _forget(self, key: int) -> None:
        self.held -= self._sizes.pop(key)


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [
        leaf.untyped_storage()
        for leaf in tree_leaves(tree)
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided
    ]


def allocated(run: Callable[[], object]) -> Allocated:
    """What `run` takes; its result is held to the end."""
    with Living() as living:
        result = run()
        kept = living.held
        del result
    return Allocated(living.most, kept)
