"""The datasets of a run: opened, compared with the flags and with each other, and what a Plan has of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any, Optional

from fabric_llm.base.command_line import Flags, is_first_of_machine, is_rank_zero
from fabric_llm.checkpoint.progress import Progress
from fabric_llm.data import mixture_text
from fabric_llm.data.columns import is_padded
from fabric_llm.data.dataset import TokenDataset, together
from fabric_llm.data.mixture import Mixture, mixture_of
from fabric_llm.data.mixture_text import DataMix
from fabric_llm.data.sources import open_source, parse_eval_data
from fabric_llm.model.loading import tokenizer_beside
from fabric_llm.plan import checks
from fabric_llm.plan.mixture import Here, Layout, last_step, lay_out
from fabric_llm.plan.plan import DataPlan, Schedule
from fabric_llm.plan.resume import MOST_DIFFERENCES
from fabric_llm.plan.same_run import document_masking
from fabric_llm.training.guard import parse_budgets


def plan_data(
    flags: Flags, batches: tuple[int, int, int], start: Progress, resumed: dict[str, Any]
) -> tuple[DataPlan, Schedule]:
    """What the run reads, and how long it lasts.

    batches: see `placement.batch_sizes`. resumed: progress.json of the checkpoint, {} for a run that starts. Raises ValueError.
    """
    micro_batch_size, _, global_batch_size = batches
    training, evaluation, masking = flags.training, flags.evaluation, document_masking(flags, resumed)
    if flags.data.data_mix:
        read, end, max_step = _plan_mixture(flags, global_batch_size, start, resumed)
    else:
        dataset = open_here(flags.data.train_data_dir, flags)
        folder, rows, context = str(dataset.folder), len(dataset.train), dataset.context_length
        checks.row_length(folder, context, flags.data.context_length)
        checks.batches_fit(folder, rows, micro_batch_size, global_batch_size)
        read, end, max_step = {"dataset": dataset}, None, training.max_step
        if max_step is None:
            end = training.number_epochs * rows
            max_step = last_step(start.step, start.position, end, global_batch_size)
    data = DataPlan(
        **read,
        eval_data=open_eval_data(flags),
        evaluated_rows=evaluation.eval_iters * evaluation.eval_batch_size,
        budgets=parse_budgets(evaluation.forgetting_budget),
        document_end=find_document_end(bool(masking), read["dataset"]),
        document_masking=masking,
    )
    schedule = Schedule(*batches, max_step, end, asked_steps=training.max_step, number_epochs=training.number_epochs)
    return data, schedule


def open_here(folder: str, flags: Flags) -> TokenDataset:
    """The dataset in `folder`. One rank of each machine compares hashes. Raises ValueError."""
    return open_source(Path(folder), flags.data.verify_data if is_first_of_machine() else "size")


def find_document_end(masks_documents: bool, dataset: TokenDataset) -> Optional[int]:
    """The token that ends each document of a dataset of prepare_data.py, if documents are to be kept apart."""
    return dataset.manifest["eos_token_id"] if masks_documents and dataset.manifest.get("packed") else None


# ------------------------------------------------------------------------------- --data_mix


def _plan_mixture(
    flags: Flags, batch: int, start: Progress, resumed: dict[str, Any]
) -> tuple[dict[str, Any], Optional[int], int]:
    """(what a DataPlan has of --data_mix, the position that the run may not pass, its last step). batch: sequences of a step."""
    had = mixture_of(resumed) if "mixture" in resumed else None
    mix, training = _in_order(mixture_text.parse(flags.data.data_mix), had), flags.training
    sources = open_sources(flags, mix)
    rows = tuple(len(source.train) for source in sources.values())
    contexts = tuple(source.context_length for source in sources.values())
    mixture_text.require_one_length(mix, contexts)
    raised = {name: Fraction(share) for name, share in resumed.get("mixture", {}).get("raised", {}).items()}
    if had is None:
        layout = lay_out(mix, rows, batch, training.max_step, training.number_epochs)
    elif _is_as_before(flags, mix, batch, resumed["schedule"]):
        end = resumed["mixture"]["end"]
        steps = [training.max_step, None if end is None else last_step(start.step, start.position, end, batch)]
        layout = Layout(had.stages, end, min(step for step in steps if step is not None))
    else:  # it was changed on purpose: what lies behind stays
        here = Here(start.step, start.position, had.stages)
        raised_mix = mixture_text.at_least(mix, raised)
        layout = lay_out(raised_mix, rows, batch, training.max_step, training.number_epochs, here)
    read = {
        "dataset": together(list(sources.values())),
        "sources": sources,
        "mix": mix,
        "raised": raised,
        "mixture": Mixture(mix.names, rows, contexts, layout.stages, training.seed),
    }
    return read, layout.end, layout.max_step


def _in_order(mix: DataMix, had: Optional[Mixture]) -> DataMix:
    """With the sources that the run has had before in front: rows keep their numbers."""
    names = () if had is None else had.names
    if missing := [name for name in names if name not in mix.names]:
        raise ValueError(
            f"--data_mix leaves out source {missing[0]!r}, which belongs to the run that is resumed: give it weight 0."
        )
    return mix.in_order(names)


def _is_as_before(flags: Flags, mix: DataMix, batch: int, then: dict[str, Any]) -> bool:
    """Whether the mixture and the length of the run are those that its checkpoint was written with."""
    if (mixture_text.described(mix), batch) != (then.get("data_mix"), then["global_batch_size"]):
        return False
    max_step, number_epochs = flags.training.max_step, flags.training.number_epochs
    return max_step == then["max_step"] and (max_step is not None or number_epochs == then["number_epochs"])


def open_sources(flags: Flags, mix: DataMix) -> dict[str, TokenDataset]:
    """{name: its dataset}. Rank 0 checks that they go together. Raises ValueError."""
    sources = {source.name: open_here(source.path, flags) for source in mix.sources}
    for source in sources.values():
        checks.row_length(str(source.folder), source.context_length, flags.data.context_length)
    first, *others = sources.values()
    if is_rank_zero():
        for other in others:
            require_alike(first, other, flags.data.document_masking is not False)
    return sources


def require_alike(first: TokenDataset, other: TokenDataset, masks_documents: bool) -> None:
    """Raises ValueError unless rows of both can follow each other in one run."""
    both = f"{str(first.folder)!r} and {str(other.folder)!r}"
    columns, others = (
        sorted(set(one.train[0]) - ({"labels"} if is_padded(one.train) else set())) for one in (first, other)
    )
    if columns != others:
        raise ValueError(
            f"--data_mix: {both} have different columns: {', '.join(columns)}, and {', '.join(others)}; run prepare_data.py for "
            "both with the same flags."
        )
    hashes = [one.manifest.get("tokenizer_sha256") for one in (first, other)]
    if hashes[0] != hashes[1] or hashes[0] is None:
        _require_one_tokenizer(first, other, both, None not in hashes)
    ends = [find_document_end(True, one) for one in (first, other)]
    if masks_documents and ends[0] != ends[1]:
        words = [
            "not packed by prepare_data.py" if end is None else f"packed, token {end} ends a document" for end in ends
        ]
        raise ValueError(
            f"--data_mix: {both} can't be kept apart by documents alike: {words[0]}, and {words[1]}; take "
            "--document_masking false."
        )


def _require_one_tokenizer(first: TokenDataset, other: TokenDataset, both: str, differ: bool) -> None:
    """differ: both manifests have a hash of the tokenizer, and they aren't the same."""
    one, another = (tokenizer_beside(str(source.folder / "tokenizer")) for source in (first, other))
    words = "" if one is None or another is None else differing_tokens(one, another)
    if differ or words:
        raise ValueError(
            f"--data_mix: {both} were made with different tokenizers{words}; run prepare_data.py for both with one --tokenizer."
        )


