"""Malicious artefacts: nothing in them is executed, nothing outside is touched, nothing hangs,
nobody is asked.

Each attack puts one bad thing into a copy of a good model, dataset and run, and gives the command
line of a user who doesn't know. What it may end with is an exit code of docs/faults.md and one
sentence; 0 where the bad thing is never opened.
"""

import builtins
import contextlib
import gzip
import importlib
import io
import json
import os
import pickle
import resource
import shutil
import signal
import struct
import subprocess
import sys
import traceback
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
import yaml
from conftest import CONTEXT, ROWS, VOCABULARY
from ranks import run_ranks, toy_run, train_ranks
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.distributed.checkpoint._hf_utils import CUSTOM_METADATA_KEY
from transformers import PreTrainedTokenizerFast

from fabric_llm.base import files
from fabric_llm.base.describing import describe
from fabric_llm.model import folders

MEMORY_BYTES = 4 * 2**30  # that an attack may take
TIMEOUT_SECONDS = 30
DEEP = "[" * 100_000
PART = "shard-00001-model-00001-of-00001.safetensors"


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, canary):
        self.canary = canary

    def __reduce__(self):
        return os.system, (f"touch {self.canary}",)


class Scene:
    """A good model, dataset and runs in `work`, files of others in `outside`."""

    def __init__(self, folder):
        self.work, self.outside = folder / "work", folder / "outside"
        self.model, self.data, self.runs = (self.work / name for name in ("model", "data", "runs"))
        self.run, self.sharded = self.runs / "run", self.runs / "sharded"
        self.canary = self.outside / "canary"
        self.pickle = pickle.dumps(Payload(self.canary))
        self.code = f"open({str(self.canary)!r}, 'w').close()\n"

    def zipped(self, path):
        torch.save(Payload(self.canary), path)

    def train(self, *flags, name="new"):
        base = toy_run(self.work, self.runs, model="model")
        sizes = "--precision 32-true --global_batch_size 4 --max_step 3 --eval_iters 0"
        base += tuple(sizes.split())
        named = () if name is None else ("--run_name", name)
        return ("train", *base, *named, *flags)

    def resume(self, *flags, name="run"):
        return self.train("--resume", "true", *flags, name=name)

    def export(self, source=None, *flags):
        return ("export_hf", source or self.run, "--output", self.work / "exported", *flags)

    def prepare(self, *flags, tokenizer=None):
        base = ("--tokenizer", tokenizer or self.model, "--output", self.work / "prepared")
        sizes = ("--context_length", 8, "--validation_fraction", 0.5)
        return ("prepare_data", *base, *sizes, *flags)


def step(run):
    """The newest checkpoint of a run."""
    return run / "step-00000002"


