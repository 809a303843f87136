"""The card of an exported model: README.md in the hub's format, as card.md has it, and curves.png.

Its numbers are those in the files of the checkpoint and of its run, as far as they are there. No
network is asked.
"""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Optional

import jinja2
from huggingface_hub import EvalResult, ModelCardData
from huggingface_hub.repocard import REGEX_YAML_BLOCK

from fabric_llm.base import files
from fabric_llm.base.command_line import MAX_YAML_BYTES, load_yaml
from fabric_llm.checkpoint import keep
from fabric_llm.data.mixture import mixture_of
from fabric_llm.model import loading
from fabric_llm.weights.export import Proof, read_proof

# What is measured of validation sets, by its name in metrics.jsonl.
MEASURES = {"loss": "loss, nats a token", "bits_per_byte": "bits per byte", "accuracy": "accuracy"}
ALWAYS = {
    "library_name": "transformers",
    "pipeline_tag": "text-generation",
    "tags": ["continued-pretraining"],
}


def write(folder: Path, proof: Proof, source: Path, given: Any) -> None:
    """Write README.md and curves.png into `folder`, an export of checkpoint `source`. given: the
    command's flags."""
    progress, manifest, run = (
        keep.read_progress(source),
        files.read(source),
        source.resolve().parent,
    )
    of_base, commit = begun_with(progress)
    data, lines, name = (
        sources(progress, manifest),
        logged(run, progress),
        given.push_to_hub or given.output,
    )
    # A path of this machine says nothing elsewhere.
    title = given.push_to_hub or Path(given.output).resolve().name
    events = [event for _, event in files.json_lines(run / "events.jsonl")]
    evaluations, reached = [line for line in lines if "eval" in line], progress["progress"]["step"]
    is_of_these_weights = evaluations and evaluations[-1]["step"] == reached and not proof.of_ema
    now = evaluations[-1]["eval"] if is_of_these_weights else {}
    measured = [
        (of, m, numbers[m])
        for of, numbers in now.items()
        for m in MEASURES
        if numbers.get(m) is not None
    ]
    front = ModelCardData(
        **of_base,
        datasets=sorted({its.partition(":")[0] for one in data for its in one.get("from_hub", ())})
        or None,
        eval_results=[EvalResult("text-generation", of, of, *number) for of, *number in measured]
        or None,
        model_name=title if measured else None,
        **ALWAYS,
    )
    draw(lines, folder / "curves.png")
    fill_in(
        folder,
        "card.md",
        front=front,
        name=name,
        title=title,
        commit=commit,
        left_out=[name for event in events for name in event.get("tensors", ())],
        given=given,
        source=source,
        progress=progress,
        data=data,
        evaluations=evaluations,
        measures=MEASURES,
        is_random=any(event.get("random") for event in events),
        model_class=loading.causal_lm_class(loading.load_config(str(folder))),
        there=[file.name for file in folder.iterdir()],
        proof=proof,
        verified=read_proof(proof),
        versions={
            name: (then, keep.versions()[name]) for name, then in manifest["versions"].items()
        },
        arguments=(run / "arguments.yaml").read_text("utf-8", "replace")
        if (run / "arguments.yaml").is_file()
        else "",
    )


def write_of_average(folder: Path, verified: str) -> None:
    """Write README.md into `folder`, an average of models, by its average.json. verified: what was,
    in a sentence."""
    note = json.loads((folder / "average.json").read_bytes())
    checkpoints = [Path(part["path"]) for part in note["parts"] if part["step"] is not None]
    of_base, _ = begun_with(keep.read_progress(checkpoints[-1])) if checkpoints else ({}, None)
    front = ModelCardData(**{**of_base, **ALWAYS, "tags": [*ALWAYS["tags"], "merge"]})
    fill_in(folder, "average.md", front=front, name=folder, note=note, verified=verified)


def fill_in(folder: Path, template: str, **facts: Any) -> None:
    """Write README.md into `folder`."""
    environment = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters |= {"quoted": lambda value: shlex.quote(str(value)), "as_text": as_text}
    card = environment.from_string(Path(__file__).with_name(template).read_text("utf-8")).render(
        **facts
    )
    (folder / "README.md").write_text(card, "utf-8", "replace")


def begun_with(progress: Mapping[str, Any]) -> tuple[dict[str, Any], Optional[str]]:
    """(the base model of a run and its licence as front matter, as far as they are known, the
    base's commit)."""
    # of older checkpoints
    config_file = progress.get("config_file") or f"{progress['model_name']}/config.json"
    found, commit = licence(Path(config_file).with_name("README.md")), None
    if cached := re.search(r"models--([^/]+)/snapshots/([0-9a-f]{40})/", config_file):
        found |= {"base_model": cached[1].replace("--", "/"), "base_model_relation": "finetune"}
        commit = cached[2]
    return found, commit


