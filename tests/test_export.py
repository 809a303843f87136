"""export_hf.py: what it writes is the trained model, or it says why not and leaves nothing."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from conftest import VOCABULARY, ended, flip, parts, same_tensors, stored, truncate
from families import toy_config
from ranks import toy_run, train_ranks
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import export_hf
import fabric_llm.verify.__main__
from fabric_llm.base import failpoints, files
from fabric_llm.base.describing import describe
from fabric_llm.base.faults import UNWRITABLE, Fault
from fabric_llm.checkpoint import keep, trainer_state
from fabric_llm.checkpoint.keep import checkpoint_at as find
from fabric_llm.model import saving
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
        *"--max_step 4 --lr 2e-2 --eval_iters 0 --save_step_interval 2".split(),
        *("--train_data_dir", folder / "data", "--micro_batch_size", 4),
        *("--output_dir", folder, "--run_name"),
    )
    for name, model in (("full", "llama"), ("tied", "llama-tied")):
        train_ranks(1, *flags, name, "--precision", "32-true", "--model_name", toys / model)
    sharded = "sharded --strategy fsdp --state_dict_type sharded --precision bf16-true"
    train_ranks(2, *flags, *sharded.split(), "--model_name", toys / "gpt2-no-dropout")
    return folder


def small_tokenizer():
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    specials = {"special_tokens": ["<eos>", "<unk>"], "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, **specials)
    tokenizer.train_from_iterator(["to be or not to be that is the question"] * 9, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>")


@pytest.fixture
def run_export(tmp_path, capsys):
    """Call export_hf.py with flags, output tmp_path/hf; returns (exit code, stdout, last line of
    stderr)."""

    def call(*flags, output=tmp_path / "hf"):
        code = ended(export_hf.main, *flags, "--output", output)
        captured = capsys.readouterr()
        return code, captured.out, captured.err.strip().rpartition("\n")[2]

    return call


@pytest.fixture
def after_writing(monkeypatch):
    """A function that makes exports call another one, with the folder, once they have written
    it."""

    def set_to(change):
        write_model = exporting.write_model

        def changed(folder, *given):
            write_model(folder, *given)
            change(folder)

        monkeypatch.setattr(exporting, "write_model", changed)

    return set_to


# ------------------------------------------------------------------------------- what is written


@pytest.mark.quick_cases(r"sharded")
@pytest.mark.parametrize(
    ("run", "model"), [("full", "llama"), ("tied", "llama-tied"), ("sharded", "gpt2-no-dropout")]
)
def test_plain_transformers_opens_it(runs, toys, tmp_path, run_export, run, model):
    code, out, _ = run_export(runs / run)
    assert code == 0 and "Verified with plain transformers" in out
    assert f"Exporting {runs / run / 'step-00000004'} " in out
    assert parts(tmp_path) == ["hf"]
    expected = {*"README.md config.json generation_config.json model.safetensors".split()}
    expected |= {"tokenizer.json", "tokenizer_config.json"}
    assert {*parts(tmp_path / "hf")} - {"curves.png"} == expected
    assert stored(tmp_path / "hf").keys() == stored(toys / model).keys(), (
        "names and ties of the model it started from"
    )
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    assert opened.dtype == (torch.bfloat16 if run == "sharded" else torch.float32)
    assert opened.config.use_cache and opened.generation_config.use_cache
    is_tied = opened.get_output_embeddings().weight is opened.get_input_embeddings().weight
    assert is_tied == (run != "full") and f", {int(is_tied)} tied; " in out
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    prompt = tokenizer("to be or not", return_tensors="pt")
    assert "<unk>" not in tokenizer.decode(prompt["input_ids"][0])
    how = {"attention_mask": prompt["attention_mask"], "max_new_tokens": 3}
    assert len(opened.generate(input_ids=prompt["input_ids"], **how)) == 1


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16", "float16"])
def test_dtype(runs, tmp_path, run_export, dtype):
    assert run_export(runs / "full", "--dtype", dtype)[0] == 0
    expected = torch.float32 if dtype == "auto" else getattr(torch, dtype)
    trained = {name: tensor.to(expected) for name, tensor in stored(find(runs / "full")).items()}
    assert same_tensors(trained, stored(tmp_path / "hf"))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "hf").dtype == expected


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
def test_experts_keep_the_names_of_the_hub(toys, tmp_path):
    """transformers fuses experts in memory; a full and a sharded checkpoint must both come out as
    the original."""
    flags = (*toy_run(toys, tmp_path, model="mixtral"), "--max_step", 1, "--eval_iters", 0)
    for kind in ("full", "sharded"):
        train_ranks(1, *flags, "--run_name", kind, "--state_dict_type", kind)
        export(find(tmp_path / kind), tmp_path / f"hf-{kind}")
        assert stored(tmp_path / f"hf-{kind}").keys() == stored(toys / "mixtral").keys()


@pytest.mark.longer
def test_a_model_that_knows_only_eager_attention(toys, tmp_path):
    """Its checkpoints are read with whatever attention transformers takes for it."""
    toy_config("gemma2").save_pretrained(tmp_path / "gemma")
    flags = (*toy_run(toys, tmp_path), "--model_name", tmp_path / "gemma", "--run_name", "run")
    flags += ("--attention", "eager", "--eval_iters", 0, "--max_step")
    train_ranks(1, *flags, 1)
    train_ranks(1, *flags, 2, "--resume", "true", "--resume_override", "max_step")
    export(find(tmp_path / "run"), tmp_path / "hf")
    assert fabric_llm.verify.__main__.main([str(tmp_path / "run")]) == 0


@pytest.mark.longer
def test_generation_config_is_that_of_the_model_it_started_from(toys, tmp_path):
    source = shutil.copytree(toys / "llama", tmp_path / "llama")
    settings = json.loads((source / "generation_config.json").read_text())
    settings.update(do_sample=True, temperature=0.6, eos_token_id=[0, 5])
    (source / "generation_config.json").write_text(json.dumps(settings))
    flags = (*toy_run(toys, tmp_path), "--model_name", source, "--eval_iters", 0, "--max_step", 1)
    for kind in ("full", "sharded"):
        train_ranks(1, *flags, "--run_name", kind, "--state_dict_type", kind)
        export(find(tmp_path / kind), tmp_path / f"hf-{kind}")
        opened = AutoModelForCausalLM.from_pretrained(tmp_path / f"hf-{kind}").generation_config
        assert (opened.temperature, opened.eos_token_id) == (0.6, [0, 5])


# ------------------------------------------------------------------- which checkpoint, which output


def test_an_existing_output_is_refused_unless_overwritten(runs, tmp_path, run_export):
    run_export(runs / "full")
    before = stored(tmp_path / "hf")
    code, _, error = run_export(runs / "tied")
    assert code == 2 and str(tmp_path / "hf") in error and "--overwrite true" in error
    assert stored(tmp_path / "hf").keys() == before.keys(), "untouched"
    assert run_export(runs / "tied", "--overwrite", "true")[0] == 0
    assert stored(tmp_path / "hf").keys() != before.keys()


def test_only_an_export_is_ever_overwritten(toys, runs, tmp_path, run_export):
    """A slip such as `--output checkpoints/RUN --overwrite true` must not cost the run."""
    run = shutil.copytree(runs / "full", tmp_path / "run")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("years of work")
    base = shutil.copytree(toys / "llama", tmp_path / "base")
    before = sorted(base.iterdir())
    steps = (run / "step-00000004", run / "step-00000002")
    for output in (run, *steps, tmp_path / "home", base):
        code, _, error = run_export(run, "--overwrite", "true", output=output)
        assert code == 2 and str(output) in error
    assert files.latest(run).name == "step-00000004" and (tmp_path / "home" / "thesis.txt").exists()
    assert sorted(base.iterdir()) == before
    keep.verified(run / "step-00000004", hashes=True)


def test_bad_sizes_and_outputs(runs, tmp_path, run_export):
    code, _, error = run_export(runs / "full", "--max_shard_size", "many")
    assert code == 2 and "many" in error and parts(tmp_path) == []
    (tmp_path / "file").write_text("x")
    for output, words in (
        ("/dev/null/hf", "/dev/null/hf"),
        (tmp_path / "file" / "hf", "cannot be written: Not a directory"),
    ):
        code, _, error = run_export(runs / "full", output=output)
        assert code == 73 and words in error


# ------------------------------------------------------------------------------- damage


@pytest.mark.parametrize("damage", [flip, truncate, Path.unlink])
@pytest.mark.parametrize(
    ("run", "pattern"),
    [
        ("full", "model.safetensors"),
        ("full", "trainer/probe.safetensors"),
        ("sharded", "weights/*00002*"),
        ("sharded", "config.json"),
    ],
)
def test_a_damaged_file_is_named(runs, tmp_path, run_export, run, pattern, damage):
    copy = shutil.copytree(find(runs / run), tmp_path / "copy")
    file = next(copy.glob(pattern))
    damage(file)
    code, _, error = run_export(copy)
    assert code == 66 and str(file.relative_to(copy)) in error and "damaged" in error
    assert parts(tmp_path) == ["copy"]


# ------------------------------------------------------------------------------- verification


NORM, HEAD, EMBEDDINGS = "model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"
ONE, TWO = (f"model.layers.{number}.mlp.up_proj.weight" for number in (1, 2))


@pytest.mark.parametrize(
    ("tamper", "run", "words"),
    [
        (lambda weights: weights.pop(ONE), "full", ["missing keys", ONE]),
        (lambda weights: weights.update({TWO: weights[ONE] + 0}), "full", ["unexpected keys", TWO]),
        (lambda weights: weights[NORM][3].add_(1e-6), "full", [NORM, "isn't what the checkpoint"]),
        (lambda weights: weights.update({NORM: weights[NORM][:-1].clone()}), "full", [NORM]),
        (lambda weights: weights[NORM][0].fill_(torch.nan), "full", [NORM]),
        (lambda weights: weights.update({HEAD: weights[EMBEDDINGS] + 1e-3}), "tied", [HEAD]),
    ],
)
def test_an_export_that_is_not_the_model_is_taken_back(
    runs, tmp_path, run_export, after_writing, tamper, run, words
):
    def tampered(folder):
        weights = stored(folder)
        tamper(weights)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    after_writing(tampered)
    code, out, error = run_export(runs / run)
    assert code == 1 and "verification failed" in error, error
    assert all(word in error for word in words), error
    assert "Verified" not in out and parts(tmp_path) == [], "nothing is left"


def test_an_export_that_cannot_be_opened_is_taken_back_and_not_pushed(
    runs, tmp_path, run_export, after_writing, hub
):
    after_writing(lambda folder: truncate(folder / "model.safetensors"))
    code, _, error = run_export(runs / "full", "--push_to_hub", "org/name")
    assert code == 1 and "can't open the export" in error and parts(tmp_path) == []
    assert hub.calls == []


@pytest.mark.longer
def test_a_failed_overwrite_leaves_the_former_export(runs, tmp_path, run_export, monkeypatch):
    run_export(runs / "full")

    def disk_full(self, name, tensor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saving.TensorFile, "write", disk_full)
    code, _, error = run_export(runs / "full", "--overwrite", "true")
    said = ("No space left", "the weights need", "iB were free")
    assert code == 74 and all(words in error for words in said)
    assert parts(tmp_path) == ["hf"]
    AutoModelForCausalLM.from_pretrained(tmp_path / "hf")


@pytest.mark.parametrize("run", ["full", "sharded"])
def test_logits_of_another_model_are_noticed(runs, tmp_path, run_export, run):
    """Weights and hashes are in order, only what the model said in training isn't what these
    weights say."""
    copy = shutil.copytree(find(runs / run), tmp_path / "copy")
    probe = trainer_state.read_probe(copy)
    probe["logits"] = probe["logits"].flip(0).contiguous()
    save_file(probe, copy / "trainer" / "probe.safetensors")
    document = files.read(copy)
    document["files"] = describe(copy, document["files"])
    (copy / files.MANIFEST).write_bytes(files.encode(document))
    code, _, error = run_export(copy)
    assert code == 1 and "logits differ from those in training" in error
    assert parts(tmp_path) == ["copy"]


@pytest.mark.longer
def test_every_swap_of_two_tensors_is_caught_twice(runs, tmp_path):
    """By the comparison with the checkpoint; and, where the checkpoint itself has them swapped, by
    the logits."""
    source = find(runs / "full")
    probe = trainer_state.read_probe(source)
    trained, weights = weights_in(source), stored(source)
    assert verify(source, trained, probe, "32-true").logits_difference < 1e-5
    firsts = [name for name in weights if "layers.0." in name]
    assert len(firsts) == 9
    for first in firsts:
        second = first.replace("layers.0.", "layers.1.")
        folder = shutil.copytree(source, tmp_path / first)
        swapped = {**weights, first: weights[second], second: weights[first]}
        save_file(swapped, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(VerificationError, match="isn't what the checkpoint holds"):
            verify(folder, trained, probe, "32-true")
        with pytest.raises(VerificationError, match="logits differ"):
            verify(folder, weights_in(folder), probe, "32-true")


def weights_in(folder):
    return open_weights(str(folder), load_config(str(folder)), torch.float32, seed=0)


# ------------------------------------------------------------------------------- the hub


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_in_the_middle_leaves_the_former_export(
    runs, tmp_path, run_export, after_writing, number
):
    run_export(runs / "full")
    after_writing(lambda folder: os.kill(os.getpid(), number))
    code, _, error = run_export(runs / "full", "--overwrite", "true")
    assert code == 75 and parts(tmp_path) == ["hf"]
    said = f"stopped on request; nothing was written to {tmp_path / 'hf'}."
    assert error == f"export_hf.py: error: {said}"
    AutoModelForCausalLM.from_pretrained(tmp_path / "hf")


def test_what_appears_meanwhile_is_not_replaced_nor_mixed(
    runs, tmp_path, run_export, after_writing
):
    def second(folder):
        with pytest.raises(Fault, match="by another process") as refused:
            export(find(runs / "tied"), tmp_path / "hf")
        assert refused.value.code == UNWRITABLE
        shutil.copytree(folder, tmp_path / "hf")

    after_writing(second)
    code, _, error = run_export(runs / "full")
    assert code == 2 and "hf' exists; take another --output" in error and parts(tmp_path) == ["hf"]


def test_a_former_export_outlives_a_stop_between_the_renames(
    runs, tmp_path, run_export, monkeypatch
):
    run_export(runs / "full")
    with monkeypatch.context() as stopped:
        stopped.setenv(failpoints.VARIABLE, "prepare.publish:do=raise")
        assert run_export(runs / "tied", "--overwrite", "true")[0] == 1
    AutoModelForCausalLM.from_pretrained(tmp_path / ".hf.preparing" / "old")
    assert run_export(runs / "tied", "--overwrite", "true")[0] == 0 and parts(tmp_path) == ["hf"]


def test_a_stop_while_pushing_says_what_is_there(runs, tmp_path, run_export, monkeypatch):
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: os.kill(os.getpid(), signal.SIGINT))
    code, _, error = run_export(runs / "full", "--push_to_hub", "org/name")
    assert code == 75 and "is complete, but it isn't pushed (repeat the command)" in error
    AutoModelForCausalLM.from_pretrained(tmp_path / "hf")


def test_no_room_for_an_export(runs, tmp_path, run_export, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda folder: type("Usage", (), {"free": 2**20}))
    code, _, error = run_export(runs / "full")
    assert code == 74 and "The export needs" in error and "has 1.0 MiB free" in error
    assert parts(tmp_path) == []


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
    push = ("--push_to_hub", "org/name")
    code, out, _ = run_export(runs / "full", *push)
    assert code == 0 and "https://huggingface.co/org/name/commit/1" in out
    assert out.index("Verified") < out.index("Pushed")
    (create, repository, options, _), (upload, what) = hub.calls
    assert (create, repository, upload) == ("create_repo", "org/name", "upload_folder")
    assert options == {"private": True, "exist_ok": True}
    assert (what["repo_id"], what["folder_path"]) == ("org/name", tmp_path / "hf")
    run_export(runs / "full", *push, "--overwrite", "true", "--private", "false")
    assert hub.calls[2][2]["private"] is False


class NetworkError(Exception):
    """As those of huggingface_hub's HTTP library: no OSError."""


@pytest.mark.quick_cases(r"error1")
@pytest.mark.parametrize(
    "error", [NetworkError("connection\nrefused"), ConnectionError("connection refused")]
)
def test_a_failed_push_leaves_the_verified_folder_and_can_be_repeated(
    runs, tmp_path, run_export, hub, error
):
    hub.error, push = error, ("--push_to_hub", "org/name")
    code, out, sentence = run_export(runs / "full", *push)
    assert code not in (0, None) and "Verified" in out and "Pushed" not in out
    assert "is complete, but pushing it failed" in sentence and "connection refused" in sentence
    AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    hub.error = None
    assert run_export(runs / "full", *push, "--overwrite", "true")[0] == 0


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


def test_neither_into_a_checkpoint_nor_over_a_link(runs, toys, tmp_path):
    place = files.latest(runs / "full") / "hf"
    with pytest.raises(ValueError, match="lies in the checkpoint .* which it would damage"):
        exported_output(place, overwrite=True)
    (tmp_path / "link").symlink_to(toys / "llama")
    with pytest.raises(ValueError, match="is a link, which isn't replaced"):
        exported_output(tmp_path / "link", overwrite=True)
