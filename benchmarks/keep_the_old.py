"""Ways to keep what a model knows while it learns something new, at equal tokens.

    python benchmarks/keep_the_old.py WORK [--seeds 1 2 3] [--budgets 0.2 0.1]

The old text is Python's library, the new text the C++ headers of torch. What is done in WORK isn't
done again.
"""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import inputs, page

VOCABULARY, CONTEXT, STEPS, EVERY = 512, 128, 300, 15
MODEL = {
    **inputs.llama(64, 176, 3, 4, tie_word_embeddings=True, vocab_size=VOCABULARY),
    **{"max_position_embeddings": CONTEXT, "bos_token_id": 0, "eos_token_id": 0},
}
COMMON = {"global_batch_size": 16, "micro_batch_size": 16, "eval_iters": 2, "eval_batch_size": 64}
COMMON |= {"precision": "32-true", "resume": "auto", "save_step_interval": 150}
BASE = {"lr": 3e-3, "warmup_steps": 50, "max_step": 1500, "lr_schedule": "wsd", "decay_steps": 300}
CONTINUED = {"max_step": STEPS, "warmup_steps": 10, "eval_step_interval": EVERY, "lr": 3e-4}
SHARES = (0.0, 0.1, 0.2, 0.35, 0.5, 0.7)
SCHEDULES = {"constant": {"lr_schedule": "constant"}, "cosine": {"min_lr": 3e-5}}
TAUGHT = 0.2  # the share of replay that teaches what the base model predicts
LIMITLESS = "old:9"  # a budget that is never reached


