"""plan.py: what it says is right where that is known, what doesn't fit is told with what does, and
mistakes in one sentence."""

import io
import json
import shutil
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ended
from ranks import run_ranks
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, PreTrainedTokenizerFast

import plan
from benchmarks import published
from fabric_llm.base import register
from fabric_llm.base.machine import cores
from fabric_llm.forecast import changes, prediction, reads, trace
from fabric_llm.forecast.accelerators import KNOWN, accelerator, message_bytes
from fabric_llm.forecast.reads import ROW
from fabric_llm.model.strategy_rules import Placement, Sharding
from parse_arguments import parse_train
from plan_arguments import parse_plan
from prepare_arguments import PrepareArguments

ROOT = Path(__file__).parent.parent
DEFAULT_ROW = PrepareArguments.__dataclass_fields__["context_length"].default
SHORT = ("--context_length", "128", "--max_step", "10")
LARGE = ["--model_name", str(ROOT / "configs" / "models" / "llama3-70b")]
LARGE += "--devices 8 --device_memory 80GiB --context_length 8192".split()


def llama(toys, flags="", length=SHORT):
    """A command line for the toy model."""
    return ["--model_name", str(toys / "llama"), *length, *flags.split()]


def mistake(capsys, *words):
    """What plan.py says in one line, where it ends with the code of a mistake."""
    assert ended(plan.main, *words) == 2
    lines = capsys.readouterr().err.splitlines()
    [error] = [line for line in lines if "is given 2 times: " not in line]
    return f"{error}\n"


def assert_mistake(toys, capsys, words, sentence):
    error = mistake(capsys, *llama(toys, words))
    assert error.startswith(f"plan.py: error: {sentence}")


def captured(words, stream="stdout"):
    with redirect_stdout(io.StringIO()) as output, redirect_stderr(io.StringIO()) as errors:
        assert plan.main(words) == 0
    return (output if stream == "stdout" else errors).getvalue()


def printed(*words, stream="stdout"):
    """What a process of its own prints, as a plan's process group needs."""
    [text] = run_ranks(1, captured, [str(word) for word in words], stream)
    return text


def said(*words):
    """What --json says."""
    return json.loads(printed(*words, "--json", "true"))


def test_the_table_adds_up_and_steps_have_tokens_hours_and_a_price(toys):
    small = said(*llama(toys, "--devices 4 --tokens 4096 --price_per_hour 2", SHORT[:2]))
    parts = small["memory"]["parts"]
    assert sum(parts.values()) == small["memory"]["peak"] and small["fits"]
    assert parts["optimizer state"] == pytest.approx(2 * parts["parameters"], rel=0.01)
    # a quarter each, padded
    assert 4 * parts["parameters"] == pytest.approx(2 * small["parameters"], rel=0.05)
    assert small["tokens_a_step"] == 4 * 128 and small["steps"] == 8
    assert small["hours"] == pytest.approx(8 * small["seconds"]["step"] / 3600)
    assert small["price"] == pytest.approx(2 * 4 * small["hours"])


@pytest.mark.longer
def test_what_does_not_fit_is_told_with_a_command_that_does(toys):
    words = llama(toys, "--micro_batch_size 8 --accelerator cpu")
    whole = said(*words)["memory"]["peak"] / 2**30
    found = said(*words, "--device_memory", whole * 0.8)
    assert not found["fits"] and found["changes"][-1]["fits"]
    peaks = [one["memory"]["peak"] for one in (found, *found["changes"])]
    assert peaks == sorted(peaks, reverse=True)
    smaller = "--micro_batch_size 4 --gradient_accumulation_steps 2"
    assert found["changes"][0]["change"].startswith(smaller)
    *_, command = printed(*words, "--device_memory", whole * 0.8).splitlines()
    assert command.startswith("Next: python train.py --model_name")
    assert "device_memory" not in command


