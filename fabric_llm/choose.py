"""`python -m fabric_llm.choose FLAGS OF train.py`: the share of replay to begin a run with.

Five short branches find it, before the run is paid for (docs/forgetting.md).

Exit codes: 0 a share is advised, 1 it doesn't know, since the branch that checks the law disagrees,
2 bad arguments, 76 no share keeps the budgets even in so few steps, others: those of a branch.
"""

import json
import math
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from fabric_llm.base import files
from fabric_llm.base.command_line import parse
from fabric_llm.base.ending import in_one_sentence
from fabric_llm.base.faults import CODES, DONE, NON_FINITE, PEER_LOST, UNEXPECTED, Fault
from fabric_llm.base.flag import declared, option
from fabric_llm.base.names import by_flag, command
from fabric_llm.base.program import plain_output
from fabric_llm.data.mixture_text import NEW, REPLAY
from fabric_llm.data.periods import PROBES
from fabric_llm.data.sources import parse_eval_data
from fabric_llm.forecast import shares
from fabric_llm.plan.checks import MANY_STEPS, MIN_EVALUATIONS, require_set
from fabric_llm.plan.run_status import read_status
from fabric_llm.plan.start import may_have_gpu
from fabric_llm.training.forgetting import hard_budgets, parse_bounds, parse_budgets
from fabric_llm.verify import drill

PROGRAM = "python -m fabric_llm.choose"
ABOUT = f"""usage: {PROGRAM} --model_name MODEL --train_data_dir NEW --replay OLD --lr 2e-5
    --max_step 10000 --forgetting_budget replay:0.05
Find the share of replay to begin a run with, by five short branches of it. All other flags are
those of the run, as for train.py, and of plan.py, such as --price_per_hour and --tokens."""
BRANCHES = 5  # three for the law, one at another rate, one that checks
MIN_STEPS = 20  # of a branch: fewer say nothing
TOLERANCE = 0.2  # of a budget: with a larger error of the law, nothing is advised
# Flags that plan.py alone has. Those of the second line change what it prints.
PLAN = "accelerator_name device_memory mfu like network price_per_hour tokens".split()
PRINTS = "auto sweep json html".split()
RATES = "lr min_lr constant_lr".split()
# What a branch neither needs nor may do, besides what a drill may not.
OFF = "--train_data_dir null --replay null --replay_fraction null --eval_step_interval null "
OFF += "--sample_prompts null --forgetting_action warn --keep_last 1 --keep_best 0 "
# What would have no effect in it, as default, so that no branch warns of it.
OFF += "--number_epochs 1 --async_save false"

Losses = dict[str, float]  # {set: its loss, nats}


@dataclass
class ChooseArguments:
    """Options"""

    part: float = option(
        0.025, "fraction of the run's steps that the five branches make together", above=0, below=1
    )
    second_lr: Optional[float] = option(
        None, "learning rate of the branch at a second one (default: half of --lr)", above=0
    )
    branches: str = option(
        "checkpoints/choose",
        "folder of the branches, where choose.json and choose.png are written as well",
        path=True,
    )


