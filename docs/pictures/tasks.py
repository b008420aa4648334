"""The pictures of the how-to pages and of the front page."""

from itertools import pairwise
from typing import Any

from docs.pictures.shapes import bars, boxes, curves, figures, spans
from docs.pictures.strides import STEPS, plan

from throughtime.gradient import Truncated


def draw() -> dict[str, str]:
    """A picture for each page that has none of its own."""
    return {
        "overview.svg": _overview(),
        "speed.svg": _speed(),
        "memory.svg": _memory(),
        "loop.svg": _loop(),
        "data.svg": _data(),
        "state.svg": _state(),
        "models.svg": _models(),
        "policies.svg": _policies(),
        "losses.svg": _losses(),
        "optim.svg": _optim(),
        "gpu.svg": _gpu(),
        "ranks.svg": _ranks(),
        "export.svg": _export(),
        "trace.svg": _trace(),
        "lightning.svg": _lightning(),
        "ignite.svg": _ignite(),
        "agents.svg": _agents(),
        "extending.svg": _extending(),
        "migrating.svg": _migrating(),
    }


def _overview() -> str:
    return boxes(
        "From recordings to a live process",
        "Recordings go into a stream, your module into a carried net. Updates of both fill the"
        " gradient for your loop. Afterwards the net is evaluated, runs live, or is exported.",
        {
            "data": (0, 0, "your data"),
            "stream": (1, 0, "tt.Stream"),
            "module": (0, 1, "your module"),
            "net": (1, 1, "tt.carry"),
            "updates": (2, 0, "tt.updates"),
            "loop": (2, 1, "your loop"),
            "score": (0, 2, "tt.evaluate"),
            "live": (1, 2, "tt.Predictor"),
            "export": (2, 2, "tt.export"),
        },
        "data>stream stream>updates module>net net>updates updates>loop net>live",
        ours="stream net updates score live export",
        note="Last row: what a trained net is for.",
    )


def _speed() -> str:
    rows = figures("../README.md", "float32")
    return bars(
        "Updates per second, a loop of torch.nn is 1",
        "Speed relative to a hand-written loop, one CPU thread, float32: "
        + ", ".join(f"{name} {value:g}" for name, value in rows.items()),
        [(name, value, f"{value:g}") for name, value in rows.items()],
        ours=range(len(rows)),
        note="One CPU thread: make bench",
    )


def _memory() -> str:
    cells = figures("how-to/gradients.md", "memory above the inputs")
    used = [int(value) for value in cells.values()]
    names = (
        "one graph, 100,000 steps",
        "exact, in segments, 100,000 steps",
        "exact, in segments, 1,000,000 steps",
    )
    return bars(
        "Memory of the exact gradient",
        "; ".join(f"{name}: {value} MB" for name, value in zip(names, used, strict=True)),
        [(name, value, f"{value} MB") for name, value in zip(names, used, strict=True)],
        ours=(1, 2),
        note="LSTM of 128 units: python benchmarks/exact.py",
    )


def _loop() -> str:
    return boxes(
        "Which lines are yours",
        "An update reads steps, computes outputs, loss and gradients, and checks them. Then your"
        " lines run: clip, step, schedule, log. The next update carries the state on.",
        {
            "read": (0, 0, "the next steps\nof the stream"),
            "run": (1, 0, "outputs, loss,\ngradients"),
            "ready": (2, 0, ".grad is ready,\nthe state kept"),
            "clip": (2, 1, "clip the\ngradient"),
            "step": (1, 1, "optimizer and\nscheduler step"),
            "log": (0, 1, "log the loss,\nzero the grad"),
        },
        "read>run run>ready ready>clip clip>step step>log log>read",
        ours="read run ready",
        note="Above: one turn of tt.updates. Below: the body of your for loop.",
    )


