"""The card of an exported model: README.md in the hub's format, as card.md has it, and curves.png.

Its numbers are those in the files of the checkpoint and of its run, as far as they are there. No
network is asked.
"""

import json
import re
import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Optional

import jinja2
from huggingface_hub import EvalResult, ModelCardData
from huggingface_hub.repocard import REGEX_YAML_BLOCK

from fabric_llm.base import files
from fabric_llm.base.plain_yaml import MAX_YAML_BYTES, load_yaml
from fabric_llm.checkpoint import keep
from fabric_llm.data.mixture import mixture_of
from fabric_llm.data.periods import ENDLESS
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
    # The checkpoint was verified by `export`, so its files can be read.
    progress, manifest = keep.read_progress(source), files.read(source)
    run = source.resolve().parent
    of_base, commit = begun_with(progress)
    data, lines = sources(progress, manifest), logged(run, progress)
    events = [event for _, event in files.json_lines(run / "events.jsonl")]
    # A path of this machine says nothing elsewhere.
    title = given.push_to_hub or Path(given.output).resolve().name

    # What the last evaluation measured, if it is of the weights that are exported.
    evaluations = [line for line in lines if "eval" in line]
    measured = []
    reached = progress["progress"]["step"]
    # Losses of an earlier step, or of other weights, would be wrong in a table of results.
    if evaluations and evaluations[-1]["step"] == reached and not proof.of_ema:
        for name, numbers in evaluations[-1]["eval"].items():
            for measure in MEASURES:
                if numbers.get(measure) is not None:
                    measured.append(
                        EvalResult("text-generation", name, name, measure, numbers[measure])
                    )
    # Without the configuration that may follow a colon.
    from_hub: set[str] = set()
    for one in data:
        from_hub |= {name.partition(":")[0] for name in one.get("from_hub", ())}
    # The hub reads this: it links the base and the datasets, and lists the results.
    front = ModelCardData(
        **of_base,
        datasets=sorted(from_hub) or None,
        eval_results=measured or None,
        model_name=title if measured else None,
        **ALWAYS,
    )

    file, arguments = run / "arguments.yaml", ""
    if file.is_file():
        arguments = file.read_text("utf-8", "replace")
    # Checkpoints of older versions don't say it themselves.
    weights = {"random": any(event.get("random") for event in events), "left_out": []}
    for event in events:
        weights["left_out"] += event.get("tensors", ())
    weights |= progress.get("first_weights", {})
    changes = []
    for event in events:
        for one in event.get("changes", ()):
            if one.startswith(" "):  # a table of rates
                continue
            changes.append(f"step {event['step']}: {one}")
    versions = {}
    for name, then in manifest["versions"].items():
        # Those of the run, and those of this export.
        versions[name] = then, keep.versions()[name]
    # Before the card, which shows the picture if the folder has it.
    draw(lines, folder / "curves.png")
    fill_in(
        folder,
        "card.md",
        front=front,
        name=given.push_to_hub or given.output,
        title=title,
        commit=commit,
        left_out=weights["left_out"],
        changes=changes,
        given=given,
        source=source,
        progress=progress,
        data=data,
        evaluations=evaluations,
        measures=MEASURES,
        is_random=weights["random"],
        model_class=loading.causal_lm_class(loading.load_config(str(folder))),
        there=[file.name for file in folder.iterdir()],
        proof=proof,
        verified=read_proof(proof),
        versions=versions,
        arguments=arguments,
    )


def write_of_average(folder: Path, verified: str) -> None:
    """Write README.md into `folder`, an average of models, by its average.json. verified: what was,
    in a sentence."""
    note = json.loads((folder / "average.json").read_bytes())
    checkpoints = [Path(part["path"]) for part in note["parts"] if part["step"] is not None]
    # Plain models have no run that would say what they began with.
    of_base: dict[str, Any] = {}
    if checkpoints:
        of_base, _ = begun_with(keep.read_progress(checkpoints[-1]))
    front = ModelCardData(**{**of_base, **ALWAYS, "tags": [*ALWAYS["tags"], "merge"]})
    fill_in(folder, "average.md", front=front, name=folder, note=note, verified=verified)


def fill_in(folder: Path, template: str, **facts: Any) -> None:
    """Write README.md into `folder`."""
    environment = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters |= {"quoted": lambda value: shlex.quote(str(value)), "as_text": as_text}
    # Nothing is escaped: the template is Markdown.
    card = environment.from_string(Path(__file__).with_name(template).read_text("utf-8")).render(
        **facts
    )
    (folder / "README.md").write_text(card, "utf-8", "replace")


