"""Optimizers of one's own in bfloat16: the Lion of docs/make_it_yours.md learns as in float32, and
what is said of updates is so."""

import math
import os
import re
import shutil
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ranks import metrics, run_ranks, toy_run, train_ranks
from torch import nn

from fabric_llm.base import register
from fabric_llm.checkpoint import reading
from fabric_llm.training import adamw
from fabric_llm.training.ema import Average
from fabric_llm.verify import __main__ as verify


@pytest.fixture(autouse=True)
def nothing_stays_registered():
    yield
    register.load(None)

PAGE = (Path(__file__).parent.parent / "docs" / "make_it_yours.md").read_text()
FLAGS = SimpleNamespace(lr=1e-3, beta1=0.9, beta2=0.95, weight_decay=0.0, seed=0, lion_beta=0.99)


# The optimizer's code in its section of the page.
LION = re.findall(r"## An optimizer\n.*?```python\n(.*?)```", PAGE, re.S)[0]
# It keeps nothing of small updates in bfloat16.
SGD = """
@register.optimizer
def sgd(groups, names, store, flags):
    return torch.optim.SGD(groups, lr=flags.training.lr, momentum=flags.training.beta1)
"""


def use(monkeypatch, code):
    """As if `code` were that of --code."""
    monkeypatch.setattr(register, "ONLY", {})
    loaded = {"code": "mine.py", "file": "", "flags": SimpleNamespace(training=FLAGS, own=FLAGS)}
    monkeypatch.setattr(register, "LOADED", loaded)
    exec(textwrap.dedent(code), {"register": register, "torch": torch})


def plain_lion(weight, gradient, steps, lr, beta, lion_beta):
    """The paper's algorithm, in float64."""
    momentum = torch.zeros_like(weight)
    for _ in range(steps):
        weight = weight - lr * (beta * momentum + (1 - beta) * gradient(weight)).sign()
        momentum = lion_beta * momentum + (1 - lion_beta) * gradient(weight)
    return weight


def test_the_lion_of_the_docs_learns_in_bfloat16(monkeypatch):
    """A quadratic: with nearest rounding most updates would be lost."""
    use(monkeypatch, LION)
    torch.manual_seed(0)
    begin, goal = torch.randn(64, 64).bfloat16(), torch.randn(64, 64)
    wrapped = nn.Module()
    wrapped.module = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
    wrapped.module.weight.data.copy_(begin)
    optimizer = adamw.make_optimizer(wrapped, set(), FLAGS, "stochastic")
    for _ in range(300):
        wrapped.module.weight.grad = wrapped.module.weight.detach() - goal.bfloat16()
        optimizer.step()
    exact = plain_lion(begin.double(), lambda weight: weight - goal, 300, 1e-3, 0.9, 0.99)
    gain = [
        (begin.double() - goal).square().mean() - (w.double() - goal).square().mean()
        for w in (wrapped.module.weight, exact)
    ]
    assert 0.97 < (gain[0] / gain[1]).item() < 1.03


@pytest.mark.parametrize("updates", adamw.UPDATES)
def test_what_is_said_of_updates_is_measured(monkeypatch, updates):
    kept = adamw.kept_updates(FLAGS, updates)
    assert kept == 0 if updates == "nearest" else 0.9 < kept < 1.1
    use(monkeypatch, SGD)
    assert adamw.kept_updates(FLAGS, updates) == 0
    use(monkeypatch, LION)
    assert 0.9 < adamw.kept_updates(FLAGS, updates) < 1.1
    raises = "@register.optimizer\ndef make(*args):\n    raise RuntimeError('for one model alone')"
    use(monkeypatch, raises)
    assert adamw.kept_updates(FLAGS, updates) is None


def test_the_moving_average_is_rounded_by_names_as_with_our_optimizer(monkeypatch):
    """By the places of parameters, its bits would depend on how they are sharded."""
    wrapped = nn.ModuleDict({"module": nn.Linear(2, 2, dtype=torch.bfloat16)})
    origins = []
    for code in ("", SGD):
        use(monkeypatch, code)
        optimizer = adamw.make_optimizer(wrapped, {"weight"}, FLAGS, "stochastic")
        average = Average(optimizer, decay=0.9, device="same", every=1, seed=0)
        origins.append(average.origins)
    assert origins[0] == origins[1] == [("weight", 0), ("bias", 0)]


def pieces(weight, values, cuts):
    """`weight` after `values` were stored in parts that begin at `cuts`, as ranks hold them."""
    from fabric_llm.training.adamw_rounded import round_stochastically

    for first, end in zip(cuts, (*cuts[1:], len(values))):
        round_stochastically(weight[first:end], values[first:end], ("name", first), 3, 7)
    return weight


def test_rounding_is_right_on_average_and_the_same_however_it_is_split():
    values = torch.linspace(1.0, 1.0 + 2**-7, 2**16)  # between two neighbours
    whole = pieces(torch.zeros(2**16, dtype=torch.bfloat16), values, (0,))
    assert set(whole.tolist()) == {1.0, 1.0 + 2**-7}
    assert (whole.double() - values.double()).mean().abs() < 5 * 2**-7 * 0.5 / 2**8
    assert torch.equal(whole, pieces(torch.zeros_like(whole), values, (0, 7, 40_000)))


