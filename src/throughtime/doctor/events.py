"""What happens in the loop, in order: calls, backwards, steps, batches; each told to the rules that care."""

import itertools
import threading
import weakref
from sys import _getframe as frame_at
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from throughtime.doctor.carry import Carrying
from throughtime.doctor.credit import Credit
from throughtime.doctor.finding import Findings
from throughtime.doctor.frames import Place, here, innermost, through_framework
from throughtime.doctor.graph import sequence
from throughtime.doctor.growth import Growing
from throughtime.doctor.names import name_of
from throughtime.doctor.notes import Clock
from throughtime.doctor.postmortem import PostMortem
from throughtime.doctor.stepping import Stepping
from throughtime.doctor.unwatched import Unwatched
from throughtime.doctor.watch import CELLS, LAYERS, MOST, Watcher

FIRST, AGAIN, AGAIN_FOR = (
    8,
    256,
    3,
)  # chunks watched closely: at the start, every so often, and for how long


class Events:
    """The one place where what torch does and what the rules know meet."""

    def __init__(self, findings: Findings) -> None:
        self.findings, self.clock, self.thread = findings, Clock(), threading.get_ident()
        self.watcher = Watcher(self.clock)
        self.carrying, self.growing = (
            Carrying(self.watcher, findings),
            Growing(self.watcher, findings),
        )
        self.credit, self.stepping = Credit(self.watcher, findings), Stepping(findings, self.clock)
        self.post = PostMortem(self.watcher, findings, self.carrying.recent)
        self.watcher.listeners.append(self.operation)
        self.loaders: weakref.WeakKeyDictionary[Any, Place | None] = weakref.WeakKeyDictionary()
        self.reading: weakref.WeakKeyDictionary[Any, tuple[int, bool, Place | None]] = (
            weakref.WeakKeyDictionary()
        )
        self.numbers = itertools.count(1)
        self.until, self.stepping_blind, self.inner = FIRST, False, False
        self.phases: dict[int, bool] = {}
        self.unwatched = Unwatched(self.watcher, self.carrying)

    @property
    def off(self) -> bool:
        """Whether this is none of the doctor's business: its own work, or another thread."""
        return self.watcher.busy or threading.get_ident() != self.thread

    def operation(self, kind: str, *told: Any) -> None:
        """What the watcher tells."""
        if kind == "cut":
            self.growing.cut(told[0])
            self.credit.cut(told[1])
            return
        name, func, args, inputs, notes, outputs, key, made = told
        step = None
        if name in LAYERS or name in CELLS:
            step = self.carrying.recurrent(name, args, inputs, notes, key, made)
            self.credit.hold(step.unit, name, func, args, outputs)
            self.watcher.given[step.unit] = (
                outputs[1:] if name in LAYERS else outputs,
                step,
                1 if name in LAYERS else 0,
            )
        else:
            self.carrying.operation(inputs, notes, outputs, key, made)
            self.growing.operation(inputs, notes, outputs, key, made)
            if any(n is not None and n.learned and key in n.lineage for n in notes):
                self.credit.hold(key, name, func, args, outputs)
        self._remember(inputs, notes, key)

    def _remember(self, inputs: list[Tensor], notes: list[Any], key: Any) -> None:
        """The name of a state that enters with the graph of an earlier chunk, while it still has it."""
        if key in self.watcher.names:
            return
        for tensor, note in zip(inputs, notes, strict=True):
            if (
                note is not None
                and note.learned
                and tensor.grad_fn is not None
                and note.chunk < self.clock.chunk
            ):
                self.watcher.names[key] = name_of(lambda value, t=tensor: value is t, frame_at())
                return

    def look(self, chunks: int) -> None:
        """Watches every operation for some chunks."""
        self.until = max(self.until, self.clock.chunk + chunks)
        self.watcher.notes = 0
        self.watcher.on()

    def _look_away(self) -> None:
        if self.clock.chunk >= self.until and self.clock.chunk % AGAIN == 0:
            self.look(AGAIN_FOR)
        elif self.clock.chunk >= self.until or self.watcher.notes > MOST:
            self.watcher.off()

    def enters(self, module: nn.Module, given: Any) -> None:
        if torch.compiler.is_compiling() or self.off:
            return
        if self.clock.inside == 0:
            self.clock.call += 1
            self.clock.training = module.training
            if self.phases.setdefault(id(module), module.training) != module.training:
                self.phases[id(module)] = module.training
                self.look(AGAIN_FOR)
            elif self.watcher.notes > MOST:
                self.watcher.off()
        self.clock.inside += 1
        if not self.watcher.active and isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
            self._busy(self.unwatched.enters, module, given, innermost(frame_at(1)))

    def leaves(self, module: nn.Module, _: Any, result: Any) -> None:
        if torch.compiler.is_compiling() or self.off or not self.clock.inside:
            return
        self.clock.inside -= 1
        if not self.watcher.active and isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
            self._busy(self.unwatched.leaves, module, result)

    def tensor_backward(self, old: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Around `Tensor.backward`: a mode cannot be switched inside an operation that it watches."""
        if self.off:
            return old(tensor, *args, **kwargs)
        was = self.watcher.active
        self.watcher.off()
        try:
            return old(tensor, *args, **kwargs)
        finally:
            if was:
                self.watcher.on()
            self._look_away()

    def backward(self, old: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        retain = bool(kwargs.get("retain_graph", args[1] if len(args) > 1 else False))
        return self._through_a_graph(lambda: old(tensors, *args, **kwargs), tensors, retain)

    def grad(self, old: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        retain = bool(
            kwargs.get("retain_graph", args[2] if len(args) > 2 else False)
            or kwargs.get("create_graph", False)
        )
        found = self._through_a_graph(
            lambda: old(outputs, *args, **kwargs), outputs, retain, chunk=not retain
        )
        if not self.off and not self.inner:
            self._look_away()
        return found

    def _through_a_graph(self, run: Any, tensors: Any, retain: bool, chunk: bool = True) -> Any:
        """A backward of the user.

        One that keeps its graph for a gradient of gradients ends no chunk.
        """
        frame = innermost(frame_at(2))
        if self.off or frame is None or self.inner:  # torch calls itself again through the mode
            return run()
        place = Place(frame.f_code.co_filename, frame.f_lineno)
        roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        node = roots[0].grad_fn if roots else None
        if chunk:
            self._before_backward(node, retain, place)
        self.inner = True
        try:
            result = run()
        except RuntimeError as error:
            self._explain(error, roots, place)
            raise
        finally:
            self.inner = False
            if chunk:
                self._busy(
                    self.credit.after_backward,
                    place,
                    max(self.growing.cuts.values(), default=0) > 1,
                )
        if chunk:
            self._after_backward(node, place)
        return result

    def _before_backward(self, node: Any, retain: bool, place: Place) -> None:
        self._busy(self.stepping.before_backward)
        self._busy(self.credit.before_backward)
        if node is not None:
            self._busy(self.growing.before_backward, node, retain, place)
            self._busy(self.stepping.backward, node, place)

    def _after_backward(self, node: Any, place: Place) -> None:
        self.watcher.boundary = max(
            sequence(node) if node is not None else -1,
            self.watcher.numbers[-1] if self.watcher.numbers else -1,
        )
        self.post.bounds.append(self.watcher.boundary)
        self.clock.chunk += 1
        self._busy(self.growing.after_backward, place)
        self._busy(self.watcher.next_chunk)

    def _explain(self, error: RuntimeError, roots: list[Tensor], place: Place) -> None:
        finding = self._busy(self.post.explain, error, roots, place)
        if finding is not None:
            error.add_note(f"tt.doctor: {finding}")

    def _busy(self, work: Any, *args: Any) -> Any:
        """The doctor's own work is not watched."""
        return self.watcher.guarded(work, *args)

    def steps(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self.off:
            self.stepping.known(optimizer).inside = True
            if (
                not args[1:] and not kwargs and self.watcher.active
            ):  # a closure would be the user's loop
                self.watcher.off()
                self.stepping_blind = True

    def stepped(self, optimizer: Any, _: Any, __: Any) -> None:
        if self.off:
            return
        if self.stepping_blind:
            self.stepping_blind = False
            self.watcher.on()
        place = here(2)
        self._busy(
            self.post.stepped,
            place,
            [p for group in optimizer.param_groups for p in group["params"]],
        )
        self.growing.steps += 1
        self._busy(self.stepping.step, optimizer, place)

    def zero_grad(self, old: Any, owner: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.off:
            grouped = isinstance(owner, torch.optim.Optimizer)
            parameters = (
                [p for g in owner.param_groups for p in g["params"]]
                if grouped
                else list(owner.parameters())
            )
            self._busy(self.stepping.clearing, parameters, here(2))
        return old(owner, *args, **kwargs)

    def loader_made(self, old: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
        old(loader, *args, **kwargs)
        if not self.off and not through_framework(frame_at(1)):
            self.loaders[loader] = here(2)

    def loader_begins(self, old: Any, loader: Any) -> Any:
        iterator = old(loader)
        if not self.off:
            frame = frame_at(2)
            place = self.loaders.get(loader) if through_framework(frame) else here(2)
            self.look(AGAIN_FOR)
            self.reading[iterator] = next(self.numbers), draws(loader), place or here(2)
        return iterator

    def batch(self, old: Any, iterator: Any) -> Any:
        found = old(iterator)
        if not self.off and iterator in self.reading:
            number, random, place = self.reading[iterator]
            self.clock.batch, self.clock.random, self.clock.loader = (
                (number, self.clock.batch[1] + 1),
                random,
                place,
            )
        return found

    def close(self) -> None:
        """The last words of each rule."""
        self._busy(self.carrying.close)
        self._busy(self.growing.close)


def draws(loader: Any) -> bool:
    """Whether a loader's sampler leaves the order of time."""
    sampler = loader.sampler
    inner = getattr(loader, "batch_sampler", None)
    if isinstance(inner, BatchSampler):
        sampler = inner.sampler
    if isinstance(sampler, DistributedSampler):
        return bool(sampler.shuffle) or sampler.num_replicas > 1
    return isinstance(sampler, (RandomSampler, SubsetRandomSampler, WeightedRandomSampler))
