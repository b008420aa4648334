"""Whether credit reaches the first steps of a chunk: gradients that are exactly zero, looked at in a few chunks."""

import math
from typing import Any

import torch
from torch import Tensor

from throughtime.doctor.finding import Findings
from throughtime.doctor.frames import Place
from throughtime.doctor.notes import Seen, Unit
from throughtime.doctor.watch import CELLS, LAYERS, Watcher

CHUNKS = (1, 2, 3)  # the chunks that are looked at
TWICE = 2  # chunks that show it before it is said
STEPS = 4  # steps without which nothing is said
SMALLEST = 1e-20  # below it a gradient has faded away, which is another matter


class Credit:
    """Holds the states of a chunk until its backward and looks at what arrives at them."""

    def __init__(self, watcher: Watcher, findings: Findings) -> None:
        self.watcher, self.findings = watcher, findings
        self.held: dict[Unit, list[tuple[Tensor, int]]] = {}
        self.layers: list[tuple[Any, Any, Tensor]] = []
        self.arrived: dict[tuple[Unit, int], float] = {}
        self.shown: dict[Place, int] = {}
        self.handles: list[Any] = []

    def hold(self, unit: Unit, name: str, func: Any, args: Any, outputs: list[Tensor]) -> None:
        """Keeps one result until the backward of its chunk."""
        clock = self.watcher.clock
        if (
            clock.chunk not in CHUNKS
            or not outputs[0].requires_grad
            or outputs[0].numel() == 1
            or clock.training is False
        ):
            return
        if name in LAYERS:
            plain = (
                isinstance(args[3], bool)
                and not torch.is_autocast_enabled(outputs[0].device.type)
                and not (args[5] > 0 and args[6])
                and args[0].shape[1 if args[8] else 0] >= STEPS
            )
            if plain and len(self.layers) < 4:
                self.layers.append((func, args, outputs[0]))
        elif len(self.held.setdefault(unit, [])) < 512:
            self.held[unit].append(
                (outputs[0], clock.call if clock.inside > (name in CELLS) else 0)
            )

    def cut(self, note: Seen) -> None:
        """A state that was detached inside a chunk: where none is carried, the steps before may be a warm-up."""
        if note.step is not None and not note.edited and not self.watcher.clock.crossed:
            for unit in note.lineage:
                self.held.pop(unit, None)

    def before_backward(self) -> None:
        for unit, pairs in self.held.items():
            last = pairs[-1][1]
            mine = [t for t, call in pairs if call == last]
            if len(mine) >= STEPS:
                self.handles += [
                    t.register_hook(self._arrival(unit, i)) for i, t in enumerate(mine)
                ]
                nothing = (
                    0.0 if last else math.nan
                    # outside a model a state that nothing arrives at may be a warm-up, detached on
                    # purpose
                )
                self.arrived.update({(unit, i): nothing for i in range(len(mine))})
        self.layers = [(func, args, self._watched(out)) for func, args, out in self.layers]

    def _arrival(self, unit: Unit, i: int) -> Any:
        def look(gradient: Tensor) -> None:
            self.arrived[unit, i] = (
                float(gradient.detach().abs().max()) if gradient.numel() else 0.0
            )

        return self._hook(look)

    def _hook(self, look: Any) -> Any:
        """A hook of a tensor whose failure is not the user's.

        An undefined gradient comes as `None`.
        """

        def hook(gradient: Tensor | None) -> None:
            if gradient is not None:
                self.watcher.guarded(look, gradient)

        return hook

    def _watched(self, out: Tensor) -> Any:
        kept: list[Tensor] = []
        self.handles.append(
            out.register_hook(self._hook(lambda gradient: kept.append(gradient.detach())))
        )
        return kept

    def after_backward(self, place: Place | None, cut: bool) -> None:
        """Looks at what arrived; nothing is said of a chunk whose states are cut at every step."""
        for handle in self.handles:
            handle.remove()
        silent = [
            self._silent(
                [
                    v
                    for (u, _), v in sorted(self.arrived.items(), key=lambda p: p[0][1])
                    if u == unit
                ]
            )
            for unit in self.held
        ]
        silent += [
            self._silent(self._through(func, args, kept[0]), kept[0], args[8])
            for func, args, kept in self.layers
            if kept
        ]
        self.held, self.layers, self.arrived, self.handles = {}, [], {}, []
        steps = max(silent, default=0)
        if steps and place is not None and not cut:
            self.shown[place] = self.shown.get(place, 0) + 1
            if self.shown[place] == TWICE:
                self.findings.add("TT303", place, f"Nothing arrives at the first {steps} steps.")

    @staticmethod
    def _silent(norms: list[float], outer: Tensor | None = None, batch_first: bool = False) -> int:
        """How many first steps get exactly nothing while later ones, or what a layer gave, do get something."""
        count = 0
        while count < len(norms) and norms[count] == 0:
            count += 1
        if count == len(norms):
            seen = (
                outer is not None and count and bool(outer.select(1 if batch_first else 0, 0).any())
            )
            return count if seen else 0
        return count if norms[count] > SMALLEST else 0

    def _through(self, func: Any, args: Any, gradient: Tensor) -> list[float]:
        """The gradient of a layer's inputs, step by step: the layer once more, beside the user's graph."""
        detached = [
            (
                a.detach()
                if isinstance(a, Tensor)
                else [t.detach() for t in a]
                if isinstance(a, (tuple, list))
                else a
            )
            for a in args
        ]
        with torch.enable_grad():
            x = args[0].detach().requires_grad_()
            again = func(x, *detached[1:])[0]
            found = torch.autograd.grad(again, x, gradient)[0]
        time = 1 if args[8] else 0
        return [float(step.abs().max()) for step in found.unbind(time)]
