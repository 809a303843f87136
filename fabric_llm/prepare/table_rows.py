"""The rows of .csv and .tsv files, whose quotation marks may be wrong: no row takes the lines of
another."""

import csv
import re
from collections import deque
from collections.abc import Callable, Iterator
from typing import Optional, Union

from fabric_llm.prepare.compression import is_damage

ESCAPED_QUOTE = re.compile(r'\\"(?!")')  # in CSV, where \"" is a backslash and a quotation mark


class Lines:
    """The lines of a table, of which some can be read again.

    taken: those of the row that is being read. waits: at a damage of the file the lines end, and
    the error is kept in `damage` instead of being raised.
    """

    def __init__(self, lines: Iterator[str], waits: bool) -> None:
        self.lines, self.waits = lines, waits
        self.again, self.taken = deque[str](), list[str]()
        self.damage: Optional[Exception] = None

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        if self.again:
            line = self.again.popleft()
        elif self.damage is not None:
            raise StopIteration
        else:
            line = self._next_of_file()
        self.taken.append(line)
        return line

    def _next_of_file(self) -> str:
        try:
            return next(self.lines)
        except Exception as error:
            # The lines before the damage are read first; `rows_of_tsv` then raises it.
            if not self.waits or not is_damage(error):
                raise
            self.damage = error
            raise StopIteration from None

    def keep_first(self) -> None:
        """Leave the first line to the row, and the others to the next ones."""
        # extendleft turns the order around.
        self.again.extendleft(reversed(self.taken[1:]))
        del self.taken[1:]


def rows_of_csv(
    rows: Iterator[list[str]], lines: Lines, where: Callable[[int], str]
) -> Iterator[tuple[int, Union[list[str], str]]]:
    """(number of its first line, a row, or what is wrong with it). An invalid one takes its first
    line alone: those behind a quotation mark that nothing ends are read again.

    Raises ValueError for a file that escapes quotation marks with a backslash: each would end its
    field, and the lines behind it would pass for rows.
    """
    number, escaped = 1, 0
    while True:
        # A row has the number of its first line: quoted fields may have several lines.
        number += len(lines.taken)
        lines.taken.clear()
        row, message = [], ""
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            message = f"is not a valid row: {error}"
        # The first such mark is remembered: what it does to the rows may show much later.
        for place, line in enumerate(lines.taken, number):
            if not escaped and ESCAPED_QUOTE.search(line):
                escaped = place
        if message and escaped:
            raise ValueError(
                f"{where(number)} {message}, and line {escaped} has a quotation mark behind "
                "a backslash, which CSV doubles instead: write the file anew, such as by "
                "pandas.read_csv(..., escapechar='\\\\').to_csv(...)"
            )
        if message:
            lines.keep_first()
            yield number, message
        elif row:
            yield number, row


def rows_of_tsv(
    rows: Iterator[list[str]], lines: Lines, path: str, columns: int
) -> Iterator[tuple[int, list[str]]]:
    """(number of its first line, a row).

    Most of these files know no quotes, and some quote fields of several lines. Where a quotation
    mark would join lines that are rows by themselves, it is text. Raises ValueError for a file in
    which others join lines: either would make documents of other rows.
    """
    number, joined, apart = 1, 0, 0
    while True:
        number += len(lines.taken)
        lines.taken.clear()
        # It stays None where csv refuses the row, such as for a quotation mark that nothing ends.
        row: Optional[list[str]] = None
        try:
            row = next(rows)
        except StopIteration:
            if lines.damage is not None:
                raise lines.damage from None
            return
        except csv.Error:
            pass
        has_several = len(lines.taken) > 1
        # The mark is text: its line is a row, and the lines behind it are read again.
        if row is None or has_several and _are_rows(lines.taken, columns):
            if has_several:
                apart = number
            lines.keep_first()
            row = lines.taken[0].rstrip("\r\n").split("\t")
        elif has_several:
            joined = number
        if joined and apart:
            raise ValueError(
                f"{path}: a quoted field in line {joined} has several lines, and those of one "
                f"in line {apart} are rows by themselves: save it as .csv or .jsonl, which tell "
                "them apart"
            )
        if row:
            yield number, row


def _are_rows(lines: list[str], columns: int) -> bool:
    """Whether each of several lines is a row of its own. One that begins with a tab is a line of an
    indented text."""
    # Without a tab nothing tells a row from a line of a field.
    if columns == 1:
        return False
    return all(line.count("\t") == columns - 1 and not line.startswith("\t") for line in lines)
