"""The trace of a run: its numbers are the gradients of training; its chart shows the cuts."""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from test_run import finish, settings, write_recordings
from throughtime.app.audit import AuditJob, AuditReport
from throughtime.app.config import AuditOptions
from throughtime.app.evaluate import keep_results
from throughtime.app.load import load_run
from throughtime.app.report import figures
from throughtime.app.run_folder import RunFolder
from throughtime.app.trace import RunTrace, trace_run

SVG = "{http://www.w3.org/2000/svg}"
GATES = ("h", "c", "i", "f", "g", "o")


def audit_job(folder: RunFolder) -> AuditJob:
    return AuditJob(load_run(folder.path), AuditOptions(horizons=(10, 40), max_lag=40))


def traced_run(folder: Path, **more: Any) -> tuple[AuditJob, RunTrace]:
    """A run in float64 and its trace."""
    values = {
        k: v
        for k, v in settings(
            write_recordings(folder / "data"), folder / "run", **{"updates": 15, **more}
        ).items()
        if v is not None
    }
    look = audit_job(finish(values | {"dtype": "float64", "lr": 0.02}))
    run_trace = trace_run(look.net, look.spec, look.first, look.loss_fn, look.config)
    assert run_trace is not None
    return look, run_trace


def by_hand(layer: nn.LSTM, x: Tensor, state: tuple[Tensor, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Every state and gate of every step, from the equations."""
    h, c = state
    w, u, b, d = (
        layer.get_parameter(f"{name}_l0")
        for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    )
    for step in x:
        sums = step @ w.T + b + h @ u.T + d
        i, f, g, o = (
            act(part)
            for act, part in zip(
                (torch.sigmoid, torch.sigmoid, torch.tanh, torch.sigmoid),
                sums.chunk(4),
                strict=True,
            )
        )
        c = f * c + i * g
        h = o * c.tanh()
        yield {"h": h, "c": c, "i": i, "f": f, "g": g, "o": o}


def oracle(look: AuditJob, run_trace: RunTrace) -> dict[str, Tensor]:
    """The norms by plain autograd, one window at a time, each from a detached state."""
    net = look.net.module
    layer = net.get_submodule("recurrent")
    assert isinstance(layer, nn.LSTM)
    stride, horizon = run_trace.stride, run_trace.horizon
    end = min(run_trace.steps + horizon - stride, len(look.first))
    x = net.get_submodule("standardise")(
        torch.tensor(look.first.read(0, end).inputs, dtype=torch.float64)
    )
    targets = torch.tensor(look.first.read(0, end).targets, dtype=torch.long)
    apart = look.config.train_on == "windows"
    sums = {gate: torch.zeros(end, layer.hidden_size, dtype=x.dtype) for gate in GATES}
    for counted in range(0, end, stride):
        stop = min(counted + stride, end)
        begin = max(0, stop - horizon) if horizon > stride else counted
        zero = (
            torch.zeros(layer.hidden_size, dtype=x.dtype),
            torch.zeros(layer.hidden_size, dtype=x.dtype),
        )
        before = [
            (s["h"].detach(), s["c"].detach())
            for s in by_hand(layer, x[: 0 if apart else begin], zero)
        ]
        seen = list(by_hand(layer, x[begin:stop], before[-1] if before else zero))
        outputs = net.get_submodule("readout")(
            torch.stack([s["h"] for s in seen[counted - begin :]])
        )
        first = max(0, look.config.warm_up - counted)
        loss = look.loss_fn(outputs[first:], targets[counted + first : stop])
        for gate in GATES:
            parts = torch.autograd.grad(
                loss, [s[gate] for s in seen], retain_graph=True, materialize_grads=True
            )
            sums[gate][begin:stop] += torch.stack(parts)
    return {gate: total[: run_trace.steps].norm(dim=1) for gate, total in sums.items()}


ROWS: dict[str, dict[str, Any]] = {
    "stride": {},
    "horizon": {"horizon": 35},
    "warm-up": {"warm_up": 7, "stride": 130},
    "segment": {"gradient": "exact", "stride": None, "cut_every": 90, "updates": 4},
    "exact": {"gradient": "exact", "stride": None, "updates": 3},
    "windows": {"train_on": "windows", "stride": 64},
}


@pytest.mark.parametrize("more", list(ROWS.values()), ids=list(ROWS))
def test_every_number_is_the_gradient_that_the_run_trains_with(
    tmp_path: Path, more: dict[str, Any]
) -> None:
    look, run_trace = traced_run(tmp_path, **more)
    expected = oracle(look, run_trace)
    assert run_trace.steps == 400
    for gate in GATES:
        seen = torch.tensor(run_trace.norms[f"recurrent.layer0.{gate}"], dtype=torch.float64)
        torch.testing.assert_close(
            seen, expected[gate], rtol=6e-4, atol=1e-12
        )  # kept to four digits
    assert all(float(norms.max()) > 1e-4 for norms in expected.values())


def test_window_one_step_shorter_gives_another_gradient(tmp_path: Path) -> None:
    look, run_trace = traced_run(tmp_path, horizon=12)
    mutant = oracle(look, replace(run_trace, horizon=11))["c"]
    assert not np.allclose(run_trace.norms["recurrent.layer0.c"], mutant, rtol=1e-2)


def test_a_longer_horizon_adds_credit_across_the_edges_and_a_shorter_one_cuts_it(
    tmp_path: Path,
) -> None:
    """With horizon = stride, the last step of a stride has the gradient of its own loss alone."""
    look, long = traced_run(tmp_path, horizon=35)
    short = trace_run(
        look.net, look.spec, look.first, look.loss_fn, replace(look.config, horizon=None)
    )
    assert short is not None
    last = [edge - 1 for edge in short.edges]
    name = "recurrent.layer0.c"
    assert np.mean([short.norms[name][t] for t in last]) < 0.9 * np.mean(
        [long.norms[name][t] for t in last]
    )


def test_tracing_leaves_the_net_unchanged(tmp_path: Path) -> None:
    look, _ = traced_run(tmp_path)
    before = {name: value.clone() for name, value in look.net.state_dict().items()}
    trace_run(look.net, look.spec, look.first, look.loss_fn, look.config)
    assert all(torch.equal(before[name], value) for name, value in look.net.state_dict().items())
    assert all(weight.grad is None for weight in look.net.parameters())
    assert "forward" not in look.net.module.get_submodule("recurrent").__dict__


@pytest.mark.parametrize(
    ("more", "stride", "horizon", "steps"),
    [
        ({"stride": 64}, 64, 64, 400),
        ({"stride": 64, "horizon": 100}, 64, 100, 400),
        ({"stride": 1, "horizon": 300}, 1, 75, 400),  # where the work ends
        ({"stride": 300}, 300, 300, 400),
        ({"stride": 2000}, 400, 400, 400),
    ],
)
def test_a_trace_truncates_as_the_run_as_far_as_the_recording_and_the_work_allow(
    tmp_path: Path, more: dict[str, Any], stride: int, horizon: int, steps: int
) -> None:
    _, run_trace = traced_run(tmp_path, updates=1, **more)
    assert (run_trace.stride, run_trace.horizon, run_trace.steps) == (stride, horizon, steps)
    assert run_trace.edges == tuple(range(stride, steps, stride))


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> tuple[AuditJob, RunTrace]:
    return traced_run(tmp_path_factory.mktemp("traced"), horizon=35, layers=2, model="gru")


def test_infinite_norm_is_stored_and_has_no_colour(
    traced: tuple[AuditJob, RunTrace], tmp_path: Path
) -> None:
    look, run_trace = traced
    name = next(iter(run_trace.norms))
    broken = replace(
        run_trace, norms=run_trace.norms | {name: (math.inf, *run_trace.norms[name][1:])}
    )
    drawn, whole = (figures.gradient_figure(x.norms, 0, x.edges, "") for x in (broken, run_trace))
    assert drawn != whole
    assert "inf" not in re.sub(r'"data:[^"]*"', "", drawn)
    audited = replace(audit_job(RunFolder(Path(look.config.out))).run(), trace=broken)
    keep_results(load_run(Path(look.config.out)), tmp_path / "audit.json", audited.facts())
    json.loads((tmp_path / "audit.json").read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert AuditReport.read(tmp_path / "audit.json") == audited


def test_file_without_a_trace_is_read(traced: tuple[AuditJob, RunTrace], tmp_path: Path) -> None:
    look, _ = traced
    found = audit_job(RunFolder(Path(look.config.out))).run()
    keep_results(load_run(Path(look.config.out)), tmp_path / "audit.json", found.facts())
    content = json.loads((tmp_path / "audit.json").read_text(encoding="utf-8"))
    assert content.pop("trace")
    (tmp_path / "audit.json").write_text(json.dumps(content), encoding="utf-8")
    run_trace = AuditReport.read(tmp_path / "audit.json")
    assert run_trace.trace is None
