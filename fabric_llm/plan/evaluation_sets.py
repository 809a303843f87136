"""The names of the validation sets of a run: those of its training data, and of --eval_data. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Sequence

from fabric_llm.base.command_line import Flags
from fabric_llm.base.spelling import nearest
from fabric_llm.data.sources import COPY, parse_eval_data
from fabric_llm.training.guard import parse_budgets

ONE_SET = "validation"  # the name of what is evaluated, where there is one dataset


def require_names(flags: Flags, of_training: Sequence[str], is_mixture: bool) -> None:
    """The names in --eval_data, --forgetting_budget and --keep_best_of. of_training: sets of the training data. Raises ValueError."""
    added, budgets = (
        list(parse_eval_data(flags.evaluation.eval_data)),
        parse_budgets(flags.evaluation.forgetting_budget),
    )
    if twice := [name for name in added if name in of_training]:
        raise ValueError(
            f"--eval_data: {twice[0]!r} is evaluated already, as a set of the training data; take another name."
        )
    if COPY in of_training:
        raise ValueError(f"--data_mix: {COPY!r} is the name of a probe, so no source can have it.")
    known = [*of_training, *added]
    for name in budgets:
        _require_known("--forgetting_budget", name, [*known, COPY])
    if (best := flags.save.keep_best_of) is not None:
        _require_known("--keep_best_of", best, known)
    if budgets and flags.evaluation.eval_iters == 0:
        raise ValueError("--forgetting_budget is measured by evaluations, which --eval_iters 0 turns off.")
    action = flags.evaluation.forgetting_action
    if budgets and action != "warn" and flags.evaluation.eval_step_interval is None:
        raise ValueError(
            f"--forgetting_action {action} acts when the run evaluates: say how often by --eval_step_interval."
        )
    if action == "rewind" and (others := [name for name in budgets if not is_mixture or name not in of_training]):
        raise ValueError(
            f"--forgetting_action rewind goes on with more of the source that is forgotten, but {others[0]!r} is no source of "
            "--data_mix or --replay."
        )


def _require_known(flag: str, name: str, known: Sequence[str]) -> None:
    if name not in known:
        close = nearest(name, known)
        meant = f"Did you mean {close[0]!r}?" if len(close) == 1 else f"There are {', '.join(map(repr, known))}."
        raise ValueError(f"{flag}: no validation set is named {name!r}. {meant}")
