"""The model contract `(x, state) -> (y, state)`, and one adapter per kind of module.

LayerAdapter   nn.LSTM, nn.GRU, nn.RNN               state (B, L, H), one or two of them
CellAdapter    nn.LSTMCell, nn.GRUCell, nn.RNNCell   a loop over time with `unbind`
ChainAdapter   nn.Sequential                         a dict of its children's states
ModuleAdapter  any other module, by a convention     its own state, lanes moved to the front

A convention says how a module is called: the layout of its inputs, where its state is and starts,
and which of its results the outputs are. `_sources` proposes where the state is, the usual places
first, and `_search` completes the proposals by calls. A `Subject`, the copy under trial, accepts
the first that obeys every law of the table in `_laws`: only measurements decide.

The loop over time uses `unbind` because indexing `x[t]` has a quadratic backward: each index
allocates a gradient for all of `x`.

Layers of `tt.nn` apply resets themselves, and so may a module with a parameter such as `resets` or
`done`. If every part of a net does, a forward call is not split at resets.

Shapes: `T` steps, `B` lanes, `D` input features, `H` hidden, `L` layers.
"""

from throughtime.carry.carried import Carried, carry

__all__ = ["Carried", "carry"]
