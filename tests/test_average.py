"""python -m fabric_llm.average: what it writes is the average of its parts, or it says why not and
leaves nothing."""

import json
import math
import shutil
from types import SimpleNamespace

import conftest
import datasets
import pytest
import torch
from conftest import CONTEXT, changed_config, ended, flip, parts, same_tensors
from ranks import metrics, run_ranks, toy_run, train_ranks
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

from fabric_llm.average import main, named
from fabric_llm.base import register
from fabric_llm.base.files import step_directories
from fabric_llm.model.language_model import LanguageModel
from fabric_llm.model.saving import with_older_names
from fabric_llm.model.tensor_files import Tensors
from fabric_llm.model.weights import PREFIX
from fabric_llm.weights import average
from fabric_llm.weights.average import require_same_model


@pytest.fixture(scope="module")
def runs(toys, tmp_path_factory):
    """Runs of three checkpoints: full (llama, float32), sharded (gpt2, tied, by two FSDP ranks,
    bf16), and bf16 (as full)."""
    folder = tmp_path_factory.mktemp("runs")
    flags = (*toy_run(toys, folder), *FLAGS.split(), "--run_name")
    train_ranks(1, *flags, "full", "--precision", "32-true")
    train_ranks(1, *flags, "bf16")
    sharded = "sharded --strategy fsdp --state_dict_type sharded --precision bf16-true"
    train_ranks(2, *flags, *sharded.split(), "--model_name", toys / "gpt2-no-dropout")
    return folder


FLAGS = (
    "--lr 2e-2 --max_step 6 --micro_batch_size 4 --save_step_interval 2 --eval_iters 2 "
    "--eval_step_interval 2 --eval_batch_size 4 --verify_start false --lr_decay false"
)


@pytest.fixture
def run_average(tmp_path, capsys):
    """Call the command with flags, output tmp_path/hf; returns (exit code, stdout, last line of
    stderr)."""

    def call(*flags, output=tmp_path / "hf", evaluate="false"):
        code = ended(main, *flags, "--output", output, "--evaluate", evaluate)
        captured = capsys.readouterr()
        return code, captured.out, captured.err.strip().rpartition("\n")[2]

    return call


def note_of(folder):
    return json.loads((folder / "hf" / "average.json").read_text())


def stored(folder):
    """Every tensor of a folder, by name; of a sharded checkpoint put together."""
    if not (folder / "weights").is_dir():
        return conftest.stored(folder)
    tensors = Tensors((folder / "weights").iterdir())
    return {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}


def llama_with(toys, folder, **tensors):
    """A copy of the toy Llama with other tensors."""
    shutil.copytree(toys / "llama", folder)
    changed = {**stored(toys / "llama"), **tensors}
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def expected(folders, weights, dtype):
    """The plain average in float64."""
    every = [stored(folder) for folder in folders]
    return {
        name: sum(w * one[name].double() for w, one in zip(weights, every)).to(dtype)
        for name in every[0]
    }


# ------------------------------------------------------------------------------- the average


@pytest.mark.quick_cases(r"sharded.*7,1,2")
@pytest.mark.parametrize(
    ("weights", "counted"), [("equal", [1 / 3] * 3), ("7,1,2", [0.7, 0.1, 0.2])]
)
@pytest.mark.parametrize(("run", "dtype"), [("full", torch.float32), ("sharded", torch.bfloat16)])
def test_is_the_plain_average(runs, tmp_path, run_average, run, dtype, weights, counted):
    code, out, _ = run_average(runs / run, "--last", 3, "--weights", weights)
    assert code == 0 and "Verified with plain transformers" in out
    assert parts(tmp_path) == ["hf"]
    average, folders = stored(tmp_path / "hf"), step_directories(runs / run)
    wanted = expected(folders, counted, torch.float64)
    assert average.keys() == wanted.keys()
    close = {"rtol": torch.finfo(dtype).eps / 2 * (1 + 1e-6), "atol": 1e-12}
    for name, tensor in wanted.items():
        assert average[name].dtype == dtype
        torch.testing.assert_close(average[name].double(), tensor, **close, msg=name)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "hf").dtype == dtype
    note = note_of(tmp_path)
    assert note["weights"] == weights and [part["step"] for part in note["parts"]] == [2, 4, 6]
    assert [part["weight"] for part in note["parts"]] == pytest.approx(counted)


