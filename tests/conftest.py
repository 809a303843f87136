"""Toy models and data, made once: real transformers models, real dataset folders, no network."""

from __future__ import annotations

import json
import logging
import os
import re

for name in ("torchao", "torch.utils._pytree"):  # as each program does, see plain_output
    logging.getLogger(name).setLevel(logging.ERROR)
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["WANDB_MODE"] = "offline"
os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # as train.py does

import signal
import sys
import threading
from collections import Counter
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MixtralConfig
from transformers.utils.logging import disable_progress_bar

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import jsonargparse  # noqa: E402, F401  ranks are forked from this process: what it has imported they need not
import torch.distributed.fsdp  # noqa: E402, F401

from fabric_llm.run import supervision, verdicts  # noqa: E402, F401

# A shell starts what runs in the background with SIGINT ignored, and so would be every process that the tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)  # ranks are forked from this process: no thread pool may be there
tqdm.set_lock(threading.RLock())  # its own is shared by forked processes: killed with it, a rank would keep it for ever
disable_progress_bar()
datasets.disable_progress_bars()

VOCABULARY = 131  # odd, so that shards are uneven
CONTEXT = 24
ROWS = 44  # not a multiple of the global batch

TOY_CONFIGS = {
    "llama": LlamaConfig(
        hidden_size=32,
        intermediate_size=56,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
    ),
    "gpt2": GPT2Config(  # tied embeddings, biases, learned positions, dropout
        n_embd=32,
        n_layer=2,
        n_head=4,
        vocab_size=VOCABULARY,
        n_positions=64,
        resid_pdrop=0.1,
        embd_pdrop=0.1,
        attn_pdrop=0.1,
        bos_token_id=0,
        eos_token_id=0,
    ),
}

MIXTRAL_CONFIG = MixtralConfig(  # experts, and an auxiliary loss that is worth something
    hidden_size=32,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_local_experts=4,
    num_experts_per_tok=2,
    output_router_logits=True,
    router_aux_loss_coef=0.3,
    initializer_range=0.2,
    vocab_size=VOCABULARY,
    max_position_embeddings=64,
    bos_token_id=0,
    eos_token_id=0,
)