def differing_tokens(one: Any, other: Any) -> str:
    """The first tokens that two tokenizers number differently, as a part of a sentence; "" where there are none."""
    ids, others = one.get_vocab(), other.get_vocab()
    if ids == others:
        return ""
    differing = sorted(token for token in ids.keys() | others.keys() if ids.get(token) != others.get(token))
    words = ", ".join(
        f"{token!r} is {others.get(token, 'none')}, not {ids.get(token, 'none')}"
        for token in differing[:MOST_DIFFERENCES]
    )
    return f": {len(differing)} tokens differ: {words}"


# ------------------------------------------------------------------------------- what a run is evaluated on


def open_eval_data(flags: Flags) -> dict[str, TokenDataset]:
    """The datasets of --eval_data by name. Raises ValueError."""
    return {name: open_here(folder, flags) for name, folder in parse_eval_data(flags.evaluation.eval_data).items()}


def document_ends(
    names: Iterable[str], eval_data: Mapping[str, TokenDataset], document_end: Optional[int]
) -> dict[str, Optional[int]]:
    """The token that ends the packed documents of each set; None of a set in `eval_data` that isn't packed with the run's."""
    apart = {name for name, dataset in eval_data.items() if find_document_end(True, dataset) != document_end}
    return {name: None if name in apart else document_end for name in names}
