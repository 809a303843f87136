"""--data_mix in a run: its sources opened and compared, and its stages, of which those behind a checkpoint stay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Optional

from fabric_llm.base.command_line import Flags, is_first_of_machine
from fabric_llm.base.faults import NO_CHECKPOINT, Fault
from fabric_llm.checkpoint.progress import Progress
from fabric_llm.data import mixture_text
from fabric_llm.data.columns import is_padded
from fabric_llm.data.dataset import TokenDataset, together
from fabric_llm.data.mixture import Mixture, mixture_of
from fabric_llm.data.mixture_text import DataMix
from fabric_llm.data.sources import open_source
from fabric_llm.data.stages import MOST_SLOTS
from fabric_llm.model.loading import tokenizer_beside
from fabric_llm.plan import checks, resume
from fabric_llm.plan.stages import Here, Layout, lay_out

MOST_REPLAY = Fraction(1, 2)  # of a mixture, that a rewind may come to: for strong shifts up to a half is advised
Shares = Mapping[str, Fraction]  # of some sources
Document = dict[str, Any]  # progress.json of the checkpoint that is resumed, {} for a run that starts


def plan_mixture(flags: Flags, batch: int, start: Progress, resumed: Document) -> dict[str, Any]:
    """The fields of a Plan that --data_mix decides. batch: sequences of a step. Raises ValueError."""
    had = _had(resumed)
    mix, raised = _in_order(mixture_text.parse(flags.data.data_mix), had), _raised(resumed)
    sources = open_sources(flags, mix)
    rows, contexts = (
        tuple(len(source.train) for source in sources.values()),
        tuple(source.context_length for source in sources.values()),
    )
    mixture_text.require_one_length(mix, contexts)
    layout = _layout(flags, mix, raised, rows, batch, start, resumed, had)
    mixture = Mixture(mix.names, rows, contexts, layout.stages, flags.training.seed)
    return {
        "dataset": together(list(sources.values())),
        "sources": sources,
        "mix": mix,
        "raised": raised,
        "mixture": mixture,
        "end": layout.end,
        "max_step": layout.max_step,
    }


def open_sources(flags: Flags, mix: DataMix) -> dict[str, TokenDataset]:
    """{name: its dataset}, which go together. One rank of each machine compares hashes. Raises ValueError."""
    data = flags.data
    verify = data.verify_data if is_first_of_machine() else "size"
    sources = {source.name: open_source(Path(source.path), verify) for source in mix.sources}
    first, *others = sources.values()
    for source in sources.values():
        checks.row_length(str(source.folder), source.context_length, data.context_length)
    for other in others:
        _require_alike(first, other, data.document_masking is not False)
    return sources


def _require_alike(first: TokenDataset, other: TokenDataset, masks_documents: bool) -> None:
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
    hashes = first.manifest.get("tokenizer_sha256"), other.manifest.get("tokenizer_sha256")
    if hashes[0] != hashes[1] or hashes[0] is None:
        _require_one_tokenizer(first, other, both, None not in hashes)
    ends = [one.manifest["eos_token_id"] if one.manifest.get("packed") else None for one in (first, other)]
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
    ids, theirs = (None if tokenizer is None else tokenizer.get_vocab() for tokenizer in (one, another))
    if not differ and (ids is None or theirs is None or ids == theirs):
        return
    words = differing_tokens(ids, theirs) if ids is not None and theirs is not None and ids != theirs else ""
    raise ValueError(
        f"--data_mix: {both} were made with different tokenizers{words}; run prepare_data.py for both with one --tokenizer."
    )


def differing_tokens(ids: dict[str, int], others: dict[str, int]) -> str:
    """The first tokens that two vocabularies number differently, as a part of a sentence."""
    differing = sorted(token for token in ids.keys() | others.keys() if ids.get(token) != others.get(token))
    words = ", ".join(
        f"{token!r} is {others.get(token, 'none')}, not {ids.get(token, 'none')}"
        for token in differing[: resume.MOST_DIFFERENCES]
    )
    return f": {len(differing)} tokens differ: {words}"


def _had(resumed: Document) -> Optional[Mixture]:
    """The mixture that the checkpoint was written with, if any. Raises Fault (66) where it can't be read."""
    if "mixture" not in resumed:
        return None
    try:
        return mixture_of(resumed)
    except ValueError as error:
        raise Fault(f"The checkpoint is damaged: trainer/progress.json: {error}.", NO_CHECKPOINT) from error


