"""A run: its configuration, its data, its checkpoints.

Killed at any moment it goes on to the bit.
"""

import copy
import itertools
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import test_cli
import throughtime as tt
from processes import Ended, begun, elsewhere
from throughtime import state as trees
from throughtime.app import user_class
from throughtime.app.data import SourceRecording, in_splits, open_dataset
from throughtime.app.evaluate import evaluate_run, keep_results, read_results
from throughtime.app.load import load_run
from throughtime.app.model import load_model
from throughtime.app.run_folder import RunFolder, checkpoint_bytes, load_checkpoint
from throughtime.app.scores import Scores
from throughtime.app.settings import Config
from throughtime.app.train import Training
from throughtime.errors import DataError, RunError
from throughtime.stream.sources import as_recording
from throughtime.stream.targets import class_name


def write_recordings(
    folder: Path, lengths: tuple[int, ...] = (400, 250, 330), classes: int = 3
) -> Path:
    """A manifest of npy recordings whose class follows the sign pattern of a slow signal."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    rows = ["id,split,inputs,targets"]
    for i, (length, split) in enumerate(zip(lengths, ("train", "train", "valid"), strict=True)):
        signal = np.cumsum(random.normal(size=(length, 2)), axis=0)
        np.save(folder / f"{i}_x.npy", signal.astype(np.float32))
        np.save(folder / f"{i}_y.npy", (np.arange(length) // 7 % classes).astype(np.uint8))
        rows.append(f"{i},{split},{i}_x.npy,{i}_y.npy")
    (folder / "recordings.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    return folder


def settings(data: Path, out: Path, **more: Any) -> dict[str, Any]:
    small = {
        "task": "classify",
        "hidden": 8,
        "lanes": 2,
        "stride": 10,
        "updates": 60,
        "checkpoint_every": 1000.0,
    }
    if ".py:" in str(more.get("model")):
        del small["hidden"]  # not every module takes it
    return {"data": str(data), "out": str(out), **small, **more}


def flags(values: dict[str, Any]) -> list[str]:
    named = [
        part
        for key, value in values.items()
        if key != "data"
        for part in (f"--{key.replace('_', '-')}", str(value))
    ]
    return ["train", values["data"], *named]


COMMAND = "from throughtime.app.cli import main; main()"  # for a process that is there already


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "throughtime", *arguments]


def finish(values: dict[str, Any]) -> RunFolder:
    training = Training.begin(Config(**values))
    training.run()
    return training.folder


def after_update(training: Training, update: int, act: Callable[[], object]) -> None:
    """Act once the optimizer has made its step of this update, on this rank."""
    steps = itertools.count(training.done.count + 1)

    def hook(*_: object) -> None:
        if next(steps) == update:
            act()

    training.optimizer.register_step_post_hook(hook)


def stop_at(training: Training, update: int, *, pressed: bool = True) -> Training:
    """Run until Ctrl-C, on this rank or another one, during this update: the run saves after it."""
    if pressed:
        after_update(training, update, partial(os.kill, os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt, match=f"stopped at update {update}"):
        training.run()
    assert not load_checkpoint(training.folder.checkpoint)["done"]["finished"]
    return training


def kill_at(training: Training, update: int) -> Training:
    """Run until an error during this update: nothing is saved."""

    def fail() -> None:
        raise ZeroDivisionError

    after_update(training, update, fail)
    with pytest.raises(ZeroDivisionError):
        training.run()
    return training


def test_a_checkpoint_gives_back_what_was_put_in(tmp_path: Path) -> None:
    shared = torch.arange(6.0)
    content: dict[Any, Any] = {
        "tuple": (1, (), None),
        "list": [True, 2.5e-320, "text"],
        3: {"nested": shared, "same": shared, "strided": torch.arange(12).view(3, 4).t()},
        "state": {"a": (torch.zeros(2, 1), torch.ones(2))},
    }
    (tmp_path / "c.safetensors").write_bytes(checkpoint_bytes(content))
    found: dict[Any, Any] = load_checkpoint(tmp_path / "c.safetensors")
    assert found["tuple"] == (1, (), None)
    assert found["list"] == [True, 2.5e-320, "text"]
    assert torch.equal(found[3]["strided"], torch.arange(12).view(3, 4).t())
    assert isinstance(found["state"]["a"], tuple)
    assert list(found) == list(content)


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="Object of type set is not JSON"):
        checkpoint_bytes({"a": {1, 2}})
    trees.save({"a": torch.zeros(1)}, tmp_path / "state.safetensors")
    with pytest.raises(RunError, match="not a checkpoint"):
        load_checkpoint(tmp_path / "state.safetensors")
    (tmp_path / "cut").write_bytes((tmp_path / "state.safetensors").read_bytes()[:-2])
    with pytest.raises(RunError, match="no checkpoint to go on from"):
        load_checkpoint(tmp_path / "cut")


def begin(tmp_path: Path, **more: Any) -> Training:
    return Training.begin(
        Config(**settings(write_recordings(tmp_path / "data"), tmp_path / "run", **more))
    )


def test_bad_data_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    data, out = write_recordings(tmp_path / "data"), tmp_path / "run"
    for recording, value in (("2", np.inf), ("1", np.nan)):  # held out, and trained on
        broken = np.load(data / f"{recording}_x.npy")
        broken[17, 1] = value
        np.save(data / f"{recording}_x.npy", broken)
        said = rf"recording '{recording}': 1 step .* step 17, column '1'.*--missing mask"
        with pytest.raises(DataError, match=said):
            Training.begin(Config(**settings(data, out)))
        assert not out.exists()
    masked = finish(settings(data, out, missing="mask", updates=2))
    assert masked.model.is_file()


def test_an_unknown_class_in_a_later_file_names_file_class_and_step(tmp_path: Path) -> None:
    data = write_recordings(tmp_path / "data")
    labels = np.load(data / "2_y.npy")
    labels[200] = 9
    np.save(data / "2_y.npy", labels)
    with pytest.raises(
        DataError,
        match=r"\(valid\) have the classes 9, which the training split has not \(0, 1, 2\); hold",
    ):
        Training.begin(Config(**settings(data, tmp_path / "run")))
    assert not (tmp_path / "run").exists()


def test_without_a_split_column_whole_recordings_or_the_end_are_held_out() -> None:
    recordings: list[Any] = [
        as_recording({"inputs": np.zeros(n), "name": str(n)}, 0) for n in (10, 20, 30)
    ]
    sources = [SourceRecording("", one, ()) for one in recordings]
    several, _ = in_splits(sources, 0.2)
    assert [r.name for r in several["valid"]] == ["30"]
    single, _ = in_splits(sources[2:], 0.2)
    assert [len(single["train"][0]), len(single["valid"][0])] == [24, 6]
    everything, remark = in_splits(sources, 0.0)
    assert list(everything) == ["train"]
    assert "nothing held out" in remark


def test_training_that_diverges_says_so_and_keeps_the_checkpoint(tmp_path: Path) -> None:
    training = begin(tmp_path, task="regress", lr=1e30)
    stop_at(training, 1)
    before = training.folder.checkpoint.read_bytes()
    reason = r"((the loss|part of the loss) is (nan|inf)|not finite).*take a lower learning rate"
    with pytest.raises(RunError, match=rf"{reason} \(now 1e\+30\)"):
        Training.resume(training.folder.path).run()
    assert training.folder.checkpoint.read_bytes() == before


def test_balanced_weights_are_inverse_frequencies(tmp_path: Path) -> None:
    training = begin(tmp_path, class_weights="balanced")
    loss = training.loss_fn
    assert isinstance(loss, torch.nn.CrossEntropyLoss)
    assert loss.weight is not None
    counts = torch.tensor([float(training.dataset.statistics.classes[c]) for c in "012"])
    torch.testing.assert_close(loss.weight * counts, torch.full((3,), counts.sum().item() / 3))


def test_a_regression_model_answers_in_the_units_of_its_targets(tmp_path: Path) -> None:
    training = begin(tmp_path, task="regress", updates=3)
    training.run()
    net, spec = load_model(training.folder.model)
    assert spec.layout.task == "regress"
    shift = net.module.get_buffer("units.shift")
    assert shift.item() == pytest.approx(1.0, abs=0.05)  # the classes 0, 1, 2 as numbers


def forget_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has executed no class of the user's, and trusts none."""
    monkeypatch.setattr(user_class, "_trusted", set[str]())
    for name in [name for name in sys.modules if name.startswith(user_class.OWN_CODE)]:
        monkeypatch.delitem(sys.modules, name)


