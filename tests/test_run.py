"""A run: its configuration, its data, its checkpoints.

Killed at any moment it goes on to the bit.
"""

import copy
import itertools
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from processes import elsewhere
from throughtime import state as trees
from throughtime.app.data import SourceRecording, in_splits, open_dataset
from throughtime.app.load import load_run
from throughtime.app.model import load_model
from throughtime.app.run_folder import RunFolder, checkpoint_bytes, load_checkpoint
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


def test_a_checkpoint_refuses_what_it_could_not_give_back(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="Object of type set is not JSON"):
        (tmp_path / "c.safetensors").write_bytes(checkpoint_bytes({"a": {1, 2}}))
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    trees.save({"a": torch.zeros(1)}, tmp_path / "state.safetensors")
    with pytest.raises(RunError, match="not a checkpoint"):
        load_checkpoint(tmp_path / "state.safetensors")
    (tmp_path / "cut").write_bytes((tmp_path / "state.safetensors").read_bytes()[:-2])
    with pytest.raises(RunError, match="no checkpoint to go on from"):
        load_checkpoint(tmp_path / "cut")


def test_bad_data_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    data, out = write_recordings(tmp_path / "data"), tmp_path / "run"
    broken = np.load(data / "1_x.npy")
    broken[17, 1] = np.nan
    np.save(data / "1_x.npy", broken)
    with pytest.raises(
        DataError, match=r"recording '1': 1 step .* step 17, column '1'.*--missing mask"
    ):
        Training.begin(Config(**settings(data, out)))
    assert not out.exists()
    masked = finish(settings(data, out, missing="mask"))
    assert masked.report.parent.is_dir()


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


def test_more_lanes_than_steps_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="9999 lanes, but the recordings have 650 steps"):
        Training.begin(
            Config(**settings(write_recordings(tmp_path / "data"), tmp_path / "run", lanes=9999))
        )


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
    training = Training.begin(
        Config(
            **settings(
                write_recordings(tmp_path / "data"), tmp_path / "run", task="regress", lr=1e30
            )
        )
    )
    stop_at(training, 1)
    before = training.folder.checkpoint.read_bytes()
    reason = r"((the loss|part of the loss) is (nan|inf)|not finite).*take a lower learning rate"
    with pytest.raises(RunError, match=rf"{reason} \(now 1e\+30\)"):
        Training.resume(training.folder.path).run()
    assert training.folder.checkpoint.read_bytes() == before


def test_balanced_weights_are_inverse_frequencies(tmp_path: Path) -> None:
    training = Training.begin(
        Config(
            **settings(
                write_recordings(tmp_path / "data"), tmp_path / "run", class_weights="balanced"
            )
        )
    )
    loss = training.loss_fn
    assert isinstance(loss, torch.nn.CrossEntropyLoss)
    assert loss.weight is not None
    counts = torch.tensor([float(training.dataset.statistics.classes[c]) for c in "012"])
    torch.testing.assert_close(loss.weight * counts, torch.full((3,), counts.sum().item() / 3))


def test_a_regression_model_answers_in_the_units_of_its_targets(tmp_path: Path) -> None:
    values = settings(
        write_recordings(tmp_path / "data"), tmp_path / "run", task="regress", updates=300, lr=0.01
    )
    folder = finish(values)
    net, spec = load_model(folder.model)
    assert spec.layout.task == "regress"
    shift = net.module.get_buffer("units.shift")
    assert shift.item() == pytest.approx(1.0, abs=0.05)  # the classes 0, 1, 2 as numbers


RESUMED = [
    {"model": "rnn"},
    {"horizon": 25, "model": "gru", "layers": 2},
    {"epochs": 3, "updates": None, "warm_up": 5, "dtype": "float64"},
    {"gradient": "exact", "cut_every": 25, "stride": None},
]


@pytest.mark.covering
@pytest.mark.parametrize("more", RESUMED, ids=lambda more: "-".join(map(str, more.values())))
@pytest.mark.parametrize("at", [1, 23, 32, 33, 47])
def test_a_run_stopped_anywhere_goes_on_to_the_same_bits(
    tmp_path: Path, more: dict[str, Any], at: int
) -> None:
    from throughtime.app.train import Training

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


def _lines(folder: RunFolder) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k != "seconds"} for row in folder.read_metrics()]


