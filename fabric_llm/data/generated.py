"""Documents that a program makes, in place of those that `--input` names: what `prepare` asks of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fabric_llm.data.encoding import Job, PieceFiles, piece_files
from fabric_llm.data.pieces import Piece


class Generated(NamedTuple):
    """A set of documents in pieces, each a function of its number and of `settings` alone."""

    settings: dict[str, Any]  # for the manifest
    pieces: int
    tokens_a_piece: int  # at least
    fill: Callable[
        [int, PieceFiles, Callable[[int], Any]], None
    ]  # (number of the piece, its files, told of new tokens)

    def plan(self) -> list[Piece]:
        """The pieces, whose size is in tokens."""
        return [Piece(number, self.tokens_a_piece, []) for number in range(self.pieces)]

    def fingerprint(self) -> str:
        """What a later start has to have in common."""
        return json.dumps(self.settings, sort_keys=True)

    def make(self, pieces: Sequence[Piece], job: Job, report: Callable[[int], Any]) -> None:
        """Make the pieces in the work folder. report: is told how many more tokens there are."""
        for piece in pieces:
            with piece_files(Path(job.folder), piece.number, job) as out:
                self.fill(piece.number, out, report)
                out.set_mark(done=True)