def edit(path, **changes):
    """Change entries of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def seal(folder, **changes):
    """Write the manifest anew, as an attacker can: the hashes are right."""
    document = json.loads((folder / "MANIFEST.json").read_text())
    document.pop("sha256")
    names = [name for name in files.files_in(folder) if name != "MANIFEST.json"]
    document = {**document, "files": describe(folder, names), **changes}
    (folder / "MANIFEST.json").write_bytes(files.encode(document))


def seal_data(folder, **changes):
    """The same for a dataset, as one of prepare_data.py."""
    (folder / "manifest.json").unlink(missing_ok=True)
    document = {"packed": True, "context_length": CONTEXT, "max_token_id": VOCABULARY - 1}
    written = describe(folder, files.files_in(folder))
    document = {**document, "eos_token_id": 0, "written": written, **changes}
    (folder / "manifest.json").write_bytes(files.encode(document))


# Weights whose header is the JSON of `TENSOR`, and which hold 64 bytes.
TENSOR = {"lm_head.weight": {"dtype": "F32", "shape": [2**50], "data_offsets": [0, 2**52]}}
HEADER = json.dumps(TENSOR).encode()
PETABYTE = struct.pack("<Q", len(HEADER)) + HEADER + bytes(64)
ATTACKS = {}


def attack(*expected):
    """Register an attack: (exit code, words of the sentence)."""

    def register(function):
        assert function.__name__ not in ATTACKS
        ATTACKS[function.__name__] = (function, *expected)
        return function

    return register


STEP, SHARDED = "runs/run/step-00000002", "runs/sharded/step-00000002"
MODEL, PROGRESS = "model/config.json", f"{STEP}/trainer/progress.json"
COMMANDS = {
    "train": Scene.train,
    "train from it": lambda scene: scene.train("--model_name", step(scene.sharded)),
    "resume": Scene.resume,
    "resume sharded": lambda scene: scene.resume(name="sharded"),
    "resume it": lambda scene: scene.resume("--checkpoint", step(scene.run)),
    "resume with csv": lambda scene: scene.resume("--logger", "csv"),
    "resume with spikes": lambda scene: scene.resume("--spike_threshold", 3),
    "branch": lambda scene: scene.resume("--checkpoint", step(scene.run), name="branch"),
    "export": Scene.export,
    "export sharded": lambda scene: scene.export(scene.sharded),
    "prepare": lambda scene: scene.prepare("--input", scene.data),
    "prepare with it": lambda scene: scene.prepare(
        "--input", scene.model / "config.json", tokenizer=scene.data / "tokenizer"
    ),
    "prepare evil": lambda scene: scene.prepare("--input", scene.work / "evil"),
}


def seal_what_holds(scene, path):
    """Seal the checkpoint or dataset that `path` is in, if it is in one."""
    for folder in (step(scene.run), step(scene.sharded)):
        if path.is_relative_to(folder) and path.name != "MANIFEST.json":
            seal(folder)
    if path.is_relative_to(scene.data):
        seal_data(scene.data)


def plant(scene, what, file, command):
    """An attack: put a pickle, say, in the place of a file in `work`."""
    path = scene.work / file
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    if what == "pipe":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    elif what.startswith("link"):
        path.symlink_to(scene.outside / what.removeprefix("link to "))
    else:
        content = {"pickle": scene.pickle, "code": scene.code.encode(), "deep": DEEP.encode()}
        path.write_bytes({**content, "petabyte": PETABYTE}[what])
        seal_what_holds(scene, path)
    return COMMANDS[command](scene)


PLANTED = [  # what, in the place of which file, command, exit code and words of the sentence
    ("pickle", "model/model.safetensors", "train", 2, "model", "can't be read"),
    ("pickle", "model/tokenizer.json", "train", 2, "tokenizer", "can't be read"),
    ("pickle", "model/generation_config.json", "train", 2, "generation_config.json"),
    ("deep", "model/generation_config.json", "train", 2, "generation_config.json"),
    ("pickle", "model/config.json", "train", 2, "config.json"),
    ("pipe", "model/model.safetensors.index.json", "train", 2, "model.safetensors.index.json"),
    ("pickle", "data/train/data-00000-of-00001.arrow", "train", 2, "train", "can't be read"),
    ("pickle", "data/train/data-00000-of-00001.arrow", "prepare", 2, "data"),
    ("deep", "data/dataset_dict.json", "train", 2, "dataset_dict.json"),
    # files of a checkpoint that run code when they are opened
    ("pickle", f"{STEP}/trainer/optimizer/__0_0.distcp", "resume", 77, "__0_0.distcp", "refused"),
    ("pickle", f"{STEP}/trainer/optimizer/.metadata", "resume", 77, "optimizer/.meta", "refused"),
    ("pickle", f"{SHARDED}/weights/.metadata", "export sharded", 77, "weights/.meta", "refused"),
    ("pickle", f"{STEP}/trainer/optimizer.pt", "resume", 77, "optimizer.pt", "refused"),
    ("pickle", f"{STEP}/tokenizer.pkl", "resume", 77, "tokenizer.pkl", "refused"),
    ("code", f"{STEP}/modeling_evil.py", "resume", 77, "modeling_evil.py", "refused"),
    # files of a checkpoint that are something else than their names say
    ("pickle", f"{STEP}/README.md", "resume", 0),
    ("pickle", PROGRESS, "resume it", 66, "progress.json"),
    ("deep", PROGRESS, "resume it", 66, "progress.json"),
    ("pipe", PROGRESS, "resume it", 66, "progress.json"),
    ("pickle", f"{STEP}/MANIFEST.json", "resume it", 66, "MANIFEST.json"),
    ("deep", f"{STEP}/MANIFEST.json", "resume it", 66, "MANIFEST.json"),
    ("pickle", f"{STEP}/trainer/probe.safetensors", "export", 66, "probe.safetensors"),
    (
        "pickle", f"{STEP}/model.safetensors",
        "resume", 66, "weights", "step-00000002", "can't be read",
    ),
    (
        "pickle", f"{STEP}/trainer/optimizer/{PART}",
        "resume", 66, "trainer/optimizer", "can't be read",
    ),
    ("pickle", f"{SHARDED}/weights/{PART}", "resume sharded", 66, "weights", "can't be read"),
    ("pickle", f"{SHARDED}/weights/{PART}", "train from it", 66, "weights", "can't be read"),
    ("pickle", f"{STEP}/tokenizer.json", "resume", 66, "tokenizer", "can't be read"),
    # what is declared isn't there
    ("petabyte", "model/model.safetensors", "train", 2, "model", "can't be read"),
    ("petabyte", f"{STEP}/model.safetensors", "export", 66, "step-00000002", "can't be read"),
    # what is prepared
    ("code", "evil/evil.py", "prepare evil", 2, "evil", "matches"),
    ("pickle", "evil/evil.parquet", "prepare evil", 2, "evil.parquet"),
    # links, and what blocks whoever opens it
    ("link to .", "runs/run/step-00000003", "resume", 77, "step-00000003", "link"),
    ("link to secret", f"{STEP}/weights.json", "resume", 77, "weights.json", "link"),
    ("link to .", "runs/new", "train", 77, "link"),
    ("link to secret", "runs/run/metrics.jsonl", "resume", 77, "metrics.jsonl", "link"),
    ("link to secret", "runs/run/metrics.jsonl", "branch", 77, "metrics.jsonl", "link"),
    ("link to secret", "runs/run/samples.jsonl", "branch", 77, "samples.jsonl", "link"),
    ("link to secret", "runs/new/arguments.yaml", "train", 77, "arguments.yaml", "link"),
    ("link to secret", "runs/new/.arguments.yaml.tmp", "train", 77, ".arguments.yaml.tmp", "link"),
    ("link to secret", "runs/run/STATUS.json", "resume", 77, "STATUS.json", "link"),
    ("link to canary", "runs/run/.lock", "resume", 77, ".lock", "link"),
    ("link to secret", "runs/run/stop", "resume", 77, "stop", "link"),
    ("folder", "runs/run/stop", "resume", 0),
    ("link to secret", "runs/run/metrics.csv", "resume with csv", 77, "metrics.csv", "link"),
    ("link to .", "runs/run/.tmp-step-00000003-x", "resume", 77, ".tmp-step-00000003-x", "link"),
    ("link to .", ".exported.preparing", "export", 77, "link"),
    ("pipe", "runs/run/metrics.jsonl", "resume", 73, "metrics.jsonl"),
]
for what, file, command, *expected in PLANTED:
    ATTACKS[f"{what}, {file}, {command}"] = (
        partial(plant, what=what, file=file, command=command), *expected,
    )


def edit_file(scene, file, changes, command):
    """An attack: change entries of a JSON file in `work`."""
    edit(scene.work / file, **changes)
    seal_what_holds(scene, scene.work / file)
    return COMMANDS[command](scene)


CODE = {"model_type": "evil", "auto_map": {"AutoConfig": "evil--repo.Evil"}}
KERNEL = {"_attn_implementation": "evil/kernel", "attn_implementation": "evil/kernel"}
EXPERTS = {"_experts_implementation": "evil/kernel", "experts_implementation": "evil/kernel"}
EDITED = [  # file, changes, command, exit code and words of the sentence
    (f"{STEP}/config.json", CODE, "resume", 77, "step-00000002", "never run"),
    (f"{STEP}/config.json", CODE, "export", 77, "step-00000002", "never run"),
    (MODEL, {**KERNEL, "use_kernels": True}, "train", 0),
    (MODEL, EXPERTS, "train", 0),
    (MODEL, {"quantization_config": {"quant_method": "bitsandbytes"}}, "train", 2, "quant"),
    (MODEL, {"get_text_config": 1}, "train", 2, "can't be read"),  # a method of its own checks
    (MODEL, {"save_pretrained": 1}, "train", 2, "save_pretrained", "method"),
    (
        MODEL, {"transformers_weights": "../../outside/weights.safetensors"},
        "train", 77, "weights.safetensors",
    ),
    ("data/dataset_dict.json", {"splits": ["../../outside/split"]}, "prepare", 77, "outside"),
    (MODEL, {"hidden_size": 2**40}, "train", 2, "configuration", "parameters"),
    (MODEL, {"hidden_size": -32, "intermediate_size": "many"}, "train", 2, "config"),
    (
        MODEL, {"num_labels": 10**9},
        "train", 2, "configuration", "1000000000 labels (num_labels); at most 32768",
    ),
    (
        MODEL, {"id2label": dict.fromkeys(map(str, range(10**5)), "x")},
        "train", 2, "configuration", "100000 entries (id2label); at most 32768",
    ),
    (MODEL, {"note": "x" * 2**22}, "train", 2, "configuration", "config.json has", "most 4 MiB"),
    (
        MODEL, {"model_type": "gpt_neo", "attention_types": [[["global"], 10**9]]},
        "train", 2, "configuration", "1000000000 attention_types (attention_types); at most 32768",
    ),
    (
        MODEL, {"model_type": "deepseek_v2", "n_routed_experts": 2**14, "num_hidden_layers": 2**12},
        "train", 2, "configuration",
        "67108864 experts (16384 in each of 4096 layers); at most 262144",
    ),
    (
        MODEL, {"model_type": "gemma3", "text_config": {"layer_types": ["x"] * 100_000}},
        "train", 2, "configuration", "100000 entries (text_config.layer_types)",
    ),
    (
        "model/generation_config.json", {"eos_token_id": [1] * 10**6},
        "train", 2, "generation_config.json", "1000000 entries (eos_token_id)",
    ),
    (
        "model/tokenizer_config.json", {"tokenizer_class": "ByT5Tokenizer", "extra_ids": 10**9},
        "train", 2, "tokenizer", "1000000000 tokens (extra_ids)",
    ),
    (
        PROGRESS, {"guard": "x", "schedule": ["lr"], "fixed": 7, "end_step": "never"},
        "resume it", 66, "progress.json",
    ),
    (
        PROGRESS, {"guard": {"losses": ["x"] * 50, "skipped": None, "rewinds": {}}},
        "resume with spikes", 66, "progress.json",
    ),
]
for file, changes, command, *expected in EDITED:
    ATTACKS[f"{file} with {', '.join(changes)}, {command}"] = (
        partial(edit_file, file=file, changes=changes, command=command), *expected,
    )


def progress_that_says(scene, **changes):
    progress = json.loads((scene.work / PROGRESS).read_text())["progress"]
    return edit_file(scene, PROGRESS, {"progress": {**progress, **changes}}, "resume it")


for name, changes, said in (
    ("negative_step", {"step": -1}, "-1"),
    ("step_that_is_a_float", {"step": 1.5}, "1.5"),
    ("step_that_is_a_text", {"step": "2"}, "'2'"),
    ("position_without_end", {"position": 10**30}, ""),
):
    ATTACKS[name] = (partial(progress_that_says, **changes), 66, "progress.json", said)
for name in ("../../outside/run", "/outside/run", "a\0b", "x" * 5000):
    ATTACKS[f"run name {name[:20]!r}"] = (partial(Scene.train, name=name), 2, "--run_name")


# --------------------------------------------------------------------- pickles in a model directory


@attack(77, "pytorch_model.bin", "pickle")
def zipped_pickle_as_the_only_weights(scene):
    (scene.model / "model.safetensors").unlink()
    scene.zipped(scene.model / "pytorch_model.bin")
    return scene.train()


@attack(0)
def pickles_beside_safetensors(scene):
    scene.zipped(scene.model / "pytorch_model.bin")
    for name in (
        "training_args.bin", "rng_state.pth", "optimizer.pt", "scheduler.pt", "adapter_model.bin",
        "vocab.pkl",
    ):
        (scene.model / name).write_bytes(scene.pickle)
    return scene.train()


@attack(77, "model.safetensors.index.json", "evil.bin")
def pickle_named_by_the_index(scene):
    (scene.model / "model.safetensors").unlink()
    (scene.model / "evil.bin").write_bytes(scene.pickle)
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "evil.bin"}}
    (scene.model / "model.safetensors.index.json").write_text(json.dumps(index))
    return scene.train()


@attack(77, "pytorch_model-00001-of-00001.bin")
def pickles_with_an_index_of_their_own(scene):
    (scene.model / "model.safetensors").unlink()
    scene.zipped(scene.model / "pytorch_model-00001-of-00001.bin")
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "pytorch_model-00001-of-00001.bin"}}
    (scene.model / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return scene.train()


@attack(77, "config.json", "evil.bin")
def pickle_named_by_the_configuration(scene):
    (scene.model / "evil.bin").write_bytes(scene.pickle)
    edit(scene.model / "config.json", transformers_weights="evil.bin")
    return scene.train()


# -------------------------------------------------------------------------- pickles in a checkpoint


@attack(77, "pytorch_model.bin", "refused")
def checkpoint_with_pickled_weights(scene):
    (step(scene.run) / "model.safetensors").unlink()
    scene.zipped(step(scene.run) / "pytorch_model.bin")
    seal(step(scene.run))
    return scene.resume()


@attack(77, "rng_state.PTH", "refused")
def checkpoint_with_a_pickled_random_state_that_is_not_listed(scene):
    (step(scene.run) / "trainer" / "rng_state.PTH").write_bytes(scene.pickle)
    return scene.resume("--verify_checkpoints", "size")


@attack(0)
def pickled_metadata_in_a_checkpoint_as_a_model(scene):
    """Of --model_name no manifest is asked for: what isn't a weight is never opened."""
    (step(scene.sharded) / "weights" / ".metadata").write_bytes(scene.pickle)
    scene.zipped(step(scene.sharded) / "trainer" / "optimizer.pt")
    return scene.train("--model_name", step(scene.sharded))


