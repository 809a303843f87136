"""Mistakes that the arguments and the names of files show: what is answered before torch is imported.

Nothing here imports torch, lightning, transformers or datasets, which takes seconds. Each check raises ValueError in one
sentence with the offending value; those of a model's folder that could run code raise Fault (77).
"""

from __future__ import annotations

import fnmatch
import importlib.util
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from fabric_llm import retention
from fabric_llm.faults import REFUSED, SAVE_FAILED, UNWRITABLE, Fault
from fabric_llm.manifest import MANIFEST, check_name, weight_map
from fabric_llm.spelling import nearest

WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json")
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
DEFAULT_PATTERNS = ["*.txt", "*.txt.gz", "*.md", "*.rst", "*.jsonl", "*.jsonl.gz", "*.parquet"]  # of prepare_data.py
ROOM_BYTES = 16 * 2**20  # for tokenizer, configuration, probe and manifest
SMALLEST_VOCABULARY = 257  # every byte, and the end of a text

POSITIVE = (
    *("number_epochs", "max_step", "micro_batch_size", "gradient_accumulation_steps", "global_batch_size", "lr"),
    *("eval_batch_size", "eval_step_interval", "save_step_interval", "keep_last", "keep_every", "log_step_interval"),
    *("context_length", "spike_threshold", "spike_window", "hang_timeout", "join_timeout", "num_nodes", "max_hours"),
)
LEFT_OUT = {
    "max_step": "as many as --number_epochs needs",
    "eval_step_interval": "none between",
    "save_step_interval": "none between",
    "keep_last": "all",
}
NOT_NEGATIVE = (
    *("grad_clip", "min_lr", "warmup_steps", "weight_decay", "num_workers", "eval_iters", "sample_tokens", "seed"),
    *("max_skipped_steps", "keep_best", "router_aux_loss_coef"),
)


# ------------------------------------------------------------------------------- numbers of a training run


def numbers(flat: dict[str, Any]) -> None:
    """Signs and ranges of all numbers among the flags of train.py."""
    if flat["devices"] != "auto" and flat["devices"] < 1:
        every = "; --devices auto takes all GPUs" if flat["devices"] == -1 else ""
        raise ValueError(f"--devices must be positive, not {flat['devices']}{every}.")
    for names, fits, words in (
        (POSITIVE, lambda value: value > 0, "positive"),
        (NOT_NEGATIVE, lambda value: value >= 0, "0 or more"),
    ):
        for name in names:
            if flat[name] is not None and not fits(flat[name]):
                instead = f"; leave it out for {LEFT_OUT[name]}" if name in LEFT_OUT else ""
                raise ValueError(f"--{name} must be {words}, not {flat[name]}{instead}.")
    for name in ("lr", "min_lr", "weight_decay", "grad_clip", "hang_timeout", "spike_threshold"):
        if flat[name] is not None and flat[name] == float("inf"):
            raise ValueError(f"--{name} must be a finite number, not {flat[name]}.")
    for name in ("beta1", "beta2"):
        if not 0 <= flat[name] < 1:
            raise ValueError(f"--{name} must be at least 0 and less than 1, not {flat[name]}.")
    if flat["min_lr"] > flat["lr"]:
        raise ValueError(f"--min_lr {flat['min_lr']} is larger than --lr {flat['lr']}.")


