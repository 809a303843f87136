"""Every flag of a run, declared once: the command lines of train.py and plan.py.

A flag is a field with a type, a default and other fields of `flag.Flag`. The string below
it is its text in `--help`, with the unit; its first clause, up to a semicolon, is one line of it.
Nothing here imports torch, so `--help` answers at once.
"""

from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, Optional, Union

from fabric_llm.base import register
from fabric_llm.base.flag import Flag, declared, groups, option
from fabric_llm.run import trackers
from fabric_llm.training.forgetting import ACTIONS
from fabric_llm.training.schedule import DECAYS, SCHEDULES

ROOT = Path(__file__).resolve().parent
# Applies where the command line names no model, no data and no other file of flags.
DEMO_CONFIG = ROOT / "configs" / "demo.yaml"
# Each flag of train.py says what is trained, or how. Most of the latter may change in a resumed
# run.
what, setting = partial(option, how=False), partial(option, how=True, resume="free")
# Those that a first run needs.
basic, basic_setting = partial(what, basic=True), partial(setting, basic=True)


# --------------------------------------------------------------------------- train.py


@dataclass
class DeviceArguments:
    """Devices"""

    devices: Union[int, Literal["auto"]] = basic_setting(
        "auto", above=0, aliases="nproc_per_node gpus num_gpus world_size"
    )
    """processes per node, one device each; auto: all GPUs, or 1 CPU, or as many as torchrun or srun
    started"""
    num_nodes: int = basic_setting(1, above=0, aliases="num_machines")
    """number of machines; under torchrun or srun: as many as it started processes on"""
    context_parallel: int = setting(
        1,
        above=0,
        needs="tpu false",
        aliases="context_parallel_size cp cp_size sequence_parallel_size",
    )
    """so many ranks side by side share each row, of which each holds a part
    (docs/long_context.md)"""
    accelerator: Literal["auto", "cpu", "cuda", "gpu"] = setting(
        "auto", aliases="device device_type"
    )
    """auto: cuda where there is a GPU, else cpu"""
    oversubscribe: bool = option(False, kept=False, how=True)
    """start more processes on CPUs than four for each core"""
    hang_timeout: float = setting(1800.0, above=0, below=10**9, aliases="ddp_timeout nccl_timeout")
    """seconds that a rank may take for a step, a batch of an evaluation, a save, or set-up; then
    the run ends with code 71"""
    join_timeout: float = setting(300.0, above=0, below=10**9)
    """before training: seconds that a rank may be silent while others wait for it; then the run
    ends with code 71"""
    tpu: bool = setting(False)
    """train on TPU cores with Fabric's XLA FSDP strategy (needs torch_xla)"""


@dataclass
class DataArguments:
    """Data"""

    # The folder may be moved. The fingerprint of its content belongs to the run.
    train_data_dir: Optional[str] = basic_setting(
        None,
        path=True,
        how=False,
        aliases="data_dir data_path dataset dataset_name train_file datasets dataset_path",
    )
    """dataset folder that prepare_data.py wrote; any with input_ids will do; or the address of one
    in object storage (docs/mirror.md); of a resumed run the same data, wherever they lie"""
    data_mix: Optional[str] = basic(
        None,
        path=True,
        takes=(
            "a YAML file, or name=folder:weight, comma-separated, such as "
            "new=data/new:0.75,old=data/old:0.25"
        ),
        aliases="data_blend dataset_weights mixture",
    )
    """datasets and their shares of the tokens; instead of --train_data_dir; a YAML file
    (docs/mixture.md), or name=folder:weight[:max_epochs],... such as
    new=data/new:0.75,old=data/old:0.25:4"""
    # Both are kept as the --data_mix that they stand for.
    replay: Optional[str] = basic(None, path=True, kept=False)
    """dataset folder mixed in against forgetting; a fifth of what is read; the short form of
    --data_mix new=TRAIN_DATA_DIR:1-F,replay=REPLAY:F"""
    replay_fraction: Optional[float] = what(None, kept=False)
    """share of the tokens that --replay gives, F (default: 0.2); a resumed run changes it by
    --resume_override data_mix"""
    # A resumed run is compared by the length of the dataset's rows, and not by this flag.
    context_length: Optional[int] = basic_setting(
        None, above=0, aliases="block_size cutoff_len max_seq_len seq_len sequence_len", how=False
    )
    """tokens per sequence; must be what the dataset holds (default: that)"""
    verify_data: Literal["auto", "full", "size"] = setting("auto")
    """compare the dataset's files with the hashes of prepare_data.py, or only their sizes; auto:
    hashes up to 1 GiB"""
    document_masking: Union[bool, Literal["auto"]] = what("auto")
    """packed documents don't see each other: attention and positions restart (needs
    prepare_data.py's manifest); auto: where the model can, which is measured; a resumed run keeps
    what it had"""
    # Any number gives the same batches, so a resumed run may change it.
    num_workers: int = setting(1, at_least=0, aliases="dataloader_num_workers dataset_num_proc")
    """threads that prepare the batches of the next steps, on the GPU if there is one; 0: within the
    step"""


