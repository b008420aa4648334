"""`throughtime export`: the trained model of a run as a file that runs without Python."""

from pathlib import Path

import torch

from throughtime.app.dataset import open_recording
from throughtime.app.load import Run
from throughtime.app.model import in_units, one_thread, unbroken_stream
from throughtime.deploy.export import Export, export

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
    net, spec, layout, stream = run.net, run.spec, run.spec.layout, None
    if check is not None:
        recording = open_recording([check], spec)
        stream = unbroken_stream([recording], spec, run.config, 1, len(recording))
    random = torch.Generator().manual_seed(0)  # the same bytes each time
    x = torch.randn(_STEPS, spec.features, dtype=torch.float64, device="cpu", generator=random)
    columns = {"inputs": [*layout.inputs, *layout.static], "targets": list(spec.target_names)}
    with one_thread(when=spec.is_small(lanes=1)):
        return export(
            net,
            out,
            inputs=in_units(net, x),
            steps=steps,
            rate=layout.rate and layout.rate / layout.frame_size,
            classes=spec.classes or (spec.target_names if spec.is_multilabel else ()),
            stream=stream,
            details={
                "task": layout.task,
                "columns": columns,
                "rows_per_step": layout.frame_size,
                "rows_ahead": layout.ahead,
            },
            with_session=with_session,
        )