@pytest.mark.parametrize(
    ("used", "kept"), [([1.2, 0.9, 0.79, 0.5], 3), ([1.2, 0.9, 0.85], 2), ([1.3, 1.2, 1.1], 3)]
)
def test_changes_end_below_four_fifths_or_with_the_first_that_fits(toys, monkeypatch, used, kept):
    """used: after each change, the last after all others too."""
    predictions = [
        SimpleNamespace(
            used=part, fits=part <= 0.95, state_fits=True, memory=SimpleNamespace(peak=part)
        )
        for part in (2.0, *used)
    ]
    looks = iter(predictions[1:])
    monkeypatch.setattr(changes, "_attempt", lambda own, flags: next(looks, predictions[-1]))
    own, flags = parse_plan(llama(toys, "--micro_batch_size 4"))
    found = [one for _, one in changes.until_it_fits(own, flags, predictions[0])]
    assert found == predictions[1 : 1 + kept]


def test_micro_batches_of_any_size_become_smaller(toys):
    _, flags = parse_plan(llama(toys, "--micro_batch_size 45 --global_batch_size 90"))
    found = changes._of_activations(flags)
    sizes = [one["micro_batch_size"] for one in found if "micro_batch_size" in one]
    assert sizes == [15, 5, 1]
    _, flags = parse_plan(llama(toys, "--micro_batch_size 4 --global_batch_size 12"))
    found = [one for devices in changes.DEVICES for one in devices(flags)]
    assert [one["devices"] for one in found] == [2, 3, 4, 6, 8]
    assert [*changes._of_the_state(parse_plan(words := llama(toys, "--precision 32-true"))[1])]
    assert not [*changes._of_the_state(parse_plan([*words, "--resume", "auto"])[1])], "it stays"
    smaller = {one["global_batch_size"] for one in found if one["devices"] < 8}
    assert smaller == {12}, "smaller micro-batches keep the batch"


@pytest.mark.longer
def test_auto_finds_the_shortest_step_below_four_fifths(toys):
    words = llama(toys, "--global_batch_size 8 --accelerator cpu")
    roomy = ("--device_memory", 16, "--auto", "true")
    chosen = said(*words, *roomy)["chosen"]
    assert "micro_batch_size 8" in chosen and "activation_checkpointing none" in chosen
    errors = printed(*words, *roomy, stream="stderr")
    assert errors.count(" s a step") == 4, "micro-batches of 1, 2, 4 and 8"
    peak = said(*words, "--micro_batch_size", 4)["memory"]["peak"] / 2**30
    tight = ("--device_memory", peak / 0.79, "--auto", "true")
    found = said(*words, *tight)
    assert "micro_batch_size 4" in found["chosen"] and found["used"] <= 0.8
    text = printed(*words, *tight)
    assert text.splitlines()[-1].startswith("Next: python train.py")
    assert "--micro_batch_size 4 --gradient_accumulation_steps 2" in text and "--auto" not in text


@pytest.mark.longer
def test_auto_has_a_bound_and_says_that_nothing_fits(toys, monkeypatch):
    monkeypatch.setattr("fabric_llm.forecast.changes.MAX_TRIES", 3)
    words = llama(toys, "--devices 2 --strategy ddp --auto true --device_memory 0.001")
    assert "nothing takes less than 80 %" in printed(*words)
    assert printed(*words, stream="stderr").count(" s a step") == 3


@pytest.mark.longer
def test_the_demo_and_tokens_end_with_a_command_that_runs(toys):
    text = printed("--accelerator", "cpu")
    assert text.endswith("\nNext: python train.py --accelerator cpu\n") and "MiB" in text
    assert printed().endswith("\nNext: python train.py\n")
    assert "whole process" in text and "idle cores" in text
    assert "Warning: rows hold" not in text
    assert "Warning: rows hold 999 tokens, but" in printed(*llama(toys, "", ("--context_length", 999)))
    text = printed(*llama(toys, "--tokens 1e4", SHORT[:2]))
    assert text.endswith("--context_length 128 --max_step 79 --train_data_dir data/NAME\n")


