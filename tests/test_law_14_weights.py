"""Law 14: tensors of the weight files = tensors loaded + tensors named, in the log or in the
refusal.

Odd folders are drawn from real models. What came in is counted with safetensors alone: the numbers
in the files that aren't named are those of the model, each as often, in whatever order and layout
its class keeps them.
"""
import random
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from families import FAMILIES, write_model
from ranks import Job, toy_run
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from fabric_llm.base.faults import Fault
from fabric_llm.model import loading
from fabric_llm.model.folders import check_model_folder
from fabric_llm.model.loading import build_skeleton, load_config
from fabric_llm.model.weights import units
from fabric_llm.run.reference import unread_weights

QUICK = ("llama", "gpt2", "mixtral", "qwen3", "gemma3_text", "qwen3_next")
LONGER = pytest.mark.longer
ALL = [family if family in QUICK else pytest.param(family, marks=LONGER) for family in FAMILIES]
SEEDS = [seed if seed < 4 else pytest.param(seed, marks=LONGER) for seed in range(24)]
LEFT_OUT = {  # what transformers leaves out by name, though it is in files of these families
    "gpt2": ["h.1.attn.bias", "h.0.attn.bias"],
    "llama": [f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in (0, 1)],
    "qwen3_next": ["mtp.fc.weight", "mtp.layers.0.mlp.gate.weight", "mtp.norm.weight"],
    "deepseek_v3": ["model.layers.61.embed_tokens.weight", "model.layers.61.mlp.gate.weight"],
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Family -> a folder with a model of it, made once."""
    made, place = {}, tmp_path_factory.mktemp("whole")

    def folder_of(family):
        if family not in made:
            made[family] = write_model(family, place / family)
        return made[family]

    return folder_of


def tensors_of(folder):
    files = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
    return {name: tensor for tensors in files for name, tensor in tensors.items()}


def with_tensors(folder, tensors, place):
    """A copy, in `place`, of a model's folder that holds these tensors."""
    copy = shutil.copytree(folder, place / "model")
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    return copy


def numbers(tensors):
    """All numbers, in order of size."""
    return np.sort(np.concatenate([tensor.double().flatten().numpy() for tensor in tensors]))


def opened(folder):
    """(what the source reads, what it has left out). Raises what reading raises."""
    config = load_config(str(folder))
    source = loading.open_weights(str(folder), config, torch.float32)
    read = [source.read(unit).values() for unit in units(build_skeleton(config, torch.float32))]
    read = [tensor for tensors in read for tensor in tensors]
    return read, source.left_out


def refusal(folder, code=2):
    with pytest.raises(ValueError) as raised:
        opened(folder)
    assert getattr(raised.value, "code", 2) == code
    return str(raised.value)


@pytest.mark.parametrize("family", ALL)
def test_what_is_in_the_files_is_in_the_model(whole, family):
    read, left_out = opened(whole(family))
    assert left_out == []
    assert np.array_equal(numbers(read), numbers(tensors_of(whole(family)).values()))


# ------------------------------------------------------------------------------- odd tensors, drawn


def bias_beside(tensors, draw):
    matrices = [name for name in tensors if tensors[name].ndim == 2 and name.endswith("weight")]
    return {draw.choice(matrices).removesuffix("weight") + "extra_bias": torch.randn(7)}


def a_tower(tensors, draw):
    count = draw.randint(1, 30)
    return {f"vision_tower.blocks.{number}.weight": torch.randn(3, 5) for number in range(count)}


def more_layers(tensors, draw):
    number = draw.randint(2, 40)
    numbered = {name: re.search(r"\.(\d+)\.", name) for name in tensors}
    first = [name for name, found in numbered.items() if found and found[1] == "0"]
    return {
        name.replace(".0.", f".{number}.", 1): tensors[name].clone()
        for name in first
        if not any(part in name for part in (".experts.", "attn.bias"))
    }


def scales(tensors, draw):
    some = list(tensors)[:: draw.randint(1, 3)]
    return {f"{n}_scale_inv": torch.rand(1, 1) for n in some if n.endswith("proj.weight")}


@pytest.mark.parametrize("seed", SEEDS)
def test_tensors_that_the_model_does_not_take_are_refused_by_name(whole, tmp_path, seed):
    draw = random.Random(seed)
    model = whole(draw.choice(QUICK))
    tensors = tensors_of(model)
    added = draw.choice([bias_beside, a_tower, more_layers, scales])(tensors, draw)
    added = added or a_tower(tensors, draw)
    said = refusal(with_tensors(model, {**tensors, **added}, tmp_path))
    assert f"{len(added)} of the tensors in the files" in said
    assert all(name in said for name in sorted(added)[:10]), said


@pytest.mark.parametrize("seed", SEEDS[:8])
def test_renamed_tensors_are_named_as_they_are_and_as_they_should_be(whole, tmp_path, seed):
    draw = random.Random(seed)
    tensors = tensors_of(whole("llama"))
    name = draw.choice([name for name in tensors if ".layers." in name])
    tensors[other := name.replace("model.", "module.", 1)] = tensors.pop(name)
    said = refusal(with_tensors(whole("llama"), tensors, tmp_path))
    assert name in said and other in said


@pytest.mark.parametrize("family", LEFT_OUT)
def test_what_transformers_leaves_out_by_name_is_named(whole, tmp_path, family):
    tensors = tensors_of(whole(family))
    added = {name: torch.randn(3, 3) for name in LEFT_OUT[family]}
    read, left_out = opened(with_tensors(whole(family), {**tensors, **added}, tmp_path))
    assert left_out == sorted(added) and np.array_equal(numbers(read), numbers(tensors.values()))


def test_one_tensor_in_two_files_is_refused_where_its_values_differ(whole, tmp_path):
    tensors, folder = tensors_of(whole("llama")), tmp_path / "sharded"
    model = AutoModelForCausalLM.from_pretrained(whole("llama"))
    model.save_pretrained(folder, max_shard_size="20KB")
    first, *_, last = sorted(folder.glob("model-*.safetensors"))
    name = sorted(load_file(first))[0]
    save_file({**load_file(last), name: tensors[name]}, last, {"format": "pt"})
    assert np.array_equal(numbers(opened(folder)[0]), numbers(tensors.values()))
    save_file({**load_file(last), name: tensors[name] + 1}, last, {"format": "pt"})
    assert f"{first.name} and {last.name} hold {name} with different values" in refusal(folder)


def test_one_tensor_under_two_names_is_refused(whole, tmp_path):
    tensors = tensors_of(whole("llama"))
    tensors["layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"] + 1
    said = refusal(with_tensors(whole("llama"), tensors, tmp_path))
    assert "is there twice" in said and "as layers.1.mlp.up_proj.weight" in said


# ------------------------------------------------------------------------------ what isn't a number


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.uint8, torch.int32, torch.float8_e4m3fn, torch.float8_e5m2]
)
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_weights_in_a_dtype_that_needs_scales_are_refused(whole, tmp_path, family, dtype):
    tensors = tensors_of(whole(family))
    scaled = sorted(name for name in tensors if name.endswith(("k_proj.weight", "w1.weight")))
    for name in scaled:
        tensors[name] = (tensors[name] * 100).to(dtype)
    said = refusal(with_tensors(whole(family), tensors, tmp_path))
    assert f"{len(scaled)} of them are" in said and any(name in said for name in scaled)
    assert "quantization_config" in said