@pytest.mark.longer
def test_base_and_end_and_another_run(runs, toys, tmp_path, run_average):
    """A Hugging Face directory, and checkpoints of runs of different precision: the wider dtype."""
    ends = [step_directories(runs / run)[-1] for run in ("full", "bf16")]
    code, out, _ = run_average(toys / "llama", runs / "full", ends[1], "--weights", "0.5,0.25,0.25")
    assert code == 0, out
    wanted = expected([toys / "llama", *ends], [0.5, 0.25, 0.25], torch.float32)
    assert same_tensors(stored(tmp_path / "hf"), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_dtype_is_that_of_the_files(toys, tmp_path, run_average, dtype):
    """Whatever config.json says."""
    model = AutoModelForCausalLM.from_pretrained(toys / "llama", dtype=dtype)
    model.save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    other = "float32" if dtype == torch.bfloat16 else "bfloat16"
    file.write_text(json.dumps({**json.loads(file.read_text()), "dtype": other}))
    assert run_average(tmp_path / "model")[0] == 0
    assert same_tensors(stored(tmp_path / "hf"), stored(tmp_path / "model"))


@pytest.mark.quick_cases(r"sharded")
@pytest.mark.parametrize("run", ["full", "sharded"])
def test_files_have_a_largest_size_and_another_dtype(runs, tmp_path, run_average, run):
    flags = "--last 2 --max_shard_size 20KB --dtype float16".split()
    assert run_average(runs / run, *flags)[0] == 0
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    files = {file.name for file in (tmp_path / "hf").glob("*.safetensors")}
    assert len(files) > 1 and set(index["weight_map"].values()) == files
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "hf").dtype == torch.float16
    wanted = expected(step_directories(runs / run)[-2:], [0.5, 0.5], torch.float16)
    assert same_tensors(stored(tmp_path / "hf"), wanted)


@pytest.mark.longer
def test_fused_experts_of_a_sharded_checkpoint_meet_those_of_a_hugging_face_directory(
    toys, tmp_path, run_average
):
    """transformers fuses experts in memory, so that a sharded checkpoint has other names than files
    of the hub."""
    base = toys / "mixtral"
    flags = f"{FLAGS} --run_name run --max_step 1 --state_dict_type sharded --precision 32-true"
    train_ranks(1, *toy_run(toys, tmp_path, model="mixtral"), *flags.split())
    code, out, error = run_average(base, tmp_path / "run")
    assert code == 0, error
    first = AutoModelForCausalLM.from_pretrained(base)
    end = stored(tmp_path / "run" / "step-00000001")
    average = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    for name, parameter in average.named_parameters():
        wanted = (first.get_parameter(name).double() + end[name].double()) / 2
        assert torch.equal(parameter, wanted.float()), name
    assert stored(tmp_path / "hf").keys() == stored(base).keys(), "the names of the hub"


def test_names_without_the_prefix_of_the_base_model(toys, tmp_path, run_average):
    """As openai-community/gpt2 has them."""
    tensors = {name.removeprefix("transformer."): t for name, t in stored(toys / "gpt2").items()}
    shutil.copytree(toys / "gpt2", tmp_path / "old")
    save_file(tensors, tmp_path / "old" / "model.safetensors", metadata={"format": "pt"})
    code, _, error = run_average(tmp_path / "old", toys / "gpt2-no-dropout")
    assert code == 0, error
    wanted = expected([toys / "gpt2", toys / "gpt2-no-dropout"], [0.5, 0.5], torch.float32)
    assert same_tensors(wanted, stored(tmp_path / "hf"))


