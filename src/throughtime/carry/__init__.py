"""How each kind of module is run as `(x, state) -> (y, state)`: one contract per kind.

Layer        nn.LSTM, nn.GRU, nn.RNN            state (B, L, H), one or two of them
Cell         nn.LSTMCell, nn.GRUCell, nn.RNNCell  a loop over time with `unbind`: indexing `x[t]` in
             a loop has a quadratic backward, because each index allocates a gradient for all of x
Chain        nn.Sequential                      a dict of its children's states
Hiding       a module with layers inside        a dict of the layers' states, put in and taken out
by hooks
Explicit     a module that maps (x, state) to (y, state)   whatever it returns, lanes turned to the
front

Resets go into the layers of `tt.nn`, and into a module whose forward takes them by name; where
every part of a net takes them the forward call stays whole.

Shapes: `T` steps, `B` lanes, `D` input features, `H` hidden, `L` layers.
"""

from throughtime.carry.carried import Carried, carry

__all__ = ["Carried", "carry"]
