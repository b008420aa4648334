"""Any recurrent module as `forward(x, state) -> (y, state)`, with resets applied exactly.

Inside throughtime time comes first, and every state leaf has its lanes first; an adapter converts
to and from the layout of the module. A reset splits the forward call: the steps before it run, the
marked lanes get the initial state, then the steps after it run. This is exact for every module
whose chunked forward equals its whole forward, and no gradient crosses a reset. Layers of `tt.nn`
and chains of them apply resets themselves: the results are the same, for the price of one call.

Shapes: `T` steps, `B` lanes, `D` input features, `C` outputs.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from throughtime import state as trees
from throughtime._device import CUDNN_STEPS, cudnn_rules
from throughtime._metadata import reset_positions
from throughtime.carry._calls import Adapter, Convention, Ran
from throughtime.carry._inside import RECURRENT, is_sharded
from throughtime.carry._laws import MISFIT_ERRORS
from throughtime.carry._layout import shapes_of
from throughtime.carry.layers import adapter_for, prepared
from throughtime.errors import DataError, ModelError, StateError, ThroughtimeError
from throughtime.nn import fuse
from throughtime.nn.affine import Difference
from throughtime.state import State

WRAPPED = "module."  # the child of a carried net, and that of DistributedDataParallel
# By name: importing FullyShardedDataParallel takes longer than all of throughtime.
WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel")


class Carried(nn.Module):
    """A module whose state is an argument and a result: `y, state = net(x, state)`.

    Made by `tt.carry`. Its parameters are those of `module`, which stays usable by itself. Its
    `state_dict` has the names of `module`: each loads what the other saved.

    Attributes:
        module: the module that was carried, unchanged.
        adapter: how the module is called, and where its state is.

    Example:
        >>> import torch, throughtime as tt
        >>> net = tt.carry(torch.nn.GRU(3, 8))
        >>> y, state = net(torch.zeros(5, 2, 3), net.initial_state(lanes=2))
        >>> y.shape, tt.state.lanes(state)
        (torch.Size([5, 2, 8]), 2)
    """

    _fused_net: object = None  # of gradient/_fused.py; False for a net that it cannot update

    def __init__(self, module: nn.Module, adapter: Adapter) -> None:
        super().__init__()
        self.module, self.adapter = module, adapter
        self._tried = set[Any]()  # kinds of inputs
        self.register_load_state_dict_pre_hook(own_names)

    def __setattr__(self, name: str, value: Any) -> None:
        # of functional_call, whose names are those of named_parameters: this would change nothing
        if isinstance(value, Tensor) and isinstance(getattr(self.module, name, None), Tensor):
            raise ModelError(
                f"'{name}' is a tensor of the carried module: write net.module.{name}, and give"
                f" torch.func.functional_call the names of net.named_parameters(), 'module.{name}'"
            )
        super().__setattr__(name, value)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """That of the module."""
        return self.module.state_dict(*args, **kwargs)

    def _fqn_modifiers(self) -> dict[str, str]:
        """What `torch.distributed.checkpoint` asks: the part of a path that saved names omit."""
        module = self.module
        return dict.fromkeys((*module._parameters, *module._buffers, *module._modules), "module")

    def initial_state(self, lanes: int, *, like: Tensor | None = None) -> State:
        """The state that enters the first step of a recording, for `lanes` lanes.

        Args:
            lanes: B.
            like: inputs `(T, B, D)`; needed before the first chunk by a module of the user's:
                trials show what its state is.

        Returns:
            A state tree, lanes first. It has a graph if the module learns its initial state.

        Raises:
            StateError: `like` is needed and missing.
            ModelError: no way of calling the module obeys the laws of carrying a state.
        """
        if like is not None:
            self.prepare(like)
        return self.adapter.initial_state(lanes)

    def prepare(self, x: Tensor) -> None:
        """Find out how the module is called, and test that, unless this has been done.

        Args:
            x: example inputs `(T, B, ...)`.

        Raises:
            DataError: there are no steps.
            ModelError: no way of calling the module obeys the laws of carrying a state.
        """
        shape = x.shape  # a slice of it takes half of a microsecond in every call
        if not shape[0]:  # len(x) would fix the steps of an exported program
            raise DataError(f"the chunk {tuple(shape)} has no steps, expected one at least")
        features = shape[2] if len(shape) == 3 else shape[2:]
        kind = x.is_floating_point(), features, self.adapter.module.training
        if kind in self._tried or not x.numel():
            return
        if torch.compiler.is_compiling() or is_sharded(self.module):
            return  # no trials; what stands between known layers is taken as it is
        try:
            self.adapter = prepared(self.adapter, x)
        except MISFIT_ERRORS as error:
            self._explain(error, x)
            raise
        self._tried |= {kind, (*kind[:2], False)}  # in training mode, both modes are measured

    def leaf_names(self, state: State) -> list[str]:
        """A name for each leaf of a state, in order: `lstm.h`, `lstm.c`."""
        known, prefix = {"module": "state"}, WRAPPED * (1 + isinstance(self.module, Difference))
        for name, part in self.named_modules():
            if isinstance(part, RECURRENT):
                known |= {name: f"{name}.h", f"{name}.0": f"{name}.h", f"{name}.1": f"{name}.c"}
        return [known.get(n, n).removeprefix(prefix) for n in shapes_of({"module": state})]

    def forward(
        self, x: Tensor, state: State = None, resets: Tensor | None = None
    ) -> tuple[Any, State]:
        """Outputs for every step, and the state after the last one.

        Args:
            x: `(T, B, D)`, or `(T, B)` integers for a module that embeds them.
            state: the state entering the first step, one row per lane.
            resets: `(T, B)` bool, true where the state entering the step is the initial state. On
                a device they are read, which waits for it; those of a chunk are not.

        Returns:
            `y` `(T, B, C)`, and the state after step T; new tensors, `state` is not changed. Of
            several outputs `y` is a tuple or a dict.

        Raises:
            StateError: a state of another structure or number of lanes.
            DataError: resets of another shape, no steps, or no dimension for lanes.
            ModelError: the module broke its contract.
        """
        if x.dim() == (2 if x.is_floating_point() else 1):
            raise DataError(
                f"the inputs {tuple(x.shape)} have no lanes, expected (T, B, ...): for one lane"
                " write x.unsqueeze(1)"
            )
        self.prepare(x)
        lanes = x.shape[1]
        if state is None:
            raise StateError(
                "the state is None: write y, state = net(x, net.initial_state"
                f"(lanes={lanes}, like=x)), then net(x, state)"
            )
        for leaf in trees.tensors(state):
            if leaf.shape[:1] != (lanes,):
                raise StateError(
                    f"the state has the leaves {shapes_of(state)}, expected {lanes} lanes, those of"
                    " the chunk, in the first dimension of each: take tt.state.select(state, lanes)"
                    f" or net.initial_state(lanes={lanes})"
                )
        if resets is not None and resets.shape != x.shape[:2]:
            raise DataError(
                f"resets have shape {tuple(resets.shape)}, expected {tuple(x.shape[:2])}: one flag"
                " for each step and lane"
            )
        adapter = self.adapter
        try:
            flags = [] if resets is None else [resets]
            split = (not x.is_cpu and cudnn_rules(x)) or (flags and not adapter.takes_resets)
            y, after = (self._run_split if split else adapter.run)(x, state, *flags)
        except MISFIT_ERRORS as error:
            self._explain(error, x, state)
            raise
        if torch.is_autocast_enabled(x.device.type):  # bfloat16 loses bits over hours
            after = trees.map_leaves(lambda new, old: new.to(old.dtype), after, state)
        return (y if adapter.unpack is None else adapter.unpack(y)), after

    def _run_split(self, x: Tensor, state: State, *resets: Tensor) -> Ran:
        """One call for each segment between resets, and for at most `CUDNN_STEPS` with cuDNN."""
        steps = x.shape[0]
        reset_steps = {step for flags in resets for step in reset_positions(flags)}
        limit = CUDNN_STEPS if cudnn_rules(x) else steps
        outputs: list[Tensor] = []
        for first, last in pairwise([*sorted({0, *reset_steps}), steps]):
            if first in reset_steps:
                start = self.initial_state(x.shape[1], like=x)
                state = trees.reset(state, start, resets[0][first])
            for part in x[first:last].split(limit):
                y, state = self.adapter.run(part, state)
                outputs.append(y)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs), state

    def _explain(self, error: Exception, x: Tensor, state: State = None) -> None:
        """Add what explains an error of the module: inputs and weights, or another state structure.

        Raises:
            StateError: the state has other leaves than this net's.
        """
        if isinstance(error, ThroughtimeError):
            return
        if state is not None:
            expected = shapes_of(self.initial_state(x.shape[1], like=x))
            if expected != shapes_of(state):
                raise StateError(
                    f"the state has the leaves {shapes_of(state)}, this net carries {expected},"
                    f" lanes first; start from net.initial_state(lanes={x.shape[1]})"
                ) from error
        weight = next(self.module.parameters(), x)
        error.add_note(
            f"throughtime: the inputs are {tuple(x.shape)}, {x.dtype} on {x.device}, the first"
            f" weight {tuple(weight.shape)}, {weight.dtype} on {weight.device}. If type or device"
            f" differ, convert the inputs: x.to({str(weight.device)!r}), tt.Stream(...,"
            f" dtype={weight.dtype}) or tt.predict(..., dtype={weight.dtype})."
        )


def own_names(net: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Add `module.` to the names of the module; a hook of torch before loading.

    A parameter `weight` of the module is `module.weight` in the tree of modules and `weight` in a
    `state_dict`, so that a carried net and the plain module load each other. Names that have it
    already are those of `named_parameters`, or of DistributedDataParallel.
    """
    names = [name.removeprefix(prefix) for name in state_dict if name.startswith(prefix)]
    expected = net.get_submodule("module").state_dict().keys()
    is_wrapped = expected.isdisjoint(names) and any(WRAPPED + n in names for n in expected)
    if not is_wrapped:
        state_dict.update({prefix + WRAPPED + n: state_dict.pop(prefix + n) for n in names})


