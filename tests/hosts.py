"""Hosts on one machine: each with a name, a network address and processes of its own, joined by a
switch (Linux, root).

They share the machine's file system, as the hosts of a cluster share a disk. What makes them are
namespaces; they end with the process that made them, whatever becomes of it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any, Optional

PROGRAMS = ("unshare", "nsenter", "ip", "mount", "hostname", "bash")
FIRST = """
ip link set lo up && {setup}
echo ready && read -r nothing
"""


def missing() -> Optional[str]:
    """Why this machine can't make hosts; None if it can."""
    absent = [program for program in PROGRAMS if shutil.which(program) is None]
    if absent:
        return f"hosts need {', '.join(absent)} (Debian: iproute2, util-linux)"
    words = "unshare --net --uts --mount --pid --fork true".split()
    tried = subprocess.run(words, capture_output=True)
    return "hosts need root, or the right to make namespaces" if tried.returncode else None


class Namespace:
    """What runs inside ends when `first`, the first process of it, ends; that ends when its
    standard input does."""

    def __init__(self, kinds: str, setup: str) -> None:
        script = FIRST.format(setup=setup)
        words = ["unshare", *(f"--{kind}" for kind in kinds.split()), "bash", "-c", script]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(words, **pipes, stderr=subprocess.DEVNULL, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n", f"no namespace: {setup}"
        self.first = pid = self.process.pid
        if "fork" in kinds:
            self.first = int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

    def end(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.first, 9)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with suppress(BrokenPipeError):
                pipe.close()


class Network:
    """Hosts NAME -> 10.77.0.1, 10.77.0.2, ..., all of which know each other's names. A context
    manager."""

    def __init__(self, *names: str, folder: Path) -> None:
        self.names, self.folder = names, folder
        folder.mkdir(parents=True, exist_ok=True)
        lines = [f"10.77.0.{k} {name}\n" for k, name in enumerate(names, 1)]
        (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(lines))
        self.switch = Namespace("net", "ip link add switch type bridge && ip link set switch up")
        self.hosts: dict[str, Namespace] = {}
        for name in names:
            self.plug_in(name)

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *error: Any) -> None:
        for namespace in (*self.hosts.values(), self.switch):
            namespace.end()

    def plug_in(self, name: str) -> None:
        """Start the host, for the first time or after `lose`."""
        port = self.names.index(name) + 1
        setup = (
            f"hostname {name} && mount --make-rprivate / && mount -t proc proc /proc && mount "
            f"--bind {self.folder / 'hosts'} /etc/hosts"
        )
        host = self.hosts[name] = Namespace("net uts mount pid fork kill-child", setup)
        self._at_switch(f"ip link add port{port} type veth peer name eth0 netns {host.first}")
        self._at_switch(f"ip link set port{port} master switch up")
        for command in (f"ip address add 10.77.0.{port}/24 dev eth0", "ip link set eth0 up"):
            subprocess.run([*self.on(name), *command.split()], check=True)

    def lose(self, name: str, silently: bool) -> None:
        """Kill all processes of the host; `silently`, as a power cut does: none of its connections
        is closed before that."""
        port = self.names.index(name) + 1
        if silently:
            self._at_switch(f"ip link set port{port} down")
        self.hosts[name].end()
        with suppress(subprocess.CalledProcessError):  # it has gone with the host, or goes soon
            self._at_switch(f"ip link delete port{port}")

    def on(self, name: str) -> list[str]:
        """What to put before a command so that it runs on the host, in `folder`."""
        inside = f"nsenter -t {self.hosts[name].first} --net --uts --mount --pid env".split()
        return [*inside, f"--chdir={self.folder}"]

    def _at_switch(self, command: str) -> None:
        entered = ["nsenter", "-t", str(self.switch.first), "--net", *command.split()]
        subprocess.run(entered, check=True, stderr=subprocess.DEVNULL)
