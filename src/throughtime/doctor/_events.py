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

from throughtime.doctor._autograd import is_leaf, mean_terms, reachable_nodes
from throughtime.doctor._frames import (
    SourceLine,
    call_site,
    called_by_trainer,
    current_frame,
    current_line,
    line_in,
    user_frame,
)
from throughtime.doctor._log import Backward, Clear, Close, Event, Fault, Log, WeightStep
from throughtime.doctor._torch_private import (
    LoaderIterator,
    is_transformed,
    next_sequence,
    sequence,
    version_of,
)
from throughtime.doctor.findings import Finding, FindingList
from throughtime.doctor.rules.errors import explain, lanes_of_error
from throughtime.doctor.rules.loop import AT, kept
from throughtime.doctor.rules.state import StateRule
from throughtime.doctor.watcher import Watcher, tensors

MAX_NODES = 4_000  # nodes visited in the graph of a backward
MAX_RETAINED = 12  # retained backwards measured in one line
FIRST_CHUNKS = 20  # chunks watched by operation at the start,
PERIOD, AGAIN_CHUNKS = 256, 3  # and how often and for how long again


class Mode:
    """The modes in which an outermost module ran."""

    def __init__(self, module: nn.Module) -> None:
        self.training: bool | None = None  # of its last call
        self.trains = self.evaluates = False  # its calls with a graph since the last step
        self.trained = False  # steps followed a call in training
        self.validated = False  # it ran without a graph since its last call in training
        self.matters = any(
            isinstance(each, nn.modules.batchnorm._BatchNorm)
            or (isinstance(each, nn.modules.dropout._DropoutNd) and each.p > 0)
            or (isinstance(each, nn.RNNBase) and each.dropout > 0 and each.num_layers > 1)
            for each in module.modules()
        )

    def enters(self, training: bool) -> bool:
        """Note a call, and whether the mode is another than at the last one."""
        if training:
            self.trains, self.validated = True, False
        elif torch.is_grad_enabled():
            self.evaluates = True
        else:
            self.validated = True
        changed, self.training = training is not self.training, training
        return changed

    def at_step(self) -> bool:
        """Whether a step uses what the module did in evaluation, which is an oversight."""
        forgotten = self.evaluates and not self.trains and self.trained and self.validated
        self.trained |= self.trains
        self.trains = self.evaluates = False
        return forgotten and self.matters


