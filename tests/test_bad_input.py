"""Bad input to train.py: one sentence with the offending value, exit code 2 (or that of its row in
docs/faults.md), before any process or model exists."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from unittest.mock import Mock

import datasets
import pytest
import torch
from conftest import CONTEXT, ROWS, VOCABULARY
from ranks import instead, toy_run, train_ranks
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

import train
from fabric_llm.base.faults import Fault, as_fault
from fabric_llm.data.dataset import open_dataset
from fabric_llm.plan.make_plan import make_plan
from fabric_llm.plan.run_directory import directory
from fabric_llm.plan.start import place
from fabric_llm.run.supervision import _require_device
from parse_arguments import parse_train


@pytest.fixture
def refused(toys, tmp_path, capsys, monkeypatch):
    """Call train.py with good flags and then these; returns the one sentence of its refusal."""

    def never(*args, **kwargs):
        raise AssertionError("too late: a model or a process would have been made")

    monkeypatch.setattr("fabric_llm.model.loading.open_weights", never)
    monkeypatch.setattr("fabric_llm.processes.launch.start_ranks", never)
    monkeypatch.setattr("builtins.input", never)

    def call(*flags, good=True, code=2):
        base = toy_run(toys, tmp_path / "runs") if good else ()
        with pytest.raises(SystemExit) as exit:
            train.main([str(word) for word in instead(base, flags)])
        error = capsys.readouterr().err
        assert exit.value.code == code
        lines = error.strip().splitlines()
        assert len(lines) == 1 and lines[0].endswith((".", "?")), error
        assert lines[0].startswith("train.py: error: ")
        assert not (tmp_path / "runs").exists()
        return lines[0].removeprefix("train.py: error: ")

    return call


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--learning-rate", "1"], ["--learning-rate", "mean --lr?"]),
        (["--resume", "maybe"], ["--resume", "true, false or auto", "--checkpoint", "maybe"]),
        (["--max_step", "0"], ["--max_step", "0"]),
        (["--spike_threshold", "3", "--spike_window", "1"], ["--spike_window", "at least 2", "1"]),
        (["--beta2", "1.0"], ["--beta2", "1.0"]),
        (["--context_length", "99"], ["99", str(CONTEXT)]),
        (["--micro_batch_size", "45"], ["45 sequences", f"has {ROWS}."]),
        (["--global_batch_size", "64"], ["64", str(ROWS)]),
        (["--auto_wrap_policy", "NoSuchBlock"], ["NoSuchBlock", "LlamaDecoderLayer"]),
        (["--accelerator", "cuda"], ["cuda", "no GPU"]),
        (["--num_nodes", "2"], ["--num_nodes 2", "torchrun", "MASTER_ADDR"]),
        (["--global_batch_size", "4096"], ["A step takes 4096 sequences", "the training split of"]),
        (["--profile", "3"], ["--profile", "START:STOP", "'3'"]),
        (["--profile", "5:3"], ["--profile", "START:STOP", "'5:3'"]),
        (["--profile", "0:3"], ["counted from 1", "'0:3'"]),
        (["--profile=-1:3"], ["START:STOP", "'-1:3'"]),
    ],
)
def test_flags(refused, flags, words):
    if flags[0] == "--accelerator" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    sentence = refused(*flags)
    assert all(word in sentence for word in words), sentence


def test_text_that_yaml_1_1_takes_for_a_number(refused, tmp_path):
    for text in ("3:5", "'3:5'"):  # base 60 there
        (tmp_path / "flags.yaml").write_text(f"profile: {text}\nmax_step: 2\n")
        said = refused("--config", tmp_path / "flags.yaml")
        assert "--profile 3:5: the run ends at step 2" in said


def test_more_devices_than_there_are(refused, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert "--devices 4: this machine has 2 GPUs." in refused("--devices", 4)
    monkeypatch.setenv("SLURM_LOCALID", "0")  # a batch script
    assert "--gpu-bind=none" not in refused("--devices", 4)
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 4}.items():
        monkeypatch.setenv(name, str(value))  # srun --gpus-per-task=1 hides the others' GPUs
    assert "--gpu-bind=none" in refused("--devices", 4)


def test_a_driver_that_is_too_old_is_named(refused, monkeypatch):
    """Not bfloat16, which torch says then that the GPUs don't have."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    error = RuntimeError("The NVIDIA driver on your system is too old\n(found version 12020).")
    monkeypatch.setattr("torch.cuda.init", Mock(side_effect=error))
    words = "can't use this machine's GPUs (--accelerator cpu leaves them out): The NVIDIA driver "
    assert f"{words}on your system is too old (found version 12020)." in refused()


