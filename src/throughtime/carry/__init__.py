"""The model contract `(x, state) -> (y, state)`, and one adapter per kind of module.

LayerAdapter      nn.LSTM, nn.GRU, nn.RNN              state (B, L, H), one or two of them
CellAdapter       nn.LSTMCell, nn.GRUCell, nn.RNNCell  a loop over time with `unbind`
ChainAdapter      nn.Sequential                        a dict of its children's states
HookAdapter       a module with recurrent layers in it a dict of the layers' states, set by hooks
ExplicitAdapter   forward(x, state) -> (y, state)      its own state, lanes moved to the front

The loop over time uses `unbind` because indexing `x[t]` has a quadratic backward: each index
allocates a gradient for all of `x`.

Layers of `tt.nn` apply resets themselves, and so does a module whose forward takes `resets`. If
every part of a net does, a forward call is not split at resets.

Shapes: `T` steps, `B` lanes, `D` input features, `H` hidden, `L` layers.
"""

from throughtime.carry.carried import Carried, carry

__all__ = ["Carried", "carry"]