@dataclass
class ModelArguments:
    """Model"""

    # May only change to another name of the same model, see plan/make_plan.py.
    model_name: Optional[str] = basic_setting(
        None,
        path=True,
        how=False,
        aliases=(
            "base_model model_name_or_path pretrained_model_name_or_path model checkpoint_dir "
            "initial_checkpoint_dir hf_assets_path"
        ),
    )
    """hub name or local directory of a causal LM; config.json alone: random start"""
    # The dtypes of the optimizer's state follow from it, so a resumed run can't change it.
    precision: Literal["bf16-true", "bf16-mixed", "16-mixed", "32-true"] = basic(
        "bf16-true", resume="never", aliases="bf16 fp16 fp32 dtype torch_dtype mixed_precision"
    )
    """dtype of weights and of computation; bf16-mixed, 16-mixed: float32 weights; -true: both in
    that dtype"""
    bf16_updates: Literal["stochastic", "nearest", "master"] = what(
        "stochastic", resume="never", needs="precision bf16-true"
    )
    """bf16-true: how small updates survive (docs/numerics.md); bytes a parameter with moments: 6, 6
    (they don't), 14"""
    float8: Literal["none", "tensorwise", "rowwise"] = what(
        "none", aliases="fp8 enable_fp8 float8_recipe"
    )
    """bf16-true, bf16-mixed: make the products of the layers in 8 bits (docs/speed.md), with a
    scale for each tensor or row; needs torchao, and on a CPU it is emulated, which is slow"""
    # All that the run saves has these positions, so they can't change in the middle.
    rope: Optional[str] = what(
        None,
        resume="never",
        takes="theta:THETA, or yarn, linear or llama3 with a factor, such as yarn:4",
    )
    """other rotary positions for longer rows (docs/long_context.md), in a new run, and in all that
    it saves: theta:8e6, or scaled, as yarn:4, linear:4 or llama3:8"""
    attention: Literal["auto", "packed", "sdpa", "flash_attention_2", "flex_attention", "eager"] = (
        setting("auto", aliases="attn_implementation attn_impl flash_attn sdp_attention")
    )
    """attention implementation; packed: of each packed document by itself, without a mask; auto:
    packed where documents are kept apart and the model can, else sdpa, else eager; flash needs its
    package"""
    loss: Literal["auto", "full", "chunked"] = setting(
        "auto", takes="auto, full or chunked (--code alone brings another loss)"
    )
    """chunked: the loss and its gradients in chunks of tokens, without the logits of the whole
    batch; auto: where the model's head can, which is measured"""
    compile: Union[bool, Literal["auto"]] = setting("auto", aliases="torch_compile use_compile")
    """compile each layer with torch.compile; auto: on GPUs, where the layers are large enough to
    pay for it"""
    fast_paths: Literal["fall_back", "strict"] = setting("fall_back")
    """where a fast path (compiled layers, packed attention, the chunked loss, --float8, inputs of
    layers in the host's memory) fails before the first step is done: start again without it, or end
    the run"""
    verify_start: bool = setting(True)
    """before step 1 compare the wrapped model with plain transformers on a probe (costs one pass on
    the CPU)"""


