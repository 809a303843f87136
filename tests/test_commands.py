"""The commands of the README, typed as a user types them: real processes, real files."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import stored
from ranks import metrics
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def run(command, folder, expected_code=0):
    """Run a command line in `folder`; returns (stdout, stderr)."""
    places = {name: str(ROOT / name) for name in ("train.py", "prepare_data.py", "export_hf.py")}
    places |= {"python": sys.executable, "torchrun": str(Path(sys.executable).parent / "torchrun")}
    words = [places.get(word, word) for word in command.replace("\\\n", " ").split()]
    own = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    how = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "timeout": 1200}
    done = subprocess.run(words, cwd=folder, env={**os.environ, **own}, **how)
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
    commands = readme_commands("train.py")
    four_gpus = [one for one in commands if one.endswith(("--devices 4", "4 train.py"))]
    assert len(four_gpus) == 2, "plain and under torchrun"
    for number, command in enumerate(four_gpus, start=2):
        command = re.sub("(devices|nproc_per_node) 4", r"\1 2", command)
        out, _ = run(f"{command} --max_step 1 --eval_iters 0", tmp_path)
        assert "Preparing" not in out and "fsdp on 2 cpu devices" in out
        assert (tmp_path / "checkpoints" / f"demo_llama-demo-{number}" / "step-00000001").is_dir()


@pytest.mark.longer
def test_own_text_and_own_model_from_text_to_hugging_face(toys, tmp_path):
    """The README's second block, with a small model and text instead of Llama 3 and a hub."""
    corpus, model, general = (tmp_path / name for name in ("corpus", "model", "general"))
    for folder in (corpus, model, general):
        folder.mkdir()
    for file in sorted(Path(os.__file__).parent.glob("*.py"))[:40]:
        (corpus / f"{file.stem}.txt").write_text(file.read_text())
    shutil.copy(ROOT / "LICENSE", general / "license.txt")
    config = json.loads((ROOT / "configs" / "demo_llama" / "config.json").read_text())
    small = {"vocab_size": 512, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2}
    (model / "config.json").write_text(json.dumps({**config, **small}))
    name = "meta-llama/Meta-Llama-3-8B"

    def command(*words):
        found = readme_commands(*words)[0].replace("Meta-Llama-3-8B-mine", "model-mine")
        return found.replace("4096", "64").replace("--devices 4", "--devices 2")

    prepare = command("--input corpus/")
    out, _ = run(prepare.replace(f"--tokenizer {name}", "--train_tokenizer 512"), tmp_path)
    following = "python train.py --model_name NAME_OR_DIR --train_data_dir data/mine"
    assert "train" in out and f"Next: {following}" in out
    run(command("--input general/").replace(name, "data/mine/tokenizer"), tmp_path)
    flags = "--save_step_interval 10 --eval_step_interval 1 --eval_iters 1"
    train = command("train.py --devices 4 --model_name").replace(name, "model")
    train = re.sub(r"--(max_step 2000|eval_step_interval 50|save_step_interval 500)", "", train)
    out, _ = run(f"{train} {flags} --max_step 10 --strategy fsdp2", tmp_path)
    assert "Finished\nValidation loss: new " in out, "losses of steps are of other sources"
    resume = command("--resume true").replace("--devices 2", "--devices 1")
    out, _ = run(f"{resume} --max_step 13 --resume_override max_step", tmp_path)
    assert "resumed from checkpoints/model-mine/step-00000010" in out
    assert metrics(tmp_path / "checkpoints" / "model-mine", "step")[-1] == 13
    out, _ = run(command("export_hf.py ").split("--push_to_hub")[0], tmp_path)
    assert "Verified with plain transformers" in out
    assert "logits differ from those in training by" in out
    assert "Next: AutoModelForCausalLM.from_pretrained('hf/mine')" in out
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "hf" / "mine").config.vocab_size == 512
    run(command("fabric_llm.verify checkpoints"), tmp_path)
    # a checkpoint is a model to start from
    checkpoint = "checkpoints/model-mine/step-00000013"
    start = f"python train.py --model_name {checkpoint} --train_data_dir data/mine --max_step 1"
    out, _ = run(start, tmp_path)
    assert f"weights of {checkpoint}" in out
    assert (tmp_path / "checkpoints" / "model-mine-2" / "step-00000001").is_dir()


def test_an_end_with_words_prints_them_and_is_no_success(tmp_path):
    """SystemExit("text") of code of one's own."""
    code = (
        "import parse_arguments, runpy, sys; parse_arguments.parse_train = lambda argv: sys.exit("
        "'not here'); runpy.run_path(sys.argv[1], run_name='__main__')"
    )
    words = [sys.executable, "-c", code, ROOT / "train.py"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, "not here\n")


@pytest.mark.longer
def test_a_mistake_that_only_the_weights_show_ends_all_processes(toys, tmp_path):
    """Weights are read after the processes have started: still one sentence and exit code 2, and
    nobody hangs."""
    model = shutil.copytree(toys / "llama", tmp_path / "model")
    weights = stored(model)
    del weights["model.norm.weight"]
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    command = f"python train.py --devices 2 --model_name {model} --train_data_dir {toys / 'data'}"
    _, error = run(command, tmp_path, expected_code=2)
    sentences = [line for line in error.splitlines() if line.startswith("train.py: error:")]
    assert len(sentences) == 1 and "model.norm.weight" in sentences[0]
    assert "Traceback" not in error