# -------------------------------------------------------------------- pickles and code in a dataset


@attack(0)
def pickle_as_an_arrow_extension_type(scene):
    """What ran code in pyarrow before 14.0.1."""
    file = scene.data / "train" / "data-00000-of-00001.arrow"
    table = pa.ipc.open_stream(file.read_bytes()).read_all()
    extension = {b"ARROW:extension:name": b"arrow.py_extension_type"}
    extension |= {b"ARROW:extension:metadata": scene.pickle}
    schema = pa.schema([table.schema.field(0).with_metadata(extension)])
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        writer.write_table(pa.table(table.columns, schema=schema))
    seal_data(scene.data)
    return scene.train()


@attack(0)
def script_in_a_dataset(scene):
    for name in ("data.py", "train.py", "__init__.py", "train/train.py"):
        (scene.data / name).write_text(scene.code)
    return scene.train()


@attack(2, "evil.txt.gz")
def pickle_called_gzip_to_prepare(scene):
    (scene.work / "evil.txt.gz").write_bytes(scene.pickle)
    (scene.work / "good.txt.gz").write_bytes(gzip.compress(b"1 2 3 4 5 6 7 8 9"))
    return scene.prepare("--input", scene.work / "evil.txt.gz", scene.work / "good.txt.gz")


# ------------------------------------------------------------------------------- YAML