@pytest.mark.parametrize("seed", SEEDS[:8])
def test_nan_and_infinity_are_found_as_they_are_loaded(whole, tmp_path, seed):
    draw = random.Random(seed)
    model = whole(draw.choice(["llama", "gpt2", "qwen3"]))
    tensors = tensors_of(model)
    name = draw.choice(sorted(tensors))
    flat = tensors[name].view(-1)
    flat[draw.randrange(len(flat))] = draw.choice([float("nan"), float("inf"), float("-inf")])
    said = refusal(with_tensors(model, tensors, tmp_path), code=76)
    assert "holds NaN or infinity" in said and f"in {name}" in said


# ------------------------------------------------------ random weights, or weights that aren't read

MAY_BE_WEIGHTS = (
    "model.Q4_K_M.gguf", "flax_model.msgpack", "tf_model.h5", "__0_0.distcp", "global_step500/mp_rank_00_model_states",
    "global_step500/zero.pt", "original/consolidated.00.pth", "model.safetensor", "model-00001-of-00002.bin.part",
    ".cache/huggingface/download/abc.def.incomplete", "model.crdownload", "model.onnx", "rust_model.ot", "weights.npz",
    "pytorch_model.bin.index.json", "checkpoint.zip", "params/shard_0", "weights/model.safetensors", "model.nemo",
)  # fmt: skip
NO_WEIGHTS = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "README.md", "LICENSE", "LICENSE.txt", ".gitattributes",
    "vocab.json", "merges.txt", "special_tokens_map.json", "generation_config.json", "chat_template.jinja", ".gitignore",
    ".cache/huggingface/download/config.json.metadata", ".cache/huggingface/download/config.json.lock", "USE_POLICY.md",
)  # fmt: skip


