"""Law 14: the rows that an evaluation reads are a sample of its split, and it says how many of how
many."""

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import CONTEXT, END, VOCABULARY
from ranks import Job, metrics, toy_run
from transformers import AutoModelForCausalLM

from fabric_llm.data.columns import Rows
from fabric_llm.data.dataset import TokenDataset
from fabric_llm.data.folders import IGNORED
from fabric_llm.data.probes import copy_probe
from fabric_llm.data.tasks import Tasks
from fabric_llm.plan.plan import DataPlan
from fabric_llm.run.build import evaluated_sets

SPLITS = 30


def seen(split, eval_batch_size, eval_iters, world_size):
    """The rows of a split that all ranks evaluate, in any order. The first token of each row is its
    number."""
    of_set = TokenDataset(Path("data"), split, split, 4, 1, {})
    text = TokenDataset(Path("data"), numbered(1), numbered(1), 4, 1, {})
    rows = eval_batch_size * eval_iters
    data = DataPlan({"text": text}, {"set": of_set}, rows, {}, [], None, False)
    sizes = SimpleNamespace(eval_batch_size=eval_batch_size, eval_iters=eval_iters)
    flags = SimpleNamespace(training=SimpleNamespace(seed=1), evaluation=sizes)
    rows, passes = [], set()
    for rank in range(world_size):
        batches = evaluated_sets(data, None, flags, rank=rank, world_size=world_size)["set"]
        passes.add(batches.micro_batches)
        for batch in batches.stream(0):
            assert len(batch["labels"]) == eval_batch_size
            has_targets = (batch["labels"][:, 1:] != IGNORED).any(dim=1)
            rows += batch["input_ids"][has_targets, 0].tolist()
    assert len(passes) == 1, "all ranks make as many forward passes"
    return rows


def numbered(count):
    ids = np.repeat(np.arange(count)[:, None], 4, axis=1)
    return Rows([{"input_ids": ids}])


@pytest.fixture(scope="module")
def drawn():
    """(rows of a split, batch size, batches of an evaluation) of many."""
    generator = np.random.default_rng(14)
    found = [(1, 1, 1), (7, 7, 1), *((count, 8, 50) for count in (3, 400, 401, 800, 2000))]
    for _ in range(SPLITS):
        count = int(10 ** generator.uniform(0, 3.6))
        found.append((count, int(generator.integers(1, 17)), int(10 ** generator.uniform(0, 1.8))))
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_each_row_at_most_once_and_the_same_on_any_ranks_and_in_any_batches(drawn, world_size):
    for count, size, iters in drawn:
        split, wanted = numbered(count), min(count, size * iters)
        rows = seen(split, size, iters, world_size)
        assert len(rows) == len(set(rows)) == wanted
        assert sorted(rows) == sorted(seen(split, 1, size * iters, 1))
        if wanted == count and world_size == 1:
            assert rows == list(range(count)), "a split that is read whole, in its order"


def test_sources_in_written_order_have_their_shares(drawn):
    """Of any files behind the first one, and up to any: within one row of the share."""
    generator = np.random.default_rng(15)
    for count, size, iters in drawn:
        rows = np.array(seen(numbered(count), size, iters, 1))
        for edge in generator.integers(0, count + 1, 20):
            far = abs((rows < edge).sum() - len(rows) * edge / count)
            assert far <= 1, (count, size, iters, edge)


def test_rows_that_alternate_have_their_shares(drawn):
    """As in a split in which two languages take turns: within what chance would give."""
    for count, size, iters in drawn:
        rows = np.array(seen(numbered(count), size, iters, 1))
        for kinds in (2, 3, 4, 5, 8):
            share = (np.arange(count) % kinds == 0).mean()
            deviation = math.sqrt(max(len(rows) * share * (1 - share), 1))
            far = abs((rows % kinds == 0).sum() - len(rows) * share)
            assert far < 4.5 * deviation, (count, size, iters, kinds)


# ------------------------------------------------------------------------------- probes and tasks


