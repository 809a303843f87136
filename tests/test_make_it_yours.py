"""docs/make_it_yours.md: its blocks, as one module of --code, train, are killed, resume, verify and
export; and what repeats ours gives our numbers."""

import json
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import VOCABULARY
from ranks import lines, metrics, weights

from fabric_llm.base import register
from fabric_llm.base.faults import Fault
from fabric_llm.checkpoint.keep import Progress
from fabric_llm.data import own
from fabric_llm.data.own import HEAD, Stream
from fabric_llm.model.language_model import losses_to_log, require_sum
from fabric_llm.plan import same_run
from fabric_llm.plan.start import report_errors
from fabric_llm.run.metrics import of_code
from fabric_llm.training.adamw import make_optimizer
from fabric_llm.training.schedule import arguments_of, lr_at
from parse_arguments import parse_train
from plan_arguments import parse_plan

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "make_it_yours.md").read_text()
STEPS = 6
# Schedule, loss, optimizer, source, metric and flag that do what ours do.
OURS = """
import math

import datasets
import torch
import torch.nn.functional as F

from fabric_llm.base import register


@register.schedule("again")
def again(at):
    return 0.5 * (1 + math.cos(math.pi * at.done))


@register.loss
def loss(logits, targets, flags):
    return F.cross_entropy(logits.float(), targets, ignore_index=-100, reduction="sum")


@register.optimizer
def optimizer(groups, names, store, flags):
    training = flags.training
    if flags.model.precision == "bf16-true":
        return Rounded(groups, {"lr": training.lr, "store": store})
    betas = training.beta1, training.beta2
    return torch.optim.AdamW(groups, lr=training.lr, betas=betas, fused=True)


class Rounded(torch.optim.Optimizer):
    '''AdamW's first step, in the order of its operations.'''

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                g, p = parameter.grad.float(), parameter.float()
                m, v = g * 0.1, g * g * (1 - 0.95)
                root = v.double().sqrt().float()
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(m.div(root.mul(1 / math.sqrt(1 - 0.95)).add(1e-8)).mul(group["lr"] / 0.1))
                group["store"](parameter, p, 1)


@register.source("same.txt")
def same(folder, flags):
    return datasets.load_from_disk((folder / "same.txt").read_text())
"""