SIZES = "configs/models/gpt2"  # a folder without weights
DATA = "--train_data_dir data/NAME"


@pytest.mark.parametrize(
    ("words", "warns", "command"),
    [
        # the preset names the model whose sizes were planned
        (f"--config configs/gpt2.yaml --model_name {SIZES}", "", f"--config configs/gpt2.yaml {DATA}"),
        (f"--config=configs/gpt2.yaml --model_name={SIZES} --train_data_dir d --json true", "", (
            "--config configs/gpt2.yaml --train_data_dir d"
        )),
        ("--config configs/gpt2.yaml", "", f"--config configs/gpt2.yaml {DATA}"),
        ("--config configs/gpt2.yaml --model_name other/model", "", (
            f"--config configs/gpt2.yaml --model_name other/model {DATA}"
        )),
        (f"--model_name {SIZES} --data_mix a=b:1", SIZES, f"--model_name {SIZES} --data_mix a=b:1"),
        (f"--model_name {SIZES} --tokens 9", SIZES, f"--model_name {SIZES} --max_step 700 {DATA}"),
        (f"--lr 9 --json true --model_name {SIZES} --lr=1e-4 --price_per_hour 2", SIZES, (
            f"--lr 1e-4 --model_name {SIZES} {DATA}"
        )),
        ("--config configs/demo.yaml", "configs/demo_llama", "--config configs/demo.yaml"),
        ("--devices 2", "", "--devices 2"),  # the demo
        ("--resume auto --model_name m", "", f"--resume auto --model_name m {DATA}"),
        ("--tokens 9", "--tokens counts, not the max_step 400 of a file.", "--max_step 700"),
        ("--num_nodes 2 --devices 4 --config configs/demo.yaml", "configs/demo_llama", (
            "--num_nodes 2 --devices 4 --config configs/demo.yaml"
        )),
    ],
)  # fmt: skip
def test_what_follows_trains_the_model_that_was_meant(words, warns, command, monkeypatch):
    monkeypatch.chdir(ROOT)
    own, flags = parse_plan(words.split())
    planned = SimpleNamespace(steps=700, row_tokens=9, positions=9)
    *warnings, last = plan.following(own, words.split(), flags, flags.model.model_name, planned)
    start = "Next: python"
    if "--num_nodes" in words:  # where each machine is given the same command
        start = "Next, on each machine: torchrun --nnodes 2 --nproc_per_node 4 --rdzv_backend c10d"
        start += " --rdzv_endpoint HOST:29400"
    assert last == f"{start} train.py {command}" and parse_train(command.split())
    sentence = f"Warning: {warns!r} holds no weights: training starts from random ones."
    if warns.startswith("--tokens"):
        sentence = f"Warning: {warns}"
    # Data that was typed, not that of a preset.
    absent = [one for one in warnings if "No dataset at" in one]
    assert len(absent) == ("--train_data_dir d" in words or "--data_mix" in words), warnings
    warnings = [one for one in warnings if one not in absent]
    assert warnings == [sentence] * bool(warns)


# What train.py says of data and flags: the beginning of a sentence.
UNTRAINABLE = {
    "--model_name {large} --train_data_dir {data} --tokens 9": "",
    "--model_name {small} --train_data_dir {data}": "'{data}' holds token id 130, but the voc",
    "--model_name {large} --train_data_dir {data} --context_length 9": "--context_length 9: the r",
    "--model_name {large} --train_data_dir {data} --global_batch_size 999": "A step takes 999 seq",
    "--model_name {large} --train_data_dir {data} --max_step 9 --profile 10:11": "--profile 10:11",
    "--model_name {large} --data_mix a={data}:1 --eval_data a={data}": "--eval_data: 'a' is eval",
    "--model_name {large} --train_data_dir {data} --eval_data a={text}": "'{text}' isn't a datas",
    "--model_name {small} --train_data_dir {missing}": "",  # which is elsewhere
    # Of the planned device, not of this machine's.
    "--model_name {large} --train_data_dir {data} --precision 16-mixed": "",
}


