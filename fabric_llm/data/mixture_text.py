"""What --data_mix says: sources, weights and stages, from a YAML file or one line. Nothing here imports numpy or torch."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Optional

import yaml

from fabric_llm.base import plain_yaml
from fabric_llm.base.spelling import nearest
from fabric_llm.data.sources import NAME
from fabric_llm.data.stages import MOST_SLOTS, Stage

MOST_CHARACTERS = 60  # of a value in a message
MOST_BYTES = plain_yaml.MOST_BYTES // 2
MOST_SOURCES = 500
NEW, REPLAY = "new", "replay"  # the names of --train_data_dir and --replay as sources
NUMBER = r"\d{1,15}(\.\d{1,15})?([eE][+-]?\d{1,2})?|\d{1,9}/0*[1-9]\d{0,8}"
KEYS = {"the mixture": ("sources", "stages"), "source": ("path", "weight", "max_epochs"), "stage": ("from", "weights")}
SHORT = "name=folder:weight, comma-separated, such as new=data/new:0.75,old=data/old:0.25"


@dataclass(frozen=True)
class Source:
    """A dataset of a mixture."""

    name: str
    path: str
    max_epochs: Optional[Fraction] = None  # how often it may be read


@dataclass(frozen=True)
class DataMix:
    """What --data_mix says."""

    sources: tuple[Source, ...]
    stages: tuple[Stage, ...]  # by share of the run; the first begins at 0, and weights have no common divisor

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(source.name for source in self.sources)

    def in_order(self, names: Sequence[str]) -> DataMix:
        """The same with the sources `names` first."""
        index = {name: self.names.index(name) for name in names}
        order = [*index.values(), *(i for i, name in enumerate(self.names) if name not in index)]
        stages = tuple(stage._replace(weights=tuple(stage.weights[i] for i in order)) for stage in self.stages)
        return DataMix(tuple(self.sources[i] for i in order), stages)


def text_of(given: str) -> str:
    """The mixture as one line: what --data_mix says, or what is in the YAML file that it names. Raises ValueError."""
    text = given
    if given.endswith((".yaml", ".yml")):
        try:
            text = _one_line(plain_yaml.read(Path(given)))
        except OSError as error:
            raise ValueError(f"--data_mix {given!r} can't be read: {error.strerror}.") from error
        except ValueError as error:
            raise ValueError(f"--data_mix: {error}.") from error
    if len(text) > MOST_BYTES:  # arguments.yaml holds it, among others
        raise ValueError(f"--data_mix: the mixture has {len(text):,} characters; at most {MOST_BYTES:,} are read.")
    return text


def with_replay(new: Optional[str], data_mix: Optional[str], replay: Optional[str], share: Optional[float]) -> str:
    """What --train_data_dir `new`, --replay and --replay_fraction say, as a mixture in one line. Raises ValueError."""
    if replay is None:
        raise ValueError("--replay_fraction is the share of --replay, which isn't given.")
    if data_mix is not None:
        raise ValueError("--replay goes with --train_data_dir; in --data_mix what is replayed is one more source.")
    if new is None:
        raise ValueError("--replay goes with --train_data_dir, which isn't given.")
    part = Fraction("0.2" if share is None else repr(share))
    if not 0 < part < 1:
        raise ValueError(f"--replay_fraction must be between 0 and 1, not {share}.")
    sources = {NEW: (new, 1 - part), REPLAY: (replay, part)}
    said = {name: {"path": path, "weight": f"{float(weight):.12g}"} for name, (path, weight) in sources.items()}
    return _one_line({"sources": said})


def _one_line(values: Any) -> str:
    return yaml.safe_dump(values, default_flow_style=True, sort_keys=False, width=10**9).strip()


def at_least(mix: DataMix, shares: Mapping[str, Fraction]) -> DataMix:
    """The same with at least such a share of some sources in each stage, which the others give up in proportion."""
    stages = tuple(stage._replace(weights=_raised(stage.weights, mix.names, shares)) for stage in mix.stages)
    return replace(mix, stages=stages)


def _raised(weights: tuple[int, ...], names: Sequence[str], shares: Mapping[str, Fraction]) -> tuple[int, ...]:
    now = {name: Fraction(weight, sum(weights)) for name, weight in zip(names, weights)}
    raised = {name: share for name, share in shares.items() if share > now[name]}
    if not raised:
        return weights
    left = 1 - sum(raised.values())
    others = sum(share for name, share in now.items() if name not in raised)
    shared = {name: raised[name] if name in raised else share * left / others for name, share in now.items()}
    return _slots(shared, names, "the mixture with more replay")


def parse(given: str) -> DataMix:
    """The mixture that --data_mix describes. Raises ValueError in one sentence; no folder is looked at."""
    text = text_of(given.strip())
    values = _loaded(text) if text.startswith("{") else _of_short_form(text)
    _require_keys(values, "the mixture", "the mixture")
    listed, stages = values.get("sources"), values.get("stages") or []
    if not isinstance(listed, dict) or not listed:
        raise ValueError("--data_mix needs `sources`: a name for each, with its path and weight.")
    if len(listed) > MOST_SOURCES:
        raise ValueError(f"--data_mix has {len(listed):,} sources; at most {MOST_SOURCES} are read.")
    if not isinstance(stages, list):
        raise ValueError("--data_mix: `stages` is a list of {from: ..., weights: {...}}.")
    sources, weights = [], {}
    for key, said in listed.items():
        source, weight = _source(str(key), said)
        sources.append(source)
        if weight is not None:
            weights[source.name] = weight
    names = [source.name for source in sources]
    found = [(Fraction(0), weights, "the mixture")] + [_stage(said, names) for said in stages]
    used = {name for _, given, _ in found for name in given}
    if unused := [name for name in names if name not in used]:
        raise ValueError(
            f"--data_mix: source {unused[0]!r} has no weight; a source that isn't read any more has weight 0."
        )
    _require_apart(sources)
    found.sort(key=lambda stage: stage[0])
    for (begins, _, _), (other, _, _) in zip(found, found[1:]):
        if begins == other:
            raise ValueError(f"--data_mix: two stages begin at {float(begins):g} of the run.")
    return DataMix(tuple(sources), tuple(Stage(begins, _slots(given, names, where)) for begins, given, where in found))


def _loaded(text: str) -> Any:
    try:
        return plain_yaml.load(text)
    except ValueError as error:
        raise ValueError(f"--data_mix: {error}.") from error


def _of_short_form(text: str) -> dict[str, Any]:
    """new=data/x:0.75:4 -> {"new": {"path": "data/x", "weight": "0.75", "max_epochs": "4"}}"""
    sources: dict[str, Any] = {}
    if decimal := re.search(r"[^,:]+:(\d+),(\d+)(?=,|$)", text):
        point = f"{decimal[0][: decimal.start(1) - decimal.start()]}{decimal[1]}.{decimal[2]}"
        raise ValueError(f"--data_mix: {_shown(decimal[0])} has a decimal comma: write {_shown(point)}.")
    for part in filter(None, (part.strip() for part in text.split(","))):
        found = re.fullmatch(r"([^=:]+)=(.+?):([^:=/]*(?:/\d+)?)(?::([^:=/]*))?", part)
        if found is None and re.fullmatch(r"[^=:]+=[^=:]+", part):
            raise ValueError(
                f"--data_mix: {_shown(part)} has no weight: write {_shown(part + ':1')}, or another number."
            )
        if found is None:
            raise ValueError(f"--data_mix takes a YAML file, or {SHORT}; not {_shown(part)}.")
        name, path, weight, max_epochs = found.groups()
        if name.strip() in sources:
            raise ValueError(f"--data_mix: source {name.strip()!r} is there twice.")
        sources[name.strip()] = {"path": path, "weight": weight}
        if max_epochs is not None:
            sources[name.strip()]["max_epochs"] = max_epochs
    if not sources:
        raise ValueError(f"--data_mix is empty; it takes a YAML file, or {SHORT}.")
    return {"sources": sources}


def _source(name: str, said: Any) -> tuple[Source, Optional[Fraction]]:
    """(the source, its weight at the start of the run, None where none is given)."""
    if not re.fullmatch(NAME, name):
        raise ValueError(f"--data_mix: a source's name has letters, digits, '_', '-' and '.', unlike {_shown(name)}.")
    where = f"source {name!r}"
    _require_keys(said, "source", where)
    path = said.get("path")
    if not isinstance(path, str) or not path:
        raise ValueError(f"--data_mix: {where} needs a path, the folder of its dataset.")
    max_epochs, weight = said.get("max_epochs"), said.get("weight")
    most = None if max_epochs is None else _number(max_epochs, f"max_epochs of {where}")
    if most == 0:
        raise ValueError(f"--data_mix: max_epochs of {where} must be positive, not {max_epochs}.")
    return Source(name, path, most), None if weight is None else _number(weight, f"the weight of {where}")


def _stage(said: Any, names: list[str]) -> tuple[Fraction, dict[str, Fraction], str]:
    _require_keys(said, "stage", "a stage")
    begins = _number(said.get("from"), "`from` of a stage")
    if not 0 < begins < 1:
        raise ValueError(f"--data_mix: `from` of a stage is a share of the run, between 0 and 1, not {said['from']}.")
    where, weights = f"the stage from {float(begins):g} on", said.get("weights")
    if not isinstance(weights, dict) or not weights:
        raise ValueError(f"--data_mix: {where} needs `weights`, such as {{{names[0]}: 1}}.")
    for name in weights:
        if str(name) not in names:
            meant = _meant(str(name), names) or f"The sources are {', '.join(map(repr, names))}."
            raise ValueError(f"--data_mix: {where} names {_shown(str(name))}, which isn't a source. {meant}")
    return begins, {str(n): _number(w, f"the weight of source {n!r} in {where}") for n, w in weights.items()}, where


def _require_keys(said: Any, kind: str, where: str) -> None:
    if not isinstance(said, dict):
        raise ValueError(f"--data_mix: {where} must be a mapping with {', '.join(KEYS[kind])}, not {_shown(said)}.")
    for key in said:
        if key not in KEYS[kind]:
            meant = _meant(str(key), KEYS[kind]) or f"It takes {', '.join(KEYS[kind])}."
            raise ValueError(f"--data_mix: unknown key {_shown(str(key))} of {where}. {meant}")


def _meant(name: str, known: Sequence[str]) -> str:
    close = nearest(name, known)
    return f"Did you mean {close[0]!r}?" if len(close) == 1 else ""


def _require_apart(sources: Sequence[Source]) -> None:
    folders: dict[str, str] = {}
    for source in sources:
        other = folders.setdefault(os.path.realpath(source.path), source.name)
        if other != source.name:
            raise ValueError(
                f"--data_mix: sources {other!r} and {source.name!r} are both {source.path!r}; give one of them more weight."
            )


def _number(value: Any, what: str) -> Fraction:
    """Exactly the decimal that is written."""
    if isinstance(value, bool) or not re.fullmatch(NUMBER, str(value)):
        raise ValueError(f"--data_mix: {what} must be a number of 0 or more, not {_shown(value)}.")
    return Fraction(str(value))


def _shown(value: Any) -> str:
    if not isinstance(value, str):
        return str(value)
    return repr(value if len(value) <= MOST_CHARACTERS else f"{value[:MOST_CHARACTERS]}...")


def _slots(given: Mapping[str, Fraction], names: Sequence[str], where: str) -> tuple[int, ...]:
    """Whole weights without a common divisor, at most MOST_SLOTS together: finer ones by the largest remainders."""
    total = sum(given.values())
    if total == 0:
        raise ValueError(f"--data_mix: the weights of {where} add up to 0.")
    shares = [given.get(name, Fraction(0)) / total for name in names]
    period = math.lcm(*(share.denominator for share in shares))
    if period <= MOST_SLOTS:
        return tuple(int(share * period) for share in shares)
    counts = [int(share * MOST_SLOTS) for share in shares]
    rest = sorted(range(len(shares)), key=lambda i: counts[i] - shares[i] * MOST_SLOTS)
    for i in rest[: MOST_SLOTS - sum(counts)]:
        counts[i] += 1
    for name, share, count in zip(names, shares, counts):
        if share > 0 and count == 0:
            raise ValueError(
                f"--data_mix: the share of source {name!r} in {where}, {float(share):.2g}, is less than one row in "
                f"{MOST_SLOTS:,}, which rounds to none."
            )
    divisor = math.gcd(*counts)
    return tuple(count // divisor for count in counts)


def described(mix: DataMix) -> str:
    """The mixture in words, without folders: what two runs of the same mixture have in common."""
    stages = []
    for stage in mix.stages:
        shares = sorted((name, weight / sum(stage.weights)) for name, weight in zip(mix.names, stage.weights) if weight)
        words = ", ".join(f"{name} {share:.10g}" for name, share in shares)
        stages.append(f"from {float(stage.begins):.10g} on {words}" if stage.begins else words)
    capped = sorted(f"{source.name} {float(source.max_epochs):g}" for source in mix.sources if source.max_epochs)
    return "; ".join([*stages, *([f"max_epochs {', '.join(capped)}"] if capped else [])])


def require_one_length(mix: DataMix, contexts: Sequence[Optional[int]]) -> None:
    """contexts: tokens in a row of each source, None where it isn't known. Raises ValueError where a stage has several."""
    for stage in mix.stages:
        found = {c: name for name, c, weight in zip(mix.names, contexts, stage.weights) if weight and c is not None}
        if len(found) > 1:
            words = " and ".join(f"{context} in source {name!r}" for context, name in found.items())
            where = f" from {float(stage.begins):g} of the run on" if stage.begins else ""
            raise ValueError(
                f"--data_mix: rows that are read together{where} must hold equally many tokens, which are {words}; "
                "prepare them alike, or put them in different stages."
            )
