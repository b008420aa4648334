"""`tt.fit`: the plain loop in one call, resumed to the bit, with the best weights at the end."""

import json
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim import lr_scheduler

import throughtime as tt
from throughtime.app.fit import Fit
from throughtime.carry.carried import Carried
from throughtime.errors import ConfigError, DataError, RunError

LENGTHS = (90, 70, 110, 60)


def recordings() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(n, 2, generator=generator, dtype=torch.float64) for n in LENGTHS]
    return [
        {"inputs": x, "targets": x.cumsum(0)[:, 0].sin(), "name": str(i)}
        for i, x in enumerate(inputs)
    ]


def make_net(hidden: int = 6) -> Carried:
    torch.manual_seed(1)
    layers = nn.GRU(2, hidden), nn.Dropout(0.2), nn.Linear(hidden, 1)
    return tt.carry(nn.Sequential(*layers).double())


def make_stream(lanes: int = 2) -> tt.Stream:
    return tt.Stream(recordings()[:3], lanes=lanes, chunk=10, seed=3, dtype=torch.float64)


Schedules = {
    "none": lambda _: None,
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 7, 0.5),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
}


def run(net: Carried, schedule: str = "none", **more: Any) -> Fit:
    """A training of 40 updates that validates every 8."""
    optimizer = tt.optim.AdamW(net.parameters(), lr=more.pop("lr", 0.05), max_norm=1.0)
    choices: dict[str, Any] = {
        "gradient": tt.Truncated(10, 25),
        "optimizer": optimizer,
        "schedule": Schedules[schedule](optimizer),
        "valid": recordings()[3:],
        "updates": 40,
        "valid_every": 8,
    }
    stream = more.pop("stream", None) or make_stream()
    loss_fn = more.pop("loss_fn", nn.MSELoss())
    return tt.fit(net, stream, loss_fn, **choices | more)


def pressing_at(update: int) -> Callable[[Mapping[str, Any]], None]:
    """A logger that presses Ctrl-C at a line of the log."""

    def log(row: Mapping[str, Any]) -> None:
        if row["update"] == update and row["kind"] == "train":
            os.kill(os.getpid(), signal.SIGINT)

    return log