def _data() -> str:
    return boxes(
        "Everything becomes recordings on lanes",
        "Arrays, frames, files and folders become recordings. The stream plays them on its lanes,"
        " and hands out chunks.",
        {
            "arrays": (0, 0, "arrays: (x, y)"),
            "frames": (0, 1, "pandas, polars"),
            "files": (0, 2, "files, folders"),
            "recordings": (1, 1, "recordings of\nany length"),
            "lanes": (2, 0, "lane 1: A, C"),
            "other": (2, 1, "lane 2: B, D, E"),
            "chunks": (2, 2, "chunks (T, B, D)"),
        },
        "arrays>recordings frames>recordings files>recordings"
        " recordings>lanes recordings>other other>chunks",
        ours="recordings lanes other chunks",
    )


def _state() -> str:
    return boxes(
        "Four places of a state, one way to carry it",
        "A module may take its state as an argument, keep it in an attribute, hide it in a layer,"
        " or take one step at a time. A carried net always takes a chunk and a state, and returns"
        " outputs and the next state.",
        {
            "argument": (0, 0, "an argument: y, h = m(x, h)"),
            "attribute": (0, 1, "an attribute: self.hidden"),
            "layer": (0, 2, "inside a layer, from zeros"),
            "step": (0, 3, "one step per call, a cell"),
            "net": (1, 1.5, "net(x, state)\n→ y, next state"),
        },
        "argument>net attribute>net layer>net step>net",
        ours="net",
        columns=2,
        note="tt.carry tries each on copies and proves it before the first update.",
    )


def _models() -> str:
    return boxes(
        "What each model carries from step to step",
        "minGRU: a vector for each lane. Transformer-XL: the last inputs of each layer. Spiking"
        " neurons: their potentials. ConvLSTM: images. State space: a memory and a short window.",
        {
            "min": (0, 0, "minGRU"),
            "a": (1, 0, "a vector (B, H)"),
            "xl": (0, 1, "Transformer-XL"),
            "b": (1, 1, "the last inputs (B, N, D)"),
            "spike": (0, 2, "spiking neurons"),
            "c": (1, 2, "potentials (B, H)"),
            "conv": (0, 3, "ConvLSTM"),
            "d": (1, 3, "images (B, C, H, W), twice"),
            "ssm": (0, 4, "state space"),
            "e": (1, 4, "a memory and a window"),
        },
        "min>a xl>b spike>c conv>d ssm>e",
        ours="a b c d e",
        columns=2,
    )


def _policies() -> str:
    truncated = plan(Truncated(4, 8))
    cuts = (0, 5, 8, 15, 19, STEPS)
    return spans(
        "How far the credit of a loss flows back",
        "Truncated: an update every four steps, whose gradient flows back eight. Exact: one update,"
        " whose gradient flows through the whole recording, segment by segment. Randomized: the"
        " gradient is cut at random steps, and the rest is weighted.",
        STEPS,
        (
            ("Truncated: an update every stride, back to the horizon", _blocks(truncated)),
            (
                "Exact: one update, no cut, a graph of one segment at a time",
                [(s, s + 6, 0.42, "") for s in range(0, STEPS, 6)],
            ),
            (
                "Randomized: cuts at random steps, the rest is weighted",
                [(a, b, 0.42, "") for a, b in pairwise(cuts)],
            ),
        ),
        back=[
            *((0, window.stop, window.start) for window in truncated[1::2]),
            (1, STEPS, 0),
            *((2, b, a) for a, b in pairwise(cuts)),
        ],
        notes=(
            "Blocks: losses of an update, or segments.",
            "Arrows: where the gradient flows, for every second update above.",
        ),
    )


def _blocks(windows: Any) -> list[tuple[float, float, float, str]]:
    return [(window.counted, window.stop, 0.42, "") for window in windows]