def main() -> None:
    parser = page.parser(__doc__)
    parser.add_argument("work", type=Path, help="the folder of datasets and runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.2, 0.1], help="nats")
    parser.add_argument("--picture", type=Path, help="PNG to draw")
    given = page.parse(parser)
    work = given.work.resolve()
    prepare(work)
    rows: list[list[str]] = []
    choices: list[list[str]] = []
    drawn: dict[str, list[Result]] = {}
    for seed in given.seeds:
        base = train_base(work, seed)
        for schedule, of_schedule in SCHEDULES.items():
            folder = work / f"seed-{seed}" / schedule
            common = {"model_name": base, "seed": seed, **COMMON, **CONTINUED, **of_schedule}
            grid = [constant(folder, work, common, share) for share in SHARES]
            results = [*grid, replay_at_the_end(folder, work, common)]
            results.append(taught(folder, base, work, common))
            for budget in given.budgets:
                results += kept(folder, work, common, budget)
                results.append(averaged(folder, budget))
                results.append(merged(folder, base, budget))
                cells = chosen(folder, work, common, budget)
                choices.append([str(seed), schedule, *cells])
                page.progress(" | ".join(choices[-1]))
            drawn[f"seed {seed}, {schedule} rate"] = results
            for name, new, rise in results:
                best = new_at(grid, rise)
                apart = "" if best is None else f"{new - best:+.4f}"
                rows.append([str(seed), schedule, name, f"{new:.4f}", f"{rise:+.4f}", apart])
                page.progress(" | ".join(rows[-1]))
    titles = ["seed", "rate", "run", "new, nats", "old, rise at the end"]
    table = page.table([*titles, "new beside the best constant share"], rows, words=3)
    titles = ["seed", "rate", "budget", "share that choose advises", "old, rise by its law"]
    titles += ["in its check branch", "at the end of the whole run"]
    table += "\n\n" + page.table(titles, choices, words=2)
    page.write("Ways to keep what a model knows", [], given, table, [*rows, *choices])
    if given.picture is not None:
        draw(drawn, given.picture)


def prepare(work: Path) -> None:
    """Datasets of both texts, with the tokenizer of both."""
    import torch

    old, new = sysconfig.get_path("stdlib"), Path(torch.__file__).parent / "include"
    texts: dict[str, tuple[list[object], list[str]]] = {
        "both": ([old, new], ["*.py", "*.h"]),
        "old": ([old], ["*.py"]),
        "new": ([new], ["*.h"]),
    }
    common = {"context_length": CONTEXT, "packing": "best_fit", "validation_fraction": 0.05}
    tokenizer: dict[str, object] = {"train_tokenizer": VOCABULARY}
    for name, (folders, patterns) in texts.items():
        excluded = ["--exclude", "test", "tests", "site-packages", "dist-packages"]
        words = ["--input", *folders, "--pattern", *patterns, *excluded]
        output = work / "data" / name
        inputs.once("prepare_data.py", *words, output=output, **common, **tokenizer)
        tokenizer = {"tokenizer": work / "data" / "both" / "tokenizer"}


def train_base(work: Path, seed: int) -> Path:
    if not (work / "model").exists():
        inputs.write_llama(work / "model", **MODEL)
    run = work / f"seed-{seed}" / "base"
    words = {"model_name": work / "model", "train_data_dir": work / "data" / "old", "seed": seed}
    inputs.train(run, **{**COMMON, **BASE, **words})
    return run / f"step-{BASE['max_step']:08d}"


Result = tuple[str, float, float]  # name, loss of the new text, rise of the old one's, nats


def mix(work: Path, share: float) -> dict[str, str]:
    """The flags of a share of the old text, which is evaluated where nothing of it is read."""
    new, old = f"new={work}/data/new:{1 - share:g}", f"old={work}/data/old"
    if share == 0:
        return {"data_mix": new, "eval_data": old}
    return {"data_mix": f"{new},{old}:{share:g}"}


def trained(run: Path, name: str, **flags: Any) -> Result:
    inputs.train(run, **flags)
    first, *_, last = inputs.log(run, "eval")
    rise = last["eval"]["old"]["loss"] - first["eval"]["old"]["loss"]
    return name, last["eval"]["new"]["loss"], rise


def constant(folder: Path, work: Path, common: dict[str, Any], share: float) -> Result:
    flags = {**mix(work, share), "forgetting_budget": LIMITLESS}
    return trained(folder / f"share-{share:g}", f"{share:.0%} replay", **common, **flags)


def replay_at_the_end(folder: Path, work: Path, common: dict[str, Any]) -> Result:
    sources = {"new": {"path": f"{work}/data/new", "weight": 1}}
    sources["old"] = {"path": f"{work}/data/old"}
    last = {"from": 0.75, "weights": {"new": 0.5, "old": 0.5}}
    file = work / "at_the_end.yaml"
    file.write_text(json.dumps({"sources": sources, "stages": [last]}))
    flags = {"data_mix": file, "forgetting_budget": LIMITLESS}
    return trained(folder / "end", "50 % replay in the last quarter", **common, **flags)


def taught(folder: Path, base: Path, work: Path, common: dict[str, Any]) -> Result:
    """Replay by the KL divergence from the base model, see kl_to_base.py."""
    flags = {**mix(work, TAUGHT), "forgetting_budget": LIMITLESS, "loss": "full"}
    flags |= {"code": Path(__file__).with_name("kl_to_base.py"), "base": base}
    flags["taught_rows"] = work / "data" / "old"
    return trained(folder / "taught", f"{TAUGHT:.0%} KL to the base model", **common, **flags)


def kept(folder: Path, work: Path, common: dict[str, Any], budget: float) -> list[Result]:
    results = []
    for action, share in (("steer", 0.5), ("rewind", 0.1)):
        flags = {**mix(work, share), "forgetting_budget": f"old:{budget}"}
        flags |= {"forgetting_action": action, "save_step_interval": EVERY}
        run, name = folder / f"{action}-{budget:g}", f"{action}, {budget:g} nats"
        results.append(trained(run, name, **{**common, **flags}))
    return results


def averaged(folder: Path, budget: float) -> Result:
    """The last checkpoints of a steered run, of its last fifth."""
    run, output = folder / f"steer-{budget:g}", folder / f"averaged-{budget:g}"
    return of_average(f"average of steer, {budget:g} nats", run, output, [run], last=4)


def merged(folder: Path, base: Path, budget: float) -> Result:
    """Base and the run without replay, between which the budget is kept."""
    run, output = folder / "share-0", folder / f"merged-{budget:g}"
    name, limit = f"merge with no replay, {budget:g} nats", f"old:{budget}"
    return of_average(name, run, output, [base, run], forgetting_budget=limit)


def of_average(name: str, run: Path, output: Path, parts: list[Path], **flags: Any) -> Result:
    inputs.once("fabric_llm.average", *parts, output=output, **flags)
    losses = json.loads((output / "average.json").read_text())["eval_loss"]
    before = inputs.log(run, "eval")[0]["eval"]["old"]["loss"]
    return name, losses["new"], losses["old"] - before


def chosen(folder: Path, work: Path, common: dict[str, Any], budget: float) -> list[str]:
    """The share that choose advises, and the old text's rise: by its law, in the branch that checks
    it, and at the end of a whole run with that share."""
    branches, data = folder / f"choose-{budget:g}", work / "data"
    file = branches / "choose.json"
    if not file.exists():
        words = {"train_data_dir": data / "new", "replay": data / "old", "branches": branches}
        words |= {"forgetting_budget": f"replay:{budget}", "part": 0.9}
        with contextlib.suppress(subprocess.CalledProcessError):  # 1: it doesn't know
            inputs.call("fabric_llm.choose", **common, **words)
    choice = json.loads(file.read_text())
    share, before = choice["share"], choice["before"]["replay"]
    if share is None:
        return [f"{budget:g}", "none"]
    losses = [choice["predicted"], choice["branches"][-1]["losses"]]
    rises = [f"{one['replay'] - before:+.4f}" for one in losses]
    _, _, rise = constant(folder, work, common, share)
    return [f"{budget:g}", f"{share:g}", *rises, f"{rise:+.4f}"]


def draw(results: dict[str, list[Result]], file: Path) -> None:
    """What was learned against what was forgotten, a panel for each seed and rate."""
    from matplotlib.figure import Figure

    figure = Figure((5 * len(results), 4.5), 120, layout="constrained")
    panels = figure.subplots(1, len(results), squeeze=False, sharey=True)[0]
    for panel, (title, of_panel) in zip(panels, results.items()):
        grid = [(rise, new) for name, new, rise in of_panel if name.endswith("% replay")]
        panel.plot(*zip(*grid), "o-", color="gray", label="constant shares")
        for name, new, rise in of_panel[len(grid) :]:
            panel.plot(rise, new, "X" if "steer" in name else "s", label=name, markersize=8)
        panel.set(title=title, xlabel="Forgotten of the old text, nats a token")
        panel.legend(fontsize=8)
    panels[0].set(ylabel="Loss of the new text, nats a token")
    figure.savefig(file)


def new_at(grid: list[Result], rise: float) -> float | None:
    """The new text's loss of the constant share with this rise, between the two runs beside it.

    On a line over the logarithm of the rise: left out, runs of the grid lie nearer to that than to
    a line over the rise, which is above their curve.
    """
    points = sorted((of_old, of_new) for _, of_new, of_old in grid if of_old > 0)
    for (low, first), (high, second) in zip(points, points[1:]):
        if low <= rise <= high:
            return first + (second - first) * math.log(rise / low) / math.log(high / low)
    return None


if __name__ == "__main__":
    main()
