"""What the names of parameters, methods and attributes suggest; laws decide whether it is so."""

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

STATE_NAMES = {
    *("h", "c", "hx", "cx", "hxs", "h0", "c0", "hc", "s", "m", "mems", "syn", "cache", "carry"),
    *("past", "context", "buffer"),
}
STATE_PREFIXES = ("hid", "state", "cell", "mem")
LANE_NAMES = {"batch", "bsz", "bs", "b", "n", "lanes", "num_envs", "n_envs", "size"}
INPUT_NAMES = {"x", "input", "inputs", "obs", "data", "input_tensor", "like", "emb", "tokens"}
SIZE_ATTRIBUTES = ("batch_size", "batch_sz", "bsz", "batch")
STATE_FLAGS = {  # boolean parameters by which a module is asked for its state
    *("return_state", "return_states", "return_hidden", "return_last_state", "ret_state"),
    *("output_state", "return_next_prev_hidden", "use_cache", "return_cache"),
}
RESTARTS = {  # parameters that mean a restart, and whether 0 does
    **dict.fromkeys(("resets", "reset", "reset_mask", "done", "dones", "is_first", "first"), False),
    **dict.fromkeys(("is_init", "episode_starts"), False),
    **dict.fromkeys(("mask", "masks", "not_done", "nonterminal", "nonterminals"), True),
    "continues": True,
}
_INITIAL_VERBS = ("init", "begin", "zero", "start", "default", "empty", "create", "make", "get")
_OTHER_INITIAL = {"initHidden", "initState", "init_leaky", "state0"}
_RESET_VERBS = ("reset", "clear")


def names_state(name: str) -> bool:
    """Whether a name is one that people give a state: `hidden`, `h_prev`, `rnn_hxs`, `mems`."""
    plain = name.lower().strip("_0123456789")
    words = plain.replace("prev", "").replace("init", "").strip("_").split("_")
    return any(word in STATE_NAMES or word.startswith(STATE_PREFIXES) for word in words)


def names_lanes(name: str) -> bool:
    """Whether a name is one that people give a number of lanes: `bsz`, `batch_size`."""
    return name in LANE_NAMES or "batch_s" in name or "batchs" in name or name.endswith("_lanes")


def is_method(module: nn.Module, name: str) -> bool:
    """Whether a module has a method of a name, not a parameter or a submodule."""
    value = inspect.getattr_static(module, name, None)  # a property may raise, as Lightning's do
    return callable(value) and not isinstance(value, nn.Module)


def parameters_of(method: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of a method by name, without self; those by keyword alone are the last."""
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p for p in inspect.signature(method).parameters.values() if p.kind not in variable]


def initial_methods(module: nn.Module) -> list[str]:
    """The methods that make an initial state, by their names; `initial_state` first."""
    return _methods(module, _INITIAL_VERBS, _OTHER_INITIAL)


def reset_methods(module: nn.Module) -> list[str]:
    """The methods that put a state in attributes back, by their names."""
    return _methods(module, _RESET_VERBS, {"reset"}) + initial_methods(module)


def preparing_methods(module: nn.Module) -> list[str]:
    """Those that may have to be called before the first inputs, whatever they are about."""
    verbs = (*_RESET_VERBS, *_INITIAL_VERBS)
    names = _own_methods(module)
    others = [name for name in names if name.lower().lstrip("_").startswith(verbs)]
    return list(dict.fromkeys([*reset_methods(module), *others]))


def _methods(module: nn.Module, verbs: tuple[str, ...], others: set[str]) -> list[str]:
    return [
        name
        for name in _own_methods(module)
        if name in others or (name.lower().lstrip("_").startswith(verbs) and names_state(name))
    ]


def _own_methods(module: nn.Module) -> list[str]:
    """The methods that torch's modules do not have, by name; `initial_state` first."""
    own = set(dir(type(module))) - set(dir(nn.Module))
    names = [name for name in own if is_method(module, name) and not name.startswith("__")]
    return sorted(names, key=lambda name: (name != "initial_state", name))
