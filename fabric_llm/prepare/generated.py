"""Documents that a program makes, in place of those that `--input` names: what `prepare` asks of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fabric_llm.prepare.encoding import Job, PieceFiles, piece_files
from fabric_llm.prepare.pieces import Piece


class Generated(NamedTuple):
    """A set of documents, a function of `settings` alone, in one piece."""

    settings: dict[str, Any]  # for the manifest
    tokens: int  # at least
    fill: Callable[[PieceFiles, Callable[[int], Any]], None]  # (files, told of new tokens), goes on from their mark

    def plan(self) -> list[Piece]:
        """The piece, whose size is in tokens."""
        return [Piece(0, self.tokens, [])]

    def fingerprint(self) -> str:
        """What a later start has to have in common."""
        return json.dumps(self.settings, sort_keys=True)

    def make(self, pieces: Sequence[Piece], job: Job, report: Callable[[int], Any]) -> None:
        """Make the piece in the work folder, unless it is done. report: is told how many more tokens there are."""
        for piece in pieces:
            with piece_files(Path(job.folder), piece.number, job) as out:
                if out.mark.tokens:
                    print(f"Going on: {out.mark.tokens:,} of {self.tokens:,} tokens are there.", file=sys.stderr)
                report(out.mark.tokens)
                self.fill(out, report)
                out.set_mark(done=True)