@dataclass
class Whole:
    """The run that is chosen for."""

    given: dict[str, list[str]]  # flags as they were given, without those of plan.py
    values: dict[str, Any]  # the same with those of --config
    budgets: dict[str, float]
    bounds: tuple[float, float]  # of shares, as steering has them
    # As plan.py says, which reads all flags: only then are numbers known to be some.
    steps: int = 0
    sequences: int = 0  # of a step

    @property
    def lr(self) -> float:
        return float(self.values["lr"])

    @property
    def steers(self) -> bool:
        """Whether steering can keep its budgets: it changes the share of a source that has one, by
        that of one that has none."""
        return REPLAY in self.budgets and NEW not in self.budgets

    def branch(self, name: str, folder: Path, share: float, lr: float, steps: int) -> list[str]:
        """The words of train.py for a branch: the run in small, which begins with the base model.

        The learning rate rises and decays as in the whole run, in fewer steps. Losses in the middle
        of a schedule, where the rate is high, are above those that are kept once it has decayed.
        """
        scaled = {}
        for flag in drill.PHASES:
            if self.values.get(flag):
                # Rounded down: together they may be as long as the run.
                scaled[flag] = str(max(1, int(self.values[flag]) * steps // self.steps))
        # The other rates keep their ratio to the peak, also in the branch at a second peak.
        for flag in RATES:
            if self.values.get(flag):
                scaled[flag] = f"{float(self.values[flag]) * lr / self.lr:.6g}"
        # The interval of a long run may be longer than a branch, which is saved if that takes long.
        interval = int(self.values.get("save_step_interval") or steps)
        if interval >= steps:
            scaled["save_step_interval"] = str(steps // 2) if steps >= MANY_STEPS else "null"
        # As a mixture, a source may have all of the tokens, or none.
        sources = {}
        for source, flag, part in ((NEW, "train_data_dir", 1 - share), (REPLAY, "replay", share)):
            sources[source] = {"path": self.values[flag], "weight": f"{part:.12g}"}
        mix = json.dumps({"sources": sources}, ensure_ascii=False)
        own = {"data_mix": mix, "max_step": steps, "resume": "auto"}
        own |= {"run_name": name, "output_dir": folder, "log_step_interval": max(1, steps // 5)}
        off = by_flag(f"{drill.OWN} {OFF}".split())
        # In this order, since of a flag that is there twice the later value stays.
        flags = {**self.given, **off, **scaled, **own}
        return shlex.split(command(sys.executable, drill.TRAIN, **flags))

    def advised(self, share: float) -> str:
        """The command of the whole run, which begins with a share."""
        flags: dict[str, Any] = {**self.given, "replay_fraction": f"{share:g}"}
        if self.values.get("tokens"):  # train.py takes steps
            flags["max_step"] = self.steps
        if self.steers:
            flags["forgetting_action"] = "steer"
            interval = int(self.values.get("eval_step_interval") or self.steps)
            if self.steps // interval < MIN_EVALUATIONS:
                flags["eval_step_interval"] = max(1, self.steps // (2 * MIN_EVALUATIONS))
        # Without it a crash loses all.
        if not self.values.get("save_step_interval") and self.steps >= MANY_STEPS:
            flags["save_step_interval"] = self.steps // MIN_EVALUATIONS
        return command("python", "train.py", **flags)


def whole_of(given: dict[str, list[str]]) -> Whole:
    """Raises ValueError for what no branch could be made of, before anything runs."""
    values = drill.values_of(given)
    if not values.get("replay") or not values.get("train_data_dir"):
        raise ValueError("shares of --replay beside --train_data_dir are compared: give both.")
    # A file may hold other types, which plan.py refuses.
    for name in ("forgetting_budget", "eval_data", "steer_bounds"):
        if values.get(name) is not None:
            values[name] = str(values[name])
    if values.get("checkpoint"):
        raise ValueError("branches begin with --model_name: give the checkpoint as that.")
    budgets = parse_budgets(values.get("forgetting_budget"))
    if hard_budgets(values.get("forgetting_budget")):
        raise ValueError(
            "with `:max` a run begins with the most replay, whichever share is chosen: leave it."
        )
    if not budgets or 0 in budgets.values():
        raise ValueError(
            "--forgetting_budget says how much may be forgotten, by which a share is chosen: give "
            "one, such as replay:0.05, and none of 0."
        )
    known = [NEW, REPLAY, *parse_eval_data(values.get("eval_data")), *PROBES]
    for name in budgets:
        require_set("--forgetting_budget", name, known)
    if not values.get("lr"):
        raise ValueError("forgetting depends on the learning rate: give --lr.")
    least, most = parse_bounds(values.get("steer_bounds") or "0:0.9")
    of_run = {name: words for name, words in given.items() if name not in PLAN}
    whole = Whole(of_run, values, budgets, (float(least), float(most)))
    if values.get("forgetting_action") == "steer" and not whole.steers:
        raise ValueError(f"steering needs a budget for {REPLAY!r}, and none for {NEW!r}.")
    return whole


def planned(given: Mapping[str, list[str]]) -> dict[str, Any]:
    """What plan.py says of the whole run. Raises Fault as it ends."""
    words = [sys.executable, drill.TRAIN.with_name("plan.py")]
    # What steering needs is given where the run is advised.
    flags = {**given, "forgetting_action": "warn", "json": "true"}
    # The branches run on this machine, whatever the run is planned for.
    if not (may_have_gpu() or {"accelerator", "accelerator_name", "like"} & given.keys()):
        flags["accelerator_name"] = "CPU"
    made = subprocess.run(shlex.split(command(*words, **flags)), capture_output=True, text=True)
    if made.returncode != DONE:
        message = (made.stderr.strip().splitlines() or ["it printed nothing."])[-1]
        code = made.returncode if made.returncode in CODES else UNEXPECTED
        raise Fault(message.removeprefix("plan.py: error: "), code)
    prediction = json.loads(made.stdout)
    if prediction["steps"] is None:
        raise ValueError("how long is the run? Give --max_step or --tokens.")
    return prediction


def measured(run: Path) -> Optional[tuple[Losses, Losses]]:
    """Losses before step 1 and after the last step of a branch; None unless it is done."""
    if read_status(run).get("code") != DONE:
        return None
    found = []
    for _, line in files.json_lines(run / "metrics.jsonl", '"eval"'):
        if "eval" in line:
            losses = {name: one["loss"] for name, one in line["eval"].items()}
            # A loss that isn't finite is null there.
            found.append({name: math.nan if of is None else of for name, of in losses.items()})
    # A new run evaluates before its first step, and every run after its last.
    return found[0], found[-1]


class Branches:
    """The branches so far. Those that are done aren't made again."""

    def __init__(self, whole: Whole, folder: Path, steps: int) -> None:
        """Raises ValueError where the folder has branches of another run."""
        self.whole, self.folder, self.steps = whole, folder, steps
        self.made: list[dict[str, Any]] = []
        self.before: Losses = {}  # of the base model
        flags = {name: value for name, value in whole.values.items() if name not in PLAN}
        flags["steps of a branch"] = steps
        mine = json.dumps(flags, indent=2, sort_keys=True, default=str)
        of_run = folder / "flags.json"
        files.writable(of_run)
        folder.mkdir(parents=True, exist_ok=True)
        if not of_run.is_file():
            files.write_atomically(of_run, mine)
        # Branches of other lengths or flags don't obey one law, and those that are done are kept.
        if of_run.read_text() != mine:
            raise ValueError(
                f"{str(folder)!r} has branches of a run with other flags, see {of_run.name} there: "
                "take another folder for --branches."
            )

    def make(self, of: str, share: float, lr: float) -> Losses:
        """The losses at the end of a branch, which is made, or resumed, unless it is done. of: what
        it is for, a key of shares.MARKERS. Raises Fault."""
        name = f"share-{share:g}-lr-{lr:g}"
        run = self.folder / name
        if measured(run) is None:
            print(f"Branch {name}", flush=True)
            words = self.whole.branch(name, self.folder, share, lr, self.steps)
            log = self.folder / f"{name}.log"
            # A branch that is asked to stop saves, and it ends with this process.
            code, said = drill.run_training(words, drill.environment(""), log, patient=True)
            if code != DONE:
                said = said.removeprefix("train.py: error: ")
                code = code if code in CODES else PEER_LOST
                raise Fault(f"branch {name} ended: {said}", code)
        self.before, losses = measured(run)
        self.made.append({"of": of, "share": share, "lr": lr, "losses": losses})
        return losses

    def show(self, predicted: Losses) -> None:
        """Print the rises of all branches. predicted: of the last one, {} where none checks."""
        rows = [["share", "rate", *self.before]]
        for one in self.made:
            above = differences(one["losses"], self.before)
            rows.append([f"{one['share']:g}", f"{one['lr']:g}", *above])
        if predicted:
            rows.append(["", "the law", *differences(predicted, self.before)])
            rows.append(["", "its error", *differences(self.made[-1]["losses"], predicted)])
        print(f"\nNats above the loss before step 1, after {self.steps} steps:")
        for row in rows:
            print("  ".join(f"{cell:>10}" for cell in row))


def differences(losses: Losses, others: Losses) -> list[str]:
    return [f"{losses[name] - other:+.4f}" for name, other in others.items()]


def of_second_rate(made: Branches, laws: Mapping[str, shares.Law], losses: Losses) -> str:
    """How a second learning rate compares with the share that learns as much at the first, and
    which of the two to take."""
    second, first = f"{made.made[-1]['lr']:g}", f"{made.whole.lr:g}"
    rate = f"A rate of {second}, at a share of 0.5,"
    # Compared where both have learned equally much: at one share, a rate could forget less only
    # because it learns less.
    share = shares.as_learned(laws[NEW], losses[NEW])
    if share is None:
        least = min(laws[NEW].at(share) for share in shares.SHARES)
        compared = "more" if losses[NEW] < least else "less"
        return f"{rate} learns {compared} than any share at {first}: they can't be compared."
    words, parts = [], []
    for name, budget in made.whole.budgets.items():
        more = losses[name] - laws[name].at(share)
        compared = "more" if more > 0 else "less"
        words.append(f"{abs(more):.4f} nats {compared} of {name}")
        parts.append(more / budget)
    advice = f"Neither is clearly better: stay with {first}."
    # The law itself may err by as much.
    if min(parts) > TOLERANCE:
        advice = f"{first} is the better one."
    elif max(parts) < -TOLERANCE:
        advice = f"{second} is the better one: choose again with --lr {second}."
    as_much = f"learns as much as a share of {share:.2f} at {first}"
    return f"{rate} {as_much}, and forgets {', '.join(words)}. {advice}"


def chosen(made: Branches, second_lr: float) -> None:
    """Make the branches, and print, write and draw what they say. Raises Fault where no share is
    advised."""
    whole, budgets = made.whole, made.whole.budgets
    of_law = [made.make("law", share, whole.lr) for share in shares.SHARES]
    laws = {name: shares.through(*(one[name] for one in of_law)) for name in of_law[0]}
    second = of_second_rate(made, laws, made.make("rate", 0.5, second_lr))
    share = shares.within(laws, made.before, budgets, NEW, whole.bounds)
    predicted, wrong, above = {}, [], []
    if share is not None:
        predicted = {name: law.at(share) for name, law in laws.items()}
        found = made.make("check", share, whole.lr)
        for name, budget in budgets.items():
            error = abs(found[name] - predicted[name])
            # An error that is NaN is larger than any.
            if not error <= TOLERANCE * budget:
                wrong.append(f"{error:.4f} nats for {name!r}, whose budget is {budget:g}")
            if (rise := found[name] - made.before[name]) > budget:
                above.append(f"{name} {rise:+.4f} of {budget:g}")
    made.show(predicted)
    print(second)
    # Written and drawn before the faults below, so that one can see why there is no advice.
    choice = {"new": NEW, "lr": whole.lr, "second_lr": second_lr, "steps": made.steps}
    choice |= {"budgets": budgets, "before": made.before, "branches": made.made, "share": share}
    choice |= {"laws": {name: law._asdict() for name, law in laws.items()}, "wrong": wrong}
    document, picture = made.folder / "choose.json", made.folder / "choose.png"
    files.write_atomically(document, json.dumps({**choice, "predicted": predicted}, indent=2))
    written = [str(document)]
    if shares.draw(choice, laws, picture):
        written.append(picture.name)
    print(f"Written: {', '.join(written)}", flush=True)
    if share is None:
        raise Fault(f"no share keeps the budgets even for {made.steps} steps.", NON_FINITE)
    if wrong:
        why = f"at a share of {share:g} the law errs by {'; '.join(wrong)}"
        raise Fault(f"it doesn't know: {why}. Longer branches (--part) may help.", UNEXPECTED)
    following = "Steering follows it."
    if not whole.steers:
        following = f"Steering would follow it, if {REPLAY!r} had a budget as well."
    measured_above = f", though its branch came to {', '.join(above)}" if above else ""
    if 0 < share * made.steps * whole.sequences < 1:
        measured_above += f", though its branch was too short to read a row of {REPLAY!r}"
    print(
        f"\nBegin with a share of {share:g}, which by the law keeps the budgets for {made.steps} "
        f"steps{measured_above}. It is no promise for {whole.steps:,}: what is forgotten grows "
        f"with the steps, and short branches don't show how far. {following}\n"
        f"Next: {whole.advised(share)}",
        flush=True,
    )


def longer(steps: int) -> str:
    """What to do where the branches of a run of so many steps are too short."""
    least = MIN_STEPS * BRANCHES
    if steps <= least:
        return f"{BRANCHES} branches need a run of more than {least} steps"
    # Rounded up: a little less would be refused again.
    return f"take --part {math.ceil(10_000 * least / steps) / 10_000:g} or more"


def main(argv: Optional[list[str]] = None) -> None:
    """Run the command. Raises SystemExit where it fails."""
    with in_one_sentence(PROGRAM) as ending:
        words = list(sys.argv[1:] if argv is None else argv)
        if words and not words[0].startswith("-"):
            raise ValueError(f"unexpected {words[0]!r}: every flag is written --name value.")
        given, mine = by_flag(words), []
        for name in declared(ChooseArguments):
            if name in given:
                mine += shlex.split(command(**{name: given.pop(name)}))
        # The other flags are parsed by the programs that have them.
        asked = [word for word in words if word.partition("=")[0] in ("-h", "--help")]
        own = ChooseArguments(**parse(PROGRAM, ABOUT, [ChooseArguments], [*mine, *asked]))
        # What changes the output of plan.py alone means nothing here, where its JSON is read.
        given = {name: values for name, values in given.items() if name not in PRINTS}
        whole = whole_of(given)
        plan = planned(given)
        whole.steps = plan["steps"]
        whole.sequences = plan["tokens_a_step"] // plan["row_tokens"]
        second_lr = own.second_lr or whole.lr / 2
        if second_lr == whole.lr:
            raise ValueError(f"--second_lr {second_lr:g} is --lr: the two are to be compared.")
        steps = round(own.part * whole.steps / BRANCHES)
        if steps < MIN_STEPS:
            raise ValueError(
                f"--part {own.part:g} of {whole.steps:,} steps gives each of {BRANCHES} branches "
                f"{steps} steps, and fewer than {MIN_STEPS} say nothing: {longer(whole.steps)}."
            )
        part = BRANCHES * steps / whole.steps
        price = "" if plan["price"] is None else f", {part * plan['price']:,.2f} for them"
        print(
            f"{BRANCHES} branches of {steps} steps, {100 * part:.1f} % of the run: "
            f"{part * plan['hours']:.3g} hours{price} ({plan['on']} by plan.py, without "
            "evaluations and starts)",
            flush=True,
        )
        ending.left = f"branches in {own.branches} are kept, and the same command goes on"
        chosen(Branches(whole, Path(own.branches), steps), second_lr)


if __name__ == "__main__":
    plain_output()
    main()
