"""The events of a training loop.

A torch mode that records operations and their lines, and hooks and wrappers of torch that notify
the rules.
"""

import functools
import re
import threading
from contextlib import ExitStack
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
import torch.nn.modules.module as modules
import torch.optim.optimizer as optimizers
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.overrides import TorchFunctionMode
from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from throughtime.doctor._calls import CELLS, LAYERS, Calls
from throughtime.doctor._data import Operation, RootTable
from throughtime.doctor._frames import (
    Instruction,
    carrier,
    current_frame,
    current_line,
    line_in,
    tensors,
    user_frame,
)
from throughtime.doctor._graph import (
    LEAF,
    LoaderIterator,
    base_of,
    behind_copies,
    current_mode,
    has_hook,
    is_transformed,
    mode_depth,
    next_sequence,
    reachable_nodes,
    sequence,
    version_of,
)
from throughtime.doctor._log import Backward, Change, Close, Log, WeightStep
from throughtime.doctor.findings import FindingList
from throughtime.doctor.rules.loop import AT, explain, lanes_of_error
from throughtime.doctor.rules.state import StateRule
from throughtime.errors import DiagnosisError

MAX_NODES = 4_000  # nodes visited in the graph of a backward
MAX_RECORDED = 50_000  # nodes remembered
# the calls of a model in training (t), in evaluation with a graph (e) and without one (v), and its
# steps (s), if a step that follows a validation trains in its mode
FORGOTTEN = re.compile("t[^t]*s.*v[^t]*e[^ts]*s$")
MAX_PAST = 64  # of these remembered
FIRST_CHUNKS = 12  # chunks watched by operation at the start,
PERIOD, AGAIN_CHUNKS = 256, 3  # and how often and for how long again
MAX_OPERATIONS = 20_000  # all of them recorded, from one backward to the next
RECURRENT = LAYERS | CELLS
RANDOM = RandomSampler, SubsetRandomSampler, WeightedRandomSampler  # without the order of time
KEPT_IN_PLACE = {"detach_", "requires_grad_"}  # they leave the values as they are
# add_, __setitem__ and __iadd__, but not __int__ and so on
IN_PLACE = re.compile("[^_].*_|__setitem__|__i(?!nt__|nvert__|ndex__|ter__).*")
CLIP_FILE = clip_grad.__file__


