"""Law 16, drawn: rows of flags that say how, their runs, and what these must equal.

arguments.py declares which flags say how. A row gives each of them a value; together rows hold
every pair of values of two flags. Each row trains a toy model with `python train.py`, is stopped or
killed at random and goes on, half of the time with the flags of another row, and must agree with
tests/plain_trainer.py. What the program refuses is counted, and its sentences are kept.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple, Optional

import datasets
import numpy as np
import plain_trainer
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from arguments import Arguments
from fabric_llm.base.faults import BAD_INPUT, DONE, PEER_LOST, STOPPED
from fabric_llm.base.flag import Flag
from fabric_llm.model.tensor_files import Tensors

ROOT = Path(__file__).resolve().parents[1]
VOCABULARY, CONTEXT, END = 131, 32, 0  # odd, so that shards are uneven
ROWS = 44  # not a multiple of the global batch

# ------------------------------------------------------------------------------- what is trained

_SHAPE = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
_SHAPE |= dict(num_key_value_heads=2, head_dim=8, max_position_embeddings=64)
_TEXT = dict(vocab_size=VOCABULARY, bos_token_id=END, eos_token_id=END, pad_token_id=None)
_TEXT |= dict(initializer_range=0.1)
_LLAMA = {"model_type": "llama", **_SHAPE, **_TEXT}
_GPT2 = dict(n_embd=32, n_layer=2, n_head=4, n_positions=64)
# What is drawn depends on the ranks.
_GPT2 |= dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
_WINDOWS = dict(sliding_window=8, layer_types=["sliding_attention", "full_attention"])
_GEMMA = {"model_type": "gemma3_text", **_SHAPE, **_TEXT, **_WINDOWS, "query_pre_attn_scalar": 8}
_EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2)
_EXPERTS |= dict(output_router_logits=True, router_aux_loss_coef=0.1)
_LONG = dict(rope_type="longrope", rope_theta=10000.0, original_max_position_embeddings=16)
_LONG |= dict(factor=4.0, short_factor=[1.0] * 4, long_factor=[1.0, 2.0, 4.0, 8.0])
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
_VISION = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
_VISION |= dict(model_type="siglip_vision_model", image_size=8, patch_size=4)
_PICTURES = dict(boi_token_index=128, eoi_token_index=129, image_token_index=130)
_PICTURES |= dict(mm_tokens_per_image=4, vision_config=_VISION)
MODELS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "gpt2": {"model_type": "gpt2", **_TEXT, **_GPT2},
    "gemma3_text": _GEMMA,
    "qwen3": {**_LLAMA, "model_type": "qwen3"},
    "mixtral": {**_LLAMA, "model_type": "mixtral", **_EXPERTS},
    "phi3": {
        **_LLAMA, "model_type": "phi3", "original_max_position_embeddings": 16,
        "rope_parameters": _LONG,
    },
    "forgetful": {**_LLAMA, "initializer_range": 0.02},
    # The frequencies depend on the longest row so far.
    "dynamic": {**_LLAMA, "max_position_embeddings": 16, "rope_parameters": _DYNAMIC},
    # With a tower for pictures, which text gives no gradient.
    "gemma3": {
        "model_type": "gemma3", "text_config": _GEMMA, "initializer_range": 0.1, **_PICTURES,
    },
}  # fmt: skip

# Name of a toy or of a flag that says how -> value, without flags that have no effect beside these.
Row = dict[str, Any]


class Data(NamedTuple):
    """What a run reads: by its flags, and in the words of the plain trainer."""

    flags: dict[str, str]
    sources: dict[str, str]  # name -> dataset
    # From which part of the run on: name -> share.
    stages: dict[str, dict[str, str]] = {"0": {"validation": "1"}}
    pinned: Row = {}  # what a row has with it; the run is compared with one of these flags alone


BEST_FIT = {"train_data_dir": "{folder}/best_fit", "document_masking": "true"}
REPLAY = {**BEST_FIT, "replay": "{folder}/second", "replay_fraction": "0.25"}
MIX = {"data_mix": "a={folder}/best_fit:0.7,b={folder}/second:0.3", "document_masking": "true"}
LOW = {"train_data_dir": "{folder}/low", "replay": "{folder}/high", "replay_fraction": "0.0625"}
LOW |= dict(lr="3e-3", max_step="12", lr_schedule="constant", grad_clip="1", weight_decay="0.1")
LOW |= dict(warmup_steps="0", beta2="0.95", seed="1234")
LOW |= {"forgetting_budget": "replay:0.1", "forgetting_action": "rewind"}
OFTEN = dict(model="forgetful", eval_step_interval=1, save_step_interval=1, eval_iters=64)
DATA = {
    "rows": Data({"train_data_dir": "{folder}/rows"}, {"validation": "rows"}),
    "labels": Data({"train_data_dir": "{folder}/labels"}, {"validation": "labels"}),
    "best_fit": Data(BEST_FIT, {"validation": "best_fit"}),
    "concat": Data({**BEST_FIT, "train_data_dir": "{folder}/concat"}, {"validation": "concat"}),
    "unmasked": Data({**BEST_FIT, "document_masking": "false"}, {"validation": "best_fit"}),
    "mixture": Data(MIX, {"a": "best_fit", "b": "second"}, {"0": {"a": "0.7", "b": "0.3"}}),
    "stages": Data(
        {"data_mix": "{folder}/stages.yaml"},
        {"a": "rows", "b": "more"},
        {"0": {"a": "0.6", "b": "0.4"}, "0.5": {"a": "0.25", "b": "0.75"}},
    ),
    "replay": Data(
        REPLAY, {"new": "best_fit", "replay": "second"}, {"0": {"new": "0.75", "replay": "0.25"}}
    ),
    # Goes back to the last checkpoint with room, and on with more replay. When that is depends on
    # what is evaluated and saved when, which therefore says what. The plain trainer can't go back.
    "forgetting": Data(LOW, {"new": "low", "replay": "high"}, pinned=OFTEN),
}
STAGES = """sources:
  a: {path: FOLDER/rows, weight: 0.6}
  b: {path: FOLDER/more, weight: 0.4}
