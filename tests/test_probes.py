"""The probe of retrieval: what it asks, that any ranks measure the same, and that a model which can
find answers it."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ranks import Job, metrics, train_ranks
from test_context_parallel import run_of
from test_forgetting import _Rows
from transformers import AutoModelForCausalLM

from fabric_llm.data.dataset import open_dataset
from fabric_llm.data.folders import IGNORED
from fabric_llm.data.probes import DEPTHS, EACH, Questions
from fabric_llm.model.language_model import by_row

LEFT_OUT = [5, 7]


def questions(context, seed=3):
    return Questions(_Rows(np.arange(1, 4001).reshape(-1, 8) % 90), context, LEFT_OUT, seed)


@pytest.mark.parametrize("context", [8, 24, 256, 2048])
def test_a_key_and_its_value_stand_once_before_they_are_asked_for(context):
    rows = questions(context)
    table, again = rows[np.arange(len(rows))], questions(context)[np.arange(len(rows))]
    assert all((table[name] == again[name]).all() for name in table)
    other = questions(context, seed=4)[np.arange(len(rows))]
    assert (other["input_ids"] != table["input_ids"]).any()
    assert len(rows) == len(DEPTHS) * len(rows.lengths) * EACH
    assert not np.isin(table["input_ids"], LEFT_OUT).any()
    for number, (ids, labels) in enumerate(zip(table["input_ids"], table["labels"])):
        length, depth = rows.about(number)
        asked, pair = np.flatnonzero(labels != IGNORED), ids[length - 3 * rows.value : length]
        # the value at the end is what is asked for
        assert asked.tolist() == list(range(length - rows.value, length))
        assert (labels[asked] == ids[asked]).all()
        found = [at for at in range(length - len(pair)) if (ids[at : at + len(pair)] == pair).all()]
        wanted = (length - 2 * len(pair)) * depth // 100
        # chance repeats three tokens of few
        assert found == [wanted] or (rows.value == 1 and wanted in found)
        assert wanted + len(pair) <= length - len(pair), "and not in the question"
    assert {rows.about(n)[1] for n in range(len(DEPTHS))} == set(DEPTHS), "the first have all"


def measured(folder):
    return [one["retrieval"] for one in metrics(folder, "eval")]


@pytest.fixture(scope="module")
def alone(toys, packed_data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    more = ("--probes", "retrieval", "--eval_iters", 9)
    train_ranks(1, *run_of(toys / "llama", packed_data, folder, "run", *more))
    return measured(folder / "run")


def test_it_says_what_plain_transformers_says(toys, packed_data, alone):
    dataset = open_dataset(packed_data)
    end = dataset.manifest["eos_token_id"]
    rows = Questions(dataset.validation, dataset.context_length, [end], 1234)
    model = AutoModelForCausalLM.from_pretrained(toys / "llama", dtype=torch.float32)
    table = {name: torch.from_numpy(values) for name, values in rows[np.arange(len(rows))].items()}
    with torch.no_grad():
        logits = model(table["input_ids"]).logits[:, :-1]
    labels, asked = table["labels"][:, 1:], table["labels"][:, 1:] != IGNORED
    losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    losses = losses[asked].view(len(rows), -1)
    targets = labels.clamp(min=0)[..., None]
    best_other = logits.scatter(2, targets, -torch.inf).amax(2, keepdim=True)
    margins = (logits.gather(2, targets) - best_other)[..., 0][asked].view(len(rows), -1)
    right = (margins > 0).float()
    first = alone[0]
    assert first["loss"] == pytest.approx(losses.mean().item(), rel=1e-5)
    assert first["accuracy"] == pytest.approx(right.mean().item())
    assert first["exact"] == right.all(dim=1).float().mean()
    assert first["margin"] == pytest.approx(margins.mean().item(), rel=1e-4)
    for length in rows.lengths:
        for depth in DEPTHS:
            some = [n for n in range(len(rows)) if rows.about(n) == (length, depth)]
            margin = margins[some].mean().item()
            assert first[f"margin_of_{length}_at_{depth}"] == pytest.approx(margin, rel=1e-4)
        some = [n for n in range(len(rows)) if rows.about(n)[0] == length]
        assert first[f"accuracy_of_{length}"] == pytest.approx(right[some].mean().item(), rel=1e-5)
    assert "bits_per_byte" not in first and "loss_from_0" not in first


@pytest.mark.longer
@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        (2, "--strategy fsdp2 --context_parallel 2"),
        (2, "--strategy fsdp --loss full"),
        (1, "--eval_batch_size 7 --loss full"),
    ],
)
def test_any_ranks_and_paths_measure_the_same(toys, packed_data, tmp_path, alone, ranks, more):
    more = f"--probes retrieval --eval_iters 9 {more}".split()
    train_ranks(ranks, *run_of(toys / "llama", packed_data, tmp_path, "run", *more))
    first = measured(tmp_path / "run")[0]
    assert first.keys() == alone[0].keys()
    for name, value in alone[0].items():
        assert first[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_a_budget_of_it_stops_a_run(toys, packed_data, tmp_path):
    more = "--forgetting_budget retrieval:0 --forgetting_action stop --eval_step_interval 1 "
    more += "--eval_iters 9 --lr 3e-2"
    flags = run_of(toys / "llama", packed_data, tmp_path, "run", *more.split())
    assert Job(1, *flags).wait() == [76]
    assert "retrieval" in metrics(tmp_path / "run", "reason")[-1]


def test_a_model_that_finds_is_right_by_its_margin():
    rows = questions(256)
    table = {name: torch.from_numpy(values) for name, values in rows[np.arange(len(rows))].items()}
    ids = table["input_ids"]
    logits = 3.0 * F.one_hot(ids[:, 1:], 96).float()
    numbers = torch.arange(len(rows))[:, None].expand_as(ids[:, 1:])
    targets = torch.stack([table["labels"][:, 1:].flatten(), numbers.flatten()], dim=1)
    def answered(logits):
        sums = by_row(len(rows), logits, targets)[1:].view(-1, 3).double().numpy()
        return rows.answered(sums, np.full(len(rows), rows.value))

    found = answered(logits.flatten(0, 1))
    assert found["accuracy"] == found["exact"] == 1 and found["margin"] == pytest.approx(3.0)
    assert answered(torch.zeros(len(targets), 96))["accuracy"] == 0, "a tie isn't right"
