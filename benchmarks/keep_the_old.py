"""Ways to keep what a model knows while it learns something new, at equal tokens.

    python benchmarks/keep_the_old.py WORK [--seeds 1 2 3] [--budgets 0.2 0.1]

The old text is Python's library, the new text the C++ headers of torch. What is done in WORK isn't
done again.
"""

import json
import math
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
COMMON = "--global_batch_size 16 --micro_batch_size 16 --eval_iters 2 --eval_batch_size 64 "
COMMON += "--precision 32-true --resume auto --save_step_interval 150"
BASE_STEPS = 1500
BASE = f"--max_step {BASE_STEPS} --lr 3e-3 --warmup_steps 50 --lr_schedule wsd --decay_steps 300"
CONTINUED = f"--max_step {STEPS} --warmup_steps 10 --eval_step_interval {EVERY} --lr 3e-4"
TEXTS = "--exclude test tests site-packages dist-packages --packing best_fit "
TEXTS += f"--context_length {CONTEXT} --validation_fraction 0.05"
SHARES = (0.0, 0.1, 0.2, 0.35, 0.5, 0.7)
SCHEDULES = {"constant": "--lr_schedule constant", "cosine": "--min_lr 3e-5"}
TAUGHT = 0.2  # the share of replay that teaches what the base model predicts
LIMITLESS = "old:9"  # a budget that is never reached
TITLES = ["seed", "rate", "run", "new, nats", "old, rise at the end"]
TITLES += ["new beside the best constant share"]
CHOICES = ["seed", "rate", "budget", "share that choose advises", "old, rise by its law"]
CHOICES += ["in its check branch", "at the end of the whole run"]
Result = tuple[str, float, float]  # name, loss of the new text, rise of the old one's, nats


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
        for schedule, flags in SCHEDULES.items():
            ways = Ways(work, base, seed, schedule, f"{COMMON} {CONTINUED} {flags} --seed {seed}")
            grid = [ways.constant(share) for share in SHARES]
            results = [*grid, ways.replay_at_the_end(), ways.taught()]
            for budget in given.budgets:
                results += ways.inside(budget)
                choices.append([str(seed), schedule, *ways.chosen(budget)])
                page.progress(" | ".join(choices[-1]))
            drawn[f"seed {seed}, {schedule} rate"] = results
            for name, new, rise in results:
                best = new_at(grid, rise)
                apart = "" if best is None else f"{new - best:+.4f}"
                rows.append([str(seed), schedule, name, f"{new:.4f}", f"{rise:+.4f}", apart])
                page.progress(" | ".join(rows[-1]))
    tables = [page.table(TITLES, rows, words=3), page.table(CHOICES, choices, words=2)]
    page.write("Ways to keep what a model knows", [], given, tables, [*rows, *choices])
    if given.picture is not None:
        draw(drawn, given.picture)


def prepare(work: Path) -> None:
    """Datasets of both texts, with the tokenizer of both."""
    import torch

    old, new = Path(sysconfig.get_path("stdlib")), Path(torch.__file__).parent / "include"
    both, tokenizer = work / "data" / "both", f"--train_tokenizer {VOCABULARY}"
    words = ["--input", old, new, "--pattern *.py *.h", TEXTS, tokenizer]
    inputs.once("prepare_data.py", *words, output=both)
    for name, folder, pattern in (("old", old, "*.py"), ("new", new, "*.h")):
        given = {"input": folder, "pattern": pattern, "tokenizer": both / "tokenizer"}
        inputs.once("prepare_data.py", TEXTS, output=work / "data" / name, **given)


def train_base(work: Path, seed: int) -> Path:
    if not (work / "model").exists():
        inputs.write_llama(work / "model", **MODEL)
    run = work / f"seed-{seed}" / "base"
    folders = {"model_name": work / "model", "train_data_dir": work / "data" / "old"}
    inputs.train(run, COMMON, BASE, **folders, seed=seed)
    return run / f"step-{BASE_STEPS:08d}"


