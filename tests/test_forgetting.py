"""What a run may forget: validation sets by name, a budget for each, and what happens above it,
over resumes and ranks."""

import json
import math
import os
import shutil
import signal
from fractions import Fraction
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
from conftest import CONTEXT, VOCABULARY, ended
from ranks import Job, ended_with, lines, metrics, saved, status, train_ranks
from transformers import AutoModelForCausalLM

import train
from fabric_llm.checkpoint.keep import read_progress
from fabric_llm.data.folders import IGNORED
from fabric_llm.data.mixture_text import at_least, parse
from fabric_llm.data.probes import copy_probe
from fabric_llm.run.run import how_it_compares, of_sets
from fabric_llm.training.forgetting import Forgetting, parse_budgets
from fabric_llm.verify import __main__ as verify

# of two languages: the second of a pair of tokens follows from the first by these
WORDS = {"old": (7, 3), "new": (5, 11)}


def language(folder, name, rows=400, validation_rows=24):
    times, plus = WORDS[name]
    generator = np.random.default_rng(sum(map(ord, name)))

    def split(count):
        tokens = generator.integers(1, VOCABULARY, (count, CONTEXT))
        tokens[:, 1::2] = (tokens[:, ::2] * times + plus) % VOCABULARY
        return datasets.Dataset.from_dict({"input_ids": tokens.tolist()})

    splits = {"train": split(rows), "validation": split(validation_rows)}
    datasets.DatasetDict(splits).save_to_disk(str(folder / name))


@pytest.fixture(scope="module")
def base(toys, tmp_path_factory):
    """A folder with datasets old and new, and a model `base` that knows the old one."""
    folder = tmp_path_factory.mktemp("languages")
    for name in WORDS:
        language(folder, name)
    training = "--global_batch_size 16 --micro_batch_size 16 --lr 1e-2 --precision 32-true".split()
    training += "--max_step 200 --eval_iters 2 --run_name first".split()
    data = ("--train_data_dir", folder / "old", "--output_dir", folder)
    train_ranks(1, "--model_name", toys / "llama", *data, *training)
    shutil.move(folder / "first" / "step-00000200", folder / "base")
    return folder


def flags(base, output, *more):
    return [
        *("--model_name", base / "base", "--output_dir", output, "--run_name", "run"),
        *"--precision 32-true --global_batch_size 8 --micro_batch_size 4 --lr 3e-3".split(),
        *"--max_step 16 --eval_batch_size 4 --eval_step_interval 4 --save_step_interval 4".split(),
        *("--lr_schedule", "constant", *more),
    ]


def replayed(base, output, *more, share=0.05):
    mix = ("--train_data_dir", base / "new", "--replay", base / "old", "--replay_fraction", share)
    return flags(base, output, *mix, *more)


def with_general(base, output, *more):
    """On the new language, with the old one as the set `general`."""
    data = ("--train_data_dir", base / "new", "--eval_data", f"general={base / 'old'}")
    return flags(base, output, *data, *more)


REWIND = "--forgetting_action rewind --eval_step_interval 2".split()
# A budget that a run is over at its first evaluation.
NO_BUDGET = ("--forgetting_budget", "replay:0.0001")


def evaluated(run, name, key="loss"):
    return [one[name].get(key) for one in metrics(run, "eval")]


# ------------------------------------------------------------------------------- what is measured


def test_the_last_losses_are_compared_with_those_of_the_same_rows():
    forgetting = Forgetting(before={"same": 1.0, "other": 2.0}, changed=frozenset({"other"}))
    said = of_sets({"same": 1.05, "other": 1.0, "new": 3.0}, forgetting)
    assert said == "\nValidation loss: same 1.0000 -> 1.0500, other 1.0000, new 3.0000"