@pytest.fixture
def configured(whole, tmp_path):
    """A folder with a configuration alone, and a function that puts a file into it."""
    folder = tmp_path / "configured"
    folder.mkdir()
    shutil.copy(whole("llama") / "config.json", folder)

    def put(name, content=b"{}"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)

    return folder, put


@pytest.mark.parametrize("name", MAY_BE_WEIGHTS)
def test_no_random_start_beside_what_may_be_weights(configured, name):
    folder, put = configured
    for other in NO_WEIGHTS:
        put(other)
    put(name)
    with pytest.raises(ValueError, match=re.escape(name)) as raised:
        check_model_folder(str(folder))
        opened(folder)  # of safetensors without the names that are read
    pickled = name.endswith((".pt", ".pth"))
    assert getattr(raised.value, "code", 2) == (77 if pickled else 2)
    if not pickled:
        assert "may be weights" in str(raised.value) or "no model.safetensors" in str(raised.value)


def test_a_link_to_a_folder_may_lead_to_weights(configured, whole):
    folder, _ = configured
    (folder / "weights").symlink_to(whole("llama"))
    with pytest.raises(ValueError, match="'weights' may be weights"):
        check_model_folder(str(folder))


def test_random_weights_where_nothing_may_be_weights(configured):
    folder, put = configured
    for name in NO_WEIGHTS:
        put(name)
    check_model_folder(str(folder))
    assert not loading.has_weights(str(folder))


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4976698672\n"
PAGE = b"\n<!DOCTYPE html>\n<html><head><title>Sign in</title>"


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json", "config.json"])
@pytest.mark.parametrize(
    ("instead", "content"), [("a pointer of git-lfs", POINTER), ("a web page", PAGE)]
)
def test_what_is_there_instead_of_a_file_is_said(whole, tmp_path, file, instead, content):
    folder = shutil.copytree(whole("llama"), tmp_path / "model")
    (folder / file).write_bytes(content)
    with pytest.raises(ValueError, match=f"{file}' is {instead}"):
        check_model_folder(str(folder))


# ------------------------------------------------------------------------------- train.py says it


def train(toys, folder, tmp_path):
    job = Job(1, *toy_run(toys, tmp_path), "--model_name", folder, "--eval_iters", 0)
    [code] = job.wait(120)
    return code, job.output[0]


