"""Every parameter of a run, with its unit and default: the command lines of train.py, prepare_data.py and export_hf.py.

`parse_train`, `parse_prepare` and `parse_export` turn argv (and a YAML file given by `--config`)
into plain dataclasses. Nothing here imports torch, so that `--help` answers at once.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, Optional, Union

from fabric_llm.base.command_line import fail, flag, groups, parse
from fabric_llm.data.blend import text_of, with_replay
from fabric_llm.plan.trackers import TRACKERS
from fabric_llm.training.forgetting import ACTIONS
from fabric_llm.training.schedule import DECAYS, SCHEDULES

ROOT = Path(__file__).resolve().parent
DEMO_CONFIG = ROOT / "configs" / "demo.yaml"
# Flags that aren't kept in arguments.yaml: which run it is, and what concerns one process of it.
WHICH_RUN = ("run_name", "resume", "checkpoint", "resume_override", "branch_decay", "profile", "oversubscribe")


# --------------------------------------------------------------------------- train.py


@dataclass
class DeviceArguments:
    """Devices"""

    devices: Union[int, Literal["auto"]] = flag(
        "auto", "processes per node, one device each; auto: all GPUs, or 1 CPU, or as many as torchrun or srun started"
    )
    num_nodes: int = flag(1, "number of machines; under torchrun or srun: as many as it started processes on")
    accelerator: Literal["auto", "cpu", "cuda", "gpu"] = flag("auto", "auto: cuda where there is a GPU, else cpu")
    oversubscribe: bool = flag(False, "start more processes than the CPU cores or the memory of the machine allow")
    hang_timeout: float = flag(
        1800.0,
        "seconds without progress of a rank (set-up, a step, an evaluation's batch, a save) that end the run with 71",
    )
    join_timeout: float = flag(
        300.0, "seconds of silence of a rank that the others wait for, before training begins, that end the run with 71"
    )
    tpu: bool = flag(False, "train on TPU cores with Fabric's XLA FSDP strategy (needs torch_xla)")


@dataclass
class DataArguments:
    """Data"""

    train_data_dir: Optional[str] = flag(None, "dataset folder that prepare_data.py wrote, or any with input_ids")
    data_mix: Optional[str] = flag(
        None,
        "instead of --train_data_dir, several of them: a YAML file (docs/mixture.md), or name=folder:weight[:max_epochs],... "
        "with weights that are shares of tokens, such as new=data/new:0.75,old=data/old:0.25:4",
        takes="a YAML file, or name=folder:weight, comma-separated, such as new=data/new:0.75,old=data/old:0.25",
    )
    replay: Optional[str] = flag(
        None,
        "with --train_data_dir: dataset folder of what the model knows already, read along so that it isn't forgotten; the short "
        "form of --data_mix new=TRAIN_DATA_DIR:1-F,replay=REPLAY:F",
    )
    replay_fraction: Optional[float] = flag(None, "share of the tokens that --replay gives, F (default: 0.2)")
    context_length: Optional[int] = flag(None, "tokens per sequence; must be what the dataset holds (default: that)")
    verify_data: Literal["auto", "full", "size"] = flag(
        "auto", "compare the dataset's files with prepare_data.py's hashes, or only sizes; auto: hashes up to 1 GiB"
    )
    document_masking: Union[bool, Literal["auto"]] = flag(
        "auto",
        "packed documents don't see each other: attention and positions restart (needs prepare_data.py's manifest); "
        "auto: where the model can, which is measured; a resumed run keeps what it had",
    )
    num_workers: int = flag(
        1, "threads that make the next steps' batches ready, on the GPU if there is one; 0: inside the step"
    )


@dataclass
class ModelArguments:
    """Model"""

    model_name: Optional[str] = flag(
        None, "hub name or local directory of a causal LM; with a config.json and no weights: random start"
    )
    precision: Literal["bf16-true", "bf16-mixed", "16-mixed", "32-true"] = flag(
        "bf16-true", "-true: weights in that dtype; -mixed: float32 weights, computation in 16 bit"
    )
    bf16_updates: Literal["stochastic", "nearest", "master"] = flag(
        "stochastic",
        "bf16-true: how small updates survive (docs/numerics.md); bytes a parameter with moments: 6, 6 (they don't), 14",
    )
    attention: Literal["auto", "packed", "sdpa", "flash_attention_2", "flex_attention", "eager"] = flag(
        "auto",
        "attention implementation; packed: of each packed document by itself, without a mask; auto: packed where documents "
        "are kept apart and the model can, else sdpa, else eager; flash needs its package",
    )
    loss: Literal["auto", "full", "chunked"] = flag(
        "auto",
        "chunked: the loss and its gradients in chunks of tokens, without the logits of the whole batch; auto: where the "
        "model's head can, which is measured",
    )
    compile: Union[bool, Literal["auto"]] = flag(
        "auto", "compile each layer with torch.compile; auto: on GPUs, where the layers are large enough to pay for it"
    )
    verify_start: bool = flag(
        True, "before step 1 compare the wrapped model with plain transformers on a probe (costs one pass on the CPU)"
    )


@dataclass
class FSDPArguments:
    """FSDP (docs/fsdp.md says what each flag does and costs)"""

    strategy: Literal["auto", "fsdp", "fsdp2", "ddp"] = flag("auto", "auto: fsdp for several devices, none for one")
    auto_wrap_policy: str = flag(
        "auto",
        "what is gathered at once: layer class name(s) such as LlamaDecoderLayer or GPT2Block, comma-separated; "
        "auto: ask the model; size:N: modules of N parameters and more; none: the whole model",
    )
    sharding_strategy: Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"] = flag(
        "FULL_SHARD", "what each rank holds a part of; fsdp2 takes all but NO_SHARD"
    )
    state_dict_type: Literal["full", "sharded"] = flag(
        "full", "full: each checkpoint opens with from_pretrained; sharded: each rank writes its part"
    )
    limit_all_gathers: bool = flag(True, "fsdp: let at most two gathers be in flight")
    cpu_offload: bool = flag(False, "fsdp, fsdp2: keep parameters, gradients and optimizer state in host memory")
    backward_prefetch: Literal["BACKWARD_PRE", "BACKWARD_POST", "none"] = flag(
        "BACKWARD_PRE", "fsdp: gather the next layer before, after, or not ahead of, the current gradient"
    )
    reduce_dtype: Literal["float32", "bfloat16"] = flag(
        "float32", "fsdp, fsdp2: dtype that gradients are summed over devices in, unless --precision is 32-true"
    )
    activation_checkpointing: Union[bool, str] = flag(
        False,
        "recompute in the backward pass instead of storing: none, full (each layer), every:N (one layer of N), selective "
        "(layers, but for their matrix products and attention)",
        takes="none, full, every:N (such as every:2) or selective",
    )


@dataclass
class CheckpointArguments:
    """Checkpoint"""

    output_dir: str = flag("checkpoints", "folder of run directories")
    run_name: Optional[str] = flag(None, "name of the run directory (default: model and data, numbered)")
    resume: Union[bool, Literal["auto"]] = flag(
        False, "go on from the run's latest checkpoint, or from --checkpoint; auto: if there is one, else start"
    )
    verify_checkpoints: Literal["full", "size"] = flag(
        "full", "before resuming, compare sizes and sha256 of all files with the manifest, or only sizes"
    )
    checkpoint: Optional[str] = flag(
        None, "the checkpoint to resume from, checkpoints/RUN/step-N; with the --run_name of a new run: a branch"
    )
    resume_override: Optional[str] = flag(
        None, "flags that a resumed run changes on purpose, comma-separated, such as max_step,lr; refused otherwise"
    )


@dataclass
class TrainingArguments:
    """Training (a step is an optimizer step)"""

    number_epochs: int = flag(
        1,
        "passes over the training split, of a mixture over the first source to come to them; not used where max_step is given",
    )
    max_step: Optional[int] = flag(None, "steps of the whole run (default: what number_epochs needs)")
    max_hours: Optional[float] = flag(
        None,
        "hours after the start of this process at which it asks itself to stop: it finishes the step, saves and ends with "
        "exit code 75; leave the job's limit some more for that step and the save",
    )
    micro_batch_size: Optional[int] = flag(
        None, "sequences per device in one forward pass (default: 1, or what follows)"
    )
    gradient_accumulation_steps: Optional[int] = flag(None, "micro-batches per step (default: 1, or what follows)")
    global_batch_size: Optional[int] = flag(
        None, "sequences per step = micro_batch_size x gradient_accumulation_steps x devices x nodes"
    )
    accumulation_dtype: Literal["float32", "same"] = flag(
        "float32",
        "of gradients summed over micro-batches; float32 costs 4 bytes a parameter held, same: that of the weights",
    )
    grad_clip: float = flag(1.0, "largest L2 norm of the gradient; 0: no clipping")
    lr: float = flag(2e-5, "peak learning rate")
    min_lr: float = flag(0.0, "learning rate at the last step")
    lr_decay: bool = flag(True, "decay the rate after the warm-up; false: stay at lr")
    lr_schedule: Literal[tuple(SCHEDULES)] = flag(
        "cosine",
        "from lr to min_lr (docs/schedules.md); wsd: warm-up, stable, decay; infinite: down to constant_lr, stable, decay",
    )
    warmup_steps: int = flag(0, "steps of linear warm-up")
    decay_steps: Optional[int] = flag(
        None, "wsd, infinite: last steps, in which the rate falls (default: a tenth of the run)"
    )
    decay_shape: Literal[tuple(DECAYS)] = flag(
        "sqrt", "wsd, infinite: how it falls; sqrt: 1 - sqrt of the part that is done"
    )
    cooldown_steps: Optional[int] = flag(
        None,
        "infinite: steps after the warm-up in which the rate comes down to constant_lr (default: a quarter of the run)",
    )
    constant_lr: Optional[float] = flag(None, "infinite: rate of the stable phase (default: the mean of lr and min_lr)")
    branch_decay: Optional[int] = flag(
        None,
        "with --checkpoint, of a phase of constant rate, and a new --run_name: a run that goes on from there for so many steps, "
        "in which the rate falls to min_lr (sets lr, lr_schedule, decay_steps and max_step)",
    )
    weight_decay: float = flag(0.1, "decoupled weight decay, on matrices only")
    beta1: float = flag(0.9, "AdamW, decay of the first moment")
    beta2: float = flag(0.95, "AdamW, decay of the second moment")
    ema_decay: Optional[float] = flag(
        None,
        "decay a step of an exponential moving average of the weights, such as 0.999, which export_hf.py --ema true exports "
        "(default: none is kept)",
    )
    ema_device: Literal["host", "same"] = flag(
        "host", "host: the average in float32 in host memory; same: as the weights, in bfloat16 rounded stochastically"
    )
    ema_every: int = flag(1, "steps between updates of the average, each of which then decays as so many would")
    router_aux_loss_coef: Optional[float] = flag(
        None,
        "mixture of experts: what the routers' load-balancing loss is multiplied by; 0: it isn't trained "
        "(default: as the model's configuration says, 0 unless that sets output_router_logits)",
    )
    freeze: Optional[str] = flag(
        None,
        "parameters that keep their values: patterns of their Hugging Face names, comma-separated, such as "
        "model.layers.0.*,*.norm.*; embeddings: the input embeddings and the output head",
    )
    train_only: Optional[str] = flag(
        None, "the only parameters that train, in the words of --freeze, such as embeddings (docs/new_words.md)"
    )
    seed: int = flag(1234, "of data order, dropout and random weights")


@dataclass
class GuardArguments:
    """NaN and spikes (docs/numerics.md)"""

    max_skipped_steps: int = flag(
        10, "more skipped steps in a row, or rewinds of the whole run, end it with exit code 76"
    )
    spike_threshold: Optional[float] = flag(None, "standard deviations of the loss above its window that are a spike")
    spike_window: int = flag(100, "steps that a loss is compared with")
    spike_action: Literal["warn", "skip", "rewind"] = flag(
        "warn", "skip: leave the update out; rewind: back to the last checkpoint, and past the data since then"
    )


@dataclass
class EvaluationArguments:
    """Evaluation (also in the middle and at the end of each epoch, of a mixture of its largest source, and at the last step)"""

    eval_batch_size: int = flag(8, "sequences per device in one forward pass")
    eval_iters: int = flag(50, "batches per evaluation, over all devices together; 0: no evaluation")
    eval_step_interval: Optional[int] = flag(None, "steps between evaluations")
    eval_data: Optional[str] = flag(
        None,
        "validation sets besides those of the training data: name=folder, comma-separated, of prepare_data.py or any with "
        "input_ids, made with the model's tokenizer; the loss of each is also given in bits per byte of text",
        takes="name=folder, comma-separated, such as general=data/general,code=data/code",
    )
    forgetting_budget: Optional[str] = flag(
        None,
        "nats that the loss of validation sets may rise above its value before step 1 (docs/forgetting.md): name:nats, "
        "comma-separated, such as general:0.05; the name copy: a probe of in-context learning",
        takes="name:nats, comma-separated, such as general:0.05,copy:0.2",
    )
    forgetting_action: Literal[ACTIONS] = flag(
        "warn",
        "when a set is above its budget; stop: save and end with exit code 76; rewind: back to the last checkpoint that has "
        "used at most half of it, and on with twice the share of that source, up to a half, then stop",
    )


@dataclass
class SaveArguments:
    """Save (also at the last step)"""

    save_step_interval: Optional[int] = flag(None, "steps between checkpoints")
    keep_last: Optional[int] = flag(None, "newest checkpoints to keep (default: all); pinned ones always stay")
    keep_every: Optional[int] = flag(None, "with keep_last: keep those of multiples of so many steps as well")
    keep_best: int = flag(1, "with keep_last: keep so many with the lowest validation loss at their step as well")
    keep_best_of: Optional[str] = flag(
        None,
        "validation set whose loss that is (default: the training data's; of a mixture their mean, weighted by the shares)",
    )
    async_save: bool = flag(
        False, "write checkpoints while training goes on; costs their size in host memory (not the last one)"
    )


@dataclass
class LoggingArguments:
    """Logging (metrics.jsonl is always written)"""

    logger: str = flag(
        "none",
        f"where metrics go besides metrics.jsonl: {', '.join(TRACKERS)}; several with commas between, such as wandb,csv",
    )
    log_step_interval: int = flag(10, "steps between logged lines; 1: each step")
    profile: Optional[str] = flag(
        None,
        "START:STOP: record the steps from START to STOP, both included, on rank 0 with torch's profiler, into the folder "
        "profile of the run directory; prints the five largest costs",
    )
    entity: Optional[str] = flag(None, "Weights & Biases entity")
    project: Optional[str] = flag(None, "Weights & Biases project (default: fabric_llm)")
    log_model: Union[bool, Literal["last", "all"]] = flag(
        False,
        "upload to Weights & Biases: last, the last checkpoint of a finished run, or all, each as it is saved",
        takes="false, last or all",
    )
    sample_tokens: int = flag(
        0,
        "tokens to generate with plain transformers from the last checkpoint, as a look at it, and after each of the "
        "--sample_prompts (0: none, and 64 after those)",
    )
    sample_prompts: Optional[str] = flag(
        None,
        'file of up to 64 prompts, one a line, or JSON lines with "prompt": before step 1 and with each checkpoint, but for '
        "one that a request to stop asks for, --sample_tokens tokens after each prompt go to samples.jsonl, the most likely "
        "ones (greedy); any strategy, all ranks, one forward pass of up to 1,024 tokens for each token; see docs/report.md",
    )


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
    demo: bool = False  # configs/demo.yaml applies; not a flag
    on_command_line: frozenset[str] = frozenset()  # names of the flags that don't come from a file; not a flag

    def flat(self) -> dict[str, Any]:
        """Flag name -> value, in the order of --help."""
        return {name: value for group in groups(Arguments) for name, value in asdict(getattr(self, group)).items()}

    def kept(self) -> dict[str, Any]:
        """`flat` without WHICH_RUN: what arguments.yaml repeats under a new name."""
        return {name: value for name, value in self.flat().items() if name not in WHICH_RUN}


# ---------------------------------------------------------- prepare_data.py, export_hf.py


@dataclass
class PrepareArguments:
    """Options"""

    input: Optional[list[str]] = flag(
        None,
        "files, folders or globs of .txt, .md, .rst, .jsonl, .json, .csv, .tsv, .parquet, .wet, .html, also with .gz, .zst, .bz2, "
        ".xz; dataset folders; names of datasets on the hub",
    )
    output: str = flag(None, "dataset folder to write, such as data/mine")
    tokenizer: Optional[str] = flag(None, "hub name or local directory of the tokenizer (that of your model)")
    train_tokenizer: Optional[int] = flag(None, "train a byte-level BPE tokenizer of this many tokens instead")
    self_replay: Optional[str] = flag(
        None,
        "hub name or local directory of a model: sample documents from it instead of reading --input, to be replayed when "
        "training goes on from it (docs/forgetting.md); takes its tokenizer",
    )
    tokens: Optional[int] = flag(None, "of --self_replay, at least")
    context_length: int = flag(2048, "tokens per sequence")
    validation_fraction: float = flag(
        0.01,
        "part of the documents that goes to validation, with at most about twice that part of the tokens; none of a dataset "
        "with a validation split of its own",
    )
    text_field: str = flag("text", "field of .jsonl, .json, .csv, .parquet and datasets that holds the text")
    document_separator: Optional[str] = flag(
        None,
        "string between the documents of a text file, such as '\\n---\\n'; none: each file is one document (default: blank "
        "lines in a single text file and in those over 16 MiB, else none)",
    )
    packing: Literal["concat", "best_fit"] = flag(
        "concat", "concat: documents are cut where a row ends; best_fit: only those longer than a row, with padding"
    )
    deduplicate: Literal["none", "exact"] = flag("none", "exact: drop documents whose text has come before")
    on_error: Literal["skip", "stop"] = flag(
        "skip", "bad records (broken JSON, not UTF-8, no field): skip and count, or stop"
    )
    pattern: Optional[list[str]] = flag(None, "file name patterns to take from folders, such as '*.py'")
    exclude: Optional[list[str]] = flag(None, "names of folders to leave out")
    seed: int = flag(1234, "of the split")
    num_workers: Optional[int] = flag(None, "processes that tokenize (default: one a core)")
    shard: Optional[str] = flag(
        None, "K/N: tokenize the K-th of N parts into the work folder beside the output, on a disk that machines share"
    )
    engine: Literal["local", "ray"] = flag(
        "local", "ray: tokenize on the machines of a Ray cluster, which share the disk"
    )
    overwrite: bool = flag(False, "replace an existing output folder")


@dataclass
class ExportArguments:
    """Options"""

    checkpoint: str = flag(None, "checkpoints/RUN/step-N, or checkpoints/RUN for its latest")
    output: str = flag(None, "Hugging Face directory to write, such as hf/mine")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = flag("auto", "dtype of the weights; auto: as trained")
    ema: bool = flag(
        False, "export the moving average of the weights that --ema_decay has kept, instead of the weights"
    )
    max_shard_size: str = flag("5GB", "largest weight file")
    push_to_hub: Optional[str] = flag(None, "upload to this repository, org/name, once it is verified")
    private: bool = flag(True, "make the repository private, where it is new")
    overwrite: bool = flag(False, "replace an existing output folder")


# --------------------------------------------------------------------------- parsing


def parse_train(argv: Optional[list[str]] = None) -> Arguments:
    """Arguments of train.py from `argv` (default: sys.argv). The command line wins over `--config`.

    With neither --config nor --model_name nor --train_data_dir, a resumed run goes on with its own arguments.yaml,
    and otherwise configs/demo.yaml applies.
    Exits with code 2 and one sentence on anything it doesn't know.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    named = any(re.match(r"--(config|model_name|train_data_dir|help|print_config)(=|$)|-h$", word) for word in argv)
    on_command_line = frozenset(re.findall(r"^--(\w+)", "\n".join(argv), re.M))
    resumed = None if named else _arguments_of_resumed_run(argv)
    demo = not named and resumed is None and "data_mix" not in on_command_line
    if demo or resumed is not None:
        # A run goes on where it is: not where its file, which may be another's, would have it.
        place = [] if resumed is None else ["--output_dir", str(resumed.parent.parent)]
        argv = ["--config", str(DEMO_CONFIG if demo else resumed), *place, *argv]
    description = "Train a Hugging Face causal language model. Without arguments: a demo on the standard library."
    flat = parse("train.py", description, groups(Arguments).values(), argv, () if resumed is None else WHICH_RUN)
    flat |= _mixture(flat)
    if flat["branch_decay"] is not None:
        flat |= _branch(flat)
    if demo:  # the preset's paths are those of this repository, wherever it is started from
        for name in ("model_name", "train_data_dir"):
            flat[name] = str(ROOT / flat[name])
    by_group = {
        name: group(**{f.name: flat[f.name] for f in fields(group)}) for name, group in groups(Arguments).items()
    }
    return Arguments(**by_group, demo=demo, on_command_line=on_command_line)


