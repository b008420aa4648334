"""The adapter of any module: layers and cells, nn.Sequential, and modules that trials measure.

Adapters do not change: `prepared` returns the one for example inputs.

Shapes: `T` steps, `B` lanes, `H` hidden, `L` layers.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from throughtime.carry._calls import Adapter, Convention, LayerAdapter, ModuleAdapter, Ran
from throughtime.carry._inside import (
    LANES,
    RECURRENT,
    Snapshot,
    quiet,
    sample_inputs,
    set_modes,
    weight_of,
)
from throughtime.carry._refusal import bidirectional_error, refusal
from throughtime.carry._search import Search
from throughtime.errors import ModelError, StateError
from throughtime.nn.affine import Affine, Difference, Standardise
from throughtime.state import State

STEPWISE = (nn.Linear, nn.Embedding, nn.Dropout, nn.Tanh, nn.ReLU, nn.Identity)  # known to be so


class UnknownAdapter(Adapter):
    """A module before its first inputs, at which it is measured."""

    def __init__(self, module: nn.Module, base: Convention) -> None:
        super().__init__(module)
        self.base = base

    def run(self, *_: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise StateError(
            f"how {type(self.module).__name__} is called, and the layout of its state, is not known"
            " yet: call net.initial_state(lanes, like=inputs), or net = tt.carry(module, inputs),"
            " before torch compiles or exports it, and before fully_shard(net)"
        )

    initial_state = run  # pyright: ignore[reportAssignmentType]


class StatelessAdapter(Adapter):
    """A child of a chain that carries nothing: it runs on all steps at once."""

    base = Convention(batch_first=False)
    takes_resets = True


class ChainAdapter(Adapter):
    """nn.Sequential: the outputs of each child are the inputs of the next; and Difference.

    The state is a dict by the child's name. A child of the user's is carried by the search for any
    module; it has no state if it is shown to compute each step of each lane alone.

    Raises:
        ModelError: nothing in it carries a state.
    """

    def __init__(self, module: nn.Module, links: Mapping[str, Adapter]) -> None:
        super().__init__(module)
        self.children, self.links = (*module._modules.values(),), links
        self.takes_resets = all(link.takes_resets for link in links.values())
        if all(isinstance(link, StatelessAdapter) for link in links.values()):
            raise ModelError(
                f"none of the modules in this nn.{type(module).__name__} carries a state; nothing"
                " to carry"
            )

    def initial_state(self, lanes: int) -> State:
        return {name: link.initial_state(lanes) for name, link in self.links.items()}

    def run(self, x: Tensor, state: State, *resets: Tensor) -> Ran:
        if (*self.module._modules.values(),) != self.children:
            raise ModelError(
                "a module of this nn.Sequential was replaced after tt.carry; carry it again: net ="
                " tt.carry(module)"
            )
        y, after = x, dict[str, State]()
        for name, link in self.links.items():
            y, after[name] = link_outputs(name, link, y, state[name], *resets)
        return (self.module.restore(y, x) if type(self.module) is Difference else y), after


def link_outputs(name: str, link: Adapter, x: Tensor, state: State, *resets: Tensor) -> Ran:
    """What a child of a chain makes of inputs.

    Raises:
        ModelError: it has another number of steps or lanes.
    """
    y, after = link.run(x, state, *resets)
    if y.shape[:2] != x.shape[:2]:
        raise ModelError(
            f"module '{name}' of this nn.Sequential turns {tuple(x.shape)} into {tuple(y.shape)},"
            " expected one output per step and lane: drop a module that picks them out of a tuple"
            " of a layer, or the last step"
        )
    return y, after


def adapter_for(module: nn.Module, base: Convention, name: str = "") -> Adapter:
    """The adapter of a module before its first inputs."""
    if base != Convention(batch_first=base.batch_first):
        return UnknownAdapter(module, base)
    kind: Any = type(module)
    # not the forward of a subclass
    home = getattr(kind.forward, "__module__", None) or ""  # of a class without a file
    if isinstance(module, RECURRENT) and home.startswith(("torch.nn.", "throughtime.nn.")):
        if getattr(module, "bidirectional", False):
            raise bidirectional_error(name or type(module).__name__)
        return LayerAdapter(module)
    if kind is Standardise:  # what it has counted is its state
        adapter: Any = Adapter(module)
        adapter.initial_state, adapter.run = module.initial_state, module
        return adapter
    is_chain = isinstance(module, nn.Sequential) and kind.forward is nn.Sequential.forward
    if is_chain or kind is Difference:
        links: dict[str, Adapter] = {}
        # named_children leaves out the second position of a module
        for key, child in vars(module)["_modules"].items():
            is_stateless = all(
                type(m).__module__.startswith(("torch.", Affine.__module__))
                and not isinstance(m, (*RECURRENT, Standardise, Difference))
                for m in child.modules()
            )
            links[key] = StatelessAdapter(child) if is_stateless else adapter_for(child, base, key)
        return ChainAdapter(module, links)
    return UnknownAdapter(module, base)


def prepared(adapter: Adapter, x: Tensor, steps: int = 0, link: str = "") -> Adapter:
    """The adapter of a module that trials have measured with example inputs `(T, B, ...)`.

    Args:
        adapter: known or unknown.
        x: example inputs.
        steps: of the chunks of the stream; those of the examples if they are more.
        link: the name of the module in an nn.Sequential. It may have no state there.

    Raises:
        ModelError: no way of calling the module obeys the laws.
    """
    steps = max(steps, len(x))
    if isinstance(adapter, ChainAdapter):
        return _prepared_chain(adapter, x, steps)
    if adapter.base is None or (link and type(adapter.module) in STEPWISE):
        return adapter
    search = Search(adapter.module, x, adapter.base, steps, is_link=bool(link))
    convention = search.find()
    if convention is None or len(search.choices) > 1:
        raise refusal(search, convention, link)
    if link and not (convention.lanes.dims or convention.context):
        return StatelessAdapter(adapter.module)
    if isinstance(adapter, ModuleAdapter):
        adapter.close()
    after = ModuleAdapter(adapter.module, convention, x)
    after.base = adapter.base
    if x.shape[1] > 1:
        after.initial_state(x.shape[1])  # refused where it takes one lane
    return after


def _prepared_chain(chain: ChainAdapter, x: Tensor, steps: int) -> ChainAdapter:
    """A chain whose children are known, each by the outputs of those before it."""
    links, x = dict(chain.links), sample_inputs(x, LANES, weight=weight_of(chain.module))
    for name, before in chain.links.items():
        with quiet(x.device):
            links[name] = link = prepared(before, x, steps, name)
            snapshot = Snapshot(link.module)
            try:
                set_modes(link.module, ())
                with torch.no_grad():
                    x, _ = link_outputs(name, link, x, link.initial_state(LANES))
            finally:
                snapshot.restore()
    return chain if links == chain.links else ChainAdapter(chain.module, links)
