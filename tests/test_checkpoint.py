"""Checkpoints on disk: what lies where, that a name means a complete one, and that nothing is run
to read them."""

import hashlib
import json
import math
import os
import pickle
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from conftest import parts as names
from ranks import assert_same_tensors, metrics, saved, toy_run, train_ranks, weights
from safetensors.torch import load_file
from test_order import claimed_rows
from transformers import AutoModelForCausalLM

import train
from fabric_llm.base import files
from fabric_llm.base.describing import Describing, describe
from fabric_llm.base.faults import Fault
from fabric_llm.base.files import checkpoints, latest
from fabric_llm.checkpoint import keep, retention, writing
from fabric_llm.checkpoint.keep import verified
from fabric_llm.checkpoint.retention import Kept, prune, sweep
from fabric_llm.model import saving
from fabric_llm.model.tensor_files import Tensors
from fabric_llm.plan import run_directory, run_status
from fabric_llm.verify import __main__ as verify
from fabric_llm.weights.export import export
from parse_arguments import parse_train

FLAGS = "--micro_batch_size 4 --eval_iters 0 --lr 1e-2 --precision 32-true --max_step 3".split()
FLAGS += ["--save_step_interval", 1]
EXTEND = ("--resume_override", "max_step")
RUN = ("--run_name", "run")
AGAIN = (*RUN, "--resume", "true")
LEFT = [".lock", "STATUS.json", "arguments.yaml", "events.jsonl", "metrics.jsonl"]  # beside them


@pytest.fixture(scope="module")
def runs(toys, tmp_path_factory):
    """Finished runs `full` (one rank) and `sharded` (two FSDP ranks) with checkpoints at steps 1, 2
    and 3."""
    folder = tmp_path_factory.mktemp("runs")
    flags = (*toy_run(toys, folder, model="llama-tied"), *FLAGS)
    train_ranks(1, *flags, "--run_name", "full")
    train_ranks(2, *flags, *"--run_name sharded --strategy fsdp --state_dict_type sharded".split())
    return folder


@pytest.fixture
def run(runs, tmp_path):
    """A copy of the run `full` to break."""
    shutil.copytree(runs / "full", tmp_path / "run")
    return tmp_path / "run"


