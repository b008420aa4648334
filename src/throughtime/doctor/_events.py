"""The events of a training loop: hooks and wrappers of torch that notify the rules."""

import functools
import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.modules.module as modules
import torch.optim.optimizer as optimizers
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from throughtime.doctor._frames import (
    SourceLine,
    call_site,
    called_by_trainer,
    current_frame,
    current_line,
    line_in,
    user_frame,
)
from throughtime.doctor._records import BackwardCall, Clock, tensors
from throughtime.doctor._torch_private import LoaderIterator, is_transformed, sequence
from throughtime.doctor.findings import FindingList
from throughtime.doctor.rules import EVENTS, Rule, parameters_of
from throughtime.doctor.rules.gradients import DetachRule, OptimizerRule
from throughtime.doctor.rules.graph import AutogradErrorRule, GrowthRule
from throughtime.doctor.rules.layout import LayoutRule
from throughtime.doctor.rules.state import StateRule
from throughtime.doctor.watcher import MAX_OPERATIONS, Watcher

# In the order in which they receive an event. The first sets `TensorRecord.source` for the others.
RULES: tuple[type[Rule], ...] = (
    StateRule,
    LayoutRule,
    OptimizerRule,
    DetachRule,
    GrowthRule,
    AutogradErrorRule,
)
# where the modules are whose results are followed while operations are not watched
FRONT_ENDS = {
    f"torch.nn.modules.{name}"
    for name in ("sparse", "linear", "conv", "batchnorm", "normalization", "dropout", "activation")
}
FIRST_CHUNKS = 20  # chunks watched by operation at the start,
PERIOD, AGAIN_CHUNKS = 256, 3  # and how often and for how long again


