"""What --help prints: a line for each basic flag, or all that is declared of the flags and groups
that are named."""

import re
import shutil
from textwrap import TextWrapper
from typing import Any

from fabric_llm.base.names import nearest, unknown
from fabric_llm.base.program import no_more_output

# What a resumed run does with a flag, by `Flag.resume`.
RESUMED = {
    "free": "may change it",
    "never": "keeps it",
    "override": "changes it only by --resume_override",
}
Groups = dict[str, dict[str, Any]]  # title (remark) -> flag name -> its flag.Flag


def answer_help(about: str, groups: Groups, argv: list[str]) -> None:
    """Print what --help or -h in `argv` asks for, and end. Raises ValueError, with a sentence, on
    an unknown name."""
    asked = [place for place, word in enumerate(argv) if word.partition("=")[0] in ("--help", "-h")]
    if not asked:
        return
    after = [argv[asked[0]].partition("=")[2], *argv[asked[0] + 1 :]]  # --help=lr is --help lr
    words = [word for word in after if word.startswith("--")] or after  # --devices, not its value
    named: list[str] = []
    for word in words:
        named += filter(None, re.split("[, ]+", word.partition("=")[0]))
    # One column less: some terminals wrap a line that fills the last one.
    columns = max(shutil.get_terminal_size().columns, 80) - 1
    # What the program is for is said only where all of it is asked for.
    lines = [about] if named in ([], ["all"]) else []
    if not named and any(_has_basic(group) for title, group in groups.items() if title):
        # The usage comes last: on a small screen what comes first has scrolled away.
        lines += [
            *_short(groups, columns),
            *about.splitlines()[:1],
        ]
    else:
        meant: list[tuple[str, dict[str, Any]]] = []
        for word in named or ["all"]:
            meant += _meant(word, groups).items()
        for title, group in meant:
            # Only a program whose runs can be resumed has such flags.
            of_run = any(one.resume == "free" for one in groups[title].values())
            if title:
                lines += ["", title]
            for name, one in group.items():
                lines += _full(name, one, min(columns, 100), of_run)
    # `--help | head` closes the pipe early.
    try:
        print("\n".join(lines).strip("\n"), flush=True)
    except BrokenPipeError:
        no_more_output()
    raise SystemExit(0)


def _has_basic(group: dict[str, Any]) -> bool:
    """Whether a first run needs a flag of the group."""
    return any(one.basic for one in group.values())


def _meant(word: str, groups: Groups) -> Groups:
    """The part of `groups` that a word names: all, groups, or a flag, also by its name in another
    trainer."""
    name = word.lstrip("-").replace("-", "_").lower()
    if name == "all":
        return groups
    # A group is named by its title, without the remark in brackets.
    titles = {title.split(" (")[0].lower(): title for title in groups}
    flags = {flag: one for group in groups.values() for flag, one in group.items()}
    # The name of a flag in another trainer finds it as well.
    flag = next((flag for flag, one in flags.items() if name in (flag, *one.aliases.split())), None)
    # A group may be abbreviated, such as `data`.
    close = [title for title in titles if title.startswith(name)]
    if flag is None and not close:
        close = nearest(name, titles)
    # With a dash it is meant as a flag, even if a group has the same name.
    if flag is not None and (word.startswith("-") or not close):
        return {title: {flag: flags[flag]} for title, group in groups.items() if flag in group}
    if not close:
        sentence = unknown("flag or group of --help", {name: repr(word)}, flags)
        words = ", ".join(title.split()[0] for title in titles if title)
        raise ValueError(f"{sentence} The groups are {words}.")
    return {titles[title]: groups[titles[title]] for title in close}


def _short(groups: Groups, columns: int) -> list[str]:
    """A line for each basic flag: its default and as many clauses of its text as there is room for,
    at least one."""
    # Name and default of each basic flag; the texts begin in the same column behind them.
    starts = {}
    for group in groups.values():
        for name, one in group.items():
            if one.basic:
                starts[name] = f"  --{name} {_default(one)}"
    wide, lines = max(map(len, starts.values())) + 2, ["Flags of a first run, with their defaults:"]
    # As much of a text as fits, up to the end of a clause, or else its first clause whole.
    clauses = re.compile(rf".{{1,{columns - wide}}}(?=; | \([^()]*\)(;|$)|$)|[^;]+")
    for title, group in groups.items():
        basic, short = [name for name in group if name in starts], title.split(" (")[0]
        if title and basic:
            lines.append(
                f"{short} ({len(group) - len(basic)} more: --help {short.split()[0].lower()})"
            )
        lines += [starts[name].ljust(wide) + clauses.match(group[name].help)[0] for name in basic]
    count = sum(map(len, groups.values()))
    return [
        *lines,
        f"--help GROUP or --help FLAG: the details. --help all: those of all {count} flags.",
    ]


def _full(name: str, one: Any, columns: int, of_run: bool) -> list[str]:
    """All that is declared of a flag."""
    # The range belongs to what a flag takes, as `above 0`.
    limits = (("above", one.above), ("at least", one.at_least), ("below", one.below))
    takes = one.values
    for word, limit in limits:
        if limit is not None:
            takes += f", {word} {limit:g}"
    # Each need is a flag and, maybe, the values of it that will do.
    needs = [need.split() for need in one.needs.split(",") if need]
    sentences, unless = [], []
    for flag, *values in needs:
        if values == ["false"]:
            sentences.append(f"No effect with --{flag} true.")
        else:
            unless.append(f"--{flag} is {' or '.join(values) or 'on'}")
    if unless:
        sentences.append(f"No effect unless {' and '.join(unless)}.")
    if of_run and one.kept:
        sentences.append(f"A resumed run {RESUMED[one.resume]}.")
    if one.aliases:
        sentences.append(f"In other trainers: {', '.join(one.aliases.split())}.")
    default, indent = f"; default: {_default(one)}" * (one.default is not None), " " * 6
    parts = f"  --{name}  ({takes}{default})", indent + one.help, indent + " ".join(sentences)
    # Flag names have no place to break, since a name in two lines can't be copied.
    folded = TextWrapper(columns, subsequent_indent=indent, break_on_hyphens=False)
    return [line for part in parts for line in folded.wrap(part)]


def _default(one: Any) -> str:
    """The default of a flag as it would be given, "" for none."""
    text = "" if one.default is None else str(one.default)
    return text.lower() if isinstance(one.default, bool) else text