@pytest.mark.longer
def test_sets_are_evaluated_by_name_before_step_1_and_alike_on_any_ranks(base, tmp_path):
    for ranks, strategy in ((1, ()), (2, ("--strategy", "fsdp"))):
        more = ("--forgetting_budget", "general:9", *strategy)
        train_ranks(ranks, *with_general(base, tmp_path / str(ranks), *more))
    one, two = tmp_path / "1" / "run", tmp_path / "2" / "run"
    steps = [line["step"] for line in lines(one, "eval")]
    assert steps[:2] == [0, 4] and steps[-1] == 16
    for name in ("validation", "general", "copy"):
        assert evaluated(one, name) == pytest.approx(evaluated(two, name), rel=1e-5), name
        perplexity = math.exp(evaluated(one, name)[0])
        assert evaluated(one, name, "perplexity")[0] == pytest.approx(perplexity)
    forgotten, losses = evaluated(one, "general", "forgotten"), evaluated(one, "general")
    assert forgotten == [loss - losses[0] for loss in losses] and forgotten[-1] > 0.3
    assert evaluated(one, "general", "budget") == [9] * len(steps)
    assert "budget" not in metrics(one, "eval")[0]["copy"]
    # Sets of --eval_data don't count.
    assert metrics(one, "eval_loss") == evaluated(one, "validation")


def test_the_copy_probe_is_a_passage_and_the_same_again():
    rows = copy_probe(_Rows(np.arange(1, 500).reshape(-1, 1) % 90), 24, [5, 7], seed=3)
    table = rows[np.arange(len(rows))]
    first, second = np.split(table["input_ids"], 2, axis=1)
    assert (first == second).all() and first.shape == (64, 12) and not np.isin(first, [5, 7]).any()
    assert (table["labels"][:, :13] == IGNORED).all()
    assert (table["labels"][:, 13:] == second[:, 1:]).all()
    again = copy_probe(_Rows(np.arange(1, 500).reshape(-1, 1) % 90), 24, [5, 7], seed=3)
    assert (again[:]["input_ids"] == table["input_ids"]).all()
    short = copy_probe(_Rows(np.arange(1, 500).reshape(-1, 1)), 3, [], seed=3)
    assert (short[:]["labels"] != IGNORED).sum(axis=1).tolist() == [1] * 64


class _Rows:
    def __init__(self, ids):
        self.ids = ids

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, numbers):
        return {"input_ids": self.ids[numbers]}


def test_a_set_that_is_not_packed_is_evaluated_as_plain_transformers_would(
    toys, packed_data, tmp_path
):
    """With padding and an attention mask, beside packed training data whose documents are kept
    apart."""
    generator = np.random.default_rng(1)
    ids = generator.integers(1, VOCABULARY, (8, CONTEXT))
    mask = np.ones_like(ids)
    for row, length in enumerate(generator.integers(5, CONTEXT, 8)):
        ids[row, length:], mask[row, length:] = 0, 0  # padded with the token that ends documents
    split = datasets.Dataset.from_dict({"input_ids": ids.tolist(), "attention_mask": mask.tolist()})
    plain = tmp_path / "plain"
    datasets.DatasetDict({"train": split, "validation": split}).save_to_disk(str(plain))
    run = ("--model_name", toys / "llama", "--train_data_dir", packed_data)
    run += ("--output_dir", tmp_path, "--run_name", "run", "--eval_data", f"plain={plain}")
    train_ranks(1, *run, *"--max_step 1 --precision 32-true --eval_batch_size 4".split())
    model = AutoModelForCausalLM.from_pretrained(toys / "llama").eval()
    total, count = 0.0, 0
    for row, seen in zip(torch.from_numpy(ids), torch.from_numpy(mask)):
        alone = row[: seen.sum()][None]
        with torch.no_grad():
            total += model(alone, labels=alone).loss.item() * (alone.shape[1] - 1)
        count += alone.shape[1] - 1
    assert evaluated(tmp_path / "run", "plain")[0] == pytest.approx(total / count, rel=1e-5)


# ------------------------------------------------------------------------------- the contract


@pytest.mark.longer
def test_a_warning_says_how_much_was_forgotten_and_the_run_goes_on(base, tmp_path):
    train_ranks(1, *replayed(base, tmp_path, "--forgetting_budget", "replay:0.05,copy:9"))
    verdicts = lines(tmp_path / "run", "verdict")
    assert verdicts
    assert all(line["verdict"] == "forgetting" and line["action"] == "warn" for line in verdicts)
    assert "replay" in verdicts[0]["reason"] and "of 0.05 nats" in verdicts[0]["reason"]
    assert metrics(tmp_path / "run")[-1] and metrics(tmp_path / "run", "step")[-1] == 16
    assert verify.main([str(tmp_path / "run")]) == 0


