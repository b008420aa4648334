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
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from test_run import finish, settings, write_recordings
from throughtime.app.audit import AuditJob, AuditReport
from throughtime.app.config import AuditOptions, Config, make_config
from throughtime.app.load import load_run
from throughtime.app.report import figures, tables
from throughtime.app.run_folder import RunFolder
from throughtime.app.trace import (
    FEWEST_STEPS,
    LONGEST_STRIDE,
    MOST_WORK,
    RunTrace,
    TracePlan,
    trace_run,
)

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


def oracle(look: AuditJob, run_trace: RunTrace, cut: TracePlan) -> dict[str, Tensor]:
    """The norms by plain autograd, one window at a time, each from a detached state."""
    net = look.net.module
    layer = net.get_submodule("recurrent")
    assert isinstance(layer, nn.LSTM)
    end = run_trace.start + cut.steps
    x = net.get_submodule("standardise")(
        torch.tensor(look.first.read(0, end).inputs, dtype=torch.float64)
    )
    targets = torch.tensor(look.first.read(0, end).targets, dtype=torch.long)
    apart = look.config.train_on == "windows"
    sums = {gate: torch.zeros(cut.steps, layer.hidden_size, dtype=x.dtype) for gate in GATES}
    for counted in range(run_trace.start, end, cut.stride):
        stop = min(counted + cut.stride, end)
        begin = max(run_trace.start, stop - cut.horizon) if cut.horizon > cut.stride else counted
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
            sums[gate][begin - run_trace.start : stop - run_trace.start] += torch.stack(parts)
    return {gate: total[: cut.shown].norm(dim=1) for gate, total in sums.items()}


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
    cut = TracePlan.from_config(look.config, len(look.first) - run_trace.start)
    expected = oracle(look, run_trace, cut)
    assert run_trace.steps == cut.shown >= 300
    for gate in GATES:
        seen = torch.tensor(run_trace.norms[f"recurrent.layer0.{gate}"], dtype=torch.float64)
        torch.testing.assert_close(
            seen, expected[gate], rtol=6e-4, atol=1e-12
        )  # kept to four digits
    assert all(float(norms.max()) > 1e-4 for norms in expected.values())


def test_window_one_step_late_gives_another_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look, run_trace = traced_run(tmp_path, horizon=35)
    window_start = TracePlan.window_start
    monkeypatch.setattr(
        TracePlan, "window_start", lambda plan, stop: window_start(plan, stop) + (stop < plan.steps)
    )
    late = trace_run(look.net, look.spec, look.first, look.loss_fn, look.config)
    assert late is not None
    name = "recurrent.layer0.c"
    assert not np.allclose(run_trace.norms[name], late.norms[name], rtol=1e-2)


def test_a_longer_horizon_adds_credit_across_the_edges_and_a_shorter_one_cuts_it(
    tmp_path: Path,
) -> None:
    """With horizon = stride, the last step of a stride has the gradient of its own loss alone."""
    look, long = traced_run(tmp_path, horizon=35)
    short = trace_run(
        look.net, look.spec, look.first, look.loss_fn, replace(look.config, horizon=None)
    )
    assert short is not None
    last = [edge - short.start - 1 for edge in short.edges]
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


@given(
    steps=st.integers(1, 5000),
    stride=st.integers(1, 3000),
    more=st.integers(0, 3000),
    exact=st.booleans(),
    segment=st.none() | st.just(700),
)
def test_plan_fits_the_recording_and_truncates_as_the_run(
    steps: int, stride: int, more: int, exact: bool, segment: int | None
) -> None:
    values = {"data": "d", "task": "classify", "out": "o"}
    own = (
        {"gradient": "exact", "cut_every": segment}
        if exact
        else {"stride": stride, "horizon": stride + more}
    )
    config = make_config(values | own)
    cut = TracePlan.from_config(config, steps)
    assert 1 <= cut.shown <= cut.steps <= steps
    assert cut.shown <= max(FEWEST_STEPS, 3 * LONGEST_STRIDE)
    wanted = segment or steps if exact else stride
    if wanted <= LONGEST_STRIDE:
        assert cut.stride == wanted
        assert cut.edges == tuple(t for t in range(1, cut.shown) if t % wanted == 0)
        assert cut.shown == min(steps, wanted * max(3, math.ceil(FEWEST_STEPS / wanted)))
        assert cut.stride <= cut.horizon <= max(cut.stride, 0 if exact else stride + more)
        ahead = cut.steps - cut.shown
        assert ahead == 0 or cut.steps * (cut.stride + ahead) <= MOST_WORK * cut.stride
    else:
        assert cut.edges == ()
        assert cut.stride == cut.horizon == cut.steps