@pytest.mark.longer
def test_memory_does_not_grow_with_the_number_of_parts(tmp_path):
    """Parts of 64 MB: six of them need no more than two."""
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4}
    config = LlamaConfig(**sizes, num_attention_heads=8, vocab_size=6000)
    folders = [str(tmp_path / str(number)) for number in range(6)]
    AutoModelForCausalLM.from_config(config).save_pretrained(folders[0])
    for folder in folders[1:]:
        shutil.copytree(folders[0], folder)
    size = (tmp_path / "0" / "model.safetensors").stat().st_size
    [two] = run_ranks(1, peak_bytes, folders[:2], str(tmp_path / "hf-2"))
    [six] = run_ranks(1, peak_bytes, folders, str(tmp_path / "hf-6"))
    assert size > 60e6 and six - two < size / 2


def peak_bytes(folders, output):
    import ctypes
    import resource

    # M_MMAP_THRESHOLD: what is freed goes back at once, or the peak is one of leftovers
    ctypes.CDLL(None).mallopt(-3, 2**16)
    main([*folders, "--output", output, "--evaluate", "false", "--max_shard_size", "10MB"])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_last_takes_the_newest_of_each_run(runs):
    found = named([str(runs / "full"), str(runs / "sharded")], 2)
    names = [f"{path.parent.name} {path.name[-1]}" for path in found]
    assert names == ["full 4", "full 6", "sharded 4", "sharded 6"]
    assert [path.name[-1] for path in named([str(runs / "full")], None)] == ["6"]


def test_the_tokenizer_is_that_of_the_newest_part_that_has_one(toys, tmp_path, run_average):
    words = Tokenizer(models.WordLevel({"x": 0, "y": 1}, unk_token="x"))
    for name in "ab":
        shutil.copytree(toys / "llama", tmp_path / name)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, chat_template=name)
        tokenizer.save_pretrained(tmp_path / name)
    assert run_average(tmp_path / "a", tmp_path / "b", toys / "llama")[0] == 0
    assert AutoTokenizer.from_pretrained(tmp_path / "hf").chat_template == "b"


# ------------------------------------------------------------------------------- evaluation


@pytest.mark.longer
def test_losses_of_the_parts_are_those_of_the_run(runs, tmp_path, run_average):
    code, out, _ = run_average(runs / "full", "--last", 3, evaluate="true")
    note = note_of(tmp_path)
    losses = [part["eval_loss"]["validation"] for part in note["parts"]]
    assert code == 0
    assert losses == pytest.approx(metrics(runs / "full", "eval_loss")[-3:], abs=1e-5)
    table = [line.split() for line in out.partition("Validation loss")[2].splitlines()[1:5]]
    names = [*(f"full/step-0000000{step}" for step in (2, 4, 6)), "average"]
    assert [row[0] for row in table] == names
    losses.append(note["eval_loss"]["validation"])
    assert [float(row[-1]) for row in table] == pytest.approx(losses, abs=1e-4)


def test_a_sharded_bf16_run_of_two_ranks_is_evaluated_as_it_was(runs, tmp_path, run_average):
    assert run_average(runs / "sharded", evaluate="true")[0] == 0
    note, of_run = note_of(tmp_path), metrics(runs / "sharded", "eval_loss")[-1]
    assert note["eval_loss"] == note["parts"][0]["eval_loss"]
    assert note["eval_loss"]["validation"] == pytest.approx(of_run, abs=1e-2)


@pytest.mark.longer
@pytest.mark.parametrize("no_kernel", [None, "its GPU is too old for it"])
def test_a_set_that_is_not_packed_is_evaluated_as_the_run_did(
    toys, packed_data, tmp_path, run_average, monkeypatch, no_kernel
):
    """The token that ends documents of the training data is a word like others there."""
    made = []
    note = lambda *args, **more: made.append(LanguageModel(*args, **more)) or made[-1]
    monkeypatch.setattr(average, "LanguageModel", note)
    monkeypatch.setattr(average, "no_kernel", lambda *_: no_kernel)
    flags = f"{FLAGS} --run_name run --max_step 1 --precision 32-true".split()
    data = ("--train_data_dir", packed_data, "--eval_data", f"plain={toys / 'data'}")
    train_ranks(1, *toy_run(toys, tmp_path), *flags, *data)
    assert run_average(tmp_path / "run", evaluate="true")[0] == 0
    sets = metrics(tmp_path / "run", "eval")[-1]
    losses = {name: one["loss"] for name, one in sets.items()}
    assert note_of(tmp_path)["eval_loss"] == pytest.approx(losses, abs=1e-5)
    assert {one.is_packed for one in made} == {no_kernel is None}


