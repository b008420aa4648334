"""What is hooked and wrapped while the doctor watches, and put back at the end."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.modules.module as modules
import torch.optim.optimizer as optimizers
from torch.utils.data.dataloader import DataLoader, _BaseDataLoaderIter


class Patches:
    """Hooks of torch, and functions replaced by wrappers that call them."""

    def __init__(self) -> None:
        self.undo: list[Callable[[], Any]] = []

    def wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Replaces `owner.name` by a function that hands the old one to `around` first."""
        old = owner.__dict__[name]

        @functools.wraps(old)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return around(old, *args, **kwargs)

        setattr(owner, name, wrapper)
        self.undo.append(lambda: setattr(owner, name, old))

    def put(self, events: Any) -> None:
        """Everything that the doctor listens to."""
        hooks = (
            modules.register_module_forward_pre_hook(events.enters),
            modules.register_module_forward_hook(events.leaves, always_call=True),
            optimizers.register_optimizer_step_pre_hook(events.steps),
            optimizers.register_optimizer_step_post_hook(events.stepped),
        )
        self.undo += [hook.remove for hook in hooks]
        self.wrap(torch.Tensor, "backward", events.tensor_backward)
        self.wrap(torch.autograd, "backward", events.backward)
        self.wrap(torch.autograd, "grad", events.grad)
        self.wrap(torch.optim.Optimizer, "zero_grad", events.zero_grad)
        self.wrap(torch.nn.Module, "zero_grad", events.zero_grad)
        self.wrap(DataLoader, "__init__", events.loader_made)
        self.wrap(DataLoader, "__iter__", events.loader_begins)
        self.wrap(_BaseDataLoaderIter, "__next__", events.batch)

    def remove(self) -> None:
        """Everything as it was, in the opposite order."""
        while self.undo:
            self.undo.pop()()