# Of tests with many cases, those that the README's command runs: a regular expression that finds them in the case's name. The
# others, and all cases where it is None, have the marker `longer` (docs/testing.md).
QUICK = {
    "test_the_kernel_of_packed_attention_gets_what_it_takes": r"\[(gpt2|deepseek_v3|gemma3_text)\]|heads of|192",
    "test_a_missing_package_is_named": r"words0|words4",
    "test_a_command_outside_of_its_environment_says_so": r"train|average",
    "test_an_old_python_is_told_in_one_sentence": r"3, 8",
    "test_training_masks_by_default_under_every_strategy": r"fsdp2",
    "test_no_export_leaves_it_out": None,
    "test_a_killed_run_goes_on_to_the_same_bits": None,
    "test_a_resumed_run_is_the_undisturbed_run": r"auto-1-gpt2-bf16-true-sharded",
    "test_is_the_plain_average": r"sharded.*inverse_sqrt",
    "test_files_have_a_largest_size_and_another_dtype": r"sharded",
    "test_is_the_plain_average_over_the_steps": None,
    "test_a_resumed_average_is_the_undisturbed_one": None,
    "test_export_of_the_average": r"sharded",
    "test_decay_0_is_the_model_itself": r"same",
    "test_transformers_gives_the_logits_of_the_model_in_training": r"\[(fsdp-32-true-full-llama-tied|fsdp2-bf16-true-sharded-gpt2)",
    "test_the_curve_goes_on_with_another_number_of_ranks": r"4-fsdp2-full",
    "test_a_signal_to_one_rank_stops_all_after_a_save_and_nothing_is_lost": r"fsdp2-2-15",
    "test_parameters_and_buffers_equal_the_reference": r"(fsdp-2-size:5000|fsdp2-3-none|auto-1-auto)-gpt2-bf16-true",
    "test_memory_of_a_rank_is_what_the_plan_said": r"small-single-none",
    "test_ranks_that_share_rows": None,
    "test_changes_go_on_to_four_fifths_where_that_is_reached": None,
    "test_checkpoint_resume_and_export_carry_them": None,
    "test_a_flag_that_is_added_belongs_to_the_run": None,
    "test_auto_finds_the_shortest_step_below_four_fifths": None,
    "test_auto_has_a_bound_and_says_that_nothing_fits": None,
    "test_a_run_asks_what_to_recompute": None,
    "test_the_command_that_a_forgetting_run_names_next_finds_the_best_point_inside": None,
    "test_mlps_in_tiles": None,
    "test_killed_runs_go_on_with_any_number_that_shares": None,
    "test_a_rewind_loads_into_the_model_that_is_there": None,
    "test_a_row_is_the_plan_of_its_devices": None,
    "test_loss_and_gradients_are_equal_to_rounding": r"(llama-lengths[0136]|mixtral).*2\]|lengths5-4\]",
    "test_windows_in_a_long_document_make_no_mask_of_the_document": r"3\]|30\]",
    "test_other_flags_and_precisions": None,
    "test_flags_of_sharding": None,
    "test_other_families": None,
    "test_the_profiler_counts_the_same": None,
    "test_resume_falls_back_to_the_newest_whole_checkpoint": None,
    "test_flags_do_not_change_the_result": r"fsdp2-2.*wrap_policy none",
    "test_tasks_of_srun_are_the_ranks": None,
    "test_families_that_once_were_refused_start_with_defaults": None,
    "test_random_weights_start_under_fsdp_and_go_on": None,
    "test_buffers_have_the_dtypes_that_the_reference_gives_them": None,
    "test_auto_is_off_with_one_warning_where_it_can_not": None,
    "test_a_resumed_run_keeps_what_it_had": r"auto-llama",
    "test_a_request_to_stop_is_heard_inside_an_evaluation_and_the_evaluation_is_made_up": None,
    "test_resume_is_bit_for_bit": r"stochastic-(single|fsdp2)",
    "test_checkpoints_keep_every_bit_on_other_ranks": None,
    "test_a_bad_micro_batch_on_one_rank_changes_no_parameter_on_any": r"auto-1-nan|fsdp2-2-inf",
    "test_a_spike_rewinds_to_the_last_checkpoint_and_past_its_data": r"fsdp-2",
    "test_a_rewind_passes_over_a_damaged_checkpoint": None,
    "test_a_rewind_drops_model_and_optimizer_before_it_builds_them_anew": r"auto",
    "test_a_rewind_that_was_cut_off_is_made_again_and_told_once": None,
    "test_float32_sums_give_the_same_run_at_any_number_of_micro_batches": None,
    "test_optimizer_state_of_any_strategy_loads_on_one_device": None,
    "test_hostile_text_is_refused_at_once": r"config: (aliases|in a mixture)|report",
    "test_a_hostile_model_or_tokenizer_is_refused_at_once": r"rope|prepare_data.*number",
    "test_a_regular_expression_that_takes_too_long_is_told_in_one_sentence": None,
    "test_attack": r"is_a_link|pickle_as|code_for_the_model|outside",
    "test_micro_batches_and_ranks_are_one_big_batch": r"fsdp2-2-2-gpt2|auto-1-2-mixtral",
    "test_the_first_module_that_differs_is_named": r"(embed_tokens|q_proj).*fsdp2",
    "test_a_good_start_passes_and_says_so": r"fsdp2-2-bf16-true",
    "test_too_many_in_a_row_end_the_run_and_leave_the_last_good_checkpoint": None,
    "test_eval_iters_far_beyond_the_split_evaluate_the_split_once": None,
    "test_a_second_signal_ends_at_once_without_a_save": None,
    "test_the_defaults_are_fast_and_pass": r"(auto-1|fsdp-2)-bf16-true",
    "test_a_fast_path_that_is_another_model_is_refused": None,
    "test_a_run_on_fast_paths_is_the_run_on_plain_ones": r"auto",
    "test_a_mistake_that_only_the_weights_show_ends_all_processes": None,
    "test_one_compilation_serves_all_layers": None,
    "test_train_py_says_it": None,
    "test_a_stop_is_heard_while_a_rank_waits_for_the_others": None,
    "test_a_port_that_is_in_use_is_named_and_no_lost_peer": r"hand",
    "test_ranks_of_one_machine_meet_at_a_port_of_their_own": None,
    "test_a_run_stops_by_itself_after_max_hours_and_goes_on_for_as_long": None,
    "test_reduce_dtype_is_used": None,
    "test_killed_preparation_leaves_no_dataset_and_the_next_one_sweeps": None,
    "test_what_is_changed_trains_is_killed_resumes_verifies_and_exports": None,
    "test_a_drill_of_a_run_that_cannot_start": None,
    "test_each_entry_has_a_test": None,
    "test_a_resumed_run_does_not_record_again": None,
    "test_a_run_that_ends_first_writes_what_it_has": None,
    "test_rows_of_a_run_that_was_killed_resumed_branched_and_stopped_are_as_claimed": None,
    "test_every_swap_of_two_tensors_is_caught_twice": None,
    "test_wandb_takes_the_steps_of_a_run_that_went_back": None,
    "test_steps_are_traced_by_rank_0_alone": None,
    "test_a_spike_is_warned_of_or_skipped": r"skip-False",
    "test_samples_are_those_of_plain_transformers_and_change_nothing": None,
    "test_a_page_of_half_a_million_lines_stays_small": None,
    "test_from_any_folder": None,
    "test_wandb_without_key_or_server_logs_offline_with_one_warning": None,
    "test_tokenizer_training_is_deterministic_over_processes": None,
    "test_a_batch_script_without_srun_starts_its_own_ranks": None,
    "test_a_run_that_would_forget_is_stopped_with_a_saved_checkpoint": None,
    "test_rewind_goes_on_with_more_replay_and_ends_inside_the_budget": None,
    "test_the_best_checkpoints_follow_the_set_that_is_named": None,
    "test_what_is_frozen_keeps_every_bit_and_a_run_goes_on_to_the_same": r"fsdp2-2-gpt2",
    "test_own_text_and_own_model_from_text_to_hugging_face": None,
    "test_a_dataset_of_samples_trains": None,
    "test_verify_finds_a_run_whose_rows_were_not_read_as_claimed": None,
    "test_a_run_of_epochs_that_went_back_resumes_on_the_same_schedule": None,
    "test_a_run_of_an_older_version_goes_on_in_its_order": None,
    "test_a_run_of_a_few_seconds_stops_by_itself": None,
    "test_a_signal_that_is_delivered_twice_is_one": None,
    "test_it_opens_in_a_browser": None,
    "test_rounding_is_the_same_on_any_ranks": r"fsdp2-4|fsdp-3",
    "test_what_a_matching_manifest_hides_in_full_weights": r"lose",
    "test_bf16_mixed_keeps_float32_weights": r"fsdp2",
    "test_a_healthy_run_passes_and_gets_a_certificate": r"full",
    "test_the_part_of_weights_that_changes_is_the_same_on_any_ranks": None,
    "test_it_is_trained_as_the_configuration_or_the_flag_says_and_logged_by_itself": None,
    "test_rounding_goes_on_on_other_ranks": r"fsdp-single",
    "test_a_branch_decays_to_min_lr_and_is_stopped_and_resumed_bit_for_bit": None,
    "test_it_opens_in_a_browser_without_errors_and_without_the_network": None,
    "test_what_cannot_be_written_is_a_warning": None,
    "test_generation_config_is_that_of_the_model_it_started_from": None,
    "test_weights_in_several_files_with_an_index": None,
    "test_two_ranks_then_one_then_four_read_the_same_rows": None,
    "test_the_demo_runs_says_what_it_is_and_what_comes_next": None,
    "test_sets_are_evaluated_by_name_before_step_1_and_alike_on_any_ranks": None,
    "test_a_restart_of_the_same_command_goes_on": None,
    "test_a_base_of_other_rows_is_refused": None,
    "test_a_stop_before_the_base_was_measured_leaves_it_to_the_resumed_run": None,
    "test_a_budget_of_a_set_without_a_base_is_refused": None,
    "test_a_stop_in_the_step_of_a_rewind_to_the_beginning_keeps_the_raised_share": None,
    "test_a_run_that_is_back_at_its_beginning_and_killed_goes_on_from_there": None,
    "test_a_rewind_goes_where_a_run_that_was_not_stopped_would": None,
    "test_a_run_that_goes_back_is_the_same_however_interrupted": None,
    "test_a_stop_in_the_step_of_a_rewind_reads_no_row_twice": None,
    "test_a_branch_that_is_stopped_before_its_first_step_is_named_as_it_is": None,
    "test_a_run_that_has_forgotten_too_much_says_how_to_go_on": None,
    "test_a_run_that_went_back_too_often_says_how_to_go_on": None,
    "test_evaluation_is_plain_cross_entropy_whatever_trains": None,
    "test_a_pod_that_is_preempted_saves_and_the_next_one_goes_on": None,
    "test_a_mistake_is_not_restarted": None,
    "test_a_preset_fits_the_machine_that_it_names": r"gpt2|llama3.2_1b",
    "test_a_preset_trains_at_toy_size": r"gemma3|llama3.2_1b",
    "test_families_share_rows": None,
    "test_the_numbers_are_those_of_one_process": r"\[fsdp2-2-2",
    "test_a_mixture_is_shared_and_a_resume_with_as_many_is_the_same_run_bit_for_bit": None,
    "test_a_run_goes_on_with_any_number_that_shares": None,
    "test_rows_of_one_document_are_shared_as_well": None,
    "test_remedies_of_a_large_model_take_few_layers": None,
    "test_auto_recomputes_the_least_that_fits": None,
    "test_train_says_what_is_planned_and_what_came_of_it": None,
    "test_what_waits_on_the_host_is_planned_there": None,
    "test_more_devices_keep_the_batch": None,
    "test_what_a_source_counts_is_what_is_compared": None,
    "test_what_no_family_has": r"bert|alibi|longrope",
    "test_a_few_layers_say_what_all_say": r"llama-words1",
    "test_a_family_that_was_a_traceback": r"bloom",
    "test_the_loss_by_position_is_that_of_the_tokens_there": r"packed-2-more2|rows-1-more0",
    "test_nothing_is_compiled_again_after_the_second_step": r"sdpa",
    "test_layers_are_compiled_for_the_shape_they_train_whatever_came_before": r"sdpa",
    "test_recomputed_layers_are_compiled_as_a_whole": r"full-alone",
    "test_a_run_goes_on_bit_for_bit_and_is_the_model_that_is_published": r"\[auto-1",
    "test_a_stop_during_import": r"words0-(arguments|datasets)|words1-jsonargparse",
    "test_a_run_is_the_run_without": r"1-more0|2-more3",
    "test_each_checkpoint_goes_to_wandb_beside_another_tracker": None,
    "test_metrics_that_are_not_one_whole_curve": None,
    "test_the_knee_lies_between_and_is_evaluated": None,
    "test_a_reader_that_has_seen_enough_ends_it_without_a_word": None,
    "test_any_ranks_and_paths_measure_the_same": r"2-more1",
    "test_many_runs_stay_small": None,
    "test_a_wrong_cut_is_found_before_step_1": r"bf16",
    "test_parameters_that_stay_float32_in_a_bfloat16_model": r"fsdp2-ernie",
    "test_a_run_is_that_of_a_plain_trainer": r"packed",
    "test_help_of_a_group_shows_its_flags_alone": r"FSDP|plan",
    "test_the_short_help_has_a_line_for_each_flag_of_a_first_run": r"-80",
    "test_it_is_evaluated_in_the_middle_and_at_the_end_of_each_epoch_of_its_largest_source": None,
    "test_a_branch_of_an_infinite_schedule_decays_from_its_constant_rate": None,
    "test_weights_change_on_purpose_and_only_from_there_on": None,
    "test_where_the_network_is_slow_the_hybrid_is_faster": None,
    "test_a_float16_model_is_evaluated": None,
    "test_kills_at_named_places_change_nothing": None,
    "test_one_part_is_its_own_average": r"sharded",
    "test_a_job_that_was_suspended_for_longer_than_the_time_out_goes_on": None,
    "test_a_resume_in_the_same_process_leaves_no_second_model": None,
    "test_a_resumed_run_samples_what_it_makes_anew_and_events_keep_all": None,
    "test_what_trains_changes_on_purpose_only": None,
    "test_plain_transformers_opens_it": r"tied|sharded",
    "test_random_weights_are_the_same_bits_on_any_ranks_and_strategy": None,
    "test_bad_sizes_and_outputs": None,
    "test_twenty_steps_with_accumulation_four_equal_a_plain_loop": r"llama",
    "test_a_warning_says_how_much_was_forgotten_and_the_run_goes_on": None,
    "test_a_stop_while_the_ranks_start_ends_them_all": None,
    "test_rows_of_any_length_are_planned": None,
    "test_every_device_keeps_its_part_of_the_batch": None,
    "test_losses_of_the_parts_are_those_of_the_run": None,
    "test_learning_rate_sources_checkpoints_and_evaluations_are_those_of_the_run": None,
    "test_a_run_that_gave_only_accumulation_goes_on_on_more_devices": None,
    "test_losses_of_other_weights_are_not_said_to_be_its_own": None,
    "test_what_a_checkpoint_has_begun_with_goes_on_in_later_runs": None,
    "test_the_loss_is_about_that_of_all_rows": None,
    "test_it_runs_from_the_shell": None,
    "test_the_speed_of_a_run": None,
    "test_a_preset_alone_is_planned": None,
    "test_steps_of_epochs_and_kept_checkpoints": None,
    "test_a_mixture_says_its_rows_and_its_steps": None,
    "test_a_step_takes_the_time_to_tell_a_device_what_to_do": None,
    "test_the_peak_of_a_device_is_of_what_is_not_offloaded": None,
    "test_it_starts_from_the_shell": None,
    "test_what_is_printed_and_drawn": None,
    "test_a_run_inside_its_budget_is_taken_and_said_to_be_no_worse": None,
    "test_a_rewind_without_a_checkpoint_ends_the_run": None,
    "test_whoever_asked_to_stop_does_not_wait_for_an_evaluation": None,
    "test_an_offline_run_says_how_it_is_sent": None,
}


