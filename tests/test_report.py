"""`python -m fabric_llm.report`: what the page says of runs of every kind, and that it opens in a
browser without a network."""

import errno
import html.parser
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import CONTEXT
from ranks import run_ranks, toy_run, train_ranks
from test_guard import train_with_faults

from fabric_llm.base.faults import Fault
from fabric_llm.report import __main__ as command
from fabric_llm.report import figures, page, reading

pytest.importorskip("plotly", reason="plotly isn't installed: pip install -e '.[report]'")
ROOT = Path(__file__).parent.parent
HOSTILE = (
    "</script><script>alert(1)</script><img src=http://127.0.0.1/x "
    "onerror=alert(2)>'\"&\u2028<b>%{x}"
)
LARGEST_BYTES = 8_000_000


class Page(html.parser.HTMLParser):
    """Tags with their attributes, the text that is seen, and the data of a page."""

    def __init__(self, file):
        super().__init__()
        self.tags, self.words, self.inside = [], [], []
        self.feed(file.read_text())
        self.content = file.read_text()
        said = self.content.split('<script type="application/json" id="page-data">')[1]
        self.data = json.loads(said.split("</script>")[0])

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.inside.append(tag)

    def handle_endtag(self, tag):
        if tag in self.inside:
            while self.inside.pop() != tag:
                pass

    def handle_data(self, data):
        if not {"script", "style"} & set(self.inside):
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())

    def traces(self, name):
        return next(chart["traces"] for chart in self.data["charts"] if chart["name"] == name)

    def lines(self, name):
        return [
            {
                "set": html.unescape(trace["name"]),
                "is_trend": trace.get("hoverinfo") == "skip",
                "dash": trace["line"]["dash"],
                "x": trace["x"],
                "y": trace["y"],
            }
            for trace in self.traces(name)
        ]

    def events(self):
        """The rows of the table of events, each with its step, kind and words."""
        table = re.search(r'aria-label="Events">.*?</table>', self.content, re.S)[0]
        rows = [re.findall(r"<td[^>]*>(.*?)</td>", row, re.S) for row in table.split("<tr>")]
        return [
            {"kind": kind.lower(), "x": int(step.replace(",", "")), "words": html.unescape(words)}
            for *_, step, _, kind, words in filter(None, rows)
        ]

    def names(self):
        return [chart["name"] for chart in self.data["charts"]]


def training(step, **more):
    numbers = {
        "loss": 9.0 / step,
        "lr": 1e-3 / step,
        "grad_norm": 1.0 + step % 3,
        "tokens": 2048 * step,
    }
    numbers |= {"tokens_per_second": 4000.0, "peak_memory_gib": 0.5, "updated_fraction": 1.0}
    return {"step": step, **numbers, "data_seconds": 0.01, "wait_seconds": 0.02, **more}


def made(folder, lines, *, flags=None, status=None, events=(), samples=()):
    """A run directory, written by hand."""
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    kept = {
        "model_name": "m",
        "train_data_dir": "d",
        "lr": 1e-3,
        "global_batch_size": 8,
        "context_length": 256,
    }
    (folder / "arguments.yaml").write_text(json.dumps({**kept, **(flags or {})}))
    said = {
        "code": 0,
        "reason": "done",
        "step": lines[-1]["step"] if lines else None,
        "last_durable_step": None,
    }
    (folder / "STATUS.json").write_text(json.dumps({**said, **(status or {})}))
    for name, many in (("events", events), ("samples", samples)):
        if many:
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in many))
    return folder


def report(*folders, output=None, code=0, more=()):
    output = output or folders[0] / "report.html"
    assert command.main([*map(str, folders), "--output", str(output), *more]) == code
    return Page(output)


EVALUATIONS = [
    {"step": 0, "tokens": 0, "eval_loss": 3.0}
    | {
        "eval": {
            "general": {"loss": 2.0},
            "code": {"loss": 4.0, "bits_per_byte": 1.5},
            "copy": {"loss": 1.0},
        }
    },
    {"step": 20, "tokens": 40960, "eval_loss": 2.5}
    | {
        "eval": {
            "general": {"loss": 2.1, "forgotten": 0.1, "budget": 0.05, "perplexity": 8.2},
            "code": {"forgotten": -1.1, "loss": 2.9, "bits_per_byte": 1.1},
            "copy": {"loss": 0.5},
        }
    },
]