@pytest.mark.longer
@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_a_run_that_would_forget_is_stopped_with_a_saved_checkpoint(base, tmp_path, strategy):
    more = "--forgetting_budget replay:0.05 --forgetting_action stop --strategy".split()
    more += [strategy]
    ended_with([76, 76], *replayed(base, tmp_path, *more))
    last = metrics(tmp_path / "run", "step")[-1]
    assert last < 16 and (tmp_path / "run" / f"step-{last:08d}").is_dir()
    said = status(tmp_path / "run")
    assert said["code"] == 76 and "forgotten: replay" in said["reason"]
    assert said["last_durable_step"] == last and not said["retryable"]
    assert verify.main([str(tmp_path / "run")]) == 0
    # It goes on only with another budget, which is an act of its own, and to the numbers of a run
    # that had that one.
    larger = ("--forgetting_budget", "replay:9")
    again = (*replayed(base, tmp_path, *more), "--resume", "true", *larger)
    assert Job(2, *again).wait() == [2, 2]
    train_ranks(2, *again, "--resume_override", "forgetting_budget")
    whole = tmp_path / "whole"
    train_ranks(2, *replayed(base, whole, *more, *larger))
    for key in ("loss", "eval_loss"):
        assert metrics(tmp_path / "run", key) == metrics(whole / "run", key)
    # Above its value before step 1, not before the resume.
    forgotten = evaluated(tmp_path / "run", "replay", "forgotten")
    assert forgotten == evaluated(whole / "run", "replay", "forgotten")


@pytest.mark.longer
@pytest.mark.parametrize("strategy", ["auto", "fsdp2"])
def test_a_stop_before_the_base_was_measured_leaves_it_to_the_resumed_run(base, tmp_path, strategy):
    ranks = 1 if strategy == "auto" else 2
    more = "--forgetting_budget replay:0.05,copy:9 --forgetting_action stop --strategy".split()
    run = replayed(base, tmp_path, *more, strategy)
    assert Job(ranks, *run, "--run_name", "whole").wait() == [76] * ranks
    job = Job(ranks, *run, failpoint="evaluate:count=2:do=term")  # in the evaluation before step 1
    assert job.wait() == [75] * ranks
    assert saved(tmp_path / "run") == [0]
    assert verify.main([str(tmp_path / "run")]) == 0
    again = Job(ranks, *run, "--resume", "true", failpoint="evaluate:count=3:do=term")
    assert again.wait() == [75] * ranks, "and again"
    assert Job(ranks, *run, "--resume", "true").wait() == [76] * ranks
    for key in ("step", "loss", "eval"):
        assert metrics(tmp_path / "run", key) == metrics(tmp_path / "whole", key), key


@pytest.mark.longer
@pytest.mark.parametrize("name", ["general", "copy"])
def test_a_budget_of_a_set_without_a_base_is_refused(base, tmp_path, name):
    run = flags(base, tmp_path, "--train_data_dir", base / "new", "--max_step", 4)
    train_ranks(1, *run)
    more = ("--resume", "true", "--max_step", 8, "--resume_override", "max_step,forgetting_budget")
    more += ("--eval_data", f"general={base / 'old'}")
    budget = ("--forgetting_budget", f"validation:9,{name}:0.05")
    assert_without_a_base(Job(1, *run, *more, *budget), name)
    train_ranks(1, *run, *more, "--forgetting_budget", "validation:9")
    assert evaluated(tmp_path / "run", "validation", "budget")[-1] == 9
    # as the sentence says
    weights = ("--model_name", tmp_path / "run" / "step-00000004", "--run_name", "anew")
    train_ranks(1, *run, *more[4:], "--resume_override", "", *weights, *budget)


def assert_without_a_base(job, name):
    assert job.wait() == [2]
    assert f"{name!r} wasn't evaluated on these rows before step 1" in job.output[0]


@pytest.mark.longer
@pytest.mark.parametrize("change", ["data", "rows", "copied"])
def test_a_base_of_other_rows_is_refused(base, tmp_path, change):
    """The same name isn't the same set: what was forgotten would be the difference of two sets."""
    run = flags(
        base, tmp_path, "--train_data_dir", base / "new", "--max_step", 4, "--eval_iters", 2
    )
    budget = ("--forgetting_budget", "general:9,copy:9")
    train_ranks(1, *run, *budget, "--eval_data", f"general={base / 'old'},other={base / 'new'}")
    again = (
        *run, "--resume", "true", "--max_step", 8,
        "--resume_override", "max_step,forgetting_budget",
    )
    sets, budgets, name = ("old", "new"), budget, "general"
    if change == "data":
        sets = ("new", "old")
    elif change == "rows":
        again += ("--eval_iters", 1)
    else:
        budgets, name = ("--forgetting_budget", "copy:9,other:9"), "copy"
    job = Job(
        1, *again, *budgets, "--eval_data", f"general={base / sets[0]},other={base / sets[1]}"
    )
    assert_without_a_base(job, name)
    both = ("--eval_data", f"general={base / 'old'},other={base / 'new'}")
    train_ranks(1, *again, *budget, "--eval_iters", 2, *both)
    assert verify.main([str(tmp_path / "run")]) == 0


