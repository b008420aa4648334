"""Gradients that are not finite: found before the optimizer steps, named with their place and parameter."""

import cmath
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from throughtime.chunk import Chunk
from throughtime.errors import RunError

_ends: "WeakKeyDictionary[nn.Module, list[Tensor]]" = WeakKeyDictionary()


def check_finite(
    net: nn.Module, chunk: Chunk, stop: int, loss: Tensor, *, everywhere: bool = False
) -> None:
    """Refuses a `.grad` that is not finite.

    Looks at the net's first and last parameter, at 2 to 4 microseconds each: what is not finite
    goes on to whatever lies before it in the net, and the layers next to the inputs stand at one of
    the ends. Only then, or where asked to, at all of them.
    """
    ends = _ends.get(net)
    if ends is None or any(weight.grad is None for weight in ends):
        having = [weight for weight in net.parameters() if weight.grad is not None]
        ends = _ends[net] = [*having[:1], *having[1:][-1:]]
    if not everywhere and all(
        weight.grad is None or cmath.isfinite(weight.grad.sum().item()) for weight in ends
    ):
        return
    for name, other in net.named_parameters():
        if (
            other.requires_grad
            and other.grad is not None
            and not bool(other.grad.to_dense().isfinite().all())
        ):
            raise RunError(
                not_finite(
                    name.removeprefix("module."),
                    stop - chunk.steps,
                    stop,
                    chunk,
                    loss.item(),
                    written=True,
                )
            )


def not_finite(
    name: str, start: int, stop: int, chunk: Chunk, loss: float, *, written: bool = False
) -> str:
    """The message for a gradient that is not finite."""
    recordings = sorted(set(chunk.recording[chunk.recording >= 0].tolist()))
    listed = ", ".join(map(str, recordings[:5])) + (", ..." if len(recordings) > 5 else "")
    untouched = (
        "The weights are as they were; zero_grad() before you go on"
        if written
        else "`.grad` and the weights are as they were"
    )
    return (
        f"the gradient of '{name}' is not finite (NaN or infinite) in the chunk of steps {start} to"
        f" {stop - 1} of the epoch (recording {listed}), whose part of the loss is {loss:.6g}."
        f" {untouched}. Look at the inputs and targets of these steps; if they are sound, the"
        " gradient explodes: lower the learning rate, or cut or clip the credit (a shorter"
        " horizon, clip_grad_norm_, or tt.Exact with clip_adjoint)."
    )
