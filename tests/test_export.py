"""export_hf.py: what it writes is the trained model, or it says why not and leaves nothing."""

import json
import os
import shutil
import signal

import numpy as np
import pytest
import torch
from conftest import VOCABULARY, make_dataset
from ranks import train_ranks
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2Config,
    MixtralConfig,
    PreTrainedTokenizerFast,
)

import export_hf
import fabric_llm.verify.__main__
from fabric_llm.base import files
from fabric_llm.checkpoint import keep, reading, whole
from fabric_llm.checkpoint.keep import checkpoint_at as find
from fabric_llm.model.loading import load_config, open_weights
from fabric_llm.weights import export as exporting
from fabric_llm.weights.checks import exported_output
from fabric_llm.weights.export import VerificationError, export, verify


@pytest.fixture(scope="module")
def runs(toys, tmp_path_factory):
    """Finished runs: full (llama), tied (llama-tied), sharded (gpt2, tied, by two FSDP ranks,
    bf16); all with a tokenizer."""
    folder = tmp_path_factory.mktemp("runs")
    shutil.copytree(toys / "data", folder / "data")
    small_tokenizer().save_pretrained(folder / "data" / "tokenizer")
    flags = (
        "--train_data_dir", folder / "data", "--output_dir", folder, "--lr", 2e-2, "--max_step", 4,
        "--eval_iters", 0,
    )
    flags += ("--micro_batch_size", 4, "--save_step_interval", 2)
    train_ranks(
        1, *flags, "--model_name", toys / "llama", "--run_name", "full", "--precision", "32-true"
    )
    train_ranks(
        1, *flags, "--model_name", toys / "llama-tied", "--run_name", "tied",
        "--precision", "32-true",
    )
    sharded = ("--strategy", "fsdp", "--state_dict_type", "sharded", "--precision", "bf16-true")
    train_ranks(
        2, *flags, *sharded, "--model_name", toys / "gpt2-no-dropout", "--run_name", "sharded"
    )
    return folder


def small_tokenizer():
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<eos>", "<unk>"], show_progress=False
    )
    tokenizer.train_from_iterator(["to be or not to be that is the question"] * 9, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>")


@pytest.fixture
def run_export(tmp_path, capsys):
    """Call export_hf.py with flags, output tmp_path/hf; returns (exit code, stdout, last line of
    stderr)."""

    def call(*flags):
        code = 0
        try:
            export_hf.main([str(flag) for flag in [*flags, "--output", tmp_path / "hf"]])
        except SystemExit as exit:
            code = exit.code
        captured = capsys.readouterr()
        return code, captured.out, (captured.err.strip().splitlines() or [""])[-1]

    return call


def stored(folder):
    """Every tensor in the safetensors files of `folder`, by name."""
    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def parts(folder):
    """Names in the folder, hidden ones too."""
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


# ------------------------------------------------------------------------------- what is written


@pytest.mark.quick_cases(r"sharded")
@pytest.mark.parametrize(
    ("run", "model"), [("full", "llama"), ("tied", "llama-tied"), ("sharded", "gpt2-no-dropout")]
)
def test_plain_transformers_opens_it(runs, toys, tmp_path, run_export, run, model):
    code, out, _ = run_export(runs / run)
    assert (
        code == 0
        and "Verified with plain transformers" in out
        and str(runs / run / "step-00000004") in out
    )
    assert parts(tmp_path) == ["hf"]
    expected = {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    }
    assert set(parts(tmp_path / "hf")) - {"curves.png"} == {*expected, "README.md"}
    assert stored(tmp_path / "hf").keys() == stored(toys / model).keys(), (
        "names and ties of the model it started from"
    )
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    assert opened.dtype == (torch.bfloat16 if run == "sharded" else torch.float32)
    assert opened.config.use_cache and opened.generation_config.use_cache
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    prompt = tokenizer("to be or not", return_tensors="pt")["input_ids"]
    assert "<unk>" not in tokenizer.decode(prompt[0])
    assert (
        opened.generate(
            input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=3
        ).shape[0]
        == 1
    )


@pytest.mark.parametrize("run", ["tied", "sharded"])
def test_tied_weights_are_stored_once_and_tied_again(runs, tmp_path, run):
    proof = export(find(runs / run), tmp_path / "hf")
    assert proof.tied == 1 and "lm_head.weight" not in stored(tmp_path / "hf")
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert opened.get_output_embeddings().weight is opened.get_input_embeddings().weight


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16", "float16"])
def test_dtype(runs, tmp_path, run_export, dtype):
    code, out, _ = run_export(runs / "full", "--dtype", dtype)
    expected = torch.float32 if dtype == "auto" else getattr(torch, dtype)
    weights = stored(tmp_path / "hf")
    assert code == 0 and {tensor.dtype for tensor in weights.values()} == {expected}
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "hf").dtype == expected
    for name, tensor in stored(find(runs / "full")).items():
        assert torch.equal(weights[name], tensor.to(expected)), name


