"""The model contract: any recurrent module as `forward(x, state) -> (y, state)`, resets applied
exactly.

Inside throughtime time comes first and every state leaf has its lanes first; the contracts below
turn what a module wants into that and back. A reset splits the forward call: the steps before it
run, the marked lanes are given the initial state, the steps after it run. So it is exact for every
module whose chunked forward equals its whole forward, and no gradient crosses it. Where every
recurrent part of a net is a layer of `tt.nn`, or a module whose forward takes `resets`, the call
stays whole: the same results, at the price of one call instead of one for each reset.

Shapes: `T` steps, `B` lanes, `D` input features, `H` hidden, `C` outputs, `L` layers.
"""

from collections.abc import Iterable
from itertools import pairwise

import torch
from torch import Tensor, nn

from throughtime import state as trees
from throughtime.carry._adapter import Contract, NotWholeError
from throughtime.carry._choose import contract_of, leaf_names
from throughtime.errors import DataError, ModelError, StateError, ThroughtimeError
from throughtime.nn import fuse
from throughtime.state import State

WRAPPERS = {  # by name: to import FullyShardedDataParallel takes longer than all of throughtime
    "DistributedDataParallel": (
        "it adds gradients up at every backward pass, counts every rank the same however many valid"
        " steps it has, and never sees the gradient of tt.Exact, which comes from"
        " torch.autograd.grad. The ranks of tt.updates add gradients up themselves, once per update"
    ),
    "FullyShardedDataParallel": (
        "it adds gradients up at every backward pass, and ranks that reset at other steps make"
        " other numbers of them. The ranks of tt.updates add gradients up themselves, once per"
        " update"
    ),
    "DataParallel": (
        "it cuts every batch up between devices, lanes from their states. Start one process for"
        " each device, torchrun --nproc-per-node N, and the ranks of tt.updates add gradients up"
        " themselves"
    ),
}
EXPLAINED = (
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
)  # what a module raises where it is given what does not fit
CUDNN_STEPS = 65_535  # cuDNN's recurrent kernels take no longer sequence (pytorch issue 133751)


class Carried(nn.Module):
    """A module whose state is an argument and a result: `y, state = net(x, state)`.

    Made by `tt.carry`. Its parameters are those of `module`, which stays usable by itself.
    """

    def __init__(self, module: nn.Module, contract: Contract) -> None:
        super().__init__()
        self.module = module
        self.contract = contract

    def initial_state(self, lanes: int, *, like: Tensor | None = None) -> State:
        """The state that enters the first step of a recording, for `lanes` lanes.

        Args:
            lanes: B.
            like: inputs `(T, B, D)`; needed once by modules that return `(y, state)` and do not
                have an `initial_state(lanes)` method of their own: their state's layout is learnt
                from a trial.

        Returns:
            A state tree, lanes first. It has a graph if the module learns its initial state.

        Raises:
            StateError: `like` is needed and missing, or the module starts from something else than
                zeros and does not say what.
        """
        return self.contract.initial(lanes, like)

    def leaf_names(self, state: State) -> list[str]:
        """A name for each leaf of a state, in order, as the field calls it: `lstm.h`, `lstm.c`."""
        return list(leaf_names(self.contract, state))

    def forward(
        self, x: Tensor, state: State, resets: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Outputs for every step, and the state after the last one.

        Args:
            x: `(T, B, D)`, or `(T, B)` integers for a module that embeds them; one unbatched lane
                as floating `(T, D)` or integer `(T,)`.
            state: the state entering the first step, one row per lane (one lane if unbatched).
            resets: `(T, B)` bool, true where the state entering the step is the initial state.

        Returns:
            `y` `(T, B, C)`, and the state after step T; new tensors, `state` is not changed.

        Raises:
            StateError: a state of another structure or number of lanes.
            ModelError: the module broke its contract.
        """
        if x.dim() == (2 if x.is_floating_point() else 1):
            y, state = self(x.unsqueeze(1), state, None if resets is None else resets.unsqueeze(1))
            return y.squeeze(1), state
        _check_lanes(x, state)
        if resets is not None and resets.shape != x.shape[:2]:
            raise DataError(
                f"resets have shape {tuple(resets.shape)}, expected {tuple(x.shape[:2])}: one flag"
                " for each step and lane"
            )
        try:
            return self._whole(x, state, resets)
        except NotWholeError:  # once in the life of a net
            return self._play(x, state, resets)
        except EXPLAINED as error:
            self.explain(error, x, state)
            raise

    def _whole(self, x: Tensor, state: State, resets: Tensor | None) -> tuple[Tensor, State]:
        """In one call, where the module applies the resets."""
        if x.is_cuda or (resets is not None and not self.contract.takes_resets(x)):
            return self._play(x, state, resets)
        return self._run(x, state, resets)

    def _run(self, x: Tensor, state: State, resets: Tensor | None = None) -> tuple[Tensor, State]:
        """One call. Autocast may return a bfloat16 state.

        Kept so, it would lose the bits it must carry for hours.
        """
        y, after = self.contract.run(x, state, resets)
        if torch.is_autocast_enabled(x.device.type):
            after = trees.map_leaves(lambda new, old: new.to(old.dtype), after, state)
        return y, after

    def _play(self, x: Tensor, state: State, resets: Tensor | None) -> tuple[Tensor, State]:
        """Runs the stretches between resets, and between cuDNN's limits."""
        steps = x.shape[0]
        reset_steps = (
            set[int]() if resets is None else set(resets.any(dim=1).nonzero().flatten().tolist())
        )
        starts = stretches(steps, reset_steps, CUDNN_STEPS if x.is_cuda else steps)
        outputs: list[Tensor] = []
        for start, stop in zip(starts, [*starts[1:], steps], strict=True):
            if resets is not None and start in reset_steps:
                state = trees.reset(state, self.initial_state(x.shape[1], like=x), resets[start])
            y, state = self._run(x[start:stop], state)
            outputs.append(y)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs), state

    def explain(self, error: Exception, x: Tensor, state: State) -> None:
        """Says what throughtime knows of an error that came out of the module: a state that does not fit, inputs of another type."""
        if isinstance(error, ThroughtimeError):
            return
        expected = dict(trees.leaves(self.initial_state(x.shape[1], like=x)))
        got = dict(trees.leaves(state))
        if {n: leaf.shape for n, leaf in expected.items()} != {
            n: leaf.shape for n, leaf in got.items()
        }:
            raise StateError(
                f"the state has the leaves { {n: tuple(leaf.shape) for n, leaf in got.items()} },"
                f" this net carries { {n: tuple(leaf.shape) for n, leaf in expected.items()} },"
                f" lanes first; start from net.initial_state(lanes={x.shape[1]})"
            ) from error
        weight = next(self.module.parameters(), None)
        if weight is not None and weight.dtype != x.dtype:
            error.add_note(
                f"throughtime: the inputs are {x.dtype}, the module's parameters {weight.dtype}."
                f" Ask for the module's type, tt.Stream(..., dtype={weight.dtype}) or"
                f" tt.predict(..., dtype={weight.dtype}), or convert the module."
            )


