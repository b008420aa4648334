"""One pass over the recordings finds what is there, and what is missing."""

import numpy as np

from throughtime.app.recordings import collect_statistics
from throughtime.stream.sources import as_recording


def test_survey_finds_what_numpy_finds_however_the_recordings_are_cut() -> None:
    random = np.random.default_rng(0)
    parts = [random.normal(1e4, 0.1, size=(n, 2)) for n in (1, 70_000, 333)]
    found = collect_statistics(
        [as_recording({"inputs": p, "targets": np.zeros(len(p))}, i) for i, p in enumerate(parts)],
        task="classify",
    )
    whole = np.concatenate(parts)
    np.testing.assert_allclose(found.inputs.mean, whole.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(found.inputs.scale, whole.std(axis=0), rtol=1e-8)
    assert found.classes == {"0": len(whole)}


def test_survey_counts_missing_inputs_and_names_the_first() -> None:
    inputs = np.zeros((100, 3))
    inputs[40, 1] = np.nan
    inputs[70, :] = np.inf
    found = collect_statistics(
        [as_recording({"inputs": inputs, "name": "pump"}, 0)], task="classify"
    )
    assert found.faults == [
        (
            "recording 'pump': 2 steps have inputs that are NaN or infinite, the first at step 40,"
            " column 1"
        )
    ]
    np.testing.assert_array_equal(found.inputs.scale, np.ones(3))
