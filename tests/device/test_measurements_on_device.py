"""Laws of what only measures or predicts, with every tensor of the test on the device."""

# pytest collects the tests that are imported
# ruff: noqa: F401
# pyright: reportUnusedImport=false

import pytest

from test_metrics import (
    test_classification_equals_the_formulas,
    test_regression_on_uneven_pieces_equals_numpy,
)
from test_predict import (
    test_hold_leaves_the_step_out_and_the_other_lanes_go_on,
    test_lanes_are_reset_by_number,
    test_loss_and_figures_equal_a_direct_computation,
    test_one_step_at_a_time_equals_many,
    test_reset_starts_the_lane_anew_after_the_step,
    test_resets_within_a_call_start_lanes_anew,
    test_training_with_evaluations_in_between_gives_the_same_weights_to_the_bit,
)

pytestmark = pytest.mark.usefixtures("on_device")