# ----------------------------------------------------------------------- what is shown of which run


@pytest.mark.longer
def test_a_real_run_that_was_resumed(toys, tmp_path):
    flags = (
        *toy_run(toys, tmp_path), "--run_name", "run", "--global_batch_size", 4, "--eval_iters", 1,
        "--lr", 1e-2,
    )
    flags += ("--max_step", 4, "--save_step_interval", 2)
    train_ranks(1, *flags)
    run = tmp_path / "run"
    shutil.rmtree(run / "step-00000004")
    train_ranks(1, *flags, "--resume", "true")
    shown = report(run)
    [line] = shown.lines("loss")
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    training_lines = [one for one in logged if "loss" in one]
    assert line["x"] == [1, 2, 3, 4]
    assert line["y"] == pytest.approx([one["loss"] for one in training_lines], rel=1e-5)
    assert [line["set"] for line in shown.lines("eval_loss")] == ["validation"]
    kinds = [event["kind"] for event in shown.events()]
    assert kinds == ["started", "saved", "resumed", "saved", "done", "saved", "done"]
    assert [mark["x0"] for mark in shown.data["marks"]] == [2], (
        "an upright line where it was resumed"
    )
    assert "LlamaForCausalLM" in shown.text and "4 of 4" in shown.text


@pytest.mark.longer
def test_a_rewind_stages_and_an_average_are_drawn(toys, tmp_path):
    paths = {"new": toys / "many", "old": toys / "data"}
    sources = {name: {"path": str(path), "weight": 0.5} for name, path in paths.items()}
    stages = [{"from": 0.5, "weights": {"new": 0.25, "old": 0.75}}]
    (tmp_path / "mix.yaml").write_text(json.dumps({"sources": sources, "stages": stages}))
    flags = (
        "--model_name", toys / "gpt2-no-dropout", "--data_mix", tmp_path / "mix.yaml",
        "--output_dir", tmp_path,
    )
    flags += (
        "--run_name", "run", "--devices", 1, "--global_batch_size", 4, "--micro_batch_size", 1,
        "--lr", 1e-4,
    )
    flags += (
        "--max_step", 16, "--save_step_interval", 4, "--eval_step_interval", 4, "--eval_iters", 1,
    )
    flags += (
        "--spike_threshold", 6, "--spike_action", "rewind", "--ema_decay", 0.9,
        "--log_step_interval", 10,
    )
    spike = {0: range(4 * 13, 4 * 14)}  # step 14
    assert run_ranks(1, train_with_faults, list(map(str, flags)), spike, 100.0) == [0]
    shown = report(tmp_path / "run")
    [kept] = shown.lines("loss")
    assert kept["x"] == [1, 4, 8, 10, 12, 16]
    read = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-2])["sources"]
    assert sum(one["tokens"] for one in read.values()) == 4 * 18 * CONTEXT
    assert (
        "step 16 of 16" in shown.text
        and "with pauses" in shown.text
        and "Faint lines" in shown.text
    )
    sets = [line["set"] for line in shown.lines("eval_loss")]
    assert sets == ["all sets, weighted", "new", "old", reading.AVERAGE]
    assert re.search(r"best \d\.\d+ at step 1[0-6]; before step 10 it had other shares", shown.text)
    kinds = {event["kind"]: event for event in shown.events()}
    shares = {line["set"]: line["y"] for line in shown.lines("share")}
    assert (shares["new"][0], shares["new"][-1], shares["old"][-1]) == (0.5, 0.25, 0.75)
    assert kinds["stage"]["x"] == 8 and kinds["stage"]["words"] == "from here on new 25 %, old 75 %"
    assert [mark["x0"] for mark in shown.data["marks"]] == [8, 12], "the stage and the rewind"
    row = r"12 20\d\d-\d\d-\d\d \d\d:\d\d:\d\d Rewound [^;]*; at sequence 56; 192 tokens discarded"
    assert re.search(row, shown.text), "with a time"


