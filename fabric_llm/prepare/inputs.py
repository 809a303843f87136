"""What --input names, and checks of all arguments of prepare_data.py.

The kind of a file is told by its name. Nothing here imports torch, datasets or numpy, which take
seconds, so that mistakes are told at once. Every check raises ValueError.
"""

import codecs
import fnmatch
import os
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from glob import glob, has_magic
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Optional

from fabric_llm.base import work_folder
from fabric_llm.base.flag import Flags
from fabric_llm.base.names import comma_separated, is_path, nearest_of, shown
from fabric_llm.mirror.address import is_address
from fabric_llm.prepare.compression import is_damage, opened

PACKED = (".gz", ".zst", ".bz2", ".xz")  # suffixes that may follow each of KINDS
KINDS = {
    **dict.fromkeys((".txt", ".md", ".rst"), "text"),
    **dict.fromkeys((".jsonl", ".ndjson"), "json_lines"),
    ".json": "json",
    **dict.fromkeys((".csv", ".tsv"), "csv"),
    ".parquet": "parquet",
}
DEFAULT_PATTERNS = [f"*{suffix}{packed}" for packed in ("", *PACKED) for suffix in KINDS]
WEB = (".html", ".htm", ".xhtml", ".wet", ".warc")  # whose markup and headers would pass for text
# Files of folders that aren't read are counted by suffix, and these three kinds by name.
HIDDEN, HIDDEN_FOLDERS = "hidden files", "hidden folders"
NO_FILE = "pipe, socket, device or dead link"
PROBE_BYTES = 64 * 1024  # of a file of another suffix, which must be UTF-8
LONGEST_SEPARATOR = 1000  # bytes
NOWHERE = "input {} is neither a file or folder here nor a dataset that can be read from the hub"


def preparation(flags: Flags) -> None:
    """Check the flags of prepare_data.py for text against each other, without looking at any
    file."""
    tokenizer, size = flags.tokenizer, flags.train_tokenizer
    if not flags.input:
        raise ValueError("no input: name at least one file, folder or hub dataset with --input")
    if (tokenizer is None) == (size is None):
        raise ValueError("give --tokenizer, that of your model, or --train_tokenizer, one of them")
    names = comma_separated(flags.decontaminate)
    if flags.decontaminate is not None and not names:
        raise ValueError("--decontaminate names no dataset")
    for name in names:
        if is_address(name):
            raise ValueError(f"--decontaminate {name}: it takes folders, no addresses")
        if place_of(name) == place_of(flags.output):
            raise ValueError(f"--decontaminate names the output {name}: name other datasets")


def prepared_output(output: Path, overwrite: bool) -> None:
    """Check that a prepared dataset can be written to `output`, a resolved path, or may replace
    what is there."""
    if not os.path.exists(output):  # also False without permission to look, which is reported later
        return
    if not output.is_dir():
        raise ValueError(f"output {output} is a file: name a folder")
    # Without this check, renaming the finished dataset to it would fail.
    if os.path.ismount(output):
        raise ValueError(
            f"output {output} is a mount point, which cannot be replaced: name a folder inside it"
        )
    # Nothing is lost with an empty folder.
    if not any(output.iterdir()):
        return
    # A typo such as `--output ~ --overwrite` must not delete anyone's files.
    if not (output / "manifest.json").is_file() or not (output / "dataset_dict.json").is_file():
        raise ValueError(
            f"output {output} is a folder with other files than a prepared dataset's, which are "
            f"never replaced: name a new folder, such as {output / 'NAME'}"
        )
    if not overwrite:
        raise ValueError(
            f"output {output} exists and is not empty: pass --overwrite true to replace it, or "
            "name another"
        )


def separator(given: Optional[str]) -> Optional[str]:
    """--document_separator as a regular expression: None if it wasn't given, "" for `none`.

    A line may end with \\r\\n in a text where the separator has \\n.
    """
    if given in (None, "none"):
        return None if given is None else ""
    # A shell passes \n as two characters.
    escapes = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}
    text = re.sub(r"\\([ntr\\])", lambda match: escapes[match[1]], given)
    try:
        size = len(text.encode())
    except UnicodeError:  # half of a surrogate pair stands for a byte that isn't UTF-8
        size = 0
    if not 0 < size <= LONGEST_SEPARATOR:
        raise ValueError(
            f"document_separator must have 1 to {LONGEST_SEPARATOR} bytes of UTF-8, or be none, "
            f"got {ascii(given)}"
        )
    # Whoever gives \r says how lines end, and means nothing else.
    if "\r" in text:
        return re.escape(text)
    return r"\r?\n".join(map(re.escape, text.split("\n")))


