"""The model of a run: standardise, recur, read out; described in its own weights file.

Shapes: `T` steps, `B` lanes, `D` input features, `C` outputs.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from throughtime.carry import Carried, carry
from throughtime.run import tensors as files
from throughtime.run.config import Config
from throughtime.run.survey import Survey, sorted_classes
from throughtime.score import Classification, Regression, Score

_KIND = "throughtime.model/1"


@dataclass(frozen=True)
class Spec:
    """All it takes to build the model again and to feed it: kept in the weights file."""

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

    @classmethod
    def of(cls, config: Config, found: Survey, inputs: tuple[str, ...], targets: tuple[str, ...]) -> "Spec":
        """What the configuration asks for on the data that were found."""
        classes = sorted_classes(found.classes) if config.task == "classify" else ()
        outputs = len(classes) if config.task == "classify" else len(found.targets.mean)
        features = len(found.inputs.mean)
        return cls(config.task, config.model, config.hidden, config.layers, features, outputs, classes, inputs, targets, config.dtype)

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
    return carry(nn.Sequential(OrderedDict(parts))).to(spec.torch_dtype)


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


def loss_of(config: Config, spec: Spec, net: Carried, classes: Mapping[str, int]) -> nn.Module | StandardisedMSE:
    """Cross-entropy, with class weights if asked for, or the squared error in units of the statistics that the net holds.

    Args:
        config: says whether classes are weighed.
        spec: of the net.
        net: with its statistics, on its device.
        classes: how often each occurs in the training split; looked at only where they are weighed.
    """
    device = next(net.parameters()).device
    if spec.task == "regress":
        return StandardisedMSE(net.module.get_buffer("units.scale").clone())
    if config.class_weights == "none":
        return nn.CrossEntropyLoss()
    counts = torch.tensor([classes[name] for name in spec.classes], dtype=spec.torch_dtype)
    return nn.CrossEntropyLoss(weight=(counts.sum() / (len(counts) * counts)).to(device))


def save_model(path: Path, net: Carried, spec: Spec) -> None:
    """Writes weights, statistics and description into one safetensors file."""
    tensors = {name: value.detach().cpu().contiguous() for name, value in net.module.state_dict().items()}
    files.write(path, _KIND, asdict(spec), tensors)


def load_model(path: Path) -> tuple[Carried, Spec]:
    """The net and its description from a file that `save_model` wrote.

    Raises:
        RunError: no such file, or one that holds no model of throughtime.
    """
    values, tensors = files.read(path, _KIND, "is it the folder of a run that has reached its first checkpoint?")
    spec = Spec(**(values | {key: tuple(values[key]) for key in ("classes", "inputs", "targets")}))
    net = build(spec)
    net.module.load_state_dict(tensors)
    return net, spec