@pytest.mark.parametrize("words", UNTRAINABLE)
def test_a_plan_refuses_the_data_that_train_py_refuses(words, toys, tmp_path):
    config = json.loads((toys / "llama" / "config.json").read_text())
    for name, vocabulary in (("small", 130), ("large", 131)):
        (tmp_path / name).mkdir()
        config["vocab_size"] = vocabulary
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    (tmp_path / "text").mkdir()
    places = {"data": toys / "data"}
    places |= {name: tmp_path / name for name in ("small", "large", "text", "missing")}
    own, flags = parse_plan(words.format(**places).split())
    said = ""
    try:
        reads.require_trainable(own, flags, 3, flags.model.model_name)
    except ValueError as error:
        said = str(error)
    expected = UNTRAINABLE[words].format(**places)
    assert said.startswith(expected) and bool(said) == bool(expected)


@pytest.mark.longer
def test_it_ends_like_train_py_where_the_tokenizer_is_another(toys, tmp_path):
    """No command is printed that is refused."""
    for name, text in (("one", "a b c d"), ("other", "d c b a")):
        tokens = text.split()
        model = models.WordLevel({token: number for number, token in enumerate(tokens)}, "a")
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model))
        tokenizer.save_pretrained(tmp_path / name)
    shutil.copy(toys / "llama" / "config.json", tmp_path / "one")
    shutil.copytree(toys / "data", tmp_path / "data")
    (tmp_path / "other").rename(tmp_path / "data" / "tokenizer")
    ends = []
    for script in ("plan.py", "train.py"):
        words = ["--model_name", "one", "--train_data_dir", "data", "--max_step", "1"]
        done = subprocess.run(
            [sys.executable, ROOT / script, *words, "--accelerator", "cpu"],
            capture_output=True, text=True, cwd=tmp_path, timeout=120,
        )  # fmt: skip
        assert "Next:" not in done.stdout
        ends.append((done.returncode, done.stderr.splitlines()[-1].removeprefix(script)))
    assert ends[0] == ends[1] and ends[0][0] == 2 and "different tokenizer" in ends[0][1], ends


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--accelerator_name V100", "--accelerator_name 'V100' isn't known; known are A100-40GB, A100-"),
        ("--accelerator_name H20", "--accelerator_name 'H20' isn't known; known are A100-40GB, A100-"),
        ("--accelerator_name a100", (
            "--accelerator_name 'a100' isn't known. Did you mean A100-40GB or A100-80GB?"
        )),
        ("--accelerator_name RTX5900", "--accelerator_name 'RTX5900' isn't known. Did you mean RTX 5090?"),
        ("--accelerator_name H100-SXM", "--accelerator_name 'H100-SXM' isn't known. Did you mean H100?"),
        ("--accelerator cpu --accelerator_name H100", "--accelerator cpu and --accelerator_name H100 name"),
        ("--accelerator gpu --accelerator_name cpu", "--accelerator gpu and --accelerator_name cpu name"),
        ("--price_per_hour cheap", "--price_per_hour takes a number, not 'cheap'."),
        ("--price_per_hour -1", "--price_per_hour must be at least 0"),
        ("--device_memory 0", "--device_memory must be positive"),
        ("--device_memory 1.2.3GiB", "--device_memory takes GiB, such as 80 or 80GiB, not '1.2"),
        ("--devices 1000000", "--devices 1000000: these are the devices of one machine, at most 1,024 here."),
        ("--global_batch_size 3 --devices 2", "--global_batch_size 3 doesn't divide by"),
        ("--context_parallel 3 --devices 3", "--context_parallel 3: '"),
        ("--context_parallel 2 --devices 2 --context_length 33", (
            "--context_parallel 2: rows hold 33 tokens, which don't divide"
        )),
        ("--rope foo", "--rope takes theta:THETA"),
        ("--tokens 1e9", "--tokens and --max_step are both given: each is the run's length."),
        ("--like nowhere", "No run at 'nowhere' (from '/"),
        ("--mfu 45", "--mfu must be less than 1, such as 0.45, not 45"),
    ],
)
def test_mistakes_are_told_in_one_sentence(toys, capsys, words, sentence):
    assert_mistake(toys, capsys, words, sentence)