def test_a_run_does_not_start_from_part_of_its_weights(toys, tmp_path):
    biases = [f"model.layers.{n}.mlp.{name}_proj.bias" for n in (0, 1) for name in ("up", "down")]
    tensors = tensors_of(toys / "llama") | {name: torch.ones(32) for name in biases}
    code, said = train(toys, with_tensors(toys / "llama", tensors, tmp_path), tmp_path)
    assert code == 2 and all(name in said for name in biases) and "Traceback" not in said


@pytest.mark.longer
def test_a_run_says_what_transformers_leaves_out_and_the_card_as_well(toys, tmp_path):
    from fabric_llm.checkpoint import keep
    from fabric_llm.weights import card
    from fabric_llm.weights.export import export

    tensors = tensors_of(toys / "llama") | {name: torch.ones(4) for name in LEFT_OUT["llama"]}
    folder = with_tensors(toys / "llama", tensors, tmp_path)
    save_file(tensors, folder / "consolidated.safetensors")
    code, said = train(toys, folder, tmp_path)
    named = "model.layers.*.self_attn.rotary_emb.inv_freq (2)"
    assert code == 0 and said.count(named) == 1 and "Tensors in the files of" in said
    assert said.count(" are its weights: consolidated.safetensors.") == 1
    checkpoint = keep.checkpoint_at(next(path.parent for path in tmp_path.rglob("arguments.yaml")))
    output = tmp_path / "hf"
    given = SimpleNamespace(push_to_hub=None, output=output, dtype="auto", ema=False)
    given.max_shard_size = "5GB"

    def describe(made, proof):
        card.write(made, proof, checkpoint, given)

    export(checkpoint, output, describe=describe)
    assert f"since transformers leaves them out: `{named}`." in (output / "README.md").read_text()


def test_nan_in_the_base_ends_a_run_before_its_first_step(toys, tmp_path):
    tensors = tensors_of(toys / "llama")
    tensors["model.embed_tokens.weight"][5] = float("inf")
    code, said = train(toys, with_tensors(toys / "llama", tensors, tmp_path), tmp_path)
    assert code == 76 and "holds NaN or infinity in model.embed_tokens.weight" in said
    assert "causal" not in said


def test_numbers_that_float16_cannot_hold_are_not_told_as_infinity(toys, tmp_path):
    """The checkpoint is whole: another --dtype exports it."""
    tensors = tensors_of(toys / "llama")
    tensors["model.embed_tokens.weight"][5] = 1e5
    folder = str(with_tensors(toys / "llama", tensors, tmp_path))
    config = loading.load_config(folder)
    weights = loading.open_weights(folder, config, torch.float16)
    with pytest.raises(Fault, match="float16 can't hold the numbers of model.embed_tokens.weight"):
        [weights.read(unit) for unit in weights.keys]


@pytest.mark.parametrize("read", ["model.safetensors", "model.safetensors.index.json"])
def test_weight_files_that_are_not_read_are_named(toys, tmp_path, read):
    folder, whole_file = tmp_path / "model", toys / "llama" / "model.safetensors"
    AutoModelForCausalLM.from_pretrained(toys / "llama").save_pretrained(
        folder, max_shard_size="20KB"
    )
    shards = sorted(path.name for path in folder.glob("model-*.safetensors"))
    assert len(shards) > 1
    shutil.copy(whole_file, folder / "consolidated.safetensors")
    expected = ["consolidated.safetensors"]
    if read == "model.safetensors":
        shutil.copy(whole_file, folder)
        expected += [*shards, "model.safetensors.index.json"]
    config = AutoConfig.from_pretrained(folder)
    assert unread_weights(str(folder), config) == sorted(expected)
    assert unread_weights(str(toys / "llama"), config) == []


def test_weights_beside_those_that_the_configuration_names_are_named(toys, tmp_path):
    folder = shutil.copytree(toys / "llama", tmp_path / "model")
    shutil.copy(folder / "model.safetensors", folder / "own.safetensors")
    config = AutoConfig.from_pretrained(folder)
    config.transformers_weights = "own.safetensors"
    assert unread_weights(str(folder), config) == ["model.safetensors"]