def python_in_yaml(scene):
    return f"lr: !!python/object/apply:os.system ['touch {scene.canary}']\n"


@attack(2, "arguments.yaml", "YAML")
def python_in_the_arguments_of_a_run(scene):
    (scene.run / "arguments.yaml").write_text(python_in_yaml(scene))
    return ("train", "--resume", "true", "--output_dir", scene.runs, "--run_name", "run")


@attack(2, "--lr")
def python_on_the_command_line(scene):
    return scene.train("--lr", python_in_yaml(scene).removeprefix("lr: ").strip())


def arguments_that_say(scene, **changes):
    file = scene.run / "arguments.yaml"
    file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), **changes}))
    return ("train", "--resume", "auto", "--checkpoint", step(scene.run))


@attack(0)
def output_directory_in_the_arguments_of_a_run(scene):
    return arguments_that_say(scene, output_dir=str(scene.outside / "runs"))


@attack(2, "run_name", "arguments.yaml")
def run_name_in_the_arguments_of_a_run(scene):
    """It would go on elsewhere."""
    return arguments_that_say(scene, output_dir=str(scene.outside / "runs"), run_name="evil")


# ------------------------------------------------------------------------------- remote code


@attack(77, "model", "never run")
def code_for_an_unknown_model(scene):
    auto_map = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}
    edit(scene.model / "config.json", model_type="evil", auto_map=auto_map)
    (scene.model / "evil.py").write_text(scene.code)
    return scene.train()


@attack(0)
def code_for_a_known_model(scene):
    auto_map = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}
    auto_map |= {"AutoTokenizer": ["evil.E", None]}
    pipelines = {"evil": {"impl": "evil.Evil"}}
    edit(scene.model / "config.json", auto_map=auto_map, custom_pipelines=pipelines)
    for name in ("evil.py", "modeling_evil.py", "configuration_evil.py", "modeling_llama.py"):
        (scene.model / name).write_text(scene.code)
    return scene.train()


def code_for_the_tokenizer(scene, folder, command):
    changes = {"tokenizer_class": "EvilTokenizer", "auto_map": {"AutoTokenizer": ["evil.E", None]}}
    (scene.work / folder / "evil.py").write_text(scene.code)
    return edit_file(scene, f"{folder}/tokenizer_config.json", changes, command)


for folder, command, said in (
    ("model", "train", "model"),
    ("data/tokenizer", "train", "tokenizer"),
    ("data/tokenizer", "prepare with it", "tokenizer"),
):
    code = partial(code_for_the_tokenizer, folder=folder, command=command)
    ATTACKS[f"code for the tokenizer in {folder}, {command}"] = (code, 77, said, "never run")


@attack(0)
def code_for_generation(scene):
    (scene.model / "custom_generate").mkdir()
    (scene.model / "custom_generate" / "generate.py").write_text(scene.code)
    generation = {"custom_generate": "evil/evil", "_from_model_config": False, "bos_token_id": 0}
    (scene.model / "generation_config.json").write_text(json.dumps(generation))
    return scene.train()


@attack(0)
def code_in_templates(scene):
    call = "{{ cycler.__init__.__globals__.os.system('touch %s') }}"
    (scene.model / "chat_template.jinja").write_text(call % scene.canary)
    processor = {"auto_map": {"AutoProcessor": "evil.Evil"}, "processor_class": "Evil"}
    for name in ("preprocessor_config.json", "processor_config.json"):
        (scene.model / name).write_text(json.dumps(processor))
    (scene.model / "evil.py").write_text(scene.code)
    return scene.train()


@attack(77, "canary", "refused")
def template_with_the_name_of_another_file(scene):
    beside = scene.runs / "new" / "step-00000003" / "additional_chat_templates"
    name = os.path.relpath(scene.canary, beside)
    templates = [{"name": "default", "template": "x"}, {"name": name, "template": "x"}]
    edit(scene.model / "tokenizer_config.json", chat_template=templates)
    return scene.train()


# ---------------------------------------------------------------- names and links that lead outside


def manifest_that_names(scene, file):
    seal(step(scene.run), files={file: {"bytes": 0, "sha256": "0" * 64}})
    return scene.resume()


for name, file in (
    ("a_file_above", "../../../../outside/canary"),
    ("an_absolute_file", "/outside/canary"),
    ("a_file_with_backslashes", "..\\..\\canary"),
):
    names = partial(manifest_that_names, file=file)
    ATTACKS[f"manifest_names_{name}"] = (names, 77, "canary", "outside")


@attack(77, "outside.safetensors")
def index_of_a_model_names_a_file_above(scene):
    (scene.model / "model.safetensors").rename(scene.work / "outside.safetensors")
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "../outside.safetensors"}}
    (scene.model / "model.safetensors.index.json").write_text(json.dumps(index))
    return scene.train()


@attack(77, "outside.safetensors")
def index_of_a_checkpoint_names_a_file_above(scene):
    (step(scene.run) / "model.safetensors").rename(scene.run / "outside.safetensors")
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "../outside.safetensors"}}
    (step(scene.run) / "model.safetensors.index.json").write_text(json.dumps(index))
    seal(step(scene.run))
    return scene.resume()


