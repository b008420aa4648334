"""The gradient of a run over time and layer, at each of the first steps of one recording.

    G_t = sum over updates u of  dL_u / ds_t        s: a state or gate; L_u: the mean loss of the
                                                    steps that update u counts

The gradient of the weights is a sum over steps of what each contributes under G_t. So G_t is all
that training learns from step t. With a horizon longer than the stride, a step lies in several
windows, whose gradients add up. One lane plays the recording at fixed weights, its state carried
from the first step.

Shapes: `T` steps, `H` hidden.
"""

import math
from dataclasses import dataclass

from torch import Tensor

from throughtime.app.config import Config
from throughtime.app.model import ModelSpec, unbroken_stream
from throughtime.app.user_class import is_reference
from throughtime.carry.carried import Carried
from throughtime.diagnose.trace import trace
from throughtime.gradient import LossFn, Truncated
from throughtime.stream import Recording, windows
from throughtime.stream.recording import Part
from throughtime.updates import updates

_FEWEST_STEPS, _FEWEST_STRIDES = 400, 3  # traced at least
_LONGEST = 1_000  # steps of a stride that is traced whole
_MOST_WORK = 30_000  # traced steps of all windows; each takes about 0.1 ms a layer


@dataclass(frozen=True)
class RunTrace:
    """The traced gradient of a run.

    Attributes:
        recording: its name.
        stride: steps between two updates.
        horizon: steps that credit flowed back, fewer than in training where that is too long.
        norms: norm of the gradient by state or gate, at every step; infinite where it is not
            finite.
    """

    recording: str
    stride: int
    horizon: int
    norms: dict[str, tuple[float, ...]]

    @property
    def steps(self) -> int:
        """Number of steps."""
        return len(next(iter(self.norms.values())))

    @property
    def edges(self) -> tuple[int, ...]:
        """The steps at which an update ends and the next begins."""
        return tuple(range(self.stride, self.steps, self.stride))


def trace_run(
    net: Carried, spec: ModelSpec, recording: Recording, loss_fn: LossFn, config: Config
) -> RunTrace | None:
    """Trace the first steps of a recording; `None` if none of them has a loss.

    Args:
        net: the model of the run; its weights stay unchanged.
        spec: its description.
        recording: the recording to play.
        loss_fn: the loss of training.
        config: the settings of the run, which say how credit is truncated.
    """
    asked = config.update_steps() or len(recording)
    shown = max(_FEWEST_STEPS, _FEWEST_STRIDES * min(asked, _LONGEST) // asked * asked)
    stride = min(asked, shown, len(recording))
    shown = min(-(-shown // stride) * stride, len(recording))
    horizon = min(config.credit_steps() or stride, _MOST_WORK * stride // shown)
    horizon = max(stride, min(horizon, len(recording)))
    part = Part(recording, 0, min(shown + horizon - stride, len(recording)))
    cut = config.train_on == "windows" and not is_reference(config.gradient)
    played = list(windows([part], config.chunk_steps())) if cut else [part]
    stream = unbroken_stream(played, spec, config, 1, stride)
    sums: dict[str, Tensor] = {}
    with trace(net) as watch:
        policy = Truncated(stride, horizon)
        for _ in updates(net, stream, loss_fn, gradient=policy):
            stop = stream.position or stream.steps
            begin = max(0, stop - horizon) if horizon > stride else (stop - 1) // stride * stride
            for name, lanes in watch.last.gradients.items():
                grads = lanes[:, 0].double().cpu()
                total = sums.setdefault(name, grads.new_zeros(stream.steps, *grads.shape[1:]))
                total[begin : begin + len(grads)] += grads
    net.zero_grad()
    # in the order of the layers: layer10 after layer9
    names = sorted(sums, key=lambda name: (len(layer := name.rpartition(".")[0]), layer))
    norms = {name: _norms(sums[name][:shown]) for name in names}
    return RunTrace(recording.name, stride, horizon, norms) if norms else None


def _norms(grads: Tensor) -> tuple[float, ...]:
    """The norm of each step of `(T, H)`, in four digits."""
    norms = grads.flatten(1).norm(dim=1).nan_to_num(nan=math.inf, posinf=math.inf)
    return tuple(float(f"{norm:.4g}") for norm in norms.tolist())