@dataclass
class FSDPArguments:
    """FSDP (docs/fsdp.md says what each flag does and costs)"""

    strategy: Literal["auto", "fsdp", "fsdp2", "ddp"] = basic_setting(
        "auto",
        needs="tpu false",
        aliases="ddp deepspeed fsdp distributed_backend parallelism fsdp_version",
    )
    """how devices share the model; auto: fsdp for several devices, none for one"""
    auto_wrap_policy: str = setting(
        "auto",
        needs="strategy fsdp fsdp2",
        aliases=(
            "fsdp_auto_wrap_policy fsdp_transformer_layer_cls_to_wrap transformer_layer_cls_to_wrap"
        ),
    )
    """what is gathered at once: layer class name(s) such as LlamaDecoderLayer or GPT2Block,
    comma-separated; auto: ask the model; size:N: modules of N parameters and more; none: the whole
    model"""
    sharding_strategy: Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"] = setting(
        "FULL_SHARD", needs="strategy fsdp fsdp2", aliases="fsdp_sharding_strategy sharding"
    )
    """what each rank holds a part of; fsdp2 takes all but NO_SHARD"""
    # A run may resume from either kind with the other.
    state_dict_type: Literal["full", "sharded"] = setting("full", aliases="fsdp_state_dict_type")
    """full: each checkpoint opens with from_pretrained; sharded: each rank writes its part"""
    limit_all_gathers: bool = setting(True, needs="strategy fsdp")
    """fsdp: let at most two gathers be in flight"""
    cpu_offload: bool = setting(
        False, needs="tpu false", aliases="fsdp_offload_params enable_cpu_offload"
    )
    """fsdp, fsdp2: keep parameters, gradients and optimizer state in host memory"""
    backward_prefetch: Literal["BACKWARD_PRE", "BACKWARD_POST", "none"] = setting(
        "BACKWARD_PRE", needs="strategy fsdp", aliases="fsdp_backward_prefetch"
    )
    """fsdp: gather the next layer before, after, or not ahead of, the current gradient"""
    reduce_dtype: Literal["float32", "bfloat16"] = setting(
        "float32",
        needs="strategy fsdp fsdp2, precision bf16-true bf16-mixed 16-mixed",
        aliases="mixed_precision_reduce",
    )
    """fsdp, fsdp2: dtype that gradients are summed over devices in, unless --precision is
    32-true"""
    activation_checkpointing: Union[bool, str] = basic_setting(
        "none",
        takes="none, full, every:N (such as every:2), selective or offload",
        aliases="gradient_checkpointing recompute_activations",
    )
    """recompute layers to save memory (plan.py --auto says what fits); none, full (each layer),
    every:N (one layer of N), selective (layers, but for their matrix products and attention),
    offload (each layer, whose input waits in the host's memory)"""
    tiled_mlp: bool = setting(False, aliases="tiled_mlp_num_shards tiled_mlp_compute")
    """MLPs and norms take as many tokens at once as a hidden state has elements, so that they need
    no more memory in longer rows (docs/long_context.md); they are computed once more, and layers
    aren't compiled"""


@dataclass
class CheckpointArguments:
    """Checkpoint"""

    output_dir: str = basic_setting(
        "checkpoints", path=True, aliases="save_dir save_folder dump_folder default_root_dir"
    )
    """folder of run directories"""
    run_name: Optional[str] = basic(
        None, kept=False, how=True, aliases="wandb_name exp_name experiment_name"
    )
    """name of the run directory (default: model and data, numbered)"""
    # Not kept: each start of a run says for itself whether it resumes.
    resume: Union[bool, Literal["auto"]] = basic(
        False,
        kept=False,
        how=True,
        aliases="auto_resume auto_resume_from_checkpoints",
        takes="true, false or auto (--checkpoint takes a folder)",
    )
    """true: go on from the latest checkpoint; or from --checkpoint; auto: if there is one, else
    start"""
    verify_checkpoints: Literal["full", "size"] = setting("full")
    """before resuming, compare sizes and sha256 of all files with the manifest, or only sizes"""
    checkpoint: Optional[str] = option(
        None,
        kept=False,
        path=True,
        how=True,
        aliases="ckpt_path load_checkpoint",
    )
    """the checkpoint to resume from, checkpoints/RUN/step-N; with the --run_name of a new run: a
    branch"""
    # Not kept: it is permission for one start, not for all later ones.
    resume_override: Optional[str] = what(None, kept=False, needs="resume")
    """flags that a resumed run changes on purpose, comma-separated, such as max_step,lr; refused
    otherwise"""


