"""python -m fabric_llm.average: what it writes is the average of its parts, or it says why not and
leaves nothing."""

import json
import math
import shutil

import pytest
import torch
from conftest import TOY_CONFIGS, VOCABULARY
from ranks import metrics, run_ranks, train_ranks
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, PreTrainedTokenizerFast

from fabric_llm.average import main, named
from fabric_llm.base.files import step_directories
from fabric_llm.model.sharded import PREFIX
from fabric_llm.model.tensor_files import Tensors


@pytest.fixture(scope="module")
def runs(toys, tmp_path_factory):
    """Runs of three checkpoints: full (llama, float32) and sharded (gpt2, tied, by two FSDP ranks,
    bf16)."""
    folder = tmp_path_factory.mktemp("runs")
    flags = common(toys, folder)
    train_ranks(
        1, *flags, "--model_name", toys / "llama", "--run_name", "full", "--precision", "32-true"
    )
    sharded = ("--strategy", "fsdp", "--state_dict_type", "sharded", "--precision", "bf16-true")
    train_ranks(
        2, *flags, *sharded, "--model_name", toys / "gpt2-no-dropout", "--run_name", "sharded"
    )
    return folder


@pytest.fixture(scope="module")
def bf16_run(toys, tmp_path_factory):
    """A run of three checkpoints like full, in bf16."""
    folder = tmp_path_factory.mktemp("bf16")
    train_ranks(1, *common(toys, folder), "--model_name", toys / "llama", "--run_name", "bf16")
    return folder / "bf16"


def common(toys, folder):
    flags = (
        "--train_data_dir", toys / "data", "--output_dir", folder, "--lr", 2e-2, "--max_step", 6,
    )
    flags += (
        "--micro_batch_size", 4, "--save_step_interval", 2, "--eval_iters", 2,
        "--eval_step_interval", 2,
    )
    return (*flags, "--eval_batch_size", 4, "--verify_start", "false", "--lr_decay", "false")


@pytest.fixture
def run_average(tmp_path, capsys):
    """Call the command with flags, output tmp_path/hf; returns (exit code, stdout, last line of
    stderr)."""

    def call(*flags, output=tmp_path / "hf", evaluate="false"):
        code = 0
        try:
            main([str(flag) for flag in [*flags, "--output", output, "--evaluate", evaluate]])
        except SystemExit as exit:
            code = exit.code
        captured = capsys.readouterr()
        return code, captured.out, (captured.err.strip().splitlines() or [""])[-1]

    return call


def stored(folder):
    """Every tensor in the safetensors files of `folder`, by name; of a sharded checkpoint put
    together."""
    if (folder / "weights").is_dir():
        return {
            name.removeprefix(PREFIX): tensor
            for name, tensor in Tensors((folder / "weights").iterdir()).items()
        }
    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def parts(folder):
    """Names in the folder, hidden ones too."""
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def expected(folders, weights, dtype):
    """The plain average in float64."""
    every = [stored(folder) for folder in folders]
    return {
        name: sum(w * one[name].double() for w, one in zip(weights, every)).to(dtype)
        for name in every[0]
    }


# ------------------------------------------------------------------------------- the average


@pytest.mark.quick_cases(r"sharded.*inverse_sqrt")
@pytest.mark.parametrize(
    ("weights", "counted"),
    [("equal", [1 / 3] * 3), ("7,1,2", [0.7, 0.1, 0.2])],
)
@pytest.mark.parametrize(("run", "dtype"), [("full", torch.float32), ("sharded", torch.bfloat16)])
def test_is_the_plain_average(runs, tmp_path, run_average, run, dtype, weights, counted):
    code, out, _ = run_average(runs / run, "--last", 3, "--weights", weights)
    assert code == 0 and "Verified with plain transformers" in out
    assert parts(tmp_path) == ["hf"]
    average, folders = stored(tmp_path / "hf"), step_directories(runs / run)
    wanted = expected(folders, counted, torch.float64)
    assert average.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert average[name].dtype == dtype
        rounding = torch.finfo(dtype).eps / 2
        torch.testing.assert_close(
            average[name].double(), tensor, rtol=rounding * (1 + 1e-6), atol=1e-12, msg=name
        )
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert opened.dtype == dtype
    note = json.loads((tmp_path / "hf" / "average.json").read_text())
    assert note["weights"] == weights and [part["step"] for part in note["parts"]] == [2, 4, 6]
    assert [part["weight"] for part in note["parts"]] == pytest.approx(counted)


