"""The bench: implementations agree before they are timed, results are written as measured."""

import json
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.bench import CASES, Case, select_cases, tables, write_tables
from benchmarks.bench.__main__ import main
from benchmarks.bench.implementation import Loop
from benchmarks.bench.implementations import (
    HAND,
    OURS,
    STEP_GRAPHS,
    by_hand,
    equals_of,
    implementations_of,
    retained,
    windows,
)
from benchmarks.bench.measure import Settings, difference, gradients, max_differences, measure
from benchmarks.bench.page import BEGIN, END
from benchmarks.bench.peers import PEERS, ignite, lightning
from benchmarks.bench.results import Results, avx512, read
from benchmarks.bench.workload import Net, Workload, detach_state, workload_of
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from recurrences import needs_kernels
from throughtime.errors import ConfigError, RunError

pytestmark = [
    needs_kernels,
    pytest.mark.filterwarnings(
        "ignore:`torch.jit.[a-z]+` is deprecated", "ignore:The '.*' does not have many workers"
    ),
]
measure_module = sys.modules["benchmarks.bench.measure"]  # the package exports its function
PAGE = Path(__file__).parent.parent / "docs" / "reference" / "benchmarks.md"
KEPT = Path(__file__).parent.parent / "benchmarks" / "results" / "bench.json"
BASE = Case(
    "tiny",
    "train",
    "LSTM",
    torch.float64,
    lanes=3,
    inputs=4,
    hidden=5,
    classes=3,
    goal=1.0,
    steps=12,
)
TINY = {
    "train": BASE,
    "words": replace(BASE, vocabulary=11, layers=2, cell="GRU"),
    "single": replace(BASE, dtype=torch.float32, cell="RNN"),
    "horizon": replace(BASE, kind="horizon", stride=4),
    "resets": replace(BASE, kind="resets"),
    "trace": replace(BASE, kind="trace"),
    "class": replace(BASE, kind="class"),
    "exact": replace(BASE, kind="exact", steps=250, fused=False),
    "exact in chunks": replace(BASE, kind="exact", steps=250, chunk=7),
}
SHORT = Settings(rounds=2, turn=0.005, peers=(), checked=6)


@pytest.fixture(params=TINY)
def workload(request: pytest.FixtureRequest) -> Workload:
    return workload_of(TINY[request.param])


def test_all_sides_of_a_case_compute_the_same(workload: Workload) -> None:
    apart = max_differences(workload, equals_of(workload, implementations_of(workload)), 20)
    assert apart
    assert all(0 <= far < 1e-5 for far in apart.values())


@pytest.mark.parametrize("make", [ignite, lightning], ids=["ignite", "lightning"])
def test_the_libraries_of_others_compute_what_a_loop_by_hand_does(make: Any) -> None:
    workload = workload_of(TINY["train"])
    apart = max_differences(workload, {HAND: by_hand, "other": make}, 20)
    assert apart["other"] < 1e-12


@pytest.mark.skipif(find_spec("jax") is None, reason="JAX is not installed")
@pytest.mark.parametrize("name", ["train", "words", "single"])
def test_jax_computes_what_a_loop_by_hand_does(name: str) -> None:
    workload = workload_of(TINY[name])
    apart = max_differences(workload, {HAND: by_hand, "jax": PEERS["jax"]}, 20)
    assert apart["jax"] < (1e-5 if name == "single" else 1e-12)


def test_a_library_that_was_closed_leaves_no_thread_behind() -> None:
    before = threading.active_count()
    for make in (ignite, lightning):
        implementation = make(workload_of(TINY["train"]))
        assert len(implementation.run(7)) == 7
        assert threading.active_count() == before + 1
        implementation.close()
        assert threading.active_count() == before


def forgetful(workload: Workload) -> Loop:
    """Drops the state at every chunk."""
    net = Net(workload.modules())
    return Loop(net, _losses(net, workload, keep=False, rate=1e-3))


def hasty(workload: Workload) -> Loop:
    """Learns a thousandth faster."""
    net = Net(workload.modules())
    return Loop(net, _losses(net, workload, keep=True, rate=1.001e-3))


