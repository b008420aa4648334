"""Modules around a net: standardisation of its inputs, and outputs as changes from its inputs."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from throughtime.errors import ConfigError, ModelError
from throughtime.stream import Stream
from throughtime.stream.recording import moments_of


class Affine(nn.Module):
    """`(x - shift) / scale`, or its inverse `x * scale + shift`, in every column.

    A run keeps the means and deviations of its training split so. Folded into the weights of the
    layer after it, a large shift would cost digits.

    Args:
        width: the number of columns.
        inverse: the way back, from standardised values to units.

    Example:
        >>> import torch
        >>> from throughtime.nn.affine import Affine
        >>> standardise = Affine(1, inverse=False)
        >>> _ = standardise.shift.fill_(20), standardise.scale.fill_(5)
        >>> standardise(torch.tensor([[30.0]]))
        tensor([[2.]])
    """

    shift: Tensor
    scale: Tensor

    def __init__(self, width: int, *, inverse: bool) -> None:
        super().__init__()
        self.inverse = inverse
        self.register_buffer("shift", torch.zeros(width))
        self.register_buffer("scale", torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Map `(..., width)`."""
        return x * self.scale + self.shift if self.inverse else (x - self.shift) / self.scale


class Difference(nn.Module):
    """A net whose outputs are changes from the present: `y = net(x) + x[..., columns]`.

    For forecasts of a column that is an input as well: the net learns how the value changes, and
    what it returns is the value, in training, scores, live nets and exported files alike. Without
    it, a net has to copy the present value through its state, and loses to that value where a
    series moves slowly.

    Args:
        module: what `tt.carry` takes, with an output for each of the columns.
        columns: for each output, the input column that its change is added to, as its index.

    Raises:
        ConfigError: no column, or one that is no index.

    Example:
        >>> import torch, throughtime as tt
        >>> inner = torch.nn.Sequential(tt.nn.GRU(3, 8), torch.nn.Linear(8, 1))
        >>> _ = torch.nn.init.zeros_(inner[1].weight), torch.nn.init.zeros_(inner[1].bias)
        >>> net = tt.carry(tt.nn.Difference(inner, columns=[2]))
        >>> y, _ = net(torch.tensor([[[0.0, 1.0, 7.0]]]), net.initial_state(1))
        >>> y.flatten().tolist()
        [7.0]
    """

    columns: Tensor

    def __init__(self, module: nn.Module, *, columns: Sequence[int]) -> None:
        super().__init__()
        values: Sequence[Any] = columns  # checked here
        if not columns or any(type(c) is not int or c < 0 for c in values):
            raise ConfigError(
                f"columns={list(columns)}: expected for each output the index of the input column"
                " that it is a change of, such as columns=[0]"
            )
        self.module, self._width = module, max(columns) + 1
        self.register_buffer("columns", torch.tensor(columns, device="cpu"), persistent=False)

    def forward(self, x: Tensor, state: object = None) -> tuple[Tensor, object]:
        """Map `(T, B, D)`, if the module itself returns outputs and state; carried, any may."""
        changes, after = self.module(x, state)
        return self.restore(changes, x), after

    def restore(self, changes: Tensor, x: Tensor) -> Tensor:
        """The outputs `(T, B, C)`: the changes, added to the inputs of the same steps."""
        if changes.shape[-1] != len(self.columns):
            raise ModelError(
                f"tt.nn.Difference has {len(self.columns)} columns, and its module"
                f" {changes.shape[-1]} outputs; expected one column for each output"
            )
        if not x.is_floating_point() or x.shape[-1] < self._width:
            raise ModelError(
                f"tt.nn.Difference adds to the input column {self._width - 1}, and the inputs have"
                f" shape {tuple(x.shape)}; expected at least {self._width} columns of numbers"
            )
        return changes + x.index_select(-1, self.columns)


class WholeRecording(nn.Identity):
    """In the place of standardisation in a net whose inputs were standardised as recordings."""


def needs_whole_recordings(net: nn.Module) -> bool:
    """Whether the inputs of a net are recordings that were standardised by all of their steps."""
    return any(isinstance(part, WholeRecording) for part in net.modules())