def _losses() -> str:
    return spans(
        "What one call of the loss gets",
        "A plain loss gets the valid steps of a segment. A loss of a stretch gets all steps of a"
        " window, in order. A loss over recordings gets whole recordings.",
        STEPS,
        (
            ("a mean over steps: any steps", [(s, s + 4, 0.42, "") for s in range(0, STEPS, 4)]),
            (
                "a ratio, a correlation: the steps of a window",
                [(s, s + 8, 0.42, "") for s in range(0, STEPS, 8)],
            ),
            (
                "a spectrum, CTC: a whole recording",
                [(0, 14, 0.42, "recording 1"), (14, STEPS, 0.42, "recording 2")],
            ),
        ),
    )


def _optim() -> str:
    name = "LSTM of 50, float32"
    used = {
        text: figures("how-to/optim.md", column)[name]
        for text, column in (
            ("torch.optim.Adam", "torch"),
            ("torch, fused=True", "torch, `fused=True`"),
            ("tt.optim.Adam", "`tt.optim`"),
        )
    }
    return bars(
        "Clip and step: microseconds",
        "Microseconds: " + ", ".join(f"{text} {value:g}" for text, value in used.items()),
        [(text, value, f"{value:g}") for text, value in used.items()],
        ours=(2,),
        note="LSTM of 50 units: python benchmarks/optim.py",
    )


def _gpu() -> str:
    return spans(
        "The host stays ahead of the GPU",
        "While the GPU computes an update, the host reads and sends the next block. It waits once"
        " for each update: for the flag of the one before.",
        STEPS,
        (
            (
                "host: reads the next block, starts kernels",
                [
                    *((s, s + 3, 0.16, "") for s in (0, 5, 12)),
                    *((s, s + 2, 0.42, "") for s in (3, 10, 17)),
                ],
            ),
            (
                "GPU: computes",
                [
                    (a, b, 0.42, f"update {i}")
                    for i, (a, b) in enumerate(pairwise((4, 10.5, 17.5, STEPS)), 1)
                ],
            ),
        ),
        marks=((0, 10), (0, 17)),
        notes=(
            "Light: reads ahead. Dark: starts kernels.",
            "Bar: the one wait of an update, for a flag.",
        ),
    )


def _ranks() -> str:
    return boxes(
        "Ranks meet once for each update",
        "Each rank plays lanes of its own with the same weights. The gradients are summed once per"
        " update, weighted by valid steps, and all ranks make the same step.",
        {
            "one": (0, 0, "rank 0\nlanes 1, 2"),
            "two": (0, 1, "rank 1\nlanes 3, 4"),
            "sum": (1, 0.5, "sum by\nvalid steps"),
            "step": (2, 0, "the same step\non rank 0"),
            "other": (2, 1, "the same step\non rank 1"),
        },
        "one>sum two>sum sum>step sum>other",
        ours="sum",
    )


def _export() -> str:
    rows = figures("how-to/deploy.md", "median")
    names = {
        "C, gcc -O3 -ffp-contract=off": "C",
        "the same file as WebAssembly, Node.js": "WebAssembly",
        "tt.deploy.Session.step": "ONNX, in Python",
        "JavaScript, Node.js": "JavaScript",
        "the same, torch.nn.LSTM": "PyTorch, torch.nn.LSTM",
    }
    return bars(
        "One live step: microseconds",
        "Microseconds: " + ", ".join(f"{text} {rows[name]:g}" for name, text in names.items()),
        [(text, rows[name], f"{rows[name]:g}") for name, text in names.items()],
        ours=range(4),
        logarithmic=True,
        note="LSTM of 50 units, logarithmic: python benchmarks/deploy.py",
    )


def _trace() -> str:
    lags = range(61)
    return curves(
        "A gradient on its way back",
        "The gradient of a state at each lag, if every step multiplies it by 0.9, 0.97 or 1. With"
        " 0.9 it has vanished after 40 steps.",
        [(f"{rate:g} per step", [rate**lag for lag in lags]) for rate in (1.0, 0.97, 0.9)],
        axis="60 steps before the loss →",
        note="A trace draws this curve for each state and gate of your net.",
    )


