"""Law 9: a packed document's loss does not change with its neighbours."""

import json
import shutil

import datasets
import numpy as np
import pytest
import torch
from conftest import END, documents
from ranks import metrics, toy_run, train_ranks
from transformers import AutoModelForCausalLM

import train
from fabric_llm.data.batches import Batches, document_begins, restarting_positions
from fabric_llm.data.columns import NO_PADDING, Rows
from fabric_llm.data.folders import IGNORED
from fabric_llm.model.capabilities import find_leak
from fabric_llm.model.language_model import LanguageModel


def packed_batch(rows):
    split = datasets.Dataset.from_dict({"input_ids": rows})
    [batch] = Batches(split, 0, len(rows), 1, picked=np.arange(len(rows)), document_end=END).at(0)
    return batch


def test_padding_of_one_source_changes_nothing_of_another():
    """An end behind another one is padding where rows end with it, and else an empty document."""
    ids = np.array([[1, 2, END, END, 3, 4, END, END]])
    rows = Rows([{"input_ids": ids}, {"input_ids": ids}], [NO_PADDING, END])
    batch = Batches(rows, 0, 2, 1, picked=np.arange(2), document_end=END).at(0)[0]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 0, 1, 2, 0], [0, 1, 2, 3, 0, 1, 2, 3]]


@pytest.mark.parametrize("model", ["llama", "gpt2-no-dropout"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_loss_of_a_packed_document_is_that_of_the_document_alone(toys, model, attention):
    how = {"dtype": torch.float32, "attn_implementation": attention}
    language_model = LanguageModel(AutoModelForCausalLM.from_pretrained(toys / model, **how).eval())
    first, second, third = documents([9, 7, 8], seed=1)
    with torch.no_grad():
        batch = packed_batch([first + second + third])
        packed = language_model(**batch)
        alone = [language_model(**packed_batch([document])) for document in (first, second, third)]
        other = [documents([9], seed=2)[0], documents([8], seed=3)[0]]
        elsewhere = language_model(**packed_batch([other[0] + second + other[1]]))
        others = sum(language_model(**packed_batch([document])) for document in other)
        del batch["position_ids"]  # without positions documents do see each other
        together = language_model(**batch)
    assert packed.item() == pytest.approx(sum(alone).item(), rel=1e-6)
    assert (elsewhere - others).item() == pytest.approx(alone[1].item(), rel=1e-5)
    assert together.item() != pytest.approx(packed.item(), rel=1e-4)


@pytest.mark.parametrize("model", ["llama", "gpt2-no-dropout"])
def test_gradients_do_not_cross_either(toys, model):
    causal_lm = AutoModelForCausalLM.from_pretrained(toys / model, dtype=torch.float32)
    language_model = LanguageModel(causal_lm.eval())

    def gradients(rows):
        language_model.zero_grad()
        sum(language_model(**packed_batch([row])) for row in rows).backward()
        return [p.grad.clone() for p in language_model.parameters()]

    first, second = documents([9, 7], seed=1)
    for packed, alone in zip(gradients([first + second]), gradients([first, second])):
        torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)


def test_targets_and_positions():
    batch = packed_batch([[5, 6, END, 7, 8, 9, END, 4]])
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 0]]
    assert batch["labels"].tolist() == [[5, 6, END, IGNORED, 8, 9, END, IGNORED]]
    begins = document_begins(torch.tensor([[END, END, 3]]), END)
    assert restarting_positions(begins).tolist() == [[0, 0, 0]]


def test_a_model_that_lets_documents_see_each_other_is_found_out(toys):
    llama = AutoModelForCausalLM.from_pretrained(toys / "llama")
    assert find_leak(llama) is None
    forward = llama.forward
    llama.forward = lambda *args, position_ids=None, **kwargs: forward(*args, **kwargs)
    assert find_leak(llama) is not None


@pytest.mark.quick_cases(r"fsdp2")
@pytest.mark.parametrize(("strategy", "ranks"), [("auto", 1), ("fsdp", 2), ("fsdp2", 2)])
def test_training_masks_by_default_under_every_strategy(
    toys, tmp_path, packed_data, strategy, ranks
):
    words = "--max_step 3 --precision 32-true --global_batch_size 4 --lr 1e-3 --strategy"
    flags = (*toy_run(toys, tmp_path), "--train_data_dir", packed_data, *words.split(), strategy)
    train_ranks(ranks, *flags, "--run_name", "masked", "--activation_checkpointing", "true")
    train_ranks(ranks, *flags, "--run_name", "plain", "--document_masking", "false")
    masked, plain = metrics(tmp_path / "masked"), metrics(tmp_path / "plain")
    assert masked[0] != pytest.approx(plain[0], rel=1e-4)

    model = LanguageModel(AutoModelForCausalLM.from_pretrained(toys / "llama", dtype=torch.float32))
    split = datasets.load_from_disk(str(packed_data))["train"]
    [batch] = Batches(split, 1234, 4, 1, document_end=END).at(0)
    targets = (batch["labels"][:, 1:] != IGNORED).sum()
    assert masked[0] == pytest.approx((model(**batch) / targets).item(), rel=1e-6)


@pytest.mark.parametrize(
    "change, sentence",
    [
        ("manifest", "document_end 0, not None"),
        ("labels", "train_columns None, not "),
        ("rows", "train_sha256 then, not now"),
    ],
)
def test_a_run_does_not_go_on_with_data_that_is_read_in_another_way(
    toys, tmp_path, packed_data, capsys, change, sentence
):
    """Its tokens are the same, in the 64 rows that are compared."""
    data = shutil.copytree(packed_data, tmp_path / "data")
    manifest = json.loads((data / "manifest.json").read_text())

    def written(digest):
        counted = {"train": {"rows": 40, "sha256": digest}, "validation": {"rows": 8}}
        (data / "manifest.json").write_text(json.dumps({**manifest, "splits": counted}))

    written("then")
    words = ["--model_name", toys / "llama", "--train_data_dir", data, "--output_dir", tmp_path]
    words += "--run_name run --global_batch_size 4 --eval_iters 0 --max_step 2".split()
    train_ranks(1, *words)
    if change == "rows":
        written("now")
    if change == "manifest":
        (data / "manifest.json").unlink()
    if change == "labels":
        splits = datasets.load_from_disk(str(data))
        rows = {name: splits[name]["input_ids"][:] for name in splits}
        shutil.rmtree(data)
        labelled = {
            name: datasets.Dataset.from_dict({"input_ids": ids, "labels": ids})
            for name, ids in rows.items()
        }
        datasets.DatasetDict(labelled).save_to_disk(str(data))
        written("then")
    again = ("--max_step", "4", "--resume", "true", "--resume_override", "max_step")
    with pytest.raises(SystemExit) as ended:
        train.main([*map(str, words), *again])
    assert ended.value.code == 2 and sentence in capsys.readouterr().err