def rows_of(out: Path) -> list[dict[str, Any]]:
    times = {"seconds", "crc32"}
    lines = map(json.loads, (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [{k: v for k, v in row.items() if k not in times} for row in lines]


def test_the_weights_are_those_of_the_plain_loop() -> None:
    net, mine = make_net(), make_net()
    torch.manual_seed(5)
    result = run(net, keep="last")
    torch.manual_seed(5)
    optimizer, count = tt.optim.AdamW(mine.parameters(), lr=0.05, max_norm=1.0), 0
    stream = make_stream()
    while count < 40:
        for _ in tt.updates(mine, stream, nn.MSELoss(), gradient=tt.Truncated(10, 25)):
            optimizer.step()
            optimizer.zero_grad()
            count += 1
            if count == 40:
                break
    assert result.count == 40
    torch.testing.assert_close(net.state_dict(), mine.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize(("schedule", "at"), [("none", 5), ("step", 16), ("plateau", 31)])
def test_stopped_anywhere_the_same_call_goes_on_to_the_same_bits(
    tmp_path: Path, schedule: str, at: int
) -> None:
    torch.manual_seed(5)
    whole = make_net()
    result = run(whole, schedule, out=tmp_path / "whole")
    torch.manual_seed(5)
    with pytest.raises(KeyboardInterrupt, match=f"stopped at update {at}"):
        run(make_net(), schedule, out=tmp_path / "run", logger=pressing_at(at))
    torch.manual_seed(6)
    resumed = make_net()
    again = run(resumed, schedule, out=str(tmp_path / "run"))
    assert (again.count, again.best, again.score) == (result.count, result.best, result.score)
    torch.testing.assert_close(resumed.state_dict(), whole.state_dict(), rtol=0, atol=0)
    assert rows_of(tmp_path / "run") == rows_of(tmp_path / "whole")
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("run", "whole")]
    assert models[0] == models[1]
    kept = load_file(tmp_path / "run" / "model.safetensors")
    torch.testing.assert_close(kept, dict(resumed.module.state_dict()), rtol=0, atol=0)


def test_a_finished_training_gives_its_weights_and_trains_on_to_a_later_end(tmp_path: Path) -> None:
    first, second, longer, whole = (make_net() for _ in range(4))
    torch.manual_seed(5)
    result = run(first, out=tmp_path)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    lines: list[Any] = []
    again = run(second, out=tmp_path, logger=lines.append)
    assert (again.count, again.best, again.finished) == (40, result.best, True)
    assert not lines
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    torch.testing.assert_close(first.state_dict(), second.state_dict(), rtol=0, atol=0)
    model = (tmp_path / "model.safetensors").read_bytes()
    again = run(make_net(), out=tmp_path, valid=None)
    assert (again.best, again.score) == (result.best, result.score)
    assert (tmp_path / "model.safetensors").read_bytes() == model
    assert run(longer, out=tmp_path, updates=60, keep="last").count == 60
    torch.manual_seed(5)
    run(whole, updates=60, keep="last")
    torch.testing.assert_close(longer.state_dict(), whole.state_dict(), rtol=0, atol=0)


def test_the_net_has_the_weights_of_the_best_validation_and_patience_ends_it() -> None:
    scores, states, net = list[float](), list[dict[str, Any]](), make_net()

    def validate() -> Any:
        result = tt.evaluate(net, recordings()[3:], nn.MSELoss())
        scores.append(result.loss)
        states.append({k: v.clone() for k, v in net.module.state_dict().items()})
        return result

    torch.manual_seed(5)
    result = run(net, valid=validate, patience=2, updates=400, lr=0.3)
    best = scores.index(min(scores))
    assert len(scores) == best + 3 < 50
    assert (result.best, result.score) == (8 * (best + 1), -scores[best])
    torch.testing.assert_close(dict(net.module.state_dict()), states[best], rtol=0, atol=0)


def test_a_line_has_losses_metrics_and_the_rate() -> None:
    lines: list[Mapping[str, Any]] = []
    run(make_net(), "step", logger=lines.append, metrics=tt.metrics.Regression(), epochs=None)
    train = [line for line in lines if line["kind"] == "train"]
    assert [line["update"] for line in train] == list(range(1, 41))
    assert train[0]["lr"] == 0.05
    assert train[7]["lr"] == 0.025
    assert all(line["rmse"] > 0 for line in lines if line["kind"] == "valid")
    assert [line["update"] for line in lines if line["kind"] == "valid"] == [8, 16, 24, 32, 40]


def test_an_epoch_of_more_updates_than_estimated_is_validated_to_its_end(tmp_path: Path) -> None:
    """The windows of this policy are random, so only their mean is known beforehand."""
    policy = tt.Randomized(mean_horizon=40)
    end: dict[str, Any] = {"updates": None, "epochs": 6, "valid_every": 2, "gradient": policy}
    done = run(make_net(), out=tmp_path, **end)
    rows = rows_of(tmp_path)
    estimate = next(row["updates"] for row in rows if row["kind"] == "train")
    assert done.count > estimate + 2
    assert [row["update"] for row in rows if row["kind"] == "valid"] == sorted(
        {*range(2, done.count + 1, 2), done.count}
    )


@pytest.mark.parametrize(
    ("more", "error", "said"),
    [
        ({"patience": 3, "valid": None}, ConfigError, "give recordings as valid="),
        ({"schedule": "plateau", "valid": None}, ConfigError, "count validations; give"),
        ({"epochs": 2}, ConfigError, "updates=40 and epochs=2: give one of them"),
        ({"keep": "all"}, ConfigError, "keep='all': expected 'best' or 'last'"),
        ({"updates": 0}, ConfigError, "updates=0"),
        ({"lr": 1e30}, RunError, r"take a lower learning rate \(now 1e\+30\)"),
    ],
)
def test_what_cannot_be_is_refused(more: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        run(make_net(), **more)


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"stream": recordings()}, "got a list, expected .*Stream"),
        ({"schedule": "cosine"}, "got a str, expected .*LRScheduler"),
        (
            {"schedule": torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.zeros(1)]), 1)},
            "rate of another optimizer",
        ),
        ({"optimizer": tt.optim.Adam(nn.Linear(2, 2).parameters())}, "none of the net's weights"),
    ],
)
def test_parts_of_another_kind_are_refused_before_the_first_update(
    part: dict[str, Any], said: str
) -> None:
    net = make_net()
    choices: dict[str, Any] = {
        "stream": make_stream(),
        "gradient": tt.Truncated(10),
        "optimizer": tt.optim.Adam(net.parameters()),
        "updates": 4,
    }
    with pytest.raises(ConfigError, match=said):
        tt.fit(net, loss_fn=nn.MSELoss(), **choices | part)


def test_a_folder_of_another_training_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    run(make_net(), out=tmp_path, updates=8)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    cases: list[tuple[Carried, dict[str, Any], type[Exception]]] = [
        (make_net(hidden=7), {}, RunError),
        (make_net(), {"gradient": tt.Truncated(20)}, DataError),
        (make_net(), {"stream": make_stream(lanes=3)}, DataError),
        (make_net(), {"schedule": "step"}, RunError),
        (other := make_net(), {"optimizer": torch.optim.SGD(other.parameters())}, RunError),
        (make_net(), {"loss_fn": nn.L1Loss()}, RunError),
        (make_net(), {"lr": 0.2, "updates": 16}, RunError),
        (make_net(), {"valid": recordings()[2:]}, RunError),
    ]
    for net, more, error in cases:
        with pytest.raises(error):
            run(net, out=tmp_path, **more)
    assert before == {path: path.read_bytes() for path in tmp_path.iterdir()}
