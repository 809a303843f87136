"""--context_parallel: ranks that share rows compute what one process computes, with documents that
cross their cuts."""

import shutil
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
from conftest import documents, same_tensors, stored
from families import toy_config, write_data, write_model
from ranks import Job, metrics, run_ranks, train_ranks
from test_law_9_packed_documents import packed_batch
from transformers import AutoModelForCausalLM

from fabric_llm.checkpoint.keep import checkpoint_at
from fabric_llm.data.batches import part_of, target_count, token_places
from fabric_llm.data.columns import Rows, pads_before_text
from fabric_llm.model import context_parallel, gate
from fabric_llm.model.context_parallel import context_group
from fabric_llm.model.language_model import LanguageModel
from fabric_llm.plan.model_plan import require_shares
from fabric_llm.verify import __main__ as verify

# ranks; that share rows
STRATEGIES = [("fsdp", 2, 2), ("fsdp2", 2, 2), ("ddp", 2, 2), ("fsdp2", 4, 2), ("fsdp", 4, 4)]
FAMILIES = ["qwen3", "gemma3_text", "mixtral", "gpt2-no-dropout", "phi", "olmo2", "deepseek_v3"]
SIZES = (
    "--lr 1e-3 --max_step 4 --global_batch_size 4 --precision 32-true --eval_iters 4 "
    "--eval_step_interval 2"
)


def run_of(model, data, folder, name, *more):
    places = ("--model_name", model, "--train_data_dir", data, "--output_dir", folder)
    return (*places, "--run_name", name, *SIZES.split(), *more)


def numbers(folder, name):
    keys = ("step", "loss", "grad_norm", "eval_loss", "tokens")
    return {key: metrics(folder / name, key) for key in keys}


def assert_same(found, expected, rel=2e-6):
    for key, values in expected.items():
        assert found[key] == pytest.approx(values, rel=rel), key


@pytest.fixture(scope="module")
def alone(toys, packed_data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    train_ranks(1, *run_of(toys / "llama", packed_data, folder, "packed"))
    return numbers(folder, "packed")


@pytest.mark.longer
@pytest.mark.parametrize(("strategy", "ranks", "sharing"), STRATEGIES)
def test_the_numbers_are_those_of_one_process(
    toys, packed_data, tmp_path, alone, strategy, ranks, sharing
):
    how = ("--strategy", strategy, "--context_parallel", sharing)
    train_ranks(ranks, *run_of(toys / "llama", packed_data, tmp_path, "packed", *how))
    assert_same(numbers(tmp_path, "packed"), alone)
    assert verify.main([str(tmp_path / "packed")]) == 0, "each row was read once"


@pytest.mark.every_eighth(6)
@pytest.mark.longer
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # inside torch's compiler, as the next
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    ("strategy", "more"),
    [
        ("fsdp2", ("--compile", "true")),
        ("fsdp", ("--activation_checkpointing", "full")),
        ("fsdp", ("--compile", "true", "--activation_checkpointing", "offload")),
        ("fsdp2", ("--activation_checkpointing", "selective", "--micro_batch_size", 2)),
        ("ddp", ("--loss", "full")),
    ],
)
def test_other_paths_share_rows(toys, packed_data, tmp_path, alone, strategy, more):
    """Compiled, recomputed, in micro-batches, without chunks of the loss."""
    how = ("--strategy", strategy, "--context_parallel", 2, *more)
    words = run_of(toys / "llama", packed_data, tmp_path, "packed", *how)
    train_ranks(2, *words, timeout_seconds=300)
    assert_same(numbers(tmp_path, "packed"), alone, rel=5e-6)


@pytest.mark.longer
def test_a_run_goes_on_with_any_number_that_shares(toys, packed_data, tmp_path, alone):
    """Laws 2 and 3: bit for bit with the same, the same curve with another, and one of the runs
    exports."""
    flags = run_of(toys / "llama", packed_data, tmp_path, "packed", "--save_step_interval", 2)
    train_ranks(2, *flags, "--context_parallel", 2)
    exact = numbers(tmp_path, "packed")
    go_on = ("--resume", "true", "--checkpoint", tmp_path / "packed" / "step-00000002")
    train_ranks(2, *flags, "--context_parallel", 2, *go_on)
    assert numbers(tmp_path, "packed") == exact
    for ranks, sharing in ((1, 1), (4, 4), (4, 2)):
        train_ranks(ranks, *flags, "--context_parallel", sharing, *go_on)
        assert_same(numbers(tmp_path, "packed"), alone)
    assert verify.main([str(tmp_path / "packed")]) == 0
    assert AutoModelForCausalLM.from_pretrained(checkpoint_at(tmp_path / "packed")) is not None