def rename(folder: Path, name: str) -> None:
    """Give a card, whatever was written into it since, the name of the repository that it is pushed
    to."""
    if (card := folder / "README.md").is_file():
        text = card.read_text("utf-8", "replace")
        loads = re.search(r"AutoModelForCausalLM(\.from_pretrained\(\".*\"\))", text)
        title = re.search(r"\n# (.*)\n", text)
        if loads and title:
            text = text.replace(loads[1], f".from_pretrained({as_text(name)})")
            for place in ("\n# %s\n", "\n- name: %s\n"):
                text = text.replace(place % title[1], place % name)
            files.write_atomically(card, text)


def as_text(value: object) -> str:
    """A name as Python code has it."""
    return json.dumps(str(value), ensure_ascii=False)


def logged(run: Path, progress: Mapping[str, Any]) -> list[dict[str, Any]]:
    """metrics.jsonl up to a checkpoint. Where it is that of another run, or of the same anew: what
    the checkpoint says itself."""
    step, there = progress["progress"]["step"], files.json_lines(run / "metrics.jsonl")
    lines = [line for _, line in there if type(line.get("step")) is int and line["step"] <= step]
    said = {0: progress["guard"]["before"], step: progress["eval_losses"] or {}}
    losses = {
        line["step"]: {name: one["loss"] for name, one in line["eval"].items()}
        for line in lines
        if "eval" in line
    }
    here = losses.get(step, {})
    if (
        lines
        and here.keys() == said[step].keys()
        and all(here[name] in (loss, None) for name, loss in said[step].items())
    ):
        return lines
    # see DataPlan.measured_on
    rows = {
        0: progress.get("measured_on", {}),
        step: progress.get("evaluated_on", {}),
    }
    found = []
    for at, of_sets in said.items():
        sets = {
            name: {"loss": loss, **part_read(rows[at].get(name, ()))}
            for name, loss in of_sets.items()
        }
        found += [{"step": at, "eval": sets}] if sets else []
    return found


def part_read(measured: Sequence[Any]) -> dict[str, int]:
    """How many rows of how many a loss is of, as metrics.jsonl says it, by what DataPlan.measured_on
    says of its set; {} of all."""
    match measured:
        case [_, int(rows), int(of_rows), *_] if rows < of_rows:
            return {"rows": rows, "of_rows": of_rows}
    return {}


def sources(progress: Mapping[str, Any], manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Of each source of the data its name, tokens, epochs, and what the manifest says of its
    dataset."""
    # which older checkpoints don't have
    reached, said = (
        progress["progress"],
        manifest.get("data", {}),
    )
    if "mixture" in progress:
        read = mixture_of(progress).read_before(reached["position"])
    else:
        said, epochs = {"": said}, reached["position"] / progress["fixed"]["train_rows"]
        read = {"": {"tokens": reached["tokens"], "epochs": epochs}}
    return [{"name": name, **said.get(name, {}), **one} for name, one in read.items()]


def licence(card: Path) -> dict[str, Any]:
    """The licence in the card of the base, as front matter; {} where there is none."""
    with (
        suppress(OSError, ValueError, TypeError, AttributeError),
        card.open(encoding="utf-8-sig", errors="replace") as text,
    ):
        said = load_yaml(REGEX_YAML_BLOCK.search(text.read(MAX_YAML_BYTES))[2])
        return {
            key: value
            for key, value in said.items()
            if key.startswith("license") and isinstance(value, (str, list))
        }
    return {}


def draw(lines: list[dict[str, Any]], file: Path) -> None:
    """Draw the losses of a run over its steps, if there are any, or print what is missing for
    it."""
    curves = {"training": [(line["step"], line["loss"]) for line in lines if "loss" in line]}
    if not curves["training"]:
        return
    for line in lines:
        for name, numbers in line.get("eval", {}).items():
            curves.setdefault(f"{name}, validation", []).append((line["step"], numbers["loss"]))
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print(
            "The card has no curves, which need matplotlib: pip install -e '.[report]'", flush=True
        )
        return
    axes = Figure((8, 4), 120, layout="constrained").subplots()
    for name, points in curves.items():
        axes.plot(*zip(*points), "-" if name == "training" else ".-", label=name)
    axes.set(xlabel="Step", ylabel="Loss, nats a token")
    axes.legend()
    axes.figure.savefig(file)
