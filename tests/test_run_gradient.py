"""Any gradient policy from flags and TOML, ours or a user's own; each resumes to the same bits."""

from pathlib import Path
from typing import Any

import pytest
import torch

import throughtime as tt
from horizons import ForgetfulAdaptive, RecordingAdaptive
from test_cli import run
from test_run import (
    finish,
    flags,
    goes_on,
    settings,
    write_recordings,
)
from throughtime.app.cli import new_settings
from throughtime.app.model import load_model
from throughtime.app.run_folder import RunFolder
from throughtime.app.settings import Config, read_toml
from throughtime.app.train import Training, make_policy
from throughtime.app.user_class import ClassReference
from throughtime.errors import ConfigError

OWN = '''
"""Truncated, the credit scaled where it crosses the end of an update."""
from dataclasses import dataclass

import throughtime as tt


@dataclass(frozen=True)
class Scaled:
    stride: int
    factor: float = 0.5
    name: str | None = None

    def plan(self, source, at, probe):
        window, memory = tt.Truncated(self.stride, 2 * self.stride).plan(source, at, probe)
        if window is None:
            return None, memory
        return window._replace(chunk=self.stride, gate=self._scale), memory

    def _scale(self, step, credit):
        return [c if c is None else self.factor * c for c in credit]


class Empty:
    """No policy."""
'''
EXAMPLES = Path(__file__).parent.parent / "examples" / "policies"
RTRL = f"{EXAMPLES / 'rtrl.py'}:RTRL"
POLICIES: dict[str, dict[str, Any]] = {
    "truncated": {"gradient_arg": ("horizon=25", "burn_in=5"), "stride": 10},
    "adaptive": {"gradient_arg": ("tolerance=0.1", "min=10", "max=40", "every=5")},
    "randomized": {"gradient_arg": ("mean_horizon=12",)},
    "rtrl": {"stride": 10, "model": "rnn", "hidden": 4},
    "own": {"gradient_arg": ("factor=0.25",), "stride": 10},
}


@pytest.fixture
def own(tmp_path: Path) -> str:
    """The name of a policy in a file outside the package."""
    path = tmp_path / "policies.py"
    path.write_text(OWN, encoding="utf-8")
    ClassReference("gradient", path, "").trust()
    return f"{path}:Scaled"


def choices(policy: str, own: str) -> dict[str, Any]:
    more: dict[str, Any] = {"stride": None, "updates": 30, **POLICIES[policy]}
    return more | {"gradient": {"own": own, "rtrl": RTRL}.get(policy, policy)}


def values(folder: Path, name: str, policy: str, own: str) -> dict[str, Any]:
    return settings(folder / "data", folder / name, **choices(policy, own))


@pytest.mark.parametrize(("policy", "at"), list(zip(POLICIES, (7, 26, 7, 26, 7), strict=True)))
def test_a_run_with_any_policy_goes_on_to_the_same_bits(
    tmp_path: Path, own: str, policy: str, at: int
) -> None:
    goes_on(tmp_path, at, **choices(policy, own))


def test_the_horizon_at_the_end_of_an_epoch_is_that_at_the_start_of_the_next(
    tmp_path: Path,
) -> None:
    write_recordings(tmp_path / "data")
    policies = [kind(0.1, 10, 40, every=5) for kind in (RecordingAdaptive, ForgetfulAdaptive)]
    for policy in policies:
        name = type(policy).__name__
        training = Training.begin(Config(**values(tmp_path, name, "adaptive", "")))
        training.policy = policy
        training.run()
    ends, starts = zip(*policies[0].hand_overs(), strict=True)
    assert ends == starts
    assert min(starts) > 10
    assert all(start == 10 < end for end, start in policies[1].hand_overs())


def test_a_finished_run_trains_on_for_more_epochs_as_if_asked_at_once(
    tmp_path: Path, own: str
) -> None:
    write_recordings(tmp_path / "data")
    more = {"updates": None, "valid_every": 0, "schedule": "constant"}
    whole = finish(values(tmp_path, "whole", "adaptive", own) | more | {"epochs": 3})
    short = finish(values(tmp_path, "short", "adaptive", own) | more | {"epochs": 2})
    Training.resume(short.path, epochs=3).run()
    assert whole.model.read_bytes() == short.model.read_bytes()


def test_an_example_is_run_from_the_command_line(tmp_path: Path) -> None:
    data = write_recordings(tmp_path / "data")
    more = {"stride": 10, "keep": "last", "hidden": 4, "updates": 6}
    run(*flags(settings(data, tmp_path / "run", gradient=RTRL, **more)))
    folder = RunFolder(tmp_path / "run")
    assert "RTRL(stride=10)" in folder.report.read_text(encoding="utf-8")
    plain = finish(settings(data, tmp_path / "plain", **more))
    assert load_model(folder.model)[1].update == 6
    nets = [load_model(each.model)[0].parameters() for each in (folder, plain)]
    assert any(not torch.equal(a, b) for a, b in zip(*nets, strict=True))


