"""Law 16: flags that say how never change what.

Rows of all flags that say how, drawn so that they cover pairs of values, stopped, killed and
resumed, agree with a plain trainer that shares no code with the package.
`python benchmarks/any_flags.py` goes on where this ends.
"""

import ast
import json
import random
import sys
from pathlib import Path

import law_16
import pytest
import torch
from plain_trainer import Found
from ranks import train_ranks

from arguments import Arguments
from fabric_llm.base.flag import Flag

ROWS = 10  # of the longer suite
# Rows on forked ranks, as in other tests: their number, and flags that say how.
QUICK = {
    "packed": (1, dict(model="llama", data="best_fit", micro_batch_size=4, eval_step_interval=3)),
    "mixed": (
        2, dict(model="mixtral", data="replay", strategy="fsdp2", activation_checkpointing="full"),
    ),
    "windows": (
        2,
        dict(model="gemma3_text", data="stages", strategy="ddp", loss="chunked", num_workers=0),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return law_16.write_toys(tmp_path_factory.mktemp("law-16"))


def test_every_flag_of_train_says_whether_it_says_what_or_how():
    undecided = [name for name, one in Arguments.declared().items() if one.how is None]
    said = f"declare {undecided} in arguments.py by `what`, `setting`, or `flag` with how=True"
    assert not undecided, said


def test_every_flag_that_says_how_is_drawn_or_left_out_by_name():
    drawn = law_16.factors()
    how = set(law_16.flags_of_how())
    assert drawn.keys() - {"model", "data"} == how - law_16.NOT_DRAWN.keys()
    # Others are gone, or say what.
    assert law_16.VALUES.keys() | law_16.NOT_DRAWN.keys() <= how
    assert not law_16.VALUES.keys() & law_16.NOT_DRAWN.keys()


def test_a_new_flag_takes_part_by_its_type_or_asks_for_values():
    assert law_16.values_of("new", Flag(False, "", type=bool)) == ["false", "true"]
    with pytest.raises(ValueError, match="--new says how is trained.* VALUES of tests/law_16.py"):
        law_16.values_of("new", Flag(1, "", type=int))


def test_the_plain_trainer_shares_no_code_with_the_package():
    names = set()
    for file in ("plain_trainer.py", "plain_order.py"):
        text = Path(__file__).with_name(file).read_text()
        assert len(text.splitlines()) < 200
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom):
                names.add(node.module)
            elif isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
    others = {name.split(".")[0] for name in names} - set(sys.stdlib_module_names)
    assert others == {"torch", "transformers", "datasets", "numpy", "plain_order"}


def drawn(count, seed=16):
    """The first rows of an array in which nothing is refused."""
    array = law_16.Array(random.Random(seed))
    for _ in range(count):
        row = array.draw()
        array.accept(row)
        yield row


def test_rows_cover_pairs_and_hold_what_has_an_effect():
    array = law_16.Array(random.Random(0))
    for row in drawn(60, seed=0):
        assert ("ema_every" in row) <= (row.get("ema_decay") is not None)
        array.accept(row)
    possible = set(array.all) - array.pairs_never()
    assert len(array.covered & possible) > 0.75 * len(possible)


def test_a_refused_row_goes_on_without_what_the_sentence_names():
    array = law_16.Array(random.Random(0))
    without = dict(model="gpt2", data="rows", devices=1, strategy="ddp", num_workers=3)
    row = {**without, "cpu_offload": "true"}
    sentence = "train.py: error: --cpu_offload true needs --strategy fsdp; here it is single."
    for model in ("gpt2", "llama", "qwen3"):
        assert not array.is_refused({**row, "model": model})
        assert array.refuse({**row, "model": model}, sentence) == {**without, "model": model}
        assert array.is_refused({**row, "model": model})
        assert not array.is_refused({**without, "model": model})
    assert array.is_refused({**row, "model": "mixtral"}), "often enough"
    assert (("cpu_offload", "true"), ("strategy", "ddp")) in array.pairs_never()
    array.accept({**row, "model": "phi3"})
    assert not array.is_refused({**row, "model": "mixtral"})


def test_another_row_is_drawn_where_what_is_trained_is_refused():
    array = law_16.Array(random.Random(0))
    row = {"model": "phi3", "data": "best_fit", "num_workers": 3}
    sentence = "train.py: error: Take shorter rows, or --document_masking false."
    for devices in (1, 2):
        other = array.refuse({**row, "devices": devices}, sentence)
        assert (other["model"], other["data"]) != ("phi3", "best_fit")
    assert array.is_refused({**row, "devices": 1, "num_workers": 0})
    assert not array.is_refused({**row, "model": "llama"})


def test_rows_go_on_to_be_drawn_where_many_values_are_refused():
    array = law_16.Array(random.Random(0))
    for name in ("accelerator", "attention", "strategy", "context_parallel"):
        *refused, _ = array.factors[name]
        for value in refused:
            sentence = f"train.py: error: --{name} {value}"
            for model in ("llama", "gpt2", "qwen3"):
                array.refuse({"model": model, "data": "rows", name: value}, sentence)
    for row in (array.draw(tries=5) for _ in range(20)):
        assert len(row) > 10 and not array.is_refused(row)


def test_a_resumed_run_may_log_more_steps_than_its_twin_and_no_others(tmp_path, monkeypatch):
    run, twin = tmp_path / "run", tmp_path / "twin"
    for folder, steps in ((run, {1: 5.0, 3: 4.0, 4: 3.0}), (twin, {1: 5.0, 3: 4.0})):
        (folder / "step-00000003").mkdir(parents=True)
        lines = [json.dumps({"step": step, "loss": loss}) for step, loss in steps.items()]
        (folder / "metrics.jsonl").write_text("\n".join(lines))
    monkeypatch.setattr(law_16, "weights_of", lambda checkpoint: {})
    found = law_16.unlike
    assert found(run, twin) == []
    assert found(twin, run) == ["loss of 1 steps, of step 4 None, not 3.0"]
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 5.5}')
    assert found(run, twin) == ["loss of 2 steps, of step 1 5.5, not 5.0"]


