"""nn.Sequential, child by child.

Shapes: `T` steps, `B` lanes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from throughtime.carry._adapter import Adapter, trial_call
from throughtime.errors import ModelError
from throughtime.state import State


@dataclass(frozen=True)
class StatelessAdapter(Adapter):
    """A child of a chain that carries nothing: it runs on all steps at once."""

    module: nn.Module

    def initial_state(self, lanes: int, like: Tensor | None) -> State:
        del lanes, like
        return ()

    def takes_resets(self, x: Tensor | None) -> bool | None:
        del x
        return True

    def run(self, x: Tensor, state: State, resets: Tensor | None = None) -> tuple[Tensor, State]:
        del resets
        return self.module(x), state


@dataclass(frozen=True)
class ChainAdapter(Adapter):
    """nn.Sequential: the outputs of each child are the inputs of the next.

    The state is a dict by the child's name.
    """

    module: nn.Sequential
    children: tuple[nn.Module, ...]
    links: Mapping[str, Adapter]

    def initial_state(self, lanes: int, like: Tensor | None) -> State:
        if like is not None and self.needs_trial():
            step = like[:1, :1].expand(1, lanes, *like.shape[2:])
            for link in self.links.values():
                call = partial(link.run, step, link.initial_state(lanes, step))
                step, _ = trial_call(self.module, call)
        return {name: link.initial_state(lanes, like) for name, link in self.links.items()}

    def needs_trial(self) -> bool:
        return any(link.needs_trial() for link in self.links.values())

    def leaf_names(self, state: State) -> list[str]:
        return [f"{k}.{leaf}" for k, v in self.links.items() for leaf in v.leaf_names(state[k])]

    def takes_resets(self, x: Tensor | None) -> bool | None:
        answers = [link.takes_resets(None) for link in self.links.values()]
        if False in answers or None not in answers:
            return all(answers)
        return None if x is None else trial_call(self.module, partial(self._trial, x[:1]))[0]

    def _trial(self, step: Tensor) -> tuple[bool, State]:
        """Ask each child, with the inputs that reach it."""
        for link in self.links.values():
            if not link.takes_resets(step):
                return False, ()
            step, _ = link.run(step, link.initial_state(step.shape[1], step))
        return True, ()

    def run(self, x: Tensor, state: State, resets: Tensor | None = None) -> tuple[Tensor, State]:
        if tuple(self.module) != self.children:
            raise ModelError(
                "a module of this nn.Sequential was replaced after tt.carry; carry it again: net ="
                " tt.carry(module)"
            )
        after: dict[str, State] = {}
        for name, link in self.links.items():
            y, after[name] = link.run(x, state[name], resets)
            if y.shape[:2] != x.shape[:2]:
                raise ModelError(
                    f"module '{name}' of this nn.Sequential turns {tuple(x.shape)} into"
                    f" {tuple(y.shape)}, expected one output per step and lane. A carried recurrent"
                    " layer returns its outputs only: drop a module that picks them out of a tuple,"
                    " or the last step."
                )
            x = y
        return x, after
