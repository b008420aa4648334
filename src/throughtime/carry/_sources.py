"""Where a module may keep its state, and where that may start: proposals, the usual ones first.

Shapes: `T` steps, `B` lanes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor, nn

from throughtime.carry._adapter import is_state
from throughtime.carry._convention import (
    ArgumentState,
    Call,
    InputLayout,
    InternalState,
    ResetArgument,
    Start,
)
from throughtime.carry._names import (
    RESTARTS,
    STATE_FLAGS,
    initial_methods,
    is_method,
    names_state,
    reset_methods,
)
from throughtime.carry._ports import (
    RECURRENT,
    Key,
    PartCall,
    TorchPort,
    attributes,
    changed_attributes,
    flow_ports,
    inside,
    mirrors,
    observe,
    parameter_ports,
    torch_ports,
)
from throughtime.carry._subject import CALL_ERRORS, Subject

PORT_STARTS = (Start("zeros"), Start("captured"))
START_PAIRS = (("init_hidden", "init_cell"), ("init_h", "init_c"), ("init_hidden", "init_c"))


@dataclass(frozen=True)
class Proposal:
    """Where the state may be, how a recording may start, and what else is passed."""

    source: ArgumentState | InternalState
    starts: tuple[Start, ...]
    flags: tuple[str, ...] = ()
    resets: ResetArgument | None = None


def proposals(subject: Subject, call: Call, layout: InputLayout, x: Tensor) -> Iterator[Proposal]:
    """Proposals for one way of passing inputs.

    Args:
        subject: the module.
        call: what one call of it runs.
        layout: of the inputs.
        x: inputs of a trial.
    """
    hint = subject.hints.state
    parameters = subject.parameters
    required = [p.name for p in parameters if p.default is p.empty and p.name not in RESTARTS]
    optional = [p for p in parameters if p.default is not p.empty]
    named = [p.name for p in optional if names_state(p.name)]
    flags = tuple(p.name for p in optional if p.name in STATE_FLAGS)
    arguments: list[tuple[str, ...]] = [tuple(named)] if len(named) > 1 else []
    arguments += [(name,) for name in named]
    if required:
        arguments = [tuple(required)]
    is_argument = hint is not None and any(p.name == hint for p in parameters)
    if is_argument and hint is not None:
        arguments = [(hint,)]
    for resets in _reset_arguments(subject):
        for names, passed in product(arguments, dict.fromkeys((flags, ()))):
            yield Proposal(
                ArgumentState(names, ()), _argument_starts(subject, names), passed, resets
            )
        if not is_argument and not required:
            yield from _internal(subject, call, layout, x, resets)
        if hint is None and not required:
            others = [p.name for p in optional if p.default is None and p.name not in named]
            for name in others:
                starts = _argument_starts(subject, (name,))
                yield Proposal(ArgumentState((name,), ()), starts, flags, resets)
        if hint is None and not parameters and subject.hints.inputs is None:
            yield Proposal(ArgumentState((), ()), _argument_starts(subject, ()), (), resets)


def _reset_arguments(subject: Subject) -> list[ResetArgument | None]:
    """Forms of a parameter that restarts lanes, the likely polarity first."""
    restart = next((p for p in subject.parameters if p.name in RESTARTS), None)
    if restart is None or not (restart.default is restart.empty or restart.name == "resets"):
        return [None]
    if restart.name == "resets":
        return [ResetArgument("resets")]
    dtype = torch.get_default_dtype() if subject.weight is None else subject.weight.dtype
    inverted = RESTARTS[restart.name]
    return [
        ResetArgument(restart.name, turned, kind, column)
        for turned in (inverted, not inverted)
        for kind, column in product((dtype, torch.bool), (False, True))
    ]


def _argument_starts(subject: Subject, names: tuple[str, ...]) -> tuple[Start, ...]:
    """Where a state in an argument may start."""
    starts = [Start("method", (name,)) for name in initial_methods(subject.module)]
    starts += [
        Start("method", pair)
        for pair in START_PAIRS
        if len(names) == 2 and all(is_method(subject.module, name) for name in pair)
    ]
    starts += [Start("zeros"), Start("tensors")]
    layers = {n: m for n, m in subject.module.named_modules() if n and isinstance(m, RECURRENT)}
    if len(layers) == 1:
        ((name, layer),) = layers.items()
        is_layer = isinstance(layer, nn.RNNBase)
        starts.append(Start("captured", ports={name: TorchPort(is_layer)}))
        starts.append(Start("zeros", template=name))
        if is_layer:
            starts.append(Start("zeros", template=f"{name}#rows"))
            starts.append(Start("zeros", template=f"{name}#lanes"))
    return (*starts, Start("zeros", template="scalar"))


def _internal(
    subject: Subject, call: Call, layout: InputLayout, x: Tensor, resets: ResetArgument | None
) -> Iterator[Proposal]:
    """States in submodules and attributes, from what one call of the module does."""
    x = x[:1] if call == "step" else x
    before, calls, after = _observed(subject, layout, x, resets)
    hint = subject.hints.state
    if hint is not None:
        keys = tuple(key for key in after if hint in (key[1], ".".join(filter(None, key))))
        yield Proposal(InternalState({}, keys), _attribute_starts(subject), (), resets)
        return
    changed = changed_attributes(before, after)
    held = tuple(key for key in changed if is_state(after[key]))
    ports = torch_ports(subject.module, calls, len(x))
    if calls is None:
        # the module holds a state for other lanes, or needs a reset before its first call
        held = tuple(key for key in before if names_state(key[1].strip("_")))
        if ports:
            start = Start("zeros", template="layers")
            yield Proposal(InternalState(ports, (), held), (start,), (), resets)
        held = tuple(key for key in held if before[key] is None or is_state(before[key]))
    elif ports:
        source = InternalState(ports, (), mirrors(ports, calls, after))
        yield Proposal(source, PORT_STARTS, (), resets)
    for keys in dict.fromkeys((held, *((key,) for key in held))) if held else ():
        yield Proposal(InternalState({}, keys), _attribute_starts(subject), (), resets)
    if calls is None:
        return
    cells = {
        name: port
        for name, port in flow_ports(calls, len(x)).items()
        if not any(inside(name, other) or inside(other, name) for other in ports)
    }
    if cells:
        both = {**ports, **cells}
        source = InternalState(both, (), mirrors(both, calls, after))
        yield Proposal(source, PORT_STARTS, (), resets)
    parts = {n: p for n, p in parameter_ports(subject.module, calls).items() if n not in cells}
    if parts:
        outer = {n: p for n, p in ports.items() if not any(inside(n, part) for part in parts)}
        both = {**outer, **parts}
        source = InternalState(both, (), mirrors(both, calls, after))
        yield Proposal(source, PORT_STARTS, (), resets)
    if ports and held:
        yield Proposal(InternalState(ports, held), (Start("captured"),), (), resets)


def _observed(
    subject: Subject, layout: InputLayout, x: Tensor, resets: ResetArgument | None
) -> tuple[dict[Key, object], dict[str, list[PartCall]] | None, dict[Key, object]]:
    """Attributes before and after one call of the module, and the calls of its submodules.

    The calls are None if the module could not be called.
    """
    subject.reset()
    before = attributes(subject.module)
    kwargs = {} if resets is None else {resets.name: resets.value(x, None, layout)}
    calls = None
    try:
        with torch.no_grad():
            calls = observe(
                subject.module, lambda: subject.forward(layout.arrange(x), kwargs, x.shape[1])
            )
    except CALL_ERRORS as error:
        subject.note(None, None, error)
    after = attributes(subject.module)
    subject.reset()
    return before, calls, after


def _attribute_starts(subject: Subject) -> tuple[Start, ...]:
    methods = dict.fromkeys(reset_methods(subject.module))
    return (*(Start("method", (name,)) for name in methods), Start("zeros"), Start("captured"))