def stretches(steps: int, resets: Iterable[int], limit: int) -> list[int]:
    """Where each forward call starts: at the first step, at every reset, and after at most `limit`
    steps.

    Example:
        >>> from throughtime.carry.carried import stretches
        >>> stretches(100, {30, 31}, 25)
        [0, 25, 30, 31, 56, 81]
    """
    starts = sorted({0, *resets})
    return [at for start, stop in pairwise([*starts, steps]) for at in range(start, stop, limit)]


def carry(module: nn.Module, *, batch_first: bool | None = None, fused: bool = False) -> Carried:
    """The module with its state made explicit: `y, state = net(x, state)`.

    Takes `nn.LSTM`, `nn.GRU`, `nn.RNN`, their cells, an `nn.Sequential` of such, a module that
    hides such layers anywhere inside and returns outputs only, and a module that itself maps `(x,
    state)` to `(y, state)` with any nested state; one whose forward also takes `resets` by name,
    `(T, B)` as its inputs are, applies them itself. `throughtime.testing.check_carry` proves the
    result on any module.

    Args:
        module: shared, not copied.
        batch_first: whether a user module wants `(B, T, D)`. Default: as the recurrent layers
            inside it, else time first. Layers of torch.nn know it themselves. A carried module is
            time first always.
        fused: whether to make the layers of torch.nn inside those of `tt.nn` first, as
            `tt.fuse(module)` does: faster on a CPU, equal to rounding.

    Raises:
        ModelError: a bidirectional layer, a module without any state that could be carried, layers
            that disagree about `batch_first`, or a wrapper for several devices such as
            DistributedDataParallel.

    Example:
        >>> import torch, throughtime as tt
        >>> net = tt.carry(torch.nn.LSTM(3, 8))
        >>> y, state = net(torch.zeros(5, 2, 3), net.initial_state(lanes=2))
        >>> y.shape
        torch.Size([5, 2, 8])
    """
    if fused:
        fuse(module)
    if isinstance(module, Carried):
        return module
    check_bare(module)
    return Carried(module, contract_of(module, batch_first))


def check_bare(net: nn.Module) -> None:
    """Refuses wrappers of torch that put a module on several devices: their gradients would not be
    those of one net on one stream.

    Raises:
        ModelError: there is one; with the module to hand instead.
    """
    for name, module in net.named_modules():
        kind = next(
            (
                c.__name__
                for c in type(module).__mro__
                if c.__name__ in WRAPPERS and c.__module__.startswith("torch.")
            ),
            None,
        )
        if kind is not None:
            where = f"module '{name}' of the net" if name else "the net"
            raise ModelError(
                f"{where} is wrapped in {kind}: {WRAPPERS[kind]}. Hand the bare module: net ="
                " tt.carry(wrapped.module), or leave the wrapper out"
            )


def _check_lanes(x: Tensor, state: State) -> None:
    if state is None:
        raise StateError(
            "the state is None; the first chunk is not special: start from"
            f" net.initial_state(lanes={x.shape[1]})"
        )
    lanes = x.shape[1]
    if all(leaf.dim() and leaf.shape[0] == lanes for leaf in trees.tensors(state)):
        return
    name, leaf = next(
        (n, leaf) for n, leaf in trees.leaves(state) if not leaf.dim() or leaf.shape[0] != lanes
    )
    raise StateError(
        f"state leaf '{name}' has shape {tuple(leaf.shape)}, the chunk has {lanes} lanes, and lanes"
        " come first. A state belongs to one batch layout; take tt.state.select(state, lanes) or"
        f" net.initial_state(lanes={lanes})."
    )