@dataclass
class TrainingArguments:
    """Training (a step is an optimizer step)"""

    number_epochs: int = basic(
        1, above=0, needs="max_step none", aliases="epochs max_epochs num_train_epochs"
    )
    """passes over the training split; of a mixture: until one source has had them; not used where
    max_step is given"""
    max_step: Optional[int] = basic(
        None, above=0, aliases="max_iters num_training_steps steps total_steps train_steps"
    )
    """steps of the run (default: by epochs)"""
    max_hours: Optional[float] = setting(None, above=0, aliases="max_time max_duration time_limit")
    """hours after which this process stops by itself: it finishes the step, saves and ends with
    exit code 75; the limit of the job must leave time for that step and the save"""
    # These two may change. The global batch, which follows from them, belongs to the run.
    micro_batch_size: Optional[int] = basic_setting(
        None,
        above=0,
        aliases=(
            "batch_size local_batch_size per_device_train_batch_size train_micro_batch_size_per_gpu"
        ),
    )
    """sequences per device at once (default: 1); in one forward pass; follows from the next two
    where both are given"""
    gradient_accumulation_steps: Optional[int] = basic_setting(
        None, above=0, aliases="accumulate_grad_batches grad_acc_steps"
    )
    """micro-batches per step (default: 1); follows from --global_batch_size where that is given"""
    global_batch_size: Optional[int] = basic(
        None, above=0, aliases="total_batch_size effective_batch_size"
    )
    """sequences per step, over all devices; sets the accumulation: micro_batch_size x
    gradient_accumulation_steps x devices x nodes"""
    accumulation_dtype: Literal["float32", "same"] = setting("float32")
    """dtype of gradients summed over micro-batches; float32: costs 4 bytes a parameter held; same:
    that of the weights"""
    grad_clip: float = what(
        1.0, at_least=0, aliases="clip_grad gradient_clipping max_grad_norm max_norm"
    )
    """largest L2 norm of the gradient; 0: no clipping"""
    lr: float = basic(2e-5, above=0, aliases="learning_rate max_lr peak_lr base_lr")
    """peak learning rate"""
    min_lr: float = what(
        0.0, at_least=0, needs="lr_decay", aliases="eta_min lr_min min_learning_rate"
    )
    """what the learning rate falls to, after the last step"""
    lr_decay: bool = what(True, aliases="decay_lr")
    """decay the rate after the warm-up; false: stay at lr"""
    # `names` adds the schedules that --code registers.
    lr_schedule: Literal[tuple(SCHEDULES)] = basic(
        "cosine",
        names=register.SCHEDULES,
        takes=f"{', '.join(SCHEDULES)}, or one that --code registers",
        needs="lr_decay",
        aliases="lr_scheduler_type decay_type scheduler",
    )
    """how lr falls to min_lr (docs/schedules.md); wsd: warm-up, stable, decay; infinite: down to
    constant_lr, stable, decay"""
    warmup_steps: int = basic(
        0,
        at_least=0,
        aliases="lr_warmup_steps num_warmup_steps warmup warmup_ratio",
        takes="a number of steps",
    )
    """steps of linear warm-up"""
    decay_steps: Optional[int] = what(
        None, above=0, needs="lr_decay, lr_schedule wsd infinite", takes="a number of steps"
    )
    """wsd, infinite: last steps, in which the rate falls (default: a tenth of the run)"""
    decay_shape: Literal[tuple(DECAYS)] = what("sqrt", needs="lr_decay, lr_schedule wsd infinite")
    """wsd, infinite: how it falls; sqrt: 1 - sqrt of the part that is done"""
    cooldown_steps: Optional[int] = what(None, at_least=0, needs="lr_decay, lr_schedule infinite")
    """infinite: steps after the warm-up in which the rate comes down to constant_lr (default: a
    quarter of the run)"""
    constant_lr: Optional[float] = what(None, above=0, needs="lr_decay, lr_schedule infinite")
    """infinite: rate of the stable phase (default: the mean of lr and min_lr)"""
    weight_decay: float = what(0.1, at_least=0, aliases="wd adam_weight_decay")
    """decoupled weight decay, on matrices only"""
    beta1: float = what(0.9, at_least=0, below=1, aliases="adam_beta1")
    """AdamW, decay of the first moment"""
    beta2: float = what(0.95, at_least=0, below=1, aliases="adam_beta2")
    """AdamW, decay of the second moment"""
    # Unlike most settings these three belong to the run, which goes on with its average.
    ema_decay: Optional[float] = option(None, at_least=0, below=1, how=True)
    """decay a step of an exponential moving average of the weights, such as 0.999, which
    export_hf.py --ema true exports (default: none is kept)"""
    ema_device: Literal["host", "same"] = option("host", needs="ema_decay", how=True)
    """host: the average in float32 in host memory; same: as the weights, in bfloat16 rounded
    stochastically"""
    ema_every: int = option(1, above=0, needs="ema_decay", how=True)
    """steps between updates of the average, each with ema_decay to the power of so many"""
    router_aux_loss_coef: Optional[float] = what(None, at_least=0)
    """mixture of experts: what the routers' load-balancing loss is multiplied by; 0: it isn't
    trained (default: as the model's configuration says, 0 unless that sets output_router_logits)"""
    freeze: Optional[str] = what(None, aliases="freeze_layers freeze_parameters")
    """parameters that keep their values: patterns of their Hugging Face names, comma-separated,
    such as model.layers.0.*,*.norm.*; embeddings: the input embeddings and the output head"""
    train_only: Optional[str] = what(None, aliases="unfrozen_parameters trainable_parameters")
    """the only parameters that train, in the words of --freeze, such as embeddings
    (docs/new_words.md)"""
    # The order of rows follows from it: with another one some would be read twice.
    seed: int = what(1234, at_least=0, resume="never", aliases="random_seed manual_seed data_seed")
    """seed of data order, dropout and random weights"""
    # The file may be moved. The hash of its content belongs to the run.
    code: Optional[str] = what(
        None, path=True, takes="a Python file, or the name of a module, such as my_module.py"
    )
    """module of your own that registers a schedule, loss, optimizer, data source, metric or flags
    (docs/make_it_yours.md); all processes load it first, and a resumed run requires its content"""