def test_a_gpu_that_computes_nothing_is_named(monkeypatch):
    errors = [RuntimeError("CUDA error: no image\nCUDA kernel"), RuntimeError("out of memory")]
    monkeypatch.setattr("torch.cuda.set_device", Mock(side_effect=errors))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "Tesla V100")
    for code, words in (2, r"cuda:1 \(Tesla V100\) .*: CUDA error: no image\."), (79, "out"):
        with pytest.raises(Fault, match=f"^{words}") as raised:
            _require_device(torch.device("cuda", 1))
        assert raised.value.code == code


def test_gpus_that_only_torch_sees_are_told_before_a_model_is_loaded(
    toys, tmp_path, capsys, monkeypatch
):
    """Devices are counted before torch is imported, where /dev shows no GPU: a run must not go on
    beside them."""
    counts = iter([0])
    monkeypatch.setattr("torch.cuda.device_count", lambda: next(counts, 2))
    monkeypatch.setattr("torch.cuda.init", lambda: None)
    with pytest.raises(SystemExit) as exit:
        flags = (*toy_run(toys, tmp_path), "--strategy", "ddp", "--precision", "32-true")
        train.main([str(word) for word in flags])
    said = capsys.readouterr().err
    assert exit.value.code == 2
    assert "PyTorch sees GPUs that /dev doesn't show: say --accelerator cuda" in said


def test_yaml_keys(refused, tmp_path):
    config = tmp_path / "mine.yaml"
    config.write_text("- lr\n")
    assert "flag: value" in refused("--config", config)
    config.write_bytes("lr: 1e-4\noutput_dir: señor\n".encode("latin-1"))
    assert "mine.yaml' isn't UTF-8 text, in line 2." in refused("--config", config)
    config.write_bytes("a: {path: señor}\n".encode("latin-1"))
    said = refused("--train_data_dir", "null", "--data_mix", config)
    assert "--data_mix: " in said and "mine.yaml' isn't UTF-8 text, in line 1." in said
    config.write_text("# " + "ñ" * 2**15 + "\nlr: 1e-4\n")  # whose end isn't read
    assert "has more than 64 KiB" in refused("--config", config)
    assert "--run_name 'a\\udcf1' isn't UTF-8 text." in refused("--run_name", "a\udcf1")
    assert "--output_dir 'a\\udcf1' isn't UTF-8 text." in refused("--output_dir", "a\udcf1")


def test_model_and_data_belong_together(refused):
    assert "--train_data_dir is missing" in refused("--model_name", "x", good=False)
    assert "--model_name is missing" in refused("--train_data_dir", "x", good=False)
    resumed = ("--resume", "true", "--run_name", "mine", "--train_data_dir", "x")
    said = refused(*resumed, good=False)
    assert "a resumed one has them in its arguments.yaml: leave out --train_data_dir" in said


def test_the_demo_is_not_prepared_for_a_run_that_is_not_there(refused, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "fabric_llm.plan.start.prepare_demo",
        lambda *given: pytest.fail("half a minute for nothing"),
    )
    words = ("--resume", "true", "--run_name", "other", "--output_dir", tmp_path / "runs")
    assert "no complete checkpoint" in refused(*words, good=False, code=66)


def dataset(folder, **splits):
    made = {name: datasets.Dataset.from_dict(columns) for name, columns in splits.items()}
    datasets.DatasetDict(made).save_to_disk(str(folder))
    return "--train_data_dir", folder


ROW = list(range(8))
ONE = {"input_ids": [ROW]}


def train_split(**columns):
    return {"train": columns, "validation": ONE}


def both_splits(**columns):
    return {"train": columns, "validation": columns}


@pytest.mark.parametrize(
    ("splits", "words"),
    [
        ({"train": ONE}, ["no split 'validation'", "'train'"]),
        ({"validation": ONE}, ["no split 'train'"]),
        ({"test": ONE}, ["no split 'train', only 'test'", "train_test_split"]),
        ({"train": ONE, "test": ONE}, ["no split 'validation'", 'python -c "import', "pop("]),
        (train_split(input_ids=[]), ["'train'", "empty"]),
        ({"train": ONE, "valid": {"input_ids": []}}, ["'valid'", "empty"]),
        (train_split(text=["a"]), ["holds text", "--tokenizer"]),
        (train_split(input_ids=["a"]), ["'input_ids'", "integers"]),
        (train_split(input_ids=[[0.5] * 8]), ["'input_ids'", "integers"]),
        (train_split(input_ids=[ROW, ROW[:5]]), ["5", "8", "different length"]),
        (
            train_split(input_ids=[ROW[:5]]),
            ["must be alike", "in rows of 8 tokens", "in rows of 5 tokens"],
        ),
        (train_split(**ONE, labels=[ROW[:4]]), ["4", "8"]),
        (
            both_splits(input_ids=[[*ROW, VOCABULARY]]),
            [f"has {VOCABULARY} tokens", "--tokenizer THAT_OF_ITS_WEIGHTS"],
        ),
        (both_splits(input_ids=[[*ROW, -1]]), ["-1"]),
        (both_splits(input_ids=[[3]]), ["1 token"]),
        (train_split(**ONE, labels=[[0, *[-100] * 7]]), ["masked"]),
        ({"train": ONE, "validation": {**ONE, "labels": [[-100] * 8]}}, ["'validation'"]),
        (train_split(**ONE, attention_mask=[[0] * 8]), ["masked"]),
        (
            train_split(**ONE, labels=[ROW]),
            ["must be alike", "'train' has input_ids, labels in", "the other input_ids in"],
        ),
        (both_splits(**ONE, labels=[[999] * 8]), ["999"]),
        (train_split(**ONE, labels=[[-1] * 8]), ["-1"]),
        (train_split(input_ids=[ROW, None]), ["'input_ids'", "empty values"]),
    ],
)
def test_datasets(refused, tmp_path, splits, words):
    sentence = refused(*dataset(tmp_path / "bad", **splits))
    assert all(word in sentence for word in words), sentence


