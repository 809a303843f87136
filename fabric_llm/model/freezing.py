"""Which parameters train: what --freeze and --train_only say, against the names of a model. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Optional

from fabric_llm.base.spelling import nearest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

EMBEDDINGS = "embeddings"  # the word for the input embeddings and the output head
FLAGS = ("freeze", "train_only")


def words(given: Optional[str]) -> tuple[str, ...]:
    """The patterns of a flag, in alphabetical order, each once."""
    return tuple(sorted({word.strip() for word in (given or "").split(",") if word.strip()}))


def check(freeze: Optional[str], train_only: Optional[str]) -> None:
    """The two flags by themselves. Raises ValueError."""
    if freeze is not None and train_only is not None:
        raise ValueError("--freeze and --train_only are both given: each says which parameters train, so take one.")
    for flag, given in zip(FLAGS, (freeze, train_only)):
        if given is not None and not words(given):
            raise ValueError(f"--{flag} takes patterns of parameter names, comma-separated, not {given!r}.")


def frozen_names(causal_lm: PreTrainedModel, freeze: Optional[str], train_only: Optional[str]) -> frozenset[str]:
    """Names, as `named_parameters` gives them, of the parameters that the flags freeze.

    A pattern (of fnmatch) is compared with all names of a parameter: a tied weight is one parameter with two names, which is
    chosen by either. Raises ValueError for a pattern without a match, and where nothing is left to train.
    """
    frozen, parameters = _frozen(causal_lm, freeze, train_only), causal_lm.named_parameters()
    if not any(parameter.requires_grad for name, parameter in parameters if name not in frozen):
        asked = f"--freeze {freeze}" if freeze is not None else f"--train_only {train_only}"
        raise ValueError(f"{asked} leaves nothing to train in {type(causal_lm).__name__}.")
    return frozen


def freeze(causal_lm: PreTrainedModel, names: Iterable[str]) -> None:
    """Give the parameters of these names no gradients."""
    for name in names:
        causal_lm.get_parameter(name).requires_grad_(False)


def tied_both_ways(causal_lm: PreTrainedModel, freeze: Optional[str], train_only: Optional[str]) -> list[str]:
    """A sentence for each weight that is chosen by only some of its names."""
    said = "is frozen" if freeze is not None else "trains"
    sentences = []
    for word in words(freeze) + words(train_only):
        for _, names in _chosen(causal_lm, word):
            others = [] if word == EMBEDDINGS else [name for name in names if not fnmatchcase(name, word)]
            sentences += [
                f"{other} {said} as well: it is tied, the same weight under another name." for other in others
            ]
    return sentences


def thawed(causal_lm: PreTrainedModel, schedule: dict[str, Any], frozen: frozenset[str]) -> frozenset[str]:
    """Names of the parameters that train now, and didn't with the flags of `schedule`, which a checkpoint holds."""
    return _frozen(causal_lm, *(schedule.get(flag) for flag in FLAGS)) - frozen


def _frozen(causal_lm: PreTrainedModel, freeze: Optional[str], train_only: Optional[str]) -> frozenset[str]:
    flag, asked = ("freeze", words(freeze)) if freeze is not None else ("train_only", words(train_only))
    chosen: set[str] = set()
    for word in asked:
        found = {name for name, _ in _chosen(causal_lm, word)}
        if not found:
            raise ValueError(_no_match(flag, word, causal_lm))
        chosen |= found
    everything = {name for name, _ in causal_lm.named_parameters()} if asked else set()
    return frozenset(chosen if flag == "freeze" else everything - chosen)


def _chosen(causal_lm: PreTrainedModel, word: str) -> Iterator[tuple[str, list[str]]]:
    """(first name, all names) of each parameter that a word of the flags means."""
    of_embeddings = _embeddings(causal_lm) if word == EMBEDDINGS else set()
    for identity, names in _all_names(causal_lm).items():
        if identity in of_embeddings or word != EMBEDDINGS and any(fnmatchcase(name, word) for name in names):
            yield names[0], names


def _all_names(causal_lm: PreTrainedModel) -> dict[int, list[str]]:
    """All names of each parameter, the first as `named_parameters` gives it."""
    found: dict[int, list[str]] = {}
    for name, parameter in causal_lm.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), []).append(name)
    return found


def _embeddings(causal_lm: PreTrainedModel) -> set[int]:
    modules = (causal_lm.get_input_embeddings(), causal_lm.get_output_embeddings())
    return {id(parameter) for module in modules if module is not None for parameter in module.parameters()}


def _no_match(flag: str, word: str, causal_lm: PreTrainedModel) -> str:
    """One sentence for a pattern that no name matches, with what may be meant. Layers are alike but for their numbers."""
    names = [name for all_names in _all_names(causal_lm).values() for name in all_names]
    if any(name.startswith(f"{word.rstrip('.')}.") for name in names):
        return f"--{flag} {word} is no parameter but a module; its parameters are {word.rstrip('.')}.*"
    parts = [name.split(".") for name in names]
    modules = {f"{'.'.join(path[:end])}.*" for path in parts for end in range(1, len(path))}
    inner = {f"*.{part}.*" for path in parts for part in path[1:-1] if not part.isdigit()}
    shapes = {re.sub(r"\d+", "0", name) for name in {*names, *modules, *inner}}
    close = [EMBEDDINGS] if nearest(word, [EMBEDDINGS]) else nearest(re.sub(r"\d+", "0", word), sorted(shapes))
    numbers = iter(re.findall(r"\d+", word))
    meant = re.sub(r"\d+", lambda zero: next(numbers, zero[0]), close[0]) if close else word
    hint = f"its last parameters are {', '.join(names[-2:])}" if meant == word else f"did you mean {meant}"
    return f"--{flag} {word}: no parameter of {type(causal_lm).__name__} has such a name; {hint}{'?' if meant != word else '.'}"