@dataclass
class GuardArguments:
    """NaN and spikes (docs/numerics.md)"""

    max_skipped_steps: int = setting(10, at_least=0, how=False)
    """more skipped steps in a row, or rewinds of the whole run, end it with exit code 76"""
    spike_threshold: Optional[float] = setting(None, above=0, how=False)
    """standard deviations of the loss above its window that are a spike"""
    spike_window: int = setting(100, at_least=2, needs="spike_threshold", how=False)
    """steps that a loss is compared with; a standard deviation takes two"""
    spike_action: Literal["warn", "skip", "rewind"] = setting(
        "warn", needs="spike_threshold", how=False
    )
    """skip: leave the update out; rewind: back to the last checkpoint, and past the data since
    then"""


@dataclass
class EvaluationArguments:
    """Evaluation (also in the middle and at the end of each epoch, of a mixture of the
    source that it reads most, and at the last step)"""

    eval_batch_size: int = setting(
        8, above=0, needs="eval_iters", aliases="per_device_eval_batch_size val_batch_size"
    )
    """sequences per device in one forward pass"""
    eval_iters: int = setting(50, at_least=0, aliases="limit_val_batches max_eval_steps val_iters")
    """batches per evaluation, over all devices together, of rows spread evenly over the split; 0:
    no evaluation"""
    eval_step_interval: Optional[int] = basic_setting(
        None,
        above=0,
        needs="eval_iters",
        aliases="eval_every eval_freq eval_steps val_interval validation_interval",
    )
    """steps between evaluations (default: none)"""
    eval_data: Optional[str] = basic_setting(
        None,
        needs="eval_iters",
        takes="name=folder, comma-separated, such as general=data/general,code=data/code",
    )
    """other validation sets, name=folder,...; of prepare_data.py or any with input_ids, made with
    the model's tokenizer; the loss of each is also given in bits per byte of text"""
    probes: Optional[str] = setting(
        None, needs="eval_iters", takes="copy, retrieval or copy,retrieval"
    )
    """copy, retrieval: evaluate as well whether the model copies a passage, and finds what stood
    far before (docs/long_context.md); those with a --forgetting_budget are, and copy with any"""
    forgetting_budget: Optional[str] = basic(
        None, takes="name:nats, comma-separated, such as general:0.05,copy:0.2"
    )
    """nats that validation losses may rise; above their value before step 1 (docs/forgetting.md);
    name:nats, comma-separated, such as general:0.05; copy and retrieval: of --probes; nats:max:
    a steered run keeps it at every evaluation"""
    forgetting_action: Literal[ACTIONS] = what("warn", needs="forgetting_budget")
    """when a set is above its budget; stop: save and end with exit code 76; rewind: back to the
    last checkpoint that has used at most half of it, and on with twice the share of that source, up
    to a half, then stop; steer: at each evaluation, more or less of that source, so that the run
    ends within the budget"""
    steer_bounds: str = what("0:0.9", needs="forgetting_action steer")
    """least share of each source that is steered, and most of all of them together, from the first
    evaluation on"""


