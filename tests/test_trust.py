"""A run folder from elsewhere executes no code unless the user trusts it."""

import py_compile
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import throughtime as tt
from test_cli import ended
from test_run import finish, forget_code, settings, write_recordings
from throughtime import tensor_files
from throughtime.app import user_class
from throughtime.app.run_folder import (
    RunFolder,
    checkpoint_bytes,
    load_checkpoint,
    load_tensors,
)
from throughtime.app.settings import Config
from throughtime.app.train import Training
from throughtime.errors import ConfigError, ThroughtimeError

MODEL = """
import torch
from pathlib import Path
Path({marker!r}).write_text("executed")


class Net(torch.nn.Sequential):
    def __init__(self, inputs, outputs, hidden):
        super().__init__(torch.nn.GRU(inputs, hidden), torch.nn.Linear(hidden, outputs))
"""
POLICY = """
import throughtime as tt
from dataclasses import dataclass
from pathlib import Path
Path({marker!r}).write_text("executed")


@dataclass(frozen=True)
class Plain:
    stride: int

    def plan(self, source, at, probe):
        return tt.Truncated(self.stride).plan(source, at, probe)
"""
KIND = "throughtime.model/1"


class Sent:
    """A run of somebody else's, of a model and a policy of their own, and what is forged in it."""

    def __init__(self, folder: Path) -> None:
        self.path, self.run = folder, RunFolder(folder / "run")
        self.honest, self.evil = folder / "honest-was-executed", folder / "evil-was-executed"

    def code(self, kind: str) -> str:
        return {"model": MODEL, "gradient": POLICY}[kind].format(marker=str(self.evil))

    def write(self, file: str, kind: str) -> Path:
        path = self.run.path / file
        path.parent.mkdir(exist_ok=True)
        path.write_text(self.code(kind), encoding="utf-8")
        return path

    def name(self, setting: str, text: str) -> None:
        """Name a class in the settings, and that of a model in the description of the weights."""
        before = {"model": "nets.py:Net", "gradient": "policies.py:Plain"}[setting]
        self.replace(self.run.config, f'"{before}"', f'"{text}"')
        if setting == "model":
            self.describe(model=text)

    def replace(self, path: Path, before: str, after: str) -> None:
        text = path.read_text(encoding="utf-8")
        assert before in text
        path.write_text(text.replace(before, after), encoding="utf-8")

    def describe(self, **changes: str) -> None:
        values, tensors = load_tensors(self.run.model, KIND, "")
        self.run.model.write_bytes(tensor_files.to_bytes(KIND, values | changes, tensors))

    def hashes(self, **changes: str | None) -> None:
        """Change the SHA-256 of files in the checkpoint; leave out those that are None."""
        saved = load_checkpoint(self.run.checkpoint)
        parts = dict(saved["parts"])
        for setting, sha256 in changes.items():
            parts.pop(f"code of {setting}")
            parts |= {f"code of {setting}": repr(sha256)} if sha256 else {}
        self.run.checkpoint.write_bytes(checkpoint_bytes({**saved, "parts": parts}))

    def sha256(self, file: str) -> str:
        return user_class.ClassReference("model", self.run.path / file, "").sha256()


def link(sent: Sent, file: str, kind: str) -> None:
    sent.write(f"../{file}", kind)
    (sent.run.path / file).unlink()
    (sent.run.path / file).symlink_to(sent.path / file)


def outside(setting: str, file: str, name: str) -> Callable[[Sent], None]:
    def forge(sent: Sent) -> None:
        path = sent.write(file.format(folder=sent.path), setting)
        assert path.is_file()
        sent.name(setting, f"{file.format(folder=sent.path)}:{name}")

    return forge


def changed(setting: str, file: str) -> Callable[[Sent], None]:
    def forge(sent: Sent) -> None:
        sent.write(file, setting)

    return forge


def changed_with_hash(setting: str, file: str) -> Callable[[Sent], None]:
    def forge(sent: Sent) -> None:
        sent.write(file, setting)
        sent.hashes(**{setting: sent.sha256(file)})
        if setting == "model":
            sent.describe(sha256=sent.sha256(file))

    return forge


def without_hash(sent: Sent) -> None:
    sent.write("nets.py", "model")
    sent.describe(sha256="")
    sent.hashes(model=None)


def compiled(sent: Sent) -> None:
    """A file of code that says that it need not be compared with its source."""
    for file, kind in (("nets.py", "model"), ("policies.py", "gradient")):
        path = sent.write(f"evil_{file}", kind)
        tag = sys.implementation.cache_tag
        target = sent.run.path / "__pycache__" / f"{Path(file).stem}.{tag}.pyc"
        unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
        py_compile.compile(str(path), str(target), doraise=True, invalidation_mode=unchecked)


