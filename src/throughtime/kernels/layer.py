"""The names of the kinds, by which the kernels still address the table of cells."""

from typing import Literal

from throughtime.kernels.cells import Weights

__all__ = ["GATES", "Kind", "Weights"]

Kind = Literal["lstm", "gru", "rnn_tanh", "rnn_relu"]
GATES: dict[Kind, int] = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
