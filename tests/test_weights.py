"""Weights, unit by unit: read, drawn, spread over ranks, computed with and written, they are those
of the whole model."""

import json
import math
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from families import FAMILIES, toy_config, write_model
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import built, run_ranks, toy_run
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint._hf_utils import CUSTOM_METADATA_KEY, SAVED_OFFSETS_KEY
from transformers import AutoModelForCausalLM, DeepseekV3ForCausalLM

from fabric_llm.base.faults import Fault
from fabric_llm.checkpoint import state_dicts
from fabric_llm.model import gate, loading, reference, saving, weights
from fabric_llm.model.language_model import LanguageModel
from fabric_llm.model.loading import build_skeleton, load_config, open_weights
from fabric_llm.model.tensor_files import Tensors
from fabric_llm.model.weights import first_names, units

QUICK = ("llama", "gpt2", "mixtral", "gemma3_text")
LONGER = pytest.mark.longer
ALL = [family if family in QUICK else pytest.param(family, marks=LONGER) for family in FAMILIES]
NOT_STREAMED = ("xlstm",)  # computes nothing at this size


def opened(folder, dtype):
    config = load_config(str(folder))
    return open_weights(str(folder), config, dtype, seed=0), build_skeleton(config, dtype)


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


@pytest.mark.parametrize("family", ALL)
def test_a_model_filled_unit_by_unit_is_what_from_pretrained_makes(tmp_path, family):
    """Law 7 for every family: parameters, buffers, dtypes and ties."""
    folder = write_model(family, tmp_path / family)
    for dtype in (torch.float32, torch.bfloat16):
        expected = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        source, skeleton = opened(folder, dtype)
        found = reference.load_reference(skeleton, source)
        assert_equal(found.state_dict(), expected.state_dict())
        assert_equal(dict(found.named_buffers()), dict(expected.named_buffers()))
        assert first_names(found) == first_names(expected)


@pytest.mark.parametrize("family", ["gpt_oss", "longcat_flash", "rwkv"])
def test_a_skeleton_in_float16_keeps_what_from_pretrained_keeps_in_float32(tmp_path, family):
    folder = write_model(family, tmp_path / family)
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float16).state_dict()
    skeleton = build_skeleton(load_config(str(folder)), torch.float16).state_dict()
    dtypes = {name: tensor.dtype for name, tensor in expected.items()}
    assert {name: tensor.dtype for name, tensor in skeleton.items()} == dtypes
    assert {torch.float16, torch.float32} <= set(dtypes.values())


@pytest.mark.parametrize("family", ALL)
def test_a_reference_without_memory_for_its_layers_computes_the_same(tmp_path, family):
    if family in NOT_STREAMED:
        pytest.skip("can't be computed layer by layer")
    folder = write_model(family, tmp_path / family)
    ids = torch.arange(20)[None] * 7 % 131
    inputs, found = {"input_ids": ids, "labels": ids}, []
    for limit in (float("inf"), 0):
        source, skeleton = opened(folder, torch.float32)
        model = reference.load_reference(skeleton, source, limit)
        outputs = gate.outputs_of(model, ids, lambda ids, model=model: model(ids).logits)
        found.append((outputs, gate.gradients_of_reference(LanguageModel(model), inputs)))
    (outputs, gradients), (streamed, streamed_gradients) = found
    assert_equal(streamed.modules, outputs.modules)
    assert_equal(streamed_gradients.samples, gradients.samples)
    assert (streamed.loss, streamed_gradients.loss) == (outputs.loss, gradients.loss)
    assert streamed_gradients.squares == gradients.squares


def test_a_reference_holds_no_more_layers_than_it_may(tmp_path):
    source, skeleton = opened(write_model("llama", tmp_path / "llama"), torch.float32)
    layers = [name for name in units(skeleton) if ".layers." in name]
    size = sum(parameter.nbytes for parameter in skeleton.get_submodule(layers[0]).parameters())
    read, seen, sizes = source.read, [], []

    def counted(unit):
        seen.append(unit)
        return read(unit)

    def measure(*_):
        storages = [p.untyped_storage() for p in model.model.layers.parameters()]
        sizes.append(sum({one.data_ptr(): one.nbytes() for one in storages}.values()))

    source.read = counted
    model = reference.load_reference(skeleton, source, limit_bytes=size)
    for layer in model.model.layers:
        layer.register_forward_hook(measure)
    with torch.no_grad():
        model(torch.arange(8)[None])
    assert len(layers) == 2 and max(sizes) < 1.1 * size, (sizes, size)
    assert [unit for unit in seen if unit in layers] == layers


def tensors_of(folder):
    files = [load_file(path) for path in folder.glob("*.safetensors")]
    return {name: tensor for tensors in files for name, tensor in tensors.items()}