def without_checkpoint(sent: Sent) -> None:
    sent.run.checkpoint.unlink()
    sent.run.model.unlink()
    sent.write("nets.py", "model")
    sent.write("policies.py", "gradient")


def optimizer(sent: Sent) -> None:
    path = sent.write("optimizers.py", "model")
    text = sent.run.config.read_text(encoding="utf-8")
    sent.run.config.write_text(f'optimizer = "{path}:Net"\n{text}', encoding="utf-8")


FORGED: dict[str, Callable[[Sent], None]] = {
    "model in the folder above": outside("model", "../x.py", "Net"),
    "model by its absolute path": outside("model", "{folder}/x.py", "Net"),
    "model by a link": lambda sent: link(sent, "nets.py", "model"),
    "model changed": changed("model", "nets.py"),
    "model changed with its hashes": changed_with_hash("model", "nets.py"),
    "model without a hash": without_hash,
    "policy in the folder above": outside("gradient", "../x.py", "Plain"),
    "policy by a link": lambda sent: link(sent, "policies.py", "gradient"),
    "policy changed": changed("gradient", "policies.py"),
    "policy changed with its hash": changed_with_hash("gradient", "policies.py"),
    "policy that was not kept": lambda sent: sent.name("gradient", "missing.py:Plain"),
    "policy put beside the one kept": outside("gradient", "more.py", "Plain"),
    "compiled code beside the source": compiled,
    "class of the model is a function": lambda sent: sent.name("model", "nets.py:__import__"),
    "class of the policy is a function": lambda sent: sent.name("gradient", "policies.py:exec"),
    "no checkpoint": without_checkpoint,
    "optimizer in a file": optimizer,
}
COMMANDS: dict[str, tuple[str, ...]] = {
    "eval": ("eval", "{run}"),
    "predict": ("predict", "{run}", "--split", "valid", "--out", "{folder}/predictions"),
    "export": ("export", "{run}", "--out", "{folder}/net.onnx", "--steps", "0"),
    "audit": ("audit", "{run}", "--horizons", "10", "--steps", "40", "--max-lag", "10"),
    "resume": ("train", "--resume", "{run}", "--updates", "12"),
    "load_run": (),
}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data and an honest run of ten updates."""
    folder = tmp_path_factory.mktemp("trust")
    data, marker = write_recordings(folder / "data"), str(folder / "trained")
    (folder / "nets.py").write_text(MODEL.format(marker=marker), encoding="utf-8")
    (folder / "policies.py").write_text(POLICY.format(marker=marker), encoding="utf-8")
    named = {"model": f"{folder / 'nets.py'}:Net", "gradient": f"{folder / 'policies.py'}:Plain"}
    finish(settings(data, folder / "run", updates=10, **named))
    (folder / "trained").unlink()
    return folder


@pytest.fixture
def sent(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sent:
    """A copy of the run on the machine of somebody who has trained with none of its code."""
    shutil.copytree(original / "run", tmp_path / "run")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    forget_code(monkeypatch)
    (original / "trained").unlink(missing_ok=True)
    result = Sent(tmp_path)
    result.honest = original / "trained"
    return result


def trusted_by_training(sent: Sent) -> None:
    """The receiver has trained with the honest files."""
    user_class.remember(
        [
            user_class.ClassReference(setting, sent.run.path / file, "")
            for setting, file in (("model", "nets.py"), ("gradient", "policies.py"))
        ]
    )


def execute(sent: Sent, command: str, *more: str) -> tuple[int, str, str]:
    """Run a command on the folder; `load_run` is that of Python."""
    if command == "load_run":
        try:
            tt.load_run(sent.run.path, trust_code=bool(more))
        except ThroughtimeError as error:
            return 2, "", str(error)
        return 0, "", ""
    words = (word.format(run=sent.run.path, folder=sent.path) for word in COMMANDS[command])
    return ended(*words, *more)


@pytest.mark.parametrize("trained", [False, True], ids=["never trained", "trained with it"])
@pytest.mark.parametrize("forged", FORGED)
def test_forged_code_is_never_executed(sent: Sent, forged: str, *, trained: bool) -> None:
    if trained:
        trusted_by_training(sent)
    FORGED[forged](sent)
    policy = trained and forged.startswith("policy")
    for command in ("eval", "resume", "load_run") if trained else COMMANDS:
        code, _, complaint = execute(sent, command)
        assert not sent.evil.exists(), command
        if not trained:
            assert code == 2
            assert not sent.honest.exists(), command
        if code:
            assert complaint.count("\n") <= 1
        if policy:  # which resume alone needs
            assert (code == 0) == (command != "resume"), complaint


MUTANT = [
    *(("model changed with its hashes", command) for command in ("eval", "load_run")),
    ("policy changed with its hash", "resume"),
    ("no checkpoint", "resume"),
]


@pytest.mark.parametrize(("forged", "command"), MUTANT)
def test_mutant_without_the_check_the_forged_code_is_executed(
    sent: Sent, forged: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    FORGED[forged](sent)
    monkeypatch.setattr(user_class, "is_trusted", lambda _: True)
    execute(sent, command)
    assert sent.evil.exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_the_refusal_names_file_class_and_flag_and_trust_runs_the_honest_code(
    sent: Sent, command: str
) -> None:
    honest = sent.run.checkpoint.read_bytes(), sent.run.metrics.read_bytes()
    code, _, complaint = execute(sent, command)
    assert code == 2
    for word in (str(sent.run.path / "nets.py"), "class Net", "--trust-code", "trust_code=True"):
        assert word in complaint.replace("\n", "")
    assert not sent.honest.exists()
    code, _, complaint = execute(sent, command, "--trust-code")
    assert code == 0, complaint
    assert sent.honest.exists()
    assert not user_class.trust_list().exists()  # once, not for good
    user_class._trusted.clear()
    sent.run.checkpoint.write_bytes(honest[0])
    sent.run.metrics.write_bytes(honest[1])
    assert execute(sent, command)[0] == 2
    trusted_by_training(sent)  # and without a flag, where one has trained with it
    code, _, complaint = execute(sent, command)
    assert code == 0, complaint


def test_trust_in_the_model_is_none_in_the_policy(sent: Sent) -> None:
    user_class.remember([user_class.ClassReference("model", sent.run.path / "nets.py", "Net")])
    code, _, complaint = execute(sent, "resume")
    assert code == 2
    assert "policies.py: its class Plain is code that you have not trained with" in complaint
    code, _, complaint = execute(sent, "eval")
    assert code == 0, complaint
    assert "Plain(stride=10)" in sent.run.report.read_text(encoding="utf-8")


def test_training_keeps_both_files_and_lists_them_once(
    sent: Sent, original: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(original)
    named: dict[str, Any] = {"model": "nets.py:Net", "gradient": "policies.py:Plain"}
    for name in ("one", "two"):
        folder = finish(settings(original / "data", sent.path / name, updates=4, **named))
    assert {path.name for path in folder.path.glob("*.py")} == {"nets.py", "policies.py"}
    config = folder.read_config()
    assert (config.model, config.gradient) == ("nets.py:Net", "policies.py:Plain")
    listed = user_class.trust_list().read_text(encoding="ascii").splitlines()
    assert sorted(listed) == sorted(map(sent.sha256, ("nets.py", "policies.py")))
    parts = load_checkpoint(folder.checkpoint)["parts"]
    for setting, file in (("model", "nets.py"), ("gradient", "policies.py")):
        assert parts[f"code of {setting}"] == repr(sent.sha256(file))


def test_a_list_that_cannot_be_written_stops_no_training(
    sent: Sent, original: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (sent.path / "file").write_text("no folder", encoding="utf-8")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(sent.path / "file"))
    model = f"{original / 'nets.py'}:Net"
    folder = finish(settings(original / "data", sent.path / "new", updates=4, model=model))
    tt.load_run(folder.path)  # this process has executed it already
    monkeypatch.setattr(user_class, "_trusted", set[str]())
    with pytest.raises(ThroughtimeError, match="--trust-code"):
        tt.load_run(folder.path)


def test_two_files_of_one_name_are_refused(sent: Sent, original: Path) -> None:
    (sent.path / "other").mkdir()
    policy = shutil.copy(original / "policies.py", sent.path / "other" / "nets.py")
    named = {"model": f"{original / 'nets.py'}:Net", "gradient": f"{policy}:Plain"}
    with pytest.raises(ConfigError, match=r"are two files nets\.py, and .*rename one"):
        Training.begin(Config(**settings(original / "data", sent.path / "new", **named)))


def test_resume_refuses_settings_that_were_changed(sent: Sent) -> None:
    trusted_by_training(sent)
    text = sent.run.config.read_text(encoding="utf-8")
    sent.replace(sent.run.config, "lr = 0.001", "lr = 0.01")
    sent.replace(sent.run.config, 'keep = "best"', 'keep = "last"')
    code, _, complaint = execute(sent, "resume")
    assert code == 2
    changed = "keep was 'best' and is 'last'; lr was 0.001 and is 0.01; put"
    assert f"since the checkpoint: {changed}" in complaint
    sent.run.config.write_text(text, encoding="utf-8")
    assert execute(sent, "resume")[0] == 0
    assert sent.run.read_metrics()[-1]["update"] == 12


def test_the_list_is_where_settings_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CONFIG_HOME")
    assert user_class.trust_list().parent == Path.home() / ".config" / "throughtime"
    monkeypatch.setenv("XDG_CONFIG_HOME", "/chosen")
    assert user_class.trust_list().parent == Path("/chosen/throughtime")