def test_probes_take_their_tokens_from_all_of_the_text():
    ids = np.repeat(np.arange(1, 4001)[:, None] // 1000, 8, axis=1)  # four sources in written order
    probe = copy_probe(Rows([{"input_ids": ids}]), 16, [], seed=3)
    counts = np.bincount(probe[:]["input_ids"].ravel(), minlength=4)
    assert (counts[:4] > 0.15 * counts.sum()).all()


def tasks_of(sizes, names):
    """Tasks of documents with so many choices, of the tasks `names`."""
    documents = np.repeat(np.arange(len(sizes)), sizes)
    said = {"document": documents, "task": np.array(names)[documents]}
    return Tasks(numbered(len(documents)), said)


@pytest.mark.parametrize("seed", range(6))
def test_of_tasks_whole_documents_are_read_from_all_over_each(seed):
    generator = np.random.default_rng(seed)
    sizes = generator.integers(2, 6, 600) if seed % 2 else np.full(600, 4)
    names = np.where(np.arange(600) % 2 == 0, "even", np.where(np.arange(600) < 300, "low", "high"))
    split = tasks_of(sizes, names.tolist())
    most = int(generator.integers(60, 900))
    rows = seen(split, 4, most // 4, 2)
    read = np.unique(split.about["document"][rows])
    assert sizes[read].sum() == len(rows) <= most // 4 * 4, "all choices of each"
    assert len(rows) > 0.8 * (most // 4 * 4)
    for name in ("even", "low", "high"):
        assert abs((names[read] == name).sum() - len(read) * (names == name).mean()) <= 2
    even = read[read % 2 == 0]
    assert abs((even < 300).mean() - 0.5) <= 2 / len(even), "and the later ones of a task as well"
    assert sorted(rows) == sorted(seen(split, 1, most // 4 * 4, 1))
    assert sorted(seen(split, 8, 10**6, 1)) == list(range(len(split)))


def test_a_document_that_is_longer_than_all_batches_is_read_whole():
    assert len(seen(tasks_of([4, 4], ["one", "one"]), 1, 1, 1)) == 4


# ------------------------------------------------------------------------------- a run


SHARE, ALL, READ = 0.25, 240, 48  # of the second language; rows of the split, and of an evaluation


@pytest.fixture(scope="module")
def languages(tmp_path_factory):
    """A dataset of one language in `train`, and in `validation` behind it of another one, that
    nothing has been read of."""
    generator = np.random.default_rng(3)

    def language(count, factor):
        ids = generator.integers(0, VOCABULARY // 2, (count, CONTEXT)) + factor
        ids[:, 1::2] = (ids[:, ::2] * factor + 3) % VOCABULARY
        return ids

    known, new = language(int(ALL * (1 - SHARE)), 1), language(int(ALL * SHARE), VOCABULARY // 2)
    folder = tmp_path_factory.mktemp("languages") / "data"
    splits = {"train": language(400, 1), "validation": np.concatenate([known, new])}
    rows = {name: {"input_ids": ids.tolist()} for name, ids in splits.items()}
    rows = {name: datasets.Dataset.from_dict(columns) for name, columns in rows.items()}
    datasets.DatasetDict(rows).save_to_disk(str(folder))
    return folder


@pytest.fixture(scope="module")
def run_of_languages(toys, languages, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    flags = "--run_name run --lr 1e-2 --max_step 24 --global_batch_size 8 --precision 32-true "
    flags += f"--eval_batch_size 4 --eval_iters {READ // 4} --strategy fsdp2"
    data = ("--train_data_dir", languages)
    job = Job(2, *toy_run(toys, folder), *data, *flags.split())
    assert job.wait() == [0, 0], job.output
    return folder / "run", job.output[0]


@pytest.mark.longer
def test_the_loss_is_about_that_of_all_rows(languages, run_of_languages):
    folder, _ = run_of_languages
    model = AutoModelForCausalLM.from_pretrained(folder / "step-00000024")
    rows = torch.tensor(datasets.load_from_disk(str(languages))["validation"]["input_ids"])
    with torch.no_grad():
        logits = model(rows).logits[:, :-1].transpose(1, 2)
    losses = F.cross_entropy(logits, rows[:, 1:], reduction="none").mean(dim=1)
    second, first = losses[-ALL // 8 :].mean(), losses[: ALL // 2].mean()
    assert second > first + 1, "the second language wasn't learned"
    said = metrics(folder, "eval_loss")[-1]
    assert abs(said - losses.mean().item()) < 0.15
    sampled = losses.reshape(READ, -1)  # what any choice of one row in each stretch could give
    assert sampled.amin(dim=1).mean() - 1e-5 < said < sampled.amax(dim=1).mean() + 1e-5


@pytest.mark.longer
def test_it_says_how_many_rows_of_how_many(run_of_languages, tmp_path, capsys):
    import export_hf
    from fabric_llm.report.reading import parts_read, read_run

    folder, output = run_of_languages
    assert output.count(f"Evaluations read {READ} of {ALL} rows of validation, evenly spread.") == 1
    assert len(re.findall(rf"validation loss \d\.\d+ \(on {READ} of {ALL} rows\)", output)) == 2
    for one in metrics(folder, "eval"):
        assert (one["validation"]["rows"], one["validation"]["of_rows"]) == (READ, ALL)
    assert parts_read(read_run(folder)) == [f"validation on {READ} of {ALL} rows"]
    card = f"These are of {READ} of the {ALL} rows of validation, evenly spread."
    export_hf.main([str(folder), "--output", str(tmp_path / "hf")])
    assert card in (tmp_path / "hf" / "README.md").read_text()
    (folder / "metrics.jsonl").rename(folder / "elsewhere")  # what the checkpoint itself says
    export_hf.main([str(folder), "--output", str(tmp_path / "other")])
    (folder / "elsewhere").rename(folder / "metrics.jsonl")
    assert card in (tmp_path / "other" / "README.md").read_text()


def test_a_split_that_is_read_whole_is_said_to_be(toys, tmp_path):
    flags = "--run_name run --max_step 1 --global_batch_size 4".split()
    job = Job(1, *toy_run(toys, tmp_path), *flags)
    assert job.wait() == [0] and "Evaluations read all 10 rows of validation.\n" in job.output[0]
    assert all("rows" not in one["validation"] for one in metrics(tmp_path / "run", "eval"))


def as_an_older_version():
    """Measure as versions did that read the first rows."""
    measured_on = DataPlan.measured_on

    def then(data):
        return {name: found[:2] for name, found in measured_on(data).items()}

    DataPlan.measured_on = then


@pytest.mark.longer
@pytest.mark.parametrize("whole", [False, True])
def test_a_run_of_an_older_version_is_not_judged_by_losses_of_other_rows(
    toys, languages, tmp_path, whole
):
    flags = "--run_name run --global_batch_size 8 --verify_start false --save_step_interval 2"
    flags = (*toy_run(toys, tmp_path), "--train_data_dir", languages, *flags.split())
    flags += ("--eval_iters", 1000 if whole else 4)
    budget = ("--forgetting_budget", "validation:9")
    assert Job(1, *flags, *budget, "--max_step", 2, before=as_an_older_version).wait() == [0]
    override = "--resume_override max_step,forgetting_budget"
    flags += (*"--resume true --max_step 4".split(), *override.split())
    job = Job(1, *flags, *budget)
    job.wait()
    if whole:
        assert job.codes == [0] and "Evaluations read other rows" not in job.output[0], job.output
        assert metrics(tmp_path / "run", "eval")[-1]["validation"]["forgotten"] < 0
        return
    assert job.codes == [2]
    assert "'validation' wasn't evaluated on these rows before step 1" in job.output[0]
    assert "An older version read the first rows" in job.output[0]
    job = Job(1, *flags)
    assert job.wait() == [0], job.output
    assert "Evaluations read other rows of 'validation' than before step 1" in job.output[0]
    assert "forgotten" not in metrics(tmp_path / "run", "eval")[-1]["validation"]


# ------------------------------------------------------------------------------- documents of a set


@pytest.mark.longer
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_packed_set_beside_unpacked_data_is_evaluated_with_its_documents_apart(
    toys, packed_data, tmp_path, ranks
):
    flags = "--run_name run --max_step 1 --global_batch_size 4 --precision 32-true "
    flags += f"--eval_batch_size 4 --strategy {'fsdp' if ranks > 1 else 'auto'}"
    data = ("--eval_data", f"packed={packed_data}")
    job = Job(ranks, *toy_run(toys, tmp_path), *data, *flags.split())
    assert job.wait() == [0] * ranks, job.output
    rows = datasets.load_from_disk(str(packed_data))["validation"]["input_ids"]
    first, *_, last = [one["packed"]["loss"] for one in metrics(tmp_path / "run", "eval")]
    assert first == pytest.approx(loss_of_documents(toys, rows), abs=1e-5)
    from fabric_llm import average

    average.main([str(tmp_path / "run"), "--output", str(tmp_path / "hf")])
    note = json.loads((tmp_path / "hf" / "average.json").read_text())
    assert note["eval_loss"]["packed"] == pytest.approx(last, abs=1e-5)


def loss_of_documents(toys, rows):
    """Of each document alone, in plain transformers."""
    model = AutoModelForCausalLM.from_pretrained(toys / "llama", dtype=torch.float32)
    total, targets = 0.0, 0
    for row in rows:
        ends = [at + 1 for at, token in enumerate(row) if token == END]
        for begin, end in zip([0, *ends], [*ends, len(row)]):
            if end - begin > 1:
                ids = torch.tensor([row[begin:end]])
                total += model(ids, labels=ids).loss.item() * (end - begin - 1)
                targets += end - begin - 1
    return total / targets
