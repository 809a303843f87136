"""What happened to a run, from events.jsonl, the verdicts in metrics.jsonl, and, of older runs, its checkpoints."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

import numpy as np

from fabric_llm.base.faults import DONE, STOPPED
from fabric_llm.report.reading import MOST_STEPS, Run

MOST_ROWS = 400  # of a run, in the table; those that aren't saves come first
MOST_MARKS, MOST_CHARACTERS = 500, 300  # of a run on the time line; of the words of an event there
KINDS = {  # in the order of the time line, with what the page calls them
    "started": "Start",
    "resumed": "Resume",
    "moved": "Other devices",
    "saved": "Save",
    "spike": "Spike",
    "skipped": "Skipped step",
    "rewound": "Rewind",
    "forgetting": "Forgetting",
    "stage": "Stage",
    "stopped": "Stop",
    "killed": "Killed",
    "failed": "Failed",
    "done": "Done",
}
VERDICTS = {"skip": "skipped", "warn": "spike", "rewind": "rewound", "forgetting": "forgetting"}


class Event(NamedTuple):
    """Something that happened after `step` finished steps."""

    step: int
    kind: str  # of KINDS
    words: str
    time: str = ""  # UTC, as ISO 8601
    last_step: Optional[int] = None  # of several saves that are shown as one


def timeline(run: Run) -> list[Event]:
    """All events, by step; those of one step in the order in which they happened."""
    found = _of_events(run.events) if run.events else _of_files(run)
    for verdict in run.verdicts:
        name = str(verdict["verdict"])
        kind, reason = VERDICTS.get(name, "spike"), str(verdict.get("reason", ""))
        where = f"; at sequence {verdict['position']:,}" if type(verdict.get("position")) is int else ""
        tokens = verdict.get("discarded_tokens")
        where += f"; {tokens:,} tokens discarded" if type(tokens) is int else ""
        where += f"; {shares}" if (shares := _shares(verdict)) else ""
        found.append(Event(verdict["step"], kind, f"{reason or name}{where}", str(verdict.get("time", ""))))
    return sorted(found, key=lambda event: event.step)


def _of_events(events: Sequence[dict[str, Any]]) -> list[Event]:
    found: list[Event] = []
    before: dict[str, Any] = {}  # the start of the process that is going
    for event in events:
        known = found[-1].step if found else 0
        step = event["step"] if type(event.get("step")) is int and 0 <= event["step"] < MOST_STEPS else known
        kind, time = event["event"], str(event.get("time", ""))
        if kind in ("started", "resumed"):
            if before and found[-1].kind not in ("stopped", "failed", "done"):
                found.append(
                    Event(known, "killed", "no end was recorded before the next start; this is the last step that was")
                )
            found.append(Event(step, kind, _beginning(event), time))
            if before and devices(before) != devices(event):
                found.append(Event(step, "moved", f"{devices(event)}, before: {devices(before)}", time))
            before = event
        elif kind == "saved":
            found.append(Event(step, "saved", f"step-{step:08d}", time))
        elif kind == "stage":
            found.append(Event(step, "stage", _shares(event), time))
        elif kind == "ended":
            code = event.get("code")
            kind = _kind_of_end(code)
            reason = str(event.get("reason", ""))
            found.append(Event(step, kind, reason if kind != "failed" else f"{reason} (exit code {code})", time))
    return found


def _shares(said: dict[str, Any]) -> str:
    """The shares of the sources from there on, in words, "" where none are said."""
    shares = said.get("shares")
    known = shares.items() if isinstance(shares, dict) else ()
    words = (f"{name} {100 * share:.3g} %" for name, share in known if type(share) is float)
    return f"from here on {', '.join(words)}" if known else ""


def _kind_of_end(code: Any) -> str:
    return "done" if code == DONE else "stopped" if code == STOPPED else "failed"


def _of_files(run: Run) -> list[Event]:
    """Of a run that was written before events were recorded: what its files tell."""
    found = [Event(step, "saved", f"step-{step:08d}") for step in run.checkpoints]
    code, step = run.status.get("code"), run.status.get("step")
    if code is not None and type(step) is int and 0 <= step < MOST_STEPS:
        kind = _kind_of_end(code)
        found.append(Event(step, kind, str(run.status.get("reason", ""))))
    return found


def devices(beginning: dict[str, Any]) -> str:
    """The devices that a start was on, in words, "" where it doesn't say."""
    count, kind, nodes = (beginning.get(name) for name in ("devices", "kind", "nodes"))
    if type(count) is not int:
        return ""
    on = f"{count} {kind} device{'s' * (count != 1)}"
    return f"{on} of {nodes} machines" if type(nodes) is int and nodes > 1 else on


def _beginning(event: dict[str, Any]) -> str:
    strategy = f", {event['strategy']}" if event.get("strategy") else ""
    source = str(event.get("from") or "")
    source = source.rpartition("/")[2] if event["event"] == "resumed" else source
    came = f"{'random weights, ' if event.get('random') else 'from '}{source}" if source else ""
    return "; ".join(words for words in (f"on {devices(event)}{strategy}" if devices(event) else "", came) if words)


def rows(events: Sequence[Event]) -> list[Event]:
    """For the table: saves in a row as one, and at most MOST_ROWS, of which saves give way first."""
    found: list[Event] = []
    for event in events:
        last = found[-1] if found else None
        if last is not None and event.kind == last.kind == "saved":
            found[-1] = last._replace(last_step=event.step, words=f"step-{last.step:08d} to step-{event.step:08d}")
        else:
            found.append(event)
    if len(found) > MOST_ROWS:
        others = [event for event in found if event.kind != "saved"]
        found = others if len(others) <= MOST_ROWS else others[: MOST_ROWS // 2] + others[-MOST_ROWS // 2 :]
    return found


def as_data(number: int, run: Run, events: Sequence[Event]) -> list[dict[str, Any]]:
    """The events of a run for page.js, at most MOST_MARKS: all that are no saves, and saves from among all of them."""
    saves = [i for i, event in enumerate(events) if event.kind == "saved"]
    others = [i for i, event in enumerate(events) if event.kind != "saved"][:MOST_MARKS]
    every = max(1, -(-len(saves) // MOST_MARKS))
    shown = [events[i] for i in sorted([*others, *saves[::every]])]
    tokens = run.tokens_at(np.array([event.step for event in shown], dtype=np.int64)).tolist()
    return [
        {
            "run": number,
            "x": event.step,
            "t": None if math.isnan(count) else int(count),
            "kind": event.kind,
            "words": event.words[:MOST_CHARACTERS],
        }
        for event, count in zip(shown, tokens)
    ]