@pytest.mark.parametrize("nodes", [128, 256])
def test_a_plan_that_takes_minutes_says_so_first(capsys, monkeypatch, nodes):
    monkeypatch.setattr(changes, "predict", lambda own, flags: None)
    plan.predicted(None, SimpleNamespace(devices=SimpleNamespace(devices=8, num_nodes=nodes)))
    said = capsys.readouterr()
    assert said.out == "" and ("2,048 devices takes minutes" in said.err) == (nodes == 256)


@pytest.mark.longer
def test_memory_and_a_step_need_no_steps_and_no_dataset(toys, tmp_path, monkeypatch):
    words = ("--model_name", toys / "llama", "--price_per_hour", 2)
    found = said(*words)
    assert found["memory"]["peak"] > 0 and found["seconds"]["step"] > 0
    assert found["assumed"].startswith("rows of ")
    assert found["steps"] is found["hours"] is found["price"] is None
    text = printed(*words)
    assert "assumed: rows of " in text and "tokens/s, for --tokens or --max_step steps" in text
    assert said(*words, "--context_length", 64)["assumed"] == "" and ROW == DEFAULT_ROW
    monkeypatch.setitem(register.ONLY, "optimizer", None)
    assert "the state of AdamW for the optimizer of --code" in said(*words)["assumed"]
    pytest.importorskip("plotly", reason="plotly isn't installed: pip install -e '.[report]'")
    assert run_ranks(1, plan.main, [*map(str, words), "--html", str(tmp_path / "page.html")]) == [0]