@pytest.mark.longer
@pytest.mark.parametrize("change", ["document_masking", "passages"])
def test_a_base_that_was_read_otherwise_is_refused(base, packed_data, tmp_path, change):
    run = flags(base, tmp_path, "--train_data_dir", packed_data, "--max_step", 4)
    name, more = "validation", ("--document_masking", "false")
    train_ranks(1, *run, "--forgetting_budget", "validation:9,copy:9")
    if change == "passages":  # a longer row makes longer ones
        long = np.random.default_rng(1).integers(1, VOCABULARY, (6, 3 * CONTEXT))
        split = datasets.Dataset.from_dict({"input_ids": long.tolist()})
        both = datasets.DatasetDict({"train": split, "validation": split})
        both.save_to_disk(str(tmp_path / "long"))
        name, more = "copy", ("--eval_data", f"long={tmp_path / 'long'}")
    override = "max_step,forgetting_budget,document_masking"
    again = (*run, "--resume", "true", "--max_step", 8, "--resume_override", override, *more)
    assert_without_a_base(Job(1, *again, "--forgetting_budget", f"{name}:9"), name)
    job = Job(1, *again)
    assert job.wait() == [0]
    of_others = "Evaluations read other rows of" in job.output[0]
    assert of_others == (name == "validation"), "without a budget nothing is copied"


@pytest.mark.longer
def test_losses_of_other_rows_at_a_checkpoint_judge_no_budget(base, tmp_path):
    """The losses before step 1 and those from here on are of the same rows, those of the process in
    between aren't."""
    run = flags(base, tmp_path, "--train_data_dir", base / "old", "--lr", 1e-7)
    train_ranks(1, *run, "--max_step", 4, "--eval_iters", 6)
    again = (*run, "--resume", "true", "--resume_override", "max_step,forgetting_budget,forgetting_action")
    train_ranks(1, *again, "--max_step", 8, "--eval_iters", 1, "--eval_batch_size", 1)
    [first, *_, last] = evaluated(tmp_path / "run", "validation")
    assert last > first + 0.01, "its row is harder"
    budget = ("--forgetting_budget", f"validation:{(last - first) / 2:.6f}")
    job = Job(1, *again, "--eval_iters", 6, *budget, "--forgetting_action", "stop")
    assert job.wait() == [0], job.output


@pytest.mark.longer
def test_a_stop_in_the_step_of_a_rewind_to_the_beginning_keeps_the_raised_share(base, tmp_path):
    more = "--max_step 8 --max_skipped_steps 1".split()
    run = replayed(base, tmp_path, *NO_BUDGET, *REWIND, *more)
    first = Job(1, *run, failpoint="evaluate:count=30:do=term")  # in the evaluation after step 2
    assert first.wait() == [75] and saved(tmp_path / "run") == [2]
    assert "\ncopy: whether the model uses its context (docs/" in first.output[0], first.output
    # That is made up, and too much was forgotten: the run goes back before it reads anything.
    second = Job(1, *run, "--resume", "true", failpoint="forward:do=term")
    assert second.wait() == [75] and "went back to the beginning" in second.output[0]
    assert (tmp_path / "run" / "step-00000001").is_dir()
    document = read_progress(tmp_path / "run" / "step-00000001")
    assert Fraction(document["mixture"]["raised"]["replay"]) == Fraction(1, 10)
    assert document["guard"]["rewinds"] == 1
    assert document["progress"]["position"] == 3 * 8, "no row was read twice, and none in vain"
    assert verify.main([str(tmp_path / "run")]) == 0
    third = Job(1, *run, "--resume", "true")
    assert third.wait() == [76] and "resumed from" in third.output[0], third.output


