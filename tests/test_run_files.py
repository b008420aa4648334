"""The files of a run: damaged, foreign, lost, of another process, on a full disk."""

import errno
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import save_file

from processes import elsewhere
from test_cli import ended
from test_run import COMMAND, finish, flags, settings, write_recordings
from throughtime import files as file_module
from throughtime import state as trees
from throughtime import tensor_files
from throughtime.app.load import load_run
from throughtime.app.model import load_model
from throughtime.app.page import write_report
from throughtime.app.run_folder import RunFolder
from throughtime.errors import RunError, StateError

NO_SPACE = "No space left on device; make room there, change its permissions, or name another path"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    base = tmp_path_factory.mktemp("files")
    return finish(settings(write_recordings(base / "data"), base / "run", valid_every=20))


@pytest.fixture
def folder(finished: RunFolder, tmp_path: Path) -> RunFolder:
    return RunFolder(shutil.copytree(finished.path, tmp_path / "run"))


def resume(folder: RunFolder, *more: str) -> tuple[int, str, str]:
    return ended("train", "--resume", folder.path, *more)


def assert_refused(folder: RunFolder, name: str, *hints: str) -> None:
    """A command that reads the file names it in one line, says what to do, and exits with 2."""
    if name == "model.safetensors":
        code, _, errors = ended("eval", folder.path)
    else:
        code, _, errors = resume(folder, "--updates", "80")
    assert code == 2, errors
    assert errors.startswith("error: "), errors
    assert errors.count("\n") == 1, errors
    for hint in (str(folder.path / name), *hints):
        assert hint in errors, errors


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


def list_description(_: dict[str, Any], holder: dict[str, Any]) -> None:
    holder["description"] = [1, 2]


FOREIGN = {
    "missing tensor": drop_tensor,
    "other size": grow_tensor,
    "other type": halve_precision,
    "list": list_description,
}


