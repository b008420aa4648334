"""nn.Sequential, child by child.

Shapes: `T` steps, `B` lanes, `D` input features, `H` hidden, `L` layers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from throughtime.carry._adapter import Contract, quietly
from throughtime.errors import ModelError
from throughtime.state import State


@dataclass(frozen=True)
class Stateless:
    """A child of a chain that carries nothing: applied to all steps at once."""

    module: nn.Module

    def initial(self, lanes: int, like: Tensor | None) -> State:
        del lanes, like
        return ()

    def needs_trial(self) -> bool:
        return False

    def takes_resets(self, x: Tensor | None) -> bool | None:
        del x
        return True

    def run(self, x: Tensor, state: State, resets: Tensor | None = None) -> tuple[Tensor, State]:
        del resets
        return self.module(x), state


@dataclass(frozen=True)
class Chain:
    """nn.Sequential: each child's outputs are the next one's inputs.

    Its state a dict by the child's place.
    """

    module: nn.Sequential
    children: tuple[nn.Module, ...]
    links: dict[str, Contract]

    def initial(self, lanes: int, like: Tensor | None) -> State:
        if like is not None and self.needs_trial():
            step = like[:1, :1].expand(1, lanes, *like.shape[2:])
            for link in self.links.values():
                step, _ = quietly(self.module, partial(link.run, step, link.initial(lanes, step)))
        return {name: link.initial(lanes, like) for name, link in self.links.items()}

    def needs_trial(self) -> bool:
        return any(link.needs_trial() for link in self.links.values())

    def takes_resets(self, x: Tensor | None) -> bool | None:
        found = [link.takes_resets(None) for link in self.links.values()]
        if False in found or None not in found:
            return all(found)
        return None if x is None else quietly(self.module, partial(self._try, x[:1]))[0]

    def _try(self, step: Tensor) -> tuple[bool, State]:
        """Asks each child with inputs of its own."""
        for link in self.links.values():
            if not link.takes_resets(step):
                return False, ()
            step, _ = link.run(step, link.initial(step.shape[1], step))
        return True, ()

    def run(self, x: Tensor, state: State, resets: Tensor | None = None) -> tuple[Tensor, State]:
        if tuple(self.module) != self.children:
            raise ModelError(
                "a module of this nn.Sequential was replaced after tt.carry; carry it again: net ="
                " tt.carry(module)"
            )
        return through(self.links, x, state, resets)


def through(
    links: Mapping[str, Contract],
    x: Tensor,
    state: Mapping[str, State],
    resets: Tensor | None = None,
) -> tuple[Tensor, State]:
    """Each link's outputs are the next one's inputs.

    Raises:
        ModelError: one gives other steps or lanes than it is given.
    """
    after: dict[str, State] = {}
    for name, link in links.items():
        y, after[name] = link.run(x, state[name], resets)
        if y.shape[:2] != x.shape[:2]:
            raise ModelError(
                f"module '{name}' of this nn.Sequential turns {tuple(x.shape)} into"
                f" {tuple(y.shape)}, expected one output per step and lane. A carried recurrent"
                " layer hands on its outputs only: drop a module that picks them out of a tuple,"
                " or the last step."
            )
        x = y
    return x, after
