"""The doctor names faults, finds none where there is none, and changes nothing."""

import ast
import contextlib
import gc
import re
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.modules.module as modules
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils.data import DataLoader

import throughtime as tt
from recurrences import needs_kernels
from throughtime.doctor import CODES, doctor
from throughtime.doctor._events import LoopEvents
from throughtime.errors import ConfigError, DiagnosisError, ThroughtimeError
from throughtime.testing import plugin

PAGES = Path(__file__).parent.parent / "docs" / "reference" / "doctor"
MARK = re.compile(r"# <- (TT\d{3})")
STREAM = (
    torch.randn(120, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).cumsum(
        0
    )
    / 10
)


def blocks(page: Path) -> dict[str, Any]:
    """What the Python of a page defines, its lines numbered as in the page."""
    text, names = page.read_text(encoding="utf-8"), dict[str, Any]()
    for match in re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        tree = ast.increment_lineno(ast.parse(match[1]), text[: match.start(1)].count("\n"))
        exec(compile(tree, str(page), "exec"), names)
    return names


@pytest.mark.parametrize("code", sorted(CODES))
def test_the_before_of_a_page_has_its_fault_at_its_line_and_the_after_has_none(code: str) -> None:
    page = PAGES / f"{code}.md"
    names = blocks(page)
    with contextlib.suppress(RuntimeError), doctor() as d:
        names["before"]()
    marked = {
        (code, i)
        for i, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
        if MARK.search(line)
    }
    assert {(f.code, f.line) for f in d.findings} <= marked
    assert [f.code for f in d.findings] == [code]
    assert all(f.page.endswith(page.name) and f.fix and f.file == str(page) for f in d.findings)
    with doctor() as d:
        names["after"]()
    assert d.findings == ()


def train(x: Tensor, kind: str) -> list[Tensor]:
    """A sound loop with dropout, in float64."""
    torch.manual_seed(1)
    net = nn.LSTM(3, 4, dtype=x.dtype) if kind == "layer" else nn.LSTMCell(3, 4, dtype=x.dtype)
    w, u = (torch.randn(n, 4, dtype=x.dtype, requires_grad=True) for n in (3, 4))
    parameters = [w, u] if kind == "by hand" else list(net.parameters())
    optimizer = torch.optim.Adam(parameters)
    state: Any = torch.zeros(2, 4, dtype=x.dtype) if kind == "by hand" else None
    losses: list[Tensor] = []
    for chunk in x.split(6):
        if kind == "layer":
            y, state = net(chunk, state)
        else:
            steps: list[Tensor] = []
            for step in chunk:
                state = torch.tanh(step @ w + state @ u) if kind == "by hand" else net(step, state)
                steps.append(state if isinstance(state, Tensor) else state[0])
            y = torch.stack(steps)
        loss = nn.functional.dropout(y, 0.3).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state = (
            state.detach() if isinstance(state, Tensor) else tuple(part.detach() for part in state)
        )
        losses.append(loss.detach())
    return [torch.stack(losses), *(p.detach() for p in parameters), torch.get_rng_state()]


@pytest.mark.parametrize("kind", ["layer", "cell", "by hand"])
def test_a_watched_loop_computes_the_same_bits_and_draws_the_same_numbers(kind: str) -> None:
    plain = train(STREAM, kind)
    with doctor() as d:
        watched = train(STREAM, kind)
    assert d.findings == ()
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))


def patched_parts() -> list[Any]:
    """All parts of torch that a doctor wraps or hooks."""
    owners = (
        (torch.Tensor, "backward"),
        (torch.autograd, "backward"),
        (torch.autograd, "grad"),
        (torch.optim.Optimizer, "zero_grad"),
        (nn.Module, "zero_grad"),
        (DataLoader, "__init__"),
        (DataLoader, "__iter__"),
    )
    hooks = (
        modules._global_forward_hooks,
        modules._global_forward_pre_hooks,
        modules._global_forward_hooks_with_kwargs,
    )
    return [
        *(owner.__dict__[name] for owner, name in owners),
        *map(dict, hooks),
        _get_current_function_mode(),
    ]


@pytest.mark.parametrize("fails", [False, True])
def test_torch_is_restored_even_after_an_error(fails: bool) -> None:
    before = patched_parts()
    with contextlib.suppress(KeyError), doctor():
        assert patched_parts() != before  # what is compared does show an open doctor
        train(STREAM[:24], "layer")
        if fails:
            raise KeyError("of the loop")
    assert patched_parts() == before


