"""The watcher: every operation on tensors, noted with the user's line, where it came from and what it went through."""

import weakref
from bisect import bisect_left
from collections.abc import Callable
from sys import _getframe as frame_at
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _len_torch_function_stack
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from throughtime.doctor.frames import LIBRARY, Key, innermost
from throughtime.doctor.graph import LEAF, leaves_of, sequence
from throughtime.doctor.inner import base_of, number_of, storage_of, version_of
from throughtime.doctor.notes import NOTHING, Clock, Cut, Seen, Step, tensors
from throughtime.errors import DiagnosisError

LAYERS = {"lstm", "gru", "rnn_tanh", "rnn_relu"}
CELLS = {"lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"}
COPIES = {
    "stack",
    "cat",
    "__getitem__",
    "index_select",
    "flip",
    "roll",
    "to",
    "float",
    "double",
    "half",
    "clone",
    "contiguous",
    "one_hot",
}
ROWS = {"__getitem__", "index_select", "flip", "roll"}
CUTS = {"detach", "data", "detach_"}
HANDED = frozenset(
    [
        "detach",
        "data",
        "detach_",
        "__getitem__",
        "index_select",
        "flip",
        "roll",
        "clone",
        "contiguous",
        "view",
        "reshape",
        "unsqueeze",
        "squeeze",
        "transpose",
        "t",
        "permute",
        "to",
        "float",
        "double",
        "half",
        "cpu",
        "cuda",
        "expand",
        "unbind",
        "split",
        "chunk",
        "select",
        "narrow",
        "requires_grad_",
        "type",
        "movedim",
        "__deepcopy__",
    ]
)
SLICES = {"__getitem__", "unbind", "split", "chunk", "select", "narrow", "transpose"}
EDITS = frozenset(
    [
        "mul",
        "__mul__",
        "__rmul__",
        "where",
        "masked_fill",
        "masked_fill_",
        "mul_",
        "__imul__",
        "add",
        "__add__",
        "lerp",
        "index_copy",
        "index_fill",
    ]
)
# a getter of C, which the checker takes for its value
GETTER = type(torch.Tensor.shape.__get__)  # pyright: ignore[reportAttributeAccessIssue]
GETTERS = {"data", "T", "mT", "H"}
MOST = 20_000  # operations watched in one go
PURGE = 4_096  # operations after which what is gone is forgotten, where no backward comes
WIDEST = 400  # instructions kept in a lineage


def name_of_function(func: Any) -> str:
    """The name of an operation; of a getter, that of the attribute."""
    name = getattr(func, "__name__", "")
    return (
        f"{getattr(getattr(func, '__self__', None), '__name__', '')}" if name == "__get__" else name
    )


def is_in_place(name: str) -> bool:
    """Whether an operation changes what it is called on."""
    return (
        name == "__setitem__"
        or (name.endswith("_") and not name.startswith("_"))
        or (name.startswith("__i") and name not in {"__int__", "__invert__", "__index__"})
    )


