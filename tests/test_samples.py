"""--sample_prompts and events.jsonl: what a run writes down for its report, which changes nothing
else."""

import json
import shutil

import numpy as np
import pytest
import torch
from conftest import VOCABULARY, ended, make_dataset
from ranks import Job, instead, metrics, run_ranks, toy_run, train_ranks
from safetensors.torch import load_file
from test_guard import train_with_faults
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import train
from fabric_llm.data.sources import read_prompts
from fabric_llm.plan import run_status
from fabric_llm.run.samples import continuation
from fabric_llm.verify.inspect_run import verify_run

FLAGS = "--global_batch_size 4 --max_step 4 --save_step_interval 2 --eval_iters 1 --lr 1e-2".split()
TOKENS = 5


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A dataset with a tokenizer: a word is one token."""
    folder = tmp_path_factory.mktemp("samples") / "data"
    make_dataset(folder, np.random.default_rng(0))
    words = {"end": 0, **{f"w{i}": i for i in range(1, VOCABULARY)}}
    tokenizer = Tokenizer(WordLevel(words, unk_token="end"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="end")
    tokenizer.save_pretrained(folder / "tokenizer")
    (folder.parent / "prompts.txt").write_text("w1 w2 w3\n\nw7\n")
    return folder


def flags(toys, data, output, *more):
    words = instead(toy_run(toys, output), ("--train_data_dir", data, *FLAGS, *more))
    return [str(word) for word in words]


def sampled(data):
    return ("--sample_prompts", data.parent / "prompts.txt", "--sample_tokens", TOKENS)


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def greedy(checkpoint, prompt):
    """What plain transformers makes of a prompt."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        for _ in range(TOKENS):
            next_one = model(ids, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
            ids = torch.cat([ids, next_one], dim=1)
    return continuation(tokenizer, tokenizer(prompt)["input_ids"], ids[0].tolist())


@pytest.mark.longer
@pytest.mark.parametrize(
    ("strategy", "ranks", "kind"),
    [("auto", 1, "full"), ("fsdp", 2, "full"), ("fsdp2", 2, "sharded"), ("ddp", 2, "full")],
)
def test_samples_are_those_of_plain_transformers_and_change_nothing(
    toys, data, tmp_path, strategy, ranks, kind
):
    common = ("--strategy", strategy, "--state_dict_type", kind, "--precision", "32-true")
    for name, more in (("plain", ()), ("sampled", sampled(data))):
        train_ranks(ranks, *flags(toys, data, tmp_path, *common, *more, "--run_name", name))
    for key in ("loss", "eval_loss"):
        assert metrics(tmp_path / "plain", key) == metrics(tmp_path / "sampled", key)
    found = lines(tmp_path / "sampled" / "samples.jsonl")
    wanted = [(step, prompt) for step in (0, 2, 4) for prompt in ("w1 w2 w3", "w7")]
    assert [(one["step"], one["prompt"]) for one in found] == wanted
    assert {(one["how"], one["tokens"]) for one in found} == {("greedy", TOKENS)}
    if kind == "full":
        last = [tmp_path / name / "step-00000004" for name in ("plain", "sampled")]
        weights = [load_file(folder / "model.safetensors") for folder in last]
        assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
        for one in found:
            if one["step"]:
                folder = tmp_path / "sampled" / f"step-{one['step']:08d}"
                assert one["text"] == greedy(folder, one["prompt"])


@pytest.mark.longer
def test_a_resumed_run_samples_what_it_makes_anew_and_events_keep_all(toys, data, tmp_path):
    run = tmp_path / "run"
    words = flags(toys, data, tmp_path, *sampled(data), "--run_name", "run")
    train_ranks(1, *words)
    before = lines(run / "samples.jsonl")
    shutil.rmtree(run / "step-00000004")
    (run / "events.jsonl").write_text((run / "events.jsonl").read_text() + '{"time": "2026-')
    train_ranks(2, *words, "--resume", "true")
    after = lines(run / "samples.jsonl")
    assert [one["step"] for one in after] == [0, 0, 2, 2, 4, 4] and after[:4] == before[:4]
    found = run_status.read_events(run)
    said = [(one["event"], one["step"]) for one in found]
    once = [("saved", 4), ("ended", 4)]
    assert said == [("started", 0), ("saved", 2), *once, ("resumed", 2), *once]
    assert found[0]["devices"] == 1 and found[4]["devices"] == 2
    assert found[4]["from"].endswith("step-00000002")
    assert found[0]["model"] == "LlamaForCausalLM" and found[0]["parameters"] > 1000
    assert found[0]["random"] is False
    assert found[-1]["code"] == 0
    assert verify_run(run, exports=False).findings == []


@pytest.mark.longer
def test_samples_are_there_after_a_kill_in_a_branch_and_not_of_steps_that_are_undone(
    toys, data, tmp_path
):
    def sampled_at(name):
        return [one["step"] for one in lines(tmp_path / name / "samples.jsonl")]

    plain = flags(toys, data, tmp_path)
    words, run = (*plain, *sampled(data)), ("--run_name", "run", "--resume")
    assert Job(1, *words, *run, "auto", failpoint="publish.done").wait() == [-9]
    assert Job(1, *words, *run, "auto").wait() == [0]
    assert sampled_at("run") == [0, 0, 2, 2, 4, 4]
    back = ("--checkpoint", tmp_path / "run" / "step-00000002")
    assert Job(1, *words, "--resume", "true", *back, "--run_name", "branch").wait() == [0]
    assert sampled_at("branch") == [0, 0, 2, 2, 4, 4]
    # Also by a process that takes none.
    assert Job(1, *plain, *run, "true", *back, failpoint="between_steps").wait() == [-9]
    assert sampled_at("run") == [0, 0, 2, 2]


@pytest.mark.longer
def test_a_stop_in_the_last_evaluation_leaves_the_last_samples_to_the_resumed_run(
    toys, data, tmp_path
):
    words = flags(toys, data, tmp_path, "--run_name", "run", *sampled(data), "--resume", "auto")
    words += ["--eval_iters", "2", "--eval_batch_size", "1", "--eval_step_interval", "100"]
    # The third batch is the first after step 4: before step 1 there are two.
    assert Job(1, *words, failpoint="evaluate:count=3:do=term").wait() == [75]
    assert [one["step"] for one in lines(tmp_path / "run" / "samples.jsonl")] == [0, 0, 2, 2]
    assert Job(1, *words).wait() == [0]
    assert [one["step"] for one in lines(tmp_path / "run" / "samples.jsonl")] == [0, 0, 2, 2, 4, 4]


@pytest.mark.longer
def test_a_rewind_removes_samples_also_in_a_process_that_takes_none(toys, data, tmp_path):
    run = flags(toys, data, tmp_path, "--run_name", "run", "--save_step_interval", 4, "--lr", 1e-4)
    run = [*map(str, run), "--global_batch_size", "4", "--micro_batch_size", "4"]
    run += ["--spike_threshold", "6", "--spike_action", "rewind", "--max_step"]
    train_ranks(1, *run, 13, *sampled(data))
    assert [one["step"] for one in lines(tmp_path / "run" / "samples.jsonl")][-1] == 13
    again = [*run, "16", "--resume", "true", "--resume_override", "max_step", "--devices", "1"]
    # In step 14, which goes back to 12.
    assert run_ranks(1, train_with_faults, again, {0: [0]}, 100.0) == [0]
    assert metrics(tmp_path / "run", "verdict") == ["rewind"]
    assert [one["step"] for one in lines(tmp_path / "run" / "samples.jsonl")][-1] == 12


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("p.txt", None, "can't be read: No such file"),
        ("p.txt", b"\n \n", "holds 0 prompts; it takes 1 to 64"),
        ("p.txt", b"\xff\xfe\x00", "isn't UTF-8"),
        ("p.txt", b"w1\n" * 2**19, "larger than 1 MiB"),
        ("p.txt", b"\n".join(b"w%d" % i for i in range(65)), "holds 65 prompts; it takes 1 to 64"),
        ("p.jsonl", b'{"prompt": "a"}\nw1\n', "line 2 isn't a JSON object"),
        ("p.jsonl", b'{"prompt": 3}', "line 1 isn't a JSON object"),
        ("p.jsonl", b"[" * 5000, "line 1 isn't a JSON object"),
        ("", b"", "isn't a file"),
        ("p.txt", b"w1 " * 30, "more than the 24 of a row: take a shorter prompt"),
    ],
)
def test_a_bad_file_is_one_sentence(toys, data, tmp_path, capsys, name, content, sentence):
    file = tmp_path / name
    if name and content is not None:
        file.write_bytes(content)
    words = flags(toys, data, tmp_path / "runs", "--sample_prompts", file)
    assert ended(train.main, *words) == 2
    [said] = capsys.readouterr().err.splitlines()
    assert sentence in said and "--sample_prompts" in said


def test_no_tokenizer_is_one_sentence(toys, data, tmp_path, capsys):
    words = instead(toy_run(toys, tmp_path), sampled(data))
    assert ended(train.main, *words, "--max_step", 1) == 2
    assert "needs a tokenizer" in capsys.readouterr().err


def test_prompts_of_json_lines_may_hold_line_breaks(tmp_path):
    file = tmp_path / "p.txt"
    file.write_text('{"prompt": "a\\nb", "more": 1}\n\n{"prompt": " c"}\n{"prompt": " c"}\n')
    assert read_prompts(str(file)) == ["a\nb", " c"]
    file.write_text('\ufeffdef f():\r\n{"prompt": no JSON\r\n')
    assert read_prompts(str(file)) == ["def f():", '{"prompt": no JSON']


def test_a_disk_that_takes_no_event_ends_nothing(tmp_path):
    run_status.record_event(tmp_path / "gone", "saved", 3)
    assert run_status.read_events(tmp_path / "gone") == []