@pytest.mark.longer
@pytest.mark.parametrize("run", ["full", "sharded"])
def test_one_part_is_its_own_average(runs, tmp_path, run_average, run):
    code, out, _ = run_average(runs / run)
    assert code == 0 and "Averaging 1 model into" in out
    average, part = stored(tmp_path / "hf"), stored(step_directories(runs / run)[-1])
    assert average.keys() == part.keys()
    for name, tensor in part.items():
        assert torch.equal(average[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.longer
def test_a_weight_of_one_gives_that_part(runs, tmp_path, run_average):
    first, *_, last = step_directories(runs / "full")
    assert run_average(first, last, "--weights", "0,2")[0] == 0
    assert all(
        torch.equal(tensor, stored(last)[name]) for name, tensor in stored(tmp_path / "hf").items()
    )


@pytest.mark.longer
def test_a_full_bf16_run(bf16_run, tmp_path, run_average):
    assert run_average(bf16_run, "--last", 3)[0] == 0
    wanted = expected(step_directories(bf16_run), [1 / 3] * 3, torch.bfloat16)
    assert all(
        torch.equal(tensor, wanted[name]) for name, tensor in stored(tmp_path / "hf").items()
    )


@pytest.mark.longer
def test_base_and_end_and_another_run(runs, bf16_run, toys, tmp_path, run_average):
    """A Hugging Face directory, and checkpoints of runs of different precision: the wider dtype."""
    ends = [step_directories(run)[-1] for run in (runs / "full", bf16_run)]
    code, out, _ = run_average(toys / "llama", runs / "full", ends[1], "--weights", "0.5,0.25,0.25")
    assert code == 0, out
    wanted = expected([toys / "llama", *ends], [0.5, 0.25, 0.25], torch.float32)
    average = stored(tmp_path / "hf")
    assert all(torch.equal(average[name], tensor) for name, tensor in wanted.items()) and len(
        average
    ) == len(wanted)


def test_tied_weights_are_stored_once(runs, tmp_path, run_average):
    assert run_average(runs / "sharded", "--last", 2)[0] == 0
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert opened.get_output_embeddings().weight is opened.get_input_embeddings().weight
    assert "lm_head.weight" not in stored(tmp_path / "hf")


@pytest.mark.quick_cases(r"sharded")
@pytest.mark.parametrize("run", ["full", "sharded"])
def test_files_have_a_largest_size_and_another_dtype(runs, tmp_path, run_average, run):
    assert (
        run_average(runs / run, "--last", 2, "--max_shard_size", "20KB", "--dtype", "float16")[0]
        == 0
    )
    files = sorted((tmp_path / "hf").glob("*.safetensors"))
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert len(files) > 1 and set(index["weight_map"].values()) == {file.name for file in files}
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "hf").dtype == torch.float16
    wanted = expected(step_directories(runs / run)[-2:], [0.5, 0.5], torch.float16)
    assert all(
        torch.equal(tensor, wanted[name]) for name, tensor in stored(tmp_path / "hf").items()
    )


def mixtral(seed, **changes):
    config = MixtralConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, vocab_size=VOCABULARY,
        max_position_embeddings=64,
        **changes,
    )
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.longer
def test_fused_experts_of_a_sharded_checkpoint_meet_those_of_a_hugging_face_directory(
    toys, tmp_path, run_average
):
    """transformers fuses experts in memory, so that a sharded checkpoint has other names than files
    of the hub."""
    mixtral(0).save_pretrained(tmp_path / "base")
    flags = (
        "--model_name", tmp_path / "base", "--train_data_dir", toys / "data",
        "--output_dir", tmp_path,
    )
    flags += (
        "--run_name", "run", "--max_step", 1, "--eval_iters", 0, "--verify_start", "false",
        "--lr", 1e-2,
    )
    train_ranks(1, *flags, "--state_dict_type", "sharded", "--precision", "32-true")
    code, out, error = run_average(tmp_path / "base", tmp_path / "run")
    assert code == 0, error
    models = [AutoModelForCausalLM.from_pretrained(tmp_path / "base")]
    end = stored(tmp_path / "run" / "step-00000001")
    average = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    for name, parameter in average.named_parameters():
        wanted = (models[0].get_parameter(name).double() + end[name].double()) / 2
        assert torch.equal(parameter, wanted.float()), name
    assert stored(tmp_path / "hf").keys() == stored(tmp_path / "base").keys(), (
        "the names of the hub"
    )