def test_evaluations_with_sets_budgets_and_a_copy_probe(tmp_path):
    lines = [EVALUATIONS[0], *(training(step) for step in range(1, 21)), EVALUATIONS[1]]
    shown = report(made(tmp_path / "run", lines))
    assert [one["set"] for one in shown.lines("eval_loss")] == [
        "all sets, weighted", "code", "general",
    ]
    assert [one["y"] for one in shown.lines("eval_loss")] == [[3.0, 2.5], [4.0, 2.9], [2.0, 2.1]]
    forgetting = {one["set"]: one["y"] for one in shown.lines("forgetting")}
    assert forgetting == {"general": [0.1], "budget of general": [0.05]}, "only code has no budget"
    [copy] = shown.lines("copy")
    assert copy["y"] == [1.0, 0.5] and shown.lines("eval_bits_per_byte")[0]["y"] == [1.5, 1.1]
    assert ("span", {"class": "stopped"}) in shown.tags and (
        "dd",
        {"class": "figure long"},
    ) in shown.tags
    assert "general is 0.1000 nats above" in shown.text
    dashes = {
        (one["set"], one["dash"])
        for name in ("eval_loss", "forgetting", "copy")
        for one in shown.lines(name)
    }
    assert len({name for name, _ in dashes}) == len(dashes) == 5, (
        "a set has one dash in all figures"
    )


def test_a_probe_of_retrieval_is_drawn_by_the_length_of_the_text(tmp_path):
    said = {
        "loss": 4.0,
        "accuracy": 0.6,
        "accuracy_of_64": 0.75,
        "accuracy_of_2048": 0.5,
        "accuracy_of_64_at_10": 0.1,
    }
    lines = [
        {
            "step": n,
            "tokens": n,
            "eval_loss": 3.0,
            "eval": {"validation": {"loss": 3.0}, "retrieval": said},
        }
        for n in (0, 1)
    ]
    shown = report(made(tmp_path / "run", [lines[0], training(1), lines[1]]))
    found = {one["set"]: one["y"] for one in shown.lines("retrieval")}
    assert found == {
        "retrieval from 64 tokens": [0.75] * 2,
        "retrieval from 2,048 tokens": [0.5] * 2,
    }
    assert [one["set"] for one in shown.lines("copy")] == ["retrieval"], "its loss"


def test_the_last_evaluation_says_whether_a_budget_is_exceeded(tmp_path):
    """The report took the last line that had a budget, which a resumed run may have left out, and
    took a loss that is NaN for one inside of it."""
    first, second = json.loads(json.dumps(EVALUATIONS))
    lines = [first, *(training(step) for step in range(1, 21)), second]
    later = {"step": 21, "eval_loss": 2.4, "eval": {"general": {"loss": 2.1}}}
    without = report(made(tmp_path / "without", [*lines, training(21), later]))
    assert ("span", {"class": "good"}) in without.tags and "nats above" not in without.text
    numbers = {"loss": None, "forgotten": None, "budget": 0.05}
    later["eval"] = {"general": numbers}
    nan = report(made(tmp_path / "nan", [*lines, training(21), later]))
    assert "general is nan nats above" in nan.text
    # The same of the rows that it read: a line without them is of all.
    lines[0]["eval"]["general"] |= {"rows": 3, "of_rows": 9}
    run = made(tmp_path / "all", [*lines, training(21), later])
    assert reading.parts_read(reading.read_run(run)) == []


def test_a_mixture_without_budgets_shows_what_is_forgotten_of_each_source(tmp_path):
    read = {"new": {"tokens": 1536, "epochs": 0.5}, "old": {"tokens": 512, "epochs": 0.01}}
    base = {"new": {"loss": 6.0, "forgotten": 0.0}, "old": {"loss": 4.0, "forgotten": 0.0}}
    lines = [{"step": 0, "eval_loss": 5.0, "eval": base}]
    lines += [training(1, sources=read), training(2, sources=read)]
    then = {"new": {"loss": 4.5, "forgotten": -1.5}, "old": {"loss": 4.1, "forgotten": 0.1}}
    lines += [{"step": 2, "eval_loss": 4.0, "eval": then}]
    flags = {"train_data_dir": None, "data_mix": "new=data/new:0.75:4,old=data/old:0.25"}
    shown = report(made(tmp_path / "run", lines, flags=flags))
    assert {one["set"]: one["y"] for one in shown.lines("forgetting")} == {
        "new": [0, -1.5],
        "old": [0, pytest.approx(0.1)],
    }
    assert [one["set"] for one in shown.lines("sources_epochs")] == ["new", "old"]
    assert "trained on new, old" in shown.text and "data/new:0.75:4" in shown.text