def goes_on(tmp_path: Path, at: int, **more: Any) -> RunFolder:
    """Stopped at an update a run ends with the same bits and lines as the one returned."""
    data = write_recordings(tmp_path / "data")
    whole = finish(settings(data, tmp_path / "whole", **more))
    stopped = Training.begin(Config(**settings(data, tmp_path / "stopped", **more)))
    stop_at(stopped, at)
    torch.manual_seed(999)
    resumed = Training.resume(stopped.folder.path)
    assert resumed.done.count == at
    resumed.run()
    assert whole.model.read_bytes() == resumed.folder.model.read_bytes()
    assert _lines(whole) == _lines(resumed.folder)
    return whole


HAND_OFF = {"lanes": 5, "stride": 30, "updates": None, "epochs": 4, "hand_off": True}
RESUMED: dict[str, tuple[int, dict[str, Any]]] = {
    "first update": (1, {"model": "rnn"}),
    "horizon": (23, {"horizon": 25, "model": "gru", "layers": 2}),
    "epochs": (32, {"epochs": 3, "updates": None, "warm_up": 5, "dtype": "float64"}),
    "exact": (33, {"gradient": "exact", "cut_every": 25, "stride": None}),
    # five parts of some 130 steps: the tenth update begins the third epoch
    "hand-off": (9, HAND_OFF | {"horizon": 30}),
    "hand-off at an epoch": (10, HAND_OFF | {"horizon": 30}),
    "hand-off, exact": (14, HAND_OFF | {"gradient": "exact", "cut_every": 30, "stride": None}),
}


