"""Laws of nets, states and streams that the CPU obeys, with every tensor on the device."""

# pytest collects the tests that are imported
# ruff: noqa: F401
# pyright: reportUnusedImport=false

import pytest

from test_carry import (
    test_any_resets_equal_separate_recordings,
    test_carried_layer_equals_torch_outputs,
    test_carried_user_module_equals_the_module_itself,
    test_chunks_with_the_state_carried_equal_the_whole,
    test_deepcopy_works_independently,
    test_gradient_does_not_cross_a_reset,
    test_learnt_start_gets_gradient_from_every_reset,
    test_selected_lanes_play_on_alone,
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
from test_rollout import (
    test_complex_states_hand_back_their_credit,
    test_dropout_draws_as_the_chunks_do_and_the_same_numbers_again,
    test_gradient_is_that_of_finite_differences,
    test_rollout_is_the_net,
)
from test_state import test_saved_state_is_loaded_to_the_bit
from test_stream_resume import (
    test_resume_after_an_update_of_any_epoch_gives_the_same_weights_to_the_bit,
    test_resume_between_epochs_gives_the_same_weights_to_the_bit,
    test_what_is_measured_between_updates_leaves_the_training_untouched,
)

pytestmark = pytest.mark.usefixtures("on_device")