@pytest.mark.parametrize("run", ["full", "sharded"])
def test_max_shard_size(runs, tmp_path, run_export, run):
    assert run_export(runs / run, "--max_shard_size", "50KB")[0] == 0
    files = sorted((tmp_path / "hf").glob("*.safetensors"))
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert len(files) > 1 and set(index["weight_map"].values()) == {file.name for file in files}
    assert all(file.stat().st_size < 60_000 for file in files)
    opened = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "hf").named_parameters())
    for name, tensor in stored(tmp_path / "hf").items():
        assert torch.equal(opened[name], tensor), name


@pytest.mark.longer
def test_experts_keep_the_names_of_the_hub(tmp_path):
    """transformers fuses experts in memory; a full and a sharded checkpoint must both come out as
    the original."""
    config = MixtralConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4, vocab_size=VOCABULARY, bos_token_id=0,
        eos_token_id=0,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "mixtral")
    make_dataset(tmp_path / "data", np.random.default_rng(0))
    flags = (
        "--model_name", tmp_path / "mixtral", "--train_data_dir", tmp_path / "data",
        "--output_dir", tmp_path,
    )
    for kind in ("full", "sharded"):
        train_ranks(
            1, *flags, "--run_name", kind, "--state_dict_type", kind, "--max_step", 1,
            "--eval_iters", 0,
        )
        export(find(tmp_path / kind), tmp_path / f"hf-{kind}")
        assert stored(tmp_path / f"hf-{kind}").keys() == stored(tmp_path / "mixtral").keys()


@pytest.mark.longer
def test_a_model_that_knows_only_eager_attention(tmp_path):
    """Its checkpoints are read with whatever attention transformers takes for it."""
    config = Gemma2Config(
        **{
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "vocab_size": VOCABULARY,
        },
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16},
    )
    config.save_pretrained(tmp_path / "gemma")
    make_dataset(tmp_path / "data", np.random.default_rng(0))
    flags = (
        "--model_name", tmp_path / "gemma", "--train_data_dir", tmp_path / "data",
        "--output_dir", tmp_path,
    )
    flags += ("--run_name", "run", "--attention", "eager", "--eval_iters", 0)
    train_ranks(1, *flags, "--max_step", 1)
    train_ranks(1, *flags, "--max_step", 2, "--resume", "true", "--resume_override", "max_step")
    export(find(tmp_path / "run"), tmp_path / "hf")
    assert fabric_llm.verify.__main__.main([str(tmp_path / "run")]) == 0


@pytest.mark.longer
def test_generation_config_is_that_of_the_model_it_started_from(runs, toys, tmp_path):
    source = tmp_path / "llama"
    shutil.copytree(toys / "llama", source)
    settings = json.loads((source / "generation_config.json").read_text())
    settings.update(do_sample=True, temperature=0.6, eos_token_id=[0, 5])
    (source / "generation_config.json").write_text(json.dumps(settings))
    flags = (
        "--model_name", source, "--train_data_dir", toys / "data", "--output_dir", tmp_path,
        "--eval_iters", 0,
    )
    for kind in ("full", "sharded"):
        train_ranks(1, *flags, "--run_name", kind, "--state_dict_type", kind, "--max_step", 1)
        export(find(tmp_path / kind), tmp_path / f"hf-{kind}")
        opened = AutoModelForCausalLM.from_pretrained(tmp_path / f"hf-{kind}").generation_config
        assert (opened.temperature, opened.eos_token_id) == (0.6, [0, 5])


# ------------------------------------------------------------------- which checkpoint, which output


def test_a_checkpoint_by_position_by_flag_and_by_run(runs, run_export):
    older = runs / "full" / "step-00000002"
    assert f"Exporting {older} " in run_export(older)[1]
    assert f"Exporting {older} " in run_export("--checkpoint", older, "--overwrite", "true")[1]
    assert (
        f"Exporting {runs / 'full' / 'step-00000004'} "
        in run_export(runs / "full", "--overwrite", "true")[1]
    )


def test_an_existing_output_is_refused_unless_overwritten(runs, tmp_path, run_export):
    run_export(runs / "full")
    before = stored(tmp_path / "hf")
    code, _, error = run_export(runs / "tied")
    assert code == 2 and str(tmp_path / "hf") in error and "--overwrite true" in error
    assert stored(tmp_path / "hf").keys() == before.keys(), "untouched"
    assert run_export(runs / "tied", "--overwrite", "true")[0] == 0
    assert stored(tmp_path / "hf").keys() != before.keys()