def trained(argv, code):
    import contextlib
    import io

    import train

    path = Path(argv[argv.index("--output_dir") + 1]) / "mine.py"
    path.parent.mkdir(exist_ok=True)
    made = path.with_name(f"{os.getpid()}.py")  # another rank may be reading the file
    made.write_text(f"import torch\nfrom fabric_llm.base import register\n{textwrap.dedent(code)}")
    made.replace(path)
    argv = [*argv, "--code", str(path)]
    said, error, stopped = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(error):
        try:
            train.main(argv)
        except SystemExit as stop:
            stopped = stop.code
    return stopped, said.getvalue(), error.getvalue()


def run_with(code, toys, folder, ranks, *more):
    """What each rank of a run with an optimizer of one's own returns."""
    words = "--max_step 8 --eval_iters 0 --log_step_interval 1 --devices".split()
    words = [*toy_run(toys, folder), *words, ranks, *more]
    return run_ranks(ranks, trained, [str(word) for word in words], code)


def test_a_run_says_what_its_optimizer_loses(toys, tmp_path):
    more = ("--lr", 1e-7, "--global_batch_size", 4)
    [(code, said, error)] = run_with(SGD, toys, tmp_path, 1, *more)
    assert code == 0, error
    assert said.count("this optimizer keeps 0% of such updates") == 1
    assert "nothing is lost" not in said


def test_an_optimizer_of_another_class_begins_with_no_state(toys, tmp_path):
    """The state of the one before would be no use to it, or an error in its first step."""
    words = ("--run_name", "a", "--save_step_interval", 4)
    [(code, _, error)] = run_with(SGD, toys, tmp_path, 1, *words)
    assert code == 0, error
    words += ("--checkpoint", tmp_path / "a" / "step-00000004", "--resume", "true")
    words += ("--resume_override", "code")
    begun = "\n    made.state[groups[0]['params'][0]]['x'] = torch.ones(1)\n    return made"
    eager = SGD.replace("return ", "made = ") + begun
    [(code, _, error)] = run_with(eager, toys, tmp_path, 1, *words)
    assert code == 2 and "its class needs another name than SGD" in error
    [(code, said, error)] = run_with(ADAFACTOR, toys, tmp_path, 1, *words)
    assert code == 0 and "is Adafactor from here on, SGD before: its state begins" in said, error
    kept = reading.optimizer_state(tmp_path / "a" / "step-00000008")
    assert not any("momentum" in name for name in kept)


ADAFACTOR = """
    @register.optimizer
    def make(groups, names, store, flags):
        return torch.optim.Adafactor(groups, lr=flags.training.lr)
"""
FLAT = """
    class Flat(torch.optim.Optimizer):
        def __init__(self, groups, lr):
            super().__init__(groups, {"lr": lr})

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    state = self.state[parameter]
                    state.setdefault("sum", torch.zeros(parameter.numel()))
                    state["sum"] += parameter.grad.flatten().float()
                    parameter -= group["lr"] * state["sum"].view_as(parameter)


    @register.optimizer
    def make(groups, names, store, flags):
        return Flat(groups, flags.training.lr)
"""


@pytest.mark.parametrize(
    ("code", "ranks", "kept"),
    [
        (ADAFACTOR, 1, {"row_var", "col_var"}),
        pytest.param(ADAFACTOR, 2, {"row_var", "col_var"}, marks=pytest.mark.longer),
        (FLAT, 1, {"sum"}),
    ],
    ids=["factored", "factored on two ranks", "as long as its parameter"],
)
def test_state_of_another_shape_is_saved_resumed_and_verified(toys, tmp_path, code, ranks, kept):
    """Such as factored moments, or none where a parameter has had no gradient."""
    module = "import torch\nfrom fabric_llm.base import register\n" + textwrap.dedent(code)
    (tmp_path / "mine.py").write_text(module)
    words = "--strategy ddp --lr 1e-2 --eval_iters 0 --save_step_interval 2 --max_step 4 "
    words += f"--global_batch_size 4 --micro_batch_size {2 // ranks}"
    words = [*toy_run(toys, tmp_path), "--code", tmp_path / "mine.py", *words.split()]
    train_ranks(ranks, *words, "--run_name", "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "step-00000004")
    train_ranks(ranks, *words, "--run_name", "cut", "--resume", "true")
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")
    last = [tmp_path / name / "step-00000004" for name in ("whole", "cut")]
    states = [reading.optimizer_state(path) for path in last]
    assert kept <= {name.rpartition(".")[2] for name in states[0]}
    for name, shape in states[0].shapes.items():
        size = math.prod(shape)
        assert torch.equal(*(state.elements(name, 0, size) for state in states)), name
    assert verify.main([str(tmp_path / "cut"), "--no_export"]) == 0


@pytest.mark.parametrize(
    "ranks, change, sentence",
    [
        (1, 'group["k"] = group.get("k", 0) + 1', "changes 'k of group 0' in its param_groups"),
        (
            1,
            'self.state[group["params"][0]]["count"] = 1',
            "the optimizer keeps 'count' as int, but checkpoints hold tensors alone",
        ),
        (2, 'self.state[group["params"][0]]["s"] = torch.ones(1)', "take --strategy ddp"),
        (1, 'group["none"]', "mine.py', step of the optimizer, line 8: KeyError: 'none'."),
    ],
)
def test_what_no_checkpoint_could_hold_is_told_after_the_first_step(
    toys, tmp_path, ranks, change, sentence
):
    code = f"""
    class Own(torch.optim.SGD):
        def step(self, closure=None):
            super().step()
            for group in self.param_groups:
                {change}


    @register.optimizer
    def make(groups, names, store, flags):
        return Own(groups, lr=flags.training.lr)
    """
    for ended, said, error in run_with(code, toys, tmp_path, ranks):
        assert ended == 2 and "step 1/8" not in said
        assert sentence in error or ranks == 2 and not error