def pack(y: Any) -> Tensor:
    """Several outputs `(..., C)` side by side, as one tensor; a tensor as it is."""
    if isinstance(y, Tensor):
        return y
    items = y.values() if isinstance(y, dict) else y
    return torch.cat([item.reshape(*item.shape[:2], -1) for item in items], -1)


def carry(
    module: nn.Module,
    x: Tensor | None = None,
    *,
    inputs: Callable[[Tensor], Any] | None = None,
    output: int | str | tuple[int | str, ...] | list[Any] | None = None,
    start: State | Callable[..., State] = None,
    call: Callable[..., Any] | None = None,
    context: int = 0,
    batch_first: bool | None = None,
    fused: bool = False,
) -> Carried:
    """The module with its state made explicit: `y, state = net(x, state)`.

    Takes a recurrent module as its author wrote it: layers and cells of torch.nn, an
    `nn.Sequential`, a module that maps `(x, state)` to `(y, state)`, one that keeps its state in
    layers of torch.nn inside or in attributes, one that takes a single step, one that returns the
    last output only. How it is called is found by trials at the first inputs, on a copy and on a
    few steps: a way of calling it is accepted only if it obeys every law of carrying a state
    (`throughtime.testing.check_carry`).

    Args:
        module: shared, not copied.
        x: example inputs `(T, B, ...)`; the trials run now instead of at the first chunk.
        inputs: maps inputs, time first, to what the module takes: a tensor, or a tuple of
            arguments.
        output: index or key of the outputs, where the module returns several tensors; a tuple of
            them for a tensor in a nested result; a list of these for several outputs, or "all" of
            them but the state. Several are a dict, if their keys are different strings, else a
            tuple; outputs of several types get the widest of them.
        start: the state before a recording in the module's layout, of all lanes, of one or without
            a dimension for lanes; or a function of the number of lanes, or of the module and that
            number, which returns it.
        call: how the module is called, as a function of the module, its inputs (a chunk `(T, B,
            ...)`, or a step `(B, ...)`) and the state, which returns outputs and the next state.
        context: past steps that precede every chunk: `(kernel_size - 1) * dilation` of a
            convolution over time.
        batch_first: whether the module takes `(B, T, D)`. A carried module is always time first.
        fused: replace the layers of torch.nn inside by those of `tt.nn` first, as
            `tt.fuse(module)` does: faster on a CPU, equal to rounding.

    Returns:
        A `Carried`, which shares the parameters of `module`: `y, state = net(x, state)`.

    Raises:
        ModelError: no way of calling the module obeys the laws; the message names the law, the part
            that breaks it and the line to write. Also for a wrapper for several devices such as
            DistributedDataParallel.

    Cost: the trials take 0.05 to 0.3 s for a small net, once, most of it for gradients over a
        chunk, and three copies of the module.

    Example:
        >>> import torch, throughtime as tt
        >>> net = tt.carry(torch.nn.LSTM(3, 8))
        >>> y, state = net(torch.zeros(5, 2, 3), net.initial_state(lanes=2))
        >>> y.shape
        torch.Size([5, 2, 8])
    """
    if not isinstance(module, nn.Module) or isinstance(module, torch.jit.ScriptModule):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ModelError(
            f"tt.carry got {module!r:.200}, expected a torch.nn.Module, before it is scripted:"
            " tt.carry(Net()), with def forward(self, x, state), which returns (y, state)"
        )
    if fused:
        fuse(module)
    if isinstance(module, Carried):
        return module
    refuse_wrappers(module)
    if isinstance(call, str):
        raise ModelError(
            f"write the call: tt.carry(module, call=lambda m, x, state: m.{call}(x, state),"
            " start=lambda m, lanes: ...), which returns (outputs, next state)"
        )
    begin = None if start is None else (start,)
    base = Convention(inputs, output, call, context, batch_first, begin)
    net = Carried(module, adapter_for(module, base))
    if x is not None:
        net.prepare(x)
    return net