@pytest.mark.quick_cases(r"packed")
@pytest.mark.parametrize(
    "name", ["packed", "mixed", pytest.param("windows", marks=pytest.mark.longer)]
)
def test_a_run_is_that_of_a_plain_trainer(folder, tmp_path, name):
    ranks, row = QUICK[name]
    what = law_16.what_of(row["model"], row["data"], folder, seed=0)
    train_ranks(ranks, *law_16.command(row, what, folder, tmp_path / "run", resumes=False)[1:])
    assert law_16.differences(tmp_path / "run", law_16.reference(what, row, folder)) == []


def test_tied_weights_are_as_uncertain_as_each_other():
    weights = {"embed": torch.ones(2), "head": torch.ones(2)}
    uncertain = {"embed": torch.tensor([0.0, 0.1])}
    plain = Found({}, {}, weights, uncertain, tied={"embed": "embed", "head": "embed"})
    for moved, names in (([1.0, 1.05], []), ([1.05, 1.0], ["weights embed", "weights head"])):
        found = law_16.weights_apart(dict.fromkeys(weights, torch.tensor(moved)), plain)
        assert [one.partition(":")[0] for one in found] == names


@pytest.mark.longer
def test_rounding_explains_what_a_weight_that_moves_others_makes_and_no_more(folder):
    """A weight whose gradient is next to nothing is off, and by it the gradients of all others."""
    row = {"model": "llama", "data": "replay"}
    plain = law_16.reference(law_16.what_of(**row, folder=folder, seed=1126), row, folder)
    rounded = plain.again(shaken=law_16.SHAKEN).weights
    bounds = plain._replace(uncertain=law_16.shaken(plain))
    assert law_16.weights_apart(rounded, plain), "by a weight's own gradients alone"
    assert law_16.weights_apart(rounded, bounds) == []
    for name, tensor in plain.weights.items():
        decayed = {name: tensor * (1 - 5e-5)}
        assert law_16.weights_apart(decayed, bounds), name


@pytest.mark.every_eighth(3)
@pytest.mark.longer
@pytest.mark.parametrize("number", range(ROWS))
def test_rows_of_any_flags_agree_with_a_plain_trainer(folder, tmp_path, number):
    """Each row is interrupted up to twice, and goes on with its flags or those of another one."""
    *before, row = drawn(number + 1)
    array = law_16.Array(random.Random(number), accepted=before)
    outcome = law_16.run_row(array, row, folder, tmp_path / "run", 16, number % 3)
    assert not outcome.differences, "\n".join([*outcome.differences[:8], outcome.commands])