@pytest.mark.longer
def test_a_source_that_was_added_goes_back_to_the_beginning_with_the_others(base, tmp_path):
    """Its loss before step 1 isn't known."""
    shutil.copytree(base / "new", tmp_path / "third")
    mix = f"new={base / 'new'}:0.8,old={base / 'old'}:0.2"
    run = flags(base, tmp_path, "--eval_iters", 2, "--forgetting_action", "rewind")
    train_ranks(1, *run, "--max_step", 4, "--data_mix", mix, "--forgetting_budget", "old:9")
    mix = f"new={base / 'new'}:0.7,old={base / 'old'}:0.1,third={tmp_path / 'third'}:0.2"
    changed = "data_mix,max_step,forgetting_budget"
    again = (*run, "--resume", "true", "--resume_override", changed, "--data_mix", mix)
    train_ranks(1, *again, "--max_step", 8, "--forgetting_budget", "old:9")
    job = Job(1, *again, "--max_step", 12, "--forgetting_budget", "old:0.0001")
    # The budget can't be kept, but each rewind has its checkpoint.
    assert job.wait() == [76] and "went back to the beginning" in job.output[0], job.output
    assert "Warning: forgotten: old" in job.output[0]
    assert verify.main([str(tmp_path / "run"), "--no_export"]) == 0


@pytest.mark.longer
def test_a_run_that_is_back_at_its_beginning_and_killed_goes_on_from_there(base, tmp_path):
    """With the raised share, and to the same end."""
    more = "--max_step 8 --eval_iters 2 --keep_last 1".split()
    run = replayed(base, tmp_path, *NO_BUDGET, *REWIND, *more)
    assert Job(1, *run, "--run_name", "whole").wait() == [76]
    killed = Job(1, *run, failpoint="between_steps:count=4:do=kill")  # the second after the rewind
    assert killed.wait() == [-9]
    document = read_progress(tmp_path / "run" / "step-00000000")
    assert Fraction(document["mixture"]["raised"]["replay"]) == Fraction(1, 10)
    assert document["progress"] == {"step": 0, "position": 2 * 8, "tokens": 0}
    # The checkpoints that are aside aren't named.
    assert status(tmp_path / "run")["last_durable_step"] == 0
    again = Job(1, *run, "--resume", "true")
    assert again.wait() == [76] and "step-00000000" in again.output[0]
    for key in ("step", "position", "loss", "eval", "shares"):
        assert metrics(tmp_path / "run", key) == metrics(tmp_path / "whole", key), key
    assert verify.main([str(tmp_path / "run"), "--no_export"]) == 0


@pytest.mark.longer
@pytest.mark.parametrize("where", ["resume.moved_aside:count=2", "publish.renamed"])
def test_a_rewind_to_the_beginning_that_is_killed_leaves_its_line_and_the_undone_ones(
    base, tmp_path, where
):
    """The next start resumes where the rewind has saved, and doesn't go back again."""
    more = ("--forgetting_budget", "replay:0.0001", "--forgetting_action", "rewind")
    more += ("--eval_step_interval", 2, "--max_step", 4, "--eval_iters", 2)
    run = replayed(base, tmp_path, *more, "--max_skipped_steps", 1)
    assert Job(1, *run, failpoint=f"{where}:do=kill").wait() == [-9]
    assert Job(1, *run, "--resume", "true").wait() == [76]
    folder = tmp_path / "run"
    rewinds = [line for line in lines(folder) if line.get("verdict") == "rewind"]
    assert [(line["step"], line["position"]) for line in rewinds] == [(0, 16)]
    undone = (folder / "metrics.undone.jsonl").read_text().splitlines()
    assert {1, 2} <= {json.loads(line)["step"] for line in undone if "loss" in line}