class LoopEvents:
    """Hooks and wrappers of torch, the watcher, and the rules that receive their events."""

    def __init__(self, findings: FindingList) -> None:
        self.log = Log()
        self.findings = findings
        self.state = StateRule(self.log, self._add)
        self.watcher = Watcher(self.log, self.state, self._report)
        self._optimizers = weakref.WeakSet[Any]()
        self._last_grads = weakref.WeakKeyDictionary[Any, Any]()  # at the last step
        self._in_step = self._paused_step = False
        self._thread = threading.get_ident()
        self._undo: list[Callable[[], Any]] = []
        self._watch_until = FIRST_CHUNKS  # the chunk
        self._in_backward = False
        self._modes = weakref.WeakKeyDictionary[nn.Module, Mode]()  # of outermost modules
        self._outermost: nn.Module | None = None  # the one that runs
        self._evals = weakref.WeakKeyDictionary[nn.Module, SourceLine | None]()  # calls of eval()
        self._makers = weakref.WeakKeyDictionary[Any, SourceLine | None]()  # lines of optimizers
        self._hidden = weakref.WeakKeyDictionary[nn.Module, bool]()  # layers of an attribute's list
        self._idle = False  # no operation matters until more chunks are watched
        self._lacking = False  # a step after a backward had no gradient
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
        self._wrap(torch.autograd, "backward", self._backward)
        self._wrap(torch.autograd, "grad", self._backward)
        self._wrap(torch.optim.Optimizer, "zero_grad", self._zero_grad)
        self._wrap(nn.Module, "zero_grad", self._zero_grad)
        self._wrap(torch.optim.Optimizer, "__init__", self._init_optimizer)
        self._wrap(nn.Module, "eval", self._eval)
        self._wrap(torch, "from_numpy", self._from_numpy)
        self._wrap(DataLoader, "__init__", self._init_loader)
        self._wrap(DataLoader, "__iter__", self._iterate_loader)
        self._wrap(LoaderIterator, "__next__", self._next_batch)
        self.watcher.__enter__()

    def close(self) -> None:
        """Stop watching, and remove hooks and wrappers in the opposite order."""
        try:
            self.watcher.close()
        finally:
            while self._undo:
                self._undo.pop()()

    def emit(self, event: Event) -> None:
        """Add an event to the log, and report what the rules find."""
        self.log.append(event)
        self.watcher.guarded(self._report, event)

    def _report(self, event: Event) -> None:
        for rule in AT.get(type(event), ()):
            for fault in rule(self.log, event):
                self._add(fault)

    def _add(self, fault: Fault | None) -> Finding | None:
        return self.findings.add(*fault) if fault else None

    def end(self, error: BaseException | None) -> None:
        """Report what the end of the loop shows."""
        if error is not None:
            fault = self.watcher.guarded(lanes_of_error, error)
            self.watcher.guarded(self._add, fault)
            return
        self.watcher.guarded(self.watcher.settle_detaches)
        self.watcher.guarded(self.state.close)
        self.log.codes = {finding.code for finding in self.findings.items}
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
        """Whether the doctor itself or another thread is at work."""
        return self.watcher.busy or threading.get_ident() != self._thread

    def _watch(self, chunks: int) -> None:
        """Record every operation for some chunks."""
        self._watch_until = max(self._watch_until, self.log.chunk + chunks)
        self._set_level()

    def _set_level(self) -> None:
        """Record every operation, or once the chunks are used up those of states and data only."""
        watcher, over = self.watcher, self.log.chunk >= self._watch_until
        if over and self.log.chunk % PERIOD == 0:
            self._watch_until, over = self.log.chunk + AGAIN_CHUNKS, False
        over = over and not watcher.calls.follows_data
        if not watcher.full and not over:
            self.log.add_node(next_sequence() - 1, None)  # those of no instruction end here
        watcher.full, watcher.operations = not over, 0
        if over and not watcher.calls.has_layers:
            self._idle = True  # a state by hand is followed only where every operation is recorded
        elif not over:
            self._idle = False
            watcher.resume()

    def _before_module(self, module: nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling() or is_transformed() or self._ignored:
            return
        log = self.log
        if log.depth == 0:
            log.call += 1
            if self._idle:  # not within a backward, which torch runs with the mode off
                self.watcher.pause()
            log.training, self._outermost = module.training, module
            mode = self._modes.get(module) or self._modes.setdefault(module, Mode(module))
            if mode.enters(module.training):
                self._watch(AGAIN_CHUNKS)
        elif log.chunk < FIRST_CHUNKS and isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
            self._find_hidden(module)
        log.depth += 1

    def _find_hidden(self, module: nn.Module) -> None:
        """Note a layer that a plain list or dict of its model holds, which registers nothing."""
        if module in self._hidden or not self._outermost:
            return
        within = list(self._outermost.modules())
        lists = (v for each in within for v in vars(each).values() if isinstance(v, (list, tuple)))
        listed = any(len(v) > 1 and any(item is module for item in v) for v in lists)
        self._hidden[module] = listed and not any(each is module for each in within)

    def _eval(self, original: Any, module: nn.Module) -> Any:
        self._evals[module] = current_line()
        return original(module)

    def _init_optimizer(self, original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        original(optimizer, *args, **kwargs)
        self._optimizers.add(optimizer)
        self._makers[optimizer] = current_line()
        for mode in self._modes.values():
            mode.trained = False  # another phase, which may train in evaluation by intention

    def _after_module(self, *_: Any) -> None:
        if not (torch.compiler.is_compiling() or is_transformed() or self._ignored):
            self.log.depth -= self.log.depth > 0
            if not self.log.depth:
                self._outermost = None

    def _backward(self, original: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Run `torch.autograd.backward` or `torch.autograd.grad`."""
        frame = user_frame(current_frame())
        # torch calls itself again through the mode
        if not frame or self._in_backward or is_transformed():
            return original(outputs, *args, **kwargs)
        is_grad = original.__name__ == "grad"
        retain = kwargs.get("retain_graph", args[1 + is_grad] if len(args) > 1 + is_grad else False)
        if is_grad:
            retain = retain or kwargs.get("create_graph")
            inputs = kwargs.get("inputs", args[0] if args else ())
            self.watcher.guarded(self.watcher.note_gradients, inputs)
        roots = tensors(outputs)
        root = roots[0].grad_fn if roots else None
        backward = Backward(root, line_in(frame), call_site(frame), bool(retain), is_grad)
        run = functools.partial(original, outputs, *args, **kwargs)
        return self._run_backward(run, roots, backward)

    def _run_backward(self, run: Callable[[], Any], roots: list[Tensor], backward: Backward) -> Any:
        # a gradient that keeps its graph, as for a gradient of gradients, ends no chunk
        if ends_chunk := not (backward.is_grad and backward.retain):
            self.watcher.guarded(self.state.before_backward)
            self.watcher.guarded(self._measure, backward)
        self._in_backward = True
        try:
            result = run()
        except RuntimeError as error:
            finding = self.watcher.guarded(self._explain, str(error), roots, backward)
            if finding:
                error.add_note(f"tt.doctor: {finding}")
            raise
        finally:
            self._in_backward, backward.root = False, None  # its graph must not live on
        if ends_chunk:
            self.log.next_chunk()
            self.watcher.guarded(self.watcher.next_chunk)
            backward.boundary = self.log.boundary
            self.emit(backward)
            self.watcher.guarded(lambda: [self._add(fault) for fault in kept(self.log)])
            self._set_level()
        return result

    def _measure(self, backward: Backward) -> None:
        """The facts of a backward before it runs."""
        root, log = backward.root, self.log
        backward.chunk, backward.steps, backward.reads = log.chunk, log.steps, log.reads
        backward.newest = next_sequence()
        backward.versions = self._versions()
        backward.fresh = {
            id(each) for each, grad in self._last_grads.items() if _is_cleared(each, grad())
        }
        if root is None:
            return
        backward.number = sequence(root)
        backward.again = backward.number <= log.boundary
        log.several |= backward.again
        log.roots.add(log.instruction_of(backward.number))
        if self._lacking:
            leaves = (n.variable for n in reachable_nodes(root, MAX_NODES) if is_leaf(n))
            backward.leaves = {id(p) for p in leaves if isinstance(p, nn.Parameter)}
            if backward.leaves & self._optimized():
                backward.leaves = set()
        backward.means = mean_terms(root)
        lines = {log.instruction_of(term.number) for term in backward.means}
        count = len(backward.means)
        backward.by_chunk = len(lines) == 1 < count and count - 1 in log.continued.values()
        self._find_sums(root)
        log.retains |= backward.retain
        if not log.retains:
            return
        same = [b for b in log.backwards if b.line == backward.line and b.nodes]
        if (backward.retain or same) and len(same) <= MAX_RETAINED:
            nodes = list(reachable_nodes(root, MAX_NODES))
            backward.nodes = len(nodes)
            backward.oldest = min(sequence(node) for node in nodes if not is_leaf(node))

    def _find_sums(self, root: Any) -> None:
        """Note the sums that the backward of this root goes through."""
        sums = self.log.sums
        if not sums:
            return
        oldest = min(number for each in sums.values() for number in each.numbers)
        numbers = set(map(sequence, reachable_nodes(root, MAX_NODES, above=oldest - 1)))
        for instruction, each in list(sums.items()):
            if not numbers.isdisjoint(each.numbers):
                self.log.sent.add(instruction)
                del sums[instruction]

    def _explain(self, message: str, roots: list[Tensor], backward: Backward) -> Finding | None:
        nodes = (root.grad_fn for root in roots if root.grad_fn)
        faults = (explain(self.log, message, node, backward) for node in nodes)
        return self._add(next(filter(None, faults), None))

    def _versions(self) -> dict[int, int]:
        """The in-place changes of the first and the last parameter of each optimizer."""
        versions: dict[int, int] = {}
        for optimizer in self._optimizers:
            parameters = parameters_of(optimizer)
            versions[id(optimizer)] = sum(map(version_of, (*parameters[:1], *parameters[-1:])))
        return versions

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._ignored:
            return
        self._optimizers.add(optimizer)
        # a closure would be the user's loop
        self._in_step = True
        self._paused_step = not self.watcher.paused and not args[1:] and not kwargs
        if self._paused_step:
            self.watcher.pause()

    def _after_step(self, optimizer: Any, _: Any, __: Any) -> None:
        if self._ignored:
            return
        if self._paused_step:
            self.watcher.resume()
        self.log.steps += 1
        self._in_step = False
        self.watcher.guarded(self._log_step, optimizer)

    def _log_step(self, optimizer: Any) -> None:
        parameters, log = parameters_of(optimizer), self.log
        grad = _first_grad(parameters)
        last = self._last_grads.get(optimizer, lambda: None)()
        step = WeightStep(id(optimizer), frozenset(map(id, parameters)), current_line(), log.chunk)
        step.number, step.call = next_sequence() - 1, log.call
        step.lacks = all(p.grad is None or not _has_values(p.grad) for p in parameters)
        step.repeated = grad is not None and grad is last
        step.by_trainer = called_by_trainer(current_frame())
        step.constructed = self._makers.get(optimizer) or step.line
        self._lacking = step.lacks and log.chunk > 0
        step.strangers = log.chunk < FIRST_CHUNKS and self._are_strangers()
        for module, mode in self._modes.items():
            first = next(module.parameters(), None)
            if first is not None and id(first) in step.parameters and mode.at_step():
                step.evaluating = self._evals.get(module)
        self._last_grads[optimizer] = (lambda: None) if grad is None else weakref.ref(grad)
        self.emit(step)

    def _optimized(self) -> set[int]:
        """The ids of the parameters of all optimizers."""
        return {id(p) for optimizer in self._optimizers for p in parameters_of(optimizer)}

    def _are_strangers(self) -> bool:
        """Whether a layer of a plain list gets gradients that no optimizer uses."""
        weights = [p for module, hidden in self._hidden.items() if hidden
                   for p in module.parameters() if p.grad is not None]  # fmt: skip
        return bool(weights) and not {id(p) for p in weights} & self._optimized()

    def _zero_grad(self, original: Any, owner: Any, *args: Any, **kwargs: Any) -> Any:
        is_optimizer = isinstance(owner, torch.optim.Optimizer)
        if is_optimizer:
            self._optimizers.add(owner)
        parameters = parameters_of(owner) if is_optimizer else list(owner.parameters())
        self.watcher.guarded(self._log_clear, frozenset(map(id, parameters)))
        return original(owner, *args, **kwargs)

    def _log_clear(self, parameters: frozenset[int]) -> None:
        useful: set[int] = set()
        recent = itertools.takewhile(
            lambda e: not isinstance(e, WeightStep), reversed(self.log.events)
        )
        if any(isinstance(event, Backward) for event in recent):
            for optimizer in self._optimizers:
                grad = _first_grad([p for p in parameters_of(optimizer) if id(p) in parameters])
                if grad is not None and _has_values(grad) and bool(_values(grad).isfinite().all()):
                    useful.add(id(optimizer))
        line = None if self._in_step else current_line()
        clear = Clear(parameters, line, useful, self.log.reads, self._versions())
        clear.watched = self.watcher.full
        self.emit(clear)

    def _from_numpy(self, original: Any, array: Any) -> Tensor:
        result = original(array)
        self.watcher.guarded(self.watcher.table.from_array, array, result)
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
        log = self.log
        number, is_random, line = self._iterators.get(iterator, (0, False, None))
        batch = original(iterator)
        if number:
            log.random, log.loader = is_random, line
            log.batch = number, log.batch[1] + 1
        return batch


def parameters_of(optimizer: Any) -> list[Tensor]:
    """All parameters of an optimizer."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def _first_grad(parameters: list[Tensor]) -> Tensor | None:
    return next((p.grad for p in parameters if p.grad is not None), None)


def _values(grad: Tensor) -> Tensor:
    return grad.coalesce().values() if grad.is_sparse else grad


def _has_values(grad: Tensor) -> bool:
    return bool(_values(grad).any())


def _is_cleared(optimizer: Any, last: Tensor | None) -> bool:
    """Whether the user has cleared the gradient of the last step by hand."""
    grad = _first_grad(parameters_of(optimizer))
    return grad is None or grad is not last or not _has_values(grad)


def draws_at_random(loader: Any) -> bool:
    """Whether the sampler of a loader does not keep the order of time."""
    sampler, batch_sampler = loader.sampler, getattr(loader, "batch_sampler", None)
    if isinstance(batch_sampler, BatchSampler):
        sampler = batch_sampler.sampler
    if isinstance(sampler, DistributedSampler):
        return bool(sampler.shuffle) or sampler.num_replicas > 1
    return isinstance(sampler, (RandomSampler, SubsetRandomSampler, WeightedRandomSampler))
