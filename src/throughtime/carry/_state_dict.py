"""The names of a carried net's weights where they are loaded: those of its module.

A parameter `weight` of the module is `module.weight` in the tree of modules and `weight` in a
`state_dict`, so that a carried net and the plain module load each other. This hook of torch
translates; it works for a net inside other modules too.
"""

from typing import Any

from torch import nn

WRAPPED = "module."  # the child of a carried net, and that of DistributedDataParallel


def own_names(net: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Add `module.` to the names of the module; a hook before loading.

    Names that have it already are those of `named_parameters`, or of DistributedDataParallel.
    """
    del rest
    others = {*net._parameters, *net._buffers, *net._modules} - {"module"}
    names = [name.removeprefix(prefix) for name in state_dict if name.startswith(prefix)]
    names = [name for name in names if name.partition(".")[0] not in others]
    expected = net.get_submodule("module").state_dict().keys()
    is_wrapped = expected.isdisjoint(names) and any(WRAPPED + n in names for n in expected)
    if not is_wrapped:
        state_dict.update({prefix + WRAPPED + n: state_dict.pop(prefix + n) for n in names})