@pytest.mark.longer
@pytest.mark.parametrize(
    ("strategy", "ranks"), [("auto", 1), ("ddp", 2), ("fsdp", 2), ("fsdp2", 2)]
)
def test_a_rewind_to_the_beginning_takes_no_other_weights(base, tmp_path, strategy, ranks):
    """A run that began on one rank, and whose model's folder was written anew, or is gone."""
    model = shutil.copytree(base / "base", tmp_path / "model")
    more = ("--forgetting_action", "rewind", "--eval_iters", 2, "--max_skipped_steps", 1)
    run = (*replayed(base, tmp_path, *more), "--model_name", model)
    assert Job(1, *run, "--max_step", 4, "--forgetting_budget", "replay:9").wait() == [0]
    run += ("--resume", "true", "--strategy", strategy, "--forgetting_budget", "replay:0.0001")
    run += ("--resume_override", "max_step,forgetting_budget")
    for name in ("same", "without"):
        shutil.copytree(tmp_path / "run", tmp_path / name)
    same = Job(ranks, *run, "--run_name", "same")
    assert same.wait() and "went back to the beginning" in same.output[0], same.output
    assert "the run stops" not in same.output[0], "it saved the raised share, and went on"
    changed = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    changed.lm_head.weight.data *= 1.01
    changed.save_pretrained(model)
    job = Job(ranks, *run)
    assert 2 in job.wait(), job.output
    assert "doesn't hold the weights with which this run began" in "".join(job.output)
    shutil.rmtree(model)
    job = Job(ranks, *run, "--run_name", "without")
    assert 2 in job.wait(), job.output
    assert "doesn't hold the weights with which this run began" in "".join(job.output)


@pytest.mark.longer
def test_rewinds_of_evaluations_are_counted_as_those_of_spikes(base, tmp_path):
    more = (*NO_BUDGET, *REWIND, "--max_skipped_steps", 0, "--eval_iters", 2)
    job = ended_with([76], *replayed(base, tmp_path, *more))
    assert "this would be rewind number 1 (--max_skipped_steps 0)" in job.output[0]


@pytest.mark.longer
def test_a_branch_does_not_go_back_before_its_branch_point(base, tmp_path):
    run = replayed(base, tmp_path, *REWIND, "--eval_iters", 2, "--max_step", 4)
    assert Job(1, *run, "--forgetting_budget", "replay:9").wait() == [0]
    branch = (*run, "--run_name", "branch", "--resume", "auto", "--max_step", 8)
    branch += ("--checkpoint", tmp_path / "run" / "step-00000004")
    branch += ("--resume_override", "max_step,forgetting_budget")
    job = ended_with([76], *branch, *NO_BUDGET)
    assert "where this branch began, is gone or had no room left" in job.output[0]
    assert "went back to the beginning" not in job.output[0]


@pytest.mark.longer
def test_rewind_goes_on_with_more_replay_and_ends_inside_the_budget(base, tmp_path):
    more = "--forgetting_budget replay:0.4 --strategy fsdp".split()
    more += "--save_step_interval 2 --max_step 12".split()
    run = replayed(base, tmp_path, *REWIND, *more)
    train_ranks(2, *run)
    folder = tmp_path / "run"
    rewinds = [line for line in lines(folder, "verdict") if line["verdict"] == "rewind"]
    shares = [line["shares"]["replay"] for line in rewinds]
    assert shares and shares == sorted(set(shares))
    assert shares[0] == pytest.approx(0.1) and shares[-1] <= 0.5
    assert evaluated(folder, "replay", "forgotten")[-1] <= 0.4
    assert metrics(folder, "step")[-1] == 12
    # The rows that were read are those of the mixture as it was raised.
    assert verify.main([str(folder)]) == 0
    document = read_progress(folder / "step-00000012")
    assert float(Fraction(document["mixture"]["raised"]["replay"])) == pytest.approx(shares[-1])
    # A resumed run goes on with the raised share, bit for bit.
    after = next(step for step in saved(folder) if step > rewinds[-1]["step"])
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy / "run")
    at = ("--resume", "true", "--checkpoint", copy / "run" / f"step-{after:08d}")
    train_ranks(2, *run, "--output_dir", copy, *at)
    for key in ("step", "loss", "sources", "eval"):
        assert metrics(copy / "run", key) == metrics(folder, key), key


@pytest.mark.longer
@pytest.mark.parametrize(("action", "evaluated_before"), [("rewind", 12), ("stop", 6)])
def test_a_run_killed_after_its_last_evaluation_ends_as_it_would_have(
    base, tmp_path, action, evaluated_before
):
    """A stop has cut that evaluation off, so the last step has a checkpoint without losses."""
    more = ("--forgetting_budget", "replay:0.02", "--forgetting_action", action, "--eval_iters", 2)
    run = replayed(base, tmp_path, *more, "--save_step_interval", 2, "--max_step", 4)
    ends = Job(1, *run, "--run_name", "whole").wait()
    run = (*run, "--run_name", "cut", "--resume", "auto")
    ended_with([75], *run, failpoint=f"evaluate:count={evaluated_before + 2}:do=term")
    assert Job(1, *run, before=_killed_once_it_has_evaluated).wait() == [-9]
    assert Job(1, *run).wait() == ends
    for key in ("step", "loss", "position", "verdict", "eval_loss"):
        assert metrics(tmp_path / "cut", key) == metrics(tmp_path / "whole", key), key
    assert action in ("stop", *metrics(tmp_path / "cut", "verdict")), "it went back"


