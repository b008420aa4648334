"""Gradients that are not finite: found before the optimizer steps, named with their place and parameter."""

import math
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from throughtime.chunk import Chunk
from throughtime.errors import RunError

_first: "WeakKeyDictionary[nn.Module, Tensor]" = WeakKeyDictionary()


def check_finite(net: nn.Module, chunk: Chunk, stop: int, loss: Tensor) -> None:
    """Refuses a `.grad` that is not finite.

    Looks at the net's first parameter only, at 2 to 4 microseconds: NaN and infinity go on to whatever lies before them in the
    net, since nothing that they are multiplied by makes them finite again. Only then at all of them.
    """
    weight = _first.get(net)
    if weight is None or weight.grad is None:
        weight = next((w for w in net.parameters() if w.grad is not None), None)
        if weight is None:
            return
        _first[net] = weight
    gradient = weight.grad
    if gradient is None or math.isfinite(gradient.sum().item()):
        return
    for name, other in net.named_parameters():
        if other.grad is not None and not bool(other.grad.to_dense().isfinite().all()):
            raise RunError(not_finite(name.removeprefix("module."), stop - chunk.steps, stop, chunk, loss.item(), written=True))


def not_finite(name: str, start: int, stop: int, chunk: Chunk, loss: float, *, written: bool = False) -> str:
    """The message for a gradient that is not finite."""
    recordings = sorted(set(chunk.recording[chunk.recording >= 0].tolist()))
    listed = ", ".join(map(str, recordings[:5])) + (", ..." if len(recordings) > 5 else "")
    untouched = "The weights are as they were; zero_grad() before you go on" if written else "`.grad` and the weights are as they were"
    return (
        f"the gradient of '{name}' is not finite (NaN or infinite) in the chunk of steps {start} to {stop - 1} "
        f"of the epoch (recording {listed}), whose part of the loss is {loss:.6g}. {untouched}. Look at the inputs and targets of these "
        "steps; if they are sound, the gradient explodes: lower the learning rate, or cut or clip the credit (a shorter horizon, "
        "clip_grad_norm_, or tt.Exact with clip_adjoint)."
    )