def test_only_an_export_is_ever_overwritten(toys, runs, tmp_path, capsys):
    """A slip such as `--output checkpoints/RUN --overwrite true` must not cost the run."""
    run = tmp_path / "run"
    shutil.copytree(runs / "full", run)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("years of work")
    shutil.copytree(toys / "llama", tmp_path / "base")
    before = sorted((tmp_path / "base").iterdir())
    for output in (run, run / "step-00000004", run / "step-00000002", tmp_path / "home", tmp_path / "base"):
        with pytest.raises(SystemExit) as exit:
            export_hf.main([str(run), "--output", str(output), "--overwrite", "true"])
        assert exit.value.code == 2 and str(output) in capsys.readouterr().err
    assert files.latest(run).name == "step-00000004" and (tmp_path / "home" / "thesis.txt").exists()
    assert sorted((tmp_path / "base").iterdir()) == before
    keep.verified(run / "step-00000004", hashes=True)


def test_nothing_to_export(tmp_path, run_export):
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "nowhere", tmp_path / "empty"):
        code, _, error = run_export(path)
        assert code == 2 and str(path) in error and error.startswith("export_hf.py: error: ")
    code, _, error = run_export(tmp_path / "empty", "--dtype", "int8")
    assert code == 2 and "--dtype" in error and "bfloat16" in error


@pytest.mark.longer
def test_bad_sizes_and_outputs(runs, tmp_path, run_export, capsys):
    code, _, error = run_export(runs / "full", "--max_shard_size", "many")
    assert code == 2 and "many" in error and parts(tmp_path) == []
    with pytest.raises(SystemExit) as exit:
        export_hf.main([str(runs / "full"), "--output", "/dev/null/hf"])
    assert exit.value.code == 73 and "/dev/null/hf" in capsys.readouterr().err.splitlines()[-1]


# ------------------------------------------------------------------------------- damage


def flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def truncate(file):
    file.write_bytes(file.read_bytes()[:-1])


def delete(file):
    file.unlink()


@pytest.mark.parametrize("damage", [flip, truncate, delete])
@pytest.mark.parametrize(
    ("run", "pattern"),
    [("full", "model.safetensors"), ("full", "trainer/probe.safetensors"), ("sharded", "weights/*00002*"), ("sharded", "config.json")],
)  # fmt: skip
def test_a_damaged_file_is_named(runs, tmp_path, run_export, run, pattern, damage):
    copy = tmp_path / "copy"
    shutil.copytree(find(runs / run), copy)
    file = next(copy.glob(pattern))
    damage(file)
    code, _, error = run_export(copy)
    assert code == 66 and str(file.relative_to(copy)) in error and "damaged" in error
    assert parts(tmp_path) == ["copy"]


# ------------------------------------------------------------------------------- verification


def drop_a_tensor(weights):
    del weights["model.layers.1.mlp.up_proj.weight"]


def add_a_tensor(weights):
    weights["model.layers.2.mlp.up_proj.weight"] = weights[
        "model.layers.1.mlp.up_proj.weight"
    ].clone()


def swap_layers(weights):
    for name in [name for name in weights if ".layers.0." in name]:
        other = name.replace(".layers.0.", ".layers.1.")
        weights[name], weights[other] = weights[other], weights[name]


def change_one_number(weights):
    weights["model.norm.weight"][3] += 1e-6


def untie(weights):
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1e-3


def change_a_shape(weights):
    weights["model.norm.weight"] = weights["model.norm.weight"][:-1].clone()


def set_nan(weights):
    weights["model.norm.weight"][0] = float("nan")


@pytest.mark.parametrize(
    ("tamper", "run", "words"),
    [
        (drop_a_tensor, "full", ["missing keys", "model.layers.1.mlp.up_proj.weight"]),
        (add_a_tensor, "full", ["unexpected keys", "model.layers.2.mlp.up_proj.weight"]),
        (swap_layers, "full", ["layers.0", "isn't what the checkpoint holds"]),
        (change_one_number, "full", ["model.norm.weight", "isn't what the checkpoint holds"]),
        (change_a_shape, "full", ["model.norm.weight"]),
        (set_nan, "full", ["model.norm.weight"]),
        (untie, "tied", ["lm_head.weight"]),
    ],
)
def test_an_export_that_is_not_the_model_is_taken_back(
    runs, tmp_path, run_export, monkeypatch, tamper, run, words
):
    write_model = exporting.write_model

    def tampered(folder, *given):
        write_model(folder, *given)
        weights = stored(folder)
        tamper(weights)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    monkeypatch.setattr(exporting, "write_model", tampered)
    code, out, error = run_export(runs / run)
    assert code == 1 and "verification failed" in error and all(word in error for word in words), (
        error
    )
    assert "Verified" not in out and parts(tmp_path) == [], "nothing is left"