# Tests of many families or combinations of values that take long: every eighth case is `longer`, the others are `slow`.
SPREAD = (
    "test_a_family_trains_resumes_and_exports_on_one_device_and_two",
    "test_a_good_start_passes_and_says_so",
    "test_a_preset_trains_at_toy_size",
    "test_a_resumed_average_is_the_undisturbed_one",
    "test_a_resumed_run_is_the_undisturbed_run",
    "test_a_run_goes_on_bit_for_bit_and_is_the_model_that_is_published",
    "test_a_run_that_goes_back_is_the_same_however_interrupted",
    "test_a_signal_to_one_rank_stops_all_after_a_save_and_nothing_is_lost",
    "test_any_family_is_planned",
    "test_documents_of_the_inputs_are_those_of_the_splits_and_those_counted",
    "test_families_share_rows",
    "test_flags_do_not_change_the_result",
    "test_flags_of_sharding",
    "test_is_the_plain_average_over_the_steps",
    "test_loss_and_gradients_are_equal_to_rounding",
    "test_memory_of_a_rank_is_what_the_plan_said",
    "test_micro_batches_and_ranks_are_one_big_batch",
    "test_mlps_in_tiles",
    "test_optimizer_state_of_any_strategy_loads_on_one_device",
    "test_other_families",
    "test_other_flags_and_precisions",
    "test_other_paths_share_rows",
    "test_other_precisions_round_alike",
    "test_parameters_and_buffers_equal_the_reference",
    "test_ranks_that_share_rows",
    "test_resume_falls_back_to_the_newest_whole_checkpoint",
    "test_resume_is_bit_for_bit",
    "test_rows_of_any_flags_agree_with_a_plain_trainer",
    "test_the_curve_goes_on_with_another_number_of_ranks",
    "test_the_defaults_are_fast_and_pass",
    "test_the_first_module_that_differs_is_named",
    "test_transformers_gives_the_logits_of_the_model_in_training",
    "test_what_has_no_part_in_the_loss_stays",
    "test_what_is_changed_trains_is_killed_resumes_verifies_and_exports",
    "test_what_is_frozen_keeps_every_bit_and_a_run_goes_on_to_the_same",
    "test_what_no_family_has",
)
PART = 8