def _lightning() -> str:
    return spans(
        "A training step makes many updates",
        "An epoch is cut into batches, a batch covers ten chunks, and the training step makes an"
        " update for each of them. The state is carried through all.",
        STEPS,
        (
            ("the stream: an unbroken recording", [(0, STEPS, 0.16, "")]),
            (
                "Lightning: a batch is a training step",
                [(0, 10, 0.42, "batch 1"), (10, 20, 0.42, "batch 2"), (20, STEPS, 0.42, "")],
            ),
            ("throughtime: an update for each chunk", [(s, s + 1, 0.42, "") for s in range(STEPS)]),
        ),
        back=((0, 0.4, STEPS - 0.4),),
        notes=("Arrow: the state, carried from batch to batch.",),
    )


def _ignite() -> str:
    return boxes(
        "Events of an iteration",
        "An iteration starts, reads a chunk, computes the gradient and fires GRADIENT_READY. The"
        " optimizer steps, and UPDATE_COMPLETED fires, before the iteration is complete.",
        {
            "start": (0, 0, "ITERATION_STARTED"),
            "ready": (0, 1, "GRADIENT_READY"),
            "done": (0, 2, "UPDATE_COMPLETED"),
            "end": (0, 3, "ITERATION_COMPLETED"),
            "clip": (1, 1, "clip, look at .grad"),
            "step": (1, 2, "step a scheduler"),
            "log": (1, 3, "log, save, validate"),
        },
        "start>ready ready>done done>end clip>ready step>done log>end",
        ours="ready done",
        columns=2,
        note="With more chunks in an iteration the two in the middle repeat.",
    )


def _agents() -> str:
    return spans(
        "Episodes of two environments",
        "Environments play episode after episode. At the first step of each the state becomes zeros"
        " in that lane alone; the last step of the one before has the flag done.",
        STEPS,
        (
            (
                "environment 1",
                [(0, 9, 0.42, "episode 1"), (9, 15, 0.42, "2"), (15, STEPS, 0.42, "3")],
            ),
            ("environment 2", [(0, 5, 0.42, "1"), (5, STEPS, 0.42, "episode 2")]),
        ),
        marks=((0, 0), (0, 9), (0, 15), (1, 0), (1, 5)),
        notes=("Bar: resets, the first step of an episode.", "The step before a bar is done."),
    )


def _extending() -> str:
    return boxes(
        "Where your own parts go in",
        "A file format goes into the stream, a cell into the net, a gradient policy into the"
        " updates, a rule into the doctor, which watches any loop.",
        {
            "format": (0, 0, "a file format"),
            "stream": (0, 1, "tt.Stream"),
            "policy": (1, 0, "a policy"),
            "updates": (1, 1, "tt.updates"),
            "cell": (2, 0, "a cell"),
            "net": (2, 1, "tt.carry"),
            "rule": (0, 2, "a doctor rule"),
            "doctor": (1, 2, "tt.doctor"),
            "watched": (2, 2, "any loop"),
        },
        "format>stream policy>updates cell>net stream>updates net>updates"
        " rule>doctor doctor>watched",
        ours="format policy cell rule",
    )


def _migrating() -> str:
    batches = [(s, s + 6, 0.42, "") for s in range(0, STEPS, 6)]
    return spans(
        "Where the state starts anew",
        "Ignite's trainer and Lightning 1.9 start every batch from zeros. A stateful layer of Keras"
        " never starts anew unless you call for it. A stream resets where a recording starts.",
        STEPS,
        (
            ("Ignite, Lightning 1.9: at every batch", batches),
            ("Keras, stateful: only where you call for it", batches),
            (
                "a stream: where a recording starts",
                [(0, 14, 0.42, "recording 1"), (14, STEPS, 0.42, "recording 2")],
            ),
        ),
        marks=(*((0, s) for s in range(0, STEPS, 6)), (1, 0), (2, 0), (2, 14)),
    )