def _mixture(flat: dict[str, Any]) -> dict[str, Any]:
    """What arguments.yaml keeps of --data_mix and --replay: the mixture itself, as its file may change."""
    try:
        if flat["replay"] is not None or flat["replay_fraction"] is not None:
            mix = with_replay(flat["train_data_dir"], flat["data_mix"], flat["replay"], flat["replay_fraction"])
            return {"data_mix": mix, "train_data_dir": None, "replay": None, "replay_fraction": None}
        return {"data_mix": flat["data_mix"] and text_of(flat["data_mix"])}
    except ValueError as error:
        fail("train.py", str(error))


def _branch(flat: dict[str, Any]) -> dict[str, Any]:
    """What --branch_decay comes to among the other flags."""
    from fabric_llm.plan.branch import branch_flags

    try:
        return branch_flags(flat)
    except ValueError as error:
        fail("train.py", str(error), getattr(error, "code", 2))


def _arguments_of_resumed_run(argv: list[str]) -> Optional[Path]:
    """arguments.yaml of the run that --resume true with --run_name or --checkpoint names, None if there is none."""
    import argparse

    names = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in ("resume", "run_name", "checkpoint", "output_dir", "branch_decay"):
        names.add_argument(f"--{name}", nargs="?")
    given, _ = names.parse_known_args(argv)
    resumes = str(given.resume).lower() in ("true", "auto") or given.branch_decay
    if not resumes or not (given.run_name or given.checkpoint):
        return None
    folder = Path(given.output_dir or "checkpoints", given.run_name or "")
    if given.checkpoint:
        folder = Path(os.path.abspath(given.checkpoint)).parent
    return folder / "arguments.yaml" if (folder / "arguments.yaml").is_file() else None


def parse_prepare(argv: Optional[list[str]] = None) -> PrepareArguments:
    """Arguments of prepare_data.py. Exits with code 2 and one sentence on anything it doesn't know."""
    argv = list(sys.argv[1:] if argv is None else argv)
    description = "Raw text -> a packed dataset folder for train.py."
    return PrepareArguments(**parse("prepare_data.py", description, [PrepareArguments], argv))


def parse_export(argv: Optional[list[str]] = None) -> ExportArguments:
    """Arguments of export_hf.py. Exits with code 2 and one sentence on anything it doesn't know."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv and not argv[0].startswith("-"):  # the checkpoint may be given by position
        argv = ["--checkpoint", *argv]
    description = "Checkpoint -> a verified Hugging Face directory: export_hf.py checkpoints/RUN --output hf/mine"
    return ExportArguments(**parse("export_hf.py", description, [ExportArguments], argv))
