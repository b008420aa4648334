"""Laws of the policies that the CPU obeys, with every tensor of the test on the device."""

# pytest collects the tests that are imported
# ruff: noqa: F401
# pyright: reportUnusedImport=false

import pytest

from test_policies import (
    test_carried_state_after_the_epoch_is_that_of_one_long_forward,
    test_chunk_length_of_the_stream_changes_no_gradient,
    test_gradient_is_zero_across_a_reset,
    test_gradient_that_is_not_finite_is_refused_and_no_weight_touched,
    test_gradients_add_up_until_they_are_zeroed,
    test_losses_weighted_by_valid_steps_are_the_mean_loss,
    test_mutant_that_cuts_does_not,
    test_no_valid_step_means_no_update,
    test_uncut_updates_sum_to_plain_autograd_over_the_whole_sequence,
)
from test_truncated import (
    test_gradient_equals_plain_autograd,
    test_gradient_is_zero_beyond_the_horizon_and_alive_within,
    test_plain_losses_work_unchanged,
)

pytestmark = pytest.mark.usefixtures("on_device")