def test_verdicts_kills_stops_and_other_devices_are_events(tmp_path):
    begins = {"devices": 2, "kind": "cuda", "strategy": "fsdp", "nodes": 1, "from": "m"}
    happened = [
        {"event": "started", "step": 0, "time": "2026-01-01T00:00:00+00:00", **begins},
        *({"event": "saved", "step": step} for step in (2, 4, 6)),
        {
            "event": "resumed",
            "step": 6,
            "time": "2026-01-02T00:00:00+00:00",
            **begins,
            "devices": 8,
            "nodes": 2,
        },
        {"event": "ended", "step": 8, "code": 75, "reason": "stopped on request"},
        {"event": "resumed", "step": None, **begins, "devices": 8, "nodes": 2},
        {"event": "ended", "step": 9, "code": 76, "reason": "loss nan"},
        {"event": "new", "step": 3},
        {"event": 3},
    ]
    lines = [training(step) for step in range(1, 10)]
    lines[4]["loss"] = None
    lines += [{"step": 5, "verdict": "skip", "reason": "loss nan", "position": 1234}]
    lines += [
        {"step": 7, "verdict": "forgetting", "reason": "general"},
        {"step": 8, "verdict": "other", "reason": "?"},
    ]
    run = made(tmp_path / "run", lines, events=happened, status={"code": 76, "reason": "loss nan"})
    read = reading.read_run(run)
    found = reading.timeline(read)
    assert [(one.kind, one.step) for one in found] == [
        *(
            ("started", 0),
            ("saved", 2),
            ("saved", 4),
            ("skipped", 5),
            ("saved", 6),
            ("killed", 6),
            ("resumed", 6),
        ),
        *(("forgetting", 7), ("stopped", 8), ("resumed", 8), ("spike", 8), ("failed", 9)),
    ]
    shown = report(run)
    assert (
        "8 cuda devices of 2 machines; fsdp; from m" in shown.text
        and "at sequence 1,234" in shown.text
    )
    assert "How it ended Failed Loss nan (exit code 76) No checkpoint." in shown.text
    assert shown.lines("loss")[0]["y"][4] is None, "a step that was skipped is a gap"


@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_runs_that_are_not_over_not_whole_or_hardly_there(tmp_path, number):
    run = made(
        tmp_path / "run", [training(1), training(2)], status={"code": None, "reason": "running"}
    )
    file = run / "metrics.jsonl"
    if number == 0:  # going, killed in a line, no validation
        file.write_text(file.read_text() + '{"step": 3, "lo')
        shown = report(run)
        assert (
            "Running, or killed" in shown.text
            and "cut off" in shown.text
            and "no validation" in shown.text
        )
        assert shown.lines("loss")[0]["x"] == [1, 2]
    elif number == 1:  # lines that are none
        broken = '{}\n[]\n{"step": "x"}\n\n{"step": 4, "tokens": 1.5}\n' + "[" * 3000 + "\n"
        file.write_text(
            broken
            + file.read_text()
            + '{"step": 9, "loss": "x", "eval": 3, "sources": [], "lr": true}\n'
        )
        shown = report(run)
        assert "line 1 can't be read." in shown.text
        assert shown.lines("loss")[0]["y"] == [9.0, 4.5]
    elif number == 2:  # nothing yet, and files of no use
        for name in ("metrics.jsonl", "STATUS.json"):
            (run / name).unlink()
        (run / "arguments.yaml").write_text("a: [")
        assert "no line to draw" in report(run).text
    else:  # only a validation before the first step, and not a number
        file.write_text('{"step": 0, "eval_loss": null}\n{"step": 0, "eval_loss": 3.5}\n')
        assert report(run).lines("eval_loss")[0]["y"] == [None, 3.5]


