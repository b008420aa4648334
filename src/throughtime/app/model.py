"""The model of a run: standardise, recur, read out; its description is part of its weights file.

Shapes: `T` steps, `B` lanes, `D` input features, `C` classes, outputs or target columns.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn
from torch.nn import functional

from throughtime.app.data import Dataset, Statistics
from throughtime.app.run_folder import MODEL, check_layout, load_tensors
from throughtime.app.scores import MultiLabel
from throughtime.app.settings import Config
from throughtime.app.user_class import ClassReference, is_reference, kept_class
from throughtime.carry.carried import Carried, carry, running
from throughtime.errors import ConfigError, ModelError, RunError, ThroughtimeError, listed, one_line
from throughtime.metrics import Classification, Metric, Regression
from throughtime.nn import GRU, LSTM, RNN
from throughtime.nn.affine import Affine, Difference, Standardise, WholeRecording
from throughtime.stream import Recording, Stream
from throughtime.stream.layout import Layout

_LAYERS = {"lstm": LSTM, "gru": GRU, "rnn": RNN}


@dataclass(frozen=True)
class ModelSpec:
    """What it takes to build the model again and to read its inputs; kept in the weights file.

    Attributes:
        layout: how to read files for it; its columns are resolved.
        model: the recurrent layer, or the file and the class of a user's module.
        hidden: its width.
        layers: their number.
        features: inputs of a step, static features included.
        outputs: classes, or target columns.
        classes: their names; empty for labels and numbers.
        dtype: of weights and inputs.
        sha256: of the file of a user's module.
        weights: of the classes in the loss; empty if all are 1.
        difference: of each output, the input that it is a change of; empty for values.
        standardise: by which statistics inputs are standardised.
        update: the one that the weights are of; 0 in training.
    """

    layout: Layout
    model: str
    hidden: int
    layers: int
    features: int
    outputs: int
    classes: tuple[str, ...]
    dtype: Literal["float32", "float64"]
    sha256: str = ""
    weights: tuple[float, ...] = ()
    difference: tuple[int, ...] = ()
    standardise: str = "split"
    update: int = 0

    @classmethod
    def from_data(cls, config: Config, dataset: Dataset, own: ClassReference | None) -> "ModelSpec":
        """The model that the settings describe, in the shape of the data."""
        classes, layout, counts = dataset.classes, dataset.layout, dataset.statistics.classes
        columns = len(dataset.statistics.targets.mean) * max(1, len(layout.ahead))
        balanced = classes if config.class_weights == "balanced" else ()
        return cls(
            layout,
            config.model if own is None else own.short,
            config.hidden,
            config.layers,
            len(dataset.statistics.inputs.mean),
            len(classes) or columns,
            classes,
            config.dtype,
            "" if own is None else own.sha256(),
            tuple(counts.total() / (len(classes) * counts[name]) for name in balanced),
            _present_columns(layout) if config.difference else (),
            config.standardise,
        )

    @property
    def target_names(self) -> tuple[str, ...]:
        """The target columns; of several rows ahead each with its own: `OT+1`, `OT+24`."""
        rows = self.layout.ahead
        if len(rows) < 2:
            return self.layout.targets
        return tuple(f"{name}+{n}" for n in rows for name in self.layout.targets)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The type of weights and inputs."""
        return getattr(torch, self.dtype)

    def metrics(self) -> Metric:
        """Empty metrics of the task."""
        if self.is_multilabel:
            return MultiLabel(self.target_names)
        return Classification(self.classes) if self.classes else Regression()

    @property
    def is_multilabel(self) -> bool:
        """Whether each output is the logit of a label of its own."""
        return self.layout.task == "multilabel"

    def probabilities(self, outputs: Tensor) -> Tensor:
        """Those of classes or labels, for outputs `(N, C)`; numbers as they are."""
        if self.is_multilabel:
            return outputs.sigmoid()
        return outputs.softmax(dim=1) if self.classes else outputs


