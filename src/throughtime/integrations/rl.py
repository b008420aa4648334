"""Recurrent agents of sb3-contrib and TorchRL: a rollout with its resets is one call of a layer.

Both libraries train on rollouts in which episodes start anywhere. sb3-contrib then calls its LSTM
once for each step, and TorchRL's default cuts and pads the rollout into episodes. The layers of
`tt.nn` take the resets themselves.

`LSTMModule` and `GRUModule` take the place of those in `torchrl.modules`: change the import. They
are made when they are first asked for, so that this module imports neither library.

Shapes: `T` steps, `B` environments or parts of rollouts, `D` features, `H` hidden, `L` layers.
"""

from typing import Any, TypeVar

from torch import Tensor, nn

import throughtime as tt
from throughtime.errors import MissingExtraError, ModelError
from throughtime.nn.layers import Recurrent
from throughtime.state import tensors

P = TypeVar("P", bound=nn.Module)
_MODULES = {"LSTMModule": "lstm", "GRUModule": "gru"}  # the layer of each


def fuse(policy: P) -> P:
    """The policy of sb3-contrib's RecurrentPPO, with `tt.nn.LSTM` and resets within its calls.

    Call it once, after making or loading the algorithm: `fuse(model.policy)`. Weights, optimizer
    and saved files stay what they are. A policy that `RecurrentPPO.load` makes is a new one.

    Args:
        policy: changed in place; a subclass of `RecurrentActorCriticPolicy`.

    Returns:
        The same object.

    Raises:
        ModelError: another object, or an LSTM that `tt.fuse` leaves as it is.

    Cost: nothing is copied. docs/how-to/agents.md has the speed.

    Example:
        >>> from sb3_contrib import RecurrentPPO
        >>> from throughtime.integrations.rl import fuse
        >>> model = RecurrentPPO("MlpLstmPolicy", "CartPole-v1", n_steps=16, batch_size=16)
        >>> type(fuse(model.policy).lstm_actor).__module__
        'throughtime.nn.layers'
    """
    layers = [getattr(policy, name, None) for name in ("lstm_actor", "lstm_critic")]
    if not hasattr(policy, "_process_sequence"):
        raise ModelError(
            f"fuse got a {type(policy).__name__}, expected the policy of sb3-contrib's"
            " RecurrentPPO: fuse(model.policy). For TorchRL import LSTMModule or GRUModule from"
            " throughtime.integrations.rl"
        )
    tt.fuse(policy)
    if not all(isinstance(layer, Recurrent | None) for layer in layers):
        raise ModelError(
            "an LSTM of the policy is a class of its own, whose forward takes no resets: let it"
            " inherit from tt.nn.LSTM and pass them on"
        )
    setattr(policy, "_process_sequence", _process_sequence)  # noqa: B010  # a static method there
    return policy


def _process_sequence(
    features: Tensor, lstm_states: tuple[Tensor, Tensor], episode_starts: Tensor, lstm: tt.nn.LSTM
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """sb3-contrib's method: features `(B * T, D)`, states `(L, B, H)`, starts `(B * T,)`."""
    lanes = lstm_states[0].shape[1]
    x = features.reshape(lanes, -1, lstm.input_size).transpose(0, 1)
    y, state = lstm(x, lstm_states, episode_starts.reshape(lanes, -1).t() > 0)
    return y.transpose(0, 1).flatten(0, 1), state


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import torchrl.modules
        from tensordict.nn import dispatch
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"throughtime.integrations.rl.{name} needs TorchRL: pip install 'throughtime[rl]'"
        ) from error
    own, base = _MODULES[name], getattr(torchrl.modules, name)

    def init(self: Any, *args: Any, **options: Any) -> None:
        base.__init__(self, *args, **options)
        tt.fuse(self)

    def forward(self: Any, tensordict: Any) -> Any:
        layer = getattr(self, own)
        if not (self.recurrent_mode and tensordict.ndim and isinstance(layer, Recurrent)):
            return base.forward(self, tensordict)
        return _run_rollout(self, layer, tensordict)

    decorate: Any = dispatch  # it may be called with options, too
    members = {"__module__": __name__, "__init__": init, "forward": decorate(forward)}
    globals()[name] = type(name, (base,), members)
    return globals()[name]


def _run_rollout(module: Any, layer: nn.RNNBase, tensordict: Any) -> Any:
    """TorchRL's recurrent mode: steps come last in the batch, states `(..., T, L, H)`.

    Of the states after a step the last one alone is known, others are zero. TorchRL also has those
    after the last step of each episode.

    Raises:
        ModelError: a state other than zero is stored where an episode starts.
    """
    rows = tensordict.unsqueeze(0) if tensordict.ndim == 1 else tensordict.flatten(0, -2)
    resets = rows["is_init"].squeeze(-1)
    x, *stored = (rows.get(key, None) for key in module.in_keys if key != "is_init")
    entering = [leaf for leaf in stored if leaf is not None]
    if any(leaf[resets].any() for leaf in entering):
        raise ModelError(
            "a state that is not zero is stored at a step where is_init is true: reset states to"
            " zeros, as make_tensordict_primer() does by default, or use torchrl.modules"
        )
    hx = tuple(leaf[:, 0].transpose(0, 1).contiguous() for leaf in entering)
    y, state = layer(x, hx if len(hx) > 1 else hx[0] if hx else None, resets)
    rows.set(module.out_keys[0], y)
    for key, leaf in zip(module.out_keys[1:], tensors(state), strict=True):
        last = leaf.transpose(0, 1)
        states = last.new_zeros(*resets.shape, *last.shape[1:])
        states[:, -1] = last
        rows.set(key, states)
    return tensordict.update(rows.reshape(tensordict.shape))