def regression(folder: Path, weight: float, **more: Any) -> tuple[AuditJob, Config]:
    """A linear RNN that rotates its state by a right angle per step, with one loss per stride."""
    data = write_recordings(folder / "data")
    for path in data.glob("*_y.npy"):
        steps = len(np.load(path))
        np.save(path, np.where(np.arange(steps) % 10 == 9, 1.0, np.nan))
    values = settings(
        data, folder / "run", task="regress", hidden=2, model="rnn", updates=2, **more
    )
    look = audit_job(finish(values | {"dtype": "float64"}))
    layer = look.net.module.get_submodule("recurrent")
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.zero_()
            if name == "weight_hh_l0":
                parameter.copy_(weight * torch.tensor([[0.0, -1.0], [1.0, 0.0]]))
    return look, look.config


@pytest.mark.parametrize("weight", [0.1, 0.5, 2.0])
def test_lifetimes_of_a_linear_net_follow_from_its_weight(tmp_path: Path, weight: float) -> None:
    """Around zero, tanh is the identity: a step back multiplies by the weight."""
    look, config = regression(tmp_path, weight)
    run_trace = trace_run(look.net, look.spec, look.first, look.loss_fn, config)
    assert run_trace is not None
    (life,) = run_trace.lifetimes
    assert life.edge == pytest.approx(min(1, weight) ** 10 * max(1, weight), rel=1e-3)
    norms = run_trace.norms[life.name]
    assert norms[5] / norms[9] == pytest.approx(weight**4, rel=1e-3)
    assert (life.died, life.lived) == (
        (run_trace.windows, 3 + 1) if weight == 0.1 else (0, 10)
    )  # 0.1 ** 3 is not below a thousandth
    assert life.exploded == (run_trace.windows if weight == 2.0 else 0)
    cells = [str(cell) for cell in tables.lifetime_table(run_trace).rows[0]]
    words = {
        0.1: "vanishes 4 steps back in 40 of 40",
        0.5: "reaches the first step",
        2.0: "explodes 7 steps back in 40 of 40",
    }
    assert cells[-1] == words[weight]


def test_time_constant_follows_from_the_bias_of_the_forget_gate(tmp_path: Path) -> None:
    look, _ = traced_run(tmp_path)
    layer = look.net.module.get_submodule("recurrent")
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
        layer.get_parameter("bias_ih_l0")[8:16] = torch.arange(
            8.0
        )  # the forget gate of eight units
    run_trace = trace_run(look.net, look.spec, look.first, look.loss_fn, look.config)
    assert run_trace is not None
    (memory,) = run_trace.timescales
    taus = [-1 / math.log(1 / (1 + math.exp(-bias))) for bias in range(8)]
    assert (memory.short, max(memory.taus)) == pytest.approx((taus[1], taus[7]), rel=1e-3)


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> tuple[AuditJob, RunTrace]:
    return traced_run(tmp_path_factory.mktemp("traced"), horizon=35, layers=2, model="gru")


def test_infinite_norm_is_stored_and_has_no_colour(
    traced: tuple[AuditJob, RunTrace], tmp_path: Path
) -> None:
    look, run_trace = traced
    name = next(iter(run_trace.norms))
    broken = replace(
        run_trace,
        norms=run_trace.norms | {name: (math.inf, *run_trace.norms[name][1:])},
        lifetimes=run_trace.lifetimes,
    )
    broken = replace(
        broken,
        lifetimes=(
            replace(run_trace.lifetimes[0], largest=math.inf, exploded=1, burst=3.0),
            *run_trace.lifetimes[1:],
        ),
    )
    drawn, whole = (
        figures.gradient_figure(x.norms, x.start, x.edges, "") for x in (broken, run_trace)
    )
    assert drawn != whole
    assert "inf" not in re.sub(r'"data:[^"]*"', "", drawn)
    audited = replace(audit_job(RunFolder(Path(look.config.out))).run(), trace=broken)
    audited.write(tmp_path / "audit.json")
    json.loads((tmp_path / "audit.json").read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert AuditReport.read(tmp_path / "audit.json") == audited


def test_file_without_a_trace_is_read(traced: tuple[AuditJob, RunTrace], tmp_path: Path) -> None:
    look, _ = traced
    audit_job(RunFolder(Path(look.config.out))).run().write(tmp_path / "audit.json")
    content = json.loads((tmp_path / "audit.json").read_text(encoding="utf-8"))
    assert content.pop("trace")
    (tmp_path / "audit.json").write_text(json.dumps(content), encoding="utf-8")
    run_trace = AuditReport.read(tmp_path / "audit.json")
    assert run_trace.trace is None
