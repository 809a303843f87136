"""What --data_mix says. Nothing here imports numpy or torch.

A mixture reads from several sources, each a dataset, with weights that change from one stage of the
run to the next (periods.py).
"""

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
from fabric_llm.base.names import NAME, at_home, comma_separated, nearest, shown
from fabric_llm.data.periods import ONE_SET, Stage

MAX_SLOTS = 10_000  # of a period: finer shares are rounded
MAX_CHARACTERS = 60  # of a value in a message
MAX_BYTES = plain_yaml.MAX_YAML_BYTES // 2
NEW, REPLAY = "new", "replay"  # the names of --train_data_dir and --replay as sources
# A decimal, such as a float with all its digits, or a quotient such as 1/3. The lengths are
# bounded, so that fractions stay small.
NUMBER = r"(?=\.?\d)\d{0,15}(\.\d{0,25})?([eE][+-]?\d{1,2})?|\d{1,9}/0{0,8}[1-9]\d{0,8}"
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
    # by share of the run; the first begins at 0, and weights have no common divisor
    stages: tuple[Stage, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(source.name for source in self.sources)

    @property
    def flag(self) -> str:
        """What gave it: --replay makes a mixture of these two names."""
        return "--replay" if self.names == (NEW, REPLAY) else "--data_mix"

    def in_order(self, names: Sequence[str]) -> "DataMix":
        """The same with the sources `names` first."""
        # dict.fromkeys drops names that come twice, and keeps the order.
        order = [self.names.index(name) for name in dict.fromkeys([*names, *self.names])]
        stages = []
        for stage in self.stages:
            weights = tuple(stage.weights[index] for index in order)
            stages.append(stage._replace(weights=weights))
        return DataMix(tuple(self.sources[index] for index in order), tuple(stages))


# ------------------------------------------------------------------------------- from text


def text_of(given: str) -> str:
    """The mixture as one line: what --data_mix says, or what is in the YAML file that it names.
    Raises ValueError."""
    text = given
    if given.endswith((".yaml", ".yml")):
        try:
            text = _one_line(plain_yaml.read_yaml(Path(given)))
        except OSError as error:
            raise ValueError(f"--data_mix {given!r} can't be read: {error.strerror}.") from error
        except ValueError as error:
            raise ValueError(f"--data_mix: {error}.") from error
    if len(text) > MAX_BYTES:  # arguments.yaml holds it, among others
        raise ValueError(
            f"--data_mix: the mixture has {len(text):,} characters; at most {MAX_BYTES:,} are read."
        )
    return text


def with_replay(
    new: Optional[str], data_mix: Optional[str], replay: Optional[str], share: Optional[float]
) -> str:
    """What --train_data_dir `new`, --replay and --replay_fraction say, as a mixture in one line.
    Raises ValueError."""
    # A resumed run has them as the mixture that they made.
    if data_mix is not None and new is None and (former := parse(data_mix)).flag == "--replay":
        new, read_before = (source.path for source in former.sources)
        data_mix, replay = None, replay or read_before
    if replay is None:
        raise ValueError(
            "--replay_fraction is the share of --replay, which isn't given: give both, or neither "
            "(null)."
        )
    if data_mix is not None or new is None:
        raise ValueError(
            "--replay goes with --train_data_dir; in --data_mix what is replayed is one more "
            "source. What a file of --config gives is left out by --train_data_dir null "
            "--replay null --replay_fraction null."
        )
    # repr gives the decimal that was written: 0.1, and not the binary number next to it.
    fraction = Fraction("0.2" if share is None else repr(share))
    if not 0 < fraction < 1:
        raise ValueError(f"--replay_fraction must be between 0 and 1, such as 0.2, not {share}.")
    sources = {}
    for name, path, weight in ((NEW, new, 1 - fraction), (REPLAY, replay, fraction)):
        # Twelve digits read well, such as 0.8, and are exact enough.
        sources[name] = {"path": path, "weight": f"{float(weight):.12g}"}
    return _one_line({"sources": sources})


def _one_line(values: Any) -> str:
    return yaml.safe_dump(values, default_flow_style=True, sort_keys=False, width=10**9).strip()


def mix_of(data_mix: Optional[str], train_data_dir: Optional[str]) -> DataMix:
    """What a run reads. Without --data_mix that is a mixture of the one dataset in
    --train_data_dir."""
    if data_mix:
        return parse(data_mix)
    # One stage of one source, so that all code reads a mixture.
    return DataMix((Source(ONE_SET, str(train_data_dir)),), (Stage(Fraction(0), (1,)),))


def parse(given: str) -> DataMix:
    """The mixture that --data_mix describes. Raises ValueError in one sentence; no folder is looked
    at."""
    text = text_of(given.strip())
    try:
        if text.startswith("{"):
            return _parsed(plain_yaml.load_yaml(text))
        return _parsed(_of_short_form(text))
    except ValueError as error:
        sentence = f"--data_mix: {error}"
        # A sentence that asks "Did you mean ...?" has its mark already.
        if not sentence.endswith("?"):
            sentence += "."
        raise ValueError(sentence) from error


def _of_short_form(text: str) -> dict[str, Any]:
    """new=data/x:0.75:4 -> {"sources": {"new": {"path": "data/x", "weight": "0.75", "max_epochs":
    "4"}}}"""
    sources: dict[str, Any] = {}
    # A comma at the end is no mistake.
    for source in comma_separated(text):
        # name=folder:weight, or name=folder:weight:max_epochs. A weight may be 1/3.
        # A weight has no slash but that of a quotient: so a colon in a path doesn't begin one.
        match = re.fullmatch(r"([^=:]+)=(.+?):([^:=/]*(?:/\d+)?)(?::([^:=/]*))?", source)
        if match is None or match[1].strip() in sources:
            raise ValueError(
                f"it takes a YAML file, or {SHORT}, each name once; not {_shown(source)}"
            )
        sources[match[1].strip()] = {"path": match[2], "weight": match[3], "max_epochs": match[4]}
    return {"sources": sources}


def _parsed(values: Any) -> DataMix:
    given, of_stages = _values(values, "the mixture", ("sources", "stages"))
    if not isinstance(given, dict) or not given or not isinstance(of_stages or [], list):
        raise ValueError(
            "it needs `sources`, by name; `stages`, if any, is a list of {from: 0.8, weights: "
            "{...}}"
        )
    sources, weights = _sources(given)
    names = [source.name for source in sources]
    # The weights from a share of the run on, and the words for them in a message.
    stages = {Fraction(0): (weights, "the mixture")}
    # A stage replaces all weights of the stage before it.
    for stage in of_stages or []:
        share, given = _values(stage, "a stage", ("from", "weights"))
        begins = _number(share, "`from` of a stage")
        where = f"the stage from {float(begins):g} on"
        if not 0 < begins < 1 or begins in stages:
            raise ValueError(
                f"{where}: `from` is a share of the run between 0 and 1, another for each stage"
            )
        stages[begins] = _weights(given, names, where), where
    # A source that no stage mentions is a mistake: most likely its weight was forgotten.
    mentioned: set[str] = set()
    for of_stage, _ in stages.values():
        mentioned.update(of_stage)
    for name in names:
        if name not in mentioned:
            raise ValueError(
                f"source {name!r} has no weight; a source that isn't read any more has weight 0"
            )
    # Stages may be given in any order.
    planned = []
    for begins, (of_stage, where) in sorted(stages.items()):
        planned.append(Stage(begins, _slots(of_stage, names, where)))
    return DataMix(tuple(sources), tuple(planned))


def _sources(given: dict[Any, Any]) -> tuple[list[Source], dict[str, Fraction]]:
    """(the sources of a mixture, the weights of those that have one from its beginning on)."""
    sources, weights, folders = [], {}, {}
    for key, values in given.items():
        # YAML reads a name such as 2024 as a number.
        name, where = str(key), f"source {str(key)!r}"
        if not re.fullmatch(NAME, name):
            raise ValueError(
                f"a source's name has letters, digits, '_', '-' and '.', unlike {_shown(name)}"
            )
        path, weight, most = _values(values, where, ("path", "weight", "max_epochs"))
        if not isinstance(path, str) or not path:
            raise ValueError(f"{where} needs a path, the folder of its dataset")
        path = at_home(path)
        # Links are followed, because a dataset in two sources would have two orders of its rows.
        if (other := folders.setdefault(os.path.realpath(path), name)) != name:
            if {name, other} == {NEW, REPLAY}:
                raise ValueError(f"--train_data_dir and --replay are both {path!r}")
            raise ValueError(
                f"sources {other!r} and {name!r} are both {path!r}; give one of them more weight"
            )
        # A source may come in at a later stage.
        if weight is not None:
            weights[name] = _number(weight, f"the weight of {where}")
        max_epochs = None if most is None else _number(most, f"max_epochs of {where}")
        if max_epochs == 0:
            raise ValueError(f"max_epochs of {where} must be positive, not {most}")
        sources.append(Source(name, path, max_epochs))
    return sources, weights


def _weights(given: Any, names: Sequence[str], where: str) -> dict[str, Fraction]:
    """The weights of the sources in a stage. where: words for the stage."""
    if not isinstance(given, dict) or not given:
        raise ValueError(f"{where} needs `weights`, such as {{{names[0]}: 1}}")
    for name in map(str, given):
        if name not in names:
            raise ValueError(
                f"{where} names {_shown(name)}, which isn't a source. {_meant(name, names)}"
            )
    return {
        str(name): _number(weight, f"the weight of source {name!r} in {where}")
        for name, weight in given.items()
    }


def _values(given: Any, where: str, keys: Sequence[str]) -> list[Any]:
    """The values of `keys` in a mapping, None for those that it doesn't have."""
    if not isinstance(given, dict):
        raise ValueError(f"{where} must be a mapping with {', '.join(keys)}, not {_shown(given)}")
    for key in map(str, given):
        if key not in keys:
            raise ValueError(f"unknown key {_shown(key)} of {where}. {_meant(key, keys)}")
    return [given.get(key) for key in keys]


def _meant(name: str, known: Sequence[str]) -> str:
    close = nearest(name, known)
    return f"Did you mean {close[0]!r}?" if close else f"There are {', '.join(known)}"


def _number(value: Any, what: str) -> Fraction:
    """Exactly the decimal that is written."""
    if isinstance(value, bool) or not re.fullmatch(NUMBER, str(value)):
        raise ValueError(f"{what} must be a number of 0 or more, not {_shown(value)}")
    # str gives back the decimal that YAML has read as a float.
    return Fraction(str(value))


def _shown(value: Any) -> str:
    return shown(repr(value), MAX_CHARACTERS)


def _slots(given: Mapping[str, Fraction], names: Sequence[str], where: str) -> tuple[int, ...]:
    """Whole weights without a common divisor, at most MAX_SLOTS together: finer ones by the
    largest remainders."""
    total = sum(given.values())
    if total == 0:
        raise ValueError(f"the weights of {where} add up to 0")
    # A source that the stage doesn't name isn't read in it.
    shares = [given.get(name, Fraction(0)) / total for name in names]
    # The shortest period in which each share is a whole number of slots.
    period = math.lcm(*(share.denominator for share in shares))
    # Only a period that would be too long gives up exact shares.
    if period <= MAX_SLOTS:
        return tuple(int(share * period) for share in shares)
    # Shares are rounded down, and slots that are left go to those that lost most.
    counts = [int(share * MAX_SLOTS) for share in shares]
    lost = [share * MAX_SLOTS - count for share, count in zip(shares, counts)]
    by_loss = sorted(range(len(shares)), key=lambda source: -lost[source])
    for source in by_loss[: MAX_SLOTS - sum(counts)]:
        counts[source] += 1
    for name, share, count in zip(names, shares, counts):
        # Otherwise the source would silently never be read.
        if share > 0 and count == 0:
            tiny = f"the share of source {name!r} in {where}, {float(share):.2g}"
            raise ValueError(f"{tiny}, is less than one row in {MAX_SLOTS:,}, which rounds to none")
    # After rounding, the shares may fit into a shorter period.
    divisor = math.gcd(*counts)
    return tuple(count // divisor for count in counts)


# ------------------------------------------------------------------------------- what is made of it


def at_least(
    mix: DataMix, shares: Mapping[str, Fraction], contexts: Sequence[int], exactly: bool = False
) -> DataMix:
    """The mixture in which some sources have at least, or exactly, these shares of each stage. The
    other sources give up tokens for that, or get some, in proportion.

    contexts: tokens in a row of each source; a stage with rows of another length than a source's
    reads none of it.
    """
    stages = []
    for stage in mix.stages:
        # The share of each source in this stage.
        total = sum(stage.weights)
        now = {name: Fraction(weight, total) for name, weight in zip(mix.names, stage.weights)}
        # One length, as all rows of a stage have, and the sources that fit to it.
        length = {context for context, weight in zip(contexts, stage.weights) if weight}
        fitting = {name for name, context in zip(mix.names, contexts) if context in length}
        # A stage that gives a source more already keeps that, unless it has to be exact.
        raised = {
            name: share
            for name, share in shares.items()
            if name in fitting and (exactly or share > now[name])
        }
        # The others keep their proportions in what is left, if this stage reads any.
        of_others = 1 - sum((now[name] for name in raised), Fraction(0))
        if raised and of_others:
            scale = (1 - sum(raised.values())) / of_others
            shared = {name: raised.get(name, share * scale) for name, share in now.items()}
            stage = stage._replace(
                weights=_slots(shared, mix.names, "the mixture with more replay")
            )
        stages.append(stage)
    return replace(mix, stages=tuple(stages))


def described(mix: DataMix) -> str:
    """The mixture in words, without folders: what two runs of the same mixture have in common."""
    stages = []
    for stage in mix.stages:
        # Sorted, because the order in which sources are written means nothing.
        shares = sorted(
            (name, weight / sum(stage.weights))
            for name, weight in zip(mix.names, stage.weights)
            if weight
        )
        words = ", ".join(f"{name} {share:.10g}" for name, share in shares)
        if stage.begins:
            words = f"from {float(stage.begins):.10g} on {words}"
        stages.append(words)
    capped = sorted(
        f"{source.name} {float(source.max_epochs):g}" for source in mix.sources if source.max_epochs
    )
    if capped:
        stages.append(f"max_epochs {', '.join(capped)}")
    return "; ".join(stages)


def require_one_length(mix: DataMix, contexts: Sequence[int]) -> None:
    """contexts: tokens in a row of each source. Raises ValueError where a stage has several."""
    for stage in mix.stages:
        # Of each length one source, for the message.
        lengths: dict[int, Source] = {}
        for source, context, weight in zip(mix.sources, contexts, stage.weights):
            if weight:
                lengths[context] = source
        if len(lengths) == 1:
            continue
        words = [f"{length} in source {source.name!r}" for length, source in lengths.items()]
        # The advice is to make rows of the first length from the text of the second source.
        length, other = list(lengths)[0], list(lengths.values())[1].path
        raise ValueError(
            f"{mix.flag}: rows that are read together, from {float(stage.begins):g} of the run on, "
            f"must hold equally many tokens, which are {' and '.join(words)}: make rows of the "
            f"same length from the text of {other!r} by --context_length {length} of "
            "prepare_data.py, or use a stage of --data_mix for each length."
        )
