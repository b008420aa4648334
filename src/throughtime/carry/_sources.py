"""Where a module may keep its state, and where that may start: proposals, the usual ones first.

Shapes: `T` steps, `B` lanes.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor, nn

from throughtime.carry._adapter import is_state
from throughtime.carry._convention import (
    Convention,
    ResetArgument,
    Start,
    StateSource,
    call_start,
    key_name,
)
from throughtime.carry._names import (
    RESTARTS,
    STATE_FLAGS,
    initial_methods,
    is_method,
    names_state,
    preparing_methods,
    reset_methods,
)
from throughtime.carry._ports import (
    CELL,
    LAYER,
    RECURRENT,
    Key,
    PartCall,
    Port,
    attributes,
    changed_attributes,
    flow_ports,
    mirrors,
    observe,
    parameter_ports,
    torch_ports,
    within,
)
from throughtime.carry._subject import CALL_ERRORS, Subject

START_PAIRS = (("init_hidden", "init_cell"), ("init_h", "init_c"), ("init_hidden", "init_c"))


def proposals(subject: Subject, base: Convention, x: Tensor) -> Iterator[Convention]:
    """Conventions with a source of the state and a start.

    Args:
        subject: the module.
        base: the call and the layout of its inputs.
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
    others = [p.name for p in optional if p.default is None and p.name not in named]
    unnamed = ([tuple(others)] if len(others) > 1 else []) + [(name,) for name in others]
    for resets in _reset_arguments(subject):
        plain = replace(base, resets=resets)
        asking = replace(plain, flags=flags)
        for names, form in product(arguments, (asking, plain) if flags else (plain,)):
            yield from _in_arguments(subject, form, names)
        if not is_argument and not required:
            yield from _internal(subject, plain, x)
        if hint is None and not required:
            for names in unnamed:
                yield from _in_arguments(subject, asking, names)
        if hint is None and not parameters and subject.hints.inputs is None:
            yield from _in_arguments(subject, plain, ())


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


def _in_arguments(
    subject: Subject, base: Convention, names: tuple[str, ...]
) -> Iterator[Convention]:
    """A state in arguments, with each way in which it may start."""
    module, plain = subject.module, replace(base, source=StateSource(names))
    starts = [Start("method", (name,)) for name in initial_methods(module)]
    starts += [
        Start("method", pair)
        for pair in START_PAIRS
        if len(names) == 2 and all(is_method(module, name) for name in pair)
    ]
    yield from _started(subject, plain, [*starts, Start("zeros"), Start("tensors")])
    if subject.hints.start is not None:
        return
    layers = {n: m for n, m in module.named_modules() if n and isinstance(m, RECURRENT)}
    forms: list[str] = []
    for name, layer in layers.items() if len(layers) == 1 else ():
        is_layer = isinstance(layer, nn.RNNBase)
        shown = StateSource(names, ports={name: LAYER if is_layer else CELL})
        yield replace(base, source=shown, start=Start("captured"))
        forms = [name, *([f"{name}#rows", f"{name}#lanes"] if is_layer else [])]
    for form in (*forms, "scalar"):
        yield replace(plain, start=Start("zeros", template=form))


def _started(subject: Subject, base: Convention, starts: Iterable[Start]) -> Iterator[Convention]:
    """A convention with each start, or with that of the user."""
    function = subject.hints.start
    for start in starts if function is None else [Start("function", function=function)]:
        yield replace(base, start=start)


def _internal(subject: Subject, base: Convention, x: Tensor) -> Iterator[Convention]:
    """States in submodules and attributes, from what one call of the module does."""
    x = x[:1] if base.call == "step" else x
    before, calls, after, prepared = _observed(subject, base, x)
    methods = dict.fromkeys(reset_methods(subject.module)) | dict.fromkeys(prepared)
    starts = [*(Start("method", (name,)) for name in methods), Start("zeros"), Start("captured")]
    hint = subject.hints.state
    if hint is not None:
        keys = tuple(key for key in after if hint in (key[1], key_name(key)))
        sources = [(StateSource(attributes=keys), starts)]
    elif calls is None:
        sources = _sources_for_other_lanes(subject, before, starts)
    else:
        changed = changed_attributes(before, after)
        held = tuple(k for k in changed if is_state(after[k]) and (k in before or not prepared))
        ports, *others = _ports_of(subject.module, calls, len(x))
        inside = [Start("zeros"), Start("captured")]
        choices = [
            (StateSource(ports=choice, scratch=mirrors(choice, calls, after)), inside)
            for choice in (ports, *others)
            if choice
        ]
        count = bool(ports)
        sources = [*choices[:count], *_in_attributes(held, starts), *choices[count:]]
        if ports and held:
            sources.append((StateSource(ports=ports, attributes=held), [Start("captured")]))
    for source, own in sources:
        yield from _started(subject, replace(base, source=source), own)


def _in_attributes(
    held: tuple[Key, ...], starts: list[Start]
) -> list[tuple[StateSource, list[Start]]]:
    """A state in some attributes together, or in one of them."""
    choices = dict.fromkeys((held, *((key,) for key in held))) if held else ()
    return [(StateSource(attributes=keys), starts) for keys in choices]


def _sources_for_other_lanes(
    subject: Subject, before: dict[Key, object], starts: list[Start]
) -> list[tuple[StateSource, list[Start]]]:
    """The sources of a module that holds a state for other lanes than those of the trial."""
    ports = torch_ports(subject.module, None, 0)
    held = tuple(key for key in before if names_state(key[1].strip("_")))
    states = tuple(key for key in held if before[key] is None or is_state(before[key]))
    layers = [(StateSource(ports=ports, scratch=held), [Start("zeros", template="layers")])]
    return [*(layers if ports else []), *_in_attributes(states, starts)]


def _ports_of(
    module: nn.Module, calls: dict[str, list[PartCall]], steps: int
) -> Iterator[dict[str, Port]]:
    """Recurrent submodules: torch's; those and cells of the user's; or parts of the user's."""
    ports = torch_ports(module, calls, steps)
    yield ports
    cells = {
        name: port
        for name, port in flow_ports(calls, steps).items()
        if not any(within(name, other) or within(other, name) for other in ports)
    }
    if cells:
        yield {**ports, **cells}
    parts = {n: p for n, p in parameter_ports(module, calls).items() if n not in cells}
    if parts:
        outer = {n: p for n, p in ports.items() if not any(within(n, part) for part in parts)}
        yield {**outer, **parts}


def _observed(
    subject: Subject, base: Convention, x: Tensor
) -> tuple[dict[Key, object], dict[str, list[PartCall]] | None, dict[Key, object], tuple[str, ...]]:
    """What one call of the module changes, and what its submodules did.

    Returns:
        Attributes before and after the call; the calls of submodules, None if the module could not
        be called; the method that had to be called before, if there is one.
    """
    layout, resets = base.inputs, base.resets
    kwargs = {} if resets is None else {resets.name: resets.value(x, None, layout)}
    args, lanes = layout.arrange(x), x.shape[1]
    first = attributes(subject.module)
    for prepared in ((), *((name,) for name in preparing_methods(subject.module))):
        subject.reset()
        try:
            with torch.no_grad():
                for name in prepared:
                    call_start(subject.module, name, lanes, args[0])
                before = attributes(subject.module)
                calls = observe(subject.module, lambda: subject.forward(args, kwargs, lanes))
            return before, calls, attributes(subject.module), prepared
        except CALL_ERRORS as error:
            if not prepared:
                subject.note(None, None, error)
        finally:
            subject.reset()
    return first, None, first, ()
