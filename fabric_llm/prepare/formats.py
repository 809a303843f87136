"""What kind of file a name stands for, and how a file is opened decompressed. Nothing slow is imported.

The kind of a file is told by its name, and its compression by its first bytes, whatever its name.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import importlib.util
import io
import lzma
import os
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import BinaryIO, Optional

PACKED = (".gz", ".zst", ".bz2", ".xz")  # which each of KINDS can be
KINDS = {
    **dict.fromkeys((".txt", ".md", ".rst"), "text"),
    **dict.fromkeys((".jsonl", ".ndjson"), "json_lines"),
    ".json": "json",
    **dict.fromkeys((".csv", ".tsv"), "csv"),
    ".parquet": "parquet",
    **dict.fromkeys((".wet", ".warc"), "warc"),
    **dict.fromkeys((".html", ".htm", ".xhtml"), "html"),
}
# Without pages, which are read where they are named: what a folder gives mustn't depend on the packages that are installed.
DEFAULT_KINDS = [suffix for suffix, kind in KINDS.items() if kind != "html"]
DEFAULT_PATTERNS = [f"*{suffix}{packed}" for packed in ("", *PACKED) for suffix in DEFAULT_KINDS]
PACKAGES = {"warc": "warcio", "html": "resiliparse"}  # that a kind needs; the extra has the name of the kind
NOT_TEXT = frozenset(
    ".zip .tar .tgz .7z .rar .pdf .doc .docx .odt .epub .ppt .pptx .xls .xlsx .bin .pt .pth .pkl .npy .npz .safetensors .gguf"
    " .arrow .feather .avro .orc .h5 .sqlite .db .exe .so .png .jpg .jpeg .gif .webp .mp3 .wav .mp4".split()
)
PROBE_BYTES = 64 * 1024  # of a file of another suffix, which must be UTF-8
HEAD_BYTES = 10


def suffix(path: str) -> str:
    """The suffix that says what a file holds: `.jsonl` of `a.jsonl.gz`."""
    name = os.path.basename(path).lower()
    for packed in PACKED:
        name = name.removesuffix(packed)
    return os.path.splitext(name)[1]


def kind_of(path: str) -> str:
    """The reader of a file, one of the values of KINDS; `text` for any other suffix."""
    return KINDS.get(suffix(path), "text")


@cache
def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def require_package(path: str) -> None:
    """Raises ValueError where a file is of a kind that an optional package reads, which isn't installed."""
    package = PACKAGES.get(kind := kind_of(path))
    if package and not _is_installed(package):
        raise ValueError(f"reading {path} needs the package {package}: pip install 'fabric_llm[{kind}]'")


def named_file(path: str) -> None:
    """Raises ValueError for a file, named by the user, that can't hold text."""
    require_package(path)
    if suffix(path) in KINDS and (compression_of(path) or not path.lower().endswith(PACKED)):
        return
    if suffix(path) not in NOT_TEXT:
        try:
            with opened(path) as file:
                codecs.getincrementaldecoder("utf-8")().decode(file.read(PROBE_BYTES))
            return
        except Exception as error:
            if not is_damage(error) and not isinstance(error, UnicodeDecodeError):
                raise
    raise ValueError(
        f"input {path} is neither text in UTF-8 nor of a kind that is read ({' '.join(KINDS)}): extract its text first"
    )


def in_words(patterns: list[str]) -> str:
    """The patterns of a folder's files, for a message."""
    if patterns != DEFAULT_PATTERNS:
        return " ".join(patterns)
    return f"{' '.join(f'*{kind}' for kind in DEFAULT_KINDS)} (or these with {' '.join(PACKED)})"


# ------------------------------------------------------------------------- decompression


def _open_zstandard(raw: BinaryIO) -> BinaryIO:
    """With pyarrow: zstandard's own reader, and fsspec's, take the end of a truncated file for its end."""
    import pyarrow as pa

    return io.BufferedReader(pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), "zstd"), 2**14)


COMPRESSIONS = {  # name: (what files begin with, a regular expression, and what opens them)
    "gzip": (b"\x1f\x8b", gzip.open),
    "zstandard": (b"\\x28\xb5\x2f\xfd", _open_zstandard),
    "bzip2": (b"BZh[1-9]1AY&SY", bz2.open),
    "xz": (b"\xfd7zXZ\0", lzma.open),
}


def compression_of(path: str) -> Optional[str]:
    """A name of COMPRESSIONS, by the first bytes of a file; None for one that isn't compressed."""
    with open(path, "rb") as file:
        return _compression(file.read(HEAD_BYTES))


def _compression(head: bytes) -> Optional[str]:
    return next((name for name, (magic, _) in COMPRESSIONS.items() if re.match(magic, head)), None)


@contextmanager
def opened(path: str, handles: Optional[list] = None) -> Iterator[BinaryIO]:
    """The content of a file, decompressed.

    handles: gets the file itself, whose place says how much of it was read.
    """
    with open(path, "rb") as raw:
        if handles is not None:
            handles.append(raw)
        name = _compression(raw.peek(HEAD_BYTES))
        with raw if name is None else COMPRESSIONS[name][1](raw) as file:
            yield file


def is_damage(error: BaseException) -> bool:
    """Whether a file that is being decompressed ends too early or isn't what its first bytes say."""
    if isinstance(error, (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError)):
        return True
    return isinstance(error, OSError) and error.errno is None and not isinstance(error, io.UnsupportedOperation)


def damaged(path: str, error: BaseException) -> str:
    """The end of a sentence that begins with the file's name."""
    return f"is not a complete {compression_of(path) or 'compressed'} file: {error or 'it ends too early'}"