def run(folder, *words, **variables):
    """Run a command of the repository in `folder`."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    how = {"cwd": folder, "env": environment, "capture_output": True, "text": True}
    return subprocess.run([sys.executable, *map(str, words)], **how, timeout=600)


def training(folder, *flags):
    """A function that trains a run of a name with `flags`, and gives its exit code and output."""

    def train(name, *more, **variables):
        words = ["--output_dir", "runs", "--run_name", name, "--log_step_interval", 1, *more]
        done = run(folder, ROOT / "train.py", *flags, *words, **variables)
        return done.returncode, done.stdout + done.stderr

    return train


@pytest.fixture
def code(tmp_path):
    """The blocks of the page, as one module."""
    path = tmp_path / "my_module.py"
    path.write_text("\n\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.S)))
    return path


@pytest.mark.longer
@pytest.mark.every_eighth(5)
@pytest.mark.parametrize(
    ("model", "file", "ranks"),
    [("llama", "train.bin", 1), ("llama", "stream.txt", 2), ("capped_llama", "train.bin", 2)]
    + [("mine", "stream.txt", 1)],
)
def test_the_page_trains_is_killed_resumes_verifies_and_exports(
    toys, tmp_path, code, model, file, ranks
):
    config = json.loads((toys / "llama" / "config.json").read_text()) | {"model_type": model}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    data = tmp_path / "data"
    data.mkdir()
    (data / file).touch()
    for name, rows in (("train.bin", 40), ("val.bin", 8)) if file == "train.bin" else ():
        ids = np.random.default_rng(0).integers(0, VOCABULARY, rows * 64)
        ids.astype(np.uint16).tofile(data / name)
    words = f"--model_name model --train_data_dir data --max_step {STEPS} --lr 1e-3 --eval_iters 2 "
    words += "--save_step_interval 2 --global_batch_size 4 --lr_schedule sqrt --logger lines "
    words += f"--lion_beta 0.9 --code {code.name} --devices {ranks} --strategy"
    train = training(tmp_path, *words.split(), "fsdp2" if ranks > 1 else "auto")
    exit_code, said = train("whole")
    assert exit_code == 0 and "entropy" in said, said
    assert train("cut", FABRIC_LLM_FAILPOINT="between_steps:count=5")[0] != 0
    # all that belongs to the run is found, the module included
    exit_code, said = training(tmp_path)("cut", "--resume", "true")
    assert exit_code == 0 and "resumed from" in said, said
    runs = tmp_path / "runs"
    whole, cut = (weights(runs / name, STEPS) for name in ("whole", "cut"))
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    first = weights(runs / "whole", 2)
    assert any(not torch.equal(whole[name], first[name]) for name in whole)
    for line in lines(runs / "whole", "loss"):
        assert line["z"] > 0 and line["entropy"] > 0
        assert line["lr"] == pytest.approx(1e-3 * (1 - ((line["step"] - 1) / STEPS) ** 0.5))
    assert len((runs / "whole" / "lines.txt").read_text().splitlines()) >= STEPS
    verified = run(tmp_path, "-m", "fabric_llm.verify", "runs/cut")
    assert "verdict         whole" in verified.stdout, verified.stderr + verified.stdout
    assert verified.returncode == 0
    exported = run(tmp_path, ROOT / "export_hf.py", "runs/cut", "--output", "hf")
    assert "Verified with plain transformers" in exported.stdout, exported.stderr


@pytest.mark.longer
@pytest.mark.every_eighth(5)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("precision", "steps"), [("32-true", 4), ("bf16-true", 1)])
def test_what_repeats_ours_gives_our_numbers(toys, tmp_path, ranks, precision, steps):
    (tmp_path / "ours.py").write_text(OURS)
    (tmp_path / "same").mkdir()
    (tmp_path / "same" / "same.txt").write_text(str(toys / "data"))
    flags = f"--max_step {steps} --precision {precision} --save_step_interval 2 --eval_iters 2 "
    flags += f"--global_batch_size 4 --devices {ranks} --lr 1e-3 --strategy"
    flags = [*flags.split(), "fsdp2" if ranks > 1 else "auto", "--model_name", toys / "llama"]
    plain = training(tmp_path, *flags, "--train_data_dir", toys / "data")
    words = "--train_data_dir same --code ours.py --lr_schedule again"
    own = training(tmp_path, *flags, *words.split())
    exit_code, said = plain("ours")
    assert exit_code == 0, said
    if steps > 1:
        assert own("own", FABRIC_LLM_FAILPOINT="between_steps:count=3")[0] != 0
    exit_code, said = own("own", "--resume", "auto")
    assert exit_code == 0, said
    runs = tmp_path / "runs"
    for ours, theirs in zip(*(lines(runs / name, "loss") for name in ("ours", "own")), strict=True):
        for name in ("step", "position", "grad_norm", "loss", "lr", "tokens"):
            assert ours[name] == theirs[name], f"{name} of step {ours['step']}"
    ours, theirs = (weights(runs / name, steps) for name in ("ours", "own"))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.longer
def test_the_module_and_its_flags_belong_to_the_run(toys, tmp_path):
    module = """
from fabric_llm.base import register
@register.flags
class Mine:
    strength: float = register.option(0.5, below=1)
    '''of something'''
@register.metric("strength")
def strength(at):
    return at.flags.own.strength
