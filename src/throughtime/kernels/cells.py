"""The table of recurrent cells, and the weights of one layer in one direction.

`reference`, the compiled kernels, `tt.nn`, the fused step and the trace read this table. A new cell
is a row here, a step in `reference.py` and a branch in `cpu/`.

Shapes: `D` input features, `H` hidden, `P` = `H` or the size of a projection, `G` gates.
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class Cell:
    """One kind of recurrent cell. Each is a single object, compared by identity.

    Attributes:
        name: as operators and messages write it.
        code: `tt_kind` of `cpu/throughtime.h`.
        mode: the `mode` of torch's layer.
        layer: torch's layer.
        step: torch's cell for one step, with the `nonlinearity` of its instances if it has one.
        nonlinearity: see `step`.
        states: names of the carried tensors, `h` first.
        gates: names of the blocks of the weights' rows, in torch's order. An RNN has one block,
            whose value is `h` itself.
        retention_gate: the gate that scales what is kept of the past, if there is one.
        onednn: whether torch.nn runs its layer in one call of oneDNN, in float32 on the CPU and
            without a projection, instead of step by step.
    """

    name: str
    code: int
    mode: str
    layer: type[nn.RNNBase]
    step: type[nn.RNNCellBase]
    states: tuple[str, ...]
    gates: tuple[str, ...]
    retention_gate: str | None = None
    nonlinearity: str | None = None
    onednn: bool = False

    def __repr__(self) -> str:
        """The name."""
        return self.name

    def widths(self, hidden: int, projection: int = 0) -> tuple[int, ...]:
        """The features of each state; a projection narrows `h` alone."""
        return (projection or hidden, *[hidden] * (len(self.states) - 1))


LSTM = Cell(
    "lstm", 0, "LSTM", nn.LSTM, nn.LSTMCell, ("h", "c"), ("i", "f", "g", "o"), "f", onednn=True
)
GRU = Cell("gru", 1, "GRU", nn.GRU, nn.GRUCell, ("h",), ("r", "z", "n"), "z")
RNN_TANH = Cell("rnn_tanh", 2, "RNN_TANH", nn.RNN, nn.RNNCell, ("h",), ("h",), nonlinearity="tanh")
RNN_RELU = Cell("rnn_relu", 3, "RNN_RELU", nn.RNN, nn.RNNCell, ("h",), ("h",), nonlinearity="relu")

CELLS: dict[str, Cell] = {cell.name: cell for cell in (LSTM, GRU, RNN_TANH, RNN_RELU)}
BY_MODE: dict[str, Cell] = {cell.mode: cell for cell in CELLS.values()}


def cell_of(module: nn.RNNBase | nn.RNNCellBase) -> Cell | None:
    """The row of torch's layer or cell; None for a class of the user's own that is neither."""
    if isinstance(module, nn.RNNBase):
        return BY_MODE.get(module.mode)
    for cell in CELLS.values():
        if isinstance(module, cell.step) and cell.nonlinearity == getattr(
            module, "nonlinearity", None
        ):
            return cell
    return None


class Weights(NamedTuple):
    """The weights of one layer in one direction, gates in the order of `Cell.gates`."""

    ih: Tensor  # (G*H, D)
    hh: Tensor  # (G*H, P)
    b_ih: Tensor | None  # (G*H,)
    b_hh: Tensor | None  # (G*H,)
    hr: Tensor | None  # (P, H), the projection of an LSTM

    @property
    def hidden(self) -> int:
        """H."""
        return self.hh.shape[1] if self.hr is None else self.hr.shape[1]