def files_of(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def one_rank(toys, output, *flags):
    """train.py in this very process, so that monkeypatches apply to it."""
    words = (*toy_run(toys, output, model="llama-tied"), *FLAGS, *flags)
    train.main([str(word) for word in words])


# ------------------------------------------------------------------------------- layout


def test_layout_of_a_full_checkpoint(runs):
    assert names(runs / "full") == [*LEFT, "step-00000001", "step-00000002", "step-00000003"]
    assert files_of(runs / "full" / "step-00000003") == [
        "MANIFEST.json",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "trainer/optimizer/shard-00001-model-00001-of-00001.safetensors",
        "trainer/probe.safetensors",
        "trainer/progress.json",
    ]


def test_layout_of_a_sharded_checkpoint(runs):
    shards = [f"shard-0000{rank}-model-00001-of-00001.safetensors" for rank in (1, 2)]
    assert files_of(runs / "sharded" / "step-00000003") == [
        "MANIFEST.json",
        "config.json",
        "generation_config.json",
        *(f"trainer/optimizer/{shard}" for shard in shards),
        "trainer/probe.safetensors",
        "trainer/progress.json",
        *(f"weights/{shard}" for shard in shards),
    ]


@pytest.mark.parametrize(
    "ranks, flags",
    [
        (1, ""),
        (1, "--async_save true"),
        pytest.param(2, "", marks=pytest.mark.longer),
        pytest.param(2, "--strategy fsdp2 --async_save true", marks=pytest.mark.longer),
    ],
)
def test_weights_in_several_files_are_resumed_verified_and_exported(
    toys, runs, tmp_path, monkeypatch, ranks, flags
):
    """As those above 5 GB are. The index is a file of the checkpoint like all others."""
    monkeypatch.setattr(saving.WeightFiles.__init__, "__defaults__", ("20KB",))
    words = [*toy_run(toys, tmp_path, model="llama-tied"), *FLAGS, *flags.split(), *RUN]
    words += ["--micro_batch_size", 4 // ranks]
    train_ranks(ranks, *words, "--max_step", 2)
    step = tmp_path / "run" / "step-00000002"
    index = json.loads((step / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert {*files.read(step)["files"], "MANIFEST.json"} == set(files_of(step))
    # An older version didn't list it.
    manifest = files.read(step)
    del manifest["files"]["model.safetensors.index.json"]
    (step / "MANIFEST.json").write_text(json.dumps(manifest))
    train_ranks(ranks, *words, "--resume", "true", *EXTEND)
    assert metrics(tmp_path / "run", "step") == [1, 2, 3]
    assert metrics(tmp_path / "run") == pytest.approx(metrics(runs / "full"), rel=1e-5)
    assert verify.main([str(tmp_path / "run")]) == 0
    (tmp_path / "run" / "step-00000003" / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(Fault, match="model.safetensors.index.json has 2 bytes"):
        files.check_folder(tmp_path / "run" / "step-00000003", hashes=True)


def test_a_full_checkpoint_opens_with_transformers(runs, toys):
    opened, info = AutoModelForCausalLM.from_pretrained(
        runs / "full" / "step-00000003", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    names = load_file(toys / "llama-tied" / "model.safetensors").keys()
    assert weights(runs / "full", 3).keys() == names
    assert opened.lm_head.weight is opened.model.embed_tokens.weight


def test_each_rank_writes_its_part(runs):
    """Together the parts are the model once: nothing is stored twice, no rank holds it all."""
    parts = sorted((runs / "sharded" / "step-00000003" / "weights").iterdir())
    whole, shards = Tensors(parts), [load_file(part) for part in parts]
    numbers = [sum(tensor.numel() for tensor in shard.values()) for shard in shards]
    assert sum(numbers) == sum(tensor.numel() for tensor in whole.values())
    assert min(numbers) > 0.3 * sum(numbers)


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_the_manifest_holds_bytes_and_hash_of_every_other_file(runs, kind):
    folder = runs / kind / "step-00000003"
    manifest = json.loads((folder / "MANIFEST.json").read_text())["files"]
    assert sorted(manifest) == [name for name in files_of(folder) if name != "MANIFEST.json"]
    for name, entry in manifest.items():
        content = (folder / name).read_bytes()
        assert entry == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}, name


def test_progress_json_says_where_the_run_is(runs):
    document = verified(runs / "full" / "step-00000002", hashes=True)
    assert document.pop("model_name").endswith("llama-tied")
    assert document.pop("config_file").endswith("llama-tied/config.json")
    assert len(document["guard"].pop("losses")) == 2
    schedule = document.pop("schedule")
    assert (schedule["lr"], schedule["max_step"], schedule["global_batch_size"]) == (1e-2, 3, 4)
    assert len(document["fixed"].pop("train_fingerprint")) == 64
    measured = document.pop("measured_on")
    assert document.pop("evaluated_on") == measured
    assert set(measured) == {"validation"}
    assert len(measured["validation"][0]) == 64
    assert measured["validation"][1:] == [0, 10], "rows of all, without evaluations"
    assert document.pop("rows_read") == {"from_position": 0, **asdict(claimed_rows(44, 1234, 0, 8))}
    assert document == {
        "progress": {"step": 2, "position": 8, "tokens": 8 * 24},
        "state_dict_type": "full",
        "optimizer": "AdamW",
        "optimizer_state": ["exp_avg", "exp_avg_sq"],
        "fixed": {
            **{"context_length": 24, "train_rows": 44, "row_order": "feistel", "seed": 1234},
            **{"precision": "32-true", "bf16_updates": None, "rope": None},
            **dict.fromkeys(("document_end", "train_columns")),
        },
        "end_step": 3,
        "logged": {"every": 1, "after": 0},
        "guard": {"skipped": 0, "rewinds": 0, "before": {}},
        "first_weights": {"random": False, "left_out": []},
        "scaler": {},
        **dict.fromkeys(("eval_loss", "eval_losses", "rolled_back_to", "branch_of", "code")),
    }


# ------------------------------------------------------------------------------- publishing


def test_everything_is_on_disk_before_the_name(tmp_path, monkeypatch):
    events = []
    fsync, rename = os.fsync, Path.rename
    seen = lambda d: (events.append(os.readlink(f"/proc/self/fd/{d}")), fsync(d))
    monkeypatch.setattr(os, "fsync", seen)
    renamed = lambda *paths: (events.append("rename"), rename(*paths))
    monkeypatch.setattr(Path, "rename", renamed)
    temporary = tmp_path / ".tmp-step-00000001-0"
    (temporary / "trainer").mkdir(parents=True)
    (temporary / "weights").write_text("weights")
    (temporary / "trainer" / "progress.json").write_text("{}")
    entries = describe(temporary, files.files_in(temporary))
    writing.publish(temporary, tmp_path / "step-00000001", {"step": 1, "files": entries})
    before, after = events[: events.index("rename")], events[events.index("rename") + 1 :]
    expected = ["", "weights", "trainer", "trainer/progress.json", "MANIFEST.json"]
    assert sorted(before) == sorted(str(temporary / name) for name in expected)
    assert after == [str(tmp_path)]


def test_much_is_written_in_several_files_and_each_is_hashed_before_the_next_begins(
    runs, toys, tmp_path, monkeypatch
):
    events = []
    start, opened = Describing.start, saving.TensorFile.__init__

    def started(self, names):
        names = list(names)
        events.extend(name for name in names if "/shard-" in name and name not in self.started)
        start(self, names)

    def opening(self, path, *more):
        events.extend(["open"] * ("shard-" in path.name))
        opened(self, path, *more)

    monkeypatch.setattr(writing, "MANY_BYTES", 1)
    monkeypatch.setattr(Describing, "start", started)
    monkeypatch.setattr(saving.TensorFile, "__init__", opening)
    one_rank(toys, tmp_path, *RUN, "--max_step", 1)
    parts = [name for name in files_of(tmp_path / "run" / "step-00000001") if "/shard-" in name]
    assert len(parts) == 4 and events[::2] == ["open"] * 4 and sorted(events[1::2]) == parts
    # and together they are the state
    one_rank(toys, tmp_path, *AGAIN, *EXTEND)
    assert_same_tensors(weights(tmp_path / "run", 3), weights(runs / "full", 3))


def test_nothing_is_overwritten(toys, tmp_path, capsys, monkeypatch):
    (tmp_path / "run" / "step-00000002").mkdir(parents=True)
    one_rank(toys, tmp_path, *RUN, "--max_step", 1)
    assert "Moved to aside-step-00000002" in capsys.readouterr().out
    first = tmp_path / "run" / "step-00000001"
    monkeypatch.setattr("fabric_llm.run.save.step_directory", lambda directory, step: first)
    with pytest.raises(SystemExit) as exit:
        one_rank(toys, tmp_path, *AGAIN, *EXTEND)
    assert exit.value.code == 74 and "step-00000001 exists already" in capsys.readouterr().err
    verified(first, hashes=True)


def test_leftovers_of_saves_and_prunes_are_swept_and_nothing_else(run):
    killed = [f".{name}-12ab34cd" for name in ("STATUS.json", "arguments.yaml", "metrics.jsonl")]
    for name in (*killed, ".metrics.jsonl-mine"):
        (run / name).touch()
    gone = [*killed, ".tmp-step-00000004-ab12", ".trash-step-00000001-cd34"]
    for name in (*gone[3:], ".tmp-mine", ".trash", "aside-step-00000002-x"):
        (run / name).mkdir()
    before = names(run)
    assert sorted(sweep(run)) == gone
    assert names(run) == [name for name in before if name not in gone]


def test_what_a_killed_save_left_goes_before_the_disk_is_asked_for_room(
    run, toys, monkeypatch, capsys
):
    """Or the run could never be started again where the disk holds one checkpoint more than are
    kept."""
    left = run / ".tmp-step-00000004-12ab"
    left.mkdir()
    disk_usage = shutil.disk_usage
    free = lambda folder: disk_usage(folder)._replace(free=0 if left.exists() else 2**40)
    monkeypatch.setattr("fabric_llm.base.files.shutil.disk_usage", free)
    one_rank(toys, run.parent, *AGAIN, "--max_step", 4, *EXTEND)
    assert f"Removed {left.name}" in capsys.readouterr().out and (run / "step-00000004").is_dir()


def test_keeping_fewer_checkpoints_is_advised_where_there_are_some(run, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=0)
    monkeypatch.setattr("fabric_llm.base.files.shutil.disk_usage", lambda folder: usage)
    for folder, advice in ((run, "--keep_last"), (tmp_path, "an --output_dir on another disk")):
        margin = "needs 16.0 MiB, of which 16.0 MiB are a margin, but"
        with pytest.raises(ValueError, match=f"{margin} .*{advice}"):
            writing.require_room(folder, 0, "It")


def test_a_manifest_says_what_the_checkpoint_was_made_from(run):
    document = files.read(run / "step-00000003")
    assert (document["step"], document["world_size"]) == (3, 1)
    assert document["arguments_sha256"] == files.sha256(run / "arguments.yaml")
    assert document["data_fingerprint"]
    assert set(document["versions"]) >= {"torch", "lightning", "transformers"}


def test_logits_that_overflow_are_no_checkpoint(toys, tmp_path, monkeypatch, capsys):
    record = writing.record_probe

    def overflowing(*given):
        probe = record(*given)
        probe["logits"][0, 0] = float("inf")
        return probe

    monkeypatch.setattr(writing, "record_probe", overflowing)
    with pytest.raises(SystemExit) as end:
        one_rank(toys, tmp_path, *RUN)
    assert end.value.code == 76 and "logits holds NaN or infinity" in capsys.readouterr().err
    assert not list((tmp_path / "run").glob("step-*"))


def test_copies_of_an_asynchronous_save_are_said_and_not_made_where_there_is_no_memory_for_them(
    toys, tmp_path, monkeypatch, capsys
):
    sizes, write = [], writing.Background.write

    def measured(background, pending):
        sizes.append(sum(tensor.nbytes for _, tensor in pending.tensors()))
        return write(background, pending)

    monkeypatch.setattr(writing.Background, "write", measured)
    for name, free in (("copied", 2**40), ("waited", 1000)):
        monkeypatch.setattr(writing, "free_memory_bytes", lambda free=free: free)
        one_rank(toys, tmp_path, "--run_name", name, "--async_save", "true")
    copied, waited = capsys.readouterr().out.split("/waited", 1)
    assert copied.count(f"its copies take {files.size(sizes[0])} of a host's memory.") == 1
    assert "Warning: --async" not in copied
    assert len(sizes) == 2, "the last save is waited for"
    assert waited.count("of which 0.0 MiB are free: training waits for the save of step") == 2
    for step in (1, 2, 3):
        ours, theirs = (tmp_path / name / f"step-{step:08d}" for name in ("copied", "waited"))
        for file in (*theirs.rglob("shard-*"), theirs / "model.safetensors"):
            assert file.read_bytes() == (ours / file.relative_to(theirs)).read_bytes()


def test_ranks_share_the_memory_of_their_host():
    free = {"a": 100, "b": 40, "c": None}
    sizes = [(host, size, free[host]) for host, size in (("a", 60), ("a", 50), ("b", 30), ("c", 5))]
    assert writing.tightest_host(sizes) == (110, 100)
    assert writing.tightest_host(sizes[1:]) == (30, 40)


# -------------------------------------------------------------------------- latest, prune, rollback


def test_latest_passes_over_what_only_looks_like_a_checkpoint(run):
    strange = "step-x step- step-9 step-00000009x xstep-00000009 aside-step-00000009-a"
    for name in strange.split():
        (run / name).mkdir()
        (run / name / "MANIFEST.json").write_text("{}")
    shutil.copytree(run / "step-00000001", run / "step-99999999")
    (run / "step-123456789").mkdir()  # no manifest
    (run / "step-00000013").write_text("a file")
    assert latest(run).name == "step-99999999"
    shutil.copytree(run / "step-00000001", run / "step-123456789", dirs_exist_ok=True)
    assert [path.name for path in checkpoints(run)][-2:] == ["step-99999999", "step-123456789"]
    assert latest(run / "nowhere") is None and latest(run / "step-x") is None


def test_prune_keeps_the_best(tmp_path):
    for step, loss in ((1, 2.5), (2, 2.7), (3, 2.6)):
        found_checkpoint(tmp_path, step, eval_loss=loss)
    prune(tmp_path, Kept(1, best=1))
    assert saved(tmp_path) == [1, 3]


def test_the_best_of_a_mixture_are_compared_by_the_same_shares(tmp_path):
    """First 90 % easy, later 90 % hard: the means that were logged compare the shares."""
    stages = [{"begins": 0, "weights": {"easy": 9, "hard": 1}}]
    stages += [{"begins": 12, "weights": {"easy": 1, "hard": 9}}]
    both = {"easy": 100, "hard": 100}
    facts = {"fixed": {"train_rows": both, "context_length": both, "seed": 1}}
    facts["mixture"] = {"sources": ["easy", "hard"], "segments": stages}
    for step, easy, hard, mean in ((1, 4.3, 4.9, 4.36), (2, 4.1, 4.8, 4.73), (3, 4.2, 4.9, 4.83)):
        losses = {"easy": easy, "hard": hard}
        found_checkpoint(tmp_path, step, eval_loss=mean, eval_losses=losses, **facts)
    prune(tmp_path, Kept(1, best=1))
    assert saved(tmp_path) == [2, 3]


def test_losses_of_other_rows_are_not_compared_and_have_their_own_best(tmp_path):
    """A run that was resumed with another --eval_iters: its new rows may be harder, or easier."""
    few, many = {"validation": ["abc", 2, 256]}, {"validation": ["abc", 100, 256]}
    for step, rows, loss in ((1, many, 2.0), (2, many, 2.1), (3, few, 9.0), (4, few, 9.5)):
        found_checkpoint(tmp_path, step, eval_loss=loss, evaluated_on=rows)
    found_checkpoint(tmp_path, 5, eval_loss=9.6, evaluated_on=few)
    prune(tmp_path, Kept(1, best=1))
    assert [files.step_of(path) for path in checkpoints(tmp_path)] == [1, 3, 5]


def found_checkpoint(run, step, **document):
    folder = run / f"step-{step:08d}"
    (folder / "trainer").mkdir(parents=True)
    (folder / "MANIFEST.json").touch()
    document["progress"] = {"step": step, "position": 8 * step, "tokens": 0}
    (folder / "trainer" / "progress.json").write_text(json.dumps(document))


def test_prune_counts_what_was_due_and_the_newest_stays(tmp_path):
    """Step 5 was asked for, such as by a stop: a run that wasn't stopped keeps the same others."""
    for step in (2, 4, 5):
        found_checkpoint(tmp_path, step)
    assert prune(tmp_path, Kept(2, interval=2)) == []
    found_checkpoint(tmp_path, 6)
    prune(tmp_path, Kept(2, interval=2))
    assert saved(tmp_path) == [4, 6]


def test_prune_counts_what_was_moved_aside_and_takes_it_first(tmp_path):
    for step in (2, 4, 6, 8):
        found_checkpoint(tmp_path, step)
    pinned, other = sorted(retention.move_aside(tmp_path, 4))
    (tmp_path / f"{pinned}.pinned").touch()
    aside = [pinned, f"{pinned}.pinned", other]
    prune(tmp_path, Kept(3, interval=2))
    assert names(tmp_path) == [*aside, "step-00000002", "step-00000004"]
    found_checkpoint(tmp_path, 6)
    prune(tmp_path, Kept(3, interval=2))
    assert names(tmp_path) == [*aside[:2], "step-00000002", "step-00000004", "step-00000006"]


@pytest.mark.parametrize("is_renamed", [True, False])
def test_a_kill_while_one_is_moved_aside_leaves_it_pinned(tmp_path, monkeypatch, is_renamed):
    def killed(path, target, rename=Path.rename):
        if is_renamed:
            rename(path, target)
        raise KeyboardInterrupt

    found_checkpoint(tmp_path, 2)
    (tmp_path / "step-00000002.pinned").touch()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "rename", killed)
        retention.move_aside(tmp_path, 0)
    for _ in range(2):
        [folder] = [path for path in tmp_path.iterdir() if path.is_dir()]
        assert retention.is_pinned(folder) and folder.name.startswith("aside") == is_renamed
        retention.sweep(tmp_path)
    assert names(tmp_path) == [folder.name, f"{folder.name}.pinned"]


def test_prune_leaves_one_to_go_back_to(tmp_path):
    for step, loss in ((2, 1.0), (4, 1.1), (5, 1.0), (6, 2.0), (8, 2.0)):
        found_checkpoint(tmp_path, step, eval_losses={"old": loss})
    has_room = lambda document: document["eval_losses"]["old"] < 1.5
    prune(tmp_path, Kept(1, interval=2, to_go_back_to=has_room))
    assert saved(tmp_path) == [4, 8], "the newest that is due"


def test_losses_that_only_the_log_has_count_as_a_checkpoint_s_own(tmp_path):
    """A stop cut off the evaluation of step 2, and a resumed run has made it. That of step 4 was of
    an undone step."""
    for step in (2, 4, 6):
        found_checkpoint(tmp_path, step)
    old = {"old": {"loss": 1.0}}
    both = {**old, "new": {"loss": None}}
    lines = [{"step": 2, "position": 16, "eval_loss": 1.5, "eval": both}]
    lines += [{"step": 4, "position": 99, "eval_loss": 1.0, "eval": old}]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    known, unknown = (keep.read_progress(tmp_path / f"step-0000000{step}") for step in (2, 4))
    assert known["eval_loss"] == 1.5 and known["eval_losses"]["old"] == 1.0
    assert math.isnan(known["eval_losses"]["new"])
    assert not keep.is_evaluated(unknown)
    prune(tmp_path, Kept(1, best=1, interval=2))
    assert saved(tmp_path) == [2, 6]


def test_a_prune_that_is_refused_is_a_warning(run, monkeypatch, capsys):
    rename = Path.rename

    def refused(path, target):
        if ".trash" in target.name:
            raise PermissionError(13, "Permission denied")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refused)
    assert prune(run, Kept(1)) == []
    assert "couldn't be removed: Permission denied" in capsys.readouterr().out
    assert len(checkpoints(run)) == 3


def test_a_prune_that_is_cut_off_leaves_no_half_checkpoint(run, monkeypatch):
    def killed(path):
        (path / "config.json").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            prune(run, Kept(1))
    assert saved(run) == [2, 3]
    for path in checkpoints(run):
        verified(path, hashes=True)
    assert len(sweep(run)) == 1


def test_a_directory_is_removed_while_it_is_locked(tmp_path, monkeypatch):
    """So that no run begins in it meanwhile."""
    folder, rmdir, held = tmp_path / "run", Path.rmdir, []
    run_directory.lock(folder)
    watched = lambda path: held.append(path in run_directory._locks) or rmdir(path)
    monkeypatch.setattr(Path, "rmdir", watched)
    run_directory.leave(Fault("wrong"), has_plan=False)
    assert held == [True] and not folder.exists() and not run_directory._locks


def test_parents_that_a_start_has_made_are_named_and_go_with_it(tmp_path):
    """What another run has begun there stays."""
    all_of_them = {"disk", "disk/runs", "disk/runs/other"}
    for other, left in ((None, set()), ("disk/runs/other", all_of_them)):
        folder = tmp_path / "disk" / "runs" / "run"
        run_directory.lock(folder)
        assert run_directory.created_parent(folder) == tmp_path / "disk"
        if other is not None:
            (tmp_path / other).mkdir()
        run_directory.leave(Fault("wrong"), has_plan=False)
        assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")} == left
    run_directory.lock(folder)
    assert run_directory.created_parent(folder) is None
    run_directory.unlock(folder)


def test_what_was_fetched_into_a_new_directory_stays_and_says_how_it_ended(tmp_path):
    """A STATUS.json that came with it, of a run that is at work, would have it started again."""
    folder = tmp_path / "run"
    run_directory.lock(folder)
    (folder / "step-00000001").mkdir()
    (folder / ".mirror-owner").write_text("me")
    (folder / run_status.STATUS).write_text('{"code": null, "reason": "running"}')
    run_directory.leave(Fault("wrong"))
    assert run_status.read_status(folder)["code"] == 2 and not run_directory._locks
    left = {path.name for path in folder.iterdir()}
    assert left > {"step-00000001", ".mirror-owner"}


def test_a_lock_that_was_removed_is_made_anew(tmp_path, monkeypatch):
    folder, flock, tries = tmp_path / "run", run_directory.fcntl.flock, []

    def removed_before(descriptor, how):
        tries.append(descriptor)
        if len(tries) == 1:  # by a run that didn't begin
            (folder / run_directory.LOCK).unlink()
            folder.rmdir()
        flock(descriptor, how)

    monkeypatch.setattr(run_directory.fcntl, "flock", removed_before)
    run_directory.lock(folder)
    assert len(tries) == 2 and (folder / run_directory.LOCK).is_file()
    run_directory.unlock(folder)


def test_a_file_that_is_gone_while_one_looks_is_no_strange_thing(tmp_path, monkeypatch):
    """As temporary files of a run that writes its status."""
    (tmp_path / ".STATUS.json-1234").touch()
    iterdir = Path.iterdir

    def gone(path):
        for name in iterdir(path):
            if name.name.startswith(".STATUS"):
                name.unlink()
            yield name

    monkeypatch.setattr(Path, "iterdir", gone)
    run_directory.lock(tmp_path)
    run_directory.unlock(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(Fault, match="neither a file nor a folder"):
        run_directory.lock(tmp_path)


def test_rollback_moves_newer_checkpoints_aside(toys, run, capsys):
    before = weights(run, 3)
    one_rank(toys, run.parent, "--resume", "true", "--checkpoint", run / "step-00000001")
    aside = [name for name in names(run) if name.startswith("aside-")]
    out = capsys.readouterr().out
    assert len(aside) == 2 and all(f"Moved to {name}" in out for name in aside)
    (third,) = run.glob("aside-step-00000003*")
    assert_same_tensors(load_file(third / "model.safetensors"), before)
    assert saved(run) == [1, 2, 3]


# ------------------------------------------------------------------------------- no code in it


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_nothing_is_pickled_or_unpickled(toys, tmp_path, monkeypatch, kind):
    """Saving, resuming and exporting, with every unpickler out of order."""

    def never(*args, **kwargs):
        raise AssertionError("pickle")

    for module in (torch, pickle):
        for name in ("load", "save", "loads", "dump", "dumps", "Unpickler", "Pickler"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, never)
    more = ("--state_dict_type", kind)
    one_rank(toys, tmp_path, *RUN, *more, "--max_step", 2, "--num_workers", 0)
    one_rank(toys, tmp_path, *AGAIN, *more, *EXTEND)
    export(tmp_path / "run" / "step-00000003", tmp_path / "hf")


# ------------------------------------------------------------------------------- the run directory


def choose(parent, run_name=None, resumes=False, given=None):
    words = ["--model_name=model", "--train_data_dir=data", f"--output_dir={parent}"]
    words += [f"--resume={str(resumes).lower()}"]
    flags = {"run_name": run_name, "checkpoint": given}
    words += [f"--{name}={value}" for name, value in flags.items() if value is not None]
    return run_directory.directory(parse_train(words))


def test_default_name():
    name = run_directory.default_name
    assert name("meta-llama/Meta-Llama-3-8B", "data/mine") == "Meta-Llama-3-8B-mine"
    assert name("checkpoints/first/step-00000100", "data/mine/") == "first-mine"


def test_a_run_that_replays_is_called_after_its_new_data():
    words = ["--model_name", "m", "--output_dir", "nowhere"]
    replays = parse_train([*words, "--train_data_dir", "data/basque", "--replay", "data/general"])
    assert run_directory.directory(replays) == Path("nowhere/m-basque")
    mixes = parse_train([*words, "--data_mix", "a=data/x:1,b=data/y:2"])
    assert run_directory.directory(mixes) == Path("nowhere/m-a-b")


def test_new_runs_are_numbered_and_resume_takes_the_newest(run):
    parent = run.parent
    assert choose(parent) == parent / "model-data"
    for name in ("model-data", "model-data-2", "model-data-10"):
        shutil.copytree(run, parent / name)
    assert choose(parent) == parent / "model-data-3"
    assert choose(parent, resumes=True) == parent / "model-data-10"
    assert choose(parent, "model-data", resumes=True) == parent / "model-data"
    assert choose(parent, "mine") == parent / "mine"
    assert choose(parent, None, True, run / "step-00000001") == run


@pytest.mark.parametrize("number, before", [(2, "model-data"), (3, "model-data-2")])
def test_a_new_run_names_the_one_before_it_that_can_go_on(run, number, before):
    folder = run.parent / f"model-data-{number}"
    shutil.copytree(run, run.parent / before)
    words = ["--model_name=model", "--train_data_dir=data", f"--output_dir={run.parent}"]

    def said(*more):
        return run_directory.unfinished_before(parse_train([*words, *more]), folder)

    for code, retryable in ((75, True), (None, True), (0, False), (76, False)):
        run_status.write_status(run.parent / before, code, "", 1, retryable)
        assert bool(said()) == retryable
    run_status.write_status(run.parent / before, 75, "", 1, True)
    assert f"--run_name {before} --resume true" in said()
    assert said("--run_name", folder.name) == said("--resume", "true") == ""
    assert said("--train_data_dir", f"data-{number}") == "", "the first run on other data"
    for path in (run.parent / before).glob("step-*"):
        shutil.rmtree(path)
    run_status.write_status(run.parent / before, 75, "", None, True)
    assert said() == "", "there is nothing to go on from"


@pytest.mark.parametrize("name", ["..", ".", "", "a/b", "a/"])
def test_a_run_name_is_a_plain_name(tmp_path, name):
    with pytest.raises(ValueError, match="must be a plain name"):
        choose(tmp_path, name)


def test_runs_are_neither_mixed_nor_made_up(run):
    with pytest.raises(ValueError, match="no complete checkpoint"):
        choose(run.parent, "other", resumes=True)
    (run.parent / "started").mkdir()  # and killed before its first checkpoint
    (run.parent / "started" / "arguments.yaml").touch()
    with pytest.raises(ValueError, match="'.*started': --resume auto begins it anew; other runs"):
        choose(run.parent, "started", resumes=True)
    assert choose(run.parent, "started") == run.parent / "started"
    assert names(run.parent) == ["run", "started"], "nothing is created"


def test_where_files_cannot_be_made(tmp_path):
    run_directory.require_writable(tmp_path / "a" / "b" / "run")
    assert names(tmp_path) == []
    for path in ("/dev/null/runs/run", "/proc/self"):  # the second is there, and takes no files
        with pytest.raises(ValueError, match="can't be written"):
            run_directory.require_writable(Path(path))