class LoopEvents(TorchFunctionMode):
    """Hooks and wrappers of torch and a mode that records operations, for the rules."""

    def __init__(self, findings: FindingList) -> None:
        super().__init__()
        self.log, self.findings, self.table = Log(), findings, RootTable()
        self.state = StateRule(self.log, findings.add)
        self.calls = Calls(self.log, self.table, self.state)
        self._instructions: dict[Any, Instruction] = {}
        self.internal_error: Exception | None = None
        self.busy = False  # the doctor itself is at work, an optimizer or a backward
        self.closed = False  # after the doctor; on a user's stack of modes it then only passes on
        self.operations = 0  # recorded since the last backward
        self._awake = True  # operations are recorded,
        self._watch_until = FIRST_CHUNKS  # at least to this chunk
        self._paused = 0  # the depth of the stack of modes below this one, while it is no mode
        self._thread = threading.get_ident()
        self._undo = ExitStack()
        self._optimizers: Any = WeakKeyDictionary()  # and their lines
        self._last_steps: Any = WeakKeyDictionary()
        self._depth = 0  # modules that run now, one inside the other
        self._past: Any = WeakKeyDictionary()  # of outermost modules, see above
        self._inner: Any = WeakSet()  # all others
        self._evals: Any = WeakKeyDictionary()  # calls of eval()
        self._iterators: Any = WeakSet()  # of loaders

    def open(self) -> None:
        """Install the hooks and wrappers, and watch."""
        for hook in (
            modules.register_module_forward_pre_hook(self._before_module),
            modules.register_module_forward_hook(self._after_module, always_call=True),
            optimizers.register_optimizer_step_pre_hook(self._before_step),
            optimizers.register_optimizer_step_post_hook(self._after_step),
        ):
            self._undo.callback(hook.remove)
        self._wrap(torch.autograd, "backward", self._backward)
        self._wrap(torch.autograd, "grad", self._backward)
        self._wrap(torch.optim.Optimizer, "zero_grad", self._zero_grad)
        self._wrap(nn.Module, "zero_grad", self._zero_grad)
        self._wrap(torch.optim.Optimizer, "__init__", self._init_optimizer)
        self._wrap(nn.Module, "eval", self._eval)
        self._wrap(LoaderIterator, "__next__", self._next_batch)
        self._wrap(torch, "from_numpy", self._from_numpy)
        self.__enter__()

    def close(self) -> None:
        """Stop watching, and remove hooks and wrappers in the opposite order."""
        self.closed = True
        self._pause()
        self._undo.close()

    def end(self, error: BaseException | None) -> None:
        """Report what the end of the loop shows."""
        if error is not None:
            self.guarded(lambda: self.findings.add(lanes_of_error(error)))
            return
        self.guarded(self.state.close)
        self.guarded(self._emit, Close())

    def guarded(self, work: Any, *args: Any) -> None:
        """Run the doctor's own work: unwatched, and without failing the user's loop."""
        was_busy, self.busy = self.busy, True
        try:
            work(*args)
        except DiagnosisError:
            raise
        except Exception as error:  # noqa: BLE001  # the report says that the doctor failed
            self.internal_error, self.closed = error, True
        finally:
            self.busy = was_busy

    def _emit(self, event: Any) -> None:
        """Add an event to the log, and report what the rules find."""
        self.log.append(event)
        for rule in AT.get(type(event), ()):
            for fault in rule(self.log, event):
                self.findings.add(fault)

    def _wrap(self, owner: Any, name: str, handler: Any) -> None:
        """Replace `owner.name` by a function that calls `handler(original, ...)`."""
        original = owner.__dict__[name]

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if self._ignored:
                return original(*args, **kwargs)
            return handler(original, *args, **kwargs)

        setattr(owner, name, wrapper)
        self._undo.callback(setattr, owner, name, original)

    @property
    def _ignored(self) -> bool:
        """Whether the doctor, an optimizer, a backward, a compiler or another thread is at work."""
        is_other = self.busy or threading.get_ident() != self._thread
        return is_other or torch.compiler.is_compiling() or is_transformed()

    # --- when operations are recorded

    def _pause(self) -> None:
        """Stop being the current mode while nothing that matters is at work."""
        if current_mode() is self:
            self._paused = mode_depth()
            self.__exit__(None, None, None)

    def _resume(self) -> None:
        """Be the current mode again, unless inside a mode of the user's that began meanwhile."""
        if self._paused == mode_depth() + 1:
            self._paused = 0
            self.__enter__()

    def _watch(self, chunks: int = AGAIN_CHUNKS) -> None:
        """Record every operation for some chunks, then the calls of layers only."""
        chunk, was_awake = self.log.chunk, self._awake
        self._watch_until = max(self._watch_until, chunk + chunks)
        self._awake = chunk < self._watch_until
        self.table.complete &= self._awake
        self.operations = 0
        if self._awake and not was_awake:
            self.log.add_node(next_sequence() - 1, None)  # those of no instruction end here
            self._resume()

    def _before_module(self, module: nn.Module, _: Any) -> None:
        if self._ignored:
            return
        log, self._depth = self.log, self._depth + 1
        if self._depth == 1:
            log.call += 1
            if not self._awake:  # not within a backward, which torch runs with the mode off
                self._pause()
            log.training, past = module.training, self._past.get(module, "")
            kind = "t" if module.training else "e" if torch.is_grad_enabled() else "v"
            if not past.endswith(kind):
                self._past[module] = (past + kind).replace("tsts", "ts")[-MAX_PAST:]
                if module.training is not past.rstrip("s").endswith("t"):
                    self._watch()
        else:
            self._inner.add(module)
        if isinstance(module, nn.RNNBase):  # also while operations are not recorded
            self._resume()

    def _after_module(self, module: nn.Module, _: Any, __: Any) -> None:
        if self._ignored:
            return
        self._depth -= self._depth > 0
        if isinstance(module, nn.RNNBase) and not self._awake:
            self._pause()

    # --- operations

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result, name = func(*args, **kwargs), operation_name(func)
        asleep = not self._awake and name not in RECURRENT
        if self.closed or asleep or self._ignored:
            return result
        caller = current_frame(1)
        if name == ".grad":
            self._note_read(args[0], caller)
        elif frame := user_frame(caller):
            self.operations += 1
            if self.operations > MAX_OPERATIONS:
                self._awake = self.table.complete = False
                self.log.results.clear()  # they are not followed to their end
            key = id(frame.f_code), frame.f_lasti
            # always the same object for the same one
            instruction = self._instructions.get(key) or self._instructions.setdefault(
                key, Instruction(frame.f_code, line_in(frame))
            )
            op = Operation(name, func, args, kwargs, tensors((*args, *kwargs.values())),
                           tensors(result), instruction)  # fmt: skip
            self.guarded(self._record, op, frame, frame is caller)
        return result

    def _note_read(self, parameter: Tensor, frame: FrameType) -> None:
        """Note a gradient that is read, but not to clear it or to measure its norm."""
        if frame.f_code.co_filename == CLIP_FILE:
            scope = {**(frame.f_back or frame).f_locals, **frame.f_locals}
            if scope.get("max_norm") != float("inf"):
                self.log.append(Change("l", frozenset([id(parameter)]), current_line()))
        elif frame.f_code.co_name != "zero_grad" and self.log.backwards:
            self.log.backwards[-1].used = True

    def _record(self, op: Operation, frame: FrameType, is_direct: bool) -> None:
        name, log = op.name, self.log
        changed = op.inputs[:1] if IN_PLACE.fullmatch(name) else []
        outputs = op.outputs = changed or op.outputs
        if not outputs:
            return
        for each in changed:
            log.in_place.append((version_of(each), each.shape, op.instruction, log.nodes[-1][0]))
            if isinstance(base_of(each), nn.Parameter):
                return  # by hand or to initialize it; its views have no graph
            if name not in KEPT_IN_PLACE:
                self.table.change(op)
        if name in {"view", "reshape"}:
            self.calls.viewed = ref(outputs[0]), op.inputs[0].shape, op.instruction
        if outputs[0].grad_fn:
            self._record_graph(op)
        if name in RECURRENT:
            self.calls.layer_or_cell(op)
            return
        for out in () if changed else outputs:
            self.table.follow(op, out)
        self.calls.detached(op)
        if is_direct:
            self.calls.by_hand(op, frame)

    def _record_graph(self, op: Operation) -> None:
        """Record results with a graph, old states that enter, and what results are compared to."""
        first, log = op.outputs[0], self.log
        for out in op.outputs:
            if (number := sequence(out.grad_fn)) < LEAF:
                log.add_node(number, op.instruction)
        entered = [
            t
            for t in op.inputs
            if t.grad_fn and sequence(behind_copies(t.grad_fn)) <= log.boundary and t.numel() > 1
        ]
        if entered and op.instruction not in log.carried:
            log.carried[op.instruction] = [carrier(t, current_frame()) for t in entered]
        if op.name in RECURRENT:
            return
        log.results.setdefault(op.instruction, {})[log.chunk] = ref(first)
        sizes = [t.numel() for t in op.inputs if t.dim() and not t.requires_grad]
        if sizes and any(t.grad_fn for t in op.inputs):
            # one comparison at each step, or of the whole chunk
            before = log.targets if op.instruction is log.compared_at else 0
            log.compared_at, log.targets = op.instruction, before + sizes[0]

    # --- backwards, steps, and batches

    def _eval(self, original: Any, module: nn.Module) -> Any:
        self._evals[module] = current_line()
        return original(module)

    def _init_optimizer(self, original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        original(optimizer, *args, **kwargs)
        self._optimizers[optimizer] = current_line()
        self._past.clear()  # another phase, which may train in evaluation
        self._inner.clear()

    def _backward(self, original: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Run `torch.autograd.backward` or `torch.autograd.grad`."""
        frame, guarded, log = user_frame(current_frame()), self.guarded, self.log
        if not frame:
            return original(outputs, *args, **kwargs)
        is_grad = original.__name__ == "grad"
        retain = kwargs.get("retain_graph", [*args, None, None, None][1 + is_grad])
        retain = bool(retain or (is_grad and kwargs.get("create_graph")))
        backward = Backward(line_in(frame), retain, used=retain or is_grad or not self._awake)
        # a gradient that keeps its graph, as for a gradient of gradients, ends no chunk
        ends_chunk = not (is_grad and retain)
        roots = [tensor.grad_fn for tensor in tensors(outputs)]
        if ends_chunk:
            guarded(self.state.before_backward)
            guarded(self._measure, backward, roots[0] if roots else None)
        self.busy = True
        try:
            result = original(outputs, *args, **kwargs)
        except RuntimeError as error:
            guarded(self._explain, str(error), roots, backward)
            raise
        finally:
            self.busy = False
        del roots  # its graph must not live on
        if ends_chunk:
            log.chunk += 1
            log.boundary = backward.boundary = next_sequence() - 1
            del log.nodes[:-MAX_RECORDED]
            self.table.drop_freed()
            guarded(self._emit, backward)
            self._watch(0 if log.chunk % PERIOD else AGAIN_CHUNKS)
        return result

    def _measure(self, backward: Backward, root: Any) -> None:
        """The facts of a backward before it runs."""
        log = self.log
        backward.chunk, backward.steps, backward.newest = log.chunk, log.steps, next_sequence()
        for step in self._last_steps.values():
            if step.grad and (grad := step.grad()) is not None and not _has_values(grad):
                log.append(Change("c", step.parameters))  # by hand
        if root is None or not self._awake:
            return
        number = backward.number = sequence(root)
        log.roots.add(log.instruction_of(number))
        # several backwards may go through the same forward pass
        if backward.retain and number > log.boundary:
            oldest = min(map(sequence, reachable_nodes(root, MAX_NODES)))
            backward.reach = sum(
                oldest <= e.number < e.newest <= number
                for e in log.backwards
                if e.line == backward.line and e.reach >= 0
            )

    def _explain(self, message: str, roots: list[Any], backward: Backward) -> None:
        for root in filter(None, roots):
            self.findings.add(explain(self.log, message, root, backward))

    def _before_step(self, _: Any, args: Any, kwargs: Any) -> None:
        # a closure would be the user's loop
        self.busy |= not (self._ignored or args[1:] or kwargs)

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if threading.get_ident() == self._thread:
            self.busy = False
            self.log.steps += 1
            self.guarded(self._log_step, optimizer, bool(args[1:] or kwargs))

    def _log_step(self, optimizer: Any, closure: bool) -> None:
        parameters, log = parameters_of(optimizer), self.log
        grads = [p.grad for p in parameters if p.grad is not None]
        before = self._last_steps.get(optimizer)
        step = WeightStep(
            frozenset(map(id, parameters)),
            current_line(),
            before,
            grad=ref(grads[0]) if grads else None,
            chunk=log.chunk,
            number=next_sequence() - 1,
            lacks=not (
                closure
                # after a backward no rule asks
                or (log.chunk >= FIRST_CHUNKS and isinstance(log.events[-1], Backward))
                or any(map(_has_values, grads))
            ),
            repeated=bool(grads and before and before.grad and before.grad() is grads[0]),
            has_hooks=any(map(has_hook, parameters)),
        )
        source = self._optimizers.setdefault(optimizer, None) or step.line
        if 0 < log.chunk < FIRST_CHUNKS:
            # layers that are not registered, or all of a model, may train in no optimizer
            known = {id(p) for each in self._optimizers for p in parameters_of(each)}
            hidden = {*self._inner}.difference(*(m.modules() for m in self._past))
            models = [*hidden, *(self._past if step.lacks else ())]
            trained = ({id(p) for p in m.parameters() if p.grad is not None} for m in models)
            if any(ids and not ids & known for ids in trained):
                step.constructed = source
        for module, past in list(self._past.items()):
            if any(id(p) in step.parameters for p in module.parameters()):
                self._past[module] = past + "s"
                if FORGOTTEN.search(past + "s") and _depends_on_mode(module):
                    step.evaluating = self._evals.get(module)
        self._last_steps[optimizer] = step
        self._emit(step)
        step.before = None
        for each in log.backwards[-1:]:  # for the other optimizers
            each.used = True

    def _zero_grad(self, original: Any, owner: Any, *args: Any, **kwargs: Any) -> Any:
        of = nn.Module.parameters if isinstance(owner, nn.Module) else parameters_of
        self.log.append(Change("c", frozenset(map(id, of(owner))), current_line()))
        return original(owner, *args, **kwargs)

    def _from_numpy(self, original: Any, array: Any) -> Tensor:
        result = original(array)
        self.guarded(self.table.from_array, array, result)
        return result

    def _next_batch(self, original: Any, iterator: Any) -> Any:
        log = self.log
        if iterator not in self._iterators:
            self._iterators.add(iterator)
            self._watch()
        batch = original(iterator)
        log.batch = id(iterator), log.batch[1] + 1
        log.loader = current_line()
        sampler = iterator._index_sampler
        sampler = getattr(sampler, "sampler", sampler)  # of a sampler of batches
        log.random = isinstance(sampler, RANDOM)
        return batch


def parameters_of(optimizer: Any) -> list[Tensor]:
    """All parameters of an optimizer."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def _has_values(grad: Tensor) -> bool:
    return bool(grad.abs().sum())  # also of a sparse one


def _depends_on_mode(module: nn.Module) -> bool:
    """Whether a model has batch norm or dropout."""
    kinds = nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd
    return any(
        (isinstance(each, kinds) and getattr(each, "p", 1))
        or (isinstance(each, nn.RNNBase) and each.dropout and each.num_layers > 1)
        for each in module.modules()
    )


@functools.lru_cache(maxsize=4096)
def operation_name(func: Any) -> str:
    """The name of an operation; for a getter that of the attribute behind a dot."""
    name = getattr(func, "__name__", "")
    return f".{getattr(func.__self__, '__name__', '')}" if name == "__get__" else name