@pytest.mark.longer
def test_a_source_of_code_gets_the_context_length_of_its_run(toys, tmp_path, run_average):
    data, code = tmp_path / "data", tmp_path / "mine.py"
    data.mkdir()
    (data / "cut.txt").write_text(str(toys / "data"))
    code.write_text(CUT)
    flags = f"{FLAGS} --run_name run --max_step 1 --precision 32-true --context_length 16".split()
    train_ranks(1, *toy_run(toys, tmp_path), *flags, "--train_data_dir", data, "--code", code)
    try:
        assert run_average(tmp_path / "run", evaluate="true")[0] == 0
    finally:
        register.load(None)
    of_run = metrics(tmp_path / "run", "eval_loss")[-1]
    assert note_of(tmp_path)["eval_loss"]["validation"] == pytest.approx(of_run, abs=1e-5)


CUT = """
import datasets
import numpy as np
from fabric_llm.base import register

@register.source("cut.txt")
def cut(folder, flags):
    splits = datasets.load_from_disk((folder / "cut.txt").read_text())
    length = flags.data.context_length
    return {name: np.array(split["input_ids"])[:, :length] for name, split in splits.items()}
"""


def test_without_the_data_there_is_a_sentence_and_no_table(runs, toys, tmp_path, run_average):
    shutil.copytree(runs / "full", tmp_path / "full")
    arguments = tmp_path / "full" / "arguments.yaml"
    arguments.write_text(arguments.read_text().replace(str(toys / "data"), str(tmp_path / "gone")))
    code, out, _ = run_average(tmp_path / "full", evaluate="true")
    assert code == 0 and "Not evaluated: No dataset at" in out
    assert "average.json" in parts(tmp_path / "hf")
    # Other rows at the same place are no more those of the run.
    shutil.copytree(toys / "many", tmp_path / "gone")
    code, out, _ = run_average(tmp_path / "full", "--overwrite", "true", evaluate="true")
    assert code == 0 and "Not evaluated: validation in " in out and "on other rows." in out
    # Nor has the model tokens of a set that was added since.
    rows = datasets.Dataset.from_dict({"input_ids": [[500] * CONTEXT] * 8})
    other = datasets.DatasetDict({"train": rows, "validation": rows})
    other.save_to_disk(str(tmp_path / "other"))
    said = (runs / "full" / "arguments.yaml").read_text()
    arguments.write_text(said.replace("eval_data: null", f"eval_data: other={tmp_path}/other"))
    code, out, _ = run_average(tmp_path / "full", "--overwrite", "true", evaluate="true")
    assert code == 0 and "Not evaluated: " in out and "holds token id 500, but" in out
    arguments.unlink()
    for part, words in (
        (tmp_path / "full", "has no arguments.yaml"),
        (toys / "llama", "none of the parts is a checkpoint"),
    ):
        code, out, _ = run_average(part, "--overwrite", "true", evaluate="true")
        assert code == 0 and words in out


# ------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("{runs}/nothing", "No checkpoint, run or model at"),
        ("org/name", "No checkpoint, run or model at"),
        ("{runs}", "nor a model with a config.json. It holds the runs "),
        ("{runs}/full --last 9", "has 3 checkpoints"),
        ("{runs}/full --last 0", "--last must be positive, not 0"),
        ("{runs}/full --last 2 --weights 1", "1 numbers for 2 parts"),
        ("{runs}/full --last 2 --weights 1,-1", "weights are 0 or more"),
        ("{runs}/full --last 2 --weights 0,0", "weights are 0 or more"),
        ("{runs}/full --last 2 --weights 1,nan", "weights are 0 or more"),
        ("{runs}/full --last 2 --weights linear", "takes equal or a number for each part"),
        ("{toys}/llama {toys}/gpt2", "are different models: llama and gpt2"),
        ("{toys}/llama {toys}/llama-tied", "models: tie_word_embeddings False, and True"),
        ("{runs}/full --dtype float8", "--dtype takes"),
        ("{runs}/full --weight equal", "Did you mean --weights"),
        ("--last 3", "missing: --parts. It is called like this: "),
    ],
)
def test_each_mistake_is_one_sentence(runs, toys, tmp_path, run_average, flags, words):
    code, _, error = run_average(*flags.format(runs=runs, toys=toys).split())
    assert code == 2 and words in error and parts(tmp_path) == []


