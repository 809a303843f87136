"""Command lines: dataclasses of flags -> a parser, one sentence for each mistake, and a YAML file of flags.

arguments.py has the flags. Functions of this package that take many of them take `Flags`, its groups, and read them by name.
"""

from __future__ import annotations

import os
import re
import sys
import time
from dataclasses import field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, Optional, Union, get_args, get_origin, get_type_hints

from fabric_llm.base import plain_yaml
from fabric_llm.base.faults import BAD_INPUT, printable, tell_torchrun
from fabric_llm.base.spelling import flag_instead, value_instead

# arguments.Arguments, which this package doesn't import. A group's flags are its fields: `flags.training.lr`.
Flags = Any
LONGEST_NUMBER = 100  # characters
SECONDS_FOR_THE_FIRST = 20.0  # process of a machine, to say what is wrong; its end ends the wait


def flag(default: Any, help: str, takes: Optional[str] = None) -> Any:
    """takes: the values in words, where the type doesn't say them."""
    return field(default=default, metadata={"help": help, "takes": takes})


def groups(arguments_class: type) -> dict[str, type]:
    """Field name -> dataclass of every flag group of `arguments_class`."""
    hints = get_type_hints(arguments_class)
    return {f.name: hints[f.name] for f in fields(arguments_class) if is_dataclass(hints[f.name])}


def write_yaml(flat: dict[str, Any], path: Path) -> None:
    """Flag name -> value as a YAML file that `--config` takes."""
    import yaml

    from fabric_llm.base.files import write_atomically

    write_atomically(path, yaml.safe_dump(flat, sort_keys=False))


def is_rank_zero() -> bool:
    """True in the process that speaks to the user, also before there is a process group."""
    node = os.environ.get("NODE_RANK", os.environ.get("GROUP_RANK", "0"))
    return os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0") if node == "0" else "other") == "0"


def is_first_of_machine() -> bool:
    """True in the process that does what each machine needs once."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def fail(program: str, sentence: str, code: int = BAD_INPUT) -> NoReturn:
    """One sentence on stderr, from the first process of each machine, and an exit code."""
    sentence = printable(sentence)
    tell_torchrun(sentence)
    if is_first_of_machine():
        print(f"{program}: error: {sentence}", file=sys.stderr, flush=True)
    elif "TORCHELASTIC_RUN_ID" in os.environ and "torch" not in sys.modules and code == BAD_INPUT:
        # Every rank finds this mistake. Whoever leaves first has torchrun end the others, also the one that says it.
        time.sleep(SECONDS_FOR_THE_FIRST)
    raise SystemExit(code)


def parse(
    program: str, description: str, flag_groups: Any, argv: list[str], not_in_config: tuple[str, ...] = ()
) -> dict[str, Any]:
    from jsonargparse import ArgumentParser, set_loader

    set_loader("yaml", plain_yaml.load, exceptions=(ValueError,))  # of a file, and of text in it that is YAML again
    flag_groups = list(flag_groups)
    types = {name: hint for group in flag_groups for name, hint in get_type_hints(group).items()}
    takes = {f.name: f.metadata["takes"] or _type_name(types[f.name]) for group in flag_groups for f in fields(group)}

    class Parser(ArgumentParser):
        def error(self, message: str, ex: Optional[Exception] = None) -> NoReturn:
            fail(program, _one_sentence(message, types, takes))

    parser = Parser(prog=program, description=description, allow_abbrev=False, default_env=False)
    parser.add_argument("--config", action="config", help="YAML file of flags; the command line wins over it")
    for group in flag_groups:
        title, *rest = (group.__doc__ or "").split(" (", 1)
        section = parser.add_argument_group(title, rest[0].rstrip(")") if rest else None)
        for f in fields(group):
            required = f.default is None and not _optional(types[f.name])
            options = {"required": True} if required else {"default": f.default}
            flag_type = types[f.name]
            if get_origin(_inner(flag_type)) is list:
                flag_type, options["nargs"] = str, "+"
            section.add_argument(f"--{f.name}", type=flag_type, help=f.metadata["help"], **options)
    words, config = _split_config(argv)
    if config is not None:
        _check_config(program, config, {name: hint for name, hint in types.items() if name not in not_in_config})
        words = ["--config", config, *words]  # first, so that the command line wins whatever the order
    flat = parser.parse_args(words).as_dict()
    return {name: flat[name] for name in types}


def _split_config(argv: list[str]) -> tuple[list[str], Optional[str]]:
    words, config, rest = [], None, iter(argv)
    for word in rest:
        if word == "--config":
            config = next(rest, "")
        elif word.startswith("--config="):
            config = word.split("=", 1)[1]
        else:
            words.append(word)
    return words, config


def _check_config(program: str, config: str, types: dict[str, Any]) -> None:
    """Known keys, and values without depth."""
    known = list(types)
    try:
        values = plain_yaml.read(Path(config))
    except OSError as error:
        fail(program, f"--config {config!r} can't be read: {error.strerror}.")
    except ValueError as error:
        fail(program, f"--config: {error}.")
    if not isinstance(values, dict):
        fail(program, f"--config {config!r} must hold `flag: value` lines, but holds {type(values).__name__}.")
    for key, value in values.items():
        if key not in known:
            fail(program, f"unknown key {key!r} in {config}.{_nearest(str(key), known)}")
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, (list, dict, set, tuple)):
                fail(program, f"{key!r} in {config} must hold a value, or a list of values, not {type(item).__name__}.")
            if isinstance(item, str) and len(item) > LONGEST_NUMBER and not _takes_text(types[key]):
                # jsonargparse would read it as YAML, aliases included
                fail(program, f"{key!r} in {config} is a text of {len(item):,} characters: {item[:60]!r} ...")


def _nearest(name: str, known: list[str], dashes: str = "") -> str:
    """What is meant by a flag or key that isn't there, as the end of a sentence."""
    flags, advice = flag_instead(name, known)
    if flags:
        return f" Did you mean {' or '.join(f'{dashes}{flag}' if dashes else repr(flag) for flag in flags)}?"
    return f" {advice[0].upper()}{advice[1:]}." if advice else " See --help."


