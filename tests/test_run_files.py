"""The files of a run: damaged, foreign, lost, of another process, on a full disk."""

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import save_file

from processes import elsewhere
from test_cli import ended
from test_run import COMMAND, command, finish, flags, settings, write_recordings
from throughtime import files as file_module
from throughtime import state as trees
from throughtime import tensor_files
from throughtime.app.run_folder import RunFolder, load_checkpoint
from throughtime.errors import RunError, StateError

PATIENCE = 120.0

NO_SPACE = "No space left on device; make room there, change its permissions, or name another path"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A finished run that every command has written to."""
    base = tmp_path_factory.mktemp("files")
    data = write_recordings(base / "data")
    folder = RunFolder(base / "run")
    code, _, errors = ended(*flags(settings(data, folder.path, valid_every=20)))
    assert code == 0, errors
    for words in (
        ("eval", folder.path, "--split", "valid"),
        ("audit", folder.path, "--horizons", "20", "--steps", 60),
    ):
        code, _, errors = ended(*map(str, words))
        assert code == 0, errors
    return folder


@pytest.fixture
def folder(finished: RunFolder, tmp_path: Path) -> RunFolder:
    return RunFolder(shutil.copytree(finished.path, tmp_path / "run"))


def read_with(name: str, folder: RunFolder) -> list[list[str]]:
    """The commands that read a file of a run."""
    recording = str(folder.path.parent / "recording.npy")
    run = str(folder.path)
    predict = ["predict", run, recording, "--out", str(folder.path.parent / "p.csv")]
    resume = ["train", "--resume", run, "--updates", "80"]
    audit = ["audit", run, "--horizons", "20", "--steps", "60"]
    commands = {
        "model.safetensors": [["eval", run, "--split", "valid"], predict, audit],
        "checkpoint.safetensors": [resume],
        "metrics.jsonl": [resume, ["eval", run, "--split", "valid"], audit],
        "scores-valid.json": [["eval", run, "--split", "train"], audit],
        "audit.json": [["eval", run, "--split", "valid"]],
        "config.toml": [resume, ["eval", run, "--split", "valid"], audit],
    }
    return commands[name]


def assert_refused(folder: RunFolder, name: str, *hints: str, most: int = 3) -> None:
    """Commands that read the file name it in one line, say what to do, and exit with 2."""
    data = folder.read_config().data if name != "config.toml" else ""
    if data:
        shutil.copy(Path(data) / "0_x.npy", folder.path.parent / "recording.npy")
    for arguments in read_with(name, folder)[:most]:
        code, _, errors = ended(*arguments)
        assert code == 2, (arguments, errors)
        assert errors.startswith("error: "), errors
        assert errors.count("\n") == 1, errors
        assert str(folder.path / name) in errors
        for hint in hints:
            assert hint in errors, (arguments, errors)


def rewrite(path: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> None:
    """A foreign file: changed tensors or metadata, written by safetensors itself."""
    with safetensors.safe_open(path, framework="pt") as file:
        metadata = dict(file.metadata())
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    (kind,) = metadata
    description = json.loads(metadata[kind].partition(" ")[2])
    holder: dict[str, Any] = {"description": description}
    change(tensors, holder)
    save_file(tensors, path, metadata={kind: json.dumps(holder["description"])})


def drop_tensor(tensors: dict[str, Any], _: dict[str, Any]) -> None:
    del tensors[min(tensors)]


def grow_tensor(tensors: dict[str, Any], _: dict[str, Any]) -> None:
    name = max(tensors, key=lambda key: tensors[key].numel())
    tensors[name] = torch.zeros(tensors[name].shape[0] + 1, *tensors[name].shape[1:])


def halve_precision(tensors: dict[str, Any], _: dict[str, Any]) -> None:
    for name, tensor in tensors.items():
        tensors[name] = tensor.half() if tensor.ndim == 2 else tensor


def forget_description(_: dict[str, Any], holder: dict[str, Any]) -> None:
    holder["description"] = None


def list_description(_: dict[str, Any], holder: dict[str, Any]) -> None:
    holder["description"] = [1, 2]


FOREIGN = {
    "missing tensor": drop_tensor,
    "other size": grow_tensor,
    "other type": halve_precision,
    "null": forget_description,
    "list": list_description,
}


def header_end(content: bytes) -> int:
    return 8 + int.from_bytes(content[:8], "little")


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "text": lambda _: b"no tensors at all",
    "header cut": lambda content: content[: header_end(content) // 2],
    "data cut": lambda content: content[:-3],
    "appended": lambda content: content + b"\0",
    "no metadata": lambda content: content.replace(b"__metadata__", b"__metadatb__"),
    "null metadata": lambda content: (
        (17).to_bytes(8, "little") + b'{"__metadata__":null}'[:17] + content[header_end(content) :]
    ),
}


@pytest.mark.parametrize("name", ["model.safetensors", "checkpoint.safetensors"])
@pytest.mark.parametrize("damage", [*DAMAGE, *FOREIGN, "directory", "state"])
def test_damaged_and_foreign_tensors_are_refused_in_one_line(
    folder: RunFolder, name: str, damage: str
) -> None:
    path = folder.path / name
    if damage == "directory":
        path.unlink()
        path.mkdir()
    elif damage == "state":
        trees.save({"h": torch.zeros(1, 3)}, path)
    elif damage in FOREIGN:
        rewrite(path, FOREIGN[damage])
    else:
        path.write_bytes(DAMAGE[damage](path.read_bytes()))
    hint = "another" if name.startswith("checkpoint") else "--resume"
    assert_refused(folder, name, hint, most=3 if damage == "data cut" else 1)


def test_a_lost_checkpoint_is_no_new_start(folder: RunFolder) -> None:
    before = folder.model.read_bytes()
    folder.checkpoint.unlink()
    code, _, errors = ended("train", "--resume", folder.path)
    assert code == 2
    assert "no checkpoint to go on from" in errors
    assert folder.model.read_bytes() == before


def test_a_damaged_model_is_written_again_from_the_checkpoint(folder: RunFolder) -> None:
    before = folder.model.read_bytes()
    for damage in (b"", None):
        folder.model.write_bytes(damage) if damage is not None else folder.model.unlink()
        code, _, errors = ended("train", "--resume", folder.path)
        assert code == 0, errors
        assert folder.model.read_bytes() == before


@pytest.mark.parametrize("kind", ["model", "checkpoint", "state"])
def test_every_flipped_bit_is_noticed(finished: RunFolder, tmp_path: Path, kind: str) -> None:
    """A sample of its bits: all that say how long the header is, some of header and data."""
    path = tmp_path / "file"
    names: dict[str, str] = {"model": "throughtime.model/1", "state": "throughtime.state/1"}
    if kind == "state":
        trees.save({"h": torch.randn(3, 50)}, path)
    else:
        shutil.copy(finished.path / f"{kind}.safetensors", path)
    content = path.read_bytes()
    bits, header = 8 * len(content), 8 * header_end(content)
    draw = random.Random(0)
    chosen = {*range(64), *draw.sample(range(header), 250), *draw.sample(range(header, bits), 250)}
    missed: list[int] = []
    for bit in sorted(chosen):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            tensor_files.read_tensors(path, names.get(kind, "throughtime.checkpoint/1"))
        except ValueError:
            continue
        missed.append(bit)
    assert not missed
    path.write_bytes(content)
    tensor_files.read_tensors(path, names.get(kind, "throughtime.checkpoint/1"))


def test_a_flipped_bit_of_a_tensor_is_named_by_the_commands(folder: RunFolder) -> None:
    for name in ("model.safetensors", "checkpoint.safetensors"):
        path = folder.path / name
        content = bytearray(path.read_bytes())
        content[-9] ^= 4
        path.write_bytes(content)
        assert_refused(folder, name, "it is damaged: its bytes have the checksum", most=1)
    path = folder.path / "state"
    trees.save(torch.zeros(1, 4), path)
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    with pytest.raises(StateError, match="it is damaged: its bytes have the checksum"):
        trees.load(path, torch.zeros(1, 4))


def test_files_without_a_checksum_are_read(folder: RunFolder) -> None:
    rewrite(folder.model, lambda _, __: None)
    assert b"crc32" not in folder.model.read_bytes()
    assert ended("eval", folder.path, "--split", "valid")[0] == 0


LINES = {
    "cut": b'{"kind": "train", "upd',
    "not utf-8": b'{"kind": "tr\xe1in"}',
    "list": b"[1, 2]",
    "empty": b"",
    "no checksum": b'{"kind": "train", "update": 3}',
    "other checksum": b'{"kind": "train", "update": 3, "crc32": "00000000"}',
}


@pytest.mark.parametrize("line", LINES)
def test_a_bad_line_of_the_log_is_named(folder: RunFolder, line: str) -> None:
    number, before = len(line) % 3 + 1, folder.checkpoint.read_bytes()
    lines = folder.metrics.read_bytes().split(b"\n")
    lines[number - 1] = LINES[line]
    folder.metrics.write_bytes(b"\n".join(lines))
    hints = f"line {number} is damaged", "put back a copy"
    assert_refused(folder, "metrics.jsonl", *hints, most=3 if line == "list" else 1)
    assert folder.checkpoint.read_bytes() == before  # refused before it trained


def test_every_flipped_bit_of_the_log_is_noticed(folder: RunFolder) -> None:
    content = folder.metrics.read_bytes()
    count, draw = len(folder.read_metrics()), random.Random(0)
    ends = [i for i, byte in enumerate(content) if byte == ord("\n")]
    chosen = [8 * end + bit for end in (ends[0], ends[-1]) for bit in range(8)]
    missed: list[int] = []
    for bit in chosen + draw.sample(range(8 * len(content)), 400):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        folder.metrics.write_bytes(damaged)
        try:
            folder.truncate_metrics(count)
        except RunError:
            continue
        missed.append(bit)
    assert not missed
    folder.metrics.write_bytes(content)
    assert folder.truncate_metrics(count) == count
    assert folder.metrics.read_bytes() == content


def test_lost_lines_of_the_log_are_named_and_a_new_log_is_begun(folder: RunFolder) -> None:
    lines = folder.metrics.read_bytes().splitlines(keepends=True)
    folder.metrics.write_bytes(b"".join(lines[:-3]) + lines[-3][:10])
    code, _, errors = ended("train", "--resume", folder.path, "--updates", "80")
    assert code == 2
    assert "complete lines, and the checkpoint was written after" in errors
    folder.metrics.write_bytes(b"")
    code, _, errors = ended("train", "--resume", folder.path, "--updates", "80")
    assert code == 2
    assert "has 0 complete lines, and the checkpoint was written after" in errors
    folder.metrics.unlink()
    code, _, errors = ended("train", "--resume", folder.path, "--updates", "80")
    assert code == 0, errors
    rows = folder.read_metrics()
    assert rows[0]["kind"] == "data"
    assert [row["update"] for row in rows if row["kind"] == "train"] == list(range(61, 81))


def test_a_cut_last_line_is_what_a_kill_leaves(folder: RunFolder) -> None:
    before = folder.metrics.read_bytes()
    folder.metrics.write_bytes(before + b'{"kind": "train", "upd')
    assert ended("eval", folder.path, "--split", "valid")[0] == 0
    assert ended("train", "--resume", folder.path)[0] == 0
    assert folder.metrics.read_bytes() == before


@pytest.mark.parametrize("name", ["scores-valid.json", "audit.json", "metrics.jsonl"])
@pytest.mark.parametrize(
    "content", [b"", b"null", b"[]", b"3", b'{"split": \xff}', b'{"a": {}}', None]
)
def test_other_files_that_are_not_ours_are_refused(
    folder: RunFolder, name: str, content: bytes | None
) -> None:
    path = folder.path / name
    path.unlink(missing_ok=True)
    if content is None:
        path.mkdir()
    elif name == "metrics.jsonl":
        path.write_bytes(content + b"\n")
    else:
        path.write_bytes(content)
    assert_refused(folder, name, most=1)


@pytest.mark.parametrize("content", [b"lr = \n", b"lr = 0\n", b"\xff"])
def test_settings_that_cannot_be_read_are_named_once(folder: RunFolder, content: bytes) -> None:
    folder.config.write_bytes(content)
    assert_refused(folder, "config.toml")
    assert ended("eval", folder.path)[2].count(str(folder.config)) == 1


# --- two processes ---


def wait_for(condition: Callable[[], object], process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
def test_a_live_run_is_locked_until_it_is_killed(tmp_path: Path) -> None:
    data, out = write_recordings(tmp_path / "data", (4000, 2500, 300)), tmp_path / "run"
    values = settings(data, out, updates=1_000_000, checkpoint_every=0.1)
    folder = RunFolder(out)
    live = subprocess.Popen(command(*flags(values)), stdout=subprocess.DEVNULL, text=True)
    try:
        wait_for(folder.checkpoint.is_file, live)
        resumed = elsewhere(COMMAND, "train", "--resume", out)
        assert resumed.code == 2
        assert f"{out}: another process is training this run; wait until it" in resumed.errors
        begun = elsewhere(COMMAND, *flags(values))
        assert begun.code == 2
        assert "holds a run already" in begun.errors
        read = elsewhere(COMMAND, "predict", out, data / "0_x.npy", "--out", tmp_path / "p.csv")
        assert read.code == 0, read.errors
        assert live.poll() is None
    finally:
        live.send_signal(signal.SIGKILL)
        live.wait()
    last = int(load_checkpoint(folder.checkpoint)["done"]["count"])
    resumed = elsewhere(COMMAND, "train", "--resume", out, "--updates", str(last + 400))
    assert resumed.code == 0, resumed.errors
    assert not (out / ".lock").exists()


def test_a_held_lock_is_refused(finished: RunFolder) -> None:
    with finished.locked():
        code, _, errors = ended("train", "--resume", finished.path)
        assert code == 2
        assert f"{finished.path}: another process is training this run" in errors
        assert ended("eval", finished.path, "--split", "valid")[0] == 0
    assert not (finished.path / ".lock").exists()


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    script = (
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "from throughtime.files import exclusive\n"
        "with exclusive(Path(sys.argv[1]), wait=False):\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        os.close(1); os.close(2); time.sleep(60); os._exit(0)\n"
        "    print(child, flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    path = tmp_path / "lock"
    killed = subprocess.run(
        [sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, text=True, check=False
    )
    child = int(killed.stdout)
    try:
        assert killed.returncode == -signal.SIGKILL
        assert path.exists()
        with file_module.exclusive(path, wait=False):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
    assert not path.exists()


def test_a_file_system_without_locks_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", refuse)
    warned = pytest.warns(UserWarning, match=r"\.lock: cannot be locked")
    with warned, RunFolder(tmp_path).locked():
        pass


# --- a start that wrote no checkpoint ---


def test_a_start_that_failed_is_taken_over(tmp_path: Path) -> None:
    data, out = write_recordings(tmp_path / "data"), tmp_path / "run"
    code, _, errors = ended(*flags(settings(data, out, warm_up=10_000)))
    assert code == 2
    assert "without a single step that counts" in errors
    code, _, errors = ended(*flags(settings(data, out, lr=1e30)))
    assert code == 2
    assert "training diverged at update" in errors
    whole = finish(settings(data, tmp_path / "whole"))
    code, _, errors = ended(*flags(settings(data, out)))
    assert code == 0, errors
    assert RunFolder(out).model.read_bytes() == whole.model.read_bytes()
    assert [row["kind"] for row in RunFolder(out).read_metrics()].count("data") == 1
    code, _, errors = ended(*flags(settings(data, out)))
    assert code == 2
    assert "holds a run already, or other files" in errors


def test_settings_of_another_hand_and_models_are_not_overwritten(
    folder: RunFolder, tmp_path: Path
) -> None:
    data, own = write_recordings(tmp_path / "data"), tmp_path / "own"
    own.mkdir()
    (own / "config.toml").write_text('data = "d"  # by hand\n', encoding="utf-8")
    code, _, errors = ended(*flags(settings(data, own)))
    assert code == 2
    assert "holds a run already, or other files" in errors
    folder.checkpoint.unlink()
    code, _, errors = ended(*flags(settings(data, folder.path)))
    assert code == 2
    assert "holds a run already, or other files" in errors
    before = {path.name: path.read_bytes() for path in data.iterdir()}
    code, _, errors = ended(*flags(settings(data, data)))
    assert code == 2
    assert "holds a run already, or other files" in errors
    assert {path.name: path.read_bytes() for path in data.iterdir()} == before


# --- a full disk ---


def limited(size: int, *arguments: str | Path) -> Any:
    """The command in a process whose files may not grow beyond a size."""
    smaller = (
        "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        f" resource.setrlimit(resource.RLIMIT_FSIZE, ({size},) * 2)"
    )
    return elsewhere(f"{smaller}\n{COMMAND}", *arguments)


def test_a_kill_between_model_and_checkpoint_is_repaired(tmp_path: Path) -> None:
    data = write_recordings(tmp_path / "data")
    folder = finish(settings(data, tmp_path / "run"))
    newest = folder.model.read_bytes()
    other = finish(settings(data, tmp_path / "other", updates=20))
    folder.model.write_bytes(other.model.read_bytes())  # as if its rename had not come
    assert ended("train", "--resume", folder.path)[0] == 0
    assert folder.model.read_bytes() == newest


def test_a_full_disk_is_named_with_the_file(folder: RunFolder, tmp_path: Path) -> None:
    data = Path(folder.read_config().data)
    for out, temporary in (("p.csv", ".p.part.csv"), ("p.npy", ".p.part.npy")):
        (tmp_path / temporary).symlink_to("/dev/full")
        code, _, errors = ended("predict", folder.path, data / "0_x.npy", "--out", tmp_path / out)
        assert code == 2
        assert errors == f"error: {tmp_path / out}: {NO_SPACE}\n"
        assert not (tmp_path / out).exists()
    folder.metrics.unlink()
    folder.metrics.symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device: '.*metrics\.jsonl'"):
        folder.add_metrics({"kind": "train"})


def test_a_full_standard_output_is_named(finished: RunFolder) -> None:
    with Path("/dev/full").open("wb") as full:
        process = subprocess.run(
            command("eval", str(finished.path), "--split", "valid"),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert process.returncode == 2
    assert process.stderr == f"error: standard output: {NO_SPACE}\n"


def test_several_files_are_written_together_or_not_at_all(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    file_module.write_together({one: b"1", two: b"1"})
    (tmp_path / f"two.{os.getpid()}.tmp").symlink_to("/dev/full")
    with pytest.raises(OSError, match=f"No space left on device: '{two}'"):
        file_module.write_together({one: b"2", two: b"2" * 100_000})
    assert (one.read_bytes(), two.read_bytes()) == (b"1", b"1")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]


@pytest.mark.parametrize("name", ["config.toml", "metrics.jsonl"])
def test_a_file_of_another_origin_is_not_replaced(name: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (out / "config.toml").write_text('mine = "precious"\n', encoding="utf-8")
    (out / "metrics.jsonl").write_text('{"other": "log"}\n', encoding="utf-8")
    before = (out / name).read_bytes()
    with pytest.raises(RunError, match="line 1 is damaged"):
        RunFolder(out).check_free()
    assert (out / name).read_bytes() == before