def require_carried(net: nn.Module) -> Carried:
    """The net, if `tt.carry` made it.

    Raises:
        ModelError: it did not; the message has the line to write.
    """
    if isinstance(net, Carried):
        return net
    if isinstance(net, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        refuse_wrappers(net)
    raise ModelError(
        f"the net is a {type(net).__name__}; make its state explicit first: net = tt.carry(module)"
    )


def device_of(net: nn.Module) -> torch.device:
    """The device of the weights; the CPU without any."""
    return next((weight.device for weight in net.parameters()), torch.device("cpu"))


def dtype_of(net: nn.Module) -> torch.dtype | None:
    """The type of the weights, float32 or float64; `None` for others, and where they differ."""
    types = {weight.dtype for weight in net.parameters() if weight.is_floating_point()}
    return types.pop() if len(types) == 1 and types <= {torch.float32, torch.float64} else None


@contextmanager
def running(net: nn.Module) -> Generator[None]:
    """Evaluation mode without a graph; each module of the net gets its own mode back."""
    training = [m for m in net.modules() if m.training]
    try:
        for m in training:
            m.training = False
        with torch.no_grad():
            yield
    finally:
        for m in training:
            m.training = True


def refuse_wrappers(net: nn.Module) -> None:
    """Refuse torch's wrappers for several devices.

    Their gradients are not those of one net on one stream.
    """
    for name, module in net.named_modules():
        for base in type(module).__mro__:
            if base.__name__ in WRAPPERS and base.__module__.startswith("torch."):
                raise ModelError(
                    f"'{name or 'net'}' is wrapped in {base.__name__}, which adds gradients up at"
                    " every backward pass; tt.updates does so once per update (torchrun"
                    " --nproc-per-node N). Hand the bare module: net = tt.carry(wrapped.module)"
                )