def test_names_without_the_prefix_of_the_base_model(toys, tmp_path, run_average):
    """As openai-community/gpt2 has them."""
    tensors = {name.removeprefix("transformer."): t for name, t in stored(toys / "gpt2").items()}
    shutil.copytree(toys / "gpt2", tmp_path / "old")
    save_file(tensors, tmp_path / "old" / "model.safetensors", metadata={"format": "pt"})
    code, _, error = run_average(tmp_path / "old", toys / "gpt2-no-dropout")
    assert code == 0, error
    wanted = expected([toys / "gpt2", toys / "gpt2-no-dropout"], [0.5, 0.5], torch.float32)
    average = stored(tmp_path / "hf")
    assert all(torch.equal(average[name], tensor) for name, tensor in wanted.items())


@pytest.mark.longer
def test_memory_does_not_grow_with_the_number_of_parts(tmp_path):
    """Parts of 64 MB: six of them need no more than two."""
    config = LlamaConfig(
        hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
        vocab_size=6000,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "0")
    for number in range(1, 6):
        shutil.copytree(tmp_path / "0", tmp_path / str(number))
    folders = [str(tmp_path / str(number)) for number in range(6)]
    size = (tmp_path / "0" / "model.safetensors").stat().st_size
    two, six = (
        run_ranks(1, peak_bytes, folders[:count], str(tmp_path / f"hf-{count}"))[0]
        for count in (2, 6)
    )
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
    assert [(path.parent.name, path.name[-1]) for path in found] == [
        (r, s) for r in ("full", "sharded") for s in "46"
    ]
    assert [path.name[-1] for path in named([str(runs / "full")], None)] == ["6"]


# ------------------------------------------------------------------------------- evaluation


@pytest.mark.longer
def test_losses_of_the_parts_are_those_of_the_run(runs, tmp_path, run_average):
    code, out, _ = run_average(runs / "full", "--last", 3, evaluate="true")
    assert code == 0
    note = json.loads((tmp_path / "hf" / "average.json").read_text())
    losses = [part["eval_loss"]["validation"] for part in note["parts"]]
    assert losses == pytest.approx(metrics(runs / "full", "eval_loss")[-3:], abs=1e-5)
    lines = out.splitlines()
    [head] = [index for index, line in enumerate(lines) if line.startswith("Validation loss")]
    table = [line.split() for line in lines[head + 1 : head + 5]]
    assert [row[0] for row in table] == [
        *(f"full/step-0000000{step}" for step in (2, 4, 6)),
        "average",
    ]
    assert [float(row[-1]) for row in table] == pytest.approx(
        [*losses, note["eval_loss"]["validation"]], abs=1e-4
    )


def test_a_sharded_bf16_run_of_two_ranks_is_evaluated_as_it_was(runs, tmp_path, run_average):
    assert run_average(runs / "sharded", evaluate="true")[0] == 0
    note = json.loads((tmp_path / "hf" / "average.json").read_text())
    assert note["eval_loss"] == note["parts"][0]["eval_loss"]
    assert note["eval_loss"]["validation"] == pytest.approx(
        metrics(runs / "sharded", "eval_loss")[-1], abs=1e-2
    )


@pytest.mark.longer
def test_a_set_that_is_not_packed_is_evaluated_as_the_run_did(
    toys, packed_data, tmp_path, run_average
):
    """The token that ends documents of the training data is a word like others there."""
    flags = (
        "--model_name", toys / "llama", "--train_data_dir", packed_data,
        "--eval_data", f"plain={toys / 'data'}",
    )
    flags += ("--output_dir", tmp_path, "--run_name", "run", "--max_step", 1, "--eval_iters", 2)
    train_ranks(
        1, *flags, "--micro_batch_size", 4, "--verify_start", "false", "--precision", "32-true"
    )
    assert run_average(tmp_path / "run", evaluate="true")[0] == 0
    sets, note = (
        metrics(tmp_path / "run", "eval")[-1],
        json.loads((tmp_path / "hf" / "average.json").read_text()),
    )
    assert note["eval_loss"] == pytest.approx(
        {name: one["loss"] for name, one in sets.items()}, abs=1e-5
    )