def test_a_cosine_ends_with_the_epochs_of_a_policy_of_random_windows(tmp_path: Path) -> None:
    """Their number is only estimated beforehand, and the rate must not be 0 before the end."""
    data = write_recordings(tmp_path / "data")
    more: dict[str, Any] = {"gradient": "randomized", "gradient_arg": ("mean_horizon=12",)}
    more |= {
        "stride": None,
        "updates": None,
        "epochs": 2,
        "valid_every": 0,
        "schedule": "cosine",
        "keep": "last",
    }
    rows = finish(settings(data, tmp_path / "run", **more)).read_metrics()
    rates = [row["lr"] for row in rows if row["kind"] == "train"]
    assert rates == sorted(rates, reverse=True)
    assert 0 < rates[-1] < 0.03 * rates[0]


def test_flags_win_over_toml(tmp_path: Path, own: str) -> None:
    table = tmp_path / "run.toml"
    table.write_text(
        f'data = "d"\ngradient = "{own}"\ngradient_arg = ["stride=30", "factor=1"]\n',
        encoding="utf-8",
    )
    assert new_settings(table, {}).policy_arguments() == {"stride": 30, "factor": 1}
    config = new_settings(table, {"gradient_arg": "factor=2.0"})
    assert config.policy_arguments() == {"factor": 2.0}
    again = tmp_path / "again.toml"
    again.write_text(config.to_toml(), encoding="utf-8")
    assert Config(**read_toml(again)) == config


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, tt.Truncated(100)),
        ({"stride": 20, "horizon": 50}, tt.Truncated(20, 50)),
        ({"gradient_arg": ("burn_in=7",)}, tt.Truncated(100, burn_in=7)),
        ({"gradient": "exact", "cut_every": 7}, tt.Exact(cut_every=7)),
        ({"gradient": "exact", "gradient_arg": ("chunk=500",)}, tt.Exact(chunk=500)),
        ({"gradient": "randomized", "gradient_arg": ("mean_horizon=9",)}, tt.Randomized(9)),
    ],
)
def test_settings_describe_a_policy(more: dict[str, Any], expected: object) -> None:
    assert make_policy(Config(**{"data": "d", "task": "classify", "out": "o"} | more)) == expected


@pytest.mark.parametrize(
    ("more", "output"),
    [
        (
            {"gradient": "adaptive", "gradient_arg": ("tolerence=0.1",)},
            "got an unexpected keyword argument 'tolerence'. It takes (tolerance",
        ),
        ({"gradient": "adaptive"}, "It takes (tolerance"),
        ({"gradient": "randomized", "gradient_arg": ("mean_horizon=0",)}, "mean_horizon=0"),
        ({"gradient": "{folder}/policies.py:Other"}, "policies.py defines no class Other"),
        ({"gradient": "{folder}/policies.py:Empty"}, "its class Empty "),
        ({"gradient": "{own}", "horizon": 3}, "unexpected keyword argument 'horizon'"),
        ({"gradient": "rtrl"}, "--gradient rtrl: expected truncated or exact"),
    ],
)
def test_a_wrong_policy_or_argument_is_refused_by_name(
    tmp_path: Path, own: str, more: dict[str, Any], output: str
) -> None:
    if "gradient" in more:
        more = more | {"gradient": more["gradient"].format(own=own, folder=tmp_path)}
    with pytest.raises(ConfigError) as refused:
        make_policy(Config(**{"data": "d", "task": "classify", "out": "o"} | more))
    assert output in str(refused.value)


def test_a_file_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import nothing_of_this_name\n", encoding="utf-8")
    config = Config(data="d", task="classify", out="o", gradient=f"{tmp_path / 'broken.py'}:P")
    config.code()[0].trust()
    with pytest.raises(ConfigError, match=r"broken\.py: cannot be imported \(ModuleNotFoundError"):
        make_policy(config)
    data = write_recordings(tmp_path / "data")
    output = run("train", data, "--task", "classify", "--gradient-arg", "stride", ok=False)
    assert "--gradient-arg stride: expected NAME=VALUE" in output


def test_a_flag_of_a_policy_is_true_or_false_as_in_toml() -> None:
    """As a text it would be true."""
    with pytest.raises(ConfigError, match="jitter=False: expected NAME=VALUE as in TOML"):
        Config(data="d", gradient_arg=["jitter=False"])
    with pytest.raises(ConfigError, match="auto: expected NAME=VALUE as in TOML"):
        Config(data="d", gradient="adaptive", gradient_arg=["name=auto"])
    config = Config(data="d", gradient_arg=["jitter=false"])
    assert make_policy(config) == tt.Truncated(100, jitter=False)


def test_a_policy_is_described_by_its_arguments() -> None:
    arguments = ("tolerance=0.1", "min=5", "max=20")
    config = Config(data="d", gradient="adaptive", gradient_arg=arguments)
    assert config.describe_policy() == "adaptive(tolerance=0.1, min=5, max=20)"