def test_the_output_is_not_a_part_nor_a_run(runs, toys, tmp_path, run_average):
    shutil.copytree(toys / "llama", tmp_path / "base")
    code, _, error = run_average(tmp_path / "base", "--overwrite", "true", output=tmp_path / "base")
    assert code == 2 and "is one of the parts" in error
    code, _, error = run_average(tmp_path / "base", output=runs / "full")
    assert code == 2 and "isn't an exported model" in error
    assert run_average(tmp_path / "base")[0] == 0
    assert run_average(tmp_path / "base")[0] == 2
    assert run_average(runs / "full", "--overwrite", "true")[0] == 0


def test_a_damaged_checkpoint_is_named(runs, tmp_path, run_average):
    shutil.copytree(runs / "full", tmp_path / "full")
    file = tmp_path / "full" / "step-00000004" / "model.safetensors"
    flip(file)
    code, _, error = run_average(tmp_path / "full", "--last", 2)
    assert code == 66 and "the content of model.safetensors has changed" in error
    assert parts(tmp_path) == ["full"]
    (file.parent / "MANIFEST.json").unlink()
    code, _, error = run_average(file.parent)
    assert code == 66 and "isn't a checkpoint" in error


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_nan_in_a_part_is_named(toys, tmp_path, run_average, value):
    norm = stored(toys / "llama")["model.norm.weight"]
    norm[3] = value
    bad = llama_with(toys, tmp_path / "bad", **{"model.norm.weight": norm})
    code, _, error = run_average(toys / "llama", bad)
    assert code == 76 and "bad' holds NaN or infinity in model.norm.weight" in error
    assert parts(tmp_path) == ["bad"]


@pytest.mark.parametrize("kind", ["phi3", "olmo3", "gemma3_text", "gpt_neox"])
def test_a_checkpoint_s_older_names_do_not_make_it_another_model(tmp_path, kind):
    """A checkpoint has rotary positions also by the names of transformers 4."""
    base = AutoConfig.for_model(kind)
    base.save_pretrained(tmp_path / "base")
    document = json.loads((tmp_path / "base" / "config.json").read_text())
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "config.json").write_text(json.dumps(with_older_names(base, document)))
    one, two = (
        SimpleNamespace(path=name, tokenizer=None, config=AutoConfig.from_pretrained(tmp_path / name))
        for name in ("base", "own")
    )
    require_same_model(one, two)
    two.config.rope_parameters = {**two.config.rope_parameters, "rope_theta": 7.0}
    if "full_attention" not in two.config.rope_parameters:
        with pytest.raises(ValueError, match="different models"):
            require_same_model(one, two)


def test_float16_that_is_too_narrow_is_said(toys, tmp_path, run_average):
    wide = llama_with(toys, tmp_path / "wide", **{"model.norm.weight": torch.full((32,), 1e6)})
    code, _, error = run_average(wide, "--dtype", "float16")
    assert code == 76 and "take another --dtype" in error


def test_pickles_truncated_files_and_missing_weights(toys, tmp_path, run_average):
    shutil.copytree(toys / "llama", tmp_path / "bad")
    file = tmp_path / "bad" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    code, _, error = run_average(tmp_path / "bad")
    assert code == 2 and "can't be read" in error
    file.unlink()
    code, _, error = run_average(tmp_path / "bad")
    assert code == 2 and "model.safetensors is missing" in error
    (tmp_path / "bad" / "pytorch_model.bin").write_bytes(b"")
    assert run_average(tmp_path / "bad")[0] == 77