def test_other_columns_are_left_out(tmp_path):
    rows = {"input_ids": [ROW] * 3, "text": ["x"] * 3, "length": [8] * 3}
    _, folder = dataset(tmp_path / "more", train=rows, validation=rows)
    assert len(open_dataset(folder).train) == 3


@pytest.mark.longer
def test_a_dataset_with_a_test_split_is_made_one_that_trains(refused, tmp_path):
    for name, splits in {"a": ["train", "test"], "b": ["test"]}.items():
        rows = {"input_ids": [ROW] * 200}
        _, folder = dataset(tmp_path / name, **dict.fromkeys(splits, rows))
        command = re.search(r"python (-c .*) makes", refused("--train_data_dir", folder))[1]
        subprocess.run([sys.executable, *shlex.split(command)], check=True, capture_output=True)
        made = open_dataset(f"{folder}-splits")
        assert len(made.train) + len(made.validation) == 200 * len(splits)


def test_more_positions_than_the_model_has(refused, toys, tmp_path):
    rows = {"input_ids": [[1] * 65]}
    long = dataset(tmp_path / "long", train=rows, validation=rows)
    sentence = refused(*long, "--model_name", toys / "gpt2")
    assert "65" in sentence and "64" in sentence


def test_models(refused, toys, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "t5"}')
    assert "isn't a causal language model" in refused("--model_name", folder)
    assert "huggingface.co" in refused("--model_name", "nobody/nothing")


def test_a_model_that_transformers_does_not_have(refused, toys, tmp_path):
    """Its own message has five lines, with versions that weren't tested."""
    shutil.copytree(toys / "llama", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "model_type": "zebra"}))
    sentence = refused("--model_name", tmp_path / "model")
    assert "is a 'zebra' model, which transformers" in sentence
    assert "pyproject.toml" in sentence and "pip" not in sentence


def test_a_checkpoint_that_is_none_leaves_its_folder_alone(refused, tmp_path):
    (tmp_path / "no_run").mkdir()
    refused("--resume", "true", "--checkpoint", tmp_path / "no_run" / "step-00000001", code=66)
    assert not list((tmp_path / "no_run").iterdir())


def test_data_of_another_tokenizer(refused, toys, tmp_path):
    """The first three tokens that differ are named."""
    for folder, name, words in (
        ("model", "llama", "a b c d e f g h i j k l"),
        ("data", "data", "l k j i h g f e d c b a"),
    ):
        shutil.copytree(toys / name, tmp_path / folder)
        vocabulary = {word: index for index, word in enumerate(words.split())}
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(vocabulary)))
        tokenizer.save_pretrained(tmp_path / folder / ("tokenizer" if folder == "data" else ""))
    sentence = refused("--model_name", tmp_path / "model", "--train_data_dir", tmp_path / "data")
    assert "12 tokens have different ids, such as 'a' (11 and 0), 'b' (10 and 1), 'c'" in sentence
    assert "--tokenizer" in sentence
    assert sentence.count(" and ") == 3


@pytest.mark.parametrize("there", ["disk/mirror", "file/mirror"])
def test_what_is_refused_leaves_no_folder(refused, tmp_path, monkeypatch, there):
    """Without obstore, and where a file is in the way of the mirror."""
    (tmp_path / "file").write_text("")
    if there == "disk/mirror":
        monkeypatch.setitem(sys.modules, "obstore", None)
    else:
        pytest.importorskip("obstore")
    before = sorted(tmp_path.rglob("*"))
    output = tmp_path / "none" / "such" / "runs"
    sentence = refused("--output_dir", output, "--mirror", f"file://{tmp_path}/{there}")
    assert ("obstore" if there == "disk/mirror" else f"--mirror file://{tmp_path}/") in sentence
    assert sorted(tmp_path.rglob("*")) == before