def test_without_the_data_there_is_a_sentence_and_no_table(runs, toys, tmp_path, run_average):
    shutil.copytree(runs / "full", tmp_path / "full")
    arguments = tmp_path / "full" / "arguments.yaml"
    arguments.write_text(arguments.read_text().replace(str(toys / "data"), str(tmp_path / "gone")))
    code, out, _ = run_average(tmp_path / "full", evaluate="true")
    assert (
        code == 0
        and "Not evaluated: No dataset at" in out
        and "average.json" in parts(tmp_path / "hf")
    )
    arguments.unlink()
    code, out, _ = run_average(tmp_path / "full", "--overwrite", "true", evaluate="true")
    assert code == 0 and "has no arguments.yaml" in out
    code, out, _ = run_average(toys / "llama", "--overwrite", "true", evaluate="true")
    assert code == 0 and "none of the parts is a checkpoint" in out


# ------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["{runs}/nothing"], "No checkpoint, run or model at"),
        (["org/name"], "No checkpoint, run or model at"),
        (["{runs}"], "is neither a checkpoint nor a run with one"),
        (["{runs}/full", "--last", "9"], "has 3 checkpoints"),
        (["{runs}/full", "--last", "0"], "--last must be positive, not 0"),
        (["{runs}/full", "--last", "2", "--weights", "1"], "1 numbers for 2 parts"),
        (["{runs}/full", "--last", "2", "--weights", "1,-1"], "weights are 0 or more"),
        (["{runs}/full", "--last", "2", "--weights", "0,0"], "weights are 0 or more"),
        (["{runs}/full", "--last", "2", "--weights", "1,nan"], "weights are 0 or more"),
        (
            ["{runs}/full", "--last", "2", "--weights", "linear"],
            "--weights takes equal or a number for each part",
        ),
        (["{toys}/llama", "{toys}/gpt2"], "are different models: llama and gpt2"),
        (
            ["{toys}/llama", "{toys}/llama-tied"],
            "different models: tie_word_embeddings False, and True",
        ),
        (["{toys}/data"], "is neither a checkpoint nor a run"),
        (["{runs}/full", "--dtype", "float8"], "--dtype takes"),
        (["{runs}/full", "--weight", "equal"], "Did you mean --weights"),
        (["--last", "3"], "missing: --parts. It is called like this: "),
    ],
)
def test_each_mistake_is_one_sentence(runs, toys, tmp_path, run_average, flags, words):
    code, _, error = run_average(*(flag.format(runs=runs, toys=toys) for flag in flags))
    assert code == 2 and words in error and parts(tmp_path) == []


def test_the_output_is_not_a_part_nor_a_run(runs, toys, tmp_path, run_average):
    shutil.copytree(toys / "llama", tmp_path / "base")
    code, _, error = run_average(tmp_path / "base", "--overwrite", "true", output=tmp_path / "base")
    assert code == 2 and "is one of the parts" in error
    code, _, error = run_average(tmp_path / "base", output=runs / "full")
    assert code == 2 and "exists" in error
    assert run_average(tmp_path / "base")[0] == 0
    assert run_average(tmp_path / "base")[0] == 2
    assert run_average(runs / "full", "--overwrite", "true")[0] == 0


def test_a_damaged_checkpoint_is_named(runs, tmp_path, run_average):
    shutil.copytree(runs / "full", tmp_path / "full")
    file = tmp_path / "full" / "step-00000004" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    code, _, error = run_average(tmp_path / "full", "--last", 2)
    assert (
        code == 66
        and "the content of model.safetensors has changed" in error
        and parts(tmp_path) == ["full"]
    )
    (file.parent / "MANIFEST.json").unlink()
    code, _, error = run_average(file.parent)
    assert code == 66 and "isn't a checkpoint" in error


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_nan_in_a_part_is_named(toys, tmp_path, run_average, value):
    shutil.copytree(toys / "llama", tmp_path / "bad")
    tensors = stored(toys / "llama")
    tensors["model.norm.weight"][3] = value
    save_file(tensors, tmp_path / "bad" / "model.safetensors", metadata={"format": "pt"})
    code, _, error = run_average(toys / "llama", tmp_path / "bad")
    assert (
        code == 76
        and "bad' holds NaN or infinity in model.norm.weight" in error
        and parts(tmp_path) == ["bad"]
    )