def _one_sentence(message: str, types: dict[str, Any], takes: dict[str, str]) -> str:
    """jsonargparse's message, several lines of Python types, as one sentence with the offending value."""
    if unknown := re.match(r"unrecognized arguments: (.*)", message, re.S):
        words = unknown[1].split()
        name = next((w for w in words if w.startswith("-")), words[0])
        if not name.startswith("-"):
            return f"unexpected {name!r}: every flag is written --name value."
        return f"unknown flag {name}.{_nearest(name.lstrip('-').split('=')[0], list(types), '--')}"
    if wrong := re.match(r'Parser key "(\w+)":.*(?:Got value|Given value): (.*)', message, re.S):
        kinds, value = takes[wrong[1]], wrong[2].strip()
        instead = value_instead(wrong[1], value, _words(types[wrong[1]]), kinds)
        return f"--{wrong[1]} takes {kinds}, not {value!r}{f': {instead}' if instead else ''}."
    if bare := re.match(r"argument --(\w+): expected one argument", message):
        return f"--{bare[1]} takes {takes[bare[1]]}, and nothing is given." if bare[1] in takes else message
    if missing := re.search(r'(?:Key|key) "(\w+)" is required', message):
        return f"--{missing[1]} is required."
    return " ".join(message.split()).removeprefix("argument ").rstrip(".") + "."


def _optional(hint: Any) -> bool:
    return type(None) in get_args(hint)


def _inner(hint: Any) -> Any:
    """Optional[X] -> X."""
    if _optional(hint):
        return Union[tuple(a for a in get_args(hint) if a is not type(None))]
    return hint


def _takes_text(hint: Any) -> bool:
    return _inner(hint) is str or get_origin(_inner(hint)) is list


def _words(hint: Any) -> list[Any]:
    """The words that a flag takes."""
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    return [word for a in get_args(hint) for word in _words(a)]


def _type_name(hint: Any) -> str:
    names = {int: "an integer", float: "a number", bool: "true or false", str: "text"}
    if hint in names:
        return names[hint]
    if get_origin(hint) is Literal:
        return " or ".join(map(str, get_args(hint)))
    if get_origin(hint) is list:
        return "a list"
    return " or ".join(_type_name(a) for a in get_args(hint) if a is not type(None))
