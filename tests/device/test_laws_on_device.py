"""Laws that the CPU obeys, with every tensor of the test on the device."""

# pytest collects the tests that are imported
# ruff: noqa: F401
# pyright: reportUnusedImport=false

import pytest

from test_carry import (
    test_carried_layer_equals_torch_outputs,
    test_chunks_with_the_state_carried_equal_the_whole,
    test_deepcopy_works_independently,
    test_gradient_does_not_cross_a_reset,
    test_unbatched_lane_equals_a_batch_of_one,
)
from test_laws import (
    test_check_carry_fails_on_mutants,
    test_check_carry_passes_on_what_carry_makes,
)
from test_leaks import (
    test_every_net_leaks_nothing_on_a_stream,
    test_leak_is_reported_with_recordings_position_size_and_cause,
)
from test_metrics import (
    test_classification_equals_the_formulas,
    test_regression_on_uneven_pieces_equals_numpy,
)
from test_policies import (
    test_carried_state_after_the_epoch_is_that_of_one_long_forward,
    test_chunk_length_of_the_stream_changes_no_gradient,
    test_gradient_is_zero_across_a_reset,
    test_gradient_that_is_not_finite_is_refused_and_no_weight_touched,
    test_gradients_add_up_until_they_are_zeroed,
    test_uncut_updates_sum_to_plain_autograd_over_the_whole_sequence,
)
from test_predict import (
    test_lanes_are_reset_by_number,
    test_loss_and_figures_equal_a_direct_computation,
    test_reset_starts_the_lane_anew_after_the_step,
    test_resets_within_a_call_start_lanes_anew,
)
from test_rollout import (
    test_complex_states_hand_back_their_credit,
    test_dropout_draws_as_the_chunks_do_and_the_same_numbers_again,
    test_rollout_is_the_net,
)
from test_state import test_saved_state_is_loaded_to_the_bit
from test_stream_resume import (
    test_resume_after_an_update_of_any_epoch_gives_the_same_weights_to_the_bit,
    test_resume_between_epochs_gives_the_same_weights_to_the_bit,
    test_what_is_measured_between_updates_leaves_the_training_untouched,
)
from test_truncated import (
    test_gradient_is_zero_beyond_the_horizon_and_alive_within,
)

pytestmark = pytest.mark.usefixtures("on_device")