stages:
  - {from: 0.5, weights: {a: 0.25, b: 0.75}}
"""
# Name -> values of the other flags that say what; each toy draws one of each.
WHAT: dict[str, list[Any]] = {
    "max_step": [5, 6, 7],
    "lr": [2e-3, 5e-3],
    "lr_schedule": ["cosine", "linear", "constant", "wsd", "infinite", "inverse_sqrt"],
    "warmup_steps": [0, 2],
    "min_lr": [0.0, 1e-4],
    "weight_decay": [0.0, 0.1, 1.0],
    "grad_clip": [0.0, 0.3, 1.0],
    "freeze": [None, None, "embeddings", "model.layers.0.*"],
    "beta2": [0.95, 0.99],
    "seed": [1234, 7],
}
BESIDE = "rows"  # a dataset that is evaluated beside


def write_toys(folder: Path) -> Path:
    """All models and datasets."""
    words = {"end": END, **{f"w{i}": i for i in range(1, VOCABULARY)}}
    tokenizer = Tokenizer(WordLevel(words, unk_token="end"))
    tokenizer.pre_tokenizer = Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="end")
    for seed, (name, said) in enumerate(MODELS.items()):
        torch.manual_seed(seed)
        config = AutoConfig.for_model(**said)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
        fast.save_pretrained(folder / name)
    names = "rows more labels best_fit second concat low high".split()
    for number, name in enumerate(names):
        generator, splits = np.random.default_rng(number), {}
        columns = _halves if name in ("low", "high") else _columns
        for split in ("train", "validation"):
            splits[split] = datasets.Dataset.from_dict(columns(name, split, generator))
        datasets.DatasetDict(splits).save_to_disk(str(folder / name))
        fast.save_pretrained(folder / name / "tokenizer")
        if name in ("best_fit", "second", "concat"):
            manifest = dict(packed=True, context_length=CONTEXT, max_token_id=VOCABULARY - 1)
            manifest |= dict(packing="concat" if name == "concat" else "best_fit", eos_token_id=END)
            (folder / name / "manifest.json").write_text(json.dumps(manifest))
    (folder / "stages.yaml").write_text(STAGES.replace("FOLDER", str(folder)))
    (folder / "prompts.txt").write_text("w1 w2 w3\nw7\n")
    return folder


def _columns(name: str, split: str, generator: np.random.Generator) -> dict[str, list[list[int]]]:
    """The rows of a dataset; in all the second of two tokens follows from the first."""
    tokens = generator.integers(1, VOCABULARY, (ROWS if split == "train" else 9, CONTEXT))
    tokens[:, 1::2] = (tokens[:, ::2] * 7 + 3) % (VOCABULARY - 1) + 1
    if name in ("best_fit", "second", "concat"):
        for row in tokens:
            ends = np.cumsum(generator.integers(2, 25, CONTEXT)) - 1  # documents of 2 to 24 tokens
            row[ends[ends < CONTEXT]] = END
            if name != "concat":  # what is left of a row is padding
                row[ends[ends < CONTEXT][-1] :] = END
    columns = {"input_ids": tokens.tolist()}
    if name == "labels":
        labels = np.where(generator.random(tokens.shape) < 0.3, -100, tokens)
        columns["labels"] = labels.tolist()
    return columns


def _halves(name: str, split: str, generator: np.random.Generator) -> dict[str, list[list[int]]]:
    """Rows of half of the vocabulary: the lower; of `high` some, and all in validation, upper."""
    rows, upper = (200, 16) if split == "train" else (9, 9)
    tokens = generator.integers(1, 66, (rows, CONTEXT))
    if name == "high":
        tokens[:upper] += 65
    return {"input_ids": tokens.tolist()}


def what_of(model: str, data: str, folder: Path, seed: int) -> dict[str, Any]:
    """The flags that say what is trained: always the same for the same arguments."""
    generator = random.Random(f"{seed} {model} {data}")
    flags = {name: generator.choice(values) for name, values in WHAT.items()}
    if data in ("rows", "best_fit") and generator.random() < 0.5:
        flags["max_step"] = None  # one epoch, of which the last step is a part of a batch
    if data == "forgetting":
        flags["freeze"] = None
    if flags["freeze"] == "embeddings":
        flags["freeze"] = "transformer.wte*" if model == "gpt2" else "*embed_tokens*"
    elif flags["freeze"] is not None and model in ("gpt2", "gemma3"):
        layers = {"gpt2": "transformer.h", "gemma3": "model.language_model.layers"}
        flags["freeze"] = f"{layers[model]}.0.*"
    flags |= {"model_name": str(folder / model), "global_batch_size": 8, "precision": "32-true"}
    return flags | {name: value.format(folder=folder) for name, value in DATA[data].flags.items()}


# ------------------------------------------------------------------------------- how it is trained

# Values to draw of flags whose types don't say them, or say too many. {folder}, {data_set} and
# {layer} are those of the row's toys.
VALUES: dict[str, list[Any]] = {
    "devices": [1, 2],
    "context_parallel": [1, 2],
    "hang_timeout": [600, 1800],
    "join_timeout": [300, 500],
    "num_workers": [0, 1, 3],
    "auto_wrap_policy": ["auto", "{layer}", "size:3000", "none"],
    "activation_checkpointing": ["none", "full", "every:2", "selective", "offload"],
    "max_hours": [None, 1],
    "micro_batch_size": [None, 1, 2, 4],
    "gradient_accumulation_steps": [None, 1, 2, 4],
    "ema_decay": [None, 0.5],
    "ema_every": [1, 2],
    "eval_batch_size": [1, 2, 8],
    "eval_iters": [0, 64],  # none, or all rows, of which a probe has 64
    "eval_step_interval": [None, 1, 2, 3],
    "eval_data": [None, f"beside={{folder}}/{BESIDE}"],
    "probes": [None, "copy", "copy,retrieval"],
    "save_step_interval": [None, 1, 2, 3],
    "keep_last": [None, 1, 2],
    "keep_every": [None, 2],
    "keep_best": [0, 1, 2],
    "keep_best_of": [None, "{data_set}"],
    "logger": ["none", "csv", "tensorboard", "wandb", "csv,tensorboard"],
    "log_step_interval": [1, 2, 10],
    "profile": [None, "2:3"],
    "entity": [None, "me"],
    "project": [None, "mine"],
    "log_model": ["false", "last", "all"],
    "sample_prompts": [None, "{folder}/prompts.txt"],
    "sample_tokens": [2, 4],
}
# Flags that say how and have one value here, and why.
NOT_DRAWN = {
    "num_nodes": "there is one machine",
    "output_dir": "each run has a folder of its own",
    "run_name": "each run has a folder of its own",
    "resume": "given after an interruption",
    "checkpoint": "a run goes on from its newest checkpoint",
    "mirror": "tests/test_mirrored_runs.py compares its runs with runs without it, bit for bit",
    "mirror_timeout": "no effect without mirror",
    "reduce_dtype": "no effect in 32-true, in which all rows train",
}


def flags_of_how() -> dict[str, Flag]:
    return {name: one for name, one in Arguments.declared().items() if one.how}


def values_of(name: str, one: Flag) -> list[Any]:
    """The values to draw of a flag. Raises ValueError if neither its type nor VALUES says them."""
    words = [word for kind in one.kinds for word in (["false", "true"] if kind is bool else [kind])]
    found = VALUES.get(name, words)
    if len(found) < 2 or any(isinstance(value, type) for value in found):
        raise ValueError(
            f"--{name} says how is trained, so law 16 draws it, but its type doesn't say values: "
            "give two or more in VALUES of tests/law_16.py, or say in NOT_DRAWN why there is one; "
            "or declare it by `what` in arguments.py."
        )
    return found


def factors() -> dict[str, list[Any]]:
    """What a row draws: name -> values; toys first."""
    drawn = {"model": list(MODELS), "data": list(DATA)}
    for name, one in flags_of_how().items():
        if name not in NOT_DRAWN:
            drawn[name] = values_of(name, one)
    return drawn


Pair = tuple[tuple[str, Any], tuple[str, Any]]


def effective(row: Row) -> Row:
    """The row without flags that have no effect, by what they are declared to need."""
    flags, row = Arguments.declared(), dict(row)
    while True:
        known = {name: row.get(name, one.default) for name, one in flags.items()}
        if known["strategy"] == "auto":
            known["strategy"] = "fsdp" if known["devices"] == 2 else "single"
        known["precision"] = "32-true"
        idle = [name for name in row if name in flags and not _has_effect(flags[name], known)]
        if not idle:
            return row
        for name in idle:
            del row[name]


def _has_effect(one: Flag, known: dict[str, Any]) -> bool:
    for needed, *values in (need.split() for need in one.needs.split(",") if need):
        if needed not in known:
            continue
        is_on = known[needed] not in (None, 0, False, "false", "none")
        if not (set(str(known[needed]).lower().split(",")) & set(values) if values else is_on):
            return False
    return True


def pairs_of(row: Row) -> set[Pair]:
    return set(combinations(sorted(row.items()), 2))


@dataclass
class Refusal:
    """Values that the program has refused together."""

    sentence: str
    # The values of BESIDE_REFUSAL with which they were.
    beside: set[tuple[Any, ...]] = field(default_factory=set)


# on which it may depend without naming it
BESIDE_REFUSAL = ("model", "data", "devices", "strategy")
ENOUGH_REFUSALS = 3  # and none accepted: whatever is beside


@dataclass
class Array:
    """A covering array that grows by rows, each with many pairs that no row before it has."""

    generator: random.Random
    factors: dict[str, list[Any]] = field(default_factory=factors)
    covered: set[Pair] = field(default_factory=set)
    accepted: list[Row] = field(default_factory=list)
    refused: dict[frozenset[tuple[str, Any]], Refusal] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = sorted(self.factors)
        values = [[(name, value) for value in self.factors[name]] for name in names]
        self.all = [pair for one, other in combinations(values, 2) for pair in product(one, other)]

    def draw(self, toys: Optional[Row] = None, tries: int = 40) -> Row:
        """The best of some random rows. toys: what it has, as the model of a run that goes on."""
        best, most = {}, -1
        left = [pair for pair in self.all if pair not in self.covered]
        for _ in range(tries):
            row = {name: self.generator.choice(values) for name, values in self.factors.items()}
            row |= dict(self.generator.choice(left)) if left else {}
            row |= toys or {}
            row = self._mended(effective({**row, **DATA[row["data"]].pinned}))
            if row and (new := len(pairs_of(row) - self.covered)) > most:
                best, most = row, new
        return best or {"model": "llama", "data": "rows", **(toys or {})}

    def _mended(self, row: Row) -> Row:
        """The row without flags that the program has refused in it; {} if what is left was."""
        toys = {*KEPT, "devices", *DATA[row["data"]].pinned}
        while (values := self._refused(row)) is not None:
            first = next((name for name, _ in sorted(values, key=str) if name not in toys), None)
            if first is None:
                return {}
            row = effective({name: value for name, value in row.items() if name != first})
        return row

    def accept(self, row: Row) -> None:
        self.covered |= pairs_of(row)
        self.accepted.append(row)

    def refuse(self, row: Row, sentence: str) -> Row:
        """Keep that the values which a sentence names don't go together.

        Returns the row without the first of them; another one of other toys if it names what is
        trained, as documents that this model can't keep apart.
        """
        words = re.findall(r"--(\w+)", sentence)
        named = {name: row[name] for name in words if name in row}
        if not named and DATA[row["data"]].flags.keys() & set(words):
            toys = frozenset({"model": row["model"], "data": row["data"]}.items())
            self.refused.setdefault(toys, Refusal(sentence)).beside.add(self._beside(row))
            return next(other for other in iter(self.draw, None) if not toys <= other.items())
        values = frozenset((named or row).items())
        self.refused.setdefault(values, Refusal(sentence)).beside.add(self._beside(row))
        first = next((name for name in named if name not in (*KEPT, "devices")), None)
        if first is None:
            return self.draw({name: row[name] for name in KEPT if name in row})
        return effective({name: value for name, value in row.items() if name != first})

    def is_refused(self, row: Row) -> bool:
        return self._refused(row) is not None

    def _refused(self, row: Row) -> Optional[frozenset[tuple[str, Any]]]:
        """Values of this row that were refused together, beside such others or often."""
        for values, one in self.refused.items():
            if values <= row.items() and (self._beside(row) in one.beside or self._never(values)):
                return values
        return None

    def _never(self, together: Collection[tuple[str, Any]]) -> bool:
        """Whether some of these values were refused often, and never accepted together."""
        for values, one in self.refused.items():
            if values.issubset(together) and len(one.beside) >= ENOUGH_REFUSALS:
                if not any(values <= accepted.items() for accepted in self.accepted):
                    return True
        return False

    def _beside(self, row: Row) -> tuple[Any, ...]:
        return tuple(row.get(name) for name in BESIDE_REFUSAL)

    def pairs_never(self) -> set[Pair]:
        """Pairs that no row can have: refused, or one leaves the other without effect."""
        flags = Arguments.declared()

        def idle(one: tuple[str, Any], other: tuple[str, Any]) -> bool:
            return one[0] in flags and not _has_effect(flags[one[0]], dict([other]))

        left = (pair for pair in self.all if pair not in self.covered)
        return {pair for pair in left if idle(*pair) or idle(*pair[::-1]) or self._never(set(pair))}


# --------------------------------------------------------------------- a run and its interruptions

# Places of base/failpoints.py, and how often a short run reaches them at most.
PLACES = {"between_steps": 6, "optimizer_step": 12, "forward": 12, "between_micro_batches": 12}
PLACES |= {"read_data": 6, "evaluate": 20, "save.begin": 3, "save.parts": 3, "save.hash": 3}
PLACES |= {"publish.before_rename": 3, "publish.done": 3, "prune.begin": 2, "prune.renamed": 2}
PLACES |= {"metrics.replace": 2, "set_up": 1}
OUTSIDE = ("stop", "save_now", "SIGTERM", "SIGKILL")  # a file in the run directory, or a signal


@dataclass
class Piece:
    """One start of a run."""

    row: Row
    # A failpoint, or `WORD after SECONDS`, counted from the run's first line; "" for none.
    interruption: str
    command: list[str] = field(default_factory=list)
    code: Optional[int] = None
    said: str = ""

    def __str__(self) -> str:
        before = after = ""
        if " " in self.interruption:
            after = f"   # {self.interruption}"
        elif self.interruption:
            before = f"FABRIC_LLM_FAILPOINT={self.interruption} "
        return f"{before}python {shlex.join(self.command)}{after}   # code {self.code}"


def interruption(generator: random.Random, devices: int) -> str:
    if generator.random() < 0.25:
        return f"{generator.choice(OUTSIDE)} after {generator.uniform(0, 1.5):.2f}"
    place = generator.choice([*PLACES, "between_steps", "optimizer_step"])
    rank = f":rank={generator.randrange(devices)}" if generator.random() < 0.5 else ""
    count, do = generator.randint(1, PLACES[place]), generator.choice(["kill", "kill", "term"])
    return f"{place}{rank}:count={count}:do={do}"


def command(row: Row, what: dict[str, Any], folder: Path, run: Path, resumes: bool) -> list[str]:
    layer = _layer_class(str(what["model_name"]))
    *_, data_set = DATA[row["data"]].sources
    how = {name: value for name, value in row.items() if name not in ("model", "data")}
    how = {"eval_iters": 64, **how, "output_dir": run.parent, "run_name": run.name}
    toys = {"folder": folder, "layer": layer, "data_set": data_set}
    words = {name: str(value).format(**toys) for name, value in how.items() if value is not None}
    words |= {name: str(value) for name, value in what.items() if value is not None}
    words |= {"resume": "auto"} if resumes else {}
    return ["train.py", *(word for name, value in words.items() for word in (f"--{name}", value))]


def _layer_class(model: str) -> str:
    config = AutoConfig.from_pretrained(model)
    with torch.device("meta"):
        modules = AutoModelForCausalLM.from_config(config).modules()
    names = (type(one).__name__ for one in modules)
    return next(name for name in names if name.endswith(("DecoderLayer", "Block")))


def start(piece: Piece, run: Path, root: Path = ROOT, seconds: float = 900) -> None:
    """Run the piece to its end or its interruption. Sets its code and what it said."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}  # and see conftest.py
    word, _, delay = piece.interruption.partition(" after ")
    if word and not delay:
        environment["FABRIC_LLM_FAILPOINT"] = word
    output, log = run.parent / f"{run.name}.out", run / "metrics.jsonl"
    words, given = [sys.executable, *piece.command], {"cwd": root, "env": environment}
    with output.open("w") as file:
        size = log.stat().st_size if log.exists() else 0
        out = {"stdout": file, "stderr": file, "start_new_session": True}
        process = subprocess.Popen(words, **given, **out)
        deadline = time.monotonic() + seconds
        if delay:
            while process.poll() is None and time.monotonic() < deadline:
                if log.exists() and log.stat().st_size > size:
                    break
                time.sleep(0.02)
            time.sleep(float(delay))
            if process.poll() is None and word.startswith("SIG"):
                process.send_signal(getattr(signal, word))
            elif process.poll() is None and run.is_dir():
                (run / word).touch()
        try:
            piece.code = process.wait(max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            piece.code = 124
        _wait_for_all(process, 60 if piece.code != 124 else 0)
    piece.said = output.read_text(errors="replace")


def _wait_for_all(process: subprocess.Popen, seconds: float) -> None:
    """Ranks that outlive rank 0 end by themselves; after that time they are killed."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            os.killpg(process.pid, 0 if time.monotonic() < deadline else signal.SIGKILL)
        except ProcessLookupError:
            return
        process.poll()
        time.sleep(0.1)


@dataclass
class Outcome:
    """What came of a row."""

    pieces: list[Piece]
    differences: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)  # sentences
    interruptions: int = 0
    has_twin: bool = False

    @property
    def commands(self) -> str:
        return "\n".join(map(str, self.pieces))


def run_row(
    array: Array, row: Row, folder: Path, run: Path, seed: int, interruptions: int,
    root: Path = ROOT,
) -> Outcome:  # fmt: skip
    """Run a row with so many interruptions at most, and compare. What is refused is left out.

    seed: of what is trained.
    """
    generator, outcome = array.generator, Outcome([])
    what = what_of(row["model"], row["data"], folder, seed)
    left, moves = interruptions, False
    while True:
        cut = interruption(generator, row.get("devices", 1)) if left else ""
        piece = Piece(row, cut, command(row, what, folder, run, resumes=bool(outcome.pieces)))
        trained = steps_logged(run)
        start(piece, run, root)
        if piece.code == BAD_INPUT and "Traceback" not in piece.said:
            errors = [one for one in piece.said.splitlines() if "error:" in one]
            outcome.refused.append(errors[0] if errors else last_words(piece.said))
            toys, row = what_is_trained(row), array.refuse(row, outcome.refused[-1])
            if what_is_trained(row) != toys:
                if outcome.pieces:
                    return outcome  # killed before it was refused
                what = what_of(row["model"], row["data"], folder, seed)
            if len(outcome.refused) > MAX_REFUSED:
                outcome.differences.append("refused again and again: " + piece.said[-300:])
                return outcome
            continue
        outcome.pieces.append(piece)
        array.accept(row)
        killed = {STOPPED, PEER_LOST, -signal.SIGKILL, -signal.SIGTERM}
        may_end_with = {DONE} | killed if cut else {DONE}
        if piece.code not in may_end_with or "Traceback" in piece.said:
            outcome.differences.append(f"code {piece.code}: {last_words(piece.said)}")
            return outcome
        if piece.code == DONE:
            break
        outcome.interruptions += 1
        left -= 1
        if generator.random() < 0.5:
            moves = True
            row = array.draw({name: row[name] for name in KEPT if name in row})
    if outcome.interruptions and steps_logged(run) == trained:
        # What came last was an evaluation that a stop had cut off: now nothing is left to do.
        piece = Piece(row, "", command(row, what, folder, run, resumes=True))
        start(piece, run, root)
        outcome.pieces.append(piece)
        if piece.code != DONE or "validation loss" in piece.said:
            said = last_words(piece.said)
            outcome.differences.append(f"started again after its end: code {piece.code}, {said}")
    outcome.differences += differences(run, reference(what, row, folder, root))
    if outcome.interruptions and not moves and not outcome.differences:
        twin, outcome.has_twin = run.with_name(f"{run.name}-twin"), True
        piece = Piece(row, "", command(row, what, folder, twin, resumes=False))
        start(piece, twin, root)
        outcome.pieces.append(piece)
        outcome.differences += [f"uninterrupted: {one}" for one in unlike(run, twin)]
    return outcome


def what_is_trained(row: Row) -> tuple[str, str]:
    return row["model"], row["data"]


KEPT = ("model", "data", "ema_decay", "ema_every", "ema_device")  # belong to the run
MAX_REFUSED = 20  # for one row
_references: dict[str, plain_trainer.Found] = {}


def reference(
    what: dict[str, Any], row: Row, folder: Path, root: Path = ROOT
) -> plain_trainer.Found:
    data = DATA[row["data"]]
    if data.pinned:
        return _undisturbed(what, {"data": row["data"], **data.pinned}, folder, root)
    names = [*WHAT, "model_name", "global_batch_size"]
    kept = {name: what[name] for name in names if what[name] is not None}
    kept |= {"max_step": what["max_step"]}
    kept |= {"document_masking": what.get("document_masking") == "true"}
    kept |= {name: row[name] for name in ("ema_decay", "ema_every") if row.get(name) is not None}
    sources = {name: str(folder / one) for name, one in data.sources.items()}
    beside = {"beside": str(folder / BESIDE)}
    name = json.dumps([kept, sources], sort_keys=True)
    if name not in _references:
        _references[name] = plain_trainer.train(kept, sources, data.stages, beside)
    return _references[name]


def _undisturbed(what: dict[str, Any], row: Row, folder: Path, root: Path) -> plain_trainer.Found:
    """What a run with few flags, on one device, without interruptions has given."""
    run = folder / "undisturbed" / str(row["data"])
    if not run.is_dir():
        run.parent.mkdir(exist_ok=True)
        row = {**row, "devices": 1, "micro_batch_size": 8, "log_step_interval": 1}
        piece = Piece(row, "", command(row, what, folder, run, resumes=False))
        start(piece, run, root)
        assert piece.code == DONE, f"{piece}\n{piece.said}"
    steps, evaluations = {}, {}
    for line in lines_of(run):
        if "loss" in line:
            steps[line["step"]] = {name: line[name] for name in ("loss", "lr", "grad_norm")}
        if "eval" in line:
            losses = {name: one["loss"] for name, one in line["eval"].items()}
            evaluations[line["step"]] = {**losses, "": line["eval_loss"]}
    weights = weights_of(run / f"step-{max(steps):08d}")
    moved = {name: torch.full((), 1e-4) for name in weights if name != "lm_head.weight"}
    return plain_trainer.Found(steps, evaluations, weights, moved)


def last_words(said: str) -> str:
    lines = [line for line in said.splitlines() if line.strip()]
    return " | ".join(lines[-3:])[-600:]


# ------------------------------------------------------------------------------- what it must equal

LOSS, NORM, WEIGHT = 1e-5, 1e-4, 1e-5  # relative; of weights to the largest of their tensor
SHAKEN = 4  # trainings with gradients that are rounded otherwise


def lines_of(run: Path) -> list[dict[str, Any]]:
    file = run / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def steps_logged(run: Path) -> list[int]:
    return [line["step"] for line in lines_of(run) if "loss" in line]


def weights_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """By their names in transformers; a sharded checkpoint is put together."""
    if not (checkpoint / "weights").is_dir():
        return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).state_dict()
    parts = Tensors((checkpoint / "weights").glob("*.safetensors"))
    return {name.removeprefix("causal_lm."): tensor for name, tensor in parts.items()}


def differences(run: Path, plain: plain_trainer.Found) -> list[str]:
    """How a finished run differs from the plain trainer, in sentences."""
    found, last, seen = [], max(plain.steps), Counter()
    for line in lines_of(run):
        step = line.get("step")
        if "loss" in line:
            seen[step] += 1
            plainly = plain.steps.get(step, {})
            for name, most in (("loss", LOSS), ("lr", 1e-12), ("grad_norm", NORM)):
                found += _apart(f"step {step}: {name}", line[name], plainly.get(name), most)
        if "eval_loss" in line:
            seen["evaluation", step] += 1
            of_sets = plain.evaluations.get(step, {})
            losses = {f"loss of {name}": (name, one["loss"]) for name, one in line["eval"].items()}
            losses["loss of the average"] = "ema", line.get("eval_loss_ema")
            for what, (name, loss) in losses.items():
                if name in of_sets and loss is not None:
                    found += _apart(f"step {step}: {what}", loss, of_sets[name], LOSS)
            found += _apart(f"step {step}: eval_loss", line["eval_loss"], of_sets.get(""), LOSS)
    found += [f"{place} is logged {count} times" for place, count in seen.items() if count > 1]
    if last not in seen or max(step for step in seen if isinstance(step, int)) != last:
        found.append(f"the last step, {last}, isn't logged")
    checkpoint = run / f"step-{last:08d}"
    if not checkpoint.is_dir():
        return [*found, f"{checkpoint.name} is missing"]
    weights = weights_of(checkpoint)
    if (apart := weights_apart(weights, plain)) and plain.again is not None:
        apart = weights_apart(weights, plain._replace(uncertain=shaken(plain)))
    found += apart
    if missing := [name for name in plain.uncertain if name not in weights]:
        found.append(f"{checkpoint.name} lacks {', '.join(missing[:3])}")
    return found


def weights_apart(weights: dict[str, torch.Tensor], plain: plain_trainer.Found) -> list[str]:
    found = []
    for name, tensor in plain.weights.items():
        if name in weights and tensor.is_floating_point():
            apart = (weights[name].float() - tensor).abs()
            uncertain = plain.uncertain.get(plain.tied.get(name, name), 0.0)
            most = WEIGHT * tensor.abs().max() + uncertain
            if bool((apart > most).any()):
                distance, largest = float(apart.max()), float(tensor.abs().max())
                found.append(f"weights {name}: {distance:.2e} apart, of {largest:.2e}")
    return found


def shaken(plain: plain_trainer.Found) -> dict[str, torch.Tensor]:
    """How far rounding may have moved each weight, by its own gradients and by other weights.

    A weight whose gradient is next to nothing goes another way, up to a whole update, and then all
    gradients are those of another model. Trainings whose gradients are rounded otherwise show that.
    """
    others = [plain.again(shaken=seed).weights for seed in range(SHAKEN)]
    return {
        name: own + torch.stack([(one[name] - plain.weights[name]).abs() for one in others]).amax(0)
        for name, own in plain.uncertain.items()
    }


def _apart(what: str, here: Optional[float], there: Optional[float], most: float) -> list[str]:
    if here is None or there is None:
        return [f"{what} is {here}, not {there}"]
    if math.isclose(here, there, rel_tol=most, abs_tol=1e-30):
        return []
    return [f"{what} is {here:.9g}, not {there:.9g} ({abs(here / there - 1):.1e} apart)"]


def unlike(run: Path, twin: Path) -> list[str]:
    """How a run differs from its twin in any bit of their losses and last weights.

    Steps of its own are those that a process logged as its last or first one.
    """
    found = []
    for key in ("loss", "grad_norm", "eval_loss", "eval_loss_ema"):
        one, other = (
            {line["step"]: line[key] for line in lines_of(each) if key in line}
            for each in (run, twin)
        )
        own = one.keys() if key.startswith("eval") else set()
        steps = sorted(step for step in other.keys() | own if one.get(step) != other.get(step))
        if steps:
            here, there = one.get(steps[0]), other.get(steps[0])
            found.append(f"{key} of {len(steps)} steps, of step {steps[0]} {here}, not {there}")
    one, other = (weights_of(max(each.glob("step-*[0-9]"))) for each in (run, twin))
    names = [name for name in one if not torch.equal(one[name], other[name])]
    return found + ([f"weights: {len(names)} tensors, first {names[0]}"] if names else [])


def rows_until(
    end: float, array: Array, folder: Path, seed: int, root: Path = ROOT
) -> Iterator[tuple[int, Outcome]]:
    """Run rows until the time.monotonic() `end`. Yields their numbers, and what came of them."""
    number = 0
    while time.monotonic() < end:
        run = folder / "runs" / f"seed-{seed}-row-{number}"
        run.parent.mkdir(exist_ok=True)
        cuts = array.generator.choice([0, 1, 1, 2])
        yield number, run_row(array, array.draw(), folder, run, seed, cuts, root)
        number += 1
