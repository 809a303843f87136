"""Open a file decompressed. Its compression is told by its first bytes, whatever its name."""

import bz2
import gzip
import io
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, Optional


def _open_zstandard(raw: BinaryIO) -> BinaryIO:
    """With pyarrow: zstandard's own reader, and fsspec's, take the end of a truncated file for its
    end."""
    import pyarrow as pa

    return io.BufferedReader(pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), "zstd"), 2**14)


class Streams(io.RawIOBase):
    """A file of one compressed stream after the other, with zeros as padding between them.

    bz2.open and lzma.open take what follows a stream, but isn't another, for the end of the file.
    """

    def __init__(self, raw: BinaryIO, decompressor: Callable[[], Any]) -> None:
        self.raw, self.new = raw, decompressor
        self.stream = decompressor()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            if self.stream.eof:
                # The next stream begins behind this one, after any padding.
                rest = self.stream.unused_data.lstrip(b"\0")
                while not rest:
                    if not (block := self.raw.read(io.DEFAULT_BUFFER_SIZE)):
                        return 0
                    rest = block.lstrip(b"\0")
                self.stream = self.new()
            else:
                # What didn't fit into the last buffer comes first, and needs no input.
                rest = self.raw.read(io.DEFAULT_BUFFER_SIZE) if self.stream.needs_input else b""
                if self.stream.needs_input and not rest:
                    raise EOFError("it ends inside a stream")
            # A read may bring no data, such as one of a header, and 0 would mean the end.
            if data := self.stream.decompress(rest, len(buffer)):
                buffer[: len(data)] = data
                return len(data)


def _streams_of(decompressor: Callable[[], Any]) -> Callable[[BinaryIO], BinaryIO]:
    return lambda raw: io.BufferedReader(Streams(raw, decompressor), 2**16)


# Name -> (what files begin with, a regular expression, what opens them). Files of bzip2 may begin
# with an empty stream, those of zstandard with a frame that is skipped, as pzstd writes it.
COMPRESSIONS: dict[str, tuple[bytes, Callable[..., Any]]] = {
    "gzip": (rb"\x1f\x8b", gzip.open),
    "zstandard": (rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18", _open_zstandard),
    "bzip2": (rb"BZh[1-9](1AY&SY|\x17rE8P\x90)", _streams_of(bz2.BZ2Decompressor)),
    "xz": (rb"\xfd7zXZ\0", _streams_of(lzma.LZMADecompressor)),
}


def compression_of(path: str) -> Optional[str]:
    """A name of COMPRESSIONS, by the first bytes of a file; None for one that isn't compressed."""
    with open(path, "rb") as file:
        head = file.read(10)
    for name, (magic, _) in COMPRESSIONS.items():
        if re.match(magic, head):
            return name
    return None


@contextmanager
def opened(path: str) -> Iterator[BinaryIO]:
    """The content of a file, decompressed."""
    name = compression_of(path)
    with open(path, "rb") as raw:
        if name is None:
            yield raw
            return
        # Closing a decompressor doesn't close the file that it was given.
        _, decompress = COMPRESSIONS[name]
        with decompress(raw) as file:
            yield file


def is_damage(error: BaseException) -> bool:
    """Whether a file that is being decompressed ends too early or isn't what its first bytes
    say."""
    if isinstance(error, OSError):  # gzip.BadGzipFile is one, too
        # An error of the disk has a number, and those of decompressors have none.
        return error.errno is None
    return isinstance(error, (EOFError, zlib.error, lzma.LZMAError))