def test_text_from_runs_is_text(tmp_path):
    said = {"how": "greedy", "tokens": 1, "step": 1, "prompt": HOSTILE, "text": HOSTILE}
    lines = [training(1, **{HOSTILE: 1.0}, sources={HOSTILE: {"tokens": 1, "epochs": 1}})]
    lines += [{"step": 1, "eval_loss": 1.0, "eval": {HOSTILE: {"loss": 1.0}, "b": {"loss": 2.0}}}]
    lines += [{"step": 1, "verdict": "warn", "reason": HOSTILE}]
    happened = [
        {
            "event": "started",
            "step": 0,
            "devices": 1,
            "model": HOSTILE,
            "from": HOSTILE,
            "kind": HOSTILE,
        }
    ]
    flags = {"model_name": HOSTILE, "data_mix": HOSTILE, HOSTILE: HOSTILE}
    status = {"code": 1, "reason": HOSTILE}
    runs = [
        made(tmp_path / name, lines, flags=flags, status=status, events=happened, samples=[said])
        for name in ("a", "<img src=x>")
    ]
    for shown in (report(runs[0]), report(*runs)):
        tags = [tag for tag, _ in shown.tags]
        assert tags.count("script") == 3 and not {"img", "b", "iframe"} & set(tags)
        assert not [
            name for _, attributes in shown.tags for name in attributes if name.startswith("on")
        ]
        assert HOSTILE.split("\u2028")[0] in shown.text
        assert any(one["set"].endswith(HOSTILE) for one in shown.lines("eval_loss"))


def test_runs_beside_each_other(tmp_path):
    lines = [training(step) for step in range(1, 5)]
    one = made(
        tmp_path / "x" / "same", [EVALUATIONS[0], *lines], flags={"lr": 1e-3, "compile": "auto"}
    )
    other = made(
        tmp_path / "y" / "same", lines, flags={"lr": 2e-3, "compile": "auto", "new_flag": None}
    )
    shown = report(one, other, one, output=tmp_path / "both.html")
    assert [line["set"] for line in shown.lines("loss")] == ["x/same", "y/same"], (
        "each once, and told apart"
    )
    assert shown.lines("loss")[0]["x"] == [2048, 4096, 6144, 8192], (
        "over tokens, of which a step may have more"
    )
    differing = shown.text.split("Flags Flag x/same y/same")[1]
    assert "same Validation loss 3 best 3 at step 0 Tokens 8,192 step 4" in shown.text
    assert "same Validation loss \N{EN DASH} no validation Tokens 8,192 step 4" in shown.text
    assert differing.startswith(" lr 0.001 0.002 new_flag \N{EN DASH} null All flags")
    assert not (one / "report.html").exists()
    third = made(tmp_path / "z", lines, flags={"lr": 1e-3, "compile": "auto"})
    assert (
        "All flags are equal"
        in report(third, shutil.copytree(third, tmp_path / "z2"), output=tmp_path / "e.html").text
    )


def test_samples_are_shown_by_steps_and_the_later_ones_of_a_step(tmp_path):
    many = [
        {
            "step": step,
            "prompt": prompt,
            "text": f"{prompt} at {step}{nth}",
            "tokens": 4,
            "how": "greedy",
        }
        for step, nth in ((0, ""), (2, " old"), (2, ""))
        for prompt in ("one", "two")
    ]
    text = report(made(tmp_path / "run", [training(2)], samples=[*many, {"step": 3}])).text
    assert re.search(
        r"step 0 one one at 0 step 0 two two at 0 step 2 one one at 2 step 2 two two at 2 [^s]",
        text,
    )


# ------------------------------------------------------------------------------- large logs


def test_what_is_thinned_out_keeps_its_ends_extremes_and_gaps():
    steps = np.arange(1, 500_001)
    values = np.sin(steps / 1e4)
    values[123_456], values[400_001], values[77] = 50.0, -50.0, math.nan
    thin = figures.thinned(reading.Series(steps, values), 2000)
    assert len(thin.steps) <= 2000 and (np.diff(thin.steps) > 0).all()
    assert thin.steps[0] == 1 and thin.steps[-1] == 500_000
    assert np.nanmax(thin.values) == 50.0 and np.nanmin(thin.values) == -50.0 and 78 in thin.steps
    short = reading.Series(steps[:5], values[:5])
    assert figures.thinned(short, 2000) is short
    gaps = reading.Series(steps[:9000], np.full(9000, math.nan))
    assert len(figures.thinned(gaps, 100).steps) <= 100


def test_a_trend_is_an_exponential_mean():
    series = reading.Series(np.arange(200), np.r_[np.nan, np.ones(99), np.zeros(100)])
    means = figures.trend(series).values
    assert (
        math.isnan(means[0])
        and means[1:100] == pytest.approx(1)
        and means[101] == pytest.approx(0.5, abs=0.01)
    )