def begun_with(progress: Mapping[str, Any]) -> tuple[dict[str, Any], Optional[str]]:
    """(the base model of a run and its licence as front matter, as far as they are known, the
    base's commit)."""
    # Older checkpoints only have the model's name.
    config_file = progress.get("config_file") or f"{progress['model_name']}/config.json"
    front, commit = licence(Path(config_file).with_name("README.md")), None
    # A model from the hub lies in its cache, in a folder that has its name and commit.
    if cached := re.search(r"models--([^/]+)/snapshots/([0-9a-f]{40})/", config_file):
        front |= {"base_model": cached[1].replace("--", "/"), "base_model_relation": "finetune"}
        commit = cached[2]
    return front, commit


def rename(folder: Path, name: str) -> None:
    """Give a card, whatever was written into it since, the name of the repository that it is pushed
    to."""
    # A user may have removed the card.
    if (card := folder / "README.md").is_file():
        text = card.read_text("utf-8", "replace")
        # Only the name is replaced: a user may have edited the rest.
        loads = re.search(r"AutoModelForCausalLM(\.from_pretrained\(\".*\"\))", text)
        title = re.search(r"\n# (.*)\n", text)
        # A card without one of these places isn't ours any more.
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
    step = progress["progress"]["step"]
    lines = []
    for _, line in files.json_lines(run / "metrics.jsonl"):
        # A line that a kill cut off is {} here. Later steps belong to a run that went on.
        if type(line.get("step")) is int and line["step"] <= step:
            lines.append(line)

    # It is the checkpoint's log if the last evaluation has the checkpoint's losses.
    own = progress["eval_losses"] or {}
    logged_losses: dict[str, Any] = {}
    for line in lines:
        if line["step"] == step and "eval" in line:
            logged_losses = {name: one["loss"] for name, one in line["eval"].items()}
    is_same = logged_losses.keys() == own.keys()
    # Equal to the last bit, from the same number; what isn't finite is null in the log.
    if lines and is_same and all(logged_losses[name] in (own[name], None) for name in own):
        return lines

    losses = {0: progress["guard"]["before"], step: own}
    # See DataPlan.measured_on.
    rows = {0: progress.get("measured_on", {}), step: progress.get("evaluated_on", {})}
    own_lines: list[dict[str, Any]] = []
    for at, of_sets in losses.items():
        sets = {}
        for name, loss in of_sets.items():
            sets[name] = {"loss": loss, **keep.part_read(rows[at].get(name, ()))}
        if sets:
            own_lines.append({"step": at, "eval": sets})
    return own_lines


def sources(progress: Mapping[str, Any], manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Of each source of the data its name, tokens, epochs, and what the manifest says of its
    dataset, which those of older checkpoints don't."""
    # {source: what the checkpoint's manifest says of its dataset}
    reached, datasets = progress["progress"], manifest.get("data", {})
    if "mixture" in progress:
        read = mixture_of(progress).read_before(reached["position"])
    else:
        # All that was read, with what rewinds have undone, as of the sources of a mixture.
        position, fixed = reached["position"], progress["fixed"]
        tokens, rows = position * fixed["context_length"], fixed["train_rows"]
        epochs = position / rows if rows < ENDLESS else None  # a stream has none
        datasets, read = {"": datasets}, {"": {"tokens": tokens, "epochs": epochs}}
    return [{"name": name, **datasets.get(name, {}), **one} for name, one in read.items()]


def licence(card: Path) -> dict[str, Any]:
    """The licence in the card of the base, as front matter; {} where there is none."""
    front = {}
    with (
        suppress(OSError, ValueError, TypeError, AttributeError),
        card.open(encoding="utf-8-sig", errors="replace") as text,
    ):
        # A card may come from anywhere, so only as much is read as YAML is allowed to have.
        block = REGEX_YAML_BLOCK.search(text.read(MAX_YAML_BYTES))[2]
        for key, value in load_yaml(block).items():
            # Also license_name and license_link, which the hub asks for with license: other.
            if key.startswith("license") and isinstance(value, (str, list)):
                front[key] = value
    return front


def draw(lines: list[dict[str, Any]], file: Path) -> None:
    """Draw the losses of a run over its steps, if there are any, or print what is missing for
    it."""
    # A line of the log has a training loss, an evaluation or both.
    curves = {"training": [(line["step"], line["loss"]) for line in lines if "loss" in line]}
    # Such as for a checkpoint whose run is elsewhere.
    if not curves["training"]:
        return
    for line in lines:
        for name, numbers in line.get("eval", {}).items():
            curves.setdefault(f"{name}, validation", []).append((line["step"], numbers["loss"]))
    try:
        # Unlike pyplot, a Figure of its own needs no display.
        from matplotlib.figure import Figure
    except ImportError:
        print(
            "The card has no curves, which need matplotlib: pip install -e '.[report]'", flush=True
        )
        return
    axes = Figure((8, 4), 120, layout="constrained").subplots()
    for name, points in curves.items():
        line_style = "-" if name == "training" else ".-"
        axes.plot(*zip(*points), line_style, label=name)
    axes.set(xlabel="Step", ylabel="Loss, nats a token")
    axes.legend()
    axes.figure.savefig(file)