def refuse_whole_recordings(net: nn.Module) -> None:
    """Refuse a net that runs step by step and needs inputs standardised by all steps.

    Raises:
        ModelError: it has a `WholeRecording`.
    """
    if needs_whole_recordings(net):
        raise ModelError(
            "the net was trained on inputs that were standardised by all steps of each recording,"
            " which a net that runs step by step does not have. Train it with --standardise"
            " first:400 (standardise='first:400'), which takes the first steps, as they arrive."
            " tt.predict(net, recording) predicts a whole one"
        )


class Standardise(nn.Module):
    """Standardises each recording by the statistics of its first steps, as they arrive.

    A step is standardised by the mean and the deviation of the steps so far, itself included; after
    `steps` steps both stay as they are. What was counted is the state of a lane: a reset begins
    anew, and a live net computes what a net in training computed.

    Args:
        width: D, the number of columns.
        steps: of which statistics are taken; some thousands, since sums are those of the dtype. A
            step that the stream masks counts as the zeros that it holds.

    Example:
        >>> import torch
        >>> import throughtime as tt
        >>> x = torch.tensor([10.0, 12.0, 14.0, 20.0]).view(4, 1, 1)
        >>> y, state = tt.nn.Standardise(1, steps=3)(x)
        >>> y.flatten(), state["count"].item()
        (tensor([0.0000, 1.0000, 1.2247, 4.8990]), 3.0)
    """

    def __init__(self, width: int, *, steps: int) -> None:
        super().__init__()
        if steps < 1:
            raise ConfigError(f"steps={steps}: expected how many first steps count, at least 1")
        self.width, self.steps = width, steps
        self.register_buffer("unit", torch.ones(()), persistent=False)  # its device and type

    @staticmethod
    def of(stream: Stream, role: Literal["inputs", "targets"] = "inputs") -> nn.Module:
        """The layer that the `standardise` of a stream asks for, `nn.Identity` if it is `None`.

        Put it before the first layer of a net, which is then saved, exported and played live with
        it. Of targets that are numbers it leads back: from standardised outputs to their units, by
        the statistics of all recordings. Put it after the last layer.

        Args:
            stream: of the recordings to train on.
            role: what is standardised.

        Cost: one read of all recordings, unless the statistics are those of each.

        Example:
            >>> import numpy as np, torch, throughtime as tt
            >>> data = [{"inputs": np.random.randn(900, 3) + 50} for _ in range(4)]
            >>> stream = tt.Stream(data, lanes=4, chunk=50, standardise="first:400")
            >>> layers = tt.nn.Standardise.of(stream), torch.nn.GRU(3, 8), torch.nn.Linear(8, 2)
            >>> net = tt.carry(torch.nn.Sequential(*layers))
        """
        how, _, steps = (stream.standardise or "").partition(":")
        if not how:
            return nn.Identity()
        if role == "inputs" and how != "split":
            width = stream.recordings[0].read(0, 1).inputs.size
            return Standardise(width, steps=int(steps)) if steps else WholeRecording()
        moments = moments_of(stream.recordings, role)
        layer = Affine(len(moments.mean), inverse=role == "targets")
        layer.shift.copy_(torch.from_numpy(moments.mean))
        layer.scale.copy_(torch.from_numpy(moments.scale))
        return layer

    def initial_state(self, lanes: int) -> dict[str, Tensor]:
        """Nothing counted: `count` `(B, 1)`, the rest `(B, D)`."""
        sizes = {"count": 1, "first": self.width, "sum": self.width, "squares": self.width}
        unit = self.get_buffer("unit")
        return {name: unit.new_zeros(lanes, size) for name, size in sizes.items()}

    def forward(
        self, x: Tensor, state: dict[str, Tensor] | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Map `(T, B, D)`; sums are those of the differences from the first step."""
        state = self.initial_state(x.shape[1]) if state is None else state
        first = torch.where(state["count"] > 0, state["first"], x[0])
        reached = state["count"] + torch.ones_like(x[..., :1]).cumsum(0)
        counts = reached.clamp(max=self.steps)
        away = x - first
        counted = away * (reached <= self.steps)
        sums = state["sum"] + counted.cumsum(0)
        squares = state["squares"] + counted.square().cumsum(0)
        mean = sums / counts
        spread = squares / counts - mean.square()
        y = (away - mean) / torch.where(spread > 0, spread, 1).sqrt()
        after = {"count": counts[-1], "first": first, "sum": sums[-1], "squares": squares[-1]}
        return y, after