def test_other_tokenizers_and_configurations_are_refused(toys, tmp_path, run_average):
    pieces, merges = {p: i for i, p in enumerate(["x", "a", "b", "c", "ab", "bc"])}, ["ab", "bc"]
    for name, model in (
        ("a", models.WordLevel({"x": 0, "y": 1}, unk_token="x")),
        ("b", models.WordLevel({"y": 0, "x": 1}, unk_token="x")),
        ("d", models.BPE(pieces, [*map(tuple, merges)], unk_token="x")),
        ("e", models.BPE(pieces, [*map(tuple, reversed(merges))], unk_token="x")),
    ):
        shutil.copytree(toys / "llama", tmp_path / name)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), unk_token="x")
        tokenizer.save_pretrained(tmp_path / name)
    for one, other in ("ab", "de"):
        code, _, error = run_average(tmp_path / one, tmp_path / other)
        assert code == 2 and "different tokenizers" in error
    config = changed_config("llama", rms_norm_eps=1e-3, use_cache=False, output_hidden_states=True)
    config.output_multiplier = 2.0
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "c")
    code, _, error = run_average(toys / "llama", tmp_path / "c")
    assert code == 2 and "output_multiplier None, and 2.0; rms_norm_eps 1e-06, and 0.001" in error
    assert "use_cache" not in error and "output_hidden_states" not in error


# ------------------------------------------------------------------------------- what it is worth


def card(folder):
    return (folder / "README.md").read_text()


def test_an_average_that_is_worse_than_a_part_says_so_and_names_that_part(
    runs, toys, tmp_path, run_average
):
    """Of a trained model and one with large random weights."""
    last, large = runs / "full" / "step-00000006", stored(toys / "llama")
    bad = llama_with(toys, tmp_path / "bad", **{name: 5 * t for name, t in large.items()})
    code, out, _ = run_average(bad, last, evaluate="true")
    note = note_of(tmp_path)
    losses = [one["eval_loss"]["validation"] for one in (note, *note["parts"])]
    assert code == 0 and losses[0] > losses[2] < losses[1], "else this tests nothing"
    warning = f"Warning: the average, {losses[0]:.4f}, is worse than full/step-00000006, "
    assert f"{warning}{losses[2]:.4f}.\n" in out
    assert out.splitlines()[-1] == f"Next: python export_hf.py {last} --output hf/NAME"
    assert f"| the average | | {losses[0]:.4f} |" in card(tmp_path / "hf")


@pytest.mark.longer
def test_its_card_says_what_it_is_of(runs, toys, tmp_path, run_average):
    assert run_average(runs / "full", "--last", 2, evaluate="true")[0] == 0
    said = card(tmp_path / "hf")
    assert said.startswith("---\n")
    for part in note_of(tmp_path)["parts"]:
        assert f"| `{part['path']}` | 0.5000 | {part['eval_loss']['validation']:.4f} |\n" in said
    for words in (
        "An average of 2 models",
        "- merge\n",
        "of 8 of 10 rows of validation, evenly spread, as the run",
        "Verified with plain transformers",
    ):
        assert words in said
    assert run_average(toys / "llama", "--overwrite", "true")[0] == 0
    assert "Nothing was evaluated." in card(tmp_path / "hf")


@pytest.mark.longer
def test_a_float16_model_is_evaluated(runs, tmp_path, run_average):
    step, half = runs / "full" / "step-00000004", tmp_path / "half"
    AutoModelForCausalLM.from_pretrained(step, dtype=torch.float16).save_pretrained(half)
    assert run_average(half, step, "--dtype", "float16", evaluate="true")[0] == 0
    note = note_of(tmp_path)
    of_half, of_full = (part["eval_loss"]["validation"] for part in note["parts"])
    assert of_half == pytest.approx(of_full, abs=1e-3) == note["eval_loss"]["validation"]
    budget = "--forgetting_budget copy:9 --dtype float16 --overwrite true".split()
    code, out, error = run_average(half, runs / "full", *budget, evaluate="true")
    assert code == 0 and "Chosen of" in out, error