def _losses(net: Net, workload: Workload, *, keep: bool, rate: float) -> Iterator[Tensor]:
    optimizer, state, steps = torch.optim.Adam(net.parameters(), lr=rate), None, workload.case.steps
    for start in range(0, len(workload.inputs), steps):
        y, after = net(workload.inputs[start : start + steps], state)
        loss = nn.functional.cross_entropy(
            y.flatten(0, 1), workload.targets[start : start + steps].flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        state = detach_state(after) if keep else None
        yield loss.detach()


def quiet(workload: Workload) -> Loop:
    """Ends early."""
    return Loop(Net(workload.modules()), iter([torch.zeros((), dtype=workload.case.dtype)] * 3))


@pytest.mark.parametrize("mutant", [forgetful, hasty, quiet])
def test_a_side_that_computes_something_else_is_refused(mutant: Any) -> None:
    with pytest.raises(RunError, match="do not compute the same"):
        max_differences(workload_of(TINY["train"]), {HAND: by_hand, "mutant": mutant}, 20)


def test_a_shorter_horizon_is_refused() -> None:
    workload = workload_of(TINY["horizon"])
    shorter = Workload(replace(workload.case, steps=8), workload.inputs, workload.targets)
    assert (
        max_differences(workload, {STEP_GRAPHS: partial(retained, grain=1), "windows": windows}, 6)[
            "windows"
        ]
        < 1e-12
    )
    with pytest.raises(RunError, match="gradients"):
        max_differences(
            workload,
            {STEP_GRAPHS: partial(retained, grain=1), "shorter": lambda _: windows(shorter)},
            6,
        )


def test_the_strides_of_a_recording_do_not_pass_as_its_gradient() -> None:
    workload = workload_of(TINY["exact"])
    with pytest.raises(RunError, match="gradients"):
        max_differences(workload, implementations_of(workload), 1)


def test_nan_and_missing_updates_are_no_agreement() -> None:
    one, nan = torch.ones(()), torch.tensor(float("nan"))
    assert difference([one], [one]) == 0
    assert (
        difference([one], [one, one])
        == difference([nan], [one])
        == difference([one], [nan])
        == float("inf")
    )


def test_gradients_are_those_of_the_weights_that_stay() -> None:
    implementation = windows(workload_of(TINY["horizon"]))
    before = [weight.clone() for weight in implementation.net.parameters()]
    result = gradients(implementation, 5)
    assert all(
        torch.equal(a, b) for a, b in zip(before, implementation.net.parameters(), strict=True)
    )
    assert len({round(gradient.norm().item(), 12) for gradient in result}) == 5


@pytest.mark.parametrize(("cell", "vocabulary"), [("RNN", 0), ("GRU", 0), ("LSTM", 7)])
def test_the_floor_counts_the_products_that_torch_counts(cell: Any, vocabulary: int) -> None:
    case = replace(BASE, cell=cell, steps=100, vocabulary=vocabulary, layers=2)
    implementation = by_hand(workload_of(case))
    implementation.run(1)  # with a state that has a gradient of its own nowhere
    with FlopCounterMode(display=False) as counted:
        implementation.run(1)
    assert counted.get_total_flops() == pytest.approx(
        case.flops, rel=0.01
    )  # torch leaves out dL/dh of the first step's state


def test_a_case_is_measured_and_written(tmp_path: Path) -> None:
    results = Results(tmp_path / "bench.json")
    for name in ("lstm-b1-h50-f64", "gru-b1-h50-f64"):
        row: dict[str, Any] = measure(CASES[name], SHORT, {"float64": {"torch.mm": 100.0}}) | {
            "settings": {"rounds": 2, "turn": 0.1}
        }
        results.put(row)
        results.put(row)
        assert list(row["implementations"]) == [OURS, HAND]
        assert all(
            low <= middle <= high
            for implementation in row["implementations"].values()
            for low, middle, high in implementation.values()
        )
        assert row["implementations"][OURS]["ratio"] == [1, 1, 1]
    kept_rows = read(tmp_path / "bench.json")["rows"]
    assert [row["case"] for row in kept_rows] == ["lstm-b1-h50-f64", "gru-b1-h50-f64"]


def test_the_command_measures_writes_and_fills_in_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, out = tmp_path / "page.md", tmp_path / "bench.json"
    page.write_text(f"above\n{BEGIN}\nold\n{END}\nbelow\n", encoding="utf-8")
    summary = [
        "--quick",
        "--rounds",
        "2",
        "--cases",
        "rnn-b1-h50-f32",
        "--out",
        str(out),
        "--docs",
        str(page),
    ]
    monkeypatch.setattr(sys, "argv", ["bench", *summary])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code in {0, None}
    (row,) = json.loads(out.read_text(encoding="utf-8"))["rows"]
    text = page.read_text(encoding="utf-8")
    assert (row["case"], row["threads"], row["checked"]) == ("rnn-b1-h50-f32", 1, 20)
    assert row["apart"][HAND] < 1e-5
    assert text.startswith("above\n")
    assert text.endswith("below\n")
    assert "`rnn-b1-h50-f32`" in text
    assert "old" not in text


def test_a_goal_that_is_missed_is_called_so() -> None:
    def said(name: str, middle: float, threads: int = 1) -> str:
        implementations = {
            "one": {"ms": [1, 1, 1], "ratio": [1, 1, 1]},
            "two": {"ms": [2, 2, 2], "ratio": [middle, middle, middle]},
        }
        row = {
            "case": name,
            "kind": CASES[name].kind,
            "threads": threads,
            "level": "v4",
            "load": [0, 1],
            "floor_ms": 0.5,
            "implementations": implementations,
        }
        machine = {
            "processor": "",
            "cores": 2,
            "torch_level": "",
            "system": "",
            "torch": "",
            "python": "",
        }
        return tables(
            {
                "machine": machine,
                "peaks": {},
                "rows": [row | {"settings": {"rounds": 2, "turn": 0.1}}],
            }
        ).splitlines()[-1]

    assert "| ≥ 2.5 (4.5) | **not met** |" in said("lstm-b1-h50-f32", 2.4)
    assert "| ≥ 2.5 (4.5) | met |" in said("lstm-b1-h50-f32", 2.5)
    assert "| met, and beyond |" in said("lstm-b1-h50-f32", 4.5)
    assert "| ≥ 1 | **not met** |" in said("lstm-b1-h50-f32", 0.99, threads=2)
    assert "| ≤ 1.05 | **not met** |" in said("resets-lstm-b1-h50-f32", 1.06)
    assert "| ≤ 1.05 | met |" in said("resets-lstm-b1-h50-f32", 1.05)


def test_a_library_that_is_not_there_is_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(workload: Workload) -> Loop:
        raise ModuleNotFoundError(f"No module named 'tsfast', wanted by {workload.case.name}")

    monkeypatch.setitem(PEERS, "tsfast", absent)
    row = measure(TINY["train"], replace(SHORT, peers=("tsfast",)), {"float64": {"torch.mm": 1.0}})
    assert "No module named 'tsfast'" in row["absent"]["tsfast"]
    assert "tsfast" not in row["implementations"]


def test_an_unknown_case_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="nearest is 'lstm-b1-h50-f32'"):
        select_cases(["lstm-b1-h50-f23"], quick=False)
    assert [case.name for case in select_cases(["gru-2x*", "words*"], quick=True)] == [
        "gru-2x650-f32",
        "words-lstm-2x650-f32",
    ]