def test_a_run_killed_without_warning_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    data = write_recordings(tmp_path / "data", (4000, 2500, 300))
    more = {"updates": 800, "checkpoint_every": 0.2, "horizon": 30}
    whole = finish(settings(data, tmp_path / "whole", **(more | {"checkpoint_every": 1000.0})))
    values = settings(data, tmp_path / "killed", **more)
    process = subprocess.Popen(
        command(*flags(values)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    folder = RunFolder(tmp_path / "killed")
    seen = _wait_for_checkpoint(folder, process)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert seen
    assert not load_checkpoint(folder.checkpoint)["done"]["finished"]
    resumed = elsewhere(COMMAND, "train", "--resume", folder.path)
    assert resumed.code == 0, resumed.errors
    assert "resumed at update" in resumed.output
    assert whole.model.read_bytes() == folder.model.read_bytes()
    assert _lines(whole) == _lines(folder)


def _wait_for_checkpoint(folder: RunFolder, process: "subprocess.Popen[bytes]") -> bool:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        if folder.checkpoint.is_file() and len(folder.read_metrics()) > 3:
            return True
        time.sleep(0.01)
    return False


def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path: Path) -> None:
    values = settings(
        write_recordings(tmp_path / "data", (4000, 2500, 300)), tmp_path / "run", updates=100_000
    )
    process = subprocess.Popen(
        command(*flags(values)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    folder = RunFolder(tmp_path / "run")
    while not folder.read_metrics() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "go on with: throughtime train --resume" in output
    assert load_checkpoint(tmp_path / "run" / "checkpoint.safetensors")["done"]["count"] > 0


def test_a_full_disk_while_saving_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    """The system refuses the write: a limit on the size of the files of this process."""
    values = settings(write_recordings(tmp_path / "data"), tmp_path / "run", hidden=64)
    training = Training.begin(Config(**values))
    stop_at(training, 1)
    before = training.folder.checkpoint.read_bytes()
    limit = len(before) // 2

    smaller = (
        "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        f" resource.setrlimit(resource.RLIMIT_FSIZE, ({limit},) * 2)"
    )
    run = elsewhere(f"{smaller}\n{COMMAND}", "train", "--resume", values["out"])
    assert run.code == 2
    assert "checkpoint.safetensors: File too large; make room there" in run.errors
    assert "Traceback" not in run.errors
    assert training.folder.checkpoint.read_bytes() == before
    assert not [p for p in training.folder.path.iterdir() if p.suffix == ".tmp"]


def test_resuming_on_changed_data_is_refused_naming_the_difference(tmp_path: Path) -> None:
    from throughtime.app.train import Training

    data = write_recordings(tmp_path / "data")
    training = Training.begin(Config(**settings(data, tmp_path / "run")))
    stop_at(training, 1)
    write_recordings(data, (400, 260, 330))
    before = training.folder.checkpoint.read_bytes(), training.folder.model.read_bytes()
    with pytest.raises(
        RunError, match=r"recordings was 0 \(400 steps\), 1 \(250 .* 1 \(260 steps\)"
    ):
        Training.resume(training.folder.path).run()
    assert before == (training.folder.checkpoint.read_bytes(), training.folder.model.read_bytes())


def test_resuming_what_is_no_run_is_refused(tmp_path: Path) -> None:
    from throughtime.app.train import Training

    with pytest.raises(RunError, match="no run there"):
        Training.resume(tmp_path)
    folder = RunFolder(tmp_path / "run")
    data = str(write_recordings(tmp_path / "data"))
    folder.create(Config(data=data, task="classify", out=str(folder.path)))
    (tmp_path / "run" / "checkpoint.safetensors").write_bytes(b"no checkpoint")
    with pytest.raises(RunError, match="no checkpoint to go on from"):
        Training.resume(tmp_path / "run")


def test_a_run_ended_before_its_first_checkpoint_starts_again(tmp_path: Path) -> None:
    from throughtime.app.train import Training

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


@pytest.mark.parametrize("changed", ["another class by name", "one class more", "another scale"])
def test_a_run_goes_on_with_its_own_data_only(tmp_path: Path, changed: str) -> None:
    from throughtime.app.train import Training

    data = write_recordings(tmp_path / "data")
    training = Training.begin(Config(**settings(data, tmp_path / "run")))
    stop_at(training, 1)
    labels, inputs = np.load(data / "0_y.npy"), np.load(data / "0_x.npy")
    if changed == "another class by name":
        for name in ("0", "1", "2"):
            own = np.load(data / f"{name}_y.npy")
            np.save(data / f"{name}_y.npy", np.where(own == 0, 7, own))
    elif changed == "one class more":
        np.save(data / "0_y.npy", np.where(np.arange(len(labels)) == 5, 9, labels))
    else:
        np.save(data / "0_x.npy", inputs * 1.001)
    with pytest.raises(DataError, match=r"another stream: checksum of recording 0 \('0'\) is"):
        Training.resume(training.folder.path).run()


def test_a_value_that_is_missing_in_held_out_data_is_found_before_training(tmp_path: Path) -> None:
    data = write_recordings(tmp_path / "data")
    inputs = np.load(data / "2_x.npy")
    inputs[3, 1] = np.inf
    np.save(data / "2_x.npy", inputs)
    with pytest.raises(DataError, match=r"recording '2': 1 step .* step 3, column '1'"):
        Training.begin(Config(**settings(data, tmp_path / "run")))


def test_weights_that_are_not_finite_are_never_saved(tmp_path: Path) -> None:
    training = Training.begin(
        Config(**settings(write_recordings(tmp_path / "data"), tmp_path / "run"))
    )
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


@pytest.mark.parametrize("weight_decay", [0.0, 3.0])
def test_an_update_clips_and_steps_as_by_hand(tmp_path: Path, weight_decay: float) -> None:
    """Updates of Adam with a tight clip, cosine and decay, against torch's by hand."""
    import throughtime as tt

    rule = {"weight_decay": weight_decay, "schedule": "cosine", "lr": 0.01}
    training = Training.begin(
        Config(
            **settings(
                write_recordings(tmp_path / "data"),
                tmp_path / "run",
                updates=4,
                max_norm=1e-3,
                keep="last",
                dtype="float64",
                **rule,
            )
        )
    )
    net = copy.deepcopy(training.net)
    start = copy.deepcopy(training.net)
    groups = [
        {"params": [p], "weight_decay": weight_decay if p.dim() > 1 else 0.0}
        for p in net.parameters()
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
    from throughtime.app.evaluate import evaluate_run

    folder = finish(settings(write_recordings(tmp_path / "data"), tmp_path / "run", warm_up=25))
    assert evaluate_run(load_run(folder.path), None, "valid").steps == 330 - 25
    assert evaluate_run(load_run(folder.path), None, "all").steps == 980 - 3 * 25


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


def test_an_epoch_without_a_step_that_counts_is_refused(tmp_path: Path) -> None:
    training = Training.begin(
        Config(**settings(write_recordings(tmp_path / "data"), tmp_path / "run", warm_up=10_000))
    )
    with pytest.raises(DataError, match="without a single step that counts"):
        training.run()


def test_scores_are_written_where_the_report_finds_them(tmp_path: Path) -> None:
    from throughtime.app.evaluate import evaluate_run, keep_results, read_results
    from throughtime.app.scores import Scores

    folder = finish(settings(write_recordings(tmp_path / "data"), tmp_path / "run"))
    trained = load_run(folder.path)
    scores = evaluate_run(trained, None, "valid")
    assert "written" in keep_results(trained, (folder.path / "scores-valid.json"), scores)
    assert scores.split == "valid"
    content = read_results((folder.path / "scores-valid.json"), Scores, "eval")
    assert content.metrics == pytest.approx(scores.metrics, nan_ok=True)
    assert list(content.recordings) == ["2"]
    with pytest.raises(DataError, match="no recordings in split 'tset'; there are train"):
        evaluate_run(load_run(folder.path), None, "tset")


def test_scores_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    from throughtime.app.page import write_report

    folder = finish(settings(write_recordings(tmp_path / "data"), tmp_path / "run"))
    write_report(load_run(folder.path))
    cut = '{"split": "test", "metrics": {}, "recordings": {}}'
    for content in ("{", '{"split": "test"}', cut):
        (folder.path / "scores-test.json").write_text(content, encoding="utf-8")
        with pytest.raises(RunError, match=r"scores-test\.json: not what `throughtime eval` wrote"):
            write_report(load_run(folder.path))