@pytest.mark.longer
def test_a_page_of_half_a_million_lines_stays_small(tmp_path):
    def lines():
        for step in range(1, 500_001):
            spike = 99.0 if step == 314_159 else 0.0
            yield json.dumps(training(step, loss=3 + math.sin(step) + spike)) + "\n"

    run = made(tmp_path / "run", [training(1)])
    with (run / "metrics.jsonl").open("w") as file:
        file.writelines(lines())
    shown = report(run)
    assert (run / "report.html").stat().st_size < LARGEST_BYTES
    raw, trend = shown.lines("loss")
    assert (
        not raw["is_trend"]
        and max(raw["y"]) > 90
        and 314_159 in raw["x"]
        and len(raw["x"]) <= figures.MAX_POINTS
    )
    assert max(trend["y"]) < 10 and trend["x"][-1] == 500_000


@pytest.mark.longer
def test_many_runs_stay_small(tmp_path):
    lines = [training(step) for step in range(1, 1500)]
    runs = [made(tmp_path / f"run-{number}", lines) for number in range(12)]
    report(*runs)
    assert (runs[0] / "report.html").stat().st_size < LARGEST_BYTES


# ------------------------------------------------------------------------------- mistakes


def test_a_comparison_leaves_the_page_of_its_first_run(tmp_path, capsys):
    one, other = (made(tmp_path / name, [training(1)]) for name in ("one", "other"))
    (one / "report.html").write_text("mine")
    assert command.main([str(one), str(other)]) == 0
    assert f"Written: {one / 'comparison.html'}" in capsys.readouterr().out
    assert (one / "report.html").read_text() == "mine"


@pytest.mark.parametrize(
    ("output", "error", "code"), [("a.html", errno.ENOSPC, 74), ("/proc/a.html", None, 73)]
)
def test_a_page_that_cannot_be_written(tmp_path, capsys, monkeypatch, output, error, code):
    run = made(tmp_path / "run", [training(1)])

    def fails(*_):
        raise OSError(error, os.strerror(error))

    if error is not None:
        monkeypatch.setattr("fabric_llm.report.page.write_atomically", fails)
    with pytest.raises(SystemExit) as exit:
        command.main([str(run), "--output", str(tmp_path / output)])
    said = capsys.readouterr().err
    assert exit.value.code == code and "written: " in said and len(said.splitlines()) == 1


