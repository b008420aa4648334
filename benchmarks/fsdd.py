"""A frame labeller trained on half-second windows or on the stream: Free Spoken Digit Dataset.

    python benchmarks/fsdd.py DATA [--labels last,word,voice] [--rows windows,stream]
        [--seeds 0,1,2] [--updates N] [--out runs/fsdd]
    python benchmarks/fsdd.py --table [--picture docs/how-to/recipes/fsdd.svg]
        [--out runs/fsdd]

DATA is the folder of the clips `{digit}_{speaker}_{index}.wav`
(github.com/Jakobovski/free-spoken-digit-dataset, CC BY-SA 4.0). The training clips of a speaker
(index 5 and above) are joined in a seeded order into one recording, with pauses of 0.2 to 1.5 s and
a low noise under all of it; the test clips likewise, in several orders one after another. A step is
a frame of 10 ms: the log energies of 20 bands in the last 25 ms. Its label is one of three: `last`,
the digit that was spoken last, kept through the pause until the next one begins; `word`, the digit
being spoken, or none; `voice`, whether somebody speaks.

Rows differ in how the same LSTM is trained, with the same initial weights, updates and frames per
update. Every network is then started from the zero state at many places of the test recordings and
runs for three minutes with its state carried: scores by the time since its start. Every (labels,
row, seed) is a file under --out, written when it is finished and not run again. `--table` prints
what is there and writes `benchmarks/results/fsdd.json`.
"""

import argparse
import io
import json
import platform
import re
import statistics
import time
import wave
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise, product
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import throughtime as tt
from throughtime.carry import Carried
from throughtime.gradient import Update

RATE, HOP, SPAN, FFT, BANDS = 8_000, 80, 200, 256, 20
STRIDE, LANES, HIDDEN, UPDATES = 50, 24, 96, 4_000
FRAMES = STRIDE * LANES  # of an update, in every row
STARTS, RUN, ORDERS = (
    20,
    18_000,
    4,
)  # cold starts in each test recording, frames after each, orders joined
NOISE = 0.1  # of the voice: 20 dB below it
EDGES = (0, 50, 100, 200, 500, 1_000, 3_000, 6_000, RUN)  # frames since the start
RESULTS = Path(__file__).parent / "results" / "fsdd.json"
CLASSES = {
    "last": tuple("0123456789"),
    "word": ("none", *"0123456789"),
    "voice": ("silence", "voice"),
}
TITLES = {
    "last": "last: the digit spoken last",
    "word": "word: the digit being spoken",
    "voice": "voice: is somebody speaking?",
}
Sound: TypeAlias = NDArray[np.float32]
Clip: TypeAlias = tuple[int, Sound]  # the digit and the samples
Recordings: TypeAlias = list[dict[str, Any]]
Runs: TypeAlias = dict[tuple[str, str], list[dict[str, Any]]]  # by labels and row


@dataclass(frozen=True)
class Row:
    """A training setup: the data, the frames between two updates, the horizon of the gradient."""

    title: str
    style: str  # of its line
    window: int | None  # frames; None plays the recordings
    stride: int = STRIDE
    horizon: int = STRIDE


ROWS = {
    "windows": Row("windows of 0.5 s", "C3o-", window=50),
    "windows-200": Row("windows of 2 s", "C1s-", window=200, stride=200, horizon=200),
    "stream": Row("the stream, horizon 0.5 s", "C0^-", window=None),
    "stream-200": Row("the stream, horizon 2 s", "C2v-", window=None, horizon=200),
}


def clips(folder: Path) -> dict[str, dict[str, list[Clip]]]:
    """The clips by split and speaker."""
    found: dict[str, dict[str, list[Clip]]] = {"train": {}, "test": {}}
    for path in sorted(folder.glob("*_*_*.wav")):
        digit, speaker, index = path.stem.split("_")
        with wave.open(str(path)) as file:
            sound = np.frombuffer(file.readframes(file.getnframes()), dtype="<i2").astype(
                np.float32
            ) / np.float32(2**15)
        found["test" if int(index) < 5 else "train"].setdefault(speaker, []).append(
            (int(digit), sound)
        )
    if not found["test"]:
        raise SystemExit(f"{folder} holds no clips named digit_speaker_index.wav")
    return found