class PassThroughMode(TorchFunctionMode):
    """A user's mode that changes nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def never_detached(steps: int = 10) -> None:
    gru, h = nn.GRU(3, 4, dtype=torch.float64), None
    for x in STREAM.split(steps):
        y, h = gru(x, h)
        y.square().mean().backward()


def test_an_error_keeps_its_type_and_message_and_gains_the_diagnosis_once() -> None:
    with pytest.raises(RuntimeError, match="a second time") as plain:
        never_detached()
    with pytest.raises(RuntimeError, match="a second time") as raised, doctor() as d:
        never_detached()
    assert type(raised.value) is type(plain.value)
    assert str(raised.value) == str(plain.value)
    notes = raised.value.__notes__
    assert len(notes) == 1
    assert "TT101" in notes[0]
    (finding,) = d.findings
    assert finding.tensor == "h"
    assert "from chunk 1, and this is chunk 2" in finding.message
    assert finding.line == never_detached.__code__.co_firstlineno + 3


def never_detached_for_grad() -> None:
    gru, h = nn.GRU(3, 4, dtype=torch.float64), None
    for x in STREAM.split(10):
        y, h = gru(x, h)
        torch.autograd.grad(y.square().mean(), list(gru.parameters()))


def run_layer(carry: Callable[[Tensor], Tensor | None], fused: bool, traced: bool) -> None:
    """A loop over a layer, of torch.nn or fused, under a trace or not."""
    gru, h = (tt.nn if fused else nn).GRU(3, 4, num_layers=2, dtype=torch.float64), None
    with tt.trace(gru) if traced else contextlib.nullcontext():
        for x in STREAM[:60].split(5):
            y, state = gru(x, h)
            y.square().mean().backward()
            h = carry(state)


@pytest.mark.parametrize("traced", [False, True], ids=["untraced", "traced"])
@pytest.mark.parametrize(
    "fused", [False, pytest.param(True, marks=needs_kernels)], ids=["torch", "fused"]
)
def test_a_fault_of_a_fused_or_traced_layer_is_found(fused: bool, traced: bool) -> None:
    with pytest.raises(RuntimeError, match="a second time"), doctor() as d:
        run_layer(lambda state: state, fused, traced)
    assert [f.code for f in d.findings] == ["TT101"]
    with doctor() as d:
        run_layer(lambda _: None, fused, traced)
    assert [f.code for f in d.findings] == ["TT201"]
    with doctor() as d:
        run_layer(lambda state: state.detach(), fused, traced)
    assert d.findings == ()


def test_an_error_of_autograd_grad_is_explained_too() -> None:
    with pytest.raises(RuntimeError, match="a second time") as raised, doctor() as d:
        never_detached_for_grad()
    assert [f.code for f in d.findings] == ["TT101"]
    assert "TT101" in raised.value.__notes__[0]


def test_an_ignored_code_is_not_reported_and_an_unknown_one_is_refused() -> None:
    with pytest.raises(RuntimeError, match="a second time"), doctor(ignore={"TT101"}) as d:
        never_detached()
    assert d.findings == ()
    with pytest.raises(ConfigError, match=r"TT999.*TT101"):
        doctor(ignore={"TT999"})
    with pytest.raises(ConfigError, match=r"ignore=5.*TT207"):
        doctor(ignore=5)  # pyright: ignore[reportArgumentType]


def never_carried(done: list[int]) -> None:
    gru = nn.GRU(3, 4, dtype=torch.float64)
    for i, x in enumerate(STREAM.split(10)):
        gru(x)[0].square().mean().backward()
        done.append(i)


def test_strict_raises_at_the_first_finding() -> None:
    before, done = patched_parts(), list[int]()
    with pytest.raises(DiagnosisError, match="TT201") as raised, doctor(strict=True):
        never_carried(done)
    assert isinstance(raised.value, ThroughtimeError)
    assert len(done) < 12
    assert patched_parts() == before


def test_a_doctor_inside_another_is_refused_and_the_outer_goes_on() -> None:
    with doctor() as outer:
        with pytest.raises(ConfigError, match="one at a time"), doctor():
            pass
        never_carried([])
    assert [f.code for f in outer.findings] == ["TT201"]


def test_another_thread_is_not_watched() -> None:
    with doctor() as d:
        thread = threading.Thread(target=never_carried, args=([],))
        thread.start()
        thread.join()
    assert d.findings == ()


def late_fault(chunk: int) -> Callable[[], None]:
    """A state that is not detached after some chunk of a loop that is long sound."""

    def loop() -> None:
        gru, h = nn.GRU(3, 4), None
        for i, x in enumerate(torch.randn(400, 1, 3).split(2)):
            y, h = gru(x, h)
            y.square().mean().backward()
            h = h.detach() if i != chunk else h

    return loop


def test_a_fault_long_after_the_start_is_found_at_its_line() -> None:
    loop = late_fault(150)
    with pytest.raises(RuntimeError, match="a second time"), doctor() as d:
        loop()
    (finding,) = d.findings
    assert (finding.code, finding.line) == ("TT101", loop.__code__.co_firstlineno + 3)
    assert "from chunk 151, and this is chunk 152" in finding.message


@pytest.mark.parametrize("chunk", [3, 150, 254, 257])
def test_a_fault_of_a_cell_by_hand_is_found_at_its_line_whenever_it_comes(chunk: int) -> None:
    def loop() -> None:
        w, u = (torch.randn(rows, 4, requires_grad=True) for rows in (3, 4))
        h = torch.zeros(1, 4)
        for i, part in enumerate(torch.randn(600, 1, 3).split(2)):
            for x in part:
                h = torch.tanh(x @ w + h @ u)
            loss = h.square().mean()
            loss.backward()
            h = h.detach() if i != chunk else h

    with pytest.raises(RuntimeError, match="a second time"), doctor() as d:
        loop()
    assert [(f.code, f.line) for f in d.findings] == [("TT101", loop.__code__.co_firstlineno + 5)]


@pytest.mark.parametrize("carry", [False, True])
def test_a_cell_by_hand_that_always_begins_at_zero_is_found(carry: bool) -> None:
    w, u, h = (
        torch.randn(3, 4, requires_grad=True),
        torch.randn(4, 4, requires_grad=True),
        torch.zeros(2, 4),
    )
    with doctor() as d:
        for part in STREAM.float().split(10):
            h = h.detach() if carry else torch.zeros(2, 4)
            for x in part:
                h = torch.tanh(x @ w + h @ u)
            h.square().mean().backward()
    assert {f.code for f in d.findings} == (set() if carry else {"TT201"})


@pytest.mark.parametrize("lanes", [1, 2])
def test_sequences_of_their_own_that_lie_side_by_side_in_memory_are_not_adjacent(
    lanes: int,
) -> None:
    sequences, net = torch.randn(20, 12, 3), nn.LSTM(3, 4, batch_first=True)
    with doctor() as d:
        for i in range(0, 20, lanes):
            net(sequences[i : i + lanes])[0].square().mean().backward()
    assert d.findings == ()
    with doctor() as d:  # the chunks of one recording are
        for x in torch.randn(lanes, 240, 3).split(12, 1):
            net(x)[0].square().mean().backward()
    assert [f.code for f in d.findings] == ["TT201"]


def test_a_state_that_enters_another_recording_late_is_found() -> None:
    def loop(carry: bool) -> None:
        lstm, state = nn.LSTM(3, 4), None
        for recording in (torch.randn(120, 2, 3), torch.randn(60, 2, 3)):
            state = state if carry else None
            for x in recording.split(4):
                y, state = lstm(x, state)
                y.square().mean().backward()
                state = tuple(part.detach() for part in state)

    with doctor() as d:
        loop(carry=True)
    assert [f.code for f in d.findings] == ["TT204"]
    with doctor() as d:
        loop(carry=False)
    assert d.findings == ()


def test_an_error_of_the_doctor_itself_is_reported_and_does_not_stop_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: object) -> None:
        raise LookupError("of the doctor")

    monkeypatch.setattr(sys.modules["throughtime.doctor.rules.state"], "relation", fails)
    with doctor() as d:
        never_carried([])
    assert d.findings == ()
    assert "the doctor itself failed" in str(d).lower()
    assert "LookupError: of the doctor" in str(d)
    # only the fixture raises it, after the test
    watched = contextlib.contextmanager(plugin.doctor.__wrapped__)  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(DiagnosisError, match="LookupError"), watched(frozenset()):
        never_carried([])


def test_the_doctor_keeps_no_parameter_alive() -> None:
    with doctor():
        net = nn.LSTM(3, 4)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        net(STREAM.float())[0].square().mean().backward()
        optimizer.step()
        weight = weakref.ref(net.weight_ih_l0)
        del net, optimizer
        gc.collect()
        assert weight() is None


def test_a_watcher_left_on_the_stack_of_modes_passes_on() -> None:
    d, mode = doctor(), PassThroughMode()
    d.__enter__()
    mode.__enter__()
    d.__exit__(None, None, None)  # the user's mode is above the doctor's
    mode.__exit__(None, None, None)
    left = _get_current_function_mode()
    assert isinstance(left, LoopEvents)
    count = left.operations
    try:
        assert torch.ones(2, requires_grad=True).mul(2).detach().tolist() == [2, 2]
        assert left.operations == count
    finally:
        left.__exit__(None, None, None)
    assert _get_current_function_mode() is None


def test_autocast_and_the_users_own_modes_go_through() -> None:
    net, state = nn.LSTM(3, 4), None
    with doctor() as d:
        for x in STREAM.float().split(4):
            with torch.device("cpu"), torch.autocast("cpu", dtype=torch.bfloat16):
                y, state = net(x, state)
            y.float().square().mean().backward()
            state = tuple(part.detach() for part in state)
    assert d.findings == ()
    assert d.internal_error is None
    assert _get_current_function_mode() is None


def test_the_report_says_code_line_and_what_to_write() -> None:
    with contextlib.suppress(RuntimeError), doctor() as d:
        never_detached()
    (finding,) = d.findings
    for part in (
        "TT101",
        f":{finding.line}",
        "write:",
        "h = h.detach()",
        "docs/reference/doctor/TT101.md",
    ):
        assert part in str(d)
    with doctor() as d:
        train(STREAM[:24], "layer")
    where = f"{Path(__file__)}:{train.__code__.co_firstlineno + 11}".removeprefix(f"{Path.cwd()}/")
    watched = f"backward passes: 4; optimizer steps: 4; the recurrent state of {where}, carried"
    assert str(d) == f"tt.doctor: nothing found\nWatched: {watched} from chunk to chunk."


SCRIPT = """
import sys
import torch
gru = torch.nn.GRU(3, 4)
assert sys.argv[1:] == ["--steps", "10"]
for x in torch.randn(120, 2, 3).split(int(sys.argv[2])):
    gru(x)[0].square().mean().backward()
