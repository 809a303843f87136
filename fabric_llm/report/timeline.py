"""What happened to a run, from events.jsonl and the verdicts in metrics.jsonl."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

from fabric_llm.base.faults import DONE, STOPPED
from fabric_llm.report.reading import Run


class Kind(NamedTuple):
    """A kind of events. color: the number of that which an upright line in all figures has, None where there is no line."""

    title: str
    color: Optional[int] = None


KINDS = {  # in the order of the time line
    "started": Kind("Start"),
    "resumed": Kind("Resume", 0),
    "moved": Kind("Other devices", 5),
    "saved": Kind("Save"),
    "spike": Kind("Spike", 1),
    "skipped": Kind("Skipped step", 1),
    "rewound": Kind("Rewind", 3),
    "forgetting": Kind("Forgetting", 4),
    "stage": Kind("Stage", 2),
    "stopped": Kind("Stop", 6),
    "killed": Kind("Killed", 4),
    "failed": Kind("Failed", 4),
    "done": Kind("Done"),
}
VERDICTS = {"skip": "skipped", "warn": "spike", "rewind": "rewound", "forgetting": "forgetting"}


class Event(NamedTuple):
    """Something that happened after `step` finished steps."""

    step: int
    kind: str  # of KINDS
    words: str = ""
    time: str = ""  # UTC, as ISO 8601
    last_step: Optional[int] = None  # of several saves that are shown as one


def timeline(run: Run) -> list[Event]:
    """All events, by step; those of one step in the order in which they happened."""
    found: list[Event] = []
    before: dict[str, Any] = {}  # the start of the process that is going
    for event in run.events:
        kind, time, known = event["event"], event.get("time") or "", found[-1].step if found else 0
        step = known if event.get("step") is None else event["step"]
        if kind in ("started", "resumed"):
            if before and found[-1].kind not in ("stopped", "failed", "done"):
                no_end = "no end was recorded before the next start; this is the last step that was"
                found.append(Event(known, "killed", no_end))
            found.append(Event(step, kind, _beginning(event), time))
            if before and devices(before) != devices(event):
                found.append(Event(step, "moved", f"{devices(event)}, before: {devices(before)}", time))
            before = event
        elif kind == "saved":
            found.append(Event(step, kind, f"step-{step:08d}", time))
        elif kind == "stage":
            found.append(Event(step, kind, _shares(event), time))
        elif kind == "ended":
            code, reason = event.get("code"), event.get("reason") or ""
            ending = {DONE: "done", STOPPED: "stopped"}.get(code, "failed")
            found.append(Event(step, ending, f"{reason} (exit code {code})" if ending == "failed" else reason, time))
    found += map(_of_verdict, run.verdicts)
    return sorted(found, key=lambda event: event.step)


def _of_verdict(said: dict[str, Any]) -> Event:
    name = said.get("verdict") or ""
    words = [said.get("reason") or name]
    if (position := said.get("position")) is not None:
        words.append(f"at sequence {position:,}")
    if (tokens := said.get("discarded_tokens")) is not None:
        words.append(f"{tokens:,} tokens discarded")
    words.append(_shares(said))
    return Event(said["step"], VERDICTS.get(name, "spike"), "; ".join(filter(None, words)), said.get("time") or "")


def _shares(said: dict[str, Any]) -> str:
    """The shares of the sources from there on, in words, "" where none are said."""
    known = said.get("shares") or {}
    words = (f"{name} {100 * share:.3g} %" for name, share in known.items() if type(share) is float)
    return f"from here on {', '.join(words)}" if known else ""


def devices(beginning: dict[str, Any]) -> str:
    """The devices that a start was on, in words, "" where it doesn't say."""
    count, nodes = beginning.get("devices"), beginning.get("nodes")
    if count is None:
        return ""
    on = f"{count} {beginning.get('kind')} device{'s' * (count != 1)}"
    return f"{on} of {nodes} machines" if nodes is not None and nodes > 1 else on


def _beginning(event: dict[str, Any]) -> str:
    words, source = [], event.get("from") or ""
    if on := devices(event):
        words.append(f"on {on}, {event['strategy']}" if event.get("strategy") else f"on {on}")
    if event["event"] == "resumed":
        source = source.rpartition("/")[2]
    if source:
        words.append(f"random weights, {source}" if event.get("random") else f"from {source}")
    return "; ".join(words)


def rows(events: Sequence[Event]) -> list[Event]:
    """For the table: saves in a row as one."""
    found: list[Event] = []
    for event in events:
        last = found[-1] if found else None
        if last is not None and event.kind == last.kind == "saved":
            found[-1] = last._replace(last_step=event.step, words=f"step-{last.step:08d} to step-{event.step:08d}")
        else:
            found.append(event)
    return found