def rows_of(folder, rows, context=128):
    folder.mkdir()
    manifest = {"packed": True, "context_length": context, "splits": {"train": {"rows": rows}}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


@pytest.mark.longer
def test_a_mixture_says_its_rows_and_its_steps(toys, tmp_path):
    new, old = rows_of(tmp_path / "new", 800), rows_of(tmp_path / "old", 9000)
    words = ("--model_name", toys / "llama", "--global_batch_size", 100)
    replayed = said(*words, "--train_data_dir", new, "--replay", old)
    assert (replayed["tokens_a_step"], replayed["steps"], replayed["assumed"]) == (12_800, 10, "")
    mixed = said(*words, "--data_mix", f"new={new}:0.5,old={old}:0.5")
    assert mixed["steps"] == 16 and mixed["hours"] > 0
    missing = said(*words, "--data_mix", f"new={new}:0.5,old={tmp_path / 'none'}:0.5")
    assert missing["steps"] is None and missing["tokens_a_step"] == 100 * 128


@pytest.mark.parametrize(
    ("given", "gib"), [("80", 80), ("80GiB", 80), (".5TiB", 512), ("1.5TiB", 1536), ("80GB", 80e9 / 2**30)]
)
def test_device_memory_with_its_unit(given, gib):
    for words in (["--device_memory", given], [f"--device_memory={given}"]):
        own, _ = parse_plan(["--model_name", "x", *words])
        assert own.device_memory == pytest.approx(gib, rel=1e-5)


def test_json_and_auto_alone_mean_true(toys):
    own, flags = parse_plan(["--json", "--model_name", "x", "--auto", "--max_step", "3"])
    assert own.json and own.auto and flags.training.max_step == 3
    assert not parse_plan(["--model_name", "x", "--json", "false"])[0].json


@pytest.mark.longer
def test_a_step_takes_the_time_to_tell_a_device_what_to_do(toys):
    seconds = said(*llama(toys))["seconds"]
    assert seconds["step"] == seconds["launch"] > 1e-3 > seconds["compute"]
    twice = said(*llama(toys, "--gradient_accumulation_steps 2"))["seconds"]
    assert 1.5 < twice["launch"] / seconds["launch"] < 2
    assert "telling the device what to do" in printed(*llama(toys))


@pytest.mark.longer
def test_remedies_of_a_large_model_take_few_layers(monkeypatch):
    """Each is traced with nine layers, of 80."""
    [counts] = run_ranks(1, layers_traced, [*LARGE, "--json"])
    assert counts and set(counts) == {4, 5}


@pytest.mark.longer
def test_more_nodes_help_where_the_state_leaves_no_room():
    """Before anything is recomputed, and also where the batch isn't given, which then grows."""
    found = said(*LARGE)["changes"]
    assert found[0]["change"].startswith("--num_nodes 2") and found[-1]["used"] <= 0.8


def layers_traced(words):
    counts, begin = [], trace.Layers.__init__

    def counted(self, *given):
        begin(self, *given)
        counts.append(len(self.layers))

    trace.Layers.__init__ = counted
    captured(words)
    return counts


def test_times_are_of_the_unit_that_people_read():
    hours = (0.24 / 3600, 45 / 3600, 1.5 / 60, 3.25)
    assert [*map(plan.lasting, hours)] == ["0.24 seconds", "45 seconds", "1.5 minutes", "3.25 hours"]


def test_names_of_accelerators_as_people_write_them():
    assert accelerator("nvidia h100") == accelerator("H100")
    assert accelerator("rtx4090").name == "RTX 4090"
    assert all(accelerator(one.name) is one for one in KNOWN)
    assert accelerator("A100-40GB").tflops(8) == accelerator("A100-80GB").tflops(1) == 312
    assert {one.name for one in KNOWN if one.tflops(1) < 100} == {"CPU"}


@pytest.mark.longer
def test_the_speed_of_a_run(tmp_path, capsys):
    """Twice the median of its steps but the first are twice as fast, and what was recomputed
    counts."""
    words = ["--model_name", str(ROOT / "configs" / "demo_llama"), *SHORT, "--accelerator", "cpu"]
    (tmp_path / "arguments.yaml").write_text("activation_checkpointing: full\n")
    assert "has no speed of two logged steps," in mistake(capsys, *words, "--like", tmp_path)
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step, speed in ((1, 9.0), (2, 0.1), (3, 0.15), (4, 0.3), (5, None)):
            print(json.dumps({"step": step, "model_tflops_per_device": speed}), file=file)
    given = said(*words, "--mfu", 0.4)["seconds"]
    like = said(*words, "--like", tmp_path)["seconds"]
    faster = 0.15 * 4 / 3 / (0.4 * 0.125 * cores())
    assert given["compute"] / like["compute"] == pytest.approx(faster)
    # A CPU asks and computes one after the other; a measured speed is of both.
    assert given["step"] == given["compute"] + given["launch"] > given["compute"]
    assert like["step"] == like["compute"]
    # Another start, such as on other devices: it alone counts once it has two logged steps.
    with (tmp_path / "events.jsonl").open("w") as file:
        print(json.dumps({"event": "resumed", "step": 4}), file=file)
    assert said(*words, "--like", tmp_path)["seconds"] == like
    with (tmp_path / "metrics.jsonl").open("a") as file:
        for step, speed in ((6, 9.0), (7, 0.3)):
            print(json.dumps({"step": step, "model_tflops_per_device": speed}), file=file)
    later = said(*words, "--like", tmp_path)["seconds"]
    assert like["compute"] / later["compute"] == pytest.approx(2)
    assert "take one of them" in mistake(capsys, *words, "--like", tmp_path, "--mfu", 0.4)
    (tmp_path / "arguments.yaml").unlink()
    assert "or its arguments.yaml no" in mistake(capsys, *words, "--like", tmp_path)


@pytest.mark.longer
def test_the_peak_of_a_device_is_of_what_is_not_offloaded(toys):
    words = llama(toys, "--context_length 4096 --micro_batch_size 4 --loss full")
    words += ["--strategy", "fsdp2", "--activation_checkpointing", "full"]
    plain, offloaded = said(*words), said(*words, "--cpu_offload", "true")
    # of so small a model activations are the peak
    assert plain["memory"]["moment"] == offloaded["memory"]["moment"]
    gone = {trace.PARAMETERS, trace.GRADIENTS, trace.OPTIMIZER}
    assert not gone & offloaded["memory"]["parts"].keys()
    assert offloaded["host_bytes"]["offloaded"] > 0

    def rest(found):
        parts = found["memory"]["parts"].items()
        return sum(size for name, size in parts if name not in gone and "assumed" not in name)

    assert rest(plain) == rest(offloaded)
    # The model in which modules to tile are looked for is no part of what is offloaded.
    words += ["--devices", 8, "--accelerator_name", "H100", "--cpu_offload", "true"]
    plain, tiled = (said(*words, "--tiled_mlp", given) for given in ("false", "true"))
    assert plain["host_bytes"]["offloaded"] == tiled["host_bytes"]["offloaded"]


@pytest.mark.longer
def test_steps_of_epochs_and_kept_checkpoints(toys, tmp_path):
    data = rows_of(tmp_path / "data", 199)
    words = ("--model_name", toys / "llama", "--train_data_dir", data, "--global_batch_size", 100)
    found = said(*words, "--number_epochs", 3)
    assert found["steps"] == 6 and found["tokens"] == 597 * 128, "the last step with 97 rows"
    # 49 divides the 1,421 rows, and 203 / 49 * 7 as a float is above 29.
    seven = ("--number_epochs", 7, "--global_batch_size", 49)
    other = rows_of(tmp_path / "other", 203)
    assert said(*words[:2], "--train_data_dir", other, *seven)["steps"] == 29
    saves = ("--max_step", 10_000, "--save_step_interval", 100, "--keep_last", 2)
    assert said(*words, *saves)["kept_checkpoints"] == 3
    assert said(*words, *saves, "--keep_every", 500)["kept_checkpoints"] == 23
    # Steps 9,900 and 10,000 were due, 10,050 is the newest, and an older one may be the best.
    assert said(*words, *saves, "--max_step", 10_050)["kept_checkpoints"] == 4


@pytest.mark.longer
def test_a_stage_of_longer_rows_is_planned_with_its_own_steps(toys, tmp_path):
    """The plan took all steps for those of the longest rows, and said up to as many times the
    tokens, the hours and the money as rows are longer."""
    short, long = rows_of(tmp_path / "short", 400), rows_of(tmp_path / "long", 400, 256)
    mix = tmp_path / "mix.yaml"
    mix.write_text(
        f"sources: {{short: {{path: {short}, weight: 1}}, long: {{path: {long}}}}}\n"
        "stages: [{from: 0.8, weights: {long: 1}}]\n"
    )
    words = ("--model_name", toys / "llama", "--global_batch_size", 10, "--price_per_hour", 2)
    mixed = (*words, "--data_mix", mix)
    tokens = 32 * 10 * 128 + 8 * 10 * 256
    found = said(*mixed, "--max_step", 40)
    assert found["tokens"] == tokens
    assert said(*mixed, "--tokens", tokens)["steps"] == 40
    # By the two lengths apart, each with the steps that it has.
    of_each = [
        said(*words, "--train_data_dir", folder, "--max_step", steps)
        for folder, steps in ((short, 32), (long, 8))
    ]
    for number in ("hours", "price"):
        assert found[number] == pytest.approx(sum(one[number] for one in of_each), rel=1e-3)
    # What is read once of each is the length of an epoch: 400 rows of the short ones are 40 steps.
    assert said(*mixed, "--number_epochs", 1)["tokens"] == 40 * 10 * 128 + 10 * 10 * 256


@pytest.mark.parametrize(
    ("words", "most"),
    [
        ("", 1),
        ("--save_step_interval 100", None),
        ("--save_step_interval 100 --keep_last 3", 4),
        ("--save_step_interval 100 --keep_last 3 --keep_best 0", 3),
        ("--save_step_interval 100 --keep_last 3 --keep_every 500", None),
        ("--save_step_interval 100 --keep_last 3 --forgetting_action rewind", 5),
    ],
)
def test_a_run_of_unknown_length_keeps_as_many_checkpoints_as_a_long_one(words, most):
    flags = parse_train(["--model_name", "m", "--train_data_dir", "d", *words.split()])
    assert prediction._kept_checkpoints(flags, None) == most
    if most is not None:
        assert prediction._kept_checkpoints(flags, 10_000) == most


@pytest.mark.longer
def test_what_waits_on_the_host_is_planned_there(toys, tmp_path):
    """Not in the device's memory, however many layers there are; a CPU's is the same as before."""
    config = LlamaConfig.from_pretrained(toys / "llama")
    words = ["--model_name", tmp_path, "--max_step", 10, "--context_length", 8192]
    words += ["--global_batch_size", 8, "--micro_batch_size", 8, "--activation_checkpointing"]
    found = {}
    for layers in (8, 16):
        config.num_hidden_layers = layers
        config.save_pretrained(tmp_path)
        for how in ("full", "offload"):
            found[how, layers] = said(*words, how)
    inputs = 8 * 8192 * config.hidden_size * 2  # bytes of one layer
    grows = {
        how: found[how, 16]["memory"]["peak"] - found[how, 8]["memory"]["peak"]
        for how in ("full", "offload")
    }
    assert grows["full"] - grows["offload"] == pytest.approx(8 * inputs, rel=0.05)
    for layers in (8, 16):
        assert found["offload", layers]["host_bytes"]["inputs of layers"] == layers * inputs
    assert "inputs of layers" not in found["full", 8]["host_bytes"]


def test_bytes_that_are_sent():
    def sent(strategy, how, devices, nodes):
        placement = Placement(strategy, Sharding(sharding_strategy=how), devices, nodes, "cuda")
        return message_bytes(placement, 200, 400, 1, 1)

    assert sent("single", "FULL_SHARD", 1, 1) == (0, 0)
    assert sent("fsdp", "FULL_SHARD", 4, 1) == (0.75 * (2 * 200 + 400), 0)
    assert sent("fsdp2", "SHARD_GRAD_OP", 4, 2) == (0.75 * 600, 0.5 * 600)
    assert sent("fsdp", "HYBRID_SHARD", 4, 2) == (0.75 * 800, 0.5 * 800)
    assert sent("ddp", "FULL_SHARD", 2, 1) == (400, 0)


def test_published_runs_are_those_of_the_page():
    """docs/results/plan.md has the runs that benchmarks/published.py plans."""
    runs = [run for run in published.published() if run.counted != "speed"]
    page = (ROOT / "docs/results/plan.md").read_text()
    for run in runs:
        words = run.run, run.source, run.counted, run.other, run.published
        assert f"| {' | '.join(map(str, words))} |" in page, run
    assert len(runs) >= 16 and {run.counted for run in runs} == set(published.NOT_COUNTED)
    assert all(run.run.partition(",")[0] in published.SHAPES for run in runs)
    assert all(run.flags.startswith("--precision ") for run in runs)


def test_what_a_matrix_product_has_made_is_forgotten_with_it():
    """A compiled layer keeps what products have made, and a later storage may have the address of
    one that is gone."""
    from fabric_llm.forecast.compiled import Products

    with Products(None) as products:
        given = torch.ones(64, 64)
        for _ in range(20):
            product = given @ given
            assert product.untyped_storage()._cdata in products.storages
            del product
            total = torch.zeros(64, 64)
            assert total.untyped_storage()._cdata not in products.storages
