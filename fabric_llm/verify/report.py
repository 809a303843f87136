"""What `python -m fabric_llm.verify` has found about a run, printed as it is found."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

from safetensors import SafetensorError

from fabric_llm.base.faults import DONE, NO_CHECKPOINT, REFUSED, Fault, one_line

MOST_NAMED = 10  # names of one kind in a sentence


@dataclass
class Report:
    """What was inspected, and what is wrong with it: the whole certificate but its versions and date."""

    run: str
    code: int = DONE  # 66 or 77 if something was found
    findings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # worth knowing, but no failure
    counts: dict[str, int] = field(default_factory=dict)
    newest: Optional[dict[str, Any]] = None  # name, step and manifest_sha256 of the newest checkpoint
    export: Optional[dict[str, Any]] = None  # export.Proof

    def find(self, sentence: str, code: int = NO_CHECKPOINT) -> None:
        """Report that something is wrong. A refusal for security, 77, decides the exit code."""
        self.findings.append(sentence)
        self.code = max(self.code, code)
        say(f"  WRONG: {sentence}")

    def note(self, sentence: str) -> None:
        """Report something that the user may want to know."""
        self.notes.append(sentence)
        say(f"  Note: {sentence}")

    def count(self, what: str, number: int) -> None:
        """Add to one of the certificate's counts."""
        self.counts[what] = self.counts.get(what, 0) + number

    def look(self, check: Callable[..., str], path: Path, *facts: Any) -> None:
        """Call `check(path, *facts, self)` and print its line if it finds nothing. Unreadable files are a finding."""
        before = len(self.findings)
        try:
            good = check(path, *facts, self)
        except Fault as fault:
            self.find(str(fault), fault.code if fault.code == REFUSED else NO_CHECKPOINT)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, SafetensorError) as error:
            self.find(f"{str(path)!r} can't be read: {one_line(error)[:400].rstrip('.')}.")
        if len(self.findings) == before:
            say(f"  {good}")


def say(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)


def listed(names: Iterable[Any]) -> str:
    """The first of many names, and how many more there are."""
    words = [str(name) for name in names]
    more = len(words) - MOST_NAMED
    return ", ".join(words[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
