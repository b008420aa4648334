"""`throughtime export`: the trained model of a run as a file that runs without Python."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from throughtime.app.data_statistics import features
from throughtime.app.dataset import open_recording
from throughtime.app.load import Run
from throughtime.app.model import ModelSpec, in_units, one_thread
from throughtime.carry.carried import Carried
from throughtime.deploy.export import Export, export
from throughtime.errors import DataError, counted
from throughtime.stream import Recording, Stream

_STEPS = 1_000  # of the example


def export_run(
    run: Run,
    out: Path,
    check: Path | None = None,
    steps: int = 100_000,
    with_session: bool = False,
) -> Export:
    """Write the model of a run; see `tt.export`.

    Args:
        run: its model and settings.
        out: the file to write; its suffix names the format.
        check: a recording with the input columns of the run, on which the file is verified and the
            settling time measured.
        steps: random ones to verify on.
        with_session: also write session.py beside an .onnx file.

    Raises:
        ModelError: the model cannot be written in this format, or the file differs from it.
        DataError: a recording that the model does not fit.
    """
    net, spec = run.net, run.spec
    layout = spec.layout
    recording = None if check is None else open_recording([check], spec)
    rate = layout.rate / layout.frame_size if layout.rate is not None else None
    details = {
        "task": layout.task,
        "columns": {"inputs": [*layout.inputs, *layout.static], "targets": list(spec.target_names)},
        "rows_per_step": layout.frame_size,
        "rows_ahead": layout.ahead,
    }
    with one_thread(when=spec.is_small(lanes=1)):
        return export(
            net,
            out,
            inputs=_example(net, spec),
            steps=steps,
            rate=rate,
            classes=spec.classes or (spec.target_names if spec.is_multilabel else ()),
            stream=None if recording is None else _unbroken(recording, run),
            details=details,
            with_session=with_session,
        )


def _example(net: Carried, spec: ModelSpec) -> Tensor:
    """Inputs with the means and deviations of the training split, if the net has these."""
    random = torch.Generator().manual_seed(0)  # the same bytes each time
    x = torch.randn(_STEPS, spec.features, dtype=torch.float64, device="cpu", generator=random)
    return in_units(net, x)


def _unbroken(recording: Recording, run: Run) -> Stream:
    """The inputs of a whole recording with its static features.

    Raises:
        DataError: an input is NaN or infinite, and the run was not trained to mask such steps.
    """
    rows = features(recording.read(0, len(recording)))
    inputs = {"inputs": torch.from_numpy(rows).to(run.spec.torch_dtype), "name": recording.name}
    missing = run.config.missing
    wrong = np.argwhere(~np.isfinite(rows))
    if missing == "error" and len(wrong):
        step, column = wrong[0].tolist()
        raise DataError(
            f"--check: recording '{recording.name}' has {counted(len(wrong), 'input')} NaN or"
            f" infinite, the first at step {step}, column {column}. The file is verified on a"
            " recording without a gap: give another one, or a part of this one"
        )
    return Stream(inputs, 1, len(rows), seed=None, missing=missing, rank=0, ranks=1)