@pytest.mark.longer
@pytest.mark.parametrize("sharing", [2, 4])
def test_a_mixture_is_shared_and_a_resume_with_as_many_is_the_same_run_bit_for_bit(
    toys, packed_data, tmp_path, sharing
):
    other = shutil.copytree(packed_data, tmp_path / "other")
    flags = ("--model_name", toys / "llama", "--data_mix", f"a={packed_data}:3,b={other}:1")
    flags += (*SIZES.split(), "--save_step_interval", 2, "--output_dir", tmp_path, "--run_name")
    train_ranks(1, *flags, "alone")
    train_ranks(sharing, *flags, "shared", "--context_parallel", sharing)
    assert_same(numbers(tmp_path, "shared"), numbers(tmp_path, "alone"))
    assert verify.main([str(tmp_path / "shared")]) == 0
    go_on = ("--resume", "true", "--checkpoint", tmp_path / "shared" / "step-00000002")
    train_ranks(sharing, *flags, "again", "--context_parallel", sharing, *go_on)
    ends = (stored(tmp_path / name / "step-00000004") for name in ("shared", "again"))
    assert same_tensors(*ends)
    assert numbers(tmp_path, "again") == numbers(tmp_path, "shared")


@pytest.mark.longer
@pytest.mark.every_eighth(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_families_share_rows(toys, tmp_path, family):
    """Windows, experts, learned positions, heads of several sizes."""
    model = toys / family if (toys / family).is_dir() else write_model(family, tmp_path / family)
    data = write_data(tmp_path / "data")
    for name, ranks in (("one", 1), ("two", 2)):
        train_ranks(ranks, *run_of(model, data, tmp_path, name, "--context_parallel", ranks))
    assert_same(numbers(tmp_path, "two"), numbers(tmp_path, "one"), rel=2e-5)
    one, two = (metrics(tmp_path / name, "aux_loss") for name in ("one", "two"))
    assert one == pytest.approx(two, rel=2e-6) and len(one) == 4 * (family == "mixtral")


def batch_of(lengths, rows=1):
    """Equal rows of documents of these lengths."""
    return packed_batch([[t for d in documents(lengths, seed=1) for t in d]] * rows)


def packed_model(folder):
    how = {"dtype": torch.float32, "attn_implementation": "packed"}
    return AutoModelForCausalLM.from_pretrained(folder, **how)


def gradients_of_parts(model_name, lengths):
    """(loss, gradients) of this rank's part of a row, each of the sum over all ranks, and how often
    heads were exchanged."""
    ranks, exchange, calls = torch.distributed.get_world_size(), context_parallel._exchange, []

    def counted(*args):
        calls.append(args[0].shape)
        return exchange(*args)

    context_parallel._exchange = counted
    model = LanguageModel(packed_model(model_name), chunked=True)
    model.context_group = context_group(ranks) if ranks > 1 else None
    batch = part_of(batch_of(lengths), torch.distributed.get_rank(), ranks)
    assert batch["input_ids"].shape == (1, 24 // ranks)
    assert batch["labels"].shape == (1, 24 // ranks + 1)
    loss = model(**batch)
    loss.backward()
    found = [loss.detach(), *(parameter.grad for parameter in model.parameters())]
    for tensor in found:
        torch.distributed.all_reduce(tensor)
    return [tensor.numpy() for tensor in found], len(calls), int(target_count(batch))


# Of rows of 24 tokens, which are cut at 12, or at 6, 12 and 18: ends at, before and behind a cut,
# one document, one of one token.
LENGTHS = [[9, 7, 8], [12, 12], [6, 5, 1, 12], [11, 13], [13, 11], [24], [17, 2, 5]]


@pytest.mark.quick_cases(r"(llama-lengths[0136]|mixtral).*2\]|lengths5-4\]")
@pytest.mark.every_eighth(6)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("model", "lengths"), [*(("llama", some) for some in LENGTHS), ("mixtral", LENGTHS[0])]
)
def test_loss_and_gradients_are_equal_to_rounding(toys, model, lengths, ranks):
    plain, batch = LanguageModel(packed_model(toys / model)), batch_of(lengths)
    loss = plain(**batch)
    loss.backward()
    reports = run_ranks(ranks, gradients_of_parts, toys / model, lengths)
    (found_loss, *found), exchanges, _ = reports[0]
    # Query, key, value and what comes out, of two layers, forward and backward.
    assert exchanges == 4 * 2 * 2
    assert sum(targets for *_, targets in reports) == int(target_count(batch))
    assert found_loss == pytest.approx(loss.item(), rel=1e-6)
    for gradient, parameter in zip(found, plain.parameters(), strict=True):
        expected = parameter.grad
        assert (torch.from_numpy(gradient) - expected).norm() <= 2e-6 * expected.norm()


def test_parts_count_the_tokens_of_whole_rows():
    batch, expected = batch_of([9, 7, 8]), [3, 3, 3, 3, 3, 3, 3, 2, 1]
    assert token_places([batch]).tolist() == expected
    assert token_places([part_of(batch, 1, 2)]).tolist() == expected


def write_masked(folder, mask):
    rows = {"input_ids": [[1, 2, 3, 4]] * 8, "attention_mask": [mask] * 8}
    split = datasets.Dataset.from_dict(rows)
    datasets.DatasetDict({"train": split, "validation": split}).save_to_disk(str(folder))
    return folder


@pytest.mark.quick_cases(r"ranks|attention|batch")
@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (
            "--context_parallel 3",
            "--context_parallel 3: 2 devices x 1 node don't divide by it: give --devices.",
        ),
        (
            "--attention sdpa",
            "exchanges heads around packed attention: take --attention auto, not sdpa.",
        ),
        (
            "--model_name jamba",
            "JambaForCausalLM can't, since tokens meet outside of its attention.",
        ),
        ("--model_name mamba", "MambaForCausalLM can't, since it doesn't take packed attention."),
        ("--model_name gemma2", "Gemma2ForCausalLM can't, since it doesn't take packed attention."),
        (
            "--train_data_dir masked",
            "has an attention_mask, which packed attention doesn't read.",
        ),
        (
            "--global_batch_size 3 --micro_batch_size 2",
            "x 2 devices x 1 node / 2 that share rows = 2: take --micro_batch_size 1.",
        ),
    ],
    ids=["ranks", "attention", "jamba", "mamba", "gemma2", "masked", "batch"],
)
def test_what_cannot_share_rows_is_refused(toys, packed_data, tmp_path, more, sentence):
    flag, value, *others = more.split()
    if flag == "--model_name":
        value = write_model(value, tmp_path / value)
    elif flag == "--train_data_dir":
        value = write_masked(tmp_path / value, [1, 1, 1, 0])
    flags = run_of(toys / "llama", packed_data, tmp_path, "run", "--context_parallel", 2)
    job = Job(2, *flags, flag, value, *others)
    assert job.wait() == [2, 2], job.output
    assert any(sentence in said for said in job.output), job.output