@pytest.mark.parametrize("family", ALL)
def test_whole_weights_are_the_files_of_save_pretrained(tmp_path, family):
    source, skeleton = opened(write_model(family, tmp_path / family), torch.bfloat16)
    tensors = {unit: source.read(unit) for unit in units(skeleton)}
    state = {name: tensor for one in tensors.values() for name, tensor in one.items()}
    for number, largest in enumerate(("5GB", "20KB")):
        ours, theirs = tmp_path / f"ours-{number}", tmp_path / f"theirs-{number}"
        ours.mkdir()
        skeleton.save_pretrained(theirs, state_dict=dict(state), max_shard_size=largest)
        files = saving.WeightFiles(ours, skeleton, largest)
        complete = [file for one in tensors.values() for file in files.write(one)]
        assert sorted(complete) == sorted(path.name for path in ours.glob("*.safetensors"))
        assert_equal(tensors_of(ours), tensors_of(theirs))
        if number == 0:
            assert complete == ["model.safetensors"]
            assert [path.name for path in theirs.glob("*.safetensors")] == complete
        else:  # transformers keeps what was one tensor in memory in one file, however large
            index = json.loads((ours / "model.safetensors.index.json").read_bytes())
            assert all(name in load_file(ours / file) for name, file in index["weight_map"].items())
            wanted = tensors_of(theirs)
            assert index["weight_map"].keys() == wanted.keys()
            assert index["metadata"]["total_size"] == sum(one.nbytes for one in wanted.values())