@pytest.mark.parametrize(("at", "more"), RESUMED.values(), ids=RESUMED)
def test_a_run_stopped_anywhere_goes_on_to_the_same_bits(
    tmp_path: Path, at: int, more: dict[str, Any]
) -> None:
    goes_on(tmp_path, at, **more)


def _lines(folder: RunFolder) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k != "seconds"} for row in folder.read_metrics()]


def test_a_run_stopped_by_ctrl_c_and_then_killed_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    data = write_recordings(tmp_path / "data", (4000, 2500, 300))
    more = {"updates": 800, "valid_every": 100, "checkpoint_every": 0.1}
    whole = finish(settings(data, tmp_path / "whole", **more | {"checkpoint_every": 1000.0}))
    folder, words = RunFolder(tmp_path / "run"), flags(settings(data, tmp_path / "run", **more))
    for signal_, code in ((signal.SIGINT, 130), (signal.SIGKILL, -9)):
        process = begun(COMMAND, tmp_path, *words)
        _wait_for_lines(folder, process)
        os.kill(process.pid or 0, signal_)
        process.join(60)
        assert process.exitcode == code
        assert not load_checkpoint(folder.checkpoint)["done"]["finished"]
        words = ["train", "--resume", str(folder.path)]
        if code == 130:
            said = (tmp_path / "said").read_text(encoding="utf-8")
            assert "go on with: throughtime train --resume" in said
    test_cli.run(*words)
    assert whole.model.read_bytes() == folder.model.read_bytes()
    assert _lines(whole) == _lines(folder)


