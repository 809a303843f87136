"""The commands of the README, typed as a user types them: real processes, real files."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import metrics
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def run(command, folder, expected_code=0):
    """Run a command line in `folder`; returns (stdout, stderr)."""
    command = command.replace("\\\n", " ")
    words = [sys.executable if word == "python" else word for word in command.split()]
    words = [
        str(ROOT / word) if word in ("train.py", "prepare_data.py", "export_hf.py") else word
        for word in words
    ]
    words = [
        str(Path(sys.executable).parent / word) if word == "torchrun" else word for word in words
    ]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        words,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == expected_code, f"{command}\n{done.stdout}\n{done.stderr}"
    assert not re.search(r"\r|\wWarning: ", done.stderr), "bars, or warnings in Python's own format"
    return done.stdout, done.stderr


def readme_commands(*words):
    """The command lines of the README's code blocks that contain all `words`."""
    blocks = re.findall(r"```bash\n(.*?)```", README, re.S)
    lines = [line for block in blocks for line in re.split(r"(?<!\\)\n", block) if line.strip()]
    return [line for line in lines if all(word in line for word in words)]


@pytest.mark.longer
def test_the_demo_runs_says_what_it_is_and_what_comes_next(tmp_path):
    [command] = [c for c in readme_commands("install", "train.py")]
    main_job = command.split("&&")[-1].strip().removeprefix(".venv/bin/")
    out, _ = run(f"{main_job} --max_step 4", tmp_path)
    assert "the demo, configs/demo.yaml" in out
    assert re.search(r"Loss \d+\.\d+ -> \d+\.\d+, validation loss", out)
    assert "Checkpoint: checkpoints/demo_llama-demo/step-00000004" in out
    [following] = re.findall(r"Next: (.*)", out)
    out, _ = run(following, tmp_path)
    assert "Verified with plain transformers" in out
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf" / "demo_llama-demo")
    assert tokenizer.decode(tokenizer("def f(x):")["input_ids"]) == "def f(x):"


@pytest.mark.slow
def test_the_demo_runs_on_several_devices(tmp_path):
    """Two CPUs for four GPUs; each run takes another directory."""
    run("python train.py --max_step 1 --eval_iters 0", tmp_path)
    four_gpus = [
        command
        for command in readme_commands("train.py")
        if command.endswith(("--devices 4", "4 train.py"))
    ]
    assert len(four_gpus) == 2, "plain and under torchrun"
    for number, command in enumerate(four_gpus, start=2):
        command = command.replace("devices 4", "devices 2").replace(
            "nproc_per_node 4", "nproc_per_node 2"
        )
        out, _ = run(f"{command} --max_step 1 --eval_iters 0", tmp_path)
        assert "Preparing" not in out and "fsdp on 2 cpu devices" in out
        assert (tmp_path / "checkpoints" / f"demo_llama-demo-{number}" / "step-00000001").is_dir()


