"""Command line and YAML -> arguments; and what is computed from numbers alone: learning rate,
groups, clipping."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import torch
from conftest import CONTEXT
from ranks import metrics, toy_run, train_ranks
from torch import nn
from transformers import AutoModelForCausalLM

from arguments import DEMO_CONFIG, ROOT, PlanArguments, TrainingArguments
from export_hf import ExportArguments, parse_export
from fabric_llm.base.command_line import CONFIG
from fabric_llm.base.flag import declared
from fabric_llm.base.plain_yaml import write_yaml
from fabric_llm.plan.make_plan import make_plan
from fabric_llm.plan.start import place
from fabric_llm.run.trackers import TRACKERS
from fabric_llm.training.adamw import AdamW, decayed_names, parameter_groups
from fabric_llm.training.schedule import DECAYS, lr_at
from fabric_llm.training.step import clip_gradients
from parse_arguments import not_here, parse_train
from prepare_arguments import PrepareArguments, parse_prepare

FLAGS = {  # the contract: design, section 4
    "Devices": "devices num_nodes accelerator tpu",
    "Data": "train_data_dir context_length",
    "Model": "model_name precision",
    "FSDP": "strategy auto_wrap_policy sharding_strategy state_dict_type limit_all_gathers "
    "cpu_offload backward_prefetch "
    "activation_checkpointing",
    "Checkpoint": "output_dir run_name resume checkpoint",
    "Training": "number_epochs max_step micro_batch_size gradient_accumulation_steps "
    "global_batch_size grad_clip lr min_lr "
    "lr_decay lr_schedule warmup_steps weight_decay beta1 beta2 seed",
    "Evaluation": "eval_batch_size eval_iters eval_step_interval",
    "Save": "save_step_interval keep_last",
    "Logging": "logger entity project log_model",
}
MODEL_AND_DATA = ["--model_name", "m", "--train_data_dir", "d"]


def flat(*argv):
    return parse_train([str(word) for word in argv]).flat()


# ------------------------------------------------------------------------------- help


def help_of(script, *words, code=0, **variables):
    """(text, modules that were imported) of `script --help WORDS`."""
    program = (
        f"import runpy, sys\nsys.argv = {[script, '--help', *words]!r}\ntry:\n    "
        f"runpy.run_path({script!r}, run_name='__main__')\nfinally:\n    "
        "print('\\n'.join(sys.modules), file=sys.stderr)\n"
    )
    environment = {**os.environ, "COLUMNS": "80", **variables}
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == code, done.stderr
    return done.stdout, set(done.stderr.split())


@pytest.mark.parametrize("script", ["train.py", "plan.py", "prepare_data.py", "export_hf.py"])
def test_help_imports_nothing_heavy(script):
    text, modules = help_of(script)
    assert "--config" in text and text.startswith(f"usage: python {script} ")
    heavy = "torch transformers lightning datasets numpy pyarrow wandb tokenizers huggingface_hub"
    assert not modules & set(heavy.split())


def entries_of_help(script="train.py", *words):
    """{(group, flag): its entry in one line} of `script --help WORDS`, which shows flags in
    full."""
    group, flag, entries = "", None, {}
    # without what the program does
    for line in help_of(script, *words)[0].splitlines()[2 * (words == ("all",)) :]:
        if line and not line.startswith(" "):
            group = line.split(" (")[0]
        elif line.startswith("  --"):
            flag = line.split()[0].removeprefix("--")
            entries[group, flag] = " ".join(line.split())
        elif line:
            entries[group, flag] += " " + line.strip()
    return entries


def test_help_all_lists_every_flag_in_its_group():
    found = [pair for pair in entries_of_help("train.py", "all") if pair[1] != "config"]
    for group, flags in FLAGS.items():
        assert not {(group, flag) for flag in flags.split()} - set(found), group
    assert sorted(flag for _, flag in found) == sorted(flat(*MODEL_AND_DATA)), "each flag once"


@pytest.mark.quick_cases(r"-80")
@pytest.mark.parametrize("columns", [20, 80, 100, 300])
@pytest.mark.parametrize(("script", "most_lines"), [("train.py", 42), ("plan.py", 48)])
def test_the_short_help_has_a_line_for_each_flag_of_a_first_run(script, most_lines, columns):
    """Whole clauses that fit the terminal, from 80 columns on; a wider one gets more of them."""
    text, _ = help_of(script, COLUMNS=str(columns))
    flags = parse_train(MODEL_AND_DATA).declared() | declared(PlanArguments) | {"config": CONFIG}
    lines = text.splitlines()
    assert len(lines) <= most_lines and max(map(len, lines)) < max(columns, 80)
    shown = {}
    for line in lines:
        if found := re.match(r"  --(\w+) (\S*) +(.*)", line):
            shown[found[1]] = found[2]
            rest = flags[found[1]].help.removeprefix(found[3])
            assert flags[found[1]].help == found[3] + rest
            assert re.match(r"$|; | \(.*?\)(;|$)", rest), line
            assert found[3].count("(") == found[3].count(")"), line
    own = set(declared(PlanArguments))
    assert set(shown) - own == {name for name, one in flags.items() if one.basic} - own
    assert bool(set(shown) & own) == (script == "plan.py")
    assert 25 <= len(shown) <= 35 and "--devices 4 --model_name" in lines[0]
    assert (shown["lr"], shown["activation_checkpointing"]) == ("2e-05", "none")
    assert shown["model_name"] == ""
    more = sum(not one.basic for one in declared(TrainingArguments).values())
    assert f"Training ({more} more: --help training)" in lines


@pytest.mark.quick_cases(r"FSDP|plan")
@pytest.mark.parametrize("word", ["fsdp", "FSDP", "--fsd", "trainin", "Trainning", "nan", "plan"])
def test_help_of_a_group_shows_its_flags_alone(word):
    group = {"t": "Training", "n": "NaN and spikes", "p": "Plan"}.get(word[0].lower(), "FSDP")
    everything = entries_of_help("plan.py", "all").items()
    expected = {pair: said for pair, said in everything if pair[0] == group}
    assert entries_of_help("plan.py", word) == expected


def test_help_of_any_flag_shows_it(capsys):
    """By its name, with dashes or without, and by its name in other trainers."""
    flags = parse_train(MODEL_AND_DATA).declared()
    for name, one in flags.items():
        aliases = [f"--{other}" for other in one.aliases.split()]
        for word in (name, f"--{name}", f"--{name}=1", *aliases):
            with pytest.raises(SystemExit) as exit:
                parse_train(["--help", word])
            said = capsys.readouterr().out
            assert exit.value.code == 0 and f"\n  --{name}  (" in said, word
            assert said.count("\n  --") == 1 or word == name, word


def test_help_of_a_flag_says_all_that_is_declared(capsys):
    flags = parse_train(MODEL_AND_DATA).declared()
    for (_, name), entry in entries_of_help("train.py", *(f"--{name}" for name in flags)).items():
        one = flags[name]
        assert one.help in entry and one.values in entry
        default = f"; default: {str(one.default).lower()})"
        assert one.default is None or default in entry.lower()
        names = one.aliases.replace(" ", ", ")
        assert not names or entry.endswith(f"In other trainers: {names}.")
        assert all(f"--{need.split()[0]} " in entry for need in one.needs.split(",") if need)
        resumed = {
            "changes it only by --resume_override": one.belongs_to_run,
            "may change it": one.resume == "free",
            "keeps it": one.resume == "never",
        }
        said = [words for words in resumed if f"A resumed run {words}." in entry]
        assert said == [words for words, holds in resumed.items() if holds], entry
    beta1 = "--beta1 (a number, at least 0, below 1; default: 0.9)"
    assert entries_of_help("train.py", "beta1")["Training", "beta1"].startswith(beta1)
    of_plan = entries_of_help("plan.py", "plan").values()
    assert not [entry for entry in of_plan if "A resumed run" in entry]


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("lrr", "Did you mean --lr?"),
        ("--save_steps_interval", "--save_step_interval?"),
        ("xyz", "See --help."),
    ],
)
def test_help_of_what_isnt_there_is_a_mistake(words, meant, capsys):
    with pytest.raises(SystemExit) as exit:
        parse_train(["--help", words])
    said = capsys.readouterr().err
    assert exit.value.code == 2 and len(said.splitlines()) == 1
    assert repr(words) in said and meant in said


def test_help_answers_before_anything_else_is_read(capsys):
    for argv in ("--config nowhere.yaml -h", "--lr fast --help", "-h=lr,devices", "--help=all"):
        with pytest.raises(SystemExit) as exit:
            parse_train(argv.split())
        assert exit.value.code == 0 and "--devices" in capsys.readouterr().out


@pytest.mark.parametrize("script", ["train.py", "plan.py", "prepare_data.py"])
def test_help_outlasts_its_reader(script):
    reader, writer = os.pipe()
    os.close(reader)
    words = [sys.executable, script, "--help", "all"]
    pipes = {"stdout": writer, "stderr": subprocess.PIPE}
    done = subprocess.run(words, cwd=ROOT, **pipes, text=True, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_names_of_other_trainers_lead_to_flags():
    flags = parse_train(MODEL_AND_DATA).declared()
    names = [*flags, *(word for one in flags.values() for word in one.aliases.split())]
    assert len(names) == len(set(names)), "each leads to one thing"


def test_what_a_flag_needs_are_flags_and_their_values():
    flags = parse_train(MODEL_AND_DATA).declared()
    for name, one in flags.items():
        for needed, *values in (need.split() for need in one.needs.split(",") if need):
            assert needed in flags, name
            known = (*get_args(flags[needed].type), "true", "false", "none", *TRACKERS)
            assert set(values) <= {str(word).lower() for word in known}, name


# ---------------------------------------------------------------------------- command line and YAML


@pytest.mark.parametrize("order", ["first", "last", "equals"])
def test_the_command_line_wins_wherever_config_stands(tmp_path, order):
    config = tmp_path / "mine.yaml"
    config.write_text("model_name: m\ntrain_data_dir: d\nlr: 1e-4\nseed: 7\n")
    given = {
        "first": ["--config", config, "--lr", 3],
        "last": ["--lr", 3, "--config", config],
        "equals": ["--lr", 3, f"--config={config}"],
    }
    values = flat(*given[order])
    assert (values["lr"], values["seed"]) == (3.0, 7)
    assert (values["model_name"], values["beta1"]) == ("m", 0.9)


@pytest.mark.parametrize("text", ["2e-5", "2.0e-5", "2E-5", "'2e-5'"])
def test_numbers_in_yaml_are_numbers(tmp_path, text):
    """YAML 1.1 reads 2e-5, without a point, as text."""
    config = tmp_path / "mine.yaml"
    config.write_text(f"lr: {text}\nwarmup_steps: 10\nweight_decay: 0\n")
    values = flat(*MODEL_AND_DATA, "--config", config)
    assert values["lr"] == 2e-5 and type(values["lr"]) is float
    assert values["warmup_steps"] == 10 and type(values["warmup_steps"]) is int
    assert values["weight_decay"] == 0 and type(values["weight_decay"]) is float


def test_values_on_the_command_line():
    words = "--lr=2e-5 --tpu true --lr_decay=false --keep_last null --devices 3"
    values = flat(*MODEL_AND_DATA, *words.split())
    names = ("lr", "tpu", "lr_decay", "keep_last", "devices")
    assert [values[name] for name in names] == [2e-5, True, False, None, 3]
    assert flat(*MODEL_AND_DATA, "--devices", "auto")["devices"] == "auto"
    assert flat(*MODEL_AND_DATA, "--run_name", "007")["run_name"] == "007", "a name is text"


@pytest.mark.parametrize(
    "text", ["# Introduction", "---", "#", "null and void", "yes", "1e3", "[a]", "a: b", "%", ""]
)
def test_text_stays_text_whatever_yaml_would_read(text):
    assert flat(f"--run_name={text}", *MODEL_AND_DATA)["run_name"] == text
    prepare = parse_prepare(["--input", "x", "--output", "y", f"--document_separator={text}"])
    assert prepare.document_separator == text


@pytest.mark.parametrize(
    "flag", ["--max_hours=1:30", "--lr=1:30", "--save_step_interval=1:00", "--max_step=0x10"]
)
def test_what_yaml_1_1_takes_for_a_number_is_none(flag, capsys):
    with pytest.raises(SystemExit) as exit:
        parse_train([flag, "--model_name", "m", "--train_data_dir", "d"])
    assert exit.value.code == 2 and "takes a" in capsys.readouterr().err


def test_values_in_yaml(tmp_path):
    config = tmp_path / "mine.yaml"
    given = "{tpu: true, lr_decay: false, keep_last: null, devices: auto, run_name: '7'"
    config.write_text(f"{given}, backward_prefetch: none}}")
    values = flat(*MODEL_AND_DATA, "--config", config, "--keep_last", 2)
    names = ("tpu", "lr_decay", "keep_last", "devices", "run_name", "backward_prefetch")
    assert [values[name] for name in names] == [True, False, 2, "auto", "7", "none"]


def test_scripts_beside_train():
    prepare = parse_prepare(["--input", "a", "b", "--output", "o", "--train_tokenizer", "4096"])
    assert (prepare.input, prepare.train_tokenizer, prepare.tokenizer) == (["a", "b"], 4096, None)
    export = parse_export(["checkpoints/run", "--output", "hf"])
    assert (export.checkpoint, export.output) == ("checkpoints/run", "hf")
    assert (export.dtype, export.private) == ("auto", True)
    for words in ("--output hf --checkpoint c", "c --output hf", "--output hf c"):
        assert parse_export(words.split()).checkpoint == "c"


def test_flags_of_export_hf_are_named_where_they_are_given_to_train():
    for name, flag in declared(ExportArguments).items():
        others = {"checkpoint"}
        for of_prepare, one in declared(PrepareArguments).items():
            others |= {of_prepare, *one.aliases.split()}
        for word in {name, *flag.aliases.split()} - others:
            assert not_here()[word] == f"it is --{name} of export_hf.py"


@pytest.mark.parametrize(
    "argv", [["--output", "hf"], ["run"], ["run", "--output"], ["run", "run", "--output", "hf"]]
)
def test_export_without_what_it_needs(argv, capsys):
    with pytest.raises(SystemExit) as exit:
        parse_export(argv)
    assert exit.value.code == 2 and len(capsys.readouterr().err.strip().splitlines()) == 1


# ------------------------------------------------------------------------------- presets


def test_the_demo_applies_only_to_a_bare_command(tmp_path):
    demo = parse_train(["--max_step", "3", "--seed=5"])
    training = demo.training
    assert demo.demo and (training.max_step, training.seed, training.lr) == (3, 5, 5e-3)
    model = Path(demo.model.model_name)
    assert model == ROOT / "configs" / "demo_llama", "also when started elsewhere"
    config = tmp_path / "mine.yaml"
    config.write_text("seed: 7\n")
    for words in ("--model_name m", "--model_name=m", "--train_data_dir d", f"--config {config}"):
        given = parse_train(words.split())
        assert not given.demo and given.training.lr == 2e-5, words
    assert not parse_train(["--config", str(DEMO_CONFIG)]).demo


# ------------------------------------------------------------------------------- arguments.yaml


@pytest.fixture(scope="module")
def finished(toys, tmp_path_factory):
    """The output folder of a finished run `first` of four steps."""
    output = tmp_path_factory.mktemp("finished")
    flags = "--run_name first --max_step 4 --lr 1e-2 --warmup_steps 1 --micro_batch_size 2 "
    flags += "--gradient_accumulation_steps 2 --save_step_interval 2 --eval_iters 2"
    train_ranks(1, *toy_run(toys, output, model="gpt2"), *flags.split())
    return output


def test_arguments_yaml_repeats_the_run(finished):
    train_ranks(1, "--config", finished / "first" / "arguments.yaml", "--run_name", "again")
    for key in ("step", "loss", "grad_norm", "lr", "tokens", "eval_loss"):
        assert metrics(finished / "again", key) == metrics(finished / "first", key), key
    again, first = ((finished / name / "arguments.yaml").read_text() for name in ("again", "first"))
    assert again == first


def test_flags_of_an_earlier_version_stay_in_the_arguments_of_its_run(tmp_path, capsys):
    text = "model_name: org/model\ntrain_data_dir: data\ncompare_plan: auto\n"
    for name in ("arguments.yaml", "mine.yaml"):
        (tmp_path / name).write_text(text)
    assert flat("--config", tmp_path / "arguments.yaml")["model_name"] == "org/model"
    with pytest.raises(SystemExit):
        parse_train(["--config", str(tmp_path / "mine.yaml")])
    assert "line 3: unknown key 'compare_plan'" in capsys.readouterr().err


@pytest.mark.longer
def test_arguments_yaml_repeats_the_run_on_other_ranks(finished):
    """It holds the global batch, not how one number of devices came by it."""
    flags = "--run_name two --micro_batch_size 1 --strategy ddp --precision 32-true"
    train_ranks(2, "--config", finished / "first" / "arguments.yaml", *flags.split())
    for name in ("first", "two"):
        assert metrics(finished / name, "tokens") == [4 * CONTEXT * k for k in (1, 2, 3, 4)]


@pytest.mark.longer
def test_a_run_that_gave_only_accumulation_goes_on_on_more_devices(toys, tmp_path):
    flags = "--run_name run --gradient_accumulation_steps 4 --max_step 2"
    train_ranks(1, *toy_run(toys, tmp_path), *flags.split())
    more = ("--max_step", 4, "--resume_override", "max_step", "--strategy", "ddp")
    train_ranks(2, "--resume", "true", "--run_name", "run", "--output_dir", tmp_path, *more)
    assert metrics(tmp_path / "run", "tokens") == [4 * CONTEXT * k for k in (1, 2, 3, 4)]


def test_the_demo_on_many_devices_says_the_micro_batch_that_it_takes(toys, tmp_path):
    """configs/demo.yaml asks for more than 4 devices can take of its global batch; the run must be
    repeatable."""
    demo = parse_train(["--devices", "4", "--output_dir", str(tmp_path)])
    demo.model.model_name, demo.data.train_data_dir = str(toys / "llama"), str(toys / "data")
    demo.data.context_length, demo.training.max_step = None, 1
    plan = make_plan(demo, place(demo), tmp_path / "run", None)
    write_yaml({**demo.kept(), **plan.resolved()}, tmp_path / "arguments.yaml")
    repeated = parse_train(["--config", str(tmp_path / "arguments.yaml")])
    again = make_plan(repeated, place(repeated), tmp_path / "again", None)
    assert again.schedule.micro_batch_size == plan.schedule.micro_batch_size < 4
    assert again.schedule.global_batch_size == plan.schedule.global_batch_size


def test_a_resumed_run_goes_on_with_its_own_arguments(finished):
    named = ["--resume", "true", "--run_name", "first", "--output_dir", str(finished)]
    arguments = parse_train([*named, "--max_step", "9", "--micro_batch_size=4"])
    training = arguments.training
    assert not arguments.demo and (training.lr, training.global_batch_size) == (1e-2, 4)
    assert (training.max_step, training.micro_batch_size) == (9, 4)
    assert arguments.checkpoint.resume and arguments.checkpoint.run_name == "first"
    checkpoint = str(finished / "first" / "step-00000002")
    by_path = parse_train(["--resume=true", "--checkpoint", checkpoint])
    assert by_path.training.lr == 1e-2 and by_path.checkpoint.checkpoint == checkpoint
    # A mistyped name must not begin the demo under it.
    assert not parse_train(["--resume", "auto", "--run_name", "unknown"]).demo
    assert parse_train(["--resume", "false", *named[2:]]).demo


def progress(finished, step):
    folder = finished / "first" / f"step-{step:08d}"
    return json.loads((folder / "trainer" / "progress.json").read_text())


def test_a_flag_belongs_to_the_run_unless_it_says_otherwise(finished):
    """What a checkpoint holds is what --resume_override may change; the rest is free, or can't
    change at all."""
    flags = parse_train(MODEL_AND_DATA).declared()
    document = progress(finished, 2)
    unused = {"data_mix", "ema_device", "ema_every"}  # without a mixture, and without an average
    of_runs = {name for name, one in flags.items() if one.belongs_to_run}
    assert set(document["schedule"]) | unused == of_runs
    never = {name for name, one in flags.items() if one.resume == "never"}
    assert never <= document["fixed"].keys()
    both = [name for name, one in flags.items() if one.resume != "override" and not one.kept]
    assert not both, "one of them"


# ------------------------------------------------------------------------------- learning rate


SCHEDULE = {"max_step": 100, "lr": 1.0, "min_lr": 0.1, "warmup_steps": 10}


@pytest.mark.parametrize("shape", ["cosine", "linear"])
def test_lr_warms_up_then_falls_to_min_lr(shape):
    rates = [lr_at(step, **SCHEDULE, lr_schedule=shape) for step in range(100)]
    assert rates[:10] == pytest.approx([(k + 1) / 10 for k in range(10)]), "no step at 0"
    assert rates[10] == 1.0
    assert all(a > b for a, b in zip(rates[10:], rates[11:])), "each step less than the one before"
    assert 0.1 < rates[99] < 0.12
    assert lr_at(55, **SCHEDULE, lr_schedule=shape) == pytest.approx(0.55), "half-way"
    after = [lr_at(step, **SCHEDULE, lr_schedule=shape) for step in (100, 101, 10**6)]
    assert after == pytest.approx([0.1] * 3)


def test_lr_is_the_formula():
    for step in (10, 20, 77):
        done = (step - 10) / 90
        cosine = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done))
        assert lr_at(step, **SCHEDULE) == pytest.approx(cosine)
        linear = 0.1 + 0.9 * (1 - done)
        assert lr_at(step, **SCHEDULE, lr_schedule="linear") == pytest.approx(linear)


def test_lr_without_decay_or_warmup():
    rates = [lr_at(step, **SCHEDULE, lr_decay=False) for step in (0, 9, 10, 99, 10**6)]
    assert rates == [0.1, 1.0, 1.0, 1.0, 1.0]
    assert lr_at(0, **{**SCHEDULE, "warmup_steps": 0}) == 1.0
    one_step = lr_at(0, max_step=1, lr=1.0, min_lr=0.0, warmup_steps=0)
    assert one_step == 1.0, "a run of one step isn't wasted"


def test_lr_with_a_warmup_as_long_as_the_run():
    rates = [lr_at(step, max_step=5, lr=1.0, min_lr=0.0, warmup_steps=5) for step in range(7)]
    assert rates == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 0.0])


@pytest.mark.parametrize("decay_shape", list(DECAYS))
def test_wsd_stays_at_the_peak_and_decays_in_its_last_steps(decay_shape):
    wsd = {**SCHEDULE, "lr_schedule": "wsd"}
    shaped = {**wsd, "decay_steps": 20, "decay_shape": decay_shape}
    rates = [lr_at(step, **shaped) for step in range(101)]
    assert rates[10:81] == [1.0] * 71
    assert all(a > b for a, b in zip(rates[80:], rates[81:])) and rates[100] == pytest.approx(0.1)
    assert lr_at(90, **wsd) == 1.0 > lr_at(91, **wsd), "a tenth of the run"
    of_sqrt = lr_at(85, **wsd, decay_steps=20)
    assert of_sqrt == pytest.approx(0.1 + 0.9 * (1 - math.sqrt(5 / 20)))


def test_infinite_comes_down_to_a_constant_rate_and_stays_there_until_it_decays():
    infinite = {**SCHEDULE, "lr_schedule": "infinite"}
    rates = [lr_at(s, **infinite, cooldown_steps=30, decay_steps=10) for s in range(101)]
    assert rates[10] == 1.0
    assert rates[25] == pytest.approx(0.775), "half-way to the mean of lr and min_lr"
    assert rates[40:91] == pytest.approx([0.55] * 51)
    assert all(a > b for a, b in zip(rates[90:], rates[91:])) and rates[100] == pytest.approx(0.1)
    given = [lr_at(s, **infinite, constant_lr=0.3) for s in (35, 60, 89, 90)]
    assert given == pytest.approx([0.3] * 4), "a quarter of the run later"


def test_constant_and_inverse_sqrt():
    rates = [lr_at(step, **SCHEDULE, lr_schedule="constant") for step in (9, 10, 99, 10**6)]
    assert rates == [1.0] * 4
    steps = (10, 40, 370)
    rates = [lr_at(step, **SCHEDULE, lr_schedule="inverse_sqrt") for step in steps]
    assert rates[0] == pytest.approx(1.0)
    assert rates == pytest.approx([0.1 + 0.9 * math.sqrt(10 / step) for step in steps])


def test_the_optimizer_takes_these_rates(finished):
    expected = [lr_at(step, max_step=4, lr=1e-2, min_lr=0.0, warmup_steps=1) for step in range(4)]
    assert metrics(finished / "first", "lr")[:4] == expected


# ------------------------------------------------------------------------------ groups and clipping


@pytest.mark.parametrize("name", ["llama", "llama-tied", "gpt2"])
def test_weight_decay_is_for_matrices_only(toys, name):
    model = AutoModelForCausalLM.from_pretrained(toys / name)
    model.get_output_embeddings().weight.requires_grad_(name != "llama")
    decayed, kept = parameter_groups(model.named_parameters(), decayed_names(model), 0.1)
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)
    assert all(p.ndim >= 2 for p in decayed["params"]) and all(p.ndim == 1 for p in kept["params"])
    together = [id(p) for p in [*decayed["params"], *kept["params"]]]
    trained = [id(p) for p in model.parameters() if p.requires_grad]
    assert sorted(together) == sorted(trained), "each once, no frozen one"
    names = {id(p): n for n, p in model.named_parameters()}
    assert not [p for p in decayed["params"] if re.search("norm|ln_|bias", names[id(p)])]


def test_a_group_without_parameters_is_left_out():
    model = nn.Linear(3, 3, bias=False)
    (group,) = parameter_groups(model.named_parameters(), decayed_names(model), 0.1)
    assert group["weight_decay"] == 0.1
    AdamW([group], lr=0.1)


@pytest.fixture
def gradients(toys):
    """A function dtype -> llama in that dtype, with the gradients of a batch."""

    def make(dtype):
        model = AutoModelForCausalLM.from_pretrained(toys / "llama", dtype=dtype)
        tokens = torch.arange(48).reshape(2, 24)
        model(input_ids=tokens, labels=tokens).loss.backward()
        return model

    return make


def norm_in_float64(model):
    return math.sqrt(sum(p.grad.double().square().sum().item() for p in model.parameters()))


@pytest.mark.parametrize("max_norm", [0.5, 1e9])
def test_clipping_is_that_of_torch(gradients, max_norm):
    ours, theirs = gradients(torch.float32), gradients(torch.float32)
    norm = clip_gradients(ours.parameters(), max_norm, None)
    expected = nn.utils.clip_grad_norm_(theirs.parameters(), max_norm)
    assert norm == pytest.approx(expected.item(), rel=1e-6) and norm > 0.5
    for ours_, theirs_ in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(ours_.grad, theirs_.grad, rtol=1e-6, atol=0)
    assert norm_in_float64(ours) == pytest.approx(min(max_norm, norm), rel=1e-5)


def test_clipping_at_0_only_measures(gradients):
    model = gradients(torch.float32)
    before = [p.grad.clone() for p in model.parameters()]
    norm = clip_gradients(model.parameters(), 0, None)
    assert norm == pytest.approx(norm_in_float64(model), rel=1e-12)
    assert all(torch.equal(p.grad, old) for p, old in zip(model.parameters(), before))


def test_bf16_gradients_do_not_round_the_norm(gradients):
    model = gradients(torch.bfloat16)
    exact = norm_in_float64(model)
    norm = clip_gradients(model.parameters(), 0.5, None)
    assert norm == pytest.approx(exact, rel=1e-12) and norm != torch.tensor(norm).bfloat16().item()
    assert {p.grad.dtype for p in model.parameters()} == {torch.bfloat16}
    assert norm_in_float64(model) == pytest.approx(0.5, rel=2e-3)


def test_clipping_without_any_gradient():
    model = nn.Linear(2, 2)
    assert clip_gradients(model.parameters(), 1.0, None) == 0.0
    model.weight.grad = torch.zeros(2, 2)  # and one of zeros, beside a parameter without
    assert clip_gradients(model.parameters(), 1.0, None) == 0.0
    assert torch.equal(model.weight.grad, torch.zeros(2, 2)) and model.bias.grad is None


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_gradient_that_is_not_finite_shows_in_the_norm(gradients, bad):
    model = gradients(torch.bfloat16)
    next(model.parameters()).grad[0, 0] = bad
    assert not math.isfinite(clip_gradients(model.parameters(), 1.0, None))


def test_a_list_in_a_file_is_a_text_with_commas(tmp_path):
    (tmp_path / "mine.yaml").write_text("eval_data:\n  - one=data/x\n  - two=data/y\n")
    values = flat(*MODEL_AND_DATA, "--config", tmp_path / "mine.yaml")
    assert values["eval_data"] == "one=data/x,two=data/y"