class Watcher(TorchFunctionMode):
    """Notes operations while it is the current mode; the rules are told of those that matter."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.seen: dict[int, Seen] = {}
        self.numbers: list[int] = []  # sequence numbers of nodes, growing
        self.keys: list[Key | None] = []  # where they were made
        self.boundary = -1  # the largest one before the last backward
        self.in_place: list[
            tuple[int, Any, Key, int]
        ] = []  # version after, shape, where, sequence number
        self.before: set[Key] = set()  # instructions of earlier chunks
        self.now: set[Key] = set()
        self.files: set[str] = set()
        self.names: dict[Key, str] = {}  # of states that came in with a graph
        self.listeners: list[Callable[..., None]] = []
        self.busy = False
        self.closed = (
            False  # once the doctor is; on a stack that is not its own it then only hands on
        )
        self.leaf = torch.zeros(1, requires_grad=True)
        self.active = False
        self.internal_error: Exception | None = None  # of the doctor itself
        self.depth = _len_torch_function_stack()
        self.notes = 0  # operations noted since it was last switched on
        self.given: dict[
            Any, tuple[Any, Step, int]
        ] = {}  # what layers gave last, and where its lanes are
        self.tails: dict[Any, tuple[list[Tensor], Seen]] = {}  # the same without graphs

    def on(self) -> None:
        """Becomes the current mode, unless the user has one of their own open."""
        if not self.active and _len_torch_function_stack() == self.depth:
            self._mark_gap()
            self.__enter__()
            self.active = True

    def _mark_gap(self) -> None:
        """Nodes made while it was off have no known line.

        One node of its own tells where they end.
        """
        if self.numbers:
            with torch.inference_mode(mode=False), torch.enable_grad():
                number = number_of((self.leaf * 1).grad_fn)
            self.numbers.append(number)
            self.keys.append(None)

    def off(self) -> None:
        """Stops being the current mode, unless another is above it."""
        if self.active and _get_current_function_mode() is self:
            self.__exit__(None, None, None)
            self.active = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.closed or torch.compiler.is_compiling():
            return func(*args, **kwargs)
        name, wrap = name_of_function(func), None
        if name == "__iter__":
            func, name, wrap = torch.unbind, "unbind", iter
        result = func(*args, **kwargs)
        if (
            not self.busy
            and self.notes <= MOST
            and (isinstance(result, (Tensor, tuple, list)) or name == "__setitem__")
        ):
            frame = innermost(frame_at(1), LIBRARY)
            if frame is not None:
                self.guarded(self._note, name, func, args, kwargs, result, frame)
        return wrap(result) if wrap else result

    def guarded(self, work: Callable[..., Any], *args: Any) -> Any:
        """The doctor's own work, which is not watched and whose faults are not the user's."""
        was, self.busy = self.busy, True
        try:
            return work(*args)
        except DiagnosisError:
            raise
        # a doctor that fails must not take the patient along; the report says so
        except Exception as error:
            self.internal_error, self.notes = error, MOST + 1
            return None
        finally:
            self.busy = was

    def of(self, tensor: Tensor) -> Seen | None:
        """What is known of a tensor; a view that is unknown is its base."""
        note = self.seen.get(id(tensor))
        return note if note is not None and note.ref() is tensor else None

    def known(self, tensor: Tensor) -> Seen | None:
        note = self.of(tensor)
        base = base_of(tensor) if note is None else None
        if base is not None:
            note = self.of(base)
        return note

    def state_of(self, tensor: Tensor) -> Seen | None:
        """What is known of a state, also of one that was handed on while the watcher was off."""
        note = self.known(tensor)
        return self._tail(tensor) if note is None and (self.given or self.tails) else note

    def _tail(self, tensor: Tensor) -> Seen | None:
        """The note of what a layer gave while the watcher was off: the same memory, with or without its graph."""
        if tensor.layout is not torch.strided:
            return None
        self._settle()
        storage = storage_of(tensor)
        for given, note in self.tails.values():
            if any(storage_of(t) == storage for t in given):
                return note
        return None

    def _settle(self) -> None:
        """Lets go of the graphs of what was given."""
        clock = self.clock
        for unit, (given, step, lane) in self.given.items():
            found = list(tensors(given))
            note = Seen(
                weakref.ref(found[0]),
                step.clock[0],
                clock.call,
                step.key,
                found[0].shape,
                learned=True,
                lane=lane,
                step=step,
            )
            self.tails[unit] = [t.detach() for t in found], note
        self.given.clear()

    def key_of(self, number: int) -> Key | None:
        """The instruction that made the node with this number."""
        at = bisect_left(self.numbers, number)
        return self.keys[at] if at < len(self.keys) else None

    def _note(
        self, name: str, func: Any, args: Any, kwargs: Any, result: Any, frame: FrameType
    ) -> None:
        if isinstance(func, GETTER) and name not in GETTERS:
            return
        self.notes += 1
        if self.notes % PURGE == 0:
            self._forget()
        key = (frame.f_code, frame.f_lasti)
        inputs = [*tensors(args), *tensors(tuple(kwargs.values()))]
        notes = [self.known(t) for t in inputs]
        if is_in_place(name) and inputs:
            result = inputs[0]
            self._changed(inputs[0], key)
        outputs = list(tensors(result))
        if not any(
            t.requires_grad or (n is not None and n.learned)
            for t, n in zip(inputs, notes, strict=True)
        ):
            self._note_data(name, func, args, kwargs, outputs, key)
        elif outputs:
            self._note_learned(name, func, args, inputs, notes, outputs, key)

    def _changed(self, target: Tensor, key: Key) -> None:
        if target.is_inference():  # has no version counter, and no backward needs it
            return
        if len(self.in_place) > 5000:
            del self.in_place[:2500]
        self.in_place.append(
            (version_of(target), target.shape, key, self.numbers[-1] if self.numbers else -1)
        )

    def _note_data(
        self, name: str, func: Any, args: Any, kwargs: Any, outputs: list[Tensor], key: Key
    ) -> None:
        for out in outputs:
            if (
                name in COPIES
                and base_of(out) is None
                and not out.requires_grad
                and out is not args[0]
            ):
                self.seen[id(out)] = Seen(
                    weakref.ref(out),
                    self.clock.chunk,
                    self.clock.call,
                    key,
                    out.shape,
                    origin=(name, func, args, kwargs),
                )
            elif name in {"zero_", "fill_"}:
                self.seen.pop(id(out), None)

    def _note_learned(
        self,
        name: str,
        func: Any,
        args: Any,
        inputs: list[Tensor],
        notes: list[Any],
        outputs: list[Tensor],
        key: Key,
    ) -> None:
        if name in {"zero_", "fill_"} or (outputs[0].is_leaf and outputs[0].requires_grad):
            self.seen.pop(id(outputs[0]), None)
            return
        self.now.add(key)
        self.files.add(key[0].co_filename)
        self._number(outputs, key)
        learned = [n for n in notes if n is not None and n.learned]
        if name in LAYERS or name in CELLS:
            made = self._blank(key, inputs, notes, learned)
            for listener in self.listeners:
                listener("recurrent", name, func, args, inputs, notes, outputs, key, made)
        elif (name in HANDED or name in EDITS) and len({id(n) for n in learned}) == 1:
            made = self._handed_on(name, func, args, inputs, learned[0], key)
        else:
            made = self._blank(key, inputs, notes, learned)
            for listener in self.listeners:
                listener("operation", name, func, args, inputs, notes, outputs, key, made)
        self._keep(made, outputs)

    def _keep(self, made: dict[str, Any], outputs: list[Tensor]) -> None:
        for i, out in enumerate(outputs):
            own = dict(
                made, lane=made["lane"][i] if isinstance(made["lane"], list) else made["lane"]
            )
            if isinstance(made["data"], (tuple, list)):
                own["data"] = made["data"][i] if i < len(made["data"]) else None
            self.seen[id(out)] = Seen(weakref.ref(out), shape=out.shape, **own)

    def _number(self, outputs: list[Tensor], key: Key) -> None:
        for out in outputs:
            number = sequence(out.grad_fn) if out.grad_fn is not None else LEAF
            if number < LEAF and (not self.numbers or number > self.numbers[-1]):
                self.numbers.append(number)
                self.keys.append(key)

    def _blank(
        self, key: Key, inputs: list[Tensor], notes: list[Any], learned: list[Seen]
    ) -> dict[str, Any]:
        """What the result of an operation inherits from what went in."""
        lineage, path, twice, cut = NOTHING, NOTHING, False, None
        data: Tensor | None = None
        for tensor, note in zip(inputs, notes, strict=True):
            if note is None or not note.learned:
                data = tensor if data is None and not tensor.requires_grad else data
                continue
            data = note.data if data is None else data
            lineage = lineage | note.lineage if lineage is not note.lineage else lineage
            cut = (
                note.cut
                if note.cut is not None and (cut is None or note.cut.count > cut.count)
                else cut
            )
            if tensor.requires_grad:
                path, twice = path | note.path, twice or note.twice or key in note.path
        if len(lineage) < WIDEST:
            lineage, path = lineage | {key}, path | {key}
        step = next((n.step for n in learned if n.step is not None), None)
        base = {
            "chunk": self.clock.chunk,
            "call": self.clock.call,
            "key": key,
            "learned": True,
            "lane": None,
        }
        return base | {
            "lineage": lineage,
            "path": path,
            "twice": twice,
            "cut": cut,
            "data": data,
            "step": step,
            "edited": True,
        }

    def _handed_on(
        self, name: str, func: Any, args: Any, inputs: list[Tensor], note: Seen, key: Key
    ) -> dict[str, Any]:
        """The same state in another form: detached, copied, chosen by rows, masked."""
        cut, path, twice = note.cut, note.path, note.twice or key in note.path
        source = next((t for t in inputs if self.known(t) is note), inputs[0])
        if name in CUTS and source.requires_grad and not isinstance(source, nn.Parameter):
            weights = NOTHING if note.twice else leaves_of(source.grad_fn)
            again = (
                cut is not None
                and cut.chunk == self.clock.chunk
                and cut.key == key
                and not note.twice
                and weights & cut.weights
            )
            cut, path, twice = (
                Cut(key, self.clock.chunk, cut.count + 1 if again and cut else 1, weights),
                NOTHING,
                False,
            )
            for listener in self.listeners:
                listener("cut", cut, note)
        else:
            path = path if key in path or len(path) >= WIDEST else path | {key}
        rows, edited = note.rows, note.edited or name in EDITS or name == "__setitem__"
        if (
            name in ROWS
            and note.lane is not None
            and note.lane < source.dim()
            and source is args[0]
        ):
            rows, edited = self._rows(func, args, source, note, edited)
        data = (
            note.data
            if note.data is None or name not in SLICES or source is not args[0]
            else self._sliced(func, args, source, note.data)
        )
        lineage = (
            note.lineage
            if key in note.lineage or len(note.lineage) >= WIDEST
            else note.lineage | {key}
        )
        lane = (
            0
            if name == "__getitem__" and note.lane == 1 and isinstance(args[1], int)
            else note.lane
        )
        base = {
            "chunk": note.chunk,
            "call": note.call,
            "key": key,
            "learned": True,
            "lane": lane,
            "data": data,
            "step": note.step,
        }
        return base | {
            "lineage": lineage,
            "path": path,
            "twice": twice,
            "cut": cut,
            "edited": edited,
            "rows": rows,
            "depth": note.depth,
        }

    @staticmethod
    def _sliced(func: Any, args: Any, source: Tensor, data: Tensor) -> Any:
        """The data of a part, where data and what was made of it have the same leading dimensions."""
        if data.dim() >= source.dim() or data.shape != source.shape[: data.dim()]:
            return None
        try:
            return func(data, *args[1:])
        except (IndexError, RuntimeError, TypeError):
            return None

    def _rows(
        self, func: Any, args: Any, source: Tensor, note: Seen, edited: bool
    ) -> tuple[Any, bool]:
        """Which lane each row of a choice comes from.

        Found by choosing among the numbers of the lanes.
        """
        lane = note.lane or 0
        numbers = (
            torch.tensor(note.rows) if note.rows is not None else torch.arange(source.shape[lane])
        )
        if len(numbers) != source.shape[lane]:
            return None, True
        shape = [1] * source.dim()
        shape[lane] = -1
        chosen = func(numbers.view(shape).expand(source.shape), *args[1:])
        kept = (
            chosen.movedim(lane, 0).reshape(chosen.shape[lane], -1)[:, 0]
            if chosen.dim() > lane and chosen.numel()
            else chosen.reshape(-1)
        )
        return kept.tolist(), edited

    def _forget(self) -> None:
        """Drops the notes of tensors that are gone."""
        self.seen = {i: note for i, note in self.seen.items() if note.ref() is not None}

    def next_chunk(self) -> None:
        """Forgets what is gone; called after each backward."""
        self._settle()
        self._forget()
        self.before |= self.now
        self.now = set()
        keep = len(self.numbers)
        if keep > 50_000:
            del self.numbers[: keep // 2], self.keys[: keep // 2]