def test_an_export_that_cannot_be_opened_is_taken_back(runs, tmp_path, run_export, monkeypatch):
    write_model = exporting.write_model

    def cut_off(folder, *given):
        write_model(folder, *given)
        truncate(folder / "model.safetensors")

    monkeypatch.setattr(exporting, "write_model", cut_off)
    code, _, error = run_export(runs / "full")
    assert code == 1 and "can't open the export" in error and parts(tmp_path) == []


@pytest.mark.longer
def test_a_failed_overwrite_leaves_the_former_export(runs, tmp_path, run_export, monkeypatch):
    run_export(runs / "full")

    def disk_full(self, name, tensor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(whole.TensorFile, "write", disk_full)
    code, _, error = run_export(runs / "full", "--overwrite", "true")
    assert (
        code == 74
        and "No space left" in error
        and "the weights need" in error
        and "GiB were free" in error
    )
    assert parts(tmp_path) == ["hf"]
    AutoModelForCausalLM.from_pretrained(tmp_path / "hf")


@pytest.mark.parametrize("run", ["full", "sharded"])
def test_logits_of_another_model_are_noticed(runs, tmp_path, run_export, run):
    """Weights and hashes are in order, only what the model said in training isn't what these
    weights say."""
    copy = tmp_path / "copy"
    shutil.copytree(find(runs / run), copy)
    probe = reading.read_probe(copy)
    file = copy / "trainer" / "probe.safetensors"
    save_file({**probe, "logits": probe["logits"].flip(0).contiguous()}, file)
    document = files.read(copy)
    document["files"] = files.describe(copy, document["files"])
    (copy / files.MANIFEST).write_bytes(files.encode(document))
    code, _, error = run_export(copy)
    assert (
        code == 1
        and "logits differ from those in training" in error
        and parts(tmp_path) == ["copy"]
    )


@pytest.mark.longer
def test_every_swap_of_two_tensors_is_caught_twice(runs, tmp_path):
    """By the comparison with the checkpoint; and, where the checkpoint itself has them swapped, by
    the logits."""
    source = find(runs / "full")
    probe = reading.read_probe(source)
    trained, weights = weights_in(source), stored(source)
    assert verify(source, trained, probe, "32-true").logits_difference < 1e-5
    swaps = [
        (name, name.replace("layers.0.", "layers.1.")) for name in weights if "layers.0." in name
    ]
    assert len(swaps) == 9
    for first, second in swaps:
        folder = tmp_path / first
        shutil.copytree(source, folder)
        save_file(
            {**weights, first: weights[second], second: weights[first]},
            folder / "model.safetensors",
            {"format": "pt"},
        )
        with pytest.raises(VerificationError, match="isn't what the checkpoint holds"):
            verify(folder, trained, probe, "32-true")
        with pytest.raises(VerificationError, match="logits differ"):
            verify(folder, weights_in(folder), probe, "32-true")


def weights_in(folder):
    return open_weights(str(folder), load_config(str(folder)), torch.float32, seed=0)


# ------------------------------------------------------------------------------- the hub


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_in_the_middle_leaves_the_former_export(
    runs, tmp_path, run_export, monkeypatch, number
):
    run_export(runs / "full")
    write_model = exporting.write_model

    def stopped(folder, *given):
        write_model(folder, *given)
        os.kill(os.getpid(), number)

    monkeypatch.setattr(exporting, "write_model", stopped)
    code, _, error = run_export(runs / "full", "--overwrite", "true")
    assert code == 75 and parts(tmp_path) == ["hf"]
    assert (
        error
        == f"export_hf.py: error: stopped on request; nothing was written to {tmp_path / 'hf'}."
    )
    AutoModelForCausalLM.from_pretrained(tmp_path / "hf")


def test_a_stop_while_pushing_says_what_is_there(runs, tmp_path, run_export, monkeypatch):
    monkeypatch.setattr(
        "fabric_llm.weights.export.push", lambda *given: os.kill(os.getpid(), signal.SIGINT)
    )
    code, _, error = run_export(runs / "full", "--push_to_hub", "org/name")
    assert code == 75 and "is complete, but it isn't pushed (repeat the command)" in error
    AutoModelForCausalLM.from_pretrained(tmp_path / "hf")


def test_no_room_for_an_export(runs, tmp_path, run_export, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda folder: type("Usage", (), {"free": 2**20}))
    code, _, error = run_export(runs / "full")
    assert (
        code == 74
        and "The export needs" in error
        and "has 0.00 GiB free" in error
        and parts(tmp_path) == []
    )


def test_an_output_that_cannot_be_written(runs, tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    with pytest.raises(SystemExit) as exit:
        export_hf.main([str(runs / "full"), "--output", str(tmp_path / "file" / "hf")])
    assert exit.value.code == 73 and "cannot be written: Not a directory" in capsys.readouterr().err


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub that writes down what it is asked; `hub.error` is raised where it is set."""

    class Hub:
        calls: list = []
        error = None

        def create_repo(self, repository, **options):
            # complete, under its name
            opened = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
            self.calls.append(("create_repo", repository, options, opened.num_parameters()))

        def upload_folder(self, **options):
            if Hub.error is not None:
                raise Hub.error
            self.calls.append(("upload_folder", options))
            return "https://huggingface.co/org/name/commit/1"

    Hub.calls = []
    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    return Hub


def test_push(runs, tmp_path, run_export, hub):
    code, out, _ = run_export(runs / "full", "--push_to_hub", "org/name")
    assert code == 0 and "https://huggingface.co/org/name/commit/1" in out
    assert out.index("Verified") < out.index("Pushed")
    (create, repository, options, _), (upload, what) = hub.calls
    assert (create, repository, options) == (
        "create_repo",
        "org/name",
        {"private": True, "exist_ok": True},
    )
    assert (
        upload == "upload_folder"
        and what["repo_id"] == "org/name"
        and what["folder_path"] == str(tmp_path / "hf")
    )
    run_export(
        runs / "full", "--push_to_hub", "org/name", "--overwrite", "true", "--private", "false"
    )
    assert hub.calls[2][2]["private"] is False


def test_nothing_is_pushed_unverified(runs, run_export, hub, monkeypatch):
    def fails(*args):
        raise VerificationError("it isn't.")

    monkeypatch.setattr("fabric_llm.weights.export.verify", fails)
    assert run_export(runs / "full", "--push_to_hub", "org/name")[0] == 1
    assert hub.calls == []


class NetworkError(Exception):
    """As those of huggingface_hub's HTTP library: no OSError."""


@pytest.mark.quick_cases(r"error1")
@pytest.mark.parametrize(
    "error", [NetworkError("connection\nrefused"), ConnectionError("connection refused")]
)
def test_a_failed_push_leaves_the_verified_folder_and_can_be_repeated(
    runs, tmp_path, run_export, hub, error
):
    hub.error = error
    code, out, sentence = run_export(runs / "full", "--push_to_hub", "org/name")
    assert code not in (0, None) and "Verified" in out and "Pushed" not in out
    assert "is complete, but pushing it failed" in sentence and "connection refused" in sentence
    AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    hub.error = None
    assert run_export(runs / "full", "--push_to_hub", "org/name", "--overwrite", "true")[0] == 0


def test_a_hub_that_cannot_be_reached_may_be_later(runs, run_export, hub, monkeypatch):
    monkeypatch.setattr("export_hf.reach_hub", lambda: False)
    hub.error = NetworkError("Name or service not known")
    hub.error.__cause__ = OSError("Name or service not known")
    code, _, sentence = run_export(runs / "full", "--push_to_hub", "org/name")
    assert code == 74 and "hub can't be reached from here: Name or service not" in sentence
    assert sentence.count("Name or service not known") == 1


def test_the_real_hub_without_a_network(runs, tmp_path, run_export):
    code, _, error = run_export(runs / "full", "--push_to_hub", "org/name")  # HF_HUB_OFFLINE is set
    assert code not in (0, None) and "pushing it failed" in error and (tmp_path / "hf").is_dir()


def test_a_bad_repository_name_is_found_before_the_work(runs, tmp_path, run_export):
    for name in ("a/b/c", "name"):
        code, _, error = run_export(runs / "full", "--push_to_hub", name)
        assert code == 2 and name in error and parts(tmp_path) == []


def test_an_export_into_a_checkpoint_would_damage_it(runs):
    place = files.latest(runs / "full") / "hf"
    with pytest.raises(ValueError, match="lies in the checkpoint .* which it would damage"):
        exported_output(place, overwrite=True)


def test_a_link_is_not_replaced(toys, tmp_path):
    (tmp_path / "link").symlink_to(toys / "llama")
    with pytest.raises(ValueError, match="is a link, which isn't replaced"):
        exported_output(tmp_path / "link", overwrite=True)