def header_end(content: bytes) -> int:
    return 8 + int.from_bytes(content[:8], "little")


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "header cut": lambda content: content[: header_end(content) // 2],
    "data cut": lambda content: content[:-3],
    "appended": lambda content: content + b"\0",
    "no metadata": lambda content: content.replace(b"__metadata__", b"__metadatb__"),
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
    assert_refused(folder, name, "another" if name.startswith("checkpoint") else "--resume")


def test_a_lost_checkpoint_is_no_new_start(folder: RunFolder) -> None:
    before = folder.model.read_bytes()
    folder.checkpoint.unlink()
    code, _, errors = resume(folder)
    assert code == 2
    assert "no checkpoint to go on from" in errors
    assert folder.model.read_bytes() == before


def test_a_lost_or_older_model_is_written_again_from_the_checkpoint(
    folder: RunFolder, tmp_path: Path
) -> None:
    """A kill between the renames of model and checkpoint leaves the older one."""
    newest = folder.model.read_bytes()
    data = folder.read_config().data
    older = finish(settings(Path(data), tmp_path / "other", updates=20)).model.read_bytes()
    for content in (None, older):
        folder.model.unlink() if content is None else folder.model.write_bytes(content)
        code, _, errors = resume(folder)
        assert code == 0, errors
        assert folder.model.read_bytes() == newest


@pytest.mark.parametrize("kind", ["model", "state"])
def test_every_flipped_bit_is_noticed(finished: RunFolder, tmp_path: Path, kind: str) -> None:
    """A sample of its bits: all that say how long the header is, some of header and data."""
    path = tmp_path / "file"
    if kind == "state":
        trees.save({"h": torch.randn(3, 50)}, path)
    else:
        shutil.copy(finished.model, path)
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
            tensor_files.read_tensors(path, f"throughtime.{kind}/1")
        except ValueError:
            continue
        missed.append(bit)
    assert not missed
    path.write_bytes(content)
    tensor_files.read_tensors(path, f"throughtime.{kind}/1")


def test_a_flipped_bit_of_a_tensor_is_named_by_the_commands(folder: RunFolder) -> None:
    said = "it is damaged: its bytes have the checksum"
    for path in (folder.model, folder.checkpoint):
        content = bytearray(path.read_bytes())
        content[-9] ^= 4
        path.write_bytes(content)
        assert_refused(folder, path.name, said)
    path = folder.path / "state"
    trees.save(torch.zeros(1, 4), path)
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    with pytest.raises(StateError, match=said):
        trees.load(path, torch.zeros(1, 4))


def test_files_without_a_checksum_are_read(folder: RunFolder) -> None:
    rewrite(folder.model, lambda _, __: None)
    assert b"crc32" not in folder.model.read_bytes()
    assert load_model(folder.model)[1].update > 0


LINES = {
    "cut": b'{"kind": "train", "upd',
    "not utf-8": b'{"kind": "tr\xe1in"}',
    "list": b"[1, 2]",
    "empty": b"",
    "no checksum": b'{"kind": "train", "update": 3}',
    "other checksum": b'{"kind": "train", "update": 3, "crc32": "00000000"}',
}


def test_a_bad_line_of_the_log_is_named(folder: RunFolder) -> None:
    saved, log = folder.checkpoint.read_bytes(), folder.metrics.read_bytes()
    for line in LINES.values():
        number, lines = len(line) % 3 + 1, log.split(b"\n")
        lines[number - 1] = line
        folder.metrics.write_bytes(b"\n".join(lines))
        assert_refused(folder, "metrics.jsonl", f"line {number} is damaged", "put back a copy")
        with pytest.raises(RunError, match=f"line {number} is damaged"):
            folder.read_metrics()
        assert folder.checkpoint.read_bytes() == saved  # refused before it trained


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
    for log, lines_left in ((b"".join(lines[:-3]) + lines[-3][:10], len(lines) - 3), (b"", 0)):
        folder.metrics.write_bytes(log)
        code, _, errors = resume(folder, "--updates", "80")
        assert code == 2
        assert f"has {lines_left} complete lines, and the checkpoint was written after" in errors
    folder.metrics.unlink()
    code, _, errors = resume(folder, "--updates", "80")
    assert code == 0, errors
    rows = folder.read_metrics()
    assert rows[0]["kind"] == "data"
    assert [row["update"] for row in rows if row["kind"] == "train"] == list(range(61, 81))


def test_a_cut_last_line_is_what_a_kill_leaves(folder: RunFolder) -> None:
    before, rows = folder.metrics.read_bytes(), folder.read_metrics()
    folder.metrics.write_bytes(before + b'{"kind": "train", "upd')
    assert folder.read_metrics() == rows
    assert resume(folder)[0] == 0
    assert folder.metrics.read_bytes() == before


@pytest.mark.parametrize("name", ["scores-valid.json", "audit.json"])
def test_results_that_are_not_ours_are_refused(
    folder: RunFolder, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("throughtime.app.page.chart", lambda *_: "")
    path, run = folder.path / name, load_run(folder.path)
    cut = b'{"split": "test", "metrics": {}, "recordings": {}}'
    for content in (b"", b"null", b"[]", b"3", b'{"split": \xff}', b'{"a": {}}', cut, None):
        path.write_bytes(content) if content is not None else (path.unlink(), path.mkdir())
        with pytest.raises((RunError, OSError), match=re.escape(str(path))):
            write_report(run)
    code, _, errors = ended("eval", folder.path, "--split", "train")
    assert code == 2
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1
    assert str(path) in errors


@pytest.mark.parametrize("content", [b"lr = \n", b"lr = 0\n", b"\xff"])
def test_settings_that_cannot_be_read_are_named_once(folder: RunFolder, content: bytes) -> None:
    folder.config.write_bytes(content)
    assert_refused(folder, "config.toml")
    assert ended("eval", folder.path)[2].count(str(folder.config)) == 1


# --- two processes ---


def test_a_held_lock_is_refused_and_the_run_is_read(finished: RunFolder) -> None:
    with finished.locked():
        code, _, errors = resume(finished)
        assert code == 2
        assert f"{finished.path}: another process is training this run; wait until it" in errors
        assert load_run(finished.path)
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
    for more, said in (
        ({"warm_up": 10_000}, "without a single step that counts"),
        ({"lr": 1e30}, "training diverged at update"),
    ):
        code, _, errors = ended(*flags(settings(data, out, **more)))
        assert code == 2
        assert said in errors
    whole = finish(settings(data, tmp_path / "whole"))
    code, _, errors = ended(*flags(settings(data, out)))
    assert code == 0, errors
    assert RunFolder(out).model.read_bytes() == whole.model.read_bytes()
    assert [row["kind"] for row in RunFolder(out).read_metrics()].count("data") == 1


def test_settings_of_another_hand_and_models_are_not_overwritten(
    folder: RunFolder, finished: RunFolder, tmp_path: Path
) -> None:
    data, own = write_recordings(tmp_path / "data"), tmp_path / "own"
    own.mkdir()
    (own / "config.toml").write_text('data = "d"  # by hand\n', encoding="utf-8")
    folder.checkpoint.unlink()
    for out in (finished.path, folder.path, own, data):
        before = {path.name: path.read_bytes() for path in out.iterdir()}
        code, _, errors = ended(*flags(settings(data, out)))
        assert code == 2
        assert "holds a run already, or other files" in errors
        assert {path.name: path.read_bytes() for path in out.iterdir()} == before


# --- a full disk ---


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


def test_several_files_are_written_together_or_not_at_all(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    file_module.write_together({one: b"1", two: b"1"})
    (tmp_path / f"two.{os.getpid()}.tmp").symlink_to("/dev/full")
    with pytest.raises(OSError, match=f"No space left on device: '{two}'"):
        file_module.write_together({one: b"2", two: b"2" * 100_000})
    assert (one.read_bytes(), two.read_bytes()) == (b"1", b"1")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]


def test_a_full_standard_output_is_named() -> None:
    full = "import os; os.dup2(os.open('/dev/full', os.O_WRONLY), 1)\n"
    process = elsewhere(full + COMMAND, "--version")
    assert process.code == 2
    assert process.errors == f"error: standard output: {NO_SPACE}\n"


def test_a_file_of_another_origin_is_not_replaced(tmp_path: Path) -> None:
    before = {"config.toml": 'mine = "precious"\n', "metrics.jsonl": '{"other": "log"}\n'}
    for name, text in before.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(RunError, match="line 1 is damaged"):
        RunFolder(tmp_path).check_free()
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == before