def test_positions_that_depend_on_the_longest_that_a_rank_sees_are_refused():
    config = toy_config("phi3")
    model = SimpleNamespace(config=config, name="phi3")
    require_shares(2, model, "auto", "rows", 64)
    config.rope_parameters = {**config.rope_parameters, "rope_type": "longrope"}
    words = "'phi3' .longrope. depend on the longest that a rank sees"
    with pytest.raises(ValueError, match=words):
        require_shares(2, model, "auto", "rows", 64)


def test_packed_attention_is_not_for_rows_with_padding_before_their_text(toys, tmp_path):
    for mask, is_before in (([1, 1, 1, 0], False), ([0, 1, 1, 1], True), ([1, 0, 1, 1], True)):
        rows = {"input_ids": np.ones((1, 4)), "attention_mask": np.array([mask])}
        assert pads_before_text(Rows([rows])) is is_before
    data = write_masked(tmp_path / "masked", [0, 1, 1, 1])
    job = Job(1, *run_of(toys / "llama", data, tmp_path, "run", "--attention", "packed"))
    assert job.wait() == [2]
    assert "--attention packed: rows have padding before their text" in job.output[0]


@pytest.mark.parametrize("parts", [3, 7])
def test_rows_that_do_not_divide_end_with_padding(parts):
    batch = batch_of([9, 7, 8], rows=2)
    cut = [part_of(batch, part, parts) for part in range(parts)]
    assert len({part["input_ids"].shape for part in cut}) == 1
    assert sum(int(target_count(part)) for part in cut) == int(target_count(batch))
    for name in ("input_ids", "position_ids"):
        whole = torch.cat([part[name] for part in cut], dim=1)
        assert whole[:, :24].equal(batch[name])


def labels_shifted_after_the_cut(batch):
    batch["labels"][:, -1] = -100


def positions_from_zero_on_each_rank(batch):
    batch["position_ids"] -= batch["position_ids"][:, :1].clone()


def documents_that_leak(batch):
    rows, tokens = batch["input_ids"].shape
    batch["document_ends"] = torch.arange(rows + 1, dtype=torch.int32) * 2 * tokens


# In bfloat16, positions that are wrong in one document of a random model are within its rounding,
# see docs/speed.md.
@pytest.mark.quick_cases(r"labels.*bf16")
@pytest.mark.parametrize(
    ("wrong", "precision"),
    [
        (labels_shifted_after_the_cut, "32-true"),
        (labels_shifted_after_the_cut, "bf16-true"),
        (positions_from_zero_on_each_rank, "32-true"),
        (documents_that_leak, "32-true"),
        (documents_that_leak, "bf16-true"),
    ],
)
def test_a_wrong_cut_is_found_before_step_1(toys, packed_data, tmp_path, wrong, precision):
    def cut_wrongly():
        part = gate.part_of

        def cut(*args):
            found = part(*args)
            wrong(found)
            return found

        gate.part_of = cut

    how = ("--context_parallel", 2, "--precision", precision)
    flags = run_of(toys / "llama", packed_data, tmp_path, "run", *how)
    job = Job(2, *flags, before=cut_wrongly)
    assert job.wait() == [2, 2], job.output
    sentence = "the model as it would be trained isn't plain transformers'"
    assert any(sentence in said for said in job.output), job.output
