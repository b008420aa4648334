"""The model of a run: standardise, recur, read out; described in its own weights file.

Shapes: `T` steps, `B` lanes, `D` input features, `C` outputs.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from throughtime.app import tensors as files
from throughtime.app.config import Config
from throughtime.app.form import Form
from throughtime.app.survey import Survey, sorted_classes
from throughtime.app.weights import class_weights
from throughtime.carry.carried import Carried, carry
from throughtime.metrics import Classification, Regression, Score

_KIND = "throughtime.model/1"


@dataclass(frozen=True)
class Spec:
    """All it takes to build the model again and to feed it: kept in the weights file.

    `static` are columns of a manifest whose numbers follow the inputs at every step; `frame` rows
    of `inputs` are one step; `rate` is that of the rows, if the files said one. An older file
    without these has the defaults.
    """

    task: Literal["classify", "regress"]
    model: Literal["lstm", "gru", "rnn"]
    hidden: int
    layers: int
    features: int
    outputs: int
    classes: tuple[str, ...]
    inputs: tuple[str, ...]
    targets: tuple[str, ...]
    dtype: Literal["float32", "float64"]
    static: tuple[str, ...] = ()
    frame: int = 1
    csv: Literal["columns", "rows"] = "columns"
    rate: float | None = None

    @classmethod
    def of(
        cls,
        config: Config,
        found: Survey,
        inputs: tuple[str, ...],
        targets: tuple[str, ...],
        rate: float | None,
    ) -> "Spec":
        """What the configuration asks for on the data that were found."""
        classes = sorted_classes(found.classes) if config.task == "classify" else ()
        return cls(
            task=config.task,
            model=config.model,
            hidden=config.hidden,
            layers=config.layers,
            features=len(found.inputs.mean),
            outputs=len(classes) if config.task == "classify" else len(found.targets.mean),
            classes=classes,
            inputs=inputs,
            targets=targets,
            dtype=config.dtype,
            static=config.static,
            frame=config.frame,
            csv=config.csv,
            rate=rate,
        )

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> "Spec":
        """What `asdict` gave, read back from JSON."""
        plain: dict[str, Any] = dict(values)
        plain |= {
            key: tuple(plain[key])
            for key in ("classes", "inputs", "targets", "static")
            if key in plain
        }
        return cls(**plain)

    @property
    def form(self) -> Form:
        """How to read the inputs of a file."""
        return Form(
            self.task, self.inputs, self.targets, self.static, self.frame, self.csv, rate=self.rate
        )

    @property
    def torch_dtype(self) -> torch.dtype:
        """The type of weights and inputs."""
        return torch.float64 if self.dtype == "float64" else torch.float32

    def score(self) -> Score:
        """An empty score of the right kind."""
        return Classification(self.classes) if self.task == "classify" else Regression()


class Affine(nn.Module):
    """`(x - shift) / scale`, or the way back, with statistics that belong to the model."""

    shift: Tensor
    scale: Tensor

    def __init__(self, width: int, *, back: bool) -> None:
        super().__init__()
        self.back = back
        self.register_buffer("shift", torch.zeros(width))
        self.register_buffer("scale", torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Of `(..., width)`."""
        return x * self.scale + self.shift if self.back else (x - self.shift) / self.scale


def build(spec: Spec) -> Carried:
    """The net: raw inputs in, logits of the classes or values in the targets' units out."""
    layer = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}[spec.model]
    parts: list[tuple[str, nn.Module]] = [
        ("standardise", Affine(spec.features, back=False)),
        ("recurrent", layer(spec.features, spec.hidden, spec.layers)),
        ("readout", nn.Linear(spec.hidden, spec.outputs)),
    ]
    if spec.task == "regress":
        parts.append(("units", Affine(spec.outputs, back=True)))
    return carry(nn.Sequential(OrderedDict(parts)), fused=True).to(spec.torch_dtype)


def fit_statistics(net: Carried, found: Survey) -> None:
    """Puts the training split's means and deviations into the net."""
    for name, moments in (("standardise", found.inputs), ("units", found.targets)):
        part = net.module.get_submodule(name) if name in dict(net.module.named_children()) else None
        if isinstance(part, Affine):
            part.shift.copy_(torch.from_numpy(moments.mean))
            part.scale.copy_(torch.from_numpy(moments.scale))


@dataclass(frozen=True)
class StandardisedMSE:
    """Mean squared error in units of each target's standard deviation."""

    scale: Tensor

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return ((outputs - targets.view_as(outputs)) / self.scale).square().mean()


def loss_of(
    config: Config, spec: Spec, net: Carried, classes: Mapping[str, int]
) -> nn.Module | StandardisedMSE:
    """Cross-entropy, with class weights if asked for, or the squared error in units of the
    statistics that the net holds.

    Args:
        config: says whether classes are weighed.
        spec: of the net.
        net: with its statistics, on its device.
        classes: how often each occurs in the training split; looked at only where they are
            balanced.

    Raises:
        ConfigError: a weight for a class that there is not.
    """
    device = next(net.parameters()).device
    if spec.task == "regress":
        return StandardisedMSE(net.module.get_buffer("units.scale").clone())
    weights = class_weights(config.class_weights, spec.classes, classes)
    return nn.CrossEntropyLoss(
        weight=None if weights is None else weights.to(device, spec.torch_dtype)
    )


def save_model(path: Path, net: Carried, spec: Spec) -> None:
    """Writes weights, statistics and description into one safetensors file."""
    tensors = {
        name: value.detach().cpu().contiguous() for name, value in net.module.state_dict().items()
    }
    files.write(path, _KIND, asdict(spec), tensors)


def load_model(path: Path) -> tuple[Carried, Spec]:
    """The net and its description from a file that `save_model` wrote.

    Raises:
        RunError: no such file, or one that holds no model of throughtime.
    """
    values, tensors = files.read(
        path, _KIND, "is it the folder of a run that has reached its first checkpoint?"
    )
    spec = Spec.from_plain(values)
    net = build(spec)
    net.module.load_state_dict(tensors)
    return net, spec
