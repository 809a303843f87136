"""Flags -> DataPlan: the datasets that a run reads, opened, and compared with each other.

Each check raises ValueError in one sentence with the offending value. A check whose result is the
same on all ranks is made on rank 0 only.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Optional

from fabric_llm.base.command_line import is_first_of_machine, is_rank_zero
from fabric_llm.base.flag import Flags
from fabric_llm.data import mixture_text
from fabric_llm.data.columns import is_padded, is_stream
from fabric_llm.data.dataset import TokenDataset
from fabric_llm.data.folders import TASKS
from fabric_llm.data.mixture import mixture_of
from fabric_llm.data.mixture_text import DataMix
from fabric_llm.data.periods import COPY, PROBES
from fabric_llm.data.sources import open_source, parse_eval_data, parse_probes
from fabric_llm.data.tasks import open_tasks
from fabric_llm.mirror.address import is_address
from fabric_llm.model import loading
from fabric_llm.plan import checks, fetched
from fabric_llm.plan.plan import DataPlan
from fabric_llm.training.forgetting import parse_budgets

# A text of which tokenizers with other rules make other tokens.
SHOWN_TOKENS = 3
SAMPLE = "The Quick  brown fox's 12,345\n\tÉtés: naïve 你好"


def plan_data(flags: Flags, resumed: dict[str, Any]) -> tuple[DataPlan, DataMix]:
    """(the data of a run, the shares in which it is read). Raises ValueError.

    resumed: progress.json of the checkpoint, {} for a new run.
    """
    evaluation, masking = flags.evaluation, flags.data.document_masking
    # It was measured in the run's first process; another answer would change the loss.
    if masking == "auto" and resumed and "document_masking" not in checks.overrides(flags):
        masking = resumed["schedule"]["document_masking"]  # as in the steps before
    mix = mixture_text.mix_of(flags.data.data_mix, flags.data.train_data_dir)
    if flags.data.data_mix and "mixture" in resumed:
        names = mixture_of(resumed).names
        # A stage so far has weights by the place of a source, so none may be missing.
        for name in names:
            if name not in mix.names:
                raise ValueError(
                    f"--data_mix leaves out source {name!r} of the resumed run: give it weight 0."
                )
        # The flags may name the sources in another order than before. Those of the resumed run
        # come first, so that their rows keep their numbers.
        mix = mix.in_order(names)
    sources, budgets = open_sources(flags, mix), parse_budgets(evaluation.forgetting_budget)
    # require_alike() has compared the others with it.
    first = next(iter(sources.values()))
    data = DataPlan(
        sources,
        eval_data=open_eval_data(flags),
        evaluated_rows=evaluation.eval_iters * evaluation.eval_batch_size,
        budgets=budgets,
        probes=evaluated_probes(evaluation.probes, budgets),
        # "auto" counts as true until it is measured whether the model can, see Plan.completed.
        document_end=first.document_end if masking else None,
        document_masking=masking,
    )
    return data, mix


def evaluated_probes(given: Optional[str], budgets: Iterable[str]) -> list[str]:
    """Those of --probes, those that have a budget, and with any budget copy."""
    asked = {*parse_probes(given), *budgets, *[COPY] * bool(budgets)}
    return [name for name in PROBES if name in asked]


def open_here(folder: str, flags: Flags, is_text: bool = True) -> TokenDataset:
    """The dataset in `folder`, or at that address. Raises ValueError. Only one rank of each machine
    compares hashes."""
    # The others still compare sizes, which takes no time.
    verify = flags.data.verify_data if is_first_of_machine() else "size"
    there = fetched.folder(folder)
    dataset = open_source(there, verify, flags) if is_text else open_tasks(there, verify)
    return replace(dataset, address=folder) if is_address(folder) else dataset


def open_eval_data(flags: Flags) -> dict[str, TokenDataset]:
    """The datasets of --eval_data by name. Raises ValueError."""
    folders = parse_eval_data(flags.evaluation.eval_data)
    datasets = {}
    for name, folder in folders.items():
        is_text = not (fetched.folder(folder) / TASKS).is_file()
        datasets[name] = open_here(folder, flags, is_text)
    return datasets


def open_sources(flags: Flags, mix: DataMix) -> dict[str, TokenDataset]:
    """{source: its dataset}. Rank 0 checks that they can be mixed. Raises ValueError."""
    sources = {source.name: open_here(source.path, flags) for source in mix.sources}
    asked = flags.data.context_length
    for source in sources.values():
        length = source.context_length
        if asked not in (None, length):
            raise ValueError(
                f"--context_length {asked}: the rows of {source.given!r} hold {length} tokens; "
                f"run prepare_data.py again with --context_length {asked}, or take {length} here."
            )
        if is_stream(source.train) and flags.data.data_mix:
            raise ValueError(
                f"{mix.flag}: {source.given!r} is a stream, which isn't mixed: give it by "
                "--train_data_dir."
            )
    # Each is compared with the first, which makes all alike.
    first, *others = sources.values()
    if is_rank_zero():
        for other in others:
            require_alike(first, other, mix.flag, flags.data.document_masking is not False)
    return sources


def require_alike(
    first: TokenDataset, other: TokenDataset, flag: str, masks_documents: bool
) -> None:
    """Raises ValueError unless one run can read rows of both, which `flag` names."""
    both = f"{flag}: {first.given!r} and {other.given!r}"
    columns, others = _columns(first), _columns(other)
    if columns != others:
        words = f"{', '.join(columns)}, and {', '.join(others)}"
        raise ValueError(
            f"{both} have different columns: {words}; run prepare_data.py for both with the same "
            "flags."
        )
    _require_one_tokenizer(first, other, both)
    # One token id marks ends for the whole run, so it must be the same in all sources.
    ends = [one.document_end for one in (first, other)]
    if masks_documents and ends[0] != ends[1]:
        raise ValueError(
            f"{both} end documents with different tokens, {ends[0]} and {ends[1]} (None: not "
            "packed by prepare_data.py); take --document_masking false."
        )


def _columns(dataset: TokenDataset) -> list[str]:
    """The columns of its rows, without labels where these only mark padding."""
    columns = set(dataset.train[0])
    if is_padded(dataset.train):
        columns.discard("labels")
    return sorted(columns)


def _require_one_tokenizer(first: TokenDataset, other: TokenDataset, both: str) -> None:
    # Equal hashes tell that the tokenizers are equal without loading them.
    hashes = [one.manifest.get("tokenizer_sha256") for one in (first, other)]
    if hashes[0] == hashes[1] is not None:
        return
    one, another = (
        loading.tokenizer_beside(source.folder / "tokenizer") for source in (first, other)
    )
    # Where a hash is missing, the tokens themselves decide.
    words = ""
    if one is not None and another is not None:
        words = differing_tokens(one, another)
    if words or None not in hashes:
        raise ValueError(
            f"{both} were made with different tokenizers{words}; run prepare_data.py for both "
            "with one --tokenizer."
        )


def differing_tokens(one: Any, other: Any) -> str:
    """The first tokens whose ids differ between two tokenizers, or that they make of a text, as a
    part of a sentence; "" if all agree."""
    # Vocabularies first: they say best what differs.
    ids, others = one.get_vocab(), other.get_vocab()
    tokens = ids.keys() | others.keys()
    differing = sorted(token for token in tokens if ids.get(token) != others.get(token))
    if differing:
        pairs = []
        for token in differing[:SHOWN_TOKENS]:
            pairs.append(
                f"{token!r} ({others.get(token, 'missing')} and {ids.get(token, 'missing')})"
            )
        count = f"{len(differing):,} token{'s have' if len(differing) > 1 else ' has'}"
        missing = len(ids.keys() ^ others.keys())
        alone = f" ({missing:,} are in one of the two alone)" if missing else ""
        return f": {count} different ids{alone}, such as {', '.join(pairs)}"
    # Other merges, normalizers or templates, such as with and without BOS.
    made, made_there = (tokenizer(SAMPLE)["input_ids"] for tokenizer in (one, other))
    if made == made_there:
        return ""
    return f": {SAMPLE!r} is {made_there[:8]} ..., not {made[:8]} ..."