def batch_sizes(
    micro_batch_size: Optional[int],
    accumulation: Optional[int],
    global_batch_size: Optional[int],
    devices: int,
    num_nodes: int,
) -> tuple[int, int, int]:
    """(sequences per micro-batch, micro-batches per step and device, sequences per step).

    What isn't given follows from the rest. Raises ValueError, with all numbers, if they don't divide or disagree.
    """
    world_size = devices * num_nodes
    if global_batch_size is None:
        micro_batch_size, accumulation = micro_batch_size or 1, accumulation or 1
        return micro_batch_size, accumulation, micro_batch_size * accumulation * world_size
    if micro_batch_size is None:
        micro_batch_size = max(1, global_batch_size // (accumulation * world_size)) if accumulation else 1
    per_micro_batch = micro_batch_size * world_size
    spelled = f"--micro_batch_size {micro_batch_size} x {devices} devices x {num_nodes} nodes = {per_micro_batch}"
    if global_batch_size % per_micro_batch:
        raise ValueError(f"--global_batch_size {global_batch_size} doesn't divide by {spelled}.")
    needed = global_batch_size // per_micro_batch
    if accumulation not in (None, needed):
        raise ValueError(
            f"--global_batch_size {global_batch_size} needs --gradient_accumulation_steps {needed}, "
            f"not {accumulation}: {spelled}."
        )
    return micro_batch_size, needed, global_batch_size


def sizes(
    folder: str, rows: int, context_length: int, asked: Optional[int], micro_batch_size: int, global_batch_size: int
) -> None:
    """Batches against the training split: `rows` sequences of `context_length` tokens. asked: --context_length."""
    if asked not in (None, context_length):
        raise ValueError(
            f"--context_length {asked}: the rows of {folder!r} hold {context_length} tokens; "
            f"run prepare_data.py again with --context_length {asked}."
        )
    if micro_batch_size > rows:
        raise ValueError(
            f"--micro_batch_size {micro_batch_size} is larger than the training split of {folder!r}: {rows} sequences."
        )
    if global_batch_size > rows:
        raise ValueError(
            f"A step takes {global_batch_size} sequences, but the training split of {folder!r} has {rows}."
        )


# ------------------------------------------------------------------------------- how the model is spread


@dataclass(frozen=True)
class Sharding:
    """How a model is wrapped. Field meanings: docs/fsdp.md."""

    auto_wrap_policy: str = "auto"
    sharding_strategy: str = "FULL_SHARD"
    limit_all_gathers: bool = True
    cpu_offload: bool = False
    backward_prefetch: str = "BACKWARD_PRE"
    reduce_dtype: str = "float32"


def strategy(
    name: str, world_size: Optional[int], tpu: bool, precision: str, kind: Optional[str], sharding: Sharding
) -> str:
    """The strategy's name for `auto`, checked against the rest. Raises ValueError where they don't go together.

    world_size, kind ("cpu" or "cuda"): None where they aren't known yet; what depends on them isn't checked then.
    """
    if tpu:
        if importlib.util.find_spec("torch_xla") is None:
            raise ValueError("--tpu true needs the package torch_xla, which isn't installed on this machine.")
        return "xla"
    if name == "auto" and world_size is not None:
        name = "fsdp" if world_size > 1 else "single"
    elif name == "ddp" and world_size == 1:
        name = "single"
    if precision == "16-mixed" and kind == "cpu":
        raise ValueError("--precision 16-mixed needs a GPU; on a CPU take bf16-mixed or 32-true.")
    if name == "fsdp2" and precision == "16-mixed":
        raise ValueError("--precision 16-mixed doesn't go with --strategy fsdp2; take bf16-mixed, or --strategy fsdp.")
    if name == "fsdp2" and sharding.sharding_strategy == "NO_SHARD":
        raise ValueError("--sharding_strategy NO_SHARD doesn't go with --strategy fsdp2; --strategy ddp is the same.")
    if sharding.cpu_offload and name in ("ddp", "single"):
        raise ValueError(f"--cpu_offload true needs --strategy fsdp or fsdp2; here it is {name}.")
    wrap_size(sharding.auto_wrap_policy)
    return name


def wrap_size(policy: str) -> Optional[int]:
    """The parameters of an --auto_wrap_policy size:N, None for another. Raises ValueError."""
    if not policy.startswith("size:"):
        return None
    try:
        count = int(float(policy.removeprefix("size:")))
    except (ValueError, OverflowError):
        count = 0
    if count < 1:
        raise ValueError(f"--auto_wrap_policy {policy}: after 'size:' comes a number of parameters, such as size:1e8.")
    return count


def offload(strategy: str, cpu_offload: bool, micro_batches: int) -> None:
    """FSDP1 overwrites the offloaded gradient of the micro-batch before, without a word."""
    if strategy == "fsdp" and cpu_offload and micro_batches > 1:
        raise ValueError(
            f"--cpu_offload true with --strategy fsdp can't accumulate gradients ({micro_batches} micro-batches a step): "
            "take --strategy fsdp2, or a larger --micro_batch_size."
        )


# ------------------------------------------------------------------------------- names of models on the hub


def hub_name(flag: str, name: str, what: str = "model") -> None:
    """Raises ValueError where `name`, which isn't a folder here, can't be a name on the hub either."""
    if found := re.fullmatch(
        r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/(?:datasets/)?([\w.-]+/[\w.-]+?)(?:\.git)?(?:[/?#].*)?",
        name.strip(),
    ):
        raise ValueError(f"{flag} {name!r} is an address: take {flag} {found[1]}.")
    if os.path.exists(name):
        raise ValueError(f"{flag} {name!r} is a file: it takes a folder, or a name on the hub such as org/name.")
    if found := re.fullmatch(r"models--([^/]+)--([^/]+)", name.rstrip("/")):
        raise ValueError(f"No {what} {name!r} here: take {flag} {found[1]}/{found[2]}.")
    if found := re.fullmatch(r"([\w.-]+/[\w.-]+)[@:]([\w.-]+)", name):
        raise ValueError(f"{flag} {name!r}: a revision can't be given by name; download it and name its folder.")
    if name != name.strip() or not name:
        raise ValueError(f"{flag} {name!r} has spaces around the name: take {flag} {name.strip() or 'org/name'}.")
    if not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", name) or "--" in name or ".." in name:
        raise ValueError(
            f"No {what} {name!r}: there is no such folder, and it can't be a name on the hub.{_near(name)}"
        )


def _near(name: str) -> str:
    """What there is instead of the path `name`, as the end of a sentence."""
    path = Path(name)
    if name.startswith("~") and path.expanduser().exists():  # --model_name=~/mine
        return f" The shell replaces ~ only at the start of a word: take {path.expanduser()}."
    while not path.parent.exists():
        path = path.parent
    return nearest_of(path) or (
        f" There is {str(path.parent)!r}, without {path.name!r}." if len(path.parts) > 1 else ""
    )


# ------------------------------------------------------------------------------- folders that are read


def check_model_folder(name: str, flag: str = "--model_name") -> None:
    """A model's folder, or what may be a name on the hub. Raises ValueError, Fault (77) for code."""
    folder = Path(name)
    if not folder.is_dir():
        return hub_name(flag, name)
    adapter = folder / "adapter_config.json"
    if adapter.is_file():  # names a base model, which peft would fetch
        raise ValueError(f"{name!r} holds an adapter{_base_of(adapter)}: merge it into its model first.")
    if not (folder / "config.json").is_file():
        raise ValueError(f"{name!r} isn't a model directory: it has no config.json.{_instead(folder, flag)}")
    pickled = sorted(path.name for path in folder.iterdir() if path.name.endswith(PICKLES))
    if pickled and not any((folder / name).is_file() for name in WEIGHT_FILES):
        raise Fault(
            f"{str(folder / pickled[0])!r} is a pickle, which can run code when opened, and there are no safetensors "
            "beside it: refused.",
            REFUSED,
        )
    for index in folder.glob("*.index.json"):
        for file in sorted(set(weight_map(index).values())):
            if index.name in WEIGHT_FILES:
                weights_name(file, index)


def weights_name(name: Any, where: Path) -> None:
    """Raises Fault (77) unless `name`, read from the file `where`, is a safetensors file, or their index, beside it."""
    check_name(str(name), where)
    if not str(name).endswith((".safetensors", ".safetensors.index.json")):
        raise Fault(f"{str(where)!r} names the weights {name!r}, which aren't safetensors: refused.", REFUSED)


def _base_of(adapter: Path) -> str:
    try:
        base = json.loads(adapter.read_bytes()).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError, RecursionError):
        base = None
    return f" for {base[:200]!r}" if isinstance(base, str) and base.isprintable() else ""


def _instead(folder: Path, flag: str) -> str:
    """What a folder without a config.json is, and what to name in its place."""
    if (newest := retention.latest(folder)) is not None:
        return f" It is a run: take its newest checkpoint, {flag} {newest}."
    if (folder / "arguments.yaml").is_file():
        return " It is a run without a complete checkpoint."
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        return f" It is a dataset: that goes to --train_data_dir, and a model to {flag}."
    inside = sorted(path.parent for path in folder.glob("*/config.json"))[:3]
    snapshots = sorted(path.parent for path in folder.glob("snapshots/*/config.json"))  # the hub's cache
    if inside or snapshots:
        return f" There is one in {', '.join(repr(str(path)) for path in inside or snapshots)}."
    runs = sorted(path for path in folder.glob("*/step-*") if retention.latest(path.parent) == path)
    if runs:
        return f" It is a folder of runs: take a checkpoint, such as {flag} {runs[0]}."
    if any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        return " It holds a tokenizer alone."
    if any(folder.glob("*.gguf")):
        return " It holds GGUF files, which are for inference: take the model that they were made from."
    if (folder / "params.json").is_file():
        return " It holds Meta's own format: take the folder, or the name on the hub, in Hugging Face's."
    return ""


def check_dataset_folder(name: str | Path) -> None:
    """A dataset's folder, as far as the names of its files say. Raises ValueError."""
    folder = Path(name)
    if not folder.is_dir():
        is_file = " It is a file." if folder.exists() else ""
        raise ValueError(
            f"No dataset at {str(folder)!r}.{is_file} Make one with prepare_data.py --input ... --output "
            f"{'data/mine' if is_file else folder}."
        )
    if (folder / "state.json").is_file():
        whole = f": take {folder.parent}" if (folder.parent / "dataset_dict.json").is_file() else ""
        raise ValueError(f"{str(folder)!r} holds one split without a name; it needs 'train' and 'validation'{whole}.")
    if not (folder / "dataset_dict.json").is_file():
        inside = sorted(path.parent for path in folder.glob("*/dataset_dict.json"))[:3]
        there = f" There is one in {', '.join(repr(str(path)) for path in inside)}." if inside else ""
        if (folder / "config.json").is_file():
            there = " It is a model: that goes to --model_name."
        raise ValueError(
            f"{str(folder)!r} isn't a dataset folder: it has no dataset_dict.json (see data/README.md).{there}"
        )


def said_of_rows(folder: Path) -> Optional[tuple[int, int]]:
    """(training rows, tokens in each) of a dataset of prepare_data.py as its manifest says, unproven; None without one."""
    try:
        said = json.loads((folder / "manifest.json").read_bytes())
        numbers = said["splits"]["train"]["rows"], said["context_length"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return numbers if said.get("packed") and all(type(number) is int for number in numbers) else None


# ------------------------------------------------------------------------------- prepare_data.py


def preparation(
    inputs: Sequence[str | Path],
    tokenizer: Optional[str],
    train_tokenizer: Optional[int],
    context_length: int,
    validation_fraction: float,
    pattern: Sequence[str],
) -> None:
    """The arguments of `prepare` among themselves."""
    if not inputs:
        raise ValueError("no input: name at least one file, folder or hub dataset with --input")
    if not pattern:
        raise ValueError("no pattern: with none, no file of a folder would be read")
    if (tokenizer is None) == (train_tokenizer is None):
        raise ValueError(
            f"give exactly one of --tokenizer (got {tokenizer}) and --train_tokenizer (got {train_tokenizer})"
        )
    if train_tokenizer is not None and train_tokenizer < SMALLEST_VOCABULARY:
        raise ValueError(
            f"train_tokenizer must be at least {SMALLEST_VOCABULARY} (every byte and <|endoftext|>), got {train_tokenizer}"
        )
    if context_length < 2:
        raise ValueError(f"context_length must be at least 2 tokens, got {context_length}")
    if not 0 < validation_fraction < 1:
        raise ValueError(f"validation_fraction must lie between 0 and 1, both excluded, got {validation_fraction}")


def prepared_output(output: Path, overwrite: bool) -> None:
    """The folder, resolved, that a prepared dataset is to be. Raises ValueError where it can't or mustn't be replaced."""
    if not os.path.exists(output):  # False as well where one may not look, which is told of later
        return
    if not output.is_dir():
        raise ValueError(f"output {output} is a file: name a folder")
    # Found out now, and not when the finished dataset is renamed to it.
    if os.path.ismount(output):
        raise ValueError(f"output {output} is a mount point, which cannot be replaced: name a folder inside it")
    if not any(output.iterdir()):
        return
    if not overwrite:
        raise ValueError(f"output {output} exists and is not empty: pass --overwrite to replace it, or name another")
    # A slip such as `--output ~ --overwrite` must not cost anyone their files.
    if not (output / "manifest.json").is_file() or not (output / "dataset_dict.json").is_file():
        raise ValueError(f"output {output} holds no prepared dataset, so it is not overwritten: remove it yourself")


def text_input(given: str, pattern: Sequence[str], exclude: Sequence[str], output: Path) -> None:
    """Something to read: a file, a folder with a file that matches, or what may be a dataset's name on the hub."""
    if not os.path.exists(given):
        hub_dataset(given)
    elif os.path.isdir(given) and not is_dataset_folder(given):
        if next(files_of(given, pattern, exclude, output), None) is None:
            raise ValueError(f"no file in {given} matches {' '.join(pattern)}: choose others with --pattern")


def hub_dataset(name: str) -> str:
    """What is said where the hub has no dataset of that name. Raises ValueError where it can't be one."""
    nowhere = f"input {name} is neither a file or folder here nor a dataset that can be read from the hub"
    if found := re.match(r"(?:https?://)?(?:huggingface\.co|hf\.co)/datasets/([\w.-]+/[\w.-]+)", name):
        raise ValueError(f"{nowhere}: it is an address; take --input {found[1]}")
    # What cannot be a hub name is a slip in a path, to be told of without asking the network.
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?(:[^/:]+)?", name) or name.startswith("."):
        raise ValueError(nowhere)
    if any(fnmatch.fnmatchcase(name.lower(), one) for one in DEFAULT_PATTERNS):
        raise ValueError(nowhere)
    return nowhere


def is_dataset_folder(folder: str) -> bool:
    """True for a folder that `datasets.save_to_disk` wrote."""
    return any(os.path.isfile(os.path.join(folder, name)) for name in ("dataset_dict.json", "state.json"))


def files_of(folder: str, pattern: Sequence[str], exclude: Sequence[str], output: Path) -> Iterator[str]:
    """The files in `folder` that match, in order; `output`, a resolved path, is never descended into."""
    for root, directories, names in os.walk(folder, onerror=_refuse):
        directories[:] = sorted(
            name
            for name in directories
            if name not in exclude and os.path.realpath(os.path.join(root, name)) != str(output)
        )
        for name in sorted(names):
            path = os.path.join(root, name)
            if any(fnmatch.fnmatchcase(name.lower(), one.lower()) for one in pattern) and os.path.isfile(path):
                yield path


def _refuse(error: OSError) -> None:
    # Without this os.walk passes over what it cannot list.
    raise ValueError(f"folder {error.filename} cannot be read: {error.strerror}") from error


# ------------------------------------------------------------------------------- disks


def room(folder: Path, needed_bytes: int, what: str, advice: str) -> None:
    """Raises Fault (74) unless the disk that holds `folder` has `needed_bytes` and a little more."""
    needed, free = int(needed_bytes * 1.01) + ROOM_BYTES, shutil.disk_usage(folder).free
    if free < needed:
        raise Fault(
            f"{what} needs {needed / 2**30:,.2f} GiB, but {str(folder)!r} has {free / 2**30:,.2f} GiB free: {advice}.",
            SAVE_FAILED,
            retryable=False,
        )


def writable(output: Path) -> None:
    """Raises Fault (73) where `output` can't be made. Makes nothing."""
    place = output.absolute().parent
    while not os.path.lexists(place):
        place = place.parent
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise Fault(f"output {output} cannot be written: {error.strerror}.", UNWRITABLE) from error


# ------------------------------------------------------------------------------- export_hf.py


def checkpoint_at(path: str | Path) -> Path:
    """The checkpoint at `path`, or the latest of the run at `path`. Raises ValueError where there is none."""
    path = Path(path)
    if not path.is_dir():
        raise ValueError(f"No checkpoint at {str(path)!r}.{nearest_of(path)}")
    found = path if (path / MANIFEST).is_file() else retention.latest(path)
    if found is None:
        raise ValueError(f"{str(path)!r} is neither a checkpoint nor a run with one: no {MANIFEST}, no step-N.")
    return found


def exported_output(output: Path, overwrite: bool) -> None:
    """The folder that an exported model is to be. Raises ValueError where it mustn't be replaced."""
    if not output.exists():
        return
    if not overwrite:
        raise ValueError(f"{str(output)!r} exists; take another --output, or --overwrite true.")
    if not (output / "config.json").is_file() or (output / MANIFEST).exists():  # such as the run itself
        raise ValueError(f"{str(output)!r} isn't an exported model, so it is not overwritten; take another --output.")


def find_launcher(launcher: str) -> list[str]:
    """Its words; a program without a folder may lie beside Python, where the environment isn't activated."""
    words = shlex.split(launcher)
    beside = Path(sys.executable).parent / words[0] if words else Path()
    found = shutil.which(words[0]) or shutil.which(str(beside)) if words else None
    if found is None:
        raise Fault(f"--launcher {launcher!r}: there is no such program.")
    return [found, *words[1:]]


def nearest_of(path: Path) -> str:
    """A folder beside `path`, which isn't there, that is spelled much like it, as the end of a sentence."""
    try:
        beside = [other.name for other in path.absolute().parent.iterdir() if other.is_dir()]
    except OSError:
        beside = []
    close = nearest(path.name, sorted(beside))
    return f" Did you mean {str(path.with_name(close[0]))!r}?" if len(close) == 1 else ""