@attack(77, "outside.arrow")
def dataset_reads_a_file_above(scene):
    (scene.data / "train" / "data-00000-of-00001.arrow").rename(scene.work / "outside.arrow")
    edit(scene.data / "train" / "state.json", _data_files=[{"filename": "../../outside.arrow"}])
    seal_data(scene.data)
    return scene.train()


@attack(77, "secret.arrow")
def dataset_to_prepare_reads_a_file_above(scene):
    names = [{"filename": "../../../outside/secret.arrow"}]
    for split in ("train", "validation"):
        edit(scene.data / split / "state.json", _data_files=names)
    return scene.prepare("--input", scene.data)


@attack(77, "link", "link")
def checkpoint_that_is_named_and_a_link(scene):
    (scene.work / "link").symlink_to(step(scene.run))
    return scene.resume("--checkpoint", scene.work / "link", name="branch")


@attack(77, "trainer", "link")
def folder_of_a_checkpoint_that_is_a_link(scene):
    shutil.move(step(scene.run) / "trainer", scene.work / "trainer")
    (step(scene.run) / "trainer").symlink_to(scene.work / "trainer")
    return scene.export()


@attack(77, "link")
def run_to_resume_that_is_a_link(scene):
    (scene.runs / "link").symlink_to(scene.run)
    return scene.resume("--checkpoint", step(scene.runs / "link"), name=None)


@attack(0)
def leftover_that_holds_links(scene):
    folder = scene.run / ".tmp-step-00000003-evil"
    folder.mkdir()
    (folder / "folder").symlink_to(scene.outside)
    (folder / "file").symlink_to(scene.outside / "secret")
    return scene.resume()


@attack(0)
def leftover_of_a_preparation_that_is_a_link(scene):
    (scene.work / ".prepared.preparing-evil").symlink_to(scene.outside)
    lines = (f'{{"text": "{n} 2 3 4 5 6 7 8 9"}}\n' for n in range(9))
    (scene.work / "text.jsonl").write_text("".join(lines))
    return scene.prepare("--input", scene.work / "text.jsonl")


# ------------------------------------------------------------ pipes, which block whoever opens them


@attack(2, "data-00000-of-00001.arrow")
def dataset_that_is_a_pipe(scene):
    (scene.data / "manifest.json").unlink()
    (scene.data / "train" / "data-00000-of-00001.arrow").unlink()
    os.mkfifo(scene.data / "train" / "data-00000-of-00001.arrow")
    return scene.train()


# ------------------------------------------------------------------------------- sizes and shapes


@attack(66, "step-00000002", "has no model.safetensors")
def checkpoint_without_weights(scene):
    (step(scene.run) / "model.safetensors").unlink()
    seal(step(scene.run))
    return scene.resume()


def part_with_offsets(scene, part, offset, command):
    """A part says that it begins at `offset` of the whole tensors, which makes those larger."""
    file = scene.work / part
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
    info = json.loads(metadata[CUSTOM_METADATA_KEY])
    for entry in info.values():
        entry["saved_offsets"] = [offset for _ in entry["saved_offsets"]]
    save_file(load_file(file), file, metadata={**metadata, CUSTOM_METADATA_KEY: json.dumps(info)})
    seal_what_holds(scene, file)
    return COMMANDS[command](scene)


for part, offset, command, said in (
    (f"{SHARDED}/weights/{PART}", 2**45, "resume sharded", "weights hold"),
    (f"{SHARDED}/weights/{PART}", 2**45, "export sharded", "weights hold"),
    (f"{STEP}/trainer/optimizer/{PART}", 2**45, "resume", "optimizer"),
    (f"{STEP}/trainer/optimizer/{PART}", -3, "resume", "optimizer"),
):
    given = {"part": part, "offset": offset, "command": command}
    ATTACKS[f"{part} from {offset} on, {command}"] = (partial(part_with_offsets, **given), 66, said)


@attack(66, "optimizer")
def optimizer_without_its_tensors(scene):
    save_file({"x": torch.zeros(1)}, step(scene.run) / "trainer" / "optimizer" / PART)
    seal(step(scene.run))
    return scene.resume()


@attack(2, "tokenizer", "1000000000 labels")
def tokenizer_beside_a_configuration(scene):
    """Which says what the tokenizer is, where that doesn't itself."""
    config = json.dumps({"model_type": "llama", "num_labels": 10**9})
    (scene.data / "tokenizer" / "config.json").write_text(config)
    (scene.data / "tokenizer" / "tokenizer_config.json").unlink()
    seal_data(scene.data)
    return scene.train()


@attack(66, "progress.json")
def schedule_of_words(scene):
    file = step(scene.run) / "trainer" / "progress.json"
    schedule = json.loads(file.read_text())["schedule"]
    edit(file, schedule={**schedule, "lr": "fast", "warmup_steps": [1]})
    seal(step(scene.run))
    flags = ("--checkpoint", step(scene.run), "--resume_override", "lr,warmup_steps")
    return scene.resume(*flags)


@attack(0)
def evaluation_in_words(scene):
    shutil.copytree(step(scene.run), scene.run / "step-00000001")
    edit(step(scene.run) / "trainer" / "progress.json", eval_loss="low")
    edit(scene.run / "step-00000001" / "trainer" / "progress.json", eval_loss=[1])
    seal(step(scene.run))
    seal(scene.run / "step-00000001")
    return scene.resume("--keep_last", 1)


@attack(66, "MANIFEST.json")
def manifest_with_sizes_in_words(scene):
    files = json.loads((step(scene.run) / "MANIFEST.json").read_text())["files"]
    words = {name: {**entry, "bytes": str(entry["bytes"])} for name, entry in files.items()}
    seal(step(scene.run), files=words)
    return scene.resume("--checkpoint", step(scene.run))


@attack(2, "manifest.json")
def dataset_with_sizes_in_words(scene):
    written = json.loads((scene.data / "manifest.json").read_text())["written"]
    words = {name: {**entry, "bytes": str(entry["bytes"])} for name, entry in written.items()}
    seal_data(scene.data, written=words)
    return scene.train()


def dataset_that_says(scene, changes):
    seal_data(scene.data, **changes)
    return scene.train()