@pytest.mark.longer
def test_a_run_killed_after_its_first_evaluation_goes_on(base, tmp_path):
    """A stop has cut that evaluation off, so step 0 has a checkpoint without losses."""
    run = (*replayed(base, tmp_path, "--forgetting_budget", "replay:9"), "--resume", "auto")
    assert Job(1, *run, failpoint="evaluate:do=term").wait() == [75]
    assert Job(1, *run, before=_killed_once_it_has_evaluated).wait() == [-9]
    ended_with([0], *run)
    forgotten = evaluated(tmp_path / "run", "replay", "forgotten")
    assert forgotten[0] == 0 and forgotten[-1] > 0


def _killed_once_it_has_evaluated():
    from fabric_llm.run.log import Log

    evaluation = Log.evaluation

    def then_killed(self, *given):
        evaluation(self, *given)
        os.kill(os.getpid(), signal.SIGKILL)

    Log.evaluation = then_killed


@pytest.mark.longer
def test_a_source_of_which_half_is_replayed_ends_the_run(base, tmp_path):
    more = (*NO_BUDGET, *REWIND)
    job = ended_with([76], *replayed(base, tmp_path, *more, "--lr", 5e-2, share=0.3))
    assert "the share of 'replay' is 0.5 already" in job.output[0]
    assert "Without replay" not in job.output[0]
    # The budget is too small, at half the rate as well.
    assert _goes_on(base, tmp_path, more, share=0.3) == 76


@pytest.mark.longer
@pytest.mark.parametrize(("lr", "saved"), [(3e-3, True), (3e-2, False)])
def test_a_run_that_has_forgotten_too_much_says_how_to_go_on(base, tmp_path, lr, saved):
    more = ("--forgetting_budget", "replay:0.3", "--forgetting_action", "stop", "--lr", lr)
    more += ("--eval_step_interval", 1, "--save_step_interval", 1)
    assert Job(1, *replayed(base, tmp_path, *more)).wait() == [76]
    assert _goes_on(base, tmp_path, more) in (0, 76)
    folder = tmp_path / ("run" if saved else "run-2")
    assert metrics(folder, "lr")[-1] == lr / 2, "from where half of the budget was left, or anew"


def _goes_on(base, folder, more, **share):
    """The exit code of the command that STATUS.json names."""
    reason = status(folder / "run")["reason"]
    following = reason.rpartition(": the same command with ")[2].split()
    return Job(1, *replayed(base, folder, *more, *following, **share)).wait()[0]


def test_a_run_on_weights_without_replay_says_what_that_risks_once(base, tmp_path):
    run = flags(base, tmp_path, "--train_data_dir", base / "new", "--max_step", 4)
    job = Job(1, *run)
    assert job.wait() == [0] and job.output[0].count("Without replay a trained model forgets") == 1
    again = Job(1, *run, "--max_step", 5, "--resume", "true", "--resume_override", "max_step")
    assert again.wait() == [0] and "Without replay" not in again.output[0]


@pytest.mark.longer
def test_the_best_checkpoints_follow_the_set_that_is_named(base, tmp_path):
    more = "--keep_last 1 --keep_best 1".split()
    for name, best in (("followed", ("--keep_best_of", "general")), ("default", ())):
        train_ranks(1, *with_general(base, tmp_path, *more, *best, "--run_name", name))
    assert saved(tmp_path / "followed") == [4, 16] and saved(tmp_path / "default") == [16]


# ------------------------------------------------------------------------------- from numbers alone


@pytest.mark.parametrize(
    ("loss", "said"), [(2.00004, ""), (1.9, ""), (2.0001, "0.0001 above"), (3.0, "1.0000 above")]
)
def test_the_end_warns_of_a_rise_that_its_digits_show(loss, said):
    schedule = SimpleNamespace(shares_at=lambda position: {"a": 1.0})
    log = SimpleNamespace(overall=lambda rises: rises["a"])
    forgetting = Forgetting(before={"a": 2.0})
    run = SimpleNamespace(forgetting=forgetting, losses={"a": loss}, log=log, schedule=schedule)
    run.progress = SimpleNamespace(position=8)
    lines = how_it_compares(run)
    assert said in lines and bool(lines) == bool(said)


