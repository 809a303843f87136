"""Which parameters train: what --freeze and --train_only say, against the names of a model. Imports
no torch."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Optional

from fabric_llm.base.names import comma_separated, nearest

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

EMBEDDINGS = "embeddings"  # the word for the input embeddings and the output head
FLAGS = ("freeze", "train_only")


def words(given: Optional[str]) -> tuple[str, ...]:
    """The patterns of a flag, in alphabetical order, each once."""
    return tuple(sorted(set(comma_separated(given))))


def check(freeze: Optional[str], train_only: Optional[str]) -> None:
    """The two flags by themselves. Raises ValueError."""
    if freeze is not None and train_only is not None:
        raise ValueError(
            "--freeze and --train_only are both given: each says which parameters train, so take "
            "one."
        )
    # A flag such as "," names nothing, which would silently train everything or nothing.
    for flag, given in zip(FLAGS, (freeze, train_only)):
        if given is not None and not words(given):
            raise ValueError(
                f"--{flag} takes patterns of parameter names, comma-separated, not {given!r}."
            )


def frozen_names(
    causal_lm: PreTrainedModel, freeze: Optional[str], train_only: Optional[str]
) -> frozenset[str]:
    """Names, as `named_parameters` gives them, of the parameters that the flags freeze.

    A pattern (of fnmatch) is compared with all names of a parameter: a tied weight is one parameter
    with two names, which is chosen by either. Raises ValueError for a pattern without a match, and
    where nothing is left to train.
    """
    frozen = _frozen(causal_lm, freeze, train_only)
    trained = {name for name, parameter in causal_lm.named_parameters() if parameter.requires_grad}
    # Only what the flags freeze is their fault: without them there is nothing to complain about.
    if frozen and not trained - frozen:
        flag = f"--freeze {freeze}" if freeze is not None else f"--train_only {train_only}"
        raise ValueError(f"{flag} leaves nothing to train in {type(causal_lm).__name__}.")
    return frozen


def _frozen(
    causal_lm: PreTrainedModel, freeze: Optional[str], train_only: Optional[str]
) -> frozenset[str]:
    # `check` has refused both flags at once, so at most one is given.
    flag, given = ("freeze", freeze) if freeze is not None else ("train_only", train_only)
    if given is None:
        return frozenset()
    chosen: set[str] = set()
    for word in words(given):
        # A pattern without a match is a typing error, after which too much or too little would
        # train.
        if not (matching := _chosen(causal_lm, word)):
            names = [name for name, _ in causal_lm.named_parameters(remove_duplicate=False)]
            # Where nothing is similar, real names show how parameters of this model are called.
            hint = f"its last parameters are {', '.join(names[-2:])}."
            if meant := _pattern_meant(word, names):
                hint = f"did you mean {meant}?"
            raise ValueError(
                f"--{flag} {word}: no parameter of {type(causal_lm).__name__} has such a name; "
                f"{hint}"
            )
        chosen |= matching.keys()
    # What --train_only doesn't name is frozen.
    parameters = dict(causal_lm.named_parameters())
    return frozenset(chosen if flag == "freeze" else parameters.keys() - chosen)


def _pattern_meant(word: str, names: list[str]) -> str:
    """What a pattern that matches none of `names` may mean; "" where nothing is similar."""
    if close := nearest(word, [EMBEDDINGS, *names]):
        return close[0]
    parts, meant = sorted({part for name in names for part in name.split(".")}), []
    for part in word.replace("-", "_").split("."):
        # A part with stars is right as it is.
        mistyped = part not in parts and "*" not in part
        meant += (mistyped and nearest(part, parts)) or [part]
    whole = ".".join(meant)
    # A part of a name, such as lm_head or layers.0, needs stars around it.
    for pattern in (whole, f"*{whole.strip('*.')}*"):
        if whole.strip("*.") and any(fnmatchcase(name, pattern) for name in names):
            return repr(pattern)
    return ""


def freeze(causal_lm: PreTrainedModel, names: Iterable[str]) -> None:
    """Give the parameters of these names no gradients."""
    for name in names:
        # A tied weight is one parameter, so either of its names freezes it.
        causal_lm.get_parameter(name).requires_grad_(False)


def tied_both_ways(
    causal_lm: PreTrainedModel, freeze: Optional[str], train_only: Optional[str]
) -> list[str]:
    """A sentence for each weight that is chosen by only some of its names."""
    # The pattern names one of a tied weight's names. The user should hear that the other one
    # follows.
    what = "is frozen" if freeze is not None else "trains"
    sentences = []
    for pattern in words(freeze or train_only):
        if pattern == EMBEDDINGS:
            continue
        for names in _chosen(causal_lm, pattern).values():
            for name in names:
                if not fnmatchcase(name, pattern):
                    sentences.append(
                        f"{name} {what} as well: it is tied, the same weight under another name."
                    )
    return sentences


def thawed(
    causal_lm: PreTrainedModel, schedule: dict[str, Any], frozen: frozenset[str]
) -> frozenset[str]:
    """Names of the parameters that train now, and didn't with the flags of `schedule`, which a
    checkpoint holds.

    causal_lm: frozen as it is now, maybe all of what trained then.
    """
    # `_frozen` looks at names only, so it doesn't matter that the model is frozen by other flags
    # now.
    return _frozen(causal_lm, *(schedule.get(flag) for flag in FLAGS)) - frozen


def _chosen(causal_lm: PreTrainedModel, word: str) -> dict[str, list[str]]:
    """{first name: all names} of each parameter that a pattern, or EMBEDDINGS, chooses. The first
    name is the one that `named_parameters` gives."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in causal_lm.named_parameters(remove_duplicate=False):
        # A tied weight is one object, under which all of its names are collected.
        names.setdefault(parameter, []).append(name)
    wanted: set[nn.Parameter] = set()
    if word == EMBEDDINGS:
        # A model may have no output head. A head that is tied has the same parameter as the
        # embeddings.
        for module in (causal_lm.get_input_embeddings(), causal_lm.get_output_embeddings()):
            if module is not None:
                wanted.update(module.parameters())
    else:
        for parameter, all_names in names.items():
            if any(fnmatchcase(name, word) for name in all_names):
                wanted.add(parameter)
    return {
        all_names[0]: all_names for parameter, all_names in names.items() if parameter in wanted
    }