def test_float16_that_is_too_narrow_is_said(toys, tmp_path, run_average):
    shutil.copytree(toys / "llama", tmp_path / "wide")
    tensors = stored(toys / "llama")
    tensors["model.norm.weight"][3] = 1e6
    save_file(tensors, tmp_path / "wide" / "model.safetensors", metadata={"format": "pt"})
    code, _, error = run_average(tmp_path / "wide", "--dtype", "float16")
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
    for name, words in (("a", ["x", "y"]), ("b", ["y", "x"])):
        shutil.copytree(toys / "llama", tmp_path / name)
        tokenizer = Tokenizer(
            models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="x")
        )
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="x").save_pretrained(
            tmp_path / name
        )
    code, _, error = run_average(tmp_path / "a", tmp_path / "b")
    assert code == 2 and "different tokenizers" in error
    config = LlamaConfig(
        **{**TOY_CONFIGS["llama"].to_dict(), "rms_norm_eps": 1e-3, "use_cache": False}
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "c")
    code, _, error = run_average(toys / "llama", tmp_path / "c")
    assert code == 2 and "rms_norm_eps 1e-06, and 0.001" in error and "use_cache" not in error


def test_help_imports_no_torch():
    import subprocess
    import sys

    code = (
        "import sys; from fabric_llm.average import main\ntry: main(['--help'])\nfinally: "
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--last" in done.stdout and "--weights" in done.stdout


# ------------------------------------------------------------------------------- what it is worth


def card(folder):
    return (folder / "README.md").read_text()


def test_an_average_that_is_worse_than_a_part_says_so_and_names_that_part(
    runs, tmp_path, run_average
):
    """Of a trained model and one with large random weights."""
    full, bad = runs / "full", tmp_path / "bad"
    AutoModelForCausalLM.from_config(TOY_CONFIGS["llama"]).save_pretrained(bad)
    tensors = {name: 5 * tensor for name, tensor in stored(bad).items()}
    save_file(tensors, bad / "model.safetensors", metadata={"format": "pt"})
    code, out, _ = run_average(bad, full / "step-00000006", evaluate="true")
    note = json.loads((tmp_path / "hf" / "average.json").read_text())
    losses = [one["eval_loss"]["validation"] for one in (note, *note["parts"])]
    assert code == 0 and losses[0] > losses[2] < losses[1], "else this tests nothing"
    assert (
        f"Warning: the average, {losses[0]:.4f}, is worse than full/step-00000006, "
        f"{losses[2]:.4f}.\n"
    ) in out
    following = f"python export_hf.py {full / 'step-00000006'} --output hf/NAME"
    assert out.splitlines()[-1] == f"Next: {following}"
    assert f"| the average | | {losses[0]:.4f} |" in card(tmp_path / "hf")


@pytest.mark.longer
def test_its_card_says_what_it_is_of(runs, toys, tmp_path, run_average):
    code, out, _ = run_average(runs / "full", "--last", 2, evaluate="true")
    note, said = json.loads((tmp_path / "hf" / "average.json").read_text()), card(tmp_path / "hf")
    assert (
        code == 0
        and "An average of 2 models" in said
        and said.startswith("---\n")
        and "- merge\n" in said
    )
    for part in note["parts"]:
        assert f"| `{part['path']}` | 0.5000 | {part['eval_loss']['validation']:.4f} |\n" in said
    assert (
        "of 8 of 10 rows of validation, evenly spread, as the run" in said
        and "Verified with plain transformers" in said
    )
    assert run_average(toys / "llama", "--overwrite", "true")[0] == 0
    assert "Nothing was evaluated." in card(tmp_path / "hf")


@pytest.mark.longer
def test_a_float16_model_is_evaluated(runs, tmp_path, run_average):
    AutoModelForCausalLM.from_pretrained(
        runs / "full" / "step-00000004", dtype=torch.float16
    ).save_pretrained(tmp_path / "half")
    parts = (tmp_path / "half", runs / "full" / "step-00000004")
    assert run_average(*parts, "--dtype", "float16", evaluate="true")[0] == 0
    note = json.loads((tmp_path / "hf" / "average.json").read_text())
    half, full = (part["eval_loss"]["validation"] for part in note["parts"])
    assert half == pytest.approx(full, abs=1e-3) == note["eval_loss"]["validation"]
    budget = ("--forgetting_budget", "copy:9", "--dtype", "float16", "--overwrite", "true")
    code, out, error = run_average(tmp_path / "half", runs / "full", *budget, evaluate="true")
    assert code == 0 and "Chosen of" in out, error
