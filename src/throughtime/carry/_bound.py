"""A module and the convention by which it is called.

Shapes: `T` steps, `B` lanes, `D` input features.
"""

import inspect
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from throughtime import state as trees
from throughtime._device import fork_rng
from throughtime.carry._adapter import Adapter, ResetsUnsupportedError
from throughtime.carry._convention import (
    MISSING,
    Convention,
    InputLayout,
    MisfitError,
    attribute,
    call_start,
    key_name,
    misfit_error,
    set_attribute,
    widen,
)
from throughtime.carry._names import parameters_of
from throughtime.carry._ports import Arguments, Key, PortCall, PortHooks, is_torch
from throughtime.errors import ModelError, StateError
from throughtime.state import State

PAST = "past"  # the key of the steps before a chunk, where a module gets such


class BoundModule(Adapter):
    """Calls a module by a convention.

    Args:
        module: shared, not copied. Hooks are registered on its recurrent submodules.
        convention: what trials found.
        example: inputs of one step and lane, `(1, 1, ...)`.
    """

    def __init__(self, module: nn.Module, convention: Convention, example: Tensor) -> None:
        self.module, self.convention = module, convention
        self.example = example
        source = convention.source
        self._hooks = PortHooks(module, source.ports) if source.ports else None
        self._single = convention.single
        self._sets_attributes = bool(convention.sizes or source.attributes or source.scratch)

    def release(self) -> None:
        """Remove the hooks."""
        if self._hooks is not None:
            self._hooks.remove()

    def takes_resets(self) -> bool:
        resets = self.convention.resets
        if resets is not None:
            return resets.applied
        return self._single and self._hooks is not None and self._hooks.apply_resets()

    def forward_arguments(self, x: Tensor, state: State) -> tuple[Any, ...] | None:
        c = self.convention
        plain = InputLayout(c.inputs.order)
        if c.call != "chunk" or c.inputs != plain or plain.order not in ("TB", "BT"):
            return None
        if c.outputs.order != plain.order or c.inputs.transform is not None:
            return None
        if c.flags or c.sizes or c.resets or c.context or c.method != "forward" or c.input_name:
            return None
        if c.outputs.several:
            return None
        (arranged,) = c.inputs.arrange(x)
        source = c.source
        if source.arguments is None:
            own = not source.attributes and not source.scratch and c.outputs.path == ()
            return (arranged,) if own else None
        second = [*inspect.signature(self.module.forward).parameters][1:2] == [*source.arguments]
        is_pair = (c.outputs.path, source.result) == ((0,), (1,))
        return (arranged, state) if second and is_pair else None

    def read_outputs(self, result: Any, x: Tensor) -> Tensor:
        layout = replace(self.convention.outputs, path=())
        try:
            return layout.read(result, x.shape[0], x.shape[1])
        except MisfitError as error:
            raise misfit_error(self.module, error) from None

    def starts_from_zeros(self) -> bool:
        return self.convention.start.kind == "zeros"

    def leaf_names(self, state: State) -> list[str]:
        source = self.convention.source
        ports = source.ports if source.arguments is None else {}
        names: list[str] = []
        for path, _ in trees.leaves(state):
            name, _, leaf = path.rpartition(".")
            if is_torch(ports.get(path)):
                names.append(f"{path}.h")
            elif is_torch(ports.get(name)):
                names.append(f"{name}.{'hc'[int(leaf)]}")
            else:
                names.append(path)
        return names

    def initial_state(self, lanes: int, like: Tensor | None) -> State:
        convention = self.convention
        if convention.one_lane and lanes != 1:
            raise ModelError(
                f"{type(self.module).__name__} computes one lane at a time, got {lanes}. Use"
                " tt.Stream(..., lanes=1). If it has a batch dimension, name its order:"
                " tt.carry(module, batch_first=True) or batch_first=False"
            )
        del like
        weight = next(self.module.parameters(), None)
        if convention.start.kind == "zeros":
            state = convention.lanes.zeros(lanes, weight)
        else:
            state = convention.lanes.lanes_first(self._started(lanes))
            count = trees.lanes(state)
            if count is None:
                raise MisfitError(f"has no state in {convention.start}")
            if count != lanes:
                raise StateError(
                    f"{convention.start} gives a state of {count} lanes, expected {lanes}"
                )
        if not convention.context:
            return state
        step = torch.zeros_like(self._inputs(lanes)).transpose(0, 1)
        past = step.expand(lanes, convention.context, *step.shape[2:])
        return {PAST: past.clone(), "state": state}

    def _inputs(self, lanes: int) -> Tensor:
        """Example inputs of one step, `(1, B, ...)`, on the device of the weights."""
        example = self.example
        weight = next((p for p in self.module.parameters() if p.is_floating_point()), example)
        example = example.to(weight.device, weight.dtype if example.is_floating_point() else None)
        return example.expand(1, lanes, *example.shape[2:])

    def _started(self, lanes: int) -> State:
        """The state that the module or the user starts from, in the module's layout."""
        start, layout = self.convention.start, self.convention.lanes
        if start.function is not None:
            return start.function(lanes)
        if start.kind == "tensors":
            tensors = dict(self.module.named_parameters()) | dict(self.module.named_buffers())
            values = iter([tensors[name] for name in start.methods])
            return layout.to_module(
                trees.map_leaves(
                    lambda leaf: next(values).reshape(leaf.shape).expand(lanes, *leaf.shape[1:]),
                    layout.example,
                )
            )
        inputs = self._inputs(lanes)
        captured = start.kind == "captured"
        state = self._captured(inputs) if captured else self._start_by_methods(inputs)
        learned = {id(p) for p in self.module.parameters()}
        state = trees.map_leaves(
            lambda leaf: leaf.detach() if leaf.is_leaf and id(leaf) not in learned else leaf,
            widen(state, lanes),
        )
        weight = next((p for p in self.module.parameters() if p.is_floating_point()), None)
        return layout.with_weight(state, weight, lanes)

    def _captured(self, inputs: Tensor) -> State:
        """What the module itself starts from: its attributes, and what it passes to its layers."""
        call = self.port_call(inputs, None, None)
        if call is None:
            return self._attributes()
        with fork_rng(inputs.device):
            self.invoke(inputs, None, None, call)
        inside = self.convention.source.arguments is None
        return call.passed | self._attributes() if inside else next(iter(call.passed.values()))

    def _attributes(self) -> dict[str, Any]:
        """The attributes that hold the state.

        Raises:
            MisfitError: the module has not made one yet.
        """
        keys = self.convention.source.attributes
        values = {key_name(key): attribute(self.module, key) for key in keys}
        for name, value in values.items():
            if value is MISSING:
                raise MisfitError(f"has no attribute {name} before its first call")
        return values

    def _start_by_methods(self, inputs: Tensor) -> State:
        """The state that the module's own methods make."""
        methods, source = self.convention.start.methods, self.convention.source
        lanes, arranged = inputs.shape[1], self.convention.inputs.arrange(inputs)[0]
        values = {key: _copied(attribute(self.module, key)) for key in source.attributes}
        values |= dict.fromkeys(self.convention.sizes, lanes)
        saved = _set_attributes(self.module, values)
        try:
            states = [call_start(self.module, name, lanes, arranged) for name in methods]
            if source.arguments is not None:
                return states[0] if len(states) == 1 else tuple(states)
            if states[0] is not None and len(source.attributes) == 1:
                set_attribute(self.module, source.attributes[0], states[0])
            return self._attributes()
        finally:
            _set_attributes(self.module, saved)

    def first_call(self, x: Tensor) -> tuple[Any, State, bool]:
        """One call from the start of a recording, before the layout of the state is known.

        Returns:
            The result, the state after it in the module's layout, and whether each layer ran once,
            with all steps of all lanes.
        """
        context = self.convention.context
        x = torch.cat([x.new_zeros(context, *x.shape[1:]), x]) if context else x
        state = self._first_state(x)
        call = self.port_call(x, state, None)
        result, after = self.invoke(x, state, None, call)
        return result, after, call is not None and call.single

    def _first_state(self, x: Tensor) -> State:
        """The state for a first call; None lets the module start by itself."""
        start, source, lanes = self.convention.start, self.convention.source, x.shape[1]
        if start.function is not None:
            return start.function(lanes)
        if start.kind == "method":
            return widen(self._start_by_methods(x[:1]), lanes)
        if start.template is None:
            return None
        if source.arguments is None:
            return {name: self._zeros(name, lanes) for name in source.ports}
        if start.template != "scalar":
            return self._zeros(start.template, lanes)
        zeros = torch.zeros_like(next(self.module.parameters(), x).flatten()[:1])
        return zeros if len(source.arguments) == 1 else (zeros,) * len(source.arguments)

    def _zeros(self, template: str, lanes: int) -> State:
        """Zeros in the shape of a layer's state.

        After `name#rows` of one row for each lane, after `name#lanes` with the lanes first.
        """
        name, _, form = template.partition("#")
        layer = self.module.get_submodule(name)
        if isinstance(layer, nn.RNNCellBase):
            sizes, features = (lanes,), layer.hidden_size
        elif isinstance(layer, nn.RNNBase):
            rows = layer.num_layers * (1 + layer.bidirectional)
            sizes = {"rows": (lanes,), "lanes": (lanes, rows)}.get(form, (rows, lanes))
            features = layer.proj_size or layer.hidden_size
        else:
            raise MisfitError(f"'{name}' is no recurrent layer")
        h = next(layer.parameters()).new_zeros(*sizes, features)
        has_cells = isinstance(layer, (nn.LSTM, nn.LSTMCell))
        return (h, h.new_zeros(*sizes, layer.hidden_size)) if has_cells else h

    def run(self, x: Tensor, state: State, resets: Tensor | None = None) -> tuple[Tensor, State]:
        convention = self.convention
        if convention.context:
            x = torch.cat([state[PAST].transpose(0, 1), x])
            state = state["state"]
        inner = convention.lanes.to_module(state)
        if inner is state and not isinstance(state, Tensor):  # lists that the module may write into
            inner = trees.map_leaves(lambda leaf: leaf, state)
        run = self.call if convention.call in ("chunk", "every") else self._run_steps
        try:
            y, after = run(x, inner, resets)
        except MisfitError as error:
            raise misfit_error(self.module, error) from None
        except ResetsUnsupportedError:
            self._single = False
            raise
        state = convention.lanes.lanes_first(after)
        if not convention.context:
            return y, state
        return y, {PAST: x[-convention.context :].transpose(0, 1), "state": state}

    def _run_steps(self, x: Tensor, state: State, resets: Tensor | None) -> tuple[Tensor, State]:
        del resets
        outputs: list[Tensor] = []
        for step in x.split(1):
            y, state = self.call(step, state, None)
            outputs.append(y)
        return torch.cat(outputs), state

    def call(self, x: Tensor, state: State, resets: Tensor | None) -> tuple[Tensor, State]:
        """One call of the module: outputs, and the state in the module's own layout."""
        result, after = self.invoke(x, state, resets, self.port_call(x, state, resets))
        context = self.convention.context
        steps, lanes = x.shape[:2]
        if not context:
            return self.convention.outputs.read(result, steps, lanes), after
        try:  # as many outputs as inputs, or fewer by the context
            return self.convention.outputs.read(result, steps, lanes)[context:], after
        except MisfitError:
            return self.convention.outputs.read(result, steps - context, lanes), after

    def port_call(self, x: Tensor, state: State, resets: Tensor | None) -> PortCall | None:
        """What hooks do in one call; None without any, and where the state is an argument."""
        convention, hooks = self.convention, self._hooks
        if hooks is None or (convention.source.arguments is not None and state is not None):
            return None
        shape = torch.Size((x.shape[0] - convention.context, x.shape[1]))
        before: dict[str, State] = {}
        if state:
            for name in hooks.ports:  # a loop, since Python 3.11 calls a comprehension
                before[name] = state[name]
        return PortCall(hooks, before, shape, resets, convention.context, convention.every)

    def invoke(
        self, x: Tensor, state: State, resets: Tensor | None, call: PortCall | None
    ) -> tuple[Any, State]:
        """The result of the module, and the state after it; a state of None is the module's own."""
        convention, module, source = self.convention, self.module, self.convention.source
        args, kwargs = self._arguments(x, state, resets)
        forward = module if convention.method == "forward" else getattr(module, convention.method)
        values = self._attribute_values(state, x.shape[1]) if self._sets_attributes else {}
        saved = _set_attributes(module, values) if values else values
        try:
            if call is None:
                result = forward(*args, **kwargs)
            else:
                result = call.hooks.run(call, forward, args, kwargs)
            after: dict[str, State] = {}
            if call is not None:
                after = {**call.before, **call.after}
                self._single = self._single and call.single
            for key in source.attributes:
                after[key_name(key)] = attribute(module, key)
        finally:
            if saved:
                _set_attributes(module, saved)
        return result, source.next_state(result, after)

    def _arguments(self, x: Tensor, state: State, resets: Tensor | None) -> Arguments:
        """The arguments of a call."""
        convention, names = self.convention, self.convention.source.arguments
        args = convention.inputs.arrange(x)
        kwargs: dict[str, Any] = dict.fromkeys(convention.flags, True)
        if convention.resets is not None:
            kwargs[convention.resets.name] = convention.resets.value(x, resets, convention.inputs)
        if convention.input_name is not None:
            args, kwargs = (), {**kwargs, convention.input_name: args[0]}
        if names == ():
            args = ((*args, state),)
        elif names and state is None:  # what is optional has a default of its own
            forward = getattr(self.module, convention.method)
            required = {p.name for p in parameters_of(forward) if p.default is p.empty}
            kwargs.update(dict.fromkeys(required.intersection(names)))
        elif names:
            kwargs.update(zip(names, (state,) if len(names) == 1 else state, strict=True))
        return args, kwargs

    def _attribute_values(self, state: State, lanes: int) -> dict[Key, Any]:
        """The attributes that are set for a call; a state of None is the module's own."""
        source, module = self.convention.source, self.module
        values = {key: _copied(attribute(module, key)) for key in source.scratch}
        for key in source.attributes:
            own = attribute(module, key) if state is None else state[key_name(key)]
            values[key] = _copied(own)
        return values | dict.fromkeys(self.convention.sizes, lanes)


def _copied(value: Any) -> Any:
    """A value whose change in place leaves the original as it is."""
    return type(value)(value) if isinstance(value, (list, dict)) else value


def _set_attributes(module: nn.Module, values: dict[Key, Any]) -> dict[Key, Any]:
    """Set attributes of submodules; returns the values that they had."""
    saved = {key: attribute(module, key) for key in values}
    for key, value in values.items():
        set_attribute(module, key, value)
    return saved
