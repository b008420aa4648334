"""The settling time of a cold start, against closed forms and against whole recordings.

Shapes: `T` steps, `B` lanes.
"""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import throughtime as tt
from throughtime.carry import Carried
from throughtime.deploy.export import Export
from throughtime.diagnose.settling import ColdStart
from throughtime.errors import ConfigError, DataError, ModelError, RunError

WIDE = torch.float64


class Rotating(nn.Module):
    """A damped rotation, one coordinate of which is the output: its difference crosses zero."""

    def __init__(self, decay: float, angle: float) -> None:
        super().__init__()
        turn = [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]
        self.turn = nn.Parameter(decay * torch.tensor(turn, dtype=WIDE))
        self.start = nn.Parameter(torch.tensor([0.5, -0.5], dtype=WIDE))

    def initial_state(self, lanes: int) -> Tensor:
        return self.start.expand(lanes, 2)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        outputs: list[Tensor] = []
        for row in x:
            h = h @ self.turn + row
            outputs.append(h[:, :1])
        return torch.stack(outputs), h


def signals(*lengths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(n, 2, dtype=WIDE, generator=generator) for n in lengths]


def steps_by_definition(net: Carried, signal: Tensor, start: ColdStart, limit: float) -> int | None:
    """Both runs by themselves, and the last compared step at which they differ."""
    position, stop = start.position, start.position + start.compared
    carried, _ = tt.predict(net, signal)
    cold, _ = tt.predict(net, signal[position:stop])
    apart = (cold - carried[position:stop]).abs().amax(1) > limit
    last = max((k for k, wrong in enumerate(apart.tolist()) if wrong), default=-1)
    return None if last + 1 == start.compared else last + 1


def test_settling_is_that_of_whole_recordings_played_by_themselves() -> None:
    net, recordings = tt.carry(Rotating(0.99, 0.3)), signals(4600, 90, 3, 2, 1)
    result = tt.settling_time(net, recordings, starts=12, span=1500, scale=1.0)
    by_name = {str(i): recording for i, recording in enumerate(recordings)}
    assert {len(by_name[start.recording]) for start in result.starts} == {4600, 90, 3, 2}
    for start in result.starts:
        signal = by_name[start.recording]
        assert start.steps == steps_by_definition(net, signal, start, 0.01)
        assert start.position >= min(1500, max(1, len(signal) // 3))
        assert start.compared == min(1500, len(signal) - start.position)
    assert len({start.position for start in result.starts if start.compared == 1500}) > 2
    longest = max(s.compared if s.steps is None else s.steps for s in result.starts)
    assert result.quantiles[1.0] == (None if result.unsettled else longest)


def test_what_cannot_be_measured_is_refused() -> None:
    stable, diverging = (tt.carry(Rotating(decay, 0.3)) for decay in (0.9, 9.0))
    refused: list[tuple[Any, int, dict[str, Any], type[Exception]]] = [
        (stable, 100, {"starts": 0}, ConfigError),
        (stable, 100, {"tolerance": math.nan}, ConfigError),
        (stable, 100, {"scale": -1.0}, ConfigError),
        (stable, 1, {}, DataError),  # has no past
        (diverging, 2000, {}, RunError),
        (nn.GRU(2, 8), 100, {}, ModelError),
    ]
    for net, steps, settings, kind in refused:
        with pytest.raises(kind):
            tt.settling_time(net, signals(steps)[0], **settings)


def test_dropout_is_off_meanwhile() -> None:
    net = tt.carry(nn.Sequential(nn.GRU(2, 8), nn.Dropout(0.5), nn.Linear(8, 1)).to(WIDE))
    assert tt.settling_time(net, signals(500)[0], span=100).unsettled == 0


def export(folder: Path, name: str, **more: Any) -> tuple[Export, dict[str, Any]]:
    """The result of an export, and what the file says of itself."""
    torch.manual_seed(0)
    net = tt.carry(nn.Sequential(nn.GRU(2, 8), nn.Linear(8, 2)))
    written = tt.export(net, folder / name, inputs=torch.randn(50, 2), steps=500, **more)
    return written, tt.deploy.Session(written.paths[0]).description


def test_an_export_has_the_settling_time_and_the_verification_of_its_stream(
    tmp_path: Path,
) -> None:
    recordings = [torch.randn(n, 2) for n in (700, 1200)]
    written, description = export(tmp_path, "net.onnx", stream=recordings)
    assert written.settling is not None
    facts = description["settling_time"]
    assert facts["steps"]["1"] == written.settling.quantiles[1.0]
    assert list(facts["steps"]) == ["0.5", "0.9", "0.99", "1"]
    assert (facts["starts"], facts["unsettled"]) == (64, 0)
    stream = tt.Stream(recordings, lanes=2, chunk=50, seed=None)
    _, same = export(tmp_path, "other.onnx", stream=stream)
    assert same["settling_time"] == facts
    assert stream.position == 0