def _wait_for_lines(folder: RunFolder, process: BaseProcess) -> None:
    """Until it has saved something and logged three updates more than there are."""
    deadline = time.monotonic() + 60
    before = len(folder.read_metrics())
    while not folder.checkpoint.is_file() or len(folder.read_metrics()) < before + 3:
        assert process.is_alive()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def limited(size: int, *arguments: str | Path) -> Ended:
    """The command in a process whose files may not grow beyond a size."""
    smaller = (
        "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        f" resource.setrlimit(resource.RLIMIT_FSIZE, ({size},) * 2)"
    )
    return elsewhere(f"{smaller}\n{COMMAND}", *arguments)


def test_a_full_disk_while_saving_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    """The system refuses the write: a limit on the size of the files of this process."""
    training = begin(tmp_path, hidden=64)
    stop_at(training, 1)
    before = training.folder.checkpoint.read_bytes()
    run = limited(len(before) // 2, "train", "--resume", training.folder.path)
    assert run.code == 2
    assert "checkpoint.safetensors: File too large; make room there" in run.errors
    assert "Traceback" not in run.errors
    assert training.folder.checkpoint.read_bytes() == before
    assert not [p for p in training.folder.path.iterdir() if p.suffix == ".tmp"]


def test_a_run_goes_on_with_its_own_data_only(tmp_path: Path) -> None:
    training, data = begin(tmp_path), tmp_path / "data"
    stop_at(training, 1)
    before = training.folder.checkpoint.read_bytes(), training.folder.model.read_bytes()
    labels, inputs = np.load(data / "0_y.npy"), np.load(data / "0_x.npy")
    for name, array in (
        ("y", np.where(labels == 0, 2, labels)),
        ("y", np.where(np.arange(len(labels)) == 5, 9, labels)),
        ("x", inputs * 1.001),
    ):
        np.save(data / f"0_{name}.npy", array)
        with pytest.raises(DataError, match=r"another stream: checksum of recording 0 \('0'\) is"):
            Training.resume(training.folder.path).run()
        write_recordings(data)
    write_recordings(data, (400, 260, 330))
    with pytest.raises(
        RunError, match=r"recordings was 0 \(400 steps\), 1 \(250 .* 1 \(260 steps\)"
    ):
        Training.resume(training.folder.path).run()
    assert before == (training.folder.checkpoint.read_bytes(), training.folder.model.read_bytes())


def test_resuming_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no run there"):
        Training.resume(tmp_path)
    folder = RunFolder(tmp_path / "run")
    data = write_recordings(tmp_path / "data")
    folder.create(Config(data=str(data), task="classify", out=str(folder.path)))
    (tmp_path / "run" / "checkpoint.safetensors").write_bytes(b"no checkpoint")
    with pytest.raises(RunError, match="no checkpoint to go on from"):
        Training.resume(tmp_path / "run")


def test_a_run_ended_before_its_first_checkpoint_starts_again(tmp_path: Path) -> None:
    data = write_recordings(tmp_path / "data")
    whole = finish(settings(data, tmp_path / "whole"))
    ended = Training.begin(Config(**settings(data, tmp_path / "ended")))
    kill_at(ended, 2)
    (ended.folder.path / "model.safetensors.123.tmp").write_bytes(b"left by a kill")
    resumed = Training.resume(ended.folder.path)
    resumed.run()
    assert whole.model.read_bytes() == resumed.folder.model.read_bytes()
    assert _lines(whole) == _lines(resumed.folder)
    assert not list(resumed.folder.path.glob("*.tmp"))


def test_weights_that_are_not_finite_are_never_saved(tmp_path: Path) -> None:
    training = begin(tmp_path)
    stop_at(training, 3)
    before = training.folder.checkpoint.read_bytes(), training.folder.model.read_bytes()
    resumed = Training.resume(training.folder.path)

    def spoil() -> None:
        with torch.no_grad():
            next(resumed.net.parameters())[0] = torch.nan
        os.kill(os.getpid(), signal.SIGINT)

    after_update(resumed, 4, spoil)
    with pytest.raises(RunError, match=r"diverged at update 4: the weights are not finite"):
        resumed.run()
    assert before == (training.folder.checkpoint.read_bytes(), training.folder.model.read_bytes())


def test_an_update_clips_and_steps_as_by_hand(tmp_path: Path) -> None:
    """Updates of Adam with a tight clip, cosine and decay, against torch's by hand."""
    rule = {"weight_decay": 3.0, "schedule": "cosine", "lr": 0.01, "dtype": "float64"}
    training = begin(tmp_path, updates=4, max_norm=1e-3, keep="last", **rule)
    net = copy.deepcopy(training.net)
    start = copy.deepcopy(training.net)
    groups = [
        {"params": [p], "weight_decay": 3.0 if p.dim() > 1 else 0.0} for p in net.parameters()
    ]
    optimizer = torch.optim.AdamW(groups)
    stream = training.stream
    rates = [0.005 * (1 + math.cos(math.pi * done / 4)) for done in range(4)]
    for update, lr in zip(
        tt.updates(net, stream, torch.nn.CrossEntropyLoss(), gradient=tt.Truncated(10)),
        rates,
        strict=False,
    ):
        del update
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
        assert norm > 1e-3
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
    training.run()
    rows = [row for row in training.folder.read_metrics() if row["kind"] == "train"]
    assert [row["lr"] for row in rows] == pytest.approx(rates)
    for old, ours, theirs in zip(
        start.parameters(), training.net.parameters(), net.parameters(), strict=True
    ):
        assert not torch.equal(old, ours)
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_warm_up_steps_are_not_scored(tmp_path: Path) -> None:
    training = begin(tmp_path, warm_up=25, updates=5)
    training.run()
    run = load_run(training.folder.path)
    assert evaluate_run(run, None, "valid").steps == 330 - 25
    assert evaluate_run(run, None, "all").steps == 980 - 3 * 25


def test_a_finished_run_trains_on_to_another_end_as_if_it_had_been_asked_at_once(
    tmp_path: Path,
) -> None:
    data = write_recordings(tmp_path / "data")
    more = {"valid_every": 0, "schedule": "constant"}
    short = finish(settings(data, tmp_path / "run", **more))
    (short.path / "scores-valid.json").write_text("{}", encoding="utf-8")
    training = Training.resume(short.path, updates=90)
    training.run()
    assert not (short.path / "scores-valid.json").is_file()  # scores of the model as it was
    whole = finish(settings(data, tmp_path / "whole", updates=90, **more))
    assert whole.model.read_bytes() == short.model.read_bytes()
    assert short.read_config().updates == 90


def test_remarks_tell_of_cut_recordings_and_splits(tmp_path: Path) -> None:
    data = write_recordings(tmp_path / "data")
    cut = "cut into 5 parts, one a lane (--lanes 2 keeps recordings whole)"
    splits = "splits as in the data (train 2, valid 1)"
    for lanes, expected in ((5, (splits, cut)), (2, (splits,))):
        values = settings(data, tmp_path / "run", lanes=lanes)
        assert open_dataset(Config(**values)).remarks == expected


@pytest.mark.parametrize(
    ("label", "name"),
    [
        ("--5", "--5"),
        ("-5", "-5"),
        ("007", "007"),
        ("0", "0"),
        ("0.0", "0"),
        ("2.0", "2"),
        ("1_000", "1_000"),
        ("nan", ""),
        (2**53 + 1, str(2**53 + 1)),
    ],
)
def test_classes_are_called_by_one_name(label: object, name: str) -> None:
    assert class_name(label) == name


def test_scores_are_written_where_the_report_finds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = begin(tmp_path, updates=5)
    training.run()
    folder, trained = training.folder, load_run(training.folder.path)
    scores = evaluate_run(trained, None, "valid")
    test_cli.leave_out_charts(monkeypatch)
    assert "written" in keep_results(trained, (folder.path / "scores-valid.json"), scores)
    assert scores.split == "valid"
    content = read_results((folder.path / "scores-valid.json"), Scores, "eval")
    assert content.metrics == pytest.approx(scores.metrics, nan_ok=True)
    assert list(content.recordings) == ["2"]
    with pytest.raises(DataError, match="no recordings in split 'tset'; there are train"):
        evaluate_run(trained, None, "tset")
