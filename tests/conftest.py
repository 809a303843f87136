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
    "test_a_missing_package_is_named": r"words0|words4",
    "test_a_command_outside_of_its_environment_says_so": r"train|average",
    "test_an_old_python_is_told_in_one_sentence": r"3, 8",
    "test_training_masks_by_default_under_every_strategy": r"fsdp2",
    "test_no_export_leaves_it_out": None,
    "test_a_killed_run_goes_on_to_the_same_bits": None,
    "test_the_demo_runs_on_several_devices": None,
    "test_a_resumed_run_is_the_undisturbed_run": r"auto-1-gpt2-bf16-true-sharded|fsdp2-2-llama-tied-bf16-true-full",
    "test_is_the_plain_average": r"sharded.*inverse_sqrt",
    "test_files_have_a_largest_size_and_another_dtype": r"sharded",
    "test_is_the_plain_average_over_the_steps": r"2-fsdp-llama-32-true-FULL",
    "test_a_resumed_average_is_the_undisturbed_one": None,
    "test_export_of_the_average": r"sharded",
    "test_decay_0_is_the_model_itself": r"same",
    "test_transformers_gives_the_logits_of_the_model_in_training": r"\[(fsdp-32-true-full-llama-tied|fsdp2-bf16-true-sharded-gpt2)",
    "test_the_curve_goes_on_with_another_number_of_ranks": r"4-fsdp2-full",
    "test_a_signal_to_one_rank_stops_all_after_a_save_and_nothing_is_lost": r"fsdp2-2-15",
    "test_parameters_and_buffers_equal_the_reference": r"(fsdp-2-size:5000|fsdp2-3-none|auto-1-auto)-gpt2-bf16-true",
    "test_memory_of_a_rank_is_what_the_plan_said": r"small-(single-none|ddp-full|fsdp-selective|fsdp2-every)",
    "test_ranks_that_share_rows": r"small-none",
    "test_changes_go_on_to_four_fifths_where_that_is_reached": None,
    "test_checkpoint_resume_and_export_carry_them": r"fsdp2-2",
    "test_a_flag_that_is_added_belongs_to_the_run": None,
    "test_auto_finds_the_shortest_step_below_four_fifths": None,
    "test_auto_has_a_bound_and_says_that_nothing_fits": None,
    "test_a_run_asks_what_to_recompute": None,
    "test_the_command_that_a_forgetting_run_names_next_finds_the_best_point_inside": None,
    "test_mlps_in_tiles": r"single-wide",
    "test_killed_runs_go_on_with_any_number_that_shares": None,
    "test_a_rewind_loads_into_the_model_that_is_there": r"fsdp2",
    "test_a_row_is_the_plan_of_its_devices": r"fsdp\]",
    "test_loss_and_gradients_are_equal_to_rounding": r"(llama-lengths[0136]|mixtral).*2\]|lengths5-4\]",
    "test_windows_in_a_long_document_make_no_mask_of_the_document": r"3\]|30\]",
    "test_other_flags_and_precisions": None,
    "test_flags_of_sharding": None,
    "test_other_families": None,
    "test_the_profiler_counts_the_same": None,
    "test_resume_falls_back_to_the_newest_whole_checkpoint": r"flip-model",
    "test_flags_do_not_change_the_result": r"fsdp-2.*NO_SHARD|fsdp2-2.*wrap_policy none",
    "test_tasks_of_srun_are_the_ranks": None,
    "test_families_that_once_were_refused_start_with_defaults": None,
    "test_random_weights_start_under_fsdp_and_go_on": None,
    "test_buffers_have_the_dtypes_that_the_reference_gives_them": r"gemma3",
    "test_auto_is_off_with_one_warning_where_it_can_not": r"mamba-2",
    "test_a_resumed_run_keeps_what_it_had": r"auto-llama",
    "test_a_request_to_stop_is_heard_inside_an_evaluation_and_the_evaluation_is_made_up": None,
    "test_resume_is_bit_for_bit": r"stochastic-(single|fsdp2)",
    "test_checkpoints_keep_every_bit_on_other_ranks": None,
    "test_a_bad_micro_batch_on_one_rank_changes_no_parameter_on_any": r"auto-1-nan|fsdp-2-nan|fsdp2-2-inf",
    "test_a_spike_rewinds_to_the_last_checkpoint_and_past_its_data": r"fsdp-2",
    "test_a_rewind_passes_over_a_damaged_checkpoint": None,
    "test_a_rewind_drops_model_and_optimizer_before_it_builds_them_anew": r"auto",
    "test_a_rewind_that_was_cut_off_is_made_again_and_told_once": None,
    "test_float32_sums_give_the_same_run_at_any_number_of_micro_batches": None,
    "test_optimizer_state_of_any_strategy_loads_on_one_device": r"gpt2.*fsdp2",
    "test_hostile_text_is_refused_at_once": r"config: (aliases|in a mixture)|report",
    "test_a_hostile_model_or_tokenizer_is_refused_at_once": r"rope|prepare_data.*number",
    "test_a_regular_expression_that_takes_too_long_is_told_in_one_sentence": None,
    "test_attack": r"is_a_link|pickle_as|code_for_the_model|outside",
    "test_micro_batches_and_ranks_are_one_big_batch": r"(auto-1-2|fsdp2-2-2)-gpt2|(auto-1-2|fsdp-2-1)-mixtral",
    "test_the_first_module_that_differs_is_named": r"(embed_tokens|q_proj).*fsdp2",
    "test_a_good_start_passes_and_says_so": r"fsdp2",
    "test_too_many_in_a_row_end_the_run_and_leave_the_last_good_checkpoint": r"auto",
    "test_eval_iters_far_beyond_the_split_evaluate_the_split_once": None,
    "test_a_second_signal_ends_at_once_without_a_save": r"fsdp",
    "test_the_defaults_are_fast_and_pass": r"(auto-1|fsdp-2)-bf16-true",
    "test_a_fast_path_that_is_another_model_is_refused": r"fsdp-2",
    "test_a_run_on_fast_paths_is_the_run_on_plain_ones": r"auto|fsdp2",
    "test_a_mistake_that_only_the_weights_show_ends_all_processes": None,
    "test_one_compilation_serves_all_layers": None,
    "test_ddp_holds_the_parameters_of_the_model_and_two_moments": None,
    "test_train_py_says_it": None,
    "test_a_stop_is_heard_while_a_rank_waits_for_the_others": None,
    "test_a_port_that_is_in_use_is_named_and_no_lost_peer": r"hand",
    "test_ranks_of_one_machine_meet_at_a_port_of_their_own": None,
    "test_a_run_stops_by_itself_after_max_hours_and_goes_on_for_as_long": None,
    "test_reduce_dtype_is_used": None,
    "test_killed_preparation_leaves_no_dataset_and_the_next_one_sweeps": None,
    "test_what_is_changed_trains_is_killed_resumes_verifies_and_exports": None,
    "test_a_drill_of_a_run_that_cannot_start": None,
    "test_sharded_rows_hold_half_and_whole_rows_hold_all": None,
    "test_each_entry_has_a_test": None,
    "test_losses_agree_and_fall": None,
    "test_the_table_has_a_line_for_each_row": None,
    "test_another_loss_is_an_error": None,
    "test_a_failed_row_is_an_error_and_stays_in_the_table": None,
    "test_a_storage_counts_once_and_whole": None,
    "test_a_resumed_run_does_not_record_again": None,
    "test_a_run_that_ends_first_writes_what_it_has": None,
    "test_rows_of_a_run_that_was_killed_resumed_branched_and_stopped_are_as_claimed": None,
    "test_every_swap_of_two_tensors_is_caught_twice": None,
    "test_wandb_takes_the_steps_of_a_run_that_went_back": None,
    "test_steps_are_traced_by_rank_0_alone": None,
    "test_a_spike_is_warned_of_or_skipped": r"skip-False",
    "test_samples_are_those_of_plain_transformers_and_change_nothing": r"fsdp2",
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
    "test_a_base_of_other_rows_is_refused": r"rows",
    "test_a_stop_before_the_base_was_measured_leaves_it_to_the_resumed_run": r"auto",
    "test_a_budget_of_a_set_without_a_base_is_refused": r"general",
    "test_a_stop_in_the_step_of_a_rewind_to_the_beginning_keeps_the_raised_share": None,
    "test_a_run_that_is_back_at_its_beginning_and_killed_goes_on_from_there": None,
    "test_a_rewind_goes_where_a_run_that_was_not_stopped_would": None,
    "test_a_run_that_goes_back_is_the_same_however_interrupted": r"\[(1|9)\]",
    "test_a_stop_in_the_step_of_a_rewind_reads_no_row_twice": None,
    "test_a_branch_that_is_stopped_before_its_first_step_is_named_as_it_is": None,
    "test_a_run_that_has_forgotten_too_much_says_how_to_go_on": None,
    "test_a_run_that_went_back_too_often_says_how_to_go_on": None,
    "test_evaluation_is_plain_cross_entropy_whatever_trains": r"chunked",
    "test_a_pod_that_is_preempted_saves_and_the_next_one_goes_on": None,
    "test_a_mistake_is_not_restarted": None,
    "test_a_preset_fits_the_machine_that_it_names": r"gpt2|llama3.2_1b|llama3_8b",
    "test_a_preset_trains_at_toy_size": r"gemma3|llama3.2_1b|llama3_8b",
}


def pytest_configure(config: pytest.Config) -> None:
    """The tests are of processes on CPUs, also on a machine with a GPU: `--accelerator auto` would take it."""
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU, and to be asked for with -m gpu alone"))
        name = item.name.partition("[")[0]
        if name in QUICK and not (QUICK[name] and re.search(QUICK[name], item.name)):
            item.add_marker("longer")


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
