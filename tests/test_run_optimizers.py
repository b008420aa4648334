"""Optimizers, schedules and losses of a run: by name, or in the user's own file."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from test_cli import ended
from test_run import finish, settings, stop_at, write_recordings
from throughtime.app import user_class
from throughtime.app.model import StandardisedError
from throughtime.app.run_folder import load_checkpoint
from throughtime.app.settings import Config
from throughtime.app.train import Training, make_optimizer, make_schedule
from throughtime.errors import ConfigError
from throughtime.stream import Stream

OWN = """
import torch
from pathlib import Path
Path({marker!r}).write_text("executed")


class Signs(torch.optim.Optimizer):
    def __init__(self, params, lr, weight_decay=0.0):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["mean"] = 0.9 * state.get("mean", 0 * p.grad) + 0.1 * p.grad
                p -= group["lr"] * state["mean"].sign()


class Still(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, dict(lr=lr))


class Focal:
    def __init__(self, outputs, power=2.0):
        self.outputs, self.power = outputs, power

    def __call__(self, outputs, targets):
        each = torch.nn.functional.cross_entropy(outputs, targets, reduction="none")
        return ((1 - (-each).exp()) ** self.power * each).mean()


class Needy:
    def __init__(self, outputs, temperature):
        pass


class Plain:
    pass
"""
RULES: dict[str, dict[str, Any]] = {
    "sgd along a cosine": {"optimizer": "sgd", "schedule": "cosine", "lr": 0.05},
    "adam on a plateau": {"optimizer": "adam", "schedule": "plateau", "valid_every": 3, "lr": 0.1},
    "adamw with decay": {"weight_decay": 0.1, "schedule": "cosine"},
    "own optimizer and loss": {"optimizer": "{file}:Signs", "loss": "{file}:Focal"},
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Classes of the user's, in a file that is trusted."""
    path = tmp_path / "mine.py"
    path.write_text(OWN.format(marker=str(tmp_path / "executed")), encoding="utf-8")
    user_class.ClassReference("loss", path, "").trust()
    return path


def rule(name: str, file: Path) -> dict[str, Any]:
    return {k: v.format(file=file) if isinstance(v, str) else v for k, v in RULES[name].items()}


@pytest.mark.parametrize("name", RULES)
def test_a_run_with_any_rule_goes_on_to_the_same_bits(
    tmp_path: Path, file: Path, name: str
) -> None:
    data, more = write_recordings(tmp_path / "data"), {"updates": 30, **rule(name, file)}
    whole = finish(settings(data, tmp_path / "whole", **more))
    part = Training.begin(Config(**settings(data, tmp_path / "part", **more)))
    folder = stop_at(part, 13).folder
    torch.manual_seed(999)
    resumed = Training.resume(folder.path)
    resumed.run()
    assert whole.model.read_bytes() == folder.model.read_bytes()
    rates = [row["lr"] for row in whole.read_metrics() if row["kind"] == "train"]
    assert rates == [row["lr"] for row in folder.read_metrics() if row["kind"] == "train"]
    assert (len({*rates}) > 1) == (name != "own optimizer and loss")


def test_a_class_without_a_constructor_gets_no_arguments(tmp_path: Path) -> None:
    path = tmp_path / "plain.py"
    path.write_text("import torch\nclass Plain(torch.nn.Module):\n    pass\n", encoding="utf-8")
    own = user_class.ClassReference("loss", path, "Plain")
    own.trust()
    for base in (torch.nn.Module, object):
        assert type(own.make(base, {"outputs": 2, "weight": None})).__name__ == "Plain"


def test_a_plateau_halves_the_rate_and_a_cosine_ends_at_zero() -> None:
    net = torch.nn.Linear(3, 2)
    config = Config(data="d", lr=0.4, schedule="plateau", optimizer="sgd")
    optimizer = make_optimizer(net, config)
    schedule: Any = make_schedule(optimizer, config, Stream(torch.zeros(9, 1), 1, 1))
    rates: list[float] = []
    for score in (1.0, 0.9, 0.95, 0.9, 0.8, 0.81, 0.8, 0.79, 0.9, float("nan")):
        schedule.step(score)
        rates.append(optimizer.param_groups[1]["lr"])
    assert rates == [0.4, 0.4, 0.4, 0.2, 0.2, 0.2, 0.1, 0.1, 0.1, 0.05]
    cosine = Config(data="d", lr=0.4, schedule="cosine", updates=50)
    optimizer = make_optimizer(net, cosine)
    schedule = make_schedule(optimizer, cosine, Stream(torch.zeros(9, 1), 1, 1))
    rates = []
    for _ in range(51):
        rates.append(optimizer.param_groups[1]["lr"])
        optimizer.step()
        schedule.step()
    assert rates[0] == 0.4
    assert rates[25] == pytest.approx(0.2)
    assert rates[-1] == pytest.approx(0.0, abs=1e-12)
    assert rates == sorted(rates, reverse=True)


@pytest.mark.parametrize("optimizer", ["sgd", "{file}:Signs"])
def test_gradients_are_clipped_under_every_rule(file: Path, optimizer: str) -> None:
    net = torch.nn.Linear(3, 2).double()
    named = {"optimizer": optimizer.format(file=file), "max_norm": 0.5, "lr": 1.0}
    stepper = make_optimizer(net, Config(**{"data": "d", **named}))
    for weight in net.parameters():
        weight.grad = torch.full_like(weight, 7.0)
    before = torch.cat([weight.detach().flatten() for weight in net.parameters()])
    stepper.step()
    after = torch.cat([weight.detach().flatten() for weight in net.parameters()])
    if optimizer == "sgd":
        assert (after - before).norm() == pytest.approx(0.5, rel=1e-6)
    else:
        grads = torch.cat([w.grad.flatten() for w in net.parameters() if w.grad is not None])
        assert grads.norm() == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize(("name", "expected"), [("mse", 2.5), ("mae", 1.5), ("huber", 1.0)])
def test_losses_of_numbers_are_in_units_of_the_deviation(name: str, expected: float) -> None:
    loss = StandardisedError(torch.tensor([10.0]), name)
    assert loss(torch.tensor([[10.0], [20.0]]), torch.zeros(2)).item() == pytest.approx(expected)


def test_the_loss_of_numbers_is_that_of_the_settings(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", inputs=np.arange(300) % 7 / 7, targets=np.arange(300) % 5 / 5)
    options = {"data": str(tmp_path / "a.npz"), "hidden": 4, "lanes": 1, "updates": 2}
    for name in ("mse", "huber"):
        config = Config(**{**options, "out": str(tmp_path / name), "loss": name})
        loss = Training.begin(config).loss_fn
        assert isinstance(loss, StandardisedError)
        assert loss.name == name
    with pytest.raises(ConfigError, match="--loss cross-entropy does not fit --task regress"):
        Training.begin(Config(**{**options, "out": str(tmp_path / "x"), "loss": "cross-entropy"}))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            {"loss": "{file}:Needy"},
            "fails with TypeError: Needy.__init__() missing 1 required positional argument: 'temp",
        ),
        ({"loss": "{file}:Nowhere"}, "mine.py defines no class Nowhere"),
        ({"optimizer": "{file}:Plain"}, "Plain: is no torch.optim.optimizer.Opt"),
        (
            {"optimizer": "{file}:Still", "weight_decay": 0.9},
            "constructor names no weight_decay, which",
        ),
        ({"optimizer": "gone.py:Signs"}, "--optimizer gone.py:Signs: no such file gone.py"),
    ],
)
def test_a_class_that_cannot_serve_is_refused_before_the_run_folder_is_written(
    tmp_path: Path, file: Path, more: dict[str, Any], said: str
) -> None:
    data = write_recordings(tmp_path / "data")
    more = {k: v.format(file=file) if isinstance(v, str) else v for k, v in more.items()}
    with pytest.raises(ConfigError) as refused:
        Training.begin(Config(**settings(data, tmp_path / "run", **more)))
    assert said in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_a_run_keeps_loss_and_optimizer_and_executes_only_what_a_command_needs(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_recordings(tmp_path / "data")
    named = {"optimizer": f"{file}:Signs", "loss": f"{file}:Focal"}
    folder = finish(settings(data, tmp_path / "run", **named))
    config = folder.read_config()
    assert (config.optimizer, config.loss) == ("mine.py:Signs", "mine.py:Focal")
    parts = load_checkpoint(folder.checkpoint)["parts"]
    sha256 = user_class.ClassReference("", file, "").sha256()
    assert all(parts[f"code of {name}"] == repr(sha256) for name in named)
    file.unlink()  # the run has its own copy
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "elsewhere"))
    monkeypatch.setattr(user_class, "_trusted", set[str]())
    marker = tmp_path / "executed"
    marker.unlink()
    audit = ("audit", folder.path, "--horizons", "10", "--steps", "40", "--max-lag", "10")
    assert ended("eval", folder.path)[0] == 0
    assert not marker.exists()
    for words in (audit, ("train", "--resume", folder.path, "--updates", "64")):
        monkeypatch.setattr(user_class, "_trusted", set[str]())
        for name in [name for name in sys.modules if "throughtime_user_" in name]:
            monkeypatch.delitem(sys.modules, name)
        code_, _, complained = ended(*words)
        assert code_ == 2
        assert "mine.py: its class" in complained
        assert "--trust-code" in complained
        assert not marker.exists()
        code_, _, complained = ended(*words, "--trust-code")
        assert code_ == 0, complained
        assert marker.exists()
        marker.unlink()


def test_two_settings_may_name_classes_of_one_file(tmp_path: Path, file: Path) -> None:
    config = Config(data="d", optimizer=f"{file}:Signs", loss=f"{file}:Focal")
    assert [own.setting for own in config.code()] == ["loss", "optimizer"]
    assert config.kept().loss == "mine.py:Focal"
    data = write_recordings(tmp_path / "data")
    named = {"optimizer": f"{file}:Signs", "loss": f"{file}:Focal"}
    folder = finish(settings(data, tmp_path / "run", **named))
    assert [path.name for path in folder.path.glob("*.py")] == ["mine.py"]