"""
    (tmp_path / "mine.py").write_text(module)
    flags = ["--model_name", toys / "llama", "--train_data_dir", toys / "data", "--eval_iters", 0]
    train = training(tmp_path, *flags, "--save_step_interval", 2)
    code = ("--code", "mine.py")
    exit_code, said = train("run", *code, "--strength", 0.9, "--max_step", 4)
    assert exit_code == 0 and metrics(tmp_path / "runs" / "run", "strength")[0] == 0.9, said
    back = ("--resume", "true", "--checkpoint", "runs/run/step-00000002", "--max_step", 4)
    exit_code, said = train("run", *back, *code)
    assert exit_code == 2 and "was written with strength 0.9, not 0.5." in said
    (tmp_path / "moved.py").write_text(module + "# changed\n")
    code = ("--code", "moved.py", "--strength", 0.9)
    exit_code, said = train("run", *back, *code)
    assert exit_code == 2 and "was written with code sha256 " in said
    assert "To change that on purpose: --resume_override code." in said
    exit_code, said = train("run", *back)
    assert exit_code == 2 and ", not None." in said
    exit_code, said = train("run", *back, *code, "--resume_override", "code")
    assert exit_code == 0 and "from here on, sha256" in said, said
    # a part of an average may have had the code in an older state, which its last part hasn't
    (tmp_path / "mine.py").write_text("# changed\n" + module)
    words = ("-m", "fabric_llm.average", "runs/run", "--last", 2, "--evaluate", "false")
    averaged = run(tmp_path, *words, "--output", "mean")
    assert averaged.returncode == 0, averaged.stderr
    # what came with the run isn't run
    (tmp_path / "mine.py").rename(tmp_path / "runs" / "run" / "mine.py")
    arguments = tmp_path / "runs" / "run" / "arguments.yaml"
    arguments.write_text(arguments.read_text().replace("moved.py", "runs/run/mine.py"))
    exit_code, said = training(tmp_path)("run", "--resume", "true")
    assert exit_code == 77 and "may have come with it and isn't run" in said, said


def test_a_loss_that_is_a_mean_is_refused_and_others_are_not(monkeypatch):
    losses = {
        "sum": lambda logits, *_: logits.logsumexp(-1).sum(),
        "its own model's": lambda *_: {}["input_ids"],
        "mean": lambda logits, *_: logits.logsumexp(-1).mean(),
    }
    for name in ("flags", "code", "file"):
        monkeypatch.setitem(register.LOADED, name, None)
    for name, loss in losses.items():
        monkeypatch.setitem(register.ONLY, "loss", (loss, ()))
        with pytest.raises(Fault, match="must be a sum") if name == "mean" else nullcontext():
            require_sum(97)


HEADER = "from fabric_llm.base import register\n"
SCHEDULE = '@register.schedule("a")\ndef a(at): ...\n'
FLAG = HEADER + "@register.flags\nclass Mine:\n    {} = register.option(1)\n    '''a text'''\n"
MISTAKES = {
    "a file that isn't there": (None, "--code 'PATH' isn't a file."),
    "syntax": ("a = (\n", "--code 'PATH', line 1: SyntaxError: '(' was never closed"),
    "an exception": ("\n1 / 0\n", "--code 'PATH', line 2: ZeroDivisionError: division by zero."),
    "an exit": ("exit(3)\n", "--code 'PATH', line 1: SystemExit: 3."),
    "a missing package": ("import no_such_one\n", "line 1: ModuleNotFoundError: No module named"),
    "a loss that adds a name twice": (
        HEADER + '@register.loss(adds=["z", "z"])\ndef loss(*given): ...\n',
        "line 2: its loss adds a name twice: z, z.",
    ),
    "no name": (HEADER + "@register.metric\ndef mine(at): ...\n", "line 2: its decorator takes a name"),
    "twice": (HEADER + SCHEDULE * 2, "line 4: it registers the schedule 'a' twice."),
    "ours": (HEADER + SCHEDULE.replace('"a"', '"cosine"'), "schedule 'cosine' already"),
    "a metric of ours": (
        HEADER + '@register.metric("lr")\ndef lr(at): ...\n',
        "there is a metric 'lr' already; take another name.",
    ),
    "a figure of ours": (
        HEADER + '@register.metric("tasks")\ndef tasks(at): ...\n',
        "there is a metric 'tasks' already; take another name.",
    ),
    "a flag of ours": ("\ufeff" + FLAG.format("lr: float"), "there is a flag --lr already"),
    "no declaration": (FLAG.format("x: int = 3; y: int"), "x isn't declared by option(DEFAULT)."),
    "no text": (FLAG.format("x: int").replace("'''a text'''", ""), "x has no text"),
    "no such schedule": ("", "inverse_sqrt, or one that --code registers, not 'sqrt'."),
}


@pytest.mark.parametrize(("text", "sentence"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_sentence(tmp_path, capsys, text, sentence):
    path = tmp_path / "mine.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit) as stop, report_errors():
        parse_train(["--code", str(path), "--lr_schedule", "sqrt"])
    said = capsys.readouterr().err
    assert stop.value.code == 2 and said.count("\n") == 1, said
    assert sentence.replace("PATH", str(path)) in said
    parse_train([])  # forgets what was loaded
    assert not register.LOADED and not any(register.TABLES)


@pytest.fixture
def counted(tmp_path):
    """A module that counts how often it runs, as the code of a checkpoint."""
    module, checkpoint = tmp_path / "mine.py", tmp_path / "runs" / "a" / "step-00000001"
    module.write_text("import os\nos.environ['RAN'] = os.environ['RAN'] + 'x'\n")
    (checkpoint / "trainer").mkdir(parents=True)
    os.environ["RAN"] = ""
    register.load(str(module))
    document = {"code": str(module), "schedule": {"code": register.fact()}}
    (checkpoint / "trainer" / "progress.json").write_text(json.dumps(document))
    yield module, checkpoint
    register.load(None)
    del os.environ["RAN"]


def test_the_code_of_a_run_runs_once_from_any_folder(counted, tmp_path, monkeypatch):
    module, checkpoint = counted
    monkeypatch.chdir(tmp_path)
    register.load("mine.py")
    register.load_of_run(checkpoint)
    register.load_of_run(tmp_path)  # a part of an average without code forgets nothing
    assert os.environ["RAN"] == "x" and register.LOADED["code"] == str(module)


def test_other_code_than_that_of_the_run_is_not_run(counted):
    module, checkpoint = counted
    module.write_text(module.read_text() + "# changed\n")
    with pytest.raises(Fault, match="isn't the code that the run had") as refused:
        register.load_of_run(checkpoint)
    assert refused.value.code == 77 and os.environ["RAN"] == "x"


def test_code_in_the_folder_of_a_run_is_not_run_behind_a_link(counted, tmp_path):
    module, checkpoint = counted
    elsewhere = tmp_path / "elsewhere"
    checkpoint.rename(elsewhere)
    checkpoint.symlink_to(elsewhere)
    own = checkpoint.parent / "mine.py"
    own.write_bytes(module.read_bytes())
    document = {"code": str(own), "schedule": {"code": register.fact()}}
    (elsewhere / "trainer" / "progress.json").write_text(json.dumps(document))
    with pytest.raises(Fault, match="may have come with it and isn't run"):
        register.load_of_run(checkpoint)
    assert os.environ["RAN"] == "x"


def test_a_resume_with_changed_code_shows_the_rates_that_it_knows(tmp_path):
    path = tmp_path / "mine.py"
    schedule = '@register.schedule("mine")\ndef mine(at):\n    return at.own.power * at.wrong\n'
    flag = FLAG.format("power: float").replace("option(1)", 'option(1.0, resume="free")')
    path.write_text(flag + schedule.replace(" * at.wrong", ""))
    flags = parse_train(["--code", str(path), "--lr_schedule", "mine"]).flat()
    plan = SimpleNamespace(start=Progress(2), schedule=SimpleNamespace(max_step=10))
    unknown = {**flags, "lr_schedule": "gone"}
    then, now = {**unknown, "max_step": 8}, {**flags, "warmup_steps": 0}
    del now["power"]
    table = same_run._curves(plan, then, now)
    assert len(table) == 3 and set(table[2].split()[2:]) == {"-"} and "-" not in table[1].split()
    path.write_text(flag + schedule)
    flags = parse_train(["--code", str(path), "--lr_schedule", "mine", "--warmup_steps", "0"])
    with pytest.raises(Fault, match="schedule 'mine', line 8: AttributeError"):
        lr_at(1, max_step=9, **arguments_of(flags.flat()))
    parse_train([])


def test_flags_are_known_in_help_in_files_and_to_plan(tmp_path, capsys):
    path, config = tmp_path / "mine.py", tmp_path / "run.yaml"
    path.write_text(FLAG.format("strength: int") + SCHEDULE)
    config.write_text(f"code: {path}\nstrength: 3\nlr_schedule: a\n")
    flags = parse_train(["--config", str(config)])
    assert flags.own.strength == 3 and flags.flat()["strength"] == 3
    assert flags.training.lr_schedule == "a" and register.LOADED["flags"] is flags
    flags = parse_plan(["--code", str(path), "--model_name", "x", "--strength", "4"])[1]
    assert flags.own.strength == 4
    words = ("-X", "importtime", ROOT / "train.py", "--code", path, "--help", "strength")
    done = run(tmp_path, *words)
    assert "--strength  (an integer; default: 1)\n      a text" in done.stdout
    assert not re.search(r"\| +torch$", done.stderr, re.M)
    parse_train([])
    assert not register.LOADED


class Squares:
    """A stream of rows n², n² + 1, ..."""

    def __init__(self, state, rows=10**6, ahead=0):
        self.number, self.rows, self.ahead = (state or {"n": 0})["n"], rows, ahead

    def __next__(self):
        if self.number == self.rows:
            raise StopIteration
        self.number += 1
        return np.arange(4) + self.number**2

    def state(self):
        return {"n": self.number + self.ahead}


MIXED = [np.arange(4), {"input_ids": np.arange(4), "labels": np.full(4, -100)}]


class Mixed(list):
    """A stream of these rows."""

    def __next__(self):
        return self.pop(0)

    def state(self):
        return {}


def test_labels_of_some_rows_alone_are_refused():
    rows = own._rows(MIXED, own.Row("train"))
    with pytest.raises(Fault, match="has input_ids, labels, the first input_ids"):
        rows[[0, 1]]
    with pytest.raises(Fault, match="has input_ids, labels, the first input_ids"):
        Stream(lambda state: Mixed(MIXED * HEAD), own.Row("mixed", 4))
    labels = {"input_ids": np.arange(4), "labels": np.array([-100, 70_000, 1, 2])}
    assert own._largest(own._rows([labels], own.Row("train"))) == 70_000


def test_an_end_of_documents_that_is_no_token_id_is_refused(tmp_path, monkeypatch):
    made = {"train": [np.arange(4)], "validation": [np.arange(4)], "document_end": "0"}
    monkeypatch.setattr(register, "LOADED", {"code": "mine.py", "file": ""})
    with pytest.raises(Fault, match="TypeError: 'str' object"):
        own.open_own(tmp_path, lambda folder, flags: made, None)


@pytest.mark.parametrize("bad", [500, -100, -1])
@pytest.mark.parametrize("streams", [False, True])
def test_a_token_id_that_the_source_denies_is_named(tmp_path, bad, streams):
    """It would be no row of the embedding."""
    good, last = np.arange(4), np.array([0, 1, bad, 3])

    def source(folder, flags):
        begin = lambda state: Mixed([good] * 2 * HEAD + [last] * HEAD)  # noqa: E731
        train = begin if streams else [good, good, last]
        return {"train": train, "validation": [good], "max_token_id": 130}

    made = own.open_own(tmp_path, source, None)
    where = np.array([2 * HEAD] if streams else [2])
    assert made.train[np.array([0, 1])]["input_ids"].tolist() == [[0, 1, 2, 3]] * 2
    with pytest.raises(Fault, match=f"has {bad}, which isn't from 0 to max_token_id 130"):
        made.train[where]


def test_a_stream_is_a_function_of_the_position():
    stream, rows = Stream(Squares, own.Row("squares", 4)), np.arange(4) + np.arange(1, 101)[:, None] ** 2
    stream.require_exact_resume()
    for step in (0, 8, 16, 8, 40, 0, 24):  # back and forth
        stream.mark(step)
        positions = np.arange(step, step + 8, 2)
        assert (stream[positions]["input_ids"] == rows[positions]).all()
    saved = stream.state_at(40)
    other = Stream(Squares, own.Row("squares", 4))
    other.restore(40, saved)
    assert (other[np.arange(40, 50)]["input_ids"] == rows[40:50]).all()
    assert (other[np.arange(3, 5)]["input_ids"] == rows[3:5]).all()
    with pytest.raises(Fault, match="row 40, after a state, is another one"):
        Stream(Squares, own.Row("squares", 4)).restore(40, {**saved, "state": {"n": 41}})


@pytest.mark.parametrize(
    ("begin", "sentence"),
    [
        (lambda state: Squares(state, ahead=1), "row 8, after a state, is another one"),
        (lambda state: iter([np.arange(4)] * 100), "it isn't an iterator with a method state"),
        (lambda state: Squares(state, rows=HEAD + 2), f"ends after {HEAD + 2} rows"),
        (lambda state: Squares(state or {"n": int(torch.randint(10**6, ()))}), "can't be resumed"),
        (lambda state: Squares({"n": 1, **state}), "TypeError"),
    ],
)
def test_a_stream_that_cannot_resume_exactly_is_refused(monkeypatch, begin, sentence):
    monkeypatch.setitem(register.LOADED, "code", "mine.py")
    monkeypatch.setitem(register.LOADED, "file", __file__)
    with pytest.raises(Fault, match=sentence):
        Stream(begin, own.Row("squares", 4)).require_exact_resume()


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.longer)])
def test_the_steps_before_the_end_of_a_stream_are_saved(toys, tmp_path, code, ranks):
    """Of two ranks, one alone lacks rows of the next step."""
    (tmp_path / "stream.txt").touch()
    end = "        if self.row == 18:\n            raise StopIteration\n        self.row += 1"
    code.write_text(code.read_text().replace("        self.row += 1", end))
    flags = "--train_data_dir . --max_step 9 --global_batch_size 4 --micro_batch_size 2 "
    flags += f"--eval_iters 0 --code {code.name} --devices {ranks}"
    exit_code, said = training(tmp_path, "--model_name", toys / "llama", *flags.split())("run")
    assert exit_code == 2 and "ends after 18 rows: give a smaller --max_step" in said, said
    assert weights(tmp_path / "runs" / "run", 4)


LOGITS = torch.zeros(2, 2, requires_grad=True)
MODEL = torch.nn.ModuleDict({"module": torch.nn.Linear(2, 2)})
LR = {"max_step": 2, "lr": 1.0, "min_lr": 0.0, "warmup_steps": 0, "lr_schedule": "mine"}
# What reads a table's entry of --code: the entry, and what it must return.
RETURNS = {
    lambda: lr_at(0, **LR): [
        (lambda at: np.nan, "finite numbers: nan"), (lambda at: -0.5, "no negative rate: -0.5")
    ],
    lambda: make_optimizer(MODEL, set(), SimpleNamespace(weight_decay=0, seed=0), ""): [
        (lambda *given: None, "a torch.optim.Optimizer: NoneType")
    ],
    lambda: losses_to_log(LOGITS, None): [
        ((lambda *given: 1.0, ()), "a scalar tensor, summed"),
        ((lambda logits, *more: logits.detach().sum(), ()), "a number that has a gradient"),
        ((lambda logits, *more: (logits.sum(), 1.0), "z"), "a tuple of 2 scalar tensors"),
    ],
}


@pytest.mark.parametrize(
    ("call", "made", "sentence"), [(call, *one) for call in RETURNS for one in RETURNS[call]]
)
def test_what_a_function_returns_is_checked(monkeypatch, call, made, sentence):
    monkeypatch.setitem(register.LOADED, "flags", None)
    monkeypatch.setitem(register.SCHEDULES, "mine", made)
    monkeypatch.setattr(register, "ONLY", {"loss": made, "optimizer": made})
    with pytest.raises(Fault, match=f"--code: the .* must return {sentence}"):
        call()


def test_a_metric_leaves_the_model_in_its_mode(monkeypatch):
    """One that measures without dropout must not switch it off for the steps that follow."""
    model = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Dropout(0.5)).train()
    model[1].eval()
    monkeypatch.setitem(register.METRICS, "mine", lambda at: len(list(at.model.eval().modules())))
    assert of_code(SimpleNamespace(model=model)) == {"mine": 3.0}
    assert [module.training for module in model.modules()] == [True, True, False]