def place_of(output: str | Path) -> Path:
    """Where the dataset `output` is made complete, a resolved path."""
    if is_address(output):
        # A feature that is off isn't imported.
        from fabric_llm.prepare import storage

        return storage.place_of(str(output))
    return Path(output).resolve()  # a link to a larger disk stays a link


class Source(NamedTuple):
    """A file, dataset folder or hub dataset."""

    name: str
    kind: str  # one of documents.READERS
    bytes: Optional[int]  # None for a hub dataset
    modified_ns: int = 0


@dataclass
class InputFiles:
    """Everything that is read, and what the summary tells of it."""

    sources: list[Source] = field(default_factory=list)
    not_read: Counter = field(default_factory=Counter)  # files of folders, by suffix
    named: set[str] = field(default_factory=set)  # resolved paths of the inputs
    excluded: set[str] = field(default_factory=set)  # what of --exclude names anything
    twice: int = 0  # links and names that lead to a file or folder which is read already
    # {dataset [split]: rows, None: not known}
    splits_left_out: dict[str, Optional[int]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # what corpus.plan does without being told to
    fetched: dict[str, str] = field(default_factory=dict)  # path -> the address that it comes from

    def given(self, path: str) -> str:
        """A file of these as it is named on any machine."""
        for folder, address in self.fetched.items():
            if path == folder or path.startswith(f"{folder}/"):
                return address.rstrip("/") + path.removeprefix(folder)
        return path

    def by_name(self) -> dict[str, Source]:
        return {source.name: source for source in self.sources}


def find_sources(
    inputs: Sequence[str | Path],
    *,
    pattern: Optional[Sequence[str]] = None,
    exclude: Optional[Sequence[str]] = None,
    output: Path,
) -> InputFiles:
    """The sources that `inputs` name, in order. No text is read yet.

    pattern: None for DEFAULT_PATTERNS. output: a resolved path, which is left out where it lies
    inside an input folder. A file that is reached again, by a link or another name, is read once.

    Raises ValueError for an input that doesn't exist, one that can't hold text, a folder without a
    matching file, and a file that two inputs name.
    """
    input_files, pattern, exclude = InputFiles(), pattern or DEFAULT_PATTERNS, exclude or []
    origin: dict[str, str] = {}  # path -> the input that names it
    read, expanded = set(), list(_expanded(inputs, input_files))
    input_files.named.update(map(os.path.realpath, expanded))
    for given in expanded:
        for source in _sources_of(given, pattern, exclude, output, input_files):
            # The same path in two inputs is a mistake. Another name of a file or folder is none.
            path, identity = os.path.abspath(source.name), identity_of(source.name)
            if path in origin:
                raise ValueError(
                    f"{source.name} comes in twice, by the inputs {origin[path]} and {given}: "
                    "name it once"
                )
            origin[path] = given
            if identity in read:
                input_files.twice += 1
            else:
                input_files.sources.append(source)
            read.add(identity)
    # What was to be held out may be trained on.
    for one in exclude:
        if one not in input_files.excluded:
            input_files.notes.append(
                f"--exclude {shown(one)}: nothing in the folders has this name (several are given "
                "with spaces, each without its folder)"
            )
    if list(pattern) != DEFAULT_PATTERNS:
        # Whoever names patterns doesn't want the others. No pattern reaches a hidden folder.
        for name in input_files.not_read.keys() - {NO_FILE, HIDDEN_FOLDERS}:
            del input_files.not_read[name]
    return input_files


def identity_of(path: str) -> Any:
    """Equal for all names of a file or folder, links and hard links among them."""
    if not os.path.exists(path):  # a dataset of the hub
        return path
    status = os.stat(path)
    if not status.st_ino:  # some file systems have no numbers of files
        return os.path.realpath(path)
    return status.st_dev, status.st_ino


def _expanded(inputs: Sequence[str | Path], input_files: InputFiles) -> Iterator[str]:
    """The inputs, those at an address fetched, with what globs among them match, which the shell
    doesn't expand in quotes or in a file of flags."""
    for given in map(str, inputs):
        matches: list[str] = []
        if is_address(given):
            from fabric_llm.prepare import storage

            matches = [storage.corpus(given)]
            input_files.fetched[matches[0]] = given
        # A file may have a bracket in its own name.
        elif has_magic(given) and not os.path.lexists(given):
            matches = sorted(glob(given, recursive=True))
            if not matches:
                raise ValueError(f"input {given}: no file or folder matches this pattern")
        yield from matches or [given]


def _sources_of(
    given: str,
    pattern: Sequence[str],
    exclude: Sequence[str],
    output: Path,
    input_files: InputFiles,
) -> list[Source]:
    """What one input names. Raises ValueError where that is nothing that can be read."""
    if os.path.isfile(given):
        # Another suffix may be that of an archive, whose headers would pass for text.
        if suffix(given) not in KINDS and not _is_text(given):
            kinds = " ".join(KINDS)
            raise ValueError(
                f"input {given} is neither text in UTF-8 nor of a kind that is read ({kinds}): "
                "extract its text first, or convert text of another encoding with iconv"
            )
        return [_file_source(given)]
    if not os.path.isdir(given):
        if os.path.lexists(given):
            # To open a pipe would wait for whoever writes into it.
            raise ValueError(
                f"input {given} is a pipe, a socket, a device or a dead link: name a file or a "
                "folder"
            )
        _require_hub_name(given)
        return [Source(given, "hub", None)]  # corpus.plan asks the hub
    # The library `datasets` reads its rows: .arrow files match no pattern.
    if is_dataset(given):
        files = [file.stat() for file in Path(given).rglob("*.arrow")]
        # A dataset that is saved anew has newer files, so that its pieces aren't taken for done.
        newest = max((file.st_mtime_ns for file in files), default=0)
        return [Source(given, "dataset", sum(file.st_size for file in files), newest)]
    paths = _files_of(given, pattern, exclude, output, input_files)
    sources = [_file_source(path) for path in paths]
    if not sources:
        _refuse_folder(given, pattern, input_files)
    return sources


def _require_hub_name(given: str) -> None:
    """Raises ValueError for what can't be the name of a dataset on the hub, such as a mistyped
    path, without asking the hub."""
    # A name without an organisation that is close to one here is a mistake in typing.
    near = nearest_of(Path(given), files=True)
    can_be = re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?(:[^/:]+)?", given)
    names_file = is_path(given) or _matcher(DEFAULT_PATTERNS)(given.lower())
    is_mistyped = near and "/" not in given
    if can_be and not names_file and not is_mistyped:
        return
    message = NOWHERE.format(given)
    if "," in given:
        message += ": several inputs have spaces between them"
    if near:
        message += f".{near}"
    raise ValueError(message)


def _refuse_folder(folder: str, pattern: Sequence[str], input_files: InputFiles) -> NoReturn:
    """Raises ValueError for a folder without a matching file."""
    words = " ".join(pattern)
    if list(pattern) == DEFAULT_PATTERNS:
        kinds = " ".join(f"*{kind}" for kind in KINDS)
        words = f"{kinds} (or these with {' '.join(PACKED)})"
    advice = "choose others with --pattern"
    hidden = [one for one in (HIDDEN, HIDDEN_FOLDERS) if input_files.not_read[one]]
    if hidden:
        advice += f"; its {' and '.join(hidden)} were left out: name what is meant with --input"
    elif suffixes := [one for one in pattern if re.fullmatch(r"\.\w+", one)]:
        advice = f"did you mean --pattern '*{suffixes[0]}'?"
    elif all(map(os.path.lexists, pattern)):
        suffix = os.path.splitext(pattern[0])[1]
        advice = (
            "these are files of the current folder, which a shell writes in the place of a pattern "
            f"without quotes: --pattern '*{suffix}'"
        )
    raise ValueError(f"no file in {folder} matches {words}: {advice}")


def _files_of(
    folder: str,
    pattern: Sequence[str],
    exclude: Sequence[str],
    output: Path,
    input_files: InputFiles,
) -> Iterator[str]:
    """The matching files below `folder`, in order. `output`, a resolved path, and its work folder
    are left out.

    Links to folders are followed, each folder once: a link may lead to a folder that it lies in.

    Left out, too, are files and folders whose names begin with a dot, such as .git and
    .ipynb_checkpoints, which holds copies of what is beside it. A pattern that begins with a dot
    takes such files, and an input that names such a folder takes it.
    """

    def refuse(error: OSError) -> None:  # without this, os.walk skips folders that it can't list
        raise ValueError(f"folder {error.filename} cannot be read: {error.strerror}") from error

    left_out = {str(output), str(work_folder.beside(output))}
    matches = _matcher(pattern)

    def is_excluded(name: str) -> bool:
        # A name may have a bracket of its own.
        found = [one for one in exclude if name == one or fnmatch.fnmatchcase(name, one)]
        input_files.excluded.update(found)
        return bool(found)

    walked_through = {identity_of(folder)}
    for root, walked, names in os.walk(folder, onerror=refuse, followlinks=True):
        # Nothing in it matches a pattern, so that it would be left out without a word.
        if is_dataset(root):
            raise ValueError(
                f"{root} is a dataset: name it as an input of its own, "
                f"or leave it out with --exclude {shlex.quote(os.path.basename(root))}"
            )
        # Sorted, since the order of a folder depends on the file system.
        directories = [
            name
            for name in sorted(walked)
            if not is_excluded(name) and os.path.realpath(os.path.join(root, name)) not in left_out
        ]
        # os.walk goes on into the folders that are left in this list.
        walked.clear()
        for name in directories:
            if name.startswith("."):
                if os.path.realpath(os.path.join(root, name)) not in input_files.named:
                    input_files.not_read[HIDDEN_FOLDERS] += 1
            elif (identity := identity_of(os.path.join(root, name))) in walked_through:
                input_files.twice += 1
            else:
                walked_through.add(identity)
                walked.append(name)
        for name in sorted(names):
            path = os.path.join(root, name)
            if is_excluded(name):
                continue
            is_match = matches(name.lower())
            # isfile is also False for a pipe, which blocks whoever opens it.
            if is_match and os.path.isfile(path):
                yield path
                continue
            # Everything that isn't read is counted by its reason, for the summary.
            reason = suffix(name) or "without a suffix"
            if name.startswith("."):
                reason = HIDDEN
                if os.path.realpath(path) in input_files.named:
                    continue
            elif is_match:
                reason = NO_FILE
            input_files.not_read[reason] += 1


def is_dataset(folder: str) -> bool:
    """Whether a folder was written by `datasets.save_to_disk`."""
    return any(
        os.path.isfile(os.path.join(folder, name)) for name in ("dataset_dict.json", "state.json")
    )


def _matcher(pattern: Sequence[str]) -> Callable[[str], Any]:
    """Whether a name in lower case matches one of the patterns, as in a shell: only a dot matches a
    dot at its beginning."""
    expressions = []
    for one in pattern:
        expression = fnmatch.translate(one.lower())
        if not one.startswith("."):
            expression = r"(?!\.)" + expression
        expressions.append(expression)
    return re.compile("|".join(expressions)).match


def suffix(path: str) -> str:
    """The suffix that says what a file holds: `.jsonl` of `a.jsonl.gz`."""
    name = os.path.basename(path).lower()
    for packed in PACKED:
        name = name.removesuffix(packed)
    return os.path.splitext(name)[1]


def _file_source(path: str) -> Source:
    if suffix(path) in WEB:
        raise ValueError(f"{path} holds web pages: extract their text first, into .jsonl or .txt")
    # Size and time are part of a piece's name: what has changed is encoded anew.
    status = os.stat(path)
    return Source(path, KINDS.get(suffix(path), "text"), status.st_size, status.st_mtime_ns)


def _is_text(path: str) -> bool:
    with opened(path) as file:
        try:
            # NUL is valid UTF-8 that only binary files have. The probe may end inside a character.
            return "\0" not in codecs.getincrementaldecoder("utf-8")().decode(
                file.read(PROBE_BYTES)
            )
        except Exception as error:
            # An error of the disk says nothing about the content.
            if isinstance(error, UnicodeDecodeError) or is_damage(error):
                return False
            raise