def pytest_configure(config: pytest.Config) -> None:
    """The tests are of processes on CPUs, also on a machine with a GPU: `--accelerator auto` would take it."""
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    cases: Counter[str] = Counter()
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU, and to be asked for with -m gpu alone"))
        name = item.name.partition("[")[0]
        if name in QUICK and not (QUICK[name] and re.search(QUICK[name], item.name)):
            item.add_marker("longer")
        if name in SPREAD and any(map(item.get_closest_marker, ("longer", "families"))):
            cases[name] += 1
            if (cases[name] + SPREAD.index(name)) % PART:
                item.add_marker("slow")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--families_table", type=Path, help="with -m families: the file to write what they gave to")


@pytest.fixture(scope="session")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models llama, gpt2, mixtral, llama-tied, gpt2-no-dropout and datasets `data`, `ragged` and `many`."""
    folder = tmp_path_factory.mktemp("toys")
    configs = {**TOY_CONFIGS}
    configs["llama-tied"] = LlamaConfig(**{**configs["llama"].to_dict(), "tie_word_embeddings": True})
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    configs["gpt2-no-dropout"] = GPT2Config(**{**configs["gpt2"].to_dict(), **no_dropout})
    configs["mixtral"] = MIXTRAL_CONFIG  # the last: each has the seed of its place
    for seed, (name, config) in enumerate(configs.items()):
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
    generator = np.random.default_rng(0)
    make_dataset(folder / "data", generator)
    make_dataset(folder / "ragged", generator, ragged=True)
    make_dataset(folder / "many", generator, rows=3200, validation_rows=256)
    return folder


def make_dataset(
    folder: Path, generator: np.random.Generator, ragged: bool = False, rows: int = ROWS, validation_rows: int = 10
) -> None:
    """Token sequences with something to learn; `ragged`: with labels of which a different part is masked in each row."""

    def split(count: int) -> datasets.Dataset:
        tokens = generator.integers(0, VOCABULARY, (count, CONTEXT))
        tokens[:, 1::2] = (tokens[:, ::2] * 7 + 3) % VOCABULARY
        columns = {"input_ids": tokens.tolist()}
        if ragged:
            labels = tokens.copy()
            for row in labels:
                row[generator.random(CONTEXT) < generator.random()] = -100
            labels[0] = -100  # one row without any target
            columns["labels"] = labels.tolist()
        return datasets.Dataset.from_dict(columns)

    datasets.DatasetDict({"train": split(rows), "validation": split(validation_rows)}).save_to_disk(str(folder))


END = 0  # the token that ends a document


def documents(lengths: list[int], seed: int) -> list[list[int]]:
    """Token lists of these lengths, each ending with END."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, VOCABULARY, (n - 1,), generator=generator).tolist() + [END] for n in lengths]


@pytest.fixture(scope="session")
def packed_data(tmp_path_factory) -> Path:
    """A dataset of packed documents of 7 tokens, with prepare_data.py's manifest."""
    folder = tmp_path_factory.mktemp("packed") / "data"

    def split(rows: int, seed: int) -> datasets.Dataset:
        tokens = [t for d in documents([7] * (rows * CONTEXT // 7 + 1), seed) for t in d][: rows * CONTEXT]
        return datasets.Dataset.from_dict({"input_ids": torch.tensor(tokens).view(rows, CONTEXT).tolist()})

    datasets.DatasetDict({"train": split(40, 1), "validation": split(8, 2)}).save_to_disk(str(folder))
    manifest = {"packed": True, "context_length": CONTEXT, "max_token_id": VOCABULARY - 1, "eos_token_id": END}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder
