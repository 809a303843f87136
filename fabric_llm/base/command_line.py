"""A command line: words and the file of --config -> the values of flags, and one sentence for each
mistake."""

import argparse
import os
import re
import sys
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn, Optional

from fabric_llm.base.faults import BAD_INPUT, printable
from fabric_llm.base.flag import Flag, declared
from fabric_llm.base.help import answer_help
from fabric_llm.base.names import DASH, ROOT, nearest_of, unknown, with_dash
from fabric_llm.base.plain_yaml import load_yaml, pairs, yaml_text

SECONDS_FOR_THE_FIRST = 20.0  # for the first process of a machine to print a mistake
# The environment variable of a run that has started again by itself: the flags with which it did.
AGAIN = "FABRIC_LLM_AGAIN"
# What argparse takes for a flag, as of negative numbers it only knows those such as -1 and -0.5.
NEGATIVE = re.compile(r"-\.?(\d|(inf|infinity|nan)$)", re.I)

CONFIG = Flag(
    None,
    "YAML file of flags; the command line wins over it",
    Optional[str],
    takes="the name of a YAML file",
    kept=False,
    basic=True,
    path=True,
)


def is_rank_zero() -> bool:
    """True in the process that speaks to the user, also before there is a process group."""
    node = os.environ.get("NODE_RANK", os.environ.get("GROUP_RANK", "0"))
    # Without RANK, local rank 0 of the first machine is rank 0.
    of_machine = os.environ.get("LOCAL_RANK", "0") if node == "0" else "other"
    return os.environ.get("RANK", of_machine) == "0"


def is_first_of_machine() -> bool:
    """True in one process of each machine."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def fail(program: str, sentence: str, code: int = BAD_INPUT) -> NoReturn:
    """End with an exit code, after the first process of each machine has printed a sentence on
    stderr."""
    if is_first_of_machine():
        print(f"{program}: error: {printable(sentence)}", file=sys.stderr, flush=True)
    elif "TORCHELASTIC_RUN_ID" in os.environ and "torch" not in sys.modules and code == BAD_INPUT:
        # Every rank finds this mistake. When the first one exits, torchrun ends the others, maybe
        # before it is printed.
        time.sleep(SECONDS_FOR_THE_FIRST)
    raise SystemExit(code)


def parse(
    program: str,
    about: str,
    flag_groups: Iterable[type],
    argv: Optional[list[str]] = None,
    first: str = "",
    of_run: bool = False,
    elsewhere: Mapping[str, str] = {},
    removed: Iterable[str] = (),
    only_typed: Collection[str] = (),
) -> dict[str, Any]:
    """Flag name -> value. Exits with code 2 and one sentence on anything unknown or out of range.

    A value of `None` or `null` is a flag that isn't given. about: what --help begins with. first:
    the flag whose name may be left out where it comes before all others. of_run: --config is the
    arguments.yaml of a run, which only has flags that are kept. elsewhere: names that are no flags
    here, and what is said of each. removed: flags of earlier versions, which an arguments.yaml may
    still hold. only_typed: flags that no file may hold; `elsewhere` says why.
    """
    # A copy, because flags may be put before it below.
    argv = list(sys.argv[1:] if argv is None else argv)
    sections = {
        "": {"config": CONFIG},
        **{" ".join((group.__doc__ or "").split()): declared(group) for group in flag_groups},
    }
    try:
        # --help ends the program here, before anything is checked.
        answer_help(about, sections, argv)
    except ValueError as error:
        fail(program, str(error))
    # Without the first section: --config is no flag that a program gets.
    flags = {name: one for group in [*sections.values()][1:] for name, one in group.items()}
    if first and argv and not argv[0].startswith("-"):
        argv = [f"--{first}", *argv]
    # Unknown flags are answered here, with the flags that may be meant. What is a flag is decided
    # as argparse does.
    names = [
        word.partition("=")[0]
        for word in argv
        if re.match(r"-+[A-Za-z][^ ]*(=|$)", word) and not NEGATIVE.match(word)
    ]
    if others := [name for name in names if name.removeprefix("--") not in {"config", *flags}]:
        fail(
            program, unknown("flag", {name.lstrip("-"): name for name in others}, flags, elsewhere)
        )
    called, _, _ = about.removeprefix("usage: ").partition("\n")
    usage = f"It is called like this: {called}"
    given = _given(program, argv, {"config": CONFIG, **flags}, first, usage)
    named, written = {name: f"--{name}" for name in given}, dict[str, str]()
    config = _value_of(program, CONFIG, given.pop("config", None), "--config")
    if config is not None:
        in_config = {name: one for name, one in flags.items() if one.kept or not of_run}
        for name in only_typed:
            del in_config[name]
        # They are read, so that an old run can be resumed, and then dropped.
        if Path(config).name == "arguments.yaml":
            in_config |= dict.fromkeys(removed, Flag(None, "", str))
        in_file, lines, written = _read_config(program, config, in_config, elsewhere)
        written = {name: text for name, text in written.items() if name not in given}
        # The command line wins, wherever --config stands.
        given = in_file | given
        named = {name: f"line {line} of {config}: {name}" for name, line in lines.items()} | named
    values = {}
    for name, one in flags.items():
        value = None
        # A key of the file without a value is a flag that isn't given.
        if given.get(name) is not None:
            value = _value_of(program, one, given[name], named[name], written.get(name))
        values[name] = one.default if value is None else value
    required = [name for name, one in flags.items() if one.is_required]
    if missing := [f"--{name}" for name in required if values[name] is None]:
        fail(program, f"missing: {', '.join(missing)}. {usage}")
    return values


def _value_of(
    program: str, one: Flag, given: Any, named: str, written: Optional[str] = None
) -> Any:
    """`one.value_of`. Exit with code 2 for what it doesn't take. named: the flag in a sentence."""
    try:
        return one.value_of(given, written)
    except ValueError as error:
        fail(program, with_dash(f"{named} {error}"))


def _given(
    program: str, argv: list[str], flags: Mapping[str, Flag], first: str, usage: str
) -> dict[str, Any]:
    """{flag: its text on the command line, or texts}. Exit with code 2 for one without a value, and
    for a value without a flag, unless it is that of `first`. usage: a sentence."""
    # Without abbreviations: a new flag would change what an old abbreviation means.
    parser = argparse.ArgumentParser(
        add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS
    )
    for name, one in flags.items():
        nargs = "*" if one.kinds == [list[str]] else "?"
        parser.add_argument(f"--{name}", nargs=nargs, action="append")
    namespace, unexpected = parser.parse_known_args(_joined(argv, flags))
    given = {}
    for name, texts in vars(namespace).items():
        if None in texts or [] in texts:
            dash = ""
            if str in flags[name].kinds:
                dash = f" A value that begins with a dash is written --{name}=VALUE."
            fail(program, f"--{name} takes {flags[name].values}, and nothing is given.{dash}")
        *before, given[name] = texts
        # A list takes all words up to the next flag.
        for word in given[name] if flags[name].kinds == [list[str]] else ():
            if re.fullmatch(rf"-?{DASH}+-?\w+(=.*)?", word):
                fail(program, with_dash(f"{word!r} is among the values of --{name}."))
        if before:
            _tell_of_repeated(program, name, flags[name], texts)
    # The flag whose name may be left out may also come last.
    if first and first not in given and unexpected:
        if flags[first].kinds == [list[str]]:
            given[first], unexpected = unexpected, []
        else:
            given[first] = unexpected.pop(0)
    # Such as the second word of a text without quotes.
    if unexpected:
        sentence = (
            f"unexpected {unexpected[0]!r}: every flag is written --name value, and a value with "
            "spaces in quotes."
        )
        if unexpected[0].endswith((".yaml", ".yml")):
            fail(program, f"unexpected {unexpected[0]!r}. Did you mean --config {unexpected[0]}?")
        fail(program, f"{with_dash(sentence)} {usage}")
    return given


def _joined(argv: list[str], flags: Mapping[str, Flag]) -> list[str]:
    """`argv` with each negative number behind the equals sign of its flag."""
    joined = argv[:1]
    for word in argv[1:]:
        dashes, name = joined[-1][:2], joined[-1][2:]
        # Behind an equals sign argparse reads one word, and a list may have several.
        takes_one = dashes == "--" and name in flags and flags[name].kinds != [list[str]]
        if takes_one and NEGATIVE.match(word):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def _tell_of_repeated(program: str, name: str, one: Flag, texts: list[Any]) -> None:
    """Exit with code 2 where a list is given again, or --config; warn where any other flag is, with
    another value. texts: what is given to the flag, each time.

    It isn't refused, since scripts put what differs behind flags that they have.
    """
    *before, last = texts
    many = f"--{name} is given {len(texts)} times"
    # The others would be dropped silently.
    if one.kinds == [list[str]]:
        fail(program, f"{many}: give all its values behind one --{name}.")
    # Only the last file would be read.
    if one is CONFIG:
        fail(program, f"{many}: take one file, and flags for what differs.")
    # A run that starts again, by itself or by torchrun, has the same words, and more of its own.
    is_restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    is_restarted |= AGAIN in os.environ
    if {*before} - {last} and is_rank_zero() and not is_restarted:
        has_commas = "comma-separated" in one.values + one.help
        all_of_them = ". It takes all of them in one, with commas" if has_commas else ""
        message = f"Warning: {many}: {last} counts, not {', '.join(before)}{all_of_them}."
        print(printable(message), file=sys.stderr, flush=True)


def _read_config(
    program: str, config: str, flags: dict[str, Flag], elsewhere: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, int], dict[str, str]]:
    """({key: value}, {key: line}, {key: the value as it is written}) of the file. Exit with code 2
    unless its keys are known."""
    try:
        text = yaml_text(Path(config))
        values = load_yaml(text, repr(config))
    except OSError as error:
        meant = ""
        if isinstance(error, FileNotFoundError):
            meant = nearest_of(Path(config), files=True) or _preset(config)
        fail(program, f"--config {config!r} can't be read: {error.strerror}.{meant}")
    except ValueError as error:
        fail(program, f"--config: {error}.")
    if not isinstance(values, dict):
        fail(
            program,
            f"--config {config!r} must hold `flag: value` lines, but holds "
            f"{'nothing' if values is None else 'no such lines'}.",
        )
    # Values have no line numbers, so the text is read once more.
    found = pairs(text)
    values = {key: value for (key, _, _), value in zip(found, values.values())}
    lines = {key: line for key, line, _ in found}
    written = {key: value for key, _, value in found}
    others = [key for key in values if key not in flags]
    sections = [name for name in others if isinstance(values.get(name), dict)]
    if len(others) == 1:
        [name] = others
        if sections:
            fail(
                program,
                f"line {lines.get(name)}: {name!r} in {config} is a section, but such a file has "
                "lines of `flag: value` alone.",
            )
        message = unknown("key", {name: f"{name!r} in {config}"}, flags, elsewhere)
        fail(program, with_dash(f"line {lines.get(name)}: {message}"))
    if others:
        shown = {name: f"{name!r} in line {lines.get(name)}" for name in others}
        message = f"{config}: {unknown('key', shown, flags, elsewhere)}"
        if sections:
            message += f" Such a file has no sections, as {', '.join(map(repr, sections))}."
        if len(others) > len(values) / 2:
            message += f" Is it a file for another program than {program}?"
        fail(program, with_dash(message))
    return values, lines, written


def _preset(config: str) -> str:
    """The end of a message about a file that doesn't exist: the preset that its name may mean."""
    # The checkout may not be the working directory.
    presets = Path(os.path.relpath(ROOT / "configs"))
    return nearest_of(presets / f"{Path(config).stem}.yaml", files=True)