def _in_order(mix: DataMix, had: Optional[Mixture]) -> DataMix:
    """With the sources that the run has had before in front: rows keep their numbers."""
    names = () if had is None else had.names
    if missing := [name for name in names if name not in mix.names]:
        raise ValueError(
            f"--data_mix leaves out source {missing[0]!r}, which belongs to the run that is resumed: give it weight 0."
        )
    return mix.in_order(names)


def _layout(
    flags: Flags,
    mix: DataMix,
    raised: Shares,
    rows: tuple[int, ...],
    batch: int,
    start: Progress,
    resumed: Document,
    had: Optional[Mixture],
) -> Layout:
    """The stages of the run: as they were planned, or anew from where it is, if something was changed on purpose."""
    max_step, number_epochs = flags.training.max_step, flags.training.number_epochs
    if had is None:
        return lay_out(mix, rows, batch, max_step, number_epochs)
    then = resumed["schedule"]
    now = (mixture_text.described(mix), batch, max_step, max_step or number_epochs)
    if now == tuple(
        (then.get("data_mix"), then.get("global_batch_size"), then.get("max_step"))
        + (then.get("max_step") or then.get("number_epochs"),)
    ):
        end = resumed["mixture"].get("end")
        last = max_step or start.step - (start.position - end) // batch
        return Layout(had.stages, end, last if end is None else min(last, start.step - (start.position - end) // batch))
    here = Here(start.step, start.position, had.stages)
    return lay_out(mixture_text.at_least(mix, raised), rows, batch, max_step, number_epochs, here)


def _raised(resumed: Document) -> Shares:
    """The shares that rewinds have raised. Raises Fault (66) where they can't be read."""
    try:
        said = resumed.get("mixture", {}).get("raised", {})
        return {name: Fraction(share) for name, share in said.items()}
    except (ValueError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise Fault("The checkpoint is damaged: trainer/progress.json: its raised shares.", NO_CHECKPOINT) from error


def with_more_replay(plan: Any, flags: Flags, names: Sequence[str], there: Progress) -> Any:
    """The plan with twice the share of the sources `names` from `there` on, at most MOST_REPLAY together.

    Raises ValueError where they have that share already, or would be read too often.
    """
    now = plan.mixture.shares_at(max(there.position - 1, 0))
    shares = {name: 2 * Fraction(now.get(name, 0.0)).limit_denominator(MOST_SLOTS) for name in names}
    if sum(shares.values()) >= 2 * MOST_REPLAY or not all(shares.values()):
        words = ", ".join(f"{name!r} is {now.get(name, 0.0):.4g}" for name in names)
        raise ValueError(f"the share of {words} already, and more than {float(MOST_REPLAY):g} isn't tried")
    scale = min(Fraction(1), MOST_REPLAY / sum(shares.values()))
    raised = {**plan.raised, **{name: share * scale for name, share in shares.items()}}
    mix, training = mixture_text.at_least(plan.mix, raised), flags.training
    here = Here(there.step, there.position, plan.mixture.stages)
    rows = plan.mixture.rows
    layout = lay_out(mix, rows, plan.global_batch_size, training.max_step, training.number_epochs, here)
    mixture = replace(plan.mixture, stages=layout.stages)
    return replace(plan, raised=raised, mixture=mixture, end=layout.end, max_step=layout.max_step)


def epochs(plan: Any) -> dict[str, float]:
    """{source: how often the run of `plan` will have read it}, {} where it has one dataset."""
    if plan.mixture is None:
        return {}
    return {name: read["epochs"] for name, read in plan.mixture.read_before(plan.end_of_run()).items()}


def described(plan: Any) -> list[str]:
    """Lines that say what the run of `plan` reads: the shares as they are used, and how often each source."""
    if plan.mixture is None:
        return []
    lines, stages = [], plan.mixture.stages
    for stage, after in zip(stages, [*(one.begins for one in stages[1:]), None]):
        if after is not None and after <= plan.start.position:
            continue
        shares = plan.mixture.shares_at(stage.begins)
        words = ", ".join(f"{name} {100 * share:.6g} %" for name, share in shares.items())
        sequences = max(stage.begins - plan.start.position, 0)
        since = plan.start.step + sequences // plan.global_batch_size
        lines.append(f"{words} after step {since}" if since > plan.start.step else words)
    read = ", ".join(f"{name} {count:.2f} times" for name, count in epochs(plan).items())
    return [f"Mixture: {'; '.join(lines)}. At the end each source was read: {read}."]
