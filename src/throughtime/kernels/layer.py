"""What all kernels of recurrent layers share: the kinds, and the weights of one layer in one
direction.

Shapes: `D` input features, `H` hidden, `P` = `H` or the size of a projection, `G` gates.
"""

from typing import Literal, NamedTuple

from torch import Tensor

Kind = Literal["lstm", "gru", "rnn_tanh", "rnn_relu"]
GATES: dict[Kind, int] = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


class Weights(NamedTuple):
    """The weights of one layer, gates in torch's order: LSTM i f g o, GRU r z n."""

    ih: Tensor  # (G*H, D)
    hh: Tensor  # (G*H, P)
    b_ih: Tensor | None  # (G*H,)
    b_hh: Tensor | None  # (G*H,)
    hr: Tensor | None  # (P, H), the projection of an LSTM

    @property
    def hidden(self) -> int:
        """H."""
        return self.hh.shape[1] if self.hr is None else self.hr.shape[1]