@dataclass
class SaveArguments:
    """Save (also at the last step)"""

    save_step_interval: Optional[int] = basic_setting(
        None,
        above=0,
        aliases="checkpoint_interval ckpt_every_steps every_n_train_steps save_every save_steps",
    )
    """steps between checkpoints (default: at end)"""
    keep_last: Optional[int] = basic_setting(None, above=0, aliases="save_total_limit save_top_k")
    """newest checkpoints to keep (default: all); pinned ones always stay, and with
    --forgetting_action rewind one to go back to"""
    keep_every: Optional[int] = setting(None, above=0, needs="keep_last")
    """with keep_last: keep those of multiples of so many steps as well"""
    keep_best: int = setting(1, at_least=0, needs="keep_last, eval_iters")
    """with keep_last: keep so many with the lowest validation loss at their step as well"""
    keep_best_of: Optional[str] = setting(None, needs="keep_last, eval_iters, keep_best")
    """validation set whose loss that is (default: the training data's; of a mixture their mean,
    weighted by the shares)"""
    async_save: bool = setting(
        False, needs="save_step_interval", aliases="async_checkpoint async_mode"
    )
    """write checkpoints while training goes on; costs their size in host memory (not the last
    one)"""
    mirror: Optional[str] = setting(None, takes="an address such as s3://bucket/prefix")
    """address in object storage, such as s3://bucket/prefix; each checkpoint is copied there, and
    on an empty disk --resume auto fetches the newest (docs/mirror.md)"""
    mirror_timeout: float = setting(600.0, above=0, below=10**9, needs="mirror")
    """seconds that the end of a run waits for its last checkpoint to be at --mirror; then exit code
    80"""


@dataclass
class LoggingArguments:
    """Logging (metrics.jsonl is always written)"""

    # Its text names the trackers that there are, so it isn't a string below the field.
    logger: str = basic_setting(
        "none",
        (
            f"where metrics go besides metrics.jsonl; {', '.join(trackers.TRACKERS)}; several with "
            "commas between, such as wandb,csv"
        ),
        aliases="report_to log_with tracker use_wandb wandb wandb_mode",
    )
    log_step_interval: int = setting(
        10, above=0, aliases="log_every log_every_n_steps log_freq logging_steps"
    )
    """steps between logged lines; 1: each step"""
    # Not kept: it concerns a single start of the run.
    profile: Optional[str] = option(None, kept=False, how=True)
    """START:STOP: record the steps from START to STOP, both included, on rank 0 with torch's
    profiler, into the folder profile of the run directory; prints the five largest costs"""
    entity: Optional[str] = setting(None, needs="logger wandb", aliases="wandb_entity")
    """Weights & Biases entity"""
    project: Optional[str] = setting(None, needs="logger wandb", aliases="wandb_project")
    """Weights & Biases project (default: fabric_llm)"""
    log_model: Union[bool, Literal["last", "all"]] = setting(
        False, takes="false, last or all", needs="logger wandb", aliases="wandb_log_model"
    )
    """upload to Weights & Biases: last, the last checkpoint of a finished run, or all, each as it
    is saved"""
    sample_prompts: Optional[str] = setting(None, path=True)
    """file of up to 64 prompts, one a line, or JSON lines with "prompt": before step 1 and with
    each checkpoint, but for one that a request to stop asks for, the --sample_tokens most likely
    tokens after each prompt go to samples.jsonl; any strategy, all ranks, one forward pass of up to
    1,024 tokens for each token (docs/report.md)"""
    sample_tokens: int = setting(64, above=0, needs="sample_prompts")
    """tokens after each of the --sample_prompts"""


