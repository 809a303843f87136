"""What a run is measured on: its validation sets, their budgets of forgetting, and the set that the best checkpoints follow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from fabric_llm.base.command_line import Flags, is_first_of_machine
from fabric_llm.base.spelling import nearest
from fabric_llm.data.sources import COPY, open_source, parse_eval_data
from fabric_llm.training.guard import parse_budgets

if TYPE_CHECKING:
    from fabric_llm.data.dataset import TokenDataset

ONE_SET = "validation"  # the name of what is evaluated, where there is one dataset


def open_eval_data(flags: Flags) -> dict[str, TokenDataset]:
    """The datasets of --eval_data by name. One rank of each machine compares hashes. Raises ValueError."""
    verify = flags.data.verify_data if is_first_of_machine() else "size"
    folders = parse_eval_data(flags.evaluation.eval_data)
    return {name: open_source(Path(folder), verify) for name, folder in folders.items()}


def document_ends(
    names: Iterable[str], eval_data: Mapping[str, TokenDataset], document_end: Optional[int]
) -> dict[str, Optional[int]]:
    """The token that ends the packed documents of each set; None of a set in `eval_data` that isn't packed with the run's."""
    plain = {
        name
        for name, one in eval_data.items()
        if not one.manifest.get("packed") or one.manifest["eos_token_id"] != document_end
    }
    return {name: None if name in plain else document_end for name in names}


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


def copy_set(flags: Flags, splits: Mapping[str, Any], left_out: Sequence[Optional[int]]) -> dict[str, Any]:
    """The probe of in-context learning, where forgetting has a budget: of tokens of the first set that has one.

    left_out: ids that aren't drawn, since they stand for more than themselves.
    """
    from fabric_llm.data import copy_probe

    if not parse_budgets(flags.evaluation.forgetting_budget):
        return {}
    split = splits[_copied(flags, splits)]
    context_length = len(split[0]["input_ids"])
    ids = [number for number in left_out if number is not None]
    return {COPY: copy_probe.passages(split, context_length, ids, flags.training.seed)}


def _copied(flags: Flags, splits: Mapping[str, Any]) -> str:
    """The set whose tokens the probe of in-context learning takes."""
    budgets = parse_budgets(flags.evaluation.forgetting_budget)
    return next((name for name in budgets if name in splits), next(iter(splits)))


def evaluated_rows(split: Any, flags: Flags) -> int:
    """Of a validation split: those of the first --eval_iters batches."""
    return min(flags.evaluation.eval_iters * flags.evaluation.eval_batch_size, len(split))


def measured_on(flags: Flags, splits: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Of each set, what its losses are of: losses before and after a resume compare only where that is the same."""
    from fabric_llm.data.dataset import fingerprint

    found = {name: [fingerprint(split), evaluated_rows(split, flags)] for name, split in splits.items()}
    return {**found, COPY: found[_copied(flags, splits)]}