def test_a_budget_judges_each_set_by_its_value_before_step_1():
    forgetting = Forgetting({"a": 0.1, "b": 0.2}, "stop")
    forgetting.accept_evaluation(0, {"a": 1.0, "b": 2.0, "c": 3.0})
    assert forgetting.verdict == "" and forgetting.before == {"a": 1.0, "b": 2.0, "c": 3.0}
    forgetting.accept_evaluation(5, {"a": 1.1 - 1e-9, "b": 2.2 - 1e-9, "c": 9.0})
    assert (forgetting.verdict, forgetting.over) == ("", ())
    forgetting.accept_evaluation(9, {"a": 1.05, "b": 2.5, "c": 9.0})
    assert (forgetting.verdict, forgetting.over) == ("stop", ("b",))
    assert forgetting.has_room({"a": 1.04, "b": 2.09})
    assert not forgetting.has_room({"a": 1.06, "b": 2.0})
    for not_known in (None, {"a": 1.0}):
        assert not forgetting.has_room(not_known)


def test_a_raised_share_is_taken_from_the_others_in_proportion_in_every_stage():
    mix = parse("{sources: {a: {path: a, weight: 0.6}, b: {path: b, weight: 0.3}, r: {path: r, "
        "weight: 0.1}}, "
                "stages: [{from: 0.5, weights: {b: 1}}, {from: 0.8, weights: {r: 0.7, b: "
                    "0.3}}]}")  # fmt: skip
    raised = at_least(mix, {"r": Fraction(1, 5)}, [64] * 3)
    shares = [[Fraction(w, sum(stage.weights)) for w in stage.weights] for stage in raised.stages]
    fifteenth = Fraction(1, 15)
    assert shares[0] == [8 * fifteenth, 4 * fifteenth, 3 * fifteenth]
    assert shares[1] == [0, Fraction(4, 5), Fraction(1, 5)]
    assert shares[2] == [0, Fraction(3, 10), Fraction(7, 10)]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--forgetting_budget general", "--forgetting_budget takes name:nats"),
        ("--forgetting_budget nan:nan", "--forgetting_budget takes name:nats"),
        ("--forgetting_budget genral:0.1 --eval_data general=OLD", "Did you mean 'general'?"),
        (
            "--forgetting_budget general:0.1",
            "no validation set is named 'general'. There are 'validation', 'copy', 'retrieval'; "
            "--eval_data general=FOLDER adds it.",
        ),
        ("--forgetting_budget validation:0.1,validation:0.2", "is there twice"),
        ("--forgetting_budget validation:0.1 --eval_iters 0", "--eval_iters 0 turns off"),
        ("--forgetting_budget validation:0.1 --forgetting_action stop", "--eval_step_interval"),
        (
            "--forgetting_budget copy:0.1 --forgetting_action rewind --eval_step_interval 2",
            "no source of",
        ),
        ("--eval_data general", "--eval_data takes name=folder"),
        ("--eval_data copy=OLD", "is the name of a probe"),
        ("--probes retrieval,needle", "--probes takes copy or retrieval, comma-separated, not 'n"),
        ("--eval_data validation=OLD", "is evaluated already"),
        ("--eval_data general=nowhere", "No dataset at 'nowhere'"),
        ("--keep_best_of general", "--keep_best_of: no validation set"),
        ("--replay OLD --replay_fraction 1", "must be between 0 and 1"),
        ("--replay_fraction 0.2", "--replay_fraction is the share of --replay"),
        ("--replay NEW", "are both"),
        ("--replay OLD --data_mix a=OLD:1", "is one more source"),
    ],
)
def test_bad_input_gets_one_sentence(base, tmp_path, capsys, words, sentence):
    words = words.replace("OLD", str(base / "old")).replace("NEW", str(base / "new")).split()
    run = ["--model_name", base / "base", "--train_data_dir", base / "new"]
    assert ended(train.main, *run, "--output_dir", tmp_path, *words) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and sentence in said


def test_budgets_are_numbers_of_nats():
    assert parse_budgets("general:0.05, copy:1e-1") == {"general": 0.05, "copy": 0.1}
    assert parse_budgets(None) == {}