@pytest.mark.longer
def test_own_text_and_own_model_from_text_to_hugging_face(toys, tmp_path):
    """The README's second block, with a small model and text instead of Llama 3 and a hub."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for file in sorted(Path(os.__file__).parent.glob("*.py"))[:40]:
        (corpus / f"{file.stem}.txt").write_text(file.read_text())
    model = tmp_path / "model"
    model.mkdir()
    config = json.loads((ROOT / "configs" / "demo_llama" / "config.json").read_text())
    small = {"vocab_size": 512, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2}
    (model / "config.json").write_text(json.dumps({**config, **small}))
    prepare, general, train, export, resume = (
        readme_commands(word)[0]
        for word in (
            "--input corpus/",
            "--input general/",
            "train.py --devices 4 --model_name",
            "export_hf.py ",
            "--resume true",
        )
    )
    name = "meta-llama/Meta-Llama-3-8B"
    prepare = prepare.replace(f"--tokenizer {name}", "--train_tokenizer 512").replace("4096", "64")
    out, _ = run(prepare, tmp_path)
    assert (
        "train" in out
        and "Next: python train.py --model_name NAME_OR_DIR --train_data_dir data/mine" in out
    )
    (tmp_path / "general").mkdir()
    (tmp_path / "general" / "license.txt").write_text((ROOT / "LICENSE").read_text())
    run(
        general.replace(f"--tokenizer {name}", "--tokenizer data/mine/tokenizer").replace(
            "4096", "64"
        ),
        tmp_path,
    )
    flags = "--save_step_interval 10 --eval_step_interval 1 --eval_iters 1"
    train = train.replace("--devices 4", "--devices 2").replace(name, "model")
    train = re.sub(r"--(max_step 2000|eval_step_interval 50|save_step_interval 500)", "", train)
    run(f"{train} {flags} --max_step 10 --strategy fsdp2", tmp_path)
    resume = resume.replace("Meta-Llama-3-8B-mine", "model-mine").replace(
        "--devices 2", "--devices 1"
    )
    out, _ = run(f"{resume} --max_step 13 --resume_override max_step", tmp_path)
    assert "resumed from checkpoints/model-mine/step-00000010" in out
    assert metrics(tmp_path / "checkpoints" / "model-mine", "step")[-1] == 13
    export = export.replace("Meta-Llama-3-8B-mine", "model-mine").split("--push_to_hub")[0]
    out, _ = run(export, tmp_path)
    assert (
        "Verified with plain transformers" in out
        and "logits differ from those in training by" in out
    )
    assert "Next: AutoModelForCausalLM.from_pretrained('hf/mine')" in out
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "hf" / "mine").config.vocab_size == 512
    [verify] = readme_commands("fabric_llm.verify checkpoints")
    run(verify.replace("Meta-Llama-3-8B-mine", "model-mine"), tmp_path)
    # a checkpoint is a model to start from
    out, _ = run(
        (
            "python train.py --model_name checkpoints/model-mine/step-00000013 --train_data_dir "
            "data/mine --max_step 1"
        ),
        tmp_path,
    )
    assert "weights of checkpoints/model-mine/step-00000013" in out
    assert (tmp_path / "checkpoints" / "model-mine-2" / "step-00000001").is_dir()


@pytest.mark.longer
def test_a_mistake_gets_one_sentence_in_all_processes(toys, tmp_path):
    out, error = run("python train.py --devices 2 --lrr 1", tmp_path, expected_code=2)
    assert error == "train.py: error: unknown flag --lrr. Did you mean --lr?\n"
    out, error = run(
        "python prepare_data.py --input nowhere --train_tokenizer 300 --output data/x", tmp_path, 2
    )
    assert (
        error.startswith("prepare_data.py: error: ")
        and "nowhere" in error
        and len(error.splitlines()) == 1
    )
    out, error = run("python export_hf.py nowhere --output x", tmp_path, expected_code=2)
    assert error == "export_hf.py: error: No checkpoint at 'nowhere'.\n"


def test_an_end_with_words_prints_them_and_is_no_success(tmp_path):
    """SystemExit("text") of code of one's own."""
    code = (
        "import parse_arguments, runpy, sys; parse_arguments.parse_train = lambda argv: sys.exit('not "
        "here'); runpy.run_path(sys.argv[1], run_name='__main__')"
    )
    words = [sys.executable, "-c", code, ROOT / "train.py"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, "not here\n")


@pytest.mark.longer
def test_a_mistake_that_only_the_weights_show_ends_all_processes(toys, tmp_path):
    """Weights are read after the processes have started: still one sentence and exit code 2, and
    nobody hangs."""
    import shutil

    from safetensors.torch import load_file, save_file

    shutil.copytree(toys / "llama", tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    command = (
        f"python train.py --devices 2 --model_name {tmp_path / 'model'} --train_data_dir "
        f"{toys / 'data'}"
    )
    _, error = run(command, tmp_path, expected_code=2)
    sentences = [line for line in error.splitlines() if line.startswith("train.py: error:")]
    assert len(sentences) == 1 and "model.norm.weight" in sentences[0]
    assert "Traceback" not in error


@pytest.mark.parametrize("script", ["train.py", "prepare_data.py", "export_hf.py"])
def test_help(script, tmp_path):
    out, _ = run(f"python {script} --help", tmp_path)
    assert "usage:" in out and "--output" in out


@pytest.mark.slow
@pytest.mark.parametrize("steps", [12, None])
def test_the_demo_gives_the_same_curve_on_one_device_fsdp_and_fsdp2(tmp_path, steps):
    """Two micro-batches on one device and one on each of two make the same sums: the curves agree
    bit for bit."""
    more = "--eval_iters 0 --log_step_interval 1" if steps else ""
    flags = f"--precision 32-true {f'--max_step {steps}' if steps else ''} {more} --run_name"
    run(f"python train.py --devices 1 {flags} one", tmp_path)
    run(f"python train.py --devices 2 --strategy fsdp {flags} fsdp", tmp_path)
    run(f"python train.py --devices 2 --strategy fsdp2 {flags} fsdp2", tmp_path)
    one, fsdp, fsdp2 = (
        metrics(tmp_path / "checkpoints" / name) for name in ("one", "fsdp", "fsdp2")
    )
    assert len(one) > 10
    assert fsdp == pytest.approx(one, abs=1e-4)
    assert fsdp2 == pytest.approx(one, abs=1e-4)
    assert fsdp == pytest.approx(one, rel=2e-7, abs=0), (
        "the loss is a sum of two numbers, the weights are the same"
    )