ABOVE = {"../../outside/secret": {"bytes": 1, "sha256": "0" * 64}}
WORDS = {"max_token_id": "x", "eos_token_id": [0], "context_length": None}
for name, changes, *expected in (
    ("dataset_lists_a_file_above", {"written": ABOVE}, 77, "outside"),
    ("dataset_that_lies_about_its_rows", {"context_length": 10**12}, 2, "manifest.json", "24"),
    ("dataset_that_lies_about_its_tokens", {"max_token_id": 5}, 2, "manifest.json", "130"),
    ("dataset_with_words_for_numbers", WORDS, 2, "manifest.json"),
):
    ATTACKS[name] = (partial(dataset_that_says, changes=changes), *expected)


def rows_beyond_the_end(scene):
    """Offsets that lead out of the file: reading them unchecked reads other memory, or crashes."""
    file = scene.data / "train" / "data-00000-of-00001.arrow"
    good = np.arange(ROWS + 1, dtype=np.int32) * CONTEXT
    evil = np.where(good, good + 2**28, 0).astype(np.int32)
    content = file.read_bytes()
    assert good.tobytes() in content
    file.write_bytes(content.replace(good.tobytes(), evil.tobytes()))


@attack(2, "train", "can't be read")
def dataset_with_rows_beyond_its_end(scene):
    rows_beyond_the_end(scene)
    (scene.data / "manifest.json").unlink()
    return scene.train()


@attack(2, "train", "can't be read")
def sealed_dataset_with_rows_beyond_its_end(scene):
    rows_beyond_the_end(scene)
    seal_data(scene.data)
    return scene.train("--verify_data", "size")


def probe_that_says(scene, changes):
    file = step(scene.run) / "trainer" / "probe.safetensors"
    save_file({**load_file(file), **changes}, file)
    seal(step(scene.run))
    return scene.export()


for name, value in (
    ("input_ids", torch.full((1, 24), 2**40)),
    ("positions", torch.full((16,), -(2**40))),
):
    says = partial(probe_that_says, changes={name: value})
    ATTACKS[f"probe_of_{name}_that_are_not_there"] = (says, 66, "probe.safetensors")


@attack(0)
def metrics_of_nonsense(scene):
    lines = ['"x"', "[1]", "7", '{"step": "x"}', '{"step": [1]}', DEEP, "\udcff"]
    lines.append('{"step": 1, "evil": 2}')
    (scene.run / "metrics.jsonl").write_bytes("\n".join(lines).encode(errors="surrogateescape"))
    return scene.resume("--logger", "csv")


# ------------------------------------------------------------------------------- the test


@pytest.fixture(scope="module")
def base(toys, tmp_path_factory):
    """What an attacker begins with, see `Scene`."""
    scene = Scene(tmp_path_factory.mktemp("base"))
    shutil.copytree(toys / "llama", scene.model)
    shutil.copytree(toys / "data", scene.data)
    backend = Tokenizer(models.WordLevel({str(k): k for k in range(VOCABULARY)}, unk_token="0"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="0", unk_token="0")
    tokenizer.save_pretrained(scene.model)
    tokenizer.save_pretrained(scene.data / "tokenizer")
    seal_data(scene.data)
    train_ranks(1, *scene.train("--save_step_interval", 1, name="run")[1:])
    sharded = ("--strategy", "fsdp", "--state_dict_type", "sharded")
    train_ranks(2, *scene.train("--save_step_interval", 1, *sharded, name="sharded")[1:])
    for run in (scene.run, scene.sharded):
        shutil.rmtree(run / "step-00000003")  # a step is left to do
        shutil.rmtree(run / "step-00000001")  # nothing to fall back to
    (scene.outside / "folder").mkdir(parents=True)
    (scene.outside / "secret").write_text("secret\n")
    (scene.outside / "folder" / "file").write_bytes(bytes(100))
    shutil.copyfile(scene.model / "model.safetensors", scene.outside / "weights.safetensors")
    shutil.copyfile(
        scene.data / "train" / "data-00000-of-00001.arrow", scene.outside / "secret.arrow"
    )
    shutil.copytree(scene.data / "train", scene.outside / "split")
    return scene.work.parent


def snapshot(folder):
    """Name -> content of everything below a folder."""
    return {
        str(path.relative_to(folder)): os.readlink(path)
        if path.is_symlink()
        else path.is_file() and path.read_bytes()
        for path in sorted(folder.rglob("*"))
    }


def end_of(program, *words):
    """(exit code, what was said, questions asked) of a command line, with little memory."""
    asked = []

    def never(prompt=""):
        asked.append(prompt)
        raise AssertionError("somebody was asked")

    builtins.input = never
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + MEMORY_BYTES,) * 2)
    said, code = io.StringIO(), 0
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            importlib.import_module(program).main([str(word) for word in words])
        except SystemExit as stop:
            code = stop.code
        except BaseException:  # what the user would see
            said.write(traceback.format_exc())
            code = 1
    return code, said.getvalue(), asked


@pytest.mark.quick_cases(
    r"link to .*run/step-|folder_of_a_checkpoint_that_is_a_link|auto_map, resume"
)
@pytest.mark.parametrize("name", ATTACKS)
def test_attack(base, tmp_path, name):
    attack, expected, *words = ATTACKS[name]
    scene = copy_of(base, tmp_path)
    command = attack(scene)
    before = snapshot(scene.outside)
    [(code, said, asked)] = run_ranks(1, end_of, *command, timeout_seconds=TIMEOUT_SECONDS)
    assert not asked
    assert snapshot(scene.outside) == before
    assert "Traceback" not in said, said
    assert code == expected, said
    if code:
        [sentence] = [line for line in said.splitlines() if ": error: " in line]
        assert said.rstrip().endswith(sentence)
        assert all(word in sentence for word in words), sentence


def laughs(form):
    """Nine lines that stand for 9**8 values. form: of what refers to the line before, with a
    `*`."""
    names = "lr min_lr beta1 beta2 grad_clip max_step num_workers weight_decay".split()
    lines = ["seed: &a0 {x: 1}"]
    for k, name in enumerate(names, 1):
        lines.append(f"{name}: &a{k} {form % ', '.join([f'*a{k - 1}'] * 9)}")
    return "\n".join(lines)