def _present_columns(layout: Layout) -> tuple[int, ...]:
    """Of each output, the input that holds the present value of its target.

    Raises:
        ConfigError: a target is no input.
    """
    if absent := sorted({*layout.targets} - {*layout.inputs}):
        raise ConfigError(
            f"--difference adds changes to the present values of the targets, and"
            f" {listed(absent, quoted=True)} is not among the inputs ({listed(layout.inputs)}):"
            " name it with --inputs, too"
        )
    columns = [layout.inputs.index(name) for name in layout.targets]
    return tuple(columns * len(layout.ahead))


def own_class(config: Config) -> ClassReference | None:
    """The user's module that the settings name; `None` for a layer of ours."""
    return ClassReference.parse("model", config.model) if is_reference(config.model) else None


def build_model(
    spec: ModelSpec, own: ClassReference | None = None, needed: Sequence[str] = ()
) -> Carried:
    """The net: raw inputs in, logits of the classes or values in the targets' units out.

    Args:
        spec: its description.
        own: the user's module, if it names one.
        needed: the sizes that the user has set, so the module must take them.

    Raises:
        ConfigError: the module cannot be made with these sizes.
    """
    if own is not None:
        offered = {
            "inputs": spec.features,
            "outputs": spec.outputs,
            "hidden": spec.hidden,
            "layers": spec.layers,
        }
        inner: dict[str, nn.Module] = {"recurrent": own.make(nn.Module, offered, needed)}
    else:
        recurrent = _LAYERS[spec.model](spec.features, spec.hidden, spec.layers)
        inner = {"recurrent": recurrent, "readout": nn.Linear(spec.hidden, spec.outputs)}
    _, first, steps = spec.standardise.partition("first:")
    if first:
        standardise: nn.Module = Standardise(spec.features, steps=int(steps))
    elif spec.standardise == "split":
        standardise = Affine(spec.features, inverse=False)
    else:
        standardise = WholeRecording() if spec.standardise == "recording" else nn.Identity()
    if spec.layout.task == "regress":
        inner["units"] = Affine(spec.outputs, inverse=True)
    net = nn.Sequential(OrderedDict(standardise=standardise, **inner))
    whole = Difference(net, columns=spec.difference) if spec.difference else net
    return carry(whole).to(spec.torch_dtype)


def _affine(net: Carried) -> list[Affine]:
    """The modules that hold statistics."""
    parts = net.module.named_modules()
    return [p for name, p in parts if isinstance(p, Affine) and "recurrent" not in name]


def prepare_own(net: Carried, spec: ModelSpec) -> None:
    """Find out how a user's module is called, and that it returns the outputs of the run.

    Args:
        net: with its statistics, on its device.
        spec: of the net.

    Raises:
        ModelError: its state cannot be carried; the message has the line to change.
        ConfigError: it returns outputs of another shape.
    """
    x = example_inputs(net, spec)[:5, None]
    x = x.to(next(net.parameters(), x))
    try:
        net.prepare(x)
    except ModelError as error:
        raise ModelError(f"--model {spec.model}: {error}") from error
    with running(net):
        y, _ = net(x, net.initial_state(1, like=x))
    if y.shape != (5, 1, spec.outputs):
        raise ConfigError(
            f"--model {spec.model}: returns {tuple(y.shape)} for 5 steps of 1 lane, expected"
            f" (5, 1, {spec.outputs}): a number for each class or target. Take the argument"
            " `outputs` in its constructor, and end with nn.Linear(hidden, outputs)"
        )


def set_statistics(net: Carried, statistics: Statistics) -> None:
    """Copy the means and deviations of the training split into the net."""
    for part in _affine(net):
        moments = statistics.targets if part.inverse else statistics.inputs
        part.shift.copy_(torch.from_numpy(moments.mean))
        part.scale.copy_(torch.from_numpy(moments.scale))