"""


@pytest.mark.slow
def test_the_command_runs_a_script_with_its_arguments_and_prints_what_it_found(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    words = [sys.executable, "-m", "throughtime", "doctor", "train.py", "--steps", "10"]
    result = subprocess.run(
        words, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120
    )
    assert result.returncode == 1, result.stderr
    assert "TT201 train.py:7" in result.stdout


@pytest.mark.slow
def test_the_fixture_fails_a_test_whose_loop_has_a_fault(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "from throughtime.testing.plugin import doctor, doctor_ignores\n", encoding="utf-8"
    )
    loop = "gru = torch.nn.GRU(3, 4)\n    for x in {}: gru(x)[0].square().mean().backward()\n"
    one, many = "torch.randn(120, 2, 3).split(10)", "[torch.randn(10, 2, 3) for _ in range(12)]"
    broken = f"import torch\ndef test_broken(doctor):\n    {loop.format(one)}"
    sound = f"def test_sound(doctor):\n    {loop.format(many)}"
    (tmp_path / "test_loop.py").write_text(broken + sound, encoding="utf-8")
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_loop.py"]
    result = subprocess.run(
        words, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120
    )
    assert "2 passed, 1 error" in result.stdout, result.stdout
    assert "TT201" in result.stdout


def test_the_size_of_a_script_does_not_slow_its_operations() -> None:
    seconds: list[float] = []
    for count in (1, 200_000):
        loop = (
            f"def loop():\n    w, h = torch.randn(3, 3, requires_grad=True), torch.zeros(2, 3)\n"
            f"    numbers = {tuple(range(count))}\n"
            f"    for _ in range(200):\n        h = torch.tanh(h @ w)\n"
        )
        names: dict[str, Any] = {"torch": torch}
        exec(compile(loop, "<loop>", "exec"), names)
        with doctor():
            start = time.thread_time()
            names["loop"]()
            seconds.append(time.thread_time() - start)
    assert seconds[1] < 20 * seconds[0]


def test_a_head_in_a_dict_is_not_trained() -> None:
    class Tasks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.heads = nn.GRU(3, 4), {"next": nn.Linear(4, 3)}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.heads["next"](self.rnn(x)[0])

    net = Tasks()
    optimizer = torch.optim.Adam(net.parameters())
    with doctor() as d:
        for x in torch.randn(6, 10, 2, 3):
            net(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert {f.code for f in d.findings} == {"TT305"}
