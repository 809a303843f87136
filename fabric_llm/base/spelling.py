"""Suggest what a user meant by an unknown flag, value or name: a typo, or the word of another trainer.

A wrong suggestion is worse than none. A name may therefore differ by one typo for every five of its letters: a letter that is
missing, added or changed, or two letters that are swapped. Names of two letters must be right (`--tp` isn't `--tpu`). The
ratio of `difflib`, which counts letters in common, takes `sharding_strategy` for a match of `learning_rat`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

LETTERS_OF_A_SLIP = 5
# The names of train.py's flags in other trainers: transformers' Trainer and TRL, Lightning and litgpt, torchtitan, axolotl,
# NeMo Automodel and Megatron, LLaMA-Factory, nanoGPT.
_ELSEWHERE = """
lr: learning_rate max_lr peak_lr base_lr lr_rate
min_lr: lr_min minimum_lr min_learning_rate eta_min
number_epochs: num_train_epochs num_epochs epochs max_epochs n_epochs epoch
max_hours: max_time max_duration time_limit max_train_hours
max_step: max_steps train_iters steps max_iters training_steps total_steps num_train_steps num_training_steps
max_step: max_train_steps train_steps
micro_batch_size: per_device_train_batch_size batch_size local_batch_size train_micro_batch_size_per_gpu
micro_batch_size: device_batch_size train_batch_size mbs
gradient_accumulation_steps: gradient_accumulation grad_accumulation_steps grad_accum accumulate_grad_batches
gradient_accumulation_steps: grad_acc_steps accumulation_steps grad_accum_steps gradient_accumulation_iters
global_batch_size: total_batch_size effective_batch_size gbs
eval_batch_size: per_device_eval_batch_size val_batch_size validation_batch_size
model_name: model model_name_or_path base_model checkpoint_dir pretrained_model model_id model_path
model_name: pretrained_model_name_or_path init_from hf_model
train_data_dir: data dataset dataset_name train_file data_path data_dir dataset_path train_data dataset_dir
train_data_dir: train_dataset datasets
data_mix: data_mixture dataset_mix data_blend blend mixture mixture_config dataset_probs dataset_weights
context_length: max_seq_length seq_length seq_len sequence_len block_size max_length cutoff_len max_seq_len
context_length: sequence_length model_max_length
grad_clip: max_grad_norm gradient_clip_val max_norm clip_grad gradient_clipping grad_clip_norm clip_grad_norm
grad_clip: max_norm_clip
lr_schedule: lr_scheduler lr_scheduler_type scheduler decay_type lr_decay_style
lr_decay: decay_lr
warmup_steps: warmup warmup_iters num_warmup_steps lr_warmup_steps lr_warmup_iters
weight_decay: wd adam_weight_decay
save_step_interval: save_steps save_interval save_every ckpt_every_steps checkpoint_interval checkpointing_steps
save_step_interval: save_every_steps every_n_train_steps
eval_step_interval: eval_steps eval_interval eval_every val_interval val_check_interval val_every_steps
eval_step_interval: validation_interval eval_freq
eval_iters: max_eval_samples limit_val_batches max_eval_steps val_iters
log_step_interval: logging_steps log_interval log_every_n_steps log_freq log_every
keep_last: save_total_limit save_top_k keep_latest_k keep_checkpoints
activation_checkpointing: gradient_checkpointing recompute_activations use_gradient_checkpointing grad_checkpointing
compile: torch_compile use_compile compile_model
attention: attn_implementation attn attn_impl flash_attn flash_attention use_flash_attention_2 use_flash_attn
attention: sdp_attention
checkpoint: resume_from_checkpoint ckpt_path resume_from load_checkpoint
resume: auto_resume auto_resume_from_checkpoints
precision: dtype torch_dtype mixed_precision compute_dtype param_dtype mixed_precision_param training_dtype
reduce_dtype: mixed_precision_reduce
logger: report_to logger_name tracker log_with use_wandb wandb wandb_mode enable_wandb
project: wandb_project wandb_project_name
entity: wandb_entity
log_model: wandb_log_model
run_name: wandb_run_name wandb_name name exp_name experiment_name run_id
output_dir: out_dir save_dir save_folder output dump_folder default_root_dir
devices: nproc_per_node gpus num_processes num_gpus n_gpus ngpus num_devices nproc world_size gpus_per_node
num_nodes: nnodes nodes num_machines
accelerator: device device_type
beta1: adam_beta1
beta2: adam_beta2
seed: random_seed manual_seed data_seed
freeze: freeze_layers frozen_layers frozen_parameters freeze_parameters
train_only: unfrozen_parameters trainable_parameters trainable_modules freeze_trainable_modules
num_workers: dataloader_num_workers workers dataset_num_proc
sharding_strategy: fsdp_sharding_strategy sharding shard_strategy
auto_wrap_policy: fsdp_auto_wrap_policy wrap_policy fsdp_transformer_layer_cls_to_wrap transformer_layer_cls_to_wrap
auto_wrap_policy: auto_wrap
cpu_offload: fsdp_offload_params offload_params offload enable_cpu_offload
state_dict_type: fsdp_state_dict_type checkpoint_type
backward_prefetch: fsdp_backward_prefetch
strategy: distributed_backend dist_strategy parallelism fsdp_version
async_save: async_checkpointing async_mode async_checkpoint
hang_timeout: timeout ddp_timeout nccl_timeout
"""
ELSEWHERE = {
    other: ours
    for ours, others in (line.split(": ") for line in _ELSEWHERE.split("\n")[1:-1])
    for other in others.split()
}
# Flags of other trainers that have no equivalent, and what to do instead.
NOT_HERE = {
    **dict.fromkeys(("bf16", "use_bf16", "bfloat16"), "take --precision bf16-true, or bf16-mixed"),
    **dict.fromkeys(("fp16", "use_fp16", "half", "amp"), "take --precision 16-mixed (on a GPU), or bf16-mixed"),
    **dict.fromkeys(("fp32", "float32"), "take --precision 32-true"),
    **dict.fromkeys(("tf32",), "matrix products are left as PyTorch has them"),
    **dict.fromkeys(("fsdp", "fsdp_config", "use_fsdp"), "take --strategy fsdp or fsdp2; the flags of FSDP are in --help"),
    **dict.fromkeys(("ddp", "use_ddp"), "take --strategy ddp"),
    **dict.fromkeys(("deepspeed", "deepspeed_config", "zero_stage", "zero"), "take --strategy fsdp or fsdp2, which shards as ZeRO-3 does"),
    **dict.fromkeys(("warmup_ratio", "warmup_proportion"), "take --warmup_steps, a number of steps"),
    **dict.fromkeys(("optim", "optimizer", "optimizer_name"), "the optimizer is AdamW; see --bf16_updates and --beta1"),
    **dict.fromkeys(("trust_remote_code",), "code that comes with a model is never run"),
    **dict.fromkeys(("token", "hf_token", "use_auth_token", "access_token"), "set HF_TOKEN, or log in with `hf auth login`"),
    **dict.fromkeys(("tokenizer", "tokenizer_name", "tokenizer_path"), "the tokenizer goes to prepare_data.py --tokenizer"),
    **dict.fromkeys(("packing", "sample_packing", "text_column", "dataset_text_field"), "text is packed by prepare_data.py"),
    **dict.fromkeys(("validation_file", "validation_split_percentage", "val_set_size", "eval_file"), "validation is split off by prepare_data.py --validation_fraction"),
    **dict.fromkeys(("streaming",), "rows are read from the disk as they are needed"),
    **dict.fromkeys(("max_train_samples", "max_samples", "max_tokens"), "take --max_step: a step is --global_batch_size sequences"),
    **dict.fromkeys(("overwrite_output_dir", "overwrite"), "a run never overwrites another: take another --run_name"),
    **dict.fromkeys(("do_train", "do_eval", "do_predict"), "training and evaluation are what train.py does"),
    **dict.fromkeys(("push_to_hub", "hub_model_id"), "a finished run is uploaded by export_hf.py --push_to_hub"),
    **dict.fromkeys(("use_peft", "use_lora", "lora_r", "lora_alpha", "lora_rank", "lora", "adapter"), "all weights are trained, there are no adapters"),
    **dict.fromkeys(("load_in_8bit", "load_in_4bit", "quantize", "quantization"), "weights are trained in 16 or 32 bit, see --precision"),
    **dict.fromkeys(("use_liger_kernel", "liger", "fused_cross_entropy", "cut_cross_entropy"), "take --loss chunked, which makes no logits of a whole batch"),
    **dict.fromkeys(("tp", "tp_size", "tensor_parallel_size", "tensor_parallel_degree", "pp", "pp_size"), "the model is sharded by --strategy fsdp or fsdp2 alone"),
    **dict.fromkeys(("pipeline_parallel_degree", "cp", "cp_size", "context_parallel_degree", "ep"), "the model is sharded by --strategy fsdp or fsdp2 alone"),
    **dict.fromkeys(("local_rank", "rank", "node_rank", "master_addr", "master_port", "main_process_port"), "ranks and addresses come from torchrun, or from RANK, MASTER_ADDR and the like"),
    **dict.fromkeys(("gpu", "gpu_ids", "cuda", "device_ids"), "take --devices N, and CUDA_VISIBLE_DEVICES to choose which"),
    **dict.fromkeys(("no_cuda", "use_cpu", "cpu"), "take --accelerator cpu"),
    **dict.fromkeys(("eval_strategy", "evaluation_strategy"), "take --eval_step_interval, a number of steps"),
    **dict.fromkeys(("save_strategy",), "take --save_step_interval, a number of steps"),
    **dict.fromkeys(("logging_dir",), "logs go into the run directory, see --output_dir"),
    **dict.fromkeys(("debug", "verbose"), "take --log_step_interval 1 for a line a step"),
}  # fmt: skip
# (flag, a value in lower case) -> what to do instead
VALUES = {
    ("precision", "bf16"): "take bf16-true, or bf16-mixed",
    ("precision", "bfloat16"): "take bf16-true, or bf16-mixed",
    ("precision", "16"): "take 16-mixed",
    ("precision", "fp16"): "take 16-mixed",
    ("precision", "float16"): "take 16-mixed",
    ("precision", "16-true"): "weights in float16 don't train: take 16-mixed, or bf16-true",
    ("precision", "32"): "take 32-true",
    ("precision", "fp32"): "take 32-true",
    ("precision", "float32"): "take 32-true",
    ("precision", "no"): "take 32-true",
    ("bf16_updates", "kahan"): "take stochastic, which reaches the same loss with less memory",
    ("strategy", "deepspeed"): "take fsdp or fsdp2, which shards as ZeRO-3 does",
    ("strategy", "zero3"): "take fsdp or fsdp2, which shards as ZeRO-3 does",
    ("strategy", "single"): "take --devices 1",
    ("strategy", "dp"): "take ddp",
    ("accelerator", "mps"): "PyTorch's FSDP has no MPS: take cpu",
    ("accelerator", "tpu"): "take --tpu true",
    ("lr_schedule", "constant_with_warmup"): "take constant with --warmup_steps",
    ("lr_schedule", "none"): "take constant",
    ("lr_schedule", "warmup_stable_decay"): "take wsd",
    ("lr_schedule", "trapezoidal"): "take wsd",
    ("lr_schedule", "cosine_with_min_lr"): "take cosine with --min_lr",
    ("lr_decay", "cosine"): "take --lr_schedule cosine",
    ("lr_decay", "linear"): "take --lr_schedule linear",
    ("attention", "flash"): "take flash_attention_2, or sdpa, which has a flash kernel too",
    ("attention", "flash_attn"): "take flash_attention_2, or sdpa, which has a flash kernel too",
    ("attention", "flash_attention"): "take flash_attention_2, or sdpa, which has a flash kernel too",
    ("resume", "latest"): "true takes the newest checkpoint of --run_name, auto the same if there is one",
    ("resume", "last"): "true takes the newest checkpoint of --run_name, auto the same if there is one",
    ("resume", "must"): "take true",
    ("resume", "allow"): "take auto",
    ("grad_clip", "none"): "0 is no clipping",
    ("devices", "all"): "auto takes all GPUs",
    ("backward_prefetch", "null"): "take none",
    ("log_model", "none"): "take false",
}


def slips(one: str, other: str) -> int:
    """The number of letters to insert, remove, change, or swap with their neighbour to turn one word into the other."""
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, letter in enumerate(one, 1):
        before, last, row = row, before, [i]
        for j, there in enumerate(other, 1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != there))
            if i > 1 and j > 1 and letter == other[j - 2] and one[i - 2] == there:
                cost = min(cost, last[j - 2] + 1)
            row.append(cost)
    return row[-1]


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """The names that are nearest to `name`, all equally near; [] if none is near."""
    if len(name) < 3:
        return []
    distances = {other: slips(name, other) for other in known}
    least = min(distances.values(), default=len(name))
    return [other for other in distances if distances[other] == least <= max(1, len(name) // LETTERS_OF_A_SLIP)]


def flag_instead(name: str, known: Iterable[str]) -> tuple[list[str], str]:
    """(flags that the unknown flag `name` may mean, or otherwise a sentence that says what to do instead)."""
    known, name = list(known), name.replace("-", "_").lower()
    elsewhere = {other: ours for other, ours in ELSEWHERE.items() if ours in known}
    advice = NOT_HERE if "max_step" in known else {}  # for train.py alone
    if name in known:
        return [name], ""
    if name in elsewhere:
        return [elsewhere[name]], ""
    if name in advice:
        return [], advice[name]
    if name.startswith("no_") and name.removeprefix("no_") in known:
        return [], f"take --{name.removeprefix('no_')} false"
    close = nearest(name, [*known, *elsewhere, *advice])
    ours = list(dict.fromkeys(elsewhere.get(word, word) for word in close if word not in advice))
    words = [advice[word] for word in close if word in advice]
    return (ours, "") if 0 < len(ours) <= 2 else ([], words[0] if words and not ours else "")


def value_instead(flag: str, value: str, options: Iterable[Any], kinds: str) -> str:
    """What to do instead of giving `flag` a value that it doesn't take; "" if that isn't known.

    options: the words that it takes. kinds: the types that it takes, such as "an integer" or "a number".
    """
    low, words = value.lower().strip(), [str(option) for option in options]
    if (flag, low) in VALUES:
        return VALUES[flag, low]
    if flag == "devices" and any(mark in value for mark in ",[:"):
        return "it is how many: choose which with CUDA_VISIBLE_DEVICES=0,1 and --devices 2"
    if flag == "resume" and ("/" in value or low.startswith("step")):
        return f"a checkpoint goes to --checkpoint {value}, with --resume true"
    if low in ("none", "no", "off", "false") and "an integer" in kinds:
        return "leave it out"
    if kinds == "text":  # which 3:5 isn't: in YAML it is the number 185
        return "in a YAML file, write it in quotes"
    if low == "1" and kinds == "true or false":
        return "take true"
    if low == "0" and kinds == "true or false":
        return "take false"
    same = [word for word in words if word.lower().replace("-", "_") == low.replace("-", "_")]
    close = same or nearest(low, words)
    if len(close) == 1:
        return f"take {close[0]}"
    if "an integer" in kinds or "a number" in kinds:
        return _as_number(low, "an integer" in kinds)
    return ""


def _as_number(value: str, whole: bool) -> str:
    plain = value.rstrip(",;").replace(",", "").replace("−", "-").replace("–", "-").strip("'\" ")
    try:
        number = float(plain)
    except ValueError:
        return ""
    if not whole:
        return f"take {plain}"
    return f"take {int(number)}" if number.is_integer() else ""
