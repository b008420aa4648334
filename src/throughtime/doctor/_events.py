"""The events of a training loop: hooks and wrappers of torch that notify the rules."""

import functools
import itertools
import re
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.modules.module as modules
import torch.optim.optimizer as optimizers
from torch import Tensor, nn
from torch.utils.data import (
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from throughtime.doctor._frames import (
    SourceLine,
    current_frame,
    current_line,
    line_in,
    tensors,
    user_frame,
)
from throughtime.doctor._graph import (
    LoaderIterator,
    has_hook,
    is_transformed,
    next_sequence,
    reachable_nodes,
    sequence,
)
from throughtime.doctor._log import Backward, Change, Close, Event, Log, WeightStep
from throughtime.doctor.findings import FindingList
from throughtime.doctor.rules.errors import explain, lanes_of_error
from throughtime.doctor.rules.loop import AT
from throughtime.doctor.rules.state import StateRule
from throughtime.doctor.watcher import Watcher, is_replaced

MAX_NODES = 4_000  # nodes visited in the graph of a backward
# the calls of a model in training (t), in evaluation with a graph (e) and without one (v), and its
# steps (s), if a step that follows a validation trains in its mode
FORGOTTEN = re.compile("t[^t]*s.*v[^t]*e[^ts]*s$")
MAX_PAST = 64  # of these remembered
MAX_RETAINED = 16  # retained backwards measured in one line
FIRST_CHUNKS = 20  # chunks watched by operation at the start,
PERIOD, AGAIN_CHUNKS = 256, 3  # and how often and for how long again


class LoopEvents:
    """Hooks and wrappers of torch, the watcher, and the rules that receive their events."""

    def __init__(self, findings: FindingList) -> None:
        self.log, self.findings = Log(), findings
        self.state = StateRule(self.log, findings.add)
        self.watcher = Watcher(self.log, self.state)
        self._optimizers = weakref.WeakKeyDictionary[Any, SourceLine | None]()  # and their lines
        self._last_steps = weakref.WeakKeyDictionary[Any, WeightStep]()
        self._thread = threading.get_ident()
        self._undo: list[Callable[[], Any]] = []
        self._watch_until = FIRST_CHUNKS  # the chunk
        self._in_backward = self._in_step = False
        self._depth = 0  # modules that run now, one inside the other
        self._outermost = nn.Module()  # the one that runs
        self._past = weakref.WeakKeyDictionary[nn.Module, str]()  # of outermost modules, see above
        self._evals = weakref.WeakKeyDictionary[nn.Module, SourceLine | None]()  # calls of eval()
        self._hidden = weakref.WeakSet[nn.Module]()  # layers that their model has not registered
        self._iterators = weakref.WeakKeyDictionary[Any, int]()  # their numbers
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
        self._wrap(torch.autograd, "backward", self._backward)
        self._wrap(torch.autograd, "grad", self._backward)
        self._wrap(torch.optim.Optimizer, "zero_grad", self._zero_grad)
        self._wrap(nn.Module, "zero_grad", self._zero_grad)
        self._wrap(torch.optim.Optimizer, "__init__", self._init_optimizer)
        self._wrap(nn.Module, "eval", self._eval)
        self._wrap(torch, "from_numpy", self._from_numpy)
        self._wrap(LoaderIterator, "__next__", self._next_batch)
        self.watcher.__enter__()

    def close(self) -> None:
        """Stop watching, and remove hooks and wrappers in the opposite order."""
        self.watcher.close()
        while self._undo:
            self._undo.pop()()

    def emit(self, event: Event) -> None:
        """Add an event to the log, and report what the rules find."""
        self.log.append(event)
        for rule in AT.get(type(event), ()):
            self.watcher.guarded(
                lambda rule: [*map(self.findings.add, rule(self.log, event))], rule
            )

    def end(self, error: BaseException | None) -> None:
        """Report what the end of the loop shows."""
        if error is not None:
            self.watcher.guarded(lambda: self.findings.add(lanes_of_error(error)))
            return
        self.watcher.guarded(self.state.close)
        self.emit(Close())

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
        """Whether the doctor itself, an optimizer or another thread is at work."""
        return self.watcher.busy or threading.get_ident() != self._thread

    def _watch(self, chunks: int = AGAIN_CHUNKS) -> None:
        """Record every operation for some chunks, then the calls of layers only."""
        watcher, chunk = self.watcher, self.log.chunk
        self._watch_until = max(self._watch_until, chunk + chunks)
        awake = chunk < self._watch_until
        if awake and not watcher.awake:
            self.log.add_node(next_sequence() - 1, None)  # those of no instruction end here
        watcher.awake = awake
        watcher.table.complete &= awake
        watcher.operations = 0
        if awake:
            watcher.resume()

    def _before_module(self, module: nn.Module, _: Any) -> None:
        if is_replaced() or self._ignored:
            return
        log, self._depth = self.log, self._depth + 1
        if self._depth == 1:
            log.call += 1
            if not self.watcher.awake:  # not within a backward, which torch runs with the mode off
                self.watcher.pause()
            log.training, self._outermost = module.training, module
            kind = "t" if module.training else "e" if torch.is_grad_enabled() else "v"
            past = self._past.get(module, "")
            self._past[module] = (past + kind).replace("tsts", "ts")[-MAX_PAST:]
            if module.training is not past.rstrip("s").endswith("t"):
                self._watch()
        elif log.chunk < FIRST_CHUNKS and module not in {*self._outermost.modules()}:
            self._hidden.add(module)
        if isinstance(module, nn.RNNBase):  # also while operations are not recorded
            self.watcher.resume()

    def _after_module(self, module: nn.Module, _: Any, __: Any) -> None:
        if is_replaced() or self._ignored:
            return
        self._depth -= self._depth > 0
        if isinstance(module, nn.RNNBase) and not self.watcher.awake:
            self.watcher.pause()

    def _eval(self, original: Any, module: nn.Module) -> Any:
        self._evals[module] = current_line()
        return original(module)

    def _init_optimizer(self, original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        original(optimizer, *args, **kwargs)
        self._optimizers[optimizer] = current_line()
        self._past.clear()  # another phase, which may train in evaluation

    def _backward(self, original: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Run `torch.autograd.backward` or `torch.autograd.grad`."""
        frame, guarded, log = user_frame(current_frame()), self.watcher.guarded, self.log
        # torch calls itself again through the mode
        if not frame or self._in_backward or is_transformed():
            return original(outputs, *args, **kwargs)
        is_grad = original.__name__ == "grad"
        retain = kwargs.get("retain_graph", args[1 + is_grad] if len(args) > 1 + is_grad else False)
        retain = bool(retain or (is_grad and kwargs.get("create_graph")))
        backward = Backward(line_in(frame), retain)
        backward.used = retain or is_grad or not self.watcher.awake
        # a gradient that keeps its graph, as for a gradient of gradients, ends no chunk
        ends_chunk = not (is_grad and retain)
        roots = [tensor.grad_fn for tensor in tensors(outputs)]
        if ends_chunk:
            guarded(self.state.before_backward)
            guarded(self._measure, backward, roots[0] if roots else None)
        self._in_backward = True
        try:
            result = original(outputs, *args, **kwargs)
        except RuntimeError as error:
            guarded(self._explain, str(error), roots, backward)
            raise
        finally:
            self._in_backward = False
        del roots  # its graph must not live on
        if ends_chunk:
            log.next_chunk()
            guarded(self.watcher.table.drop_freed)
            backward.boundary = log.boundary
            self.emit(backward)
            self._watch(0 if log.chunk % PERIOD else AGAIN_CHUNKS)
        return result

    def _measure(self, backward: Backward, root: Any) -> None:
        """The facts of a backward before it runs."""
        log = self.log
        backward.chunk, backward.steps, backward.newest = log.chunk, log.steps, next_sequence()
        for step in self._last_steps.values():
            if step.grad and (grad := step.grad()) is not None and not _has_values(grad):
                log.append(Change("c", step.parameters))  # by hand
        if root is None:
            return
        number = backward.number = sequence(root)
        if not self.watcher.awake:
            return
        log.roots.add(log.instruction_of(number))
        same = [e for e in log.backwards if e.line == backward.line and e.reach >= 0]
        # several backwards may go through the same forward pass
        if backward.retain and number > log.boundary and len(same) <= MAX_RETAINED:
            oldest = min(map(sequence, reachable_nodes(root, MAX_NODES)))
            backward.reach = sum(oldest <= e.number < e.newest <= number for e in same)

    def _explain(self, message: str, roots: list[Any], backward: Backward) -> None:
        faults = (explain(self.log, message, root, backward) for root in roots if root)
        self.findings.add(next(filter(None, faults), None))

    def _before_step(self, _: Any, args: Any, kwargs: Any) -> None:
        # a closure would be the user's loop
        if not self._ignored and not args[1:] and not kwargs:
            self._in_step = self.watcher.busy = True

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._in_step and threading.get_ident() == self._thread:
            self._in_step = self.watcher.busy = False
        if not self._ignored:
            self.log.steps += 1
            self.watcher.guarded(self._log_step, optimizer, bool(args[1:] or kwargs))

    def _log_step(self, optimizer: Any, closure: bool) -> None:
        parameters, log = parameters_of(optimizer), self.log
        grads = [p.grad for p in parameters if p.grad is not None]
        grad = grads[0] if grads else None
        before = self._last_steps.get(optimizer)
        step = WeightStep(frozenset(map(id, parameters)), current_line(), before)
        step.chunk, step.number = log.chunk, next_sequence() - 1
        step.lacks = not closure and not any(map(_has_values, grads))
        step.grad = grad if grad is None else weakref.ref(grad)
        step.repeated = bool(before and grad is not None and before.grad and before.grad() is grad)
        step.has_hooks = any(map(has_hook, parameters))
        source = self._optimizers.setdefault(optimizer, None) or step.line
        if 0 < log.chunk < FIRST_CHUNKS:
            # layers that are not registered, or all of a model, may train in no optimizer
            known = {id(p) for each in self._optimizers for p in parameters_of(each)}
            models = [*self._hidden, *(self._past if step.lacks else ())]
            trained = ({id(p) for p in m.parameters() if p.grad is not None} for m in models)
            if any(ids and not ids & known for ids in trained):
                step.constructed = source
        for module, past in list(self._past.items()):
            if step.parameters & {*map(id, itertools.islice(module.parameters(), 1))}:
                self._past[module] = past + "s"
                if FORGOTTEN.search(past + "s") and _depends_on_mode(module):
                    step.evaluating = self._evals.get(module)
        self._last_steps[optimizer] = step
        self.emit(step)
        step.before = None
        for each in log.backwards[-1:]:  # for the other optimizers
            each.used = True

    def _zero_grad(self, original: Any, owner: Any, *args: Any, **kwargs: Any) -> Any:
        of = nn.Module.parameters if isinstance(owner, nn.Module) else parameters_of
        self.log.append(Change("c", frozenset(map(id, of(owner))), current_line()))
        return original(owner, *args, **kwargs)

    def _from_numpy(self, original: Any, array: Any) -> Tensor:
        result = original(array)
        self.watcher.guarded(self.watcher.table.from_array, array, result)
        return result

    def _next_batch(self, original: Any, iterator: Any) -> Any:
        log = self.log
        if iterator not in self._iterators:
            self._iterators[iterator] = next(self._numbers)
            self._watch()
        batch = original(iterator)
        log.batch = self._iterators[iterator], log.batch[1] + 1
        log.loader = current_line()
        log.random = draws_at_random(iterator._index_sampler)
        return batch


def parameters_of(optimizer: Any) -> list[Tensor]:
    """All parameters of an optimizer."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def _has_values(grad: Tensor) -> bool:
    return bool((grad.coalesce().values() if grad.is_sparse else grad).any())


def _depends_on_mode(module: nn.Module) -> bool:
    """Whether a model has batch norm or dropout."""
    kinds = nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd
    return any(
        (isinstance(each, kinds) and getattr(each, "p", 1))
        or (isinstance(each, nn.RNNBase) and each.dropout and each.num_layers > 1)
        for each in module.modules()
    )


def draws_at_random(sampler: Any) -> bool:
    """Whether a sampler, or that of a batch sampler, does not keep the order of time."""
    sampler = getattr(sampler, "sampler", sampler)
    return isinstance(sampler, (RandomSampler, SubsetRandomSampler, WeightedRandomSampler))