def test_mistakes_are_one_sentence(tmp_path, capsys):
    run = made(tmp_path / "run", [training(1)])
    (run / "step-00000001" / "trainer").mkdir(parents=True)
    many = tmp_path / "other runs"
    for number in range(12):
        made(many / f"run {number}", [training(1)])
    for argv, words in (
        ([], "the following arguments are required"),
        ([tmp_path / "rum"], "Did you mean"),
        ([tmp_path], "It holds the runs run."),
        ([many], "run 1, run 10, run 11, run 2, run 3, run 4, run 5, run 6, run 7 and 2 more."),
        ([many / "run"], "No run"),
        ([tmp_path / "other"], f"Did you mean '{tmp_path}/other runs'?"),
        ([run / "step-00000001"], "is a checkpoint; its run is"),
        ([run, "--output", tmp_path], "must name a file"),
        ([run, "--output", tmp_path / "no" / "x.html"], "in a folder that is there"),
        ([run, "--bogus"], "--bogus"),
    ):
        with pytest.raises(SystemExit, match="2"):
            command.main([str(word) for word in argv])
        said = capsys.readouterr().err
        assert (
            len(said.splitlines()) == 1
            and said.startswith("fabric_llm.report: error: ")
            and words in said
        ), said
    code = (
        "import sys; sys.modules['plotly'] = None; from fabric_llm.report.__main__ import "
        f"main; sys.exit(main([{str(run)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "needs plotly: pip install plotly" in done.stderr
    assert not (run / "report.html").exists()


@pytest.mark.parametrize(
    ("command", "flag"), [("-m fabric_llm.report", "--output"), ("plan.py", "--auto")]
)
def test_help_imports_no_torch(command, flag):
    words = [sys.executable, "-X", "importtime", *command.split(), "--help"]
    said = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert said.returncode == 0 and flag in said.stdout
    assert not {"torch", "plotly", "numpy"} & {
        line.split("|")[-1].strip() for line in said.stderr.splitlines()
    }


def test_data_cannot_end_its_element():
    to_json = page.environment().from_string("{{ data | tojson }}")
    said = to_json.render(data=[HOSTILE])
    assert json.loads(said) == [HOSTILE]
    assert not set("<>&") & set(said)
    with pytest.raises(ValueError):
        to_json.render(data=[math.nan])


def test_a_page_without_a_run_is_a_fault(tmp_path):
    with pytest.raises(Fault, match="isn't a run"):
        reading.read_run(tmp_path)


# ------------------------------------------------------------------------------- in a browser

PROBE = """<script>
window.problems = [];
addEventListener("error", (event) => problems.push(event.message || "a resource: " + event.target.outerHTML), true);
addEventListener("securitypolicyviolation", (event) => problems.push("the network: " + event.blockedURI));
</script>"""
SEEN = """<script>
const traces = () => document.querySelectorAll(".plot .scatterlayer .trace").length;
const seen = { before: traces() };
seen.axis = document.querySelector(".xtitle").textContent;
seen.cut = [...document.querySelectorAll(".headline")].some((one) => one.scrollWidth > one.clientWidth);
seen.ticks = document.querySelectorAll("#chart-grad_norm .ytick").length;
seen.labels = [...document.querySelectorAll("#chart-forgetting .legendtext")].map((one) => one.textContent);
const wide = document.documentElement.scrollWidth > innerWidth;
const asked = performance.getEntriesByType("resource").map((one) => one.name).filter((name) => !/^(data|blob):/.test(name));
const shown = JSON.stringify({ ...seen, problems, asked, wide });
document.body.innerHTML = "";
document.body.setAttribute("data-seen", shown);
</script>"""


def browser():
    return next(
        filter(
            None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))
        ),
        None,
    )


def opened(file, tmp_path, width=1280):
    """What a page does in a real browser: its console's errors, and what PROBE and SEEN have
    seen."""
    content = file.read_text()
    content = re.sub(
        r'<meta http-equiv="Content-Security-Policy"[^>]*>', r"\g<0>" + PROBE.replace("\\", r"\\"),
        content, count=1,
    )
    copy = tmp_path / f"{file.stem}-{width}.html"
    copy.write_text(content.replace("</body>", SEEN + "</body>"))
    words = [
        browser(), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
        "--disable-background-networking",
    ]
    words += [
        "--enable-logging=stderr", f"--user-data-dir={tmp_path / 'profile'}",
        f"--window-size={width},900", "--dump-dom",
    ]
    done = subprocess.run([*words, copy.as_uri()], capture_output=True, text=True, timeout=120)
    found = re.search(r'data-seen="([^"]*)"', done.stdout)
    assert found, f"the page wasn't drawn: {done.stderr[-2000:]}"
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return console, json.loads(html.unescape(found[1]))


@pytest.mark.longer
@pytest.mark.skipif(browser() is None, reason="no chromium or chrome is installed")
def test_it_opens_in_a_browser_without_errors_and_without_the_network(tmp_path):
    said = {"how": "greedy", "tokens": 1, "step": 1, "prompt": HOSTILE, "text": HOSTILE}
    lines = [
        EVALUATIONS[0],
        *(training(step, **{HOSTILE: 1.0}) for step in range(1, 300)),
        EVALUATIONS[1],
    ]
    lines += [{"step": 7, "verdict": "skip", "reason": HOSTILE}]
    runs = [
        made(tmp_path / name, lines, samples=[said], flags={"x": HOSTILE}) for name in ("a", "b")
    ]
    shown = report(*runs)
    console, seen = opened(runs[0] / "report.html", tmp_path)
    assert console == [] and seen["problems"] == [] and seen["asked"] == [] and not seen["wide"]
    assert seen["before"] == sum(len(chart["traces"]) for chart in shown.data["charts"]), (
        "each line"
    )
    assert seen["axis"] == "Tokens"