def test_results_of_another_machine_are_not_added_to(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    path.write_text(
        json.dumps({"machine": {"processor": "another"}, "peaks": {}, "rows": []}), encoding="utf-8"
    )
    with pytest.raises(ConfigError, match="another"):
        Results(path, add=True)
    path.write_text("[]", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"python -m benchmarks\.bench wrote"):
        read(path)


def test_a_page_without_marks_is_refused(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(f"{END} then {BEGIN}", encoding="utf-8")
    with pytest.raises(ConfigError, match="expected a line"):
        write_tables(tmp_path / "page.md", "text")


def test_the_page_shows_the_results_that_are_kept() -> None:
    assert tables(read(KEPT)) in PAGE.read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_narrower_instruction_set_runs_in_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not avx512():
        pytest.skip("this processor has no wider one than AVX2")
    out = tmp_path / "bench.json"
    summary = [
        "--quick",
        "--rounds",
        "2",
        "--cases",
        "rnn-b1-h50-f32",
        "--levels",
        "own,v3",
        "--out",
        str(out),
    ]
    monkeypatch.setattr(sys, "argv", ["bench", *summary])
    with pytest.raises(SystemExit):
        main()
    assert [(row["level"], row["runs"]) for row in read(out)["rows"]] == [
        ("v4", "fused (v4), float32"),
        ("v3", "fused (v3), float32"),
    ]
    assert set(read(out)["peaks"]) == {"v4", "v3"}


def test_a_side_is_not_timed_before_it_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_module, "timed", lambda *_: pytest.fail("timed"))
    monkeypatch.setattr(
        measure_module, "implementations_of", lambda _: {HAND: by_hand, "mutant": forgetful}
    )
    with pytest.raises(RunError, match="do not compute the same"):
        measure(TINY["train"], SHORT, {"float64": {"torch.mm": 1.0}})
