#!/usr/bin/env python
"""Will it fit, how long, how much: `python plan.py FLAGS OF train.py`. Needs no GPU, no weights and no dataset."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import asdict
from typing import Any, Optional

from arguments import parse_plan
from fabric_llm.base.program import in_one_sentence, plain_output

OWN = ("accelerator_name", "device_memory", "mfu", "network", "price_per_hour", "tokens", "json")
GIB = 2**30


def main(argv: Optional[list[str]] = None) -> int:
    """Print the plan and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    own, flags = parse_plan(words)
    with in_one_sentence("plan.py"):
        from fabric_llm.plan.outlook import look  # imports torch

        outlook = look(own, flags)
        tried = [] if outlook.fits else changes(words)
        if own.json:
            said = [{"change": change, **numbers(one)} for change, one in tried]
            print(json.dumps({**numbers(outlook), "changes": said}, indent=2))
        else:
            show(outlook)
            show_changes(outlook, tried, words)
    return 0


def changes(words: list[str]) -> list[tuple[str, Any]]:
    """[(flags, the outlook with them and those before)], the cheapest first, until it fits."""
    from fabric_llm.base.faults import Fault
    from fabric_llm.plan.outlook import look
    from fabric_llm.plan.start import batch_sizes

    tried: list[tuple[str, Any]] = []

    def attempt(change: str) -> bool:
        """Take a change if less is needed with it. True if it then fits."""
        nonlocal words
        try:
            outlook = look(*parse_plan([*words, *change.split()]))
        except (Fault, ValueError):  # such flags don't go together
            return False
        if tried and outlook.memory.peak >= tried[-1][1].memory.peak:
            return False
        words = [*words, *change.split()]
        tried.append((change, outlook))
        return outlook.fits

    def is_at(group: str, name: str, *values: Any) -> bool:
        return getattr(getattr(parse_plan(words)[1], group), name) in values

    def halved() -> Optional[str]:
        flags = parse_plan(words)[1]
        devices = 1 if flags.devices.devices == "auto" else flags.devices.devices
        size, count, batch = batch_sizes(flags, devices, flags.devices.num_nodes)
        if size % 2:
            return None
        return f"--micro_batch_size {size // 2} --gradient_accumulation_steps {2 * count} --global_batch_size {batch}"

    if is_at("model", "loss", "full") and attempt("--loss chunked"):
        return tried
    while (change := halved()) is not None and not is_at("fsdp", "cpu_offload", True):
        if attempt(change):
            return tried
        if not tried or tried[-1][0] != change:
            break
    steps = ["--activation_checkpointing selective"] * is_at("fsdp", "activation_checkpointing", False, "none")
    steps += ["--activation_checkpointing full"] * (not is_at("fsdp", "activation_checkpointing", True, "full"))
    steps += ["--strategy fsdp"] * is_at("fsdp", "strategy", "ddp")
    steps += ["--sharding_strategy FULL_SHARD"] * (not is_at("fsdp", "sharding_strategy", "FULL_SHARD"))
    steps += ["--precision bf16-true"] * (not is_at("model", "precision", "bf16-true"))
    flags = parse_plan(words)[1]
    devices = 1 if flags.devices.devices == "auto" else flags.devices.devices
    steps += [f"--devices {count}" for count in (2, 4, 8) if count > devices]
    steps += [f"--num_nodes {count}" for count in (2, 4, 8, 16) if count > flags.devices.num_nodes]
    for change in steps:
        if attempt(change):
            return tried
    return tried


def numbers(outlook: Any) -> dict[str, Any]:
    """What --json prints of an outlook."""
    found = {**asdict(outlook), "used": outlook.used, "fits": outlook.fits, "hours": outlook.hours}
    found["memory"] |= {"peak": outlook.memory.peak}
    found["seconds"] |= {"step": outlook.seconds.step}
    return found


def show(outlook: Any) -> None:
    """Print an outlook."""
    print(f"{outlook.model}, {outlook.parameters / 1e6:,.1f} M parameters; {outlook.on}\n")
    print("Memory of a device at its peak, GiB")
    large = {name: size for name, size in outlook.memory.parts.items() if size >= outlook.memory.peak / 1000}
    for name, size in {**large, "the rest": outlook.memory.peak - sum(large.values())}.items():
        print(f"  {name:<45}{size / GIB:10.2f}")
    print(f"  {'peak, in ' + outlook.memory.moment:<45}{outlook.memory.peak / GIB:10.2f}")
    if outlook.device_bytes:
        verdict = "fits" if outlook.used <= 0.8 else "may not fit: above 80 %" if outlook.fits else "does not fit"
        print(f"  {'of the device: ' + verdict:<45}{outlook.device_bytes / GIB:10.2f}   {100 * outlook.used:.0f} %")
    print("\nMemory of a node's host, GiB")
    for name, size in outlook.host_bytes.items():
        print(f"  {name:<51}{size / GIB:10.2f}")
    disk = outlook.checkpoint_bytes * outlook.kept_checkpoints / GIB
    kept = f"{outlook.kept_checkpoints} kept" if outlook.kept_checkpoints > 1 else "1 kept"
    print(f"\nDisk: {outlook.checkpoint_bytes / GIB:,.2f} GiB a checkpoint, {kept}: {disk:,.1f} GiB")
    seconds = outlook.seconds
    tokens = outlook.tokens_a_step * outlook.steps
    print(
        f"Work: {outlook.steps:,} steps of {outlook.tokens_a_step:,} tokens, {tokens:,} tokens; "
        f"{outlook.flops_a_step:.3g} operations a step"
    )
    print(f"Time: {seconds.step:,.3g} s a step, at {100 * outlook.mfu:.0f} % of the peak (assumed, see --mfu)")
    if outlook.link_bytes or outlook.network_bytes:
        hidden = "hidden behind it" if seconds.hidden and seconds.messages <= seconds.compute else "not hidden"
        print(
            f"      computing {seconds.compute:.3g} s, messages {seconds.messages:.3g} s, {hidden}: "
            f"{outlook.link_bytes / 1e9:,.1f} GB a device, {outlook.network_bytes / 1e9:,.1f} GB a node over the network"
        )
    rate = outlook.tokens_a_step / seconds.step
    money = "" if outlook.price is None else f"; {outlook.price:,.2f} for them"
    print(f"      {rate:,.0f} tokens/s, {outlook.hours:,.2f} hours{money}")


def show_changes(outlook: Any, tried: list[tuple[str, Any]], words: list[str]) -> None:
    """Print what to change where it doesn't fit, and the command that does."""
    if outlook.fits:
        print(f"\nNext: {command(words)}")
        return
    print("\nWhat to change, the cheapest first, one after the other:")
    for change, one in tried:
        print(f"  {change:<90}{one.memory.peak / GIB:8.2f} GiB  {one.seconds.step:8.3g} s a step")
    if tried and tried[-1][1].fits:
        print(f"\nNext: {command([*words, *(word for change, _ in tried for word in change.split())])}")
    else:
        print("\nIt doesn't fit with any of them: take a smaller model or --context_length, or more nodes.")


def command(words: list[str]) -> str:
    """train.py with these flags, each as it was given last, without those that plan.py alone has."""
    given: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            given[name] = [value] if equals else []
        elif name:
            given[name].append(word)
    kept = [[name, *values] for name, values in given.items() if name[2:] not in OWN]
    return f"python train.py {shlex.join(word for one in kept for word in one)}"


if __name__ == "__main__":
    plain_output()
    sys.exit(main())