@pytest.mark.skipif(browser() is None, reason="no chromium or chrome is installed")
@pytest.mark.longer
@pytest.mark.parametrize("width", [500, 1400])  # a window can't be narrower
def test_nothing_is_cut_off_and_axes_and_budgets_have_labels(tmp_path, width):
    lines = [
        EVALUATIONS[0],
        *(training(step, grad_norm=1.2 + step % 3 / 10) for step in range(1, 21)),
        EVALUATIONS[1],
    ]
    status = {"code": 76, "reason": "a long sentence about a run that has ended badly; " * 3}
    runs = [
        made(tmp_path / f"a-run-with-a-name-{name}", lines, status=status)
        for name in ("a", "b", "c")
    ]
    for compared in (runs[:1], runs):
        report(*compared)
        _, seen = opened(runs[0] / "report.html", tmp_path, width)
        assert not seen["wide"] and not seen["cut"] and seen["ticks"] > 1
        assert any(label.endswith("budget of general") for label in seen["labels"])


# --------------------------------------------------------------- what was undone, constants, titles


def test_steps_that_a_rewind_has_undone_are_drawn_apart(toys, tmp_path):
    flags = toy_run(toys, tmp_path, model="gpt2-no-dropout")
    flags += (
        "--run_name", "run", "--devices", 1, "--global_batch_size", 4, "--micro_batch_size", 4,
        "--eval_iters", 0,
    )
    flags += (
        "--max_step", 12, "--save_step_interval", 4, "--log_step_interval", 1,
        "--lr_decay", "false",
    )
    flags += ("--spike_threshold", 6, "--spike_action", "rewind")
    # step 11 goes back to 8
    assert run_ranks(1, train_with_faults, list(map(str, flags)), {0: [10]}, 100.0) == [0]
    shown = report(tmp_path / "run")
    [kept] = shown.lines("loss")
    assert kept["x"] == list(range(1, 13))
    [loss] = [chart for chart in shown.data["charts"] if chart["name"] == "loss"]
    [undone] = loss["undone"]
    assert undone["x"] == [9, 10, 11] and undone["y"][-1] > 5 * max(kept["y"])
    assert undone["line"]["dash"] == "dot" and not undone["showlegend"]
    known = {figure.name for figure in figures.FIGURES}
    assert set(shown.names()) <= known, "a title of its own for each number that a run logs"


def test_a_rewind_comes_after_what_it_has_undone(tmp_path):
    begins = {"event": "started", "step": 0, "position": 0}
    saves = [{"event": "saved", "step": step, "position": 8 * step} for step in (4, 8)]
    again = {"event": "saved", "step": 8, "position": 96}
    events = [begins, *saves, again, {"event": "ended", "step": 8, "code": 0, "reason": "done"}]
    rewind = {"step": 4, "position": 64, "verdict": "rewind", "reason": "a spike"}
    run = made(tmp_path / "run", [training(1), rewind], events=events)
    assert [(one.kind, one.step) for one in reading.timeline(reading.read_run(run))] == [
        ("started", 0),
        ("saved", 4),
        ("saved", 8),
        ("rewound", 4),
        ("saved", 8),
        ("done", 8),
    ]


def test_what_was_undone_at_several_times_is_several_lines(tmp_path):
    run = made(tmp_path / "run", [training(step) for step in range(1, 9)])
    times = [
        {"step": 2, "undone": 2},
        training(3),
        training(4),
        {"step": 6, "undone": 1},
        training(7),
    ]
    (run / "metrics.undone.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in times) + '{"step": 7, "lo'
    )
    [loss] = [chart for chart in report(run).data["charts"] if chart["name"] == "loss"]
    assert [trace["x"] for trace in loss["undone"]] == [[3, 4], [7]]


def test_a_constant_is_drawn_at_its_value(tmp_path):
    """Of equal numbers plotly makes an axis from one less to one more, on which a rate of 2e-5
    looks like 0."""
    shown = report(made(tmp_path / "run", [{**training(step), "lr": 2e-5} for step in range(1, 9)]))
    axes = {chart["name"]: chart["layout"]["yaxis"] for chart in shown.data["charts"]}
    assert axes["lr"] == {"rangemode": "tozero"} and "rangemode" not in axes["loss"]


def test_how_it_ended_has_the_whole_width(tmp_path):
    content = report(made(tmp_path / "run", [training(1)])).content
    assert content.count('<div class="wide"><dt>How it ended</dt>') == 1
    assert re.search(r"\.headline > \.wide { flex-basis: 100%; }", content)