@dataclass
class Arguments:
    """All parameters of a training run, by group."""

    devices: DeviceArguments
    data: DataArguments
    model: ModelArguments
    fsdp: FSDPArguments
    checkpoint: CheckpointArguments
    training: TrainingArguments
    guard: GuardArguments
    evaluation: EvaluationArguments
    save: SaveArguments
    logging: LoggingArguments
    # values of the flags that --code registers
    own: SimpleNamespace = field(default_factory=SimpleNamespace)
    demo: bool = False  # configs/demo.yaml applies; not a flag
    # names of the flags that don't come from a file; not a flag
    on_command_line: frozenset[str] = frozenset()

    @staticmethod
    def declared() -> dict[str, Flag]:
        """Flag name -> what is said of it, in the order of --help."""
        return {
            name: one for group in groups_of_run().values() for name, one in declared(group).items()
        }

    def flat(self) -> dict[str, Any]:
        """Flag name -> value, in the order of --help."""
        found = {
            name: value
            for group in groups(Arguments)
            for name, value in asdict(getattr(self, group)).items()
        }
        return found | vars(self.own)

    def kept(self) -> dict[str, Any]:
        """`flat` without what says which run it is: what arguments.yaml repeats under a new
        name."""
        flags = self.declared()
        return {name: value for name, value in self.flat().items() if flags[name].kept}


def groups_of_run() -> dict[str, type]:
    """The flag groups of a run, those that --code registers last."""
    # The space keeps these names apart from the fields of Arguments.
    own = {f"own {name}": group for name, group in register.FLAGS.items()}
    return {**groups(Arguments), **own}


# --------------------------------------------------------------------------- plan.py


@dataclass
class PlanArguments:
    """Plan (plan.py alone has these; the others are those of train.py)"""

    accelerator_name: str = option(
        "H100", takes="the name of an accelerator, such as H100", basic=True
    )
    """kind of device; A100-40GB, A100-80GB, H100, H200, B200, L40S, RTX 4090, RTX 5090, MI300X or
    CPU"""
    # `parse_plan` has turned a unit into GiB before this is parsed.
    device_memory: Optional[float] = option(None, above=0, takes="GiB, such as 80 or 80GiB")
    """GiB of memory of a device, or with a unit, such as 80GiB (default: the accelerator's)"""
    mfu: Optional[float] = option(None, above=0, below=1)
    """part of the accelerator's peak that the model's operations reach, such as 0.4 (default:
    assumed, and printed)"""
    like: Optional[str] = option(None, path=True)
    """directory of a run on this accelerator, whose speed is taken in place of --mfu"""
    network: float = option(400.0, above=0)
    """Gbit/s between nodes, of each node"""
    price_per_hour: Optional[float] = option(None, at_least=0, basic=True)
    """price of one device, in any currency"""
    tokens: Optional[float] = option(None, above=0, basic=True)
    """tokens of the whole run, such as 1e9; instead of --max_step"""
    auto: bool = option(False, basic=True)
    """find the fastest flags that fit; of micro-batch sizes, activation checkpointing and sharding,
    below 80 % of the memory"""
    sweep: Optional[str] = option(None, takes="numbers of devices, such as devices=8..4096")
    """devices=FIRST..LAST: the plan on so many devices, doubled from row to row, sharded in two
    ways (docs/planning.md)"""
    json: bool = option(False)
    """print all numbers as JSON"""
    html: Optional[str] = option(None, path=True)
    """draw the memory into this file and, where there is a dataset, learning rate, sources and what
    is due (docs/report.md)"""