def joined(
    said: Sequence[Clip], orders: int, random: np.random.Generator
) -> tuple[Sound, NDArray[np.int64]]:
    """The clips in random order, pauses between them, noise under all of it.

    And the digit at every sample, -1 in a pause.
    """
    sounds, digits = list[Sound](), list[NDArray[np.int64]]()
    for index in (i for _ in range(orders) for i in random.permutation(len(said))):
        digit, sound = said[index]
        pause = int(random.uniform(0.2, 1.5) * RATE)
        sounds += [np.zeros(pause, dtype=np.float32), sound]
        digits += [np.full(pause, -1), np.full(len(sound), digit)]
    sound, digit = np.concatenate(sounds), np.concatenate(digits)
    return (
        sound
        + NOISE * sound[digit >= 0].std() * random.standard_normal(len(sound), dtype=np.float32),
        digit,
    )


def energies(sound: Sound) -> Sound:
    """Log mel energies `(T, BANDS)` of the 25 ms before the end of each frame."""
    mel = np.linspace(2595 * np.log10(1 + 60 / 700), 2595 * np.log10(1 + RATE / 2 / 700), BANDS + 2)
    corners, bins = 700 * (10 ** (mel / 2595) - 1), np.arange(FFT // 2 + 1)[:, None] * RATE / FFT
    low, middle, high = corners[:-2], corners[1:-1], corners[2:]
    bands = np.maximum(
        0, np.minimum((bins - low) / (middle - low), (high - bins) / (high - middle))
    ).astype(np.float32)
    padded = np.concatenate([np.zeros(SPAN - HOP, dtype=np.float32), sound])
    pieces = np.lib.stride_tricks.sliding_window_view(padded, SPAN)[::HOP]
    spectrum = np.abs(np.fft.rfft(pieces * np.hanning(SPAN).astype(np.float32), FFT)) ** 2
    return np.log(spectrum.astype(np.float32) @ bands + 1e-6)


def labels(digit: NDArray[np.int64], kind: str) -> NDArray[np.int64]:
    """The label of every frame from the digit at its middle."""
    latest = np.maximum.accumulate(np.where(digit >= 0, np.arange(len(digit)), -1))
    last = np.where(latest >= 0, digit[latest], -100)  # nothing has been said yet: no target
    return {"last": last, "word": digit + 1, "voice": (digit >= 0).astype(np.int64)}[kind]


def load(folder: Path, kind: str) -> tuple[Recordings, Recordings]:
    """Training and test recordings, one for each speaker, scaled by the training recordings."""
    random, found = np.random.default_rng(0), dict[str, Recordings]()
    for split, speakers in clips(folder).items():
        found[split] = []
        for speaker, said in speakers.items():
            sound, digit = joined(said, 1 if split == "train" else ORDERS, random)
            targets = labels(digit[HOP // 2 :: HOP], kind)[: len(sound) // HOP]
            found[split].append({"name": speaker, "inputs": energies(sound), "targets": targets})
    shortest = min(len(recording["inputs"]) for recording in found["train"]) // FRAMES * FRAMES
    for recording in found["train"]:
        recording.update({key: recording[key][:shortest] for key in ("inputs", "targets")})
    every = np.concatenate([recording["inputs"] for recording in found["train"]])
    for recording in found["train"] + found["test"]:
        recording["inputs"] = (recording["inputs"] - every.mean(axis=0)) / every.std(axis=0)
    return found["train"], found["test"]


def in_windows(recordings: Recordings, length: int) -> list[Any]:
    """The recordings in pieces, each of which starts from the zero state."""
    return [*tt.windows(recordings, length)]


def training(net: Carried, row: Row, recordings: Recordings, seed: int) -> Iterator[Update]:
    """Trains without end; one item is one update."""
    played = in_windows(recordings, row.window) if row.window else recordings
    stream = tt.Stream(played, lanes=FRAMES // row.stride, chunk=row.stride, seed=seed)
    gradient, optimizer = (
        tt.Truncated(row.stride, row.horizon),
        torch.optim.Adam(net.parameters(), lr=2e-3),
    )
    while True:
        for update in tt.updates(net, stream, nn.CrossEntropyLoss(), gradient=gradient):
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            yield update


def cold_starts(test: Recordings) -> tuple[Tensor, Tensor]:
    """Inputs `(RUN, B, BANDS)` and targets `(RUN, B)`, spread over the test recordings."""
    starts = [
        (recording, int(at))
        for recording in test
        for at in np.linspace(0, len(recording["inputs"]) - RUN, STARTS)
    ]
    inputs, targets = (
        [recording[key][at : at + RUN] for recording, at in starts] for key in ("inputs", "targets")
    )
    return torch.from_numpy(np.stack(inputs, axis=1)), torch.from_numpy(np.stack(targets, axis=1))


def by_time(net: Carried, started: tuple[Tensor, Tensor], kind: str) -> list[dict[str, float]]:
    """The scores in each stretch of time since the start, the state carried."""
    player, found = tt.Predictor(net, lanes=started[0].shape[1]), list[dict[str, float]]()
    for start, stop in pairwise(EDGES):
        score = tt.metrics.Classification(CLASSES[kind])
        for at in range(start, stop, STRIDE):
            inputs, targets = (signal[at : at + STRIDE] for signal in started)
            score.update(player(inputs)[targets >= 0], targets[targets >= 0])
        found.append({key: score.compute()[key] for key in ("accuracy", "macro_f1")})
    return found


def one_run(kind: str, name: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Trains one model and scores it; `reset` sets the state back to zero after each window."""
    train, test = load(options.data, kind)
    torch.manual_seed(seed)
    net = tt.carry(nn.Sequential(nn.LSTM(BANDS, HIDDEN), nn.Linear(HIDDEN, len(CLASSES[kind]))))
    began, score = time.process_time(), tt.metrics.Classification(CLASSES[kind])
    done = [
        (update.steps, float(update.loss))
        for update in islice(training(net, ROWS[name], train, seed), options.updates)
    ]
    seconds = time.process_time() - began
    said = np.concatenate([recording["targets"] for recording in test])
    carried = tt.evaluate(net, tt.Stream(test, lanes=len(test), chunk=1_000), metrics=score)
    reset = tt.evaluate(
        net,
        tt.Stream(in_windows(test, ROWS[name].window or STRIDE), lanes=LANES, chunk=1_000),
        metrics=score,
    )
    run: dict[str, Any] = {
        "labels": kind,
        "row": name,
        "seed": seed,
        "updates": options.updates,
        "seconds": round(seconds, 1),
    }
    run |= {
        "frames": sum(steps for steps, _ in done),
        "training_loss": statistics.mean(loss for _, loss in done[-264:]),
    }
    run |= {
        "carried": carried.metrics,
        "reset": reset.metrics,
        "by_time": by_time(net, cold_starts(test), kind),
    }
    run["commonest"] = float(
        np.bincount(said[said >= 0]).max() / (said >= 0).sum()
    )  # right for who always says the commonest label
    run["machine"] = (
        f"python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}, 1"
        " thread"
    )
    print(kind, name, seed, run["seconds"], run["carried"], run["reset"], flush=True)
    return run


def finish(kind: str, name: str, seed: int, options: argparse.Namespace) -> None:
    """Runs one; its file appears whole or not at all."""
    path: Path = options.out / f"{kind}-{name}-{seed}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".part").write_text(
        json.dumps(one_run(kind, name, seed, options)), encoding="utf-8"
    )
    path.with_suffix(".part").replace(path)


def finished(folder: Path) -> Runs:
    """The runs of all seeds by labels and row.

    Those of one length only, or they would not compare.
    """
    found: Runs = {}
    for kind, name in product(CLASSES, ROWS):
        for path in sorted(folder.glob(f"{kind}-{name}-[0-9].json")):
            found.setdefault((kind, name), []).append(json.loads(path.read_text(encoding="utf-8")))
    lengths = sorted({run["updates"] for runs in found.values() for run in runs})
    if len(lengths) != 1:
        raise SystemExit(
            f"{folder} holds runs of {lengths} updates; expected one length, and at least one run"
        )
    return found


def spread(values: list[float]) -> str:
    """Mean and sample standard deviation."""
    deviation = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.3f}{deviation}"


def table(found: Runs) -> None:
    """Prints the Markdown table; the stretches of time are of the carried state."""
    shown = (0, 1, 3, 7)
    stretches = [f"{EDGES[i] * HOP / RATE:g} to {EDGES[i + 1] * HOP / RATE:g} s" for i in shown]
    print(
        "| labels | trained on | accuracy | macro-F1 | state set back | "
        + " | ".join(stretches)
        + " |"
    )
    print("|---|---|---|---|---|" + "---|" * len(shown))
    for (kind, name), mine in found.items():
        cells = [
            kind,
            ROWS[name].title,
            *(spread([run["carried"][key] for run in mine]) for key in ("accuracy", "macro_f1")),
        ]
        cells.append(
            spread([run["reset"]["accuracy"] for run in mine]) if ROWS[name].window else ""
        )
        cells += [spread([run["by_time"][i]["accuracy"] for run in mine]) for i in shown]
        print("| " + " | ".join(cells) + " |")


def picture(found: Runs, path: Path) -> None:
    """Draw the accuracy over time: the mean over seeds as a line, the range as a band."""
    from matplotlib import pyplot as plt

    plt.rcParams.update(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": "fsdd",
            "font.size": 9,
            "font.sans-serif": ["DejaVu Sans"],
        }
    )
    figure, axes = plt.subplots(
        1, len(CLASSES), figsize=(9, 3.8), sharey=True, layout="constrained"
    )
    for panel, kind in zip(axes, CLASSES, strict=True):
        for name in (name for name in ROWS if (kind, name) in found):
            draw(panel, name, found[kind, name])
        panel.set(
            title=TITLES[kind],
            xscale="log",
            ylim=(0, 1),
            xlabel="seconds since the start",
            ylabel="accuracy of the frames",
        )
        panel.set_xticks([0.5, 2, 10, 60], ["0.5", "2", "10", "60"])
        panel.set_xticks([], minor=True)
        panel.label_outer()
    figure.legend(
        *axes[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=2,
        frameon=False,
        title="trained on",
    )
    figure.savefig(
        drawn := io.StringIO(),
        format="svg",
        metadata={"Date": None, "Creator": None, "Format": None, "Type": None},
    )
    bare = re.sub(r' id="[\w.]+_\d+"| transform="rotate\(-0 [^"]*"', "", drawn.getvalue())
    short = re.sub(
        r"\d+\.\d{4,}", lambda number: f"{float(number[0]):.1f}", re.sub(r"\s*\n\s*", "\n", bare)
    )
    path.write_text(short, encoding="utf-8")


def draw(panel: Any, name: str, runs: list[dict[str, Any]]) -> None:
    """One row in one panel."""
    seconds = [0.25, *((low * high) ** 0.5 * HOP / RATE for low, high in pairwise(EDGES[1:]))]
    curves = np.array([[figures["accuracy"] for figures in run["by_time"]] for run in runs])
    style, colour = ROWS[name].style, ROWS[name].style[:2]
    panel.plot(
        seconds, curves.mean(axis=0), style, label=ROWS[name].title, linewidth=1.6, markersize=3.5
    )
    panel.fill_between(
        seconds, curves.min(axis=0), curves.max(axis=0), color=colour, alpha=0.15, linewidth=0
    )
    if name == "windows":
        reset = statistics.mean(run["reset"]["accuracy"] for run in runs)
        panel.axhline(
            reset,
            color=colour,
            linewidth=1,
            linestyle="--",
            label="the same, but the state set back every 0.5 s",
        )
        panel.axhline(
            runs[0]["commonest"],
            color="0.4",
            linewidth=1,
            linestyle=":",
            label="always the commonest label",
        )


def report(found: Runs, drawing: Path | None) -> None:
    """Prints the table, writes the results, and draws the picture where one is asked for."""
    table(found)
    runs = json.loads(
        json.dumps(list(found.values())), parse_float=lambda number: round(float(number), 4)
    )
    text = json.dumps(
        {
            "seconds": [edge * HOP / RATE for edge in EDGES],
            "runs": [run for mine in runs for run in mine],
        },
        indent=1,
    )
    RESULTS.write_text(text + "\n", encoding="utf-8")
    if drawing:
        picture(found, drawing)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path, nargs="?")
    parser.add_argument("--labels", default=",".join(CLASSES))
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--updates", type=int, default=UPDATES)
    parser.add_argument("--out", type=Path, default=Path("runs/fsdd"))
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    if options.table or options.picture:
        return report(finished(options.out), options.picture)
    if options.data is None:
        parser.error("DATA, the folder with the clips, is missing")
    torch.set_num_threads(1)
    for kind, name, seed in product(
        options.labels.split(","), options.rows.split(","), options.seeds.split(",")
    ):
        if not (options.out / f"{kind}-{name}-{seed}.json").exists():
            finish(kind, name, int(seed), options)
    return None


if __name__ == "__main__":
    main()