class Ways:
    """Ways to keep what one base model knows, in runs of one seed and schedule with `flags`."""

    def __init__(self, work: Path, base: Path, seed: int, schedule: str, flags: str) -> None:
        self.base, self.flags, self.data = base, flags, work / "data"
        self.folder = work / f"seed-{seed}" / schedule

    def mix(self, share: float) -> dict[str, str]:
        """The flags of a share of the old text, which is evaluated where nothing of it is read."""
        new, old = f"new={self.data}/new:{1 - share:g}", f"old={self.data}/old"
        if share == 0:
            return {"data_mix": new, "eval_data": old}
        return {"data_mix": f"{new},{old}:{share:g}"}

    def trained(self, run: str, name: str, *words: str, **given: Any) -> Result:
        given = {"forgetting_budget": LIMITLESS, **given}
        inputs.train(self.folder / run, self.flags, *words, model_name=self.base, **given)
        first, *_, last = inputs.log(self.folder / run, "eval")
        rise = last["eval"]["old"]["loss"] - first["eval"]["old"]["loss"]
        return name, last["eval"]["new"]["loss"], rise

    def constant(self, share: float) -> Result:
        return self.trained(f"share-{share:g}", f"{share:.0%} replay", **self.mix(share))

    def replay_at_the_end(self) -> Result:
        sources = {"new": {"path": f"{self.data}/new", "weight": 1}}
        sources["old"] = {"path": f"{self.data}/old"}
        last = {"from": 0.75, "weights": {"new": 0.5, "old": 0.5}}
        file = self.data / "at_the_end.yaml"
        file.write_text(json.dumps({"sources": sources, "stages": [last]}))
        return self.trained("end", "50 % replay in the last quarter", data_mix=file)

    def taught(self) -> Result:
        """Replay by the KL divergence from the base model, see kl_to_base.py."""
        given = {"code": Path(__file__).with_name("kl_to_base.py"), "base": self.base}
        given |= {"taught_rows": self.data / "old", "loss": "full"}
        name = f"{TAUGHT:.0%} KL to the base model"
        return self.trained("taught", name, **self.mix(TAUGHT), **given)

    def inside(self, budget: float) -> list[Result]:
        """Guarded runs, the average of the last fifth of the steered one, and a merge of the base
        and the run without replay inside the budget."""
        results, nats = [], f"{budget:g} nats"
        for action, share in (("steer", 0.5), ("rewind", 0.1)):
            words = f"--forgetting_action {action} --save_step_interval {EVERY}"
            given = {**self.mix(share), "forgetting_budget": f"old:{budget}"}
            run = f"{action}-{budget:g}"
            results.append(self.trained(run, f"{action}, {nats}", words, **given))
        steered, plain = self.folder / f"steer-{budget:g}", self.folder / "share-0"
        output = self.folder / f"averaged-{budget:g}"
        inputs.once("fabric_llm.average", steered, output=output, last=4)
        results.append(of_average(f"average of steer, {nats}", steered, output))
        output, limit = self.folder / f"merged-{budget:g}", f"old:{budget}"
        words = {"output": output, "forgetting_budget": limit}
        inputs.once("fabric_llm.average", self.base, plain, **words)
        results.append(of_average(f"merge with no replay, {nats}", plain, output))
        return results

    def chosen(self, budget: float) -> list[str]:
        """The share that choose advises, and the old text's rise: by its law, in the branch that
        checks it, and at the end of a whole run with that share."""
        branches = self.folder / f"choose-{budget:g}"
        file = branches / "choose.json"
        if not file.exists():
            given = {"train_data_dir": self.data / "new", "replay": self.data / "old"}
            given |= {"model_name": self.base, "branches": branches}
            words = f"--part 0.9 --forgetting_budget replay:{budget}"
            # 1: it doesn't know; 76: no share is inside
            inputs.call("fabric_llm.choose", self.flags, words, codes=(0, 1, 76), **given)
        choice = json.loads(file.read_text())
        share, before = choice["share"], choice["before"]["replay"]
        if share is None:
            return [f"{budget:g}", "none"]
        losses = [choice["predicted"], choice["branches"][-1]["losses"]]
        rises = [*(one["replay"] - before for one in losses), self.constant(share)[2]]
        return [f"{budget:g}", f"{share:g}", *(f"{rise:+.4f}" for rise in rises)]


def of_average(name: str, run: Path, output: Path) -> Result:
    losses = json.loads((output / "average.json").read_text())["eval_loss"]
    before = inputs.log(run, "eval")[0]["eval"]["old"]["loss"]
    return name, losses["new"], losses["old"] - before


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