class LoopEvents:
    """Hooks and wrappers of torch, the watcher, and the rules that receive their events."""

    def __init__(self, findings: FindingList) -> None:
        self.clock = Clock()
        self.watcher = Watcher(self.clock)
        self.notify = self.watcher.notify
        rules = [rule(self.watcher, findings) for rule in RULES]
        self.watcher.handlers |= {
            event: [getattr(rule, event) for rule in rules if hasattr(rule, event)]
            for event in EVENTS
        }
        self._thread = threading.get_ident()
        self._undo: list[Callable[[], Any]] = []
        self._watch_until = FIRST_CHUNKS  # the chunk
        self._in_backward = self._off_in_step = False
        self._training: dict[int, bool] = {}  # by outermost module
        self._loaders: weakref.WeakKeyDictionary[Any, SourceLine | None] = (
            weakref.WeakKeyDictionary()
        )
        # by iterator: its number, whether it draws at random, the line of its loader
        self._iterators: weakref.WeakKeyDictionary[Any, tuple[int, bool, SourceLine | None]] = (
            weakref.WeakKeyDictionary()
        )
        self._numbers = itertools.count(1)

    def open(self) -> None:
        """Install the hooks and wrappers, and watch."""
        hooks = (
            modules.register_module_forward_pre_hook(self._before_module),
            modules.register_module_forward_hook(self._after_module, always_call=True),
            optimizers.register_optimizer_step_pre_hook(self._before_step),
            optimizers.register_optimizer_step_post_hook(self._after_step),
        )
        self._undo += [hook.remove for hook in hooks]
        self._wrap(torch.Tensor, "backward", self._tensor_backward)
        self._wrap(torch.autograd, "backward", self._backward)
        self._wrap(torch.autograd, "grad", self._backward)
        self._wrap(torch.optim.Optimizer, "zero_grad", self._zero_grad)
        self._wrap(nn.Module, "zero_grad", self._zero_grad)
        self._wrap(torch, "from_numpy", self._from_numpy)
        self._wrap(DataLoader, "__init__", self._init_loader)
        self._wrap(DataLoader, "__iter__", self._iterate_loader)
        self._wrap(LoaderIterator, "__next__", self._next_batch)
        self.watcher.on()

    def close(self) -> None:
        """Stop watching, and remove hooks and wrappers in the opposite order."""
        try:
            self.watcher.off()
            self.watcher.closed = True
        finally:
            while self._undo:
                self._undo.pop()()

    def _wrap(self, owner: Any, name: str, handler: Callable[..., Any]) -> None:
        """Replace `owner.name` by a function that calls `handler(original, ...)`."""
        original = owner.__dict__[name]

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if self._ignored:
                return original(*args, **kwargs)
            return handler(original, *args, **kwargs)

        setattr(owner, name, wrapper)
        self._undo.append(lambda: setattr(owner, name, original))

    @property
    def _ignored(self) -> bool:
        """Whether the doctor itself or another thread is at work."""
        return self.watcher.busy or threading.get_ident() != self._thread

    def _watch(self, chunks: int) -> None:
        """Watch every operation for some chunks."""
        self._watch_until = max(self._watch_until, self.clock.chunk + chunks)
        self.watcher.operations = 0
        self.watcher.on()

    def _pause(self) -> None:
        """After a backward: stop watching if the chunks or the operations are used up."""
        over = self.clock.chunk >= self._watch_until
        if over and self.clock.chunk % PERIOD == 0:
            self._watch(AGAIN_CHUNKS)
        elif over and self.watcher.follows_data and self.watcher.internal_error is None:
            self.watcher.operations = 0
            self.watcher.on()
        elif over or self.watcher.operations > MAX_OPERATIONS:
            self.watcher.off()

    def _before_module(self, module: nn.Module, inputs: Any) -> None:
        if torch.compiler.is_compiling() or is_transformed() or self._ignored:
            return
        clock = self.clock
        if clock.depth == 0:
            clock.call += 1
            clock.training = module.training
            if self._training.setdefault(id(module), module.training) != module.training:
                self._training[id(module)] = module.training
                self._watch(AGAIN_CHUNKS)
            elif self.watcher.operations > MAX_OPERATIONS:
                self.watcher.off()
        clock.depth += 1
        if not isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
            return
        if clock.chunk >= self._watch_until:
            self.watcher.off()
        if not self.watcher.active:
            self.notify("before_module", module, inputs, user_frame(current_frame()))

    def _after_module(self, module: nn.Module, inputs: Any, result: Any) -> None:
        if (
            torch.compiler.is_compiling()
            or is_transformed()
            or self._ignored
            or not self.clock.depth
        ):
            return
        self.clock.depth -= 1
        if not self.watcher.active and inputs and type(module).__module__ in FRONT_ENDS:
            self.watcher.guarded(self.watcher.pass_data_on, module, inputs[0], result)
        if not isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
            return
        if result is None:
            self.notify("on_module_error", module)
        elif not self.watcher.active:
            self.notify("after_module", module, result)

    def _tensor_backward(self, original: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Switch the mode off around `Tensor.backward`: inside, it cannot be switched."""
        was_active = self.watcher.active
        self.watcher.off()
        try:
            return original(tensor, *args, **kwargs)
        finally:
            if was_active:
                self.watcher.on()
            self._pause()

    def _backward(self, original: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Run `torch.autograd.backward` or `torch.autograd.grad`."""
        frame = user_frame(current_frame())
        if frame is None or self._in_backward:  # torch calls itself again through the mode
            return original(outputs, *args, **kwargs)
        is_grad = original.__name__ == "grad"
        retain = kwargs.get("retain_graph", args[1 + is_grad] if len(args) > 1 + is_grad else False)
        if is_grad:
            retain = retain or kwargs.get("create_graph")
            inputs = kwargs.get("inputs", args[0] if args else ())
            self.watcher.guarded(self.watcher.note_gradients, inputs)
        roots = tensors(outputs)
        root = roots[0].grad_fn if roots else None
        number = -1 if root is None else sequence(root)
        line, site = line_in(frame), call_site(frame)
        backward = BackwardCall(root, bool(retain), line, site, is_grad, number)
        run = functools.partial(original, outputs, *args, **kwargs)
        result = self._run_backward(run, roots, backward)
        if is_grad:
            self._pause()
        return result

    def _run_backward(
        self, run: Callable[[], Any], roots: list[Tensor], backward: BackwardCall
    ) -> Any:
        # a gradient that keeps its graph, as for a gradient of gradients, ends no chunk
        if ends_chunk := not (backward.is_grad and backward.retain):
            self.notify("before_backward", backward)
        self._in_backward = True
        try:
            result = run()
        except RuntimeError as error:
            for finding in filter(None, self.notify("explain", error, roots, backward)):
                error.add_note(f"tt.doctor: {finding}")
            raise
        finally:
            self._in_backward, backward.root = False, None  # its graph must not live on
            if ends_chunk:
                self.notify("end_backward", backward)
        if ends_chunk:
            self.clock.chunk += 1
            self.clock.continued.clear()
            self.watcher.guarded(self.watcher.next_chunk)
            self.notify("after_backward", backward)
        return result

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._ignored:
            return
        self.notify("before_step", optimizer)
        # a closure would be the user's loop
        if not args[1:] and not kwargs and self.watcher.active:
            self.watcher.off()
            self._off_in_step = True

    def _after_step(self, optimizer: Any, _: Any, __: Any) -> None:
        if self._ignored:
            return
        if self._off_in_step:
            self._off_in_step = False
            self.watcher.on()
        self.clock.steps += 1
        self.notify("after_step", optimizer, current_line())

    def _zero_grad(self, original: Any, owner: Any, *args: Any, **kwargs: Any) -> Any:
        is_optimizer = isinstance(owner, torch.optim.Optimizer)
        parameters = parameters_of(owner) if is_optimizer else list(owner.parameters())
        self.notify("before_zero_grad", owner, parameters, current_line())
        return original(owner, *args, **kwargs)

    def _from_numpy(self, original: Any, array: Any) -> Tensor:
        result = original(array)
        self.watcher.guarded(self.watcher.data.copy_array, array, result)
        return result

    def _init_loader(self, original: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
        original(loader, *args, **kwargs)
        if not called_by_trainer(current_frame()):
            self._loaders[loader] = current_line()

    def _iterate_loader(self, original: Any, loader: Any) -> Any:
        iterator = original(loader)
        line = self._loaders.get(loader) if called_by_trainer(current_frame()) else None
        self._watch(AGAIN_CHUNKS)
        draws = draws_at_random(loader)
        self._iterators[iterator] = next(self._numbers), draws, line or current_line()
        return iterator

    def _next_batch(self, original: Any, iterator: Any) -> Any:
        clock = self.clock
        number, is_random, line = self._iterators.get(iterator, (0, False, None))
        clock.loading = is_random
        try:
            batch = original(iterator)
        finally:
            clock.loading = False
        if number:
            clock.random, clock.loader = is_random, line
            clock.batch = number, clock.batch[1] + 1
        return batch


def draws_at_random(loader: Any) -> bool:
    """Whether the sampler of a loader does not keep the order of time."""
    sampler, batch_sampler = loader.sampler, getattr(loader, "batch_sampler", None)
    if isinstance(batch_sampler, BatchSampler):
        sampler = batch_sampler.sampler
    if isinstance(sampler, DistributedSampler):
        return bool(sampler.shuffle) or sampler.num_replicas > 1
    return isinstance(sampler, (RandomSampler, SubsetRandomSampler, WeightedRandomSampler))
