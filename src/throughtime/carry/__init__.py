"""The model contract `(x, state) -> (y, state)`, and one adapter per kind of module.

LayerAdapter   nn.LSTM, nn.GRU, nn.RNN, cells     state (B, L, H) or (B, H), one or two of them
ChainAdapter   nn.Sequential, tt.nn.Difference    a dict of its children's states
ModuleAdapter  any other module, by a convention  its own state, lanes moved to the front

A convention (`_calls`) says how a module is called: the layout of its inputs, where its state is
and starts, and which of its results the outputs are; that of a layer is known. A state is one of
three: arguments that come back in the result, attributes that a call changes and the next one
reads, or layers of torch.nn inside, whose state hooks set and read (`_inside`). `_layout` says
where the outputs and the lanes lie. `_search` proposes conventions, the usual ones first,
completes them by calls, and accepts the first that obeys every law of the table in `_laws`, on the
module's weights and on others: only measurements decide. A child of a chain may obey them without
a state. Otherwise `_refusal` says what is in the way, and the line to write.

Adapters do not change. Before its first inputs a module has an `UnknownAdapter`, which
`layers.prepared` replaces by the one that was measured.

The loop over time uses `unbind` because indexing `x[t]` has a quadratic backward: each index
allocates a gradient for all of `x`.

Layers of `tt.nn` apply resets themselves. If every part of a chain does, a forward call is not
split at resets.

Shapes: `T` steps, `B` lanes, `D` input features, `H` hidden, `L` layers.
"""

from throughtime.carry.carried import Carried, carry

__all__ = ["Carried", "carry"]