MERGES, ALIASES = laughs("{<<: [%s]}"), laughs("[%s]")
BOMBS = {  # what a YAML file says -> words of the sentence
    "aliases": (
        ALIASES, "can't be read as YAML: 'a0' in line 1 is an alias, or what one stands for.",
    ),
    "merges": (MERGES, "'a0' in line 1 is an alias"),
    "alias": ("lr: *lr", "'lr' in line 1 is an alias"),
    "merge": (
        "lr: 1\n<<: {seed: 1}",
        "could not determine a constructor for the tag 'tag:yaml.org,2002:merge'",
    ),
    "tag": (
        "lr: !!python/name:os.system 1",
        "could not determine a constructor for the tag 'tag:yaml.org,2002:python",
    ),
    "deep": ("lr: " + "[" * 20_000, "it is nested more than 50 deep, in line 1."),
    "deep lines": ("".join(" " * k + "a:\n" for k in range(350)), "recursion depth exceeded"),
    "large": ("# " + "x" * 10**7, "has more than 64 KiB, the most that is read as YAML."),
    "number": ("lr: " + "9" * 10_000, "line 1 has a number of 10,000 characters."),
    "hexadecimal": ("lr: 0x" + "f" * 10_000, "line 1 has a number of 10,002 characters."),
    "twice": ("lr: 1\nlr: 2", "'lr' comes twice, in line 2."),
}
IN_A_CONFIG = {  # what only the flags of a --config make of it
    "digits": ("lr: " + "9" * 400, "line 1 of evil.yaml: lr takes a number, not a text of"),
    "a word": ("\nyes: 1", "line 2: unknown key 'yes' in evil.yaml."),
    "text in which YAML stands": (f"lr: {json.dumps(MERGES)}", "lr takes a number, not a text of"),
    "in a choice": (f"strategy: {json.dumps(MERGES)}", "fsdp2 or ddp, not a text of"),
    "beside a choice": (
        f"activation_checkpointing: {json.dumps(MERGES)}", "or offload, not a text of",
    ),
    "in a mixture": (
        'model_name: m\ndata_mix: "{a: &a [*a]}"',
        "--data_mix: it can't be read as YAML: 'a' in line 1",
    ),
    "escapes": ('"\\e[31mlr\\r": 1', "unknown key '\\x1b[31mlr\\r' in evil.yaml."),
}
MIXTURES = {  # the value of --data_mix -> words of the sentence
    "digits": (
        "a=data:" + "9" * 50_000, "the mixture has 50,007 characters; at most 32,768 are read.",
    ),
    "fewer digits": (
        "a=data:" + "9" * 20_000,
        "the weight of source 'a' must be a number of 0 or more, not '999",
    ),
    "sources": (
        ",".join(f"s{k}=d:1" for k in range(2_000)),
        "--data_mix: sources 's0' and 's1' are both 'd'; give one of them more weight.",
    ),
    "escapes": (
        '{sources: {a: {path: "\\e[31mp\\nx", weight: 1}}}',
        "No dataset at '\\x1b[31mp\\nx' (from '/",
    ),
}
HOSTILE_TEXT = {  # program and flags, file -> what it holds, words of the sentence
    **{
        f"config: {name}": ("train --config evil.yaml", *bomb)
        for name, bomb in (BOMBS | IN_A_CONFIG).items()
    },
    **{
        f"mixture: {name}": ("train --model_name m --data_mix evil.yaml", *bomb)
        for name, bomb in BOMBS.items()
    },
    **{
        f"--data_mix: {name}": ("train --model_name m --data_mix", *mix)
        for name, mix in MIXTURES.items()
    },
    "resume": ("train --resume true --run_name run", *BOMBS["merges"]),
    "branch": ("train --resume true --checkpoint checkpoints/run/step-00000001", *BOMBS["merges"]),
    "prepare_data": ("prepare_data --config evil.yaml", *BOMBS["merges"]),
    "export_hf": ("export_hf --config evil.yaml", *BOMBS["merges"]),
    "a device": ("train --config /dev/zero", "", "--config: '/dev/zero' isn't a file."),
}
ONE_COMMAND = """
import importlib, json, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
resource.setrlimit(resource.RLIMIT_CPU, (2, 2))
program, *words = json.load(sys.stdin)
sys.exit(importlib.import_module(program).main(words))
"""


HOSTILE_MODELS = {  # file in a model's folder -> what it holds, words of the sentence
    "config.json": {
        "rope": (
            {"rope_parameters": {"factor": 1e300}},
            "a number that float32 can't (rope_parameters.factor: 1e+300).",
        ),
        "an integer": ({"hidden_size": 10**400}, "a number that float32 can't (hidden_size: 1000"),
        "layers": (
            {"num_hidden_layers": 10**9},
            "it declares 1000000000 layers (num_hidden_layers); at most 4096",
        ),
    },
    "tokenizer.json": {
        "a number": (
            {"model": {"vocab": {"a": 2**32 - 6}}},
            "has a token with the number 4294967290; at most 16,777,216",
        ),
        "an added number": (
            {"added_tokens": [{"id": 2**32 - 6}]}, "has a token with the number 4294967290",
        ),
        "deep": ("[" * 100_000, "is nested too deeply to be read."),
    },
}
MODELS = [
    (program, file, name)
    for program, files_of in (("train", HOSTILE_MODELS), ("prepare_data", ["tokenizer.json"]))
    for file in files_of
    for name in HOSTILE_MODELS[file]
]


