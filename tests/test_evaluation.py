"""An evaluation ends: at the end of its split, whatever --eval_iters says, and soon after a request
to stop."""

import os

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import END, make_dataset, same_tensors, stored
from datasets import load_from_disk
from ranks import Job, metrics, toy_run, train_ranks
from transformers import AutoModelForCausalLM

from fabric_llm.base.fabric import Fabric
from fabric_llm.data.batches import restarting_positions
from fabric_llm.model import language_model
from fabric_llm.model.language_model import PLACES
from fabric_llm.training import evaluation
from fabric_llm.verify.inspect_run import verify_run

VALIDATION_ROWS = 40


@pytest.fixture(scope="module")
def data(toys, tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluation") / "data"
    make_dataset(folder, np.random.default_rng(3), validation_rows=VALIDATION_ROWS)
    return folder


SIZES = "--global_batch_size 4 --max_step 4 --eval_batch_size 1 --eval_step_interval 2 --lr 1e-2"


def flags(toys, data, output, *more):
    return (*toy_run(toys, output), "--train_data_dir", data, *SIZES.split(), *more)


@pytest.mark.longer
@pytest.mark.parametrize("ranks", [1, 2])
def test_eval_iters_far_beyond_the_split_evaluate_the_split_once(toys, data, tmp_path, ranks):
    """1000000, as in a tutorial, were 500,000 empty batches for each of two ranks."""
    for name, eval_iters in (("all", VALIDATION_ROWS), ("beyond", 10**12)):
        more = ("--run_name", name, "--eval_iters", eval_iters)
        train_ranks(ranks, *flags(toys, data, tmp_path, *more))
    losses = metrics(tmp_path / "all", "eval_loss")
    assert len(losses) == 3 and losses == metrics(tmp_path / "beyond", "eval_loss")


def counted(folder):
    """Each batch that a rank evaluates is a line in `folder`."""

    def change():
        point, file = evaluation.failpoint, folder / f"batches-{os.environ.get('RANK', 0)}"

        def count(name):
            if name == "evaluate":
                with file.open("a") as lines:
                    lines.write("x\n")
            point(name)

        evaluation.failpoint = count

    return change


@pytest.mark.longer
@pytest.mark.parametrize(("strategy", "ranks"), [("auto", 1), ("fsdp", 2), ("fsdp2", 2)])
def test_a_request_to_stop_is_heard_inside_an_evaluation_and_the_evaluation_is_made_up(
    toys, data, tmp_path, strategy, ranks
):
    more = ("--eval_iters", 1000, "--strategy", strategy, "--run_name")
    words, batches = flags(toys, data, tmp_path, *more), VALIDATION_ROWS // ranks
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train_ranks(ranks, *words, "whole")
    # in the evaluation after step 2
    signalled = f"evaluate:rank={ranks - 1}:count={batches + 3}:do=term"
    job = Job(ranks, *words, "cut", failpoint=signalled, before=counted(tmp_path))
    assert job.wait() == [75] * ranks, job.output
    for rank in range(ranks):
        lines = (tmp_path / f"batches-{rank}").read_text().split()
        assert len(lines) == batches + 3, "soon, and alike on all ranks"
    assert [path.name for path in cut.glob("step-*")] == ["step-00000002"]
    assert len(metrics(cut, "eval_loss")) == 1
    again = f"evaluate:count={batches}:do=kill"  # in the evaluation that is made up
    assert -9 in Job(ranks, *words, "cut", "--resume", "auto", failpoint=again).wait()
    train_ranks(ranks, *words, "cut", "--resume", "auto")
    for key in ("loss", "eval_loss"):
        assert metrics(cut, key) == metrics(whole, key)
    assert same_tensors(*(stored(run / "step-00000004") for run in (cut, whole)))


@pytest.mark.longer
def test_a_resumed_run_takes_no_losses_of_other_rows_from_the_log(toys, data, tmp_path):
    """Of an evaluation that was cut off, and made up with another --eval_iters."""
    words = flags(toys, data, tmp_path, "--run_name", "run", "--resume", "auto")
    cut_off = f"evaluate:count={VALIDATION_ROWS + 3}:do=term"
    all_rows, few = ("--eval_iters", VALIDATION_ROWS), ("--eval_iters", 2)
    assert Job(1, *words, *all_rows, failpoint=cut_off).wait() == [75]
    assert Job(1, *words, *few, failpoint="forward:do=kill").wait() == [-9]
    assert [one["validation"].get("rows") for one in metrics(tmp_path / "run", "eval")] == [None, 2]
    asked = f"evaluate:count={VALIDATION_ROWS}:do=kill"  # it is made on all rows
    assert Job(1, *words, *all_rows, failpoint=asked).wait() == [-9]
    assert Job(1, *words, *all_rows).wait() == [0]
    read = [one["validation"].get("rows") for one in metrics(tmp_path / "run", "eval")]
    assert read == [None, None, None] and not verify_run(tmp_path / "run", exports=False).findings


def test_a_request_to_save_inside_an_evaluation_is_kept_for_the_next_step(toys, data, tmp_path):
    def touch():
        any_rank = evaluation.any_rank

        def touching(fabric, flag):
            if not list((tmp_path / "run").glob("step-*")) and not (tmp_path / "touched").exists():
                (tmp_path / "touched").touch()
                (tmp_path / "run" / "save_now").touch()
            return any_rank(fabric, flag)

        evaluation.any_rank = touching

    job = Job(1, *flags(toys, data, tmp_path, "--run_name", "run", "--eval_iters", 5), before=touch)
    assert job.wait() == [0], job.output
    saved = sorted(path.name for path in (tmp_path / "run").glob("step-*"))
    assert saved == ["step-00000001", "step-00000004"]


def train_smoothed():
    """Another loss: label smoothing."""
    how = {"ignore_index": -100, "reduction": "sum", "label_smoothing": 0.5}
    language_model.token_loss = lambda logits, ids: F.cross_entropy(logits.float(), ids, **how)


def validation_rows(folder):
    return torch.tensor(load_from_disk(str(folder))["validation"]["input_ids"])


@pytest.mark.longer
@pytest.mark.parametrize(
    ("strategy", "ranks", "loss"),
    [("auto", 1, "chunked"), ("auto", 1, "full"), ("fsdp2", 2, "auto")],
)
def test_evaluation_is_plain_cross_entropy_whatever_trains(
    toys, data, tmp_path, strategy, ranks, loss
):
    more = ("--strategy", strategy, "--loss", loss, "--precision", "32-true", "--run_name")
    words = flags(toys, data, tmp_path, *more)
    for name, change in (("plain", lambda: None), ("smoothed", train_smoothed)):
        job = Job(ranks, *words, name, before=change)
        assert job.wait() == [0] * ranks, job.output
        assert "gradients are equal to rounding" in job.output[0], job.output
    plain, other = tmp_path / "plain", tmp_path / "smoothed"
    assert metrics(other, "eval_loss")[0] == metrics(plain, "eval_loss")[0]
    assert metrics(other)[0] != pytest.approx(metrics(plain)[0], rel=1e-3), "which is what trains"
    model = AutoModelForCausalLM.from_pretrained(other / "step-00000004").eval()
    rows = validation_rows(data)
    with torch.no_grad():
        expected = model(rows, labels=rows).loss.item()
    assert metrics(other, "eval_loss")[-1] == pytest.approx(expected, rel=1e-5)


@pytest.mark.quick_cases(r"packed-2-more2")
@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        (1, ("--loss", "chunked")),
        (1, ("--loss", "full")),
        (2, ("--strategy", "fsdp2")),
        (2, ("--strategy", "fsdp", "--context_parallel", 2)),
    ],
)
@pytest.mark.parametrize("kind", ["packed", "rows"])
def test_the_loss_by_position_is_that_of_the_tokens_there(
    toys, data, packed_data, tmp_path, monkeypatch, kind, ranks, more
):
    """Here from 4 tokens on instead of 256. Documents of 7 tokens, and rows of one document."""
    monkeypatch.setattr(evaluation, "EDGES", 4 * 2 ** torch.arange(PLACES - 1))
    folder = packed_data if kind == "packed" else data
    sizes = "--eval_iters 40 --precision 32-true --max_step 1 --run_name run"
    train_ranks(ranks, *flags(toys, folder, tmp_path, *sizes.split(), *more))
    found = metrics(tmp_path / "run", "eval")[0]["validation"]
    rows = validation_rows(folder)
    ends = rows[:, :-1] == (END if kind == "packed" else -1)
    begins = torch.cat([torch.zeros(len(rows), 1, dtype=torch.bool), ends], dim=1)
    places = restarting_positions(begins)
    model = AutoModelForCausalLM.from_pretrained(toys / "llama", dtype=torch.float32)
    with torch.no_grad():
        logits = model(rows, position_ids=places, use_cache=False).logits
    targets, places = rows.masked_fill(begins, -100)[:, 1:], places[:, :-1]
    losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), targets, reduction="none")
    for first in (0, 4, 8, 16):
        inside = (places >= first) & (places < max(2 * first, 4)) & (targets != -100)
        if inside.any():
            expected = losses[inside].mean().item()
            assert found[f"loss_from_{first}"] == pytest.approx(expected, rel=1e-5)
        else:
            assert f"loss_from_{first}" not in found
    expected = losses[targets != -100].mean().item()
    assert metrics(tmp_path / "run", "eval_loss")[0] == pytest.approx(expected, rel=1e-5)


def test_short_documents_have_no_loss_by_position(toys, data, tmp_path):
    train_ranks(1, *flags(toys, data, tmp_path, "--run_name", "run"))
    assert not any("loss_from_0" in one["validation"] for one in metrics(tmp_path / "run", "eval"))


def test_a_slow_evaluation_says_how_far_it_is(monkeypatch, capsys):
    class Slow:
        micro_batches = 3

        def stream(self, position):
            return iter(["a batch"] * 3)

    monkeypatch.setattr(evaluation, "SECONDS_OF_SILENCE", -1.0)
    slow = evaluation.Evaluation(Fabric(accelerator="cpu"), {}, lambda: False, lambda: None)
    assert len(list(slow._until_stopped("old", Slow(), is_first=True))) == 3
    said = [f"evaluating: {done} of 3 batches of old" for done in range(3)]
    assert capsys.readouterr().out.splitlines() == said
