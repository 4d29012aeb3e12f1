"""Makes the modules beside this file (such as `estimates`) importable from every test; no Trace comes from before."""

import gc
import os
import platform
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from hypothesis import HealthCheck, settings

from tonnage.errors import GhostUnavailable
from tonnage.estimates import cache, history
from tonnage.ghost import environment as ghost_environment
from tonnage.ghost import wheel
from tonnage.ghost.wheel import Torch
from tonnage.workers.worker import Worker

HERE: Final = Path(__file__).parent

settings.register_profile(
    "tonnage",
    max_examples=100 if os.environ.get("TONNAGE_TEST_LONG") else 40,
    deadline=None,  # how long an example takes is the machine's affair
    derandomize=True,  # a run says the same as the one before it
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("tonnage")

# What a shell starts in the background ignores interrupts, and so would the processes of tests.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Who looks for garbage in a test need not look through all that was imported: a twentieth of the time."""
    gc.collect()
    gc.freeze()


SLOW: Final = ("torch_build", "worker", "dry_run")
"""Fixtures of tests that run a ghost; `pytest -m "not slow"` leaves them out, for daily work."""

SLOW_FILES: Final = (
    *("techniques/", "meta/", "shallow/", "benchmarks/", "ghost/", "workers/"),
    *("allocator/test_allocator_against_torch", "planner/test_nearest", "planner/test_bounds", "planner/test_search"),
    *("trainers/test_exports", "trainers/test_image_rows", "trainers/test_reread", "trainers/test_runs"),
    *("tuning/test_script_tuning", "step/test_model", "step/test_step", "step/test_hub_kernels"),
    *("train/test_ranks", "train/test_saving_ranks", "train/test_quantized_ranks", "train/test_cli_train"),
    *("cli/test_cli_end_to_end", "planner/test_dimensions"),
)
"""Files of tests without a ghost that take long together."""


LONG: Final = (
    "tests/advice/test_trials.py::test_a_job_with_too_little_host_memory_gets_changes_that_need_less_of_it",
    "tests/allocator/test_allocator_against_torch.py::test_options_are_parsed_like_torch[max_split",
    "tests/allocator/test_allocator_against_torch.py::test_replay_of_a_training_step_equals_it[h100",
    "tests/allocator/test_allocator_against_torch.py::test_replica_equals_torch[1-default-private pools",
    "tests/benchmarks/test_accuracy.py::test_software_that_torch_has_imported_already_is_not_mixed",
    "tests/benchmarks/test_accuracy.py::test_the_stand_in_for_flash_attention_asks_for_what_torchs_operation_asks_for",
    "tests/benchmarks/test_accuracy.py::test_what_inductor_makes_asks_for_the_same_without_its_kernels",
    "tests/benchmarks/test_accuracy.py::test_what_was_compiled_before_the_fork_leaves_the_card_as_it_is",
    "tests/benchmarks/test_kills.py::test_a_run_that_is_killed_loses_nothing",
    "tests/benchmarks/test_sweep.py::test_accelerates_plugin_moves_the_inputs_of_layers",
    "tests/benchmarks/test_sweep.py::test_accelerates_script_keeps_nothing_that_was_divided",
    "tests/benchmarks/test_sweep.py::test_rows_of_images_need_what_was_estimated[gemma3",
    "tests/benchmarks/test_sweep.py::test_rows_of_images_need_what_was_estimated[llava",
    "tests/benchmarks/test_sweep.py::test_rows_of_images_need_what_was_estimated[qwen2_5_vl-deepspeed",
    "tests/benchmarks/test_sweep.py::test_rows_of_images_need_what_was_estimated[qwen2_5_vl-tonnage",
    "tests/benchmarks/test_sweep.py::test_what_is_exported_needs_what_was_estimated[accelerate",
    "tests/benchmarks/test_sweep.py::test_what_is_exported_needs_what_was_estimated[deepspeed",
    "tests/benchmarks/test_sweep.py::test_what_is_exported_needs_what_was_estimated[tonnage",
    "tests/benchmarks/test_train_agrees.py::test_the_command_needs_what_was_estimated[plain",
    "tests/benchmarks/test_train_agrees.py::test_the_command_needs_what_was_estimated[zero3 on two",
    "tests/benchmarks/test_train_benchmark.py::test_contestants_run_on_a_ghost",
    "tests/ghost/test_applied.py::test_an_applied_plan_needs_what_was_estimated[divided",
    "tests/ghost/test_applied.py::test_an_applied_plan_needs_what_was_estimated[half of the states",
    "tests/ghost/test_applied.py::test_an_applied_plan_needs_what_was_estimated[sequences shared",
    "tests/ghost/test_applied.py::test_an_applied_plan_needs_what_was_estimated[sharded]",
    "tests/ghost/test_applied.py::test_an_applied_plan_needs_what_was_estimated[updated in backward",
    "tests/ghost/test_counting.py::test_a_product_whose_result_has_another_dtype_is_counted",
    "tests/ghost/test_counting.py::test_a_counted_step_adds_nothing_to_the_memory[evaluates-True",
    "tests/ghost/test_counting.py::test_a_counted_step_adds_nothing_to_the_memory[evaluates-soon",
    "tests/ghost/test_counting.py::test_a_counted_step_adds_nothing_to_the_memory[copies",
    "tests/ghost/test_counting.py::test_a_counted_step_adds_nothing_to_the_memory[evaluates-with-graph",
    "tests/ghost/test_counting.py::test_what_becomes_of_a_further_step_changes_no_answer[compiled",
    "tests/ghost/test_counting.py::test_what_becomes_of_a_further_step_changes_no_answer[ends",
    "tests/ghost/test_counting.py::test_what_becomes_of_a_further_step_changes_no_answer[fails",
    "tests/ghost/test_counting.py::test_what_becomes_of_a_further_step_changes_no_answer[gives-up",
    "tests/ghost/test_dryrun.py::test_a_process_left_behind_is_ended[leaves-a-service",
    "tests/ghost/test_dryrun.py::test_a_rank_that_outlives_the_process_that_started_it",
    "tests/ghost/test_dryrun.py::test_a_script_that_has_torchscript_compile_what_was_replaced",
    "tests/ghost/test_dryrun.py::test_a_script_that_leaves_early[exits]",
    "tests/ghost/test_dryrun.py::test_a_script_that_spawns_processes",
    "tests/ghost/test_dryrun.py::test_another_process_on_the_same_card_is_named",
    "tests/ghost/test_habits.py::test_computed_numbers_are_plausible[until-converged",
    "tests/ghost/test_habits.py::test_what_a_programs_own_kernel_writes_is_forgotten[compiled",
    "tests/ghost/test_inference_engines.py::test_a_front_end_that_breaks_is_a_failure_of_the_command",
    "tests/ghost/test_inference_engines.py::test_continuous_batching_fills_the_card_as_the_engine_does",
    "tests/ghost/test_inference_engines.py::test_generation_alone_ends_by_itself_and_shows_its_cache[dynamic",
    "tests/ghost/test_loop_ends.py::test_a_loop_without_an_end_is_unwound[catches",
    "tests/script/test_examples.py::test_fewer_pixels",
    "tests/script/test_examples.py::test_ulysses",
    "tests/ghost/test_loop_ends.py::test_a_parent_gets_the_results_of_its_children",
    "tests/ghost/test_loop_ends.py::test_a_second_loop_over_the_same_loader_has_steps_of_its_own",
    "tests/ghost/test_memory_techniques.py::test_compiled_layers_keep_less_for_backward_and_the_same_between[full",
    "tests/ghost/test_native.py::test_the_sources_compile_without_a_warning[12]",
    "tests/ghost/test_programs.py::test_a_card_without_room_for_nccl_is_out_of_memory",
    "tests/ghost/test_programs.py::test_a_checkpoint_packed_in_another_way_needs_its_files",
    "tests/ghost/test_programs.py::test_a_compiled_model_of_pictures_and_words",
    "tests/ghost/test_programs.py::test_a_job_that_fits_but_for_nccls_buffers_does_not_fit",
    "tests/ghost/test_programs.py::test_a_pipeline_of_two_real_processes",
    "tests/ghost/test_programs.py::test_a_plain_loop[bert]",
    "tests/ghost/test_programs.py::test_a_plain_loop[gpt2]",
    "tests/ghost/test_programs.py::test_a_plain_loop[mixtral]",
    "tests/ghost/test_programs.py::test_a_plain_loop[qwen3]",
    "tests/ghost/test_programs.py::test_a_plain_loop[t5",
    "tests/ghost/test_programs.py::test_a_plain_loop[vit",
    "tests/ghost/test_programs.py::test_a_program_that_skips_what_is_too_large_fits_however_many_steps_are_made[3",
    "tests/ghost/test_programs.py::test_a_program_without_an_optimizers_steps_comes_to_an_end[by-hand",
    "tests/ghost/test_programs.py::test_accelerate_launch",
    "tests/ghost/test_programs.py::test_generate_goes_on_to_its_length",
    "tests/ghost/test_programs.py::test_one_rank_alone[ddp-8x8",
    "tests/ghost/test_programs.py::test_one_rank_alone[fsdp-128x8",
    "tests/ghost/test_programs.py::test_one_stage_of_a_long_pipeline[128x8",
    "tests/ghost/test_programs.py::test_running_out_of_memory[forward",
    "tests/ghost/test_programs.py::test_running_out_of_memory[optimizer",
    "tests/ghost/test_programs.py::test_the_trainer_with_data_loader_workers",
    "tests/ghost/test_programs.py::test_what_a_program_files_away_takes_the_place_of_nothing",
    "tests/ghost/test_script.py::test_a_loop_with_accelerate",
    "tests/ghost/test_several.py::test_a_network_that_is_called_past_its_hooks_is_known[compiled",
    "tests/ghost/test_several.py::test_lbfgs_fills_its_history[searches",
    "tests/ghost/test_shortcuts.py::test_one_of_each_kind_is_asked_for_and_the_results_are_torchs",
    "tests/ghost/test_versions.py::test_both_ways_find_the_same_marks[checkpointing",
    "tests/ghost/test_versions.py::test_both_ways_find_the_same_marks[fsdp",
    "tests/ghost/test_versions.py::test_both_ways_find_the_same_marks[oom",
    "tests/ghost/test_versions.py::test_libraries_for_fewer_bits[adamw8bit",
    "tests/ghost/test_versions.py::test_libraries_for_fewer_bits[paged",
    "tests/meta/test_against_ghost.py::test_peaks_are_those_of_the_ghost[stages of a pipeline that divide",
    "tests/meta/test_platforms.py::test_macos",
    "tests/meta/test_platforms.py::test_windows",
    "tests/meta/test_recording.py::test_a_ranks_live_bytes_are_those_of_real_processes[4-",
    "tests/meta/test_recording.py::test_live_bytes_are_those_of_a_real_run[llava-bf16-mixed-full",
    "tests/meta/test_recording.py::test_live_bytes_are_those_of_a_real_run[mllama-bf16-mixed-every-2",
    "tests/meta/test_recording.py::test_live_bytes_are_those_of_a_real_run[olmo2-bf16-mixed",
    "tests/planner/test_bounds.py::test_bound_is_close_to_what_engines_hold_between_micro_batches[accelerate]",
    "tests/planner/test_dimensions.py::test_saved_plan_gives_the_same_answer[rtx-4090-hf-trainer",
    "tests/planner/test_nearest.py::test_more_gpus_are_no_remedy_if_the_most_are_too_few",
    "tests/planner/test_nearest.py::test_smallest_candidates_have_extreme_micro_batches[{'gpu': '4x8xt4",
    "tests/planner/test_nearest.py::test_smallest_candidates_have_extreme_micro_batches[{'gpu': '8xh100",
    "tests/planner/test_pipeline_buffers.py::test_few_micro_batches_predict_a_step_of_many[divided",
    "tests/planner/test_pipeline_buffers.py::test_few_micro_batches_predict_a_step_of_many[pure",
    "tests/planner/test_pipeline_buffers.py::test_few_micro_batches_predict_a_step_of_many[zero2",
    "tests/planner/test_probe.py::test_stub_of_flex_attention_keeps_as_much_as_flex_attention",
    "tests/script/test_preferences.py::test_a_reference_needs_its_weights_once_more_or_not_at_all[adapters-1",
    "tests/script/test_preferences.py::test_a_reference_needs_its_weights_once_more_or_not_at_all[copy-2",
    "tests/script/test_preferences.py::test_a_reference_needs_its_weights_once_more_or_not_at_all[precomputed",
    "tests/serving/test_checking.py::test_a_folder_that_lacks_tensors_is_incomplete",
    "tests/shallow/test_continuing.py::test_a_network_of_few_layers_continued_is_the_whole_one[tp lora",
    "tests/shallow/test_continuing.py::test_a_stage_of_few_layers_continued_is_the_whole_one[0-zero2-1f1b",
    "tests/shallow/test_continuing.py::test_a_stage_of_few_layers_continued_is_the_whole_one[0-zero2-interleaved",
    "tests/shallow/test_continuing.py::test_a_stage_of_few_layers_continued_is_the_whole_one[2-zero3-1f1b",
    "tests/shallow/test_continuing.py::test_few_layers_say_what_is_asked_for_whichever_allocator_answered[experts",
    "tests/shallow/test_continuing.py::test_few_layers_say_what_is_asked_for_whichever_allocator_answered[lora",
    "tests/shallow/test_continuing.py::test_few_layers_say_what_is_asked_for_whichever_allocator_answered[tp and cp",
    "tests/shallow/test_continuing.py::test_few_layers_say_what_is_asked_for_whichever_allocator_answered[zero3",
    "tests/shallow/test_continuing.py::test_the_decoder_of_an_image_text_model_continued_is_the_whole_one[llava",
    "tests/techniques/test_parallel.py::test_agrees_with_one_process[4-",
    "tests/techniques/test_sharding.py::test_agrees_with_one_process[2-",
    "tests/train/test_cli_train.py::test_runs_that_were_killed_and_stopped_continue_exactly",
    "tests/train/test_saving.py::test_resumed_training_equals_training_without_a_stop[adamw-loop",
    "tests/train/test_saving.py::test_resumed_training_equals_training_without_a_stop[muon, states",
    "tests/train/test_saving.py::test_resumed_training_equals_training_without_a_stop[sgd-plain",
    "tests/train/test_saving.py::test_resumed_training_equals_training_without_a_stop[shard zero1",
    "tests/train/test_saving.py::test_resumed_training_equals_training_without_a_stop[states nvme=0.5",
    "tests/train/test_saving_ranks.py::test_any_number_of_ranks_goes_on[1-2",
    "tests/train/test_saving_ranks.py::test_what_other_ranks_save_again_is_the_same[1-2",
    "tests/trainers/test_commands.py::test_a_job_of_nearest_settings_needs_what_was_estimated",
    "tests/trainers/test_exports.py::test_networks_that_see_may_be_trained_on_text[accelerate",
    "tests/trainers/test_exports.py::test_networks_that_see_may_be_trained_on_text[deepspeed",
    "tests/trainers/test_exports.py::test_networks_that_see_may_be_trained_on_text[hf-trainer",
    "tests/tuning/test_script_tuning.py::test_a_card_that_runs_out_gets_smaller_batches",
    "tests/tuning/test_script_tuning.py::test_a_loop_of_its_own_is_timed_as_it_is",
    "tests/tuning/test_script_tuning.py::test_memory_may_run_out_later",
    "tests/tuning/test_script_tuning.py::test_python_takes_the_words_of_a_command",
    "tests/tuning/test_tuning_trials.py::test_a_ghost_card_runs_out_and_the_trial_survives[fits",
    "tests/tuning/test_tuning_trials.py::test_memory_that_runs_out_late_on_the_last_rank_is_the_verdict[backward",
    "tests/tuning/test_tuning_trials.py::test_memory_that_runs_out_late_on_the_last_rank_is_the_verdict[evaluation-2",
    "tests/tuning/test_tuning_trials.py::test_memory_that_runs_out_late_on_the_last_rank_is_the_verdict[save",
    "tests/workers/test_worker.py::test_closing_twice_is_closing",
    "tests/workers/test_worker.py::test_many_jobs_leave_nothing_behind",
)
"""Tests of 2 to 60 s whose neighbours ask nearly the same; others are marked `long` in their files."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that daily work can do without, and skip those that take long for little."""
    runs_long = bool(os.environ.get("TONNAGE_TEST_LONG"))
    for item in items:
        if item.nodeid.startswith(LONG):
            item.add_marker(pytest.mark.long)
        if item.get_closest_marker("long") and not runs_long:
            item.add_marker(pytest.mark.skip(reason="takes long; TONNAGE_TEST_LONG=1 runs it"))
        needs_ghost = not set(SLOW).isdisjoint(getattr(item, "fixturenames", ()))
        if needs_ghost or (
            item.path.is_relative_to(HERE) and str(item.path.relative_to(HERE)).startswith(SLOW_FILES)
        ):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session", autouse=True)
def _own_shelf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What this process estimates is run, not remembered from an earlier session."""
    folder = tmp_path_factory.mktemp("shelf")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "folder", lambda: folder)
        patch.setattr(history, "file", lambda: folder / "history.sqlite")
        yield


@pytest.fixture(scope="session")
def torch_build() -> Torch:
    """The CUDA build of torch; skips where a ghost cannot run, and only there."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        pytest.skip("a ghost needs Linux on x86-64")
    try:
        found = wheel.find(sys.executable)
    except GhostUnavailable as reason:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(reason))
    ghost_environment.libraries(found.cuda_major)  # raises with the command that builds them
    return found


@pytest.fixture(scope="session")
def worker(torch_build: Torch) -> Iterator[Worker]:
    """One warm worker for all estimates of this process of pytest's; it costs five seconds to start one."""
    with Worker() as warm:
        yield warm