def example_inputs(net: Carried, spec: ModelSpec) -> Tensor:
    """Random inputs of 1,000 steps `(T, D)`, the same ones each time, in the units of the data."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(1000, spec.features, dtype=torch.float64, device="cpu", generator=random)
    for part in _affine(net):
        if not part.inverse:
            return x * part.scale.to(x) + part.shift.to(x)
    return x


_ERRORS = {
    "mse": functional.mse_loss,
    "mae": functional.l1_loss,
    "huber": functional.huber_loss,
}


@dataclass(frozen=True)
class StandardisedError:
    """Mean squared, absolute or Huber error in units of each target's standard deviation."""

    scale: Tensor
    name: str = "mse"

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        error = (outputs - targets.view_as(outputs)) / self.scale
        return _ERRORS[self.name](error, torch.zeros_like(error))


def make_loss(spec: ModelSpec, net: Carried, name: str | None = None) -> Callable[..., Any]:
    """Cross-entropy, of labels the binary one; of numbers the standardised error; or one's own.

    Args:
        spec: of the net.
        net: with its statistics, on its device.
        name: of the loss, or the user's own class in a file; default: by the task.

    Raises:
        ConfigError: a loss that does not fit the task, or a class of the user's that fails.
    """
    like = next(net.parameters())
    scale = next((part.scale.clone() for part in _affine(net) if part.inverse), None)
    weight = like.new_tensor(spec.weights) if spec.weights else None
    if name is not None and is_reference(name):
        offered = {"outputs": spec.outputs, "weight": weight, "scale": scale}
        needed = ["weight"] if spec.weights else ()
        loss: Any = ClassReference.parse("loss", name).make(object, offered, needed)
        if not callable(loss):
            raise ConfigError(f"--loss {name}: has no method __call__(outputs, targets); add it")
        return loss.to(like.device) if isinstance(loss, nn.Module) else loss
    fitting = ["cross-entropy"] if scale is None else _ERRORS
    if name is not None and name not in fitting:
        raise ConfigError(
            f"--loss {name} does not fit --task {spec.layout.task}: take --loss"
            f" {' or '.join(fitting)}"
        )
    if scale is not None:
        return StandardisedError(scale, name or "mse")
    return nn.BCEWithLogitsLoss() if spec.is_multilabel else nn.CrossEntropyLoss(weight=weight)


def check_device(device: str) -> None:
    """Refuse a device on which nothing can be computed.

    Raises:
        ConfigError: torch refuses it; the message names the devices of this machine.
    """
    try:
        torch.zeros(1, device=device).item()  # meta holds no numbers
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"--device {device}: cannot be used on this machine; take --device cpu"
        ) from error


def make_stream(
    recordings: Sequence[Recording],
    spec: ModelSpec,
    config: Config,
    lanes: int,
    chunk: int | None = None,
    **how: Any,
) -> Stream:
    """The recordings as a model is trained on them; without a seed in order, all on this rank."""
    if "seed" not in how:
        how = {"seed": None, "rank": 0, "ranks": 1}
    how |= {"warm_up": config.warm_up, "missing": config.missing, "dtype": spec.torch_dtype}
    return Stream(recordings, lanes, chunk or config.chunk_steps(), **how)


def load_model(path: Path, *, trust_code: bool = False) -> tuple[Carried, ModelSpec]:
    """The net, in evaluation mode, and its description from the model file of a run.

    Args:
        path: of the file.
        trust_code: execute the file of a user's module though the user has not trained with it.

    Raises:
        RunError: no such file, a damaged one, one that holds no model of throughtime, or code that
            is not trusted.
    """
    hint = f"`throughtime train --resume {path.parent}` writes it from the last checkpoint"
    values, tensors = load_tensors(path, MODEL, hint)
    own = None
    try:
        spec = TypeAdapter(ModelSpec).validate_python(values)
        if is_reference(spec.model):
            named = ClassReference.parse("model", spec.model)
            own = kept_class(path.parent, named, spec.sha256, trust_code=trust_code)
        net = build_model(spec, own)
        check_layout(tensors, net.module.state_dict())
    except (TypeError, ValueError, LookupError, RuntimeError) as error:
        if isinstance(error, ThroughtimeError):
            raise
        raise RunError(f"{path}: it is not a model: {one_line(error)}; {hint}") from error
    net.module.load_state_dict(tensors)
    if own is not None:
        prepare_own(net, spec)
    return net.eval(), spec