def test_what_rank_0_alone_checks_ends_all_ranks(toys, tmp_path):
    with pytest.raises(AssertionError) as error:
        flags = ("--number_epochs", 1, "--profile", "900:901")
        train_ranks(2, *toy_run(toys, tmp_path / "disk" / "runs"), *flags, timeout_seconds=60)
    assert "--profile 900:901: the run ends at step" in str(error.value)
    assert not any(tmp_path.iterdir()), "nothing was done"


def test_each_machine_hashes_its_copy_of_the_data(toys, tmp_path, monkeypatch):
    """Which may lie on a disk of its own."""
    asked = []
    monkeypatch.setattr(
        "fabric_llm.plan.data_plan.open_source",
        lambda folder, how, flags: asked.append(how) or open_dataset(folder, how),
    )
    flags = (*toy_run(toys, tmp_path), "--devices", 2, "--num_nodes", 2)
    arguments = parse_train([str(word) for word in flags])
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for rank, local_rank in ((0, 0), (1, 1), (2, 0), (3, 1)):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        make_plan(arguments, place(arguments), tmp_path / "run", None)
    assert asked == ["auto", "size", "auto", "size"]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate()`"), 79),
        (torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), 79),
        (MemoryError(), 79),
        (OSError(28, "No space left on device"), 74),
        (PermissionError(13, "Permission denied", "data/manifest.json"), 2),
        (RuntimeError("Connection closed by peer [127.0.0.1]:1"), 71),
        (RuntimeError("shapes cannot be multiplied"), 1),
    ],
)
def test_what_others_raise_gets_a_code(error, code):
    assert as_fault(error).code == code


@pytest.fixture(scope="module")
def finished(toys, tmp_path_factory):
    """A finished run of two steps, checkpoints at 1 and 2."""
    output = tmp_path_factory.mktemp("finished")
    flags = toy_run(toys, output)
    more = "--run_name run --max_step 2 --save_step_interval 1 --global_batch_size 4"
    train_ranks(1, *flags, *more.split())
    return output


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("", ["holds checkpoints up to step-00000002", "--resume true", "--run_name"]),
        ("--resume true --max_step 2", ["is where this run ends", "step 2 of 2", "--max_step"]),
        (
            "--resume true --max_step 1 --resume_override max_step",
            ["is after step 2, and the run would end after step 1", "--checkpoint"],
        ),
        ("--resume true", ["max_step 2, not 9", "--resume_override max_step"]),
        (
            "--resume true --lr 1e-3 --warmup_steps 3 --resume_override max_step",
            ["lr 2e-05, not 0.001; warmup_steps 0, not 3", "--resume_override lr,warmup_steps"],
        ),
        ("--resume true --global_batch_size 8", ["global_batch_size 4, not 8"]),
        ("--resume true --seed 9", ["seed 1234, not 9"]),
        ("--resume true --precision 32-true", ["precision bf16-true, not 32-true"]),
        ("--resume true --bf16_updates master", ["bf16_updates stochastic, not master"]),
    ],
)
def test_a_run_that_is_there_already(refused, finished, flags, words):
    names = ("STATUS.json", "events.jsonl", "metrics.jsonl", "arguments.yaml")
    files = [finished / "run" / name for name in names]
    before = [file.read_bytes() for file in files]
    given = ("--run_name", "run", "--global_batch_size", 4, "--max_step", 9)
    sentence = refused("--output_dir", finished, *instead(given, flags.split()))
    assert all(word in sentence for word in words), sentence
    assert [file.read_bytes() for file in files] == before, "it stays done"


def test_resume_alone_says_which_run_it_could_mean(refused, finished, tmp_path):
    both = shutil.copytree(finished, tmp_path / "both")
    shutil.copytree(both / "run", both / "demo_llama-demo")
    sentence = refused("--resume", "true", "--output_dir", both, good=False)
    assert "--run_name" in sentence and "'demo_llama-demo', 'run'" in sentence
    assert "--run_name run" in refused("--resume", "true", "--output_dir", finished, good=False)
    shutil.rmtree(both / "run")
    arguments = parse_train(["--resume", "true", "--output_dir", str(both)])
    assert directory(arguments) == both / "demo_llama-demo"


def test_a_checkpoint_of_another_model(refused, finished, toys):
    checkpoint = ("--resume", "true", "--checkpoint", finished / "run" / "step-00000001")
    sentence = refused(*checkpoint, "--model_name", toys / "gpt2", "--global_batch_size", 4)
    assert "belongs to another model" in sentence and "gpt2" in sentence