def test_a_file_is_byte_for_byte_that_of_safetensors(tmp_path):
    tensors = {"b": torch.arange(6.0).view(2, 3), "a": torch.ones(3, dtype=torch.bfloat16)}
    tensors["c"] = torch.tensor(2)
    save_file(tensors, tmp_path / "theirs", {"format": "pt"})
    file = saving.TensorFile(tmp_path / "ours", tensors, {"format": "pt"})
    assert [file.write(name, tensors[name]) for name in ("c", "a", "b")] == [False, False, True]
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def drawn(argv):
    """The weights of a run that begins with random ones, whole."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    _, _, model, _ = built(argv)
    state = get_model_state_dict(model.module, options=StateDictOptions(full_state_dict=True))
    return {name: value.clone() for name, value in state.items()}


@pytest.mark.longer
@pytest.mark.parametrize("model", ["llama-tied", "gpt2"])
def test_random_weights_are_the_same_bits_on_any_ranks_and_strategy(toys, tmp_path, model):
    empty = tmp_path / "empty"
    empty.mkdir()
    shutil.copy(toys / model / "config.json", empty)
    argv = [*toy_run(toys, tmp_path), "--model_name", empty, "--precision", "bf16-true"]
    argv = [*map(str, argv), "--devices"]
    [expected] = run_ranks(1, drawn, [*argv, "1"])
    assert not any(tensor.isnan().any() for tensor in expected.values())
    for strategy, ranks in (("fsdp", 2), ("fsdp2", 3), ("ddp", 2)):
        for found in run_ranks(ranks, drawn, [*argv, str(ranks), "--strategy", strategy]):
            assert_equal(found, expected)


@pytest.mark.parametrize("family", ALL)
def test_random_weights_are_spread_as_the_models_own(family):
    """As transformers draws them as a whole: the same constants, and about the same deviations."""
    config = toy_config(family)
    skeleton = build_skeleton(config, torch.float32)
    source = weights.Drawn(build_skeleton(config, torch.float32), seed=0)
    found = {name: tensor for unit in units(skeleton) for name, tensor in source.read(unit).items()}
    torch.manual_seed(1)
    expected = AutoModelForCausalLM.from_config(config).state_dict()
    for name, tensor in found.items():
        whole_one = expected[name].float()
        if whole_one.numel() < 2 or whole_one.std() == 0:
            assert torch.equal(tensor, expected[name]), name
        elif tensor.numel() > 200:
            assert abs(tensor.std() - whole_one.std()) < 0.4 * whole_one.std(), name
            assert abs(tensor.mean() - whole_one.mean()) < 0.4 * whole_one.std(), name


@pytest.mark.parametrize("how", ["lacks", "shape", "truncated"])
def test_files_that_do_not_hold_the_model_are_one_sentence_before_anything_is_read(tmp_path, how):
    path = write_model("llama", tmp_path / "llama") / "model.safetensors"
    tensors = load_file(path)
    part = tensors.pop("model.layers.1.mlp.up_proj.weight")[:-1].contiguous()
    if how == "shape":
        tensors["model.layers.1.mlp.up_proj.weight"] = part
    save_file(tensors, path, {"format": "pt"})
    if how == "truncated":
        path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(Exception, match="weights of .* can't be read") as raised:
        opened(path.parent, torch.float32)
    assert raised.value.code == 2 and ("up_proj" in str(raised.value)) == (how != "truncated")
    assert ("; copy or download it again." in str(raised.value)) == (how == "truncated")


def test_weights_that_are_tied_by_the_configuration_alone_are_refused(toys, tmp_path):
    """transformers leaves them apart, with a warning."""
    folder = shutil.copytree(toys / "llama-tied", tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    opened(folder, torch.float32)
    tensors["lm_head.weight"] += 1
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(Fault, match="differ, but config.json ties them"):
        opened(folder, torch.float32)


def test_weights_without_an_index_or_under_another_name_are_not_drawn(toys, tmp_path):
    folder = shutil.copytree(toys / "llama", tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    sentence = "can't be read: it has no model.safetensors and no model.safetensors.index.json"
    with pytest.raises(Fault, match=sentence):
        opened(folder, torch.float32)
    (folder / "weights").mkdir()  # of somebody else
    (folder / "model-00001-of-00002.safetensors").rename(folder / "own.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["transformers_weights"] = "own.safetensors"
    (folder / "config.json").write_text(json.dumps(config))
    (found, _), (expected, _) = opened(folder, torch.float32), opened(toys / "llama", torch.float32)
    assert_equal(found.read("lm_head"), expected.read("lm_head"))


def test_what_may_be_missing_by_its_name_is_as_transformers_makes_it(tmp_path, monkeypatch):
    folder, bias = write_model("deepseek_v3", tmp_path / "model"), "e_score_correction_bias"
    kept = {name: one for name, one in tensors_of(folder).items() if bias not in name}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(Fault, match=bias):
        opened(folder, torch.bfloat16)
    monkeypatch.setattr(DeepseekV3ForCausalLM, "_keys_to_ignore_on_load_missing", [bias])
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    source, skeleton = opened(folder, torch.bfloat16)
    found = {name: one for unit in units(skeleton) for name, one in source.read(unit).items()}
    assert_equal(found, expected.state_dict())


@pytest.mark.parametrize("family", ["apertus", "openai-gpt", "gpt2"])
def test_weights_that_are_drawn_as_a_whole_are_said_once(capsys, family):
    """A few constructors draw what `_init_weights` leaves out."""
    skeleton = build_skeleton(toy_config(family), torch.float32)
    source = weights.Drawn(build_skeleton(toy_config(family), torch.float32), seed=0)
    for unit in units(skeleton):
        source.read(unit)
    said = capsys.readouterr().out.count("rank 0 draws the whole model at once")
    assert said == (0 if family == "gpt2" else 1)


# ------------------------------------------------------------------------ parts of a sharded tensor


@given(
    st.lists(st.integers(1, 5), min_size=0, max_size=4),
    st.lists(st.integers(0, 1000), max_size=4),
    st.data(),
)
@settings(deadline=None, max_examples=60)
def test_parts_of_any_split_are_blocks_that_together_are_the_tensor(shape, cuts, data):
    """FSDP1 splits a flattened tensor anywhere. What each rank writes is read again whole, and by
    any other split."""
    whole = torch.randn(shape).bfloat16()
    count = whole.numel()
    cuts = sorted({0, count, *(cut % (count + 1) for cut in cuts)})
    with tempfile.TemporaryDirectory() as name:
        number = 0
        for first, end in zip(cuts, cuts[1:]):
            for part in state_dicts._blocks(whole.flatten()[first:end], first, tuple(shape)):
                offsets = json.dumps({"x": {SAVED_OFFSETS_KEY: part.offsets}})
                file = Path(name) / f"{(number := number + 1)}.safetensors"
                save_file({"x": part.tensor.contiguous()}, file, {CUSTOM_METADATA_KEY: offsets})
        stored = Tensors(Path(name).iterdir())
        assert torch.equal(stored["x"], whole)
        first = data.draw(st.integers(0, count))
        end = data.draw(st.integers(first, count))
        assert torch.equal(stored.elements("x", first, end - first), whole.flatten()[first:end])
        # Without one of the files no elements are given, wherever they lie.
        files = sorted(Path(name).iterdir())
        dropped = data.draw(st.sampled_from(files)) if files else None
        left = Tensors(file for file in files if file != dropped)
        if len(left) and left.missing("x"):
            first = data.draw(st.integers(0, math.prod(left.shapes["x"]) - 1))
            with pytest.raises(Fault, match="lacks"):
                left.elements("x", first, 1)


def test_a_folder_that_is_not_there_is_no_name_on_the_hub(monkeypatch, tmp_path):
    """mine/tokenizer of a dataset without one has the form of a repository's name."""

    def asked(*args, **more):
        raise AssertionError("the hub was asked")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loading, "load_tokenizer", asked)
    monkeypatch.setattr(loading, "cached_file", asked)
    assert loading.tokenizer_beside(Path("mine", "tokenizer")) is None
