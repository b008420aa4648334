"""Standardisation by the first steps of a recording, as they arrive, and by whole recordings."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import throughtime as tt
from test_cli import run
from throughtime.deploy.session import Session
from throughtime.errors import DataError, ModelError
from throughtime.nn.affine import Standardise

SCALE, LEVEL = torch.tensor([5.0, 0.1, 100.0]), torch.tensor([1000.0, -3.0, 0.0])


def sensors(steps: int, lanes: int = 1) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(steps, lanes, 3) * SCALE + LEVEL


@given(steps=st.integers(1, 12), length=st.integers(1, 20), seed=st.integers(0, 99))
def test_a_step_is_standardised_by_the_steps_so_far(steps: int, length: int, seed: int) -> None:
    """Mutants: a step by those before it alone, statistics that go on after `steps` steps."""
    x = torch.from_numpy(np.random.default_rng(seed).normal(7, 3, (length, 2, 3)))
    y, state = Standardise(3, steps=steps).double()(x)
    for t in range(length):
        seen = x[: min(t + 1, steps)]
        deviation = seen.std(0, correction=0)
        expected = (x[t] - seen.mean(0)) / torch.where(deviation > 0, deviation, 1)
        torch.testing.assert_close(y[t], expected, rtol=1e-9, atol=1e-9)
    assert state["count"].tolist() == [[min(length, steps)]] * 2


def test_chunks_and_resets_give_what_each_recording_alone_gives() -> None:
    net = tt.carry(nn.Sequential(Standardise(3, steps=10), nn.GRU(3, 5))).double()
    laws = tt.testing.check_carry(net, sensors(28, 2).double())
    assert max(law.deviation for law in laws) < 1e-9


def test_an_exported_file_counts_as_the_net_does(tmp_path: Path) -> None:
    """The file is verified against the net; ONNX and a live net are below."""
    x = sensors(300)
    net = nn.Sequential(Standardise(3, steps=40), nn.GRU(3, 4, num_layers=2), nn.Linear(4, 2))
    net = tt.carry(net, x).eval()
    written = tt.export(net, tmp_path / "net.js", inputs=x, steps=2_000)
    assert written.verification is not None
    assert written.verification.error < 1e-5


def recordings(seed: int, count: int) -> list[tuple[Any, Any]]:
    """Of levels and scales of their own, far apart: inputs, and where anomalies are."""
    draw, result = np.random.default_rng(seed), list[tuple[Any, Any]]()
    for _ in range(count):
        state, begin = np.zeros(900, np.int64), draw.integers(450, 650)
        state[begin : begin + 200] = 1
        x = draw.normal(size=(900, 3)) * 0.5 + state[:, None] * np.array([1.5, -1.5, 1.0])
        x = x * np.exp(draw.normal(size=3) * 0.3) + draw.normal(size=3) * 20
        result.append((x.astype(np.float32), state))
    return result


def looped(data: list[Any], how: str) -> Any:
    """A net that a loop in Python trains."""
    stream = tt.Stream(data, lanes=6, chunk=50, standardise=how)
    torch.manual_seed(0)
    layers = tt.nn.Standardise.of(stream), nn.GRU(3, 16), nn.Linear(16, 2)
    net = tt.carry(nn.Sequential(*layers))
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    updates = tt.updates(net, stream, nn.CrossEntropyLoss(), gradient=tt.Truncated(50))
    for _ in itertools.islice(updates, 120):
        optimizer.step()
        optimizer.zero_grad()
    return net.eval()


def test_levels_of_their_own_are_no_hindrance_in_python_by_command_live_and_exported(
    tmp_path: Path,
) -> None:
    """F1 of anomalies in recordings never seen, whose level no other one has."""
    parts = {"train": recordings(0, 12), "valid": recordings(1, 2), "test": recordings(2, 2)}
    for split, data in parts.items():
        (tmp_path / "data" / split).mkdir(parents=True)
        for k, (x, anomaly) in enumerate(data):
            np.savez(tmp_path / "data" / split / f"r{k}.npz", x=x, anomaly=anomaly)
    truth = np.concatenate([anomaly for _, anomaly in parts["test"]]) == 1

    def f1(outputs: list[Any]) -> float:
        found = np.concatenate(outputs).argmax(axis=1) == 1
        return 2 * (found & truth).sum() / (found.sum() + truth.sum())

    scores = dict[tuple[str, str], float]()
    options = ("--inputs", "x", "--targets", "anomaly", "--hidden", "16", "--lanes", "6")
    options += ("--stride", "50", "--updates", "120", "--lr", "0.01")
    for how in ("split", "first:400"):
        net, out = looped(parts["train"], how), tmp_path / how
        scores["Python", how] = f1([tt.predict(net, x)[0] for x, _ in parts["test"]])
        run("train", tmp_path / "data", *options, "--standardise", how, "--out", out)
        run("eval", out, "--split", "test")
        said = json.loads((out / "scores-test.json").read_text(encoding="utf-8"))
        scores["command", how] = said["metrics"]["f1[1]"]
    tt.export(net, tmp_path / "net.onnx", inputs=torch.from_numpy(parts["test"][0][0]), steps=1000)
    for way, start in (
        ("live", lambda: tt.Predictor(net)),
        ("exported", lambda: Session(tmp_path / "net.onnx")),
    ):
        outputs = list[Any]()
        for x, _ in parts["test"]:
            play = start()
            outputs.append(np.concatenate([np.asarray(play.step(row[None])) for row in x]))
            expected = tt.predict(net, x)[0]
            np.testing.assert_allclose(outputs[-1], expected, rtol=1e-3, atol=1e-4)
        scores[way, "first:400"] = f1(outputs)
    assert max(scores["Python", "split"], scores["command", "split"]) < 0.4, scores
    ways = ("Python", "command", "live", "exported")
    assert min(scores[way, "first:400"] for way in ways) >= 0.7, scores


def test_the_layer_of_a_stream_has_the_statistics_that_it_asks_for() -> None:
    """Mutants: the deviation of one recording, and statistics of the inputs for targets."""
    data = [(x, x[:, :1] * 3 + 7) for x, _ in recordings(2, 3)]
    inputs, targets = (np.concatenate([pair[i] for pair in data]).astype(float) for i in (0, 1))
    split = tt.Stream(data, 1, 100, standardise="split")
    z = (inputs - inputs.mean(0)) / inputs.std(0)
    layer = tt.nn.Standardise.of(split).double()
    np.testing.assert_allclose(layer(torch.from_numpy(inputs)), z, atol=1e-3)
    z = (targets - targets.mean(0)) / targets.std(0)
    units = tt.nn.Standardise.of(split, "targets").double()
    np.testing.assert_allclose(units(torch.from_numpy(z)), targets, atol=1e-3)
    alone = tt.Stream(data, 1, 100, standardise="recording").recordings
    for recording, (x, _) in zip(alone, data, strict=True):
        z = (x - x.mean(0)) / x.std(0)
        np.testing.assert_allclose(recording.read(5, 900).inputs, z[5:], atol=1e-3)
    assert isinstance(tt.nn.Standardise.of(tt.Stream(data, 1, 100)), nn.Identity)


def test_whole_recordings_are_standardised_wherever_they_are_played_whole(tmp_path: Path) -> None:
    data = recordings(3, 3)
    stream = tt.Stream(data, 3, 100, standardise="recording")
    layer = nn.GRU(3, 2)
    net, plain = tt.carry(nn.Sequential(tt.nn.Standardise.of(stream), layer)), tt.carry(layer)
    for x, _ in data:
        expected, _ = tt.predict(plain, ((x - x.mean(0)) / x.std(0)).astype(np.float32))
        torch.testing.assert_close(tt.predict(net, x)[0], expected, atol=1e-4, rtol=1e-3)
    loss_fn = nn.CrossEntropyLoss()
    losses = [tt.evaluate(net, of, loss_fn).loss for of in (data, stream)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    with pytest.raises(ModelError, match="another standardisation or none"):
        tt.evaluate(net, tt.Stream(data, 3, 100), loss_fn)
    live = tt.Predictor(net)
    for play in (
        lambda: live.step(np.zeros((1, 3))),
        lambda: live(np.zeros((9, 1, 3))),
        lambda: tt.export(net, tmp_path / "net.onnx", inputs=torch.zeros(9, 3)),
    ):
        with pytest.raises(ModelError, match="Train it with --standardise first:400"):
            play()


def test_windows_are_not_standardised_each_by_itself() -> None:
    """Mutant: the statistics of a window take its level away."""
    data = recordings(3, 2)
    with pytest.raises(DataError, match=r"of windows: cut what is standardised: tt\.windows\("):
        tt.Stream(tt.windows(data, 300), 2, 100, standardise="recording")
    whole = tt.Stream(data, 2, 100, standardise="recording").recordings
    cut = tt.Stream(tt.windows(whole, 300), 2, 100, standardise="recording").recordings
    np.testing.assert_array_equal(cut[1].read(0, 300).inputs, whole[0].read(300, 600).inputs)


@pytest.mark.parametrize("how", ["recording", "first:400"])
def test_a_net_without_the_layer_of_its_stream_is_refused(how: str) -> None:
    stream = tt.Stream(recordings(0, 2), 2, 100, standardise=how)
    with pytest.raises(ModelError, match=r"standardise='.*tt\.nn\.Standardise\.of\(stream\)"):
        tt.updates(tt.carry(nn.GRU(3, 2)), stream, nn.MSELoss(), gradient=tt.Truncated(100))


def test_a_loop_that_standardises_resumes_to_the_bit() -> None:
    """Mutant: a layer that `tt.carry` has to try takes another way in the first update."""

    def losses(count: int, saved: dict[str, Any]) -> list[Any]:
        stream = tt.Stream(recordings(0, 3), 3, 50, standardise="first:100")
        torch.manual_seed(0)
        layers = tt.nn.Standardise.of(stream), tt.nn.GRU(3, 6), nn.Linear(6, 2)
        net = tt.carry(nn.Sequential(*layers))
        updates = tt.updates(net, stream, nn.CrossEntropyLoss(), gradient=tt.Truncated(50))
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        if saved:
            net.load_state_dict(saved["net"])
            updates.load_state_dict(saved["updates"])
        result = list[Any]()
        for update in itertools.islice(updates, count):
            optimizer.step()
            optimizer.zero_grad()
            result.append(float(update.loss))
        saved |= {"net": net.state_dict(), "updates": updates.state_dict()}
        return result

    saved = dict[str, Any]()
    assert losses(3, saved) + losses(5, saved) == losses(8, {})


def test_standardisation_that_a_stream_cannot_have_is_refused() -> None:
    x = np.zeros((9, 2))
    for how in ("first:0", "all"):
        with pytest.raises(DataError, match="expected 'split', 'recording', 'first:N'"):
            tt.Stream(x, 1, 5, standardise=how)
    with pytest.raises(DataError, match="no statistics of static features"):
        tt.Stream({"inputs": x, "static": np.ones(2)}, 1, 5, standardise="first:4")
    with pytest.raises(DataError, match="would count masked steps as zeros"):
        tt.Stream(x, 1, 5, standardise="first:4", missing="mask")
    with pytest.raises(DataError, match="has no targets to standardise"):
        tt.nn.Standardise.of(tt.Stream(x, 1, 5, standardise="split"), "targets")


def test_whole_recordings_are_no_inputs_of_a_live_net(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for k, (x, anomaly) in enumerate(recordings(0, 3)):
        np.savez(data / f"r{k}.npz", x=x, anomaly=anomaly)
    options = ("--targets", "anomaly", "--updates", "2", "--standardise", "recording")
    run("train", data, "--inputs", "x", *options, "--out", tmp_path / "run")
    net = tt.load_run(tmp_path / "run").net
    said = run("export", tmp_path / "run", "--out", tmp_path / "net.onnx", ok=False)
    assert "Train it with --standardise first:400" in said
    run("predict", tmp_path / "run", data / "r2.npz", "--out", tmp_path / "p.npy")
    x = recordings(0, 3)[2][0]
    scaled = torch.as_tensor((x - x.mean(axis=0)) / x.std(axis=0))[:, None]
    inner: Any = net.module
    outputs = inner[2](inner[1](scaled.float())[0]).softmax(dim=2)[:, 0].detach().numpy()
    np.testing.assert_allclose(np.load(tmp_path / "p.npy"), outputs, atol=1e-5)
    assert "whole recording" in run("eval", tmp_path / "run")


def test_a_layer_of_other_steps_or_of_targets_alone_is_refused() -> None:
    data = [{"inputs": np.random.default_rng(0).normal(9, 3, (90, 3)), "targets": np.ones((90, 1))}]

    def played(how: str, *layers: nn.Module) -> None:
        net = tt.carry(nn.Sequential(*layers))
        stream = tt.Stream(data, lanes=1, chunk=30, standardise=how)
        next(iter(tt.updates(net, stream, nn.MSELoss(), gradient=tt.Truncated(30))))

    split = Standardise.of(tt.Stream(data, lanes=1, chunk=30, standardise="split"), "targets")
    with pytest.raises(ModelError, match="another standardisation or none"):
        played("split", nn.GRU(3, 1), split)
    with pytest.raises(ModelError, match="another standardisation or none"):
        played("first:40", Standardise(3, steps=20), nn.GRU(3, 1))
    played("first:40", Standardise(3, steps=40), nn.GRU(3, 1))


def test_rounding_is_no_deviation_of_a_constant_column() -> None:
    data = [{"inputs": np.full((300, 1), 0.7)}]
    stream = tt.Stream(data, lanes=1, chunk=300, standardise="recording")
    assert next(iter(stream)).inputs.abs().max() < 1e-12


def test_other_columns_than_those_trained_on_are_refused(tmp_path: Path) -> None:
    rows = "\n".join(f"{t % 7},{t % 5},{t % 3}" for t in range(300))
    data, out = tmp_path / "machine.csv", tmp_path / "out"
    data.write_text(f"speed,load,heat\n{rows}\n")
    run("train", data, *("--targets", "heat", "--task", "regress"), "--updates", "2", "--out", out)
    other = tmp_path / "other.csv"
    other.write_text("speed,heat\n" + "1,2\n" * 300)
    complaint = run("predict", out, other, ok=False).replace("\n", " ")
    assert "inputs ['speed', 'load'] asked for, it has" in complaint
    data.write_text(f"wind,load,heat\n{rows}\n")
    complaint = run("train", "--resume", out, "--updates", "4", ok=False)
    assert "inputs was ('speed', 'load') and is ('wind', 'load')" in complaint