def refused_at_once(folder, *flags):
    """What a command says on stderr, that ends with 2 and writes nothing, within two seconds of a
    processor and a GiB."""
    left = snapshot(folder)
    done = subprocess.run(
        [sys.executable, "-c", ONE_COMMAND],
        input=json.dumps(flags),
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    said = done.stderr
    assert (done.returncode, done.stdout) == (2, ""), said[-2000:]
    assert " error: " in said and len(said) < 500 and said.endswith("\n"), said[:2000]
    assert said[:-1].isprintable(), "one line, without what a terminal obeys"
    assert snapshot(folder) == left
    return said


@pytest.mark.quick_cases(r"config: (aliases|in a mixture)|report")
@pytest.mark.parametrize("name", HOSTILE_TEXT)
def test_hostile_text_is_refused_at_once(tmp_path, name):
    command, text, words = HOSTILE_TEXT[name]
    checkpoint = tmp_path / "checkpoints" / "run" / "step-00000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "MANIFEST.json").write_text("{}")
    for file in (tmp_path / "evil.yaml", checkpoint.parent / "arguments.yaml"):
        file.write_text(text)
    said = refused_at_once(
        tmp_path, *command.split(), *([text] if command.endswith("--data_mix") else [])
    )
    assert words in said, said


@pytest.mark.quick_cases(r"rope|prepare_data.*number")
@pytest.mark.parametrize(("program", "file", "name"), MODELS)
def test_a_hostile_model_or_tokenizer_is_refused_at_once(tmp_path, program, file, name):
    content, words = HOSTILE_MODELS[file][name]
    for folder, good, text in (
        ("model", "config.json", "{}"),
        ("data", "dataset_dict.json", '{"splits": ["train", "validation"]}'),
        ("corpus", "a.txt", "text"),
        ("model", file, content if isinstance(content, str) else json.dumps(content)),
    ):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / good).write_text(text)
    flags = ("--input", "corpus", "--tokenizer", "model", "--output", "out")
    if program == "train":
        flags = ("--model_name", "model", "--train_data_dir", "data")
    said = refused_at_once(tmp_path, program, *flags)
    assert words in said and "model" in said, said


@pytest.mark.longer
def test_a_regular_expression_that_takes_too_long_is_told_in_one_sentence(base, tmp_path):
    scene = copy_of(base, tmp_path)
    pattern = {"Regex": "(1|1 |2|2 )*(([0-9 ]+)+)+$x"}
    normalizer = {"type": "Replace", "pattern": pattern, "content": ""}
    edit(scene.model / "tokenizer.json", normalizer=normalizer)
    (scene.work / "long.txt").write_text("1 2 3 4 5 6 7 8 9 10\n\n" * 50)
    words = [str(word) for word in scene.prepare("--input", scene.work / "long.txt")]
    command = [sys.executable, Path(__file__).parent.parent / "prepare_data.py", *words[1:]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stdout == "", done.stderr
    said = "the tokenizer fails on a text: Onig: Regex search error: retry-limit-in-match over"
    assert done.stderr.startswith(f"prepare_data.py: error: {said}")
    assert len(done.stderr.splitlines()) == 1, done.stderr


def test_a_configuration_that_nobody_thought_of(base, tmp_path, monkeypatch):
    """No key says that it counts something."""
    monkeypatch.setattr(folders, "MAX_CPU_SECONDS", 1)
    scene = copy_of(base, tmp_path)
    changes = {"layer_types": None, "mlp_layer_types": None, "first_k_dense_replace": 10**9}
    command = edit_file(scene, MODEL, {"model_type": "cohere2_moe", **changes}, "train")
    [(code, said, _)] = run_ranks(1, end_of, *command, timeout_seconds=TIMEOUT_SECONDS)
    sentence = "can't be read: building it takes more than 1 s of processor time."
    assert code == 2 and f"The configuration of {str(scene.model)!r} {sentence}" in said, said


def test_what_takes_too_much_is_interrupted(monkeypatch):
    """Also where whoever builds it swallows exceptions; and the process is as before."""
    monkeypatch.setattr(folders, "MAX_CPU_SECONDS", 0.2)

    def swallow():
        while True:
            try:
                sum(range(1000))
            except ValueError:
                return

    def now():
        return resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGVTALRM)

    limits = now()
    for build, sentence in (
        (lambda: bytearray(2**33), "more than 2.0 GiB of memory"),
        (lambda: torch.empty(2**33), "more than 2.0 GiB of memory"),
        (swallow, "more than 0.2 s of processor time"),
    ):
        with pytest.raises(folders.TooMuch, match=sentence), folders.limited():
            build()
        assert limits == now()
    with pytest.raises(ZeroDivisionError), folders.limited():  # which whoever builds it sees
        1 / 0


def copy_of(base, folder):
    for name in ("work", "outside"):
        shutil.copytree(base / name, folder / name)
    return Scene(folder)


@pytest.mark.parametrize(
    "name",
    [
        f"pickle, {STEP}/trainer/optimizer/{PART}, resume",
        f"pickle, {SHARDED}/weights/{PART}, resume sharded",
        "position_without_end",
    ],
)
def test_two_ranks_end_alike(base, tmp_path, name):
    """None waits for another that has found something wrong."""
    attack, expected, *words = ATTACKS[name]
    command = (*attack(copy_of(base, tmp_path)), "--devices", 2, "--strategy", "fsdp")
    ends = run_ranks(2, end_of, *command, timeout_seconds=TIMEOUT_SECONDS)
    assert [code for code, _, _ in ends] == [expected] * 2, ends
    assert "Traceback" not in ends[0][1] and all(word in ends[0][1] for word in words)


def test_names_of_code_are_not_passed_on(base, tmp_path):
    """What is trained from a model with code of its own, which wasn't run, doesn't ask others to
    run it."""
    scene = copy_of(base, tmp_path)
    auto_map = {"AutoModelForCausalLM": "evil/repo--modeling.Evil", "AutoTokenizer": ["x", None]}
    for file in ("config.json", "tokenizer_config.json"):
        edit(scene.model / file, auto_map=auto_map)
    for command in (scene.train(), scene.export(scene.runs / "new")):
        [(code, said, _)] = run_ranks(1, end_of, *command)
        assert code == 0, said
    written = [*(scene.runs / "new").rglob("*.json"), *(scene.work / "exported").rglob("*.json")]
    assert written and not [path for path in written if "auto_map" in path.read_text()]


def test_the_payloads_would_work(tmp_path):
    """Opened as some do, each would create its file."""
    scene = Scene(tmp_path)
    scene.outside.mkdir()
    scene.zipped(tmp_path / "zipped")
    for run in (
        lambda: pickle.loads(scene.pickle),
        lambda: torch.load(tmp_path / "zipped", weights_only=False),
        lambda: exec(scene.code),
        lambda: yaml.unsafe_load(python_in_yaml(scene)),
    ):
        assert not scene.canary.exists()
        run()
        scene.canary.unlink()
