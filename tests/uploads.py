"""Run directories with small checkpoints and real manifests, and the mirror's process."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Optional

from fabric_llm.base import files
from fabric_llm.base.describing import describe

ROOT = Path(__file__).parent.parent
RUN = "RUN"
# Arguments of `main`, and the seconds of a lease.
PROGRAM = """
import os, sys
from fabric_llm.mirror.process import main
code = main(sys.argv[2:], float(sys.argv[1]))
os._exit(code)
"""
# Peak memory in MiB. `resource` would count that of the process that started this one, too.
PEAK = "print(int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0]) // 1024, "
PEAK += "file=sys.stderr, flush=True)"
MEASURED = PROGRAM.replace("os._exit", f"{PEAK}\nos._exit")
# Arguments: the address, and a folder.
RESTORE = """
import sys
from pathlib import Path
from fabric_llm.mirror.fetch import restore
from fabric_llm.mirror.store import Store
restore(Store(sys.argv[1]), "RUN", Path(sys.argv[2]))
"""


def save(
    run: Path, step: int, generator: random.Random, most_bytes: int = 50_000, large: int = 0
) -> dict[str, bytes]:
    """A checkpoint, published as a save does it. Returns its files. large: bytes of one of them."""
    name = f"step-{step:08d}"
    contents = {
        file: generator.randbytes(generator.randrange(1, most_bytes))
        for file in ("config.json", "model.safetensors", "trainer/optimizer/part-0.safetensors")
    }
    contents["trainer/progress.json"] = json.dumps({"progress": {"step": step}}).encode()
    contents["empty.txt"] = b""
    if large:
        contents["large.safetensors"] = generator.randbytes(large)
    temporary = run / f".tmp-{name}-{generator.randrange(10**8)}"
    for file, content in contents.items():
        (temporary / file).parent.mkdir(parents=True, exist_ok=True)
        (temporary / file).write_bytes(content)
    document = {"files": describe(temporary, contents), "step": step}
    (temporary / files.MANIFEST).write_bytes(files.encode(document))
    temporary.rename(run / name)
    with (run / "metrics.jsonl").open("a") as log:
        log.write(json.dumps({"step": step}) + "\n")
    (run / "events.jsonl").write_text("{}\n")
    (run / "STATUS.json").write_text("{}")
    (run / "arguments.yaml").write_text("seed: 0\n")
    (run / "samples.jsonl").write_text("{}\n")
    (run / "metrics.undone.jsonl").write_text("{}\n")
    return contents | {files.MANIFEST: (run / name / files.MANIFEST).read_bytes()}


def read(folder: Path) -> dict[str, bytes]:
    """All files below a folder."""
    return {file: (folder / file).read_bytes() for file in files.files_in(folder)}


class Mirror:
    """The process. Used with `with`, which kills it."""

    def __init__(
        self,
        address: str,
        run: Path,
        *flags: str,
        failpoint: str = "",
        lease_seconds: float = 60,
        program: str = PROGRAM,
        **environment: str,
    ) -> None:
        self.reports: list[dict[str, Any]] = []
        self.seen, self.is_over = 0, False
        self.changed = threading.Condition()
        environment = {**os.environ, "FABRIC_LLM_FAILPOINT": failpoint, **environment}
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, str(lease_seconds), address, str(run), *flags],
            cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.thread = threading.Thread(target=self._listen, daemon=True)
        self.thread.start()

    def _listen(self) -> None:
        for line in self.process.stdout:
            with self.changed:
                self.reports.append(json.loads(line))
                self.changed.notify_all()
        with self.changed:
            self.is_over = True
            self.changed.notify_all()

    def say(self, **command: Any) -> None:
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def wait(self, key: str, value: Any = None, seconds: float = 60) -> dict[str, Any]:
        """The next report with `key` (and `value`), behind the one before."""
        end = time.monotonic() + seconds
        with self.changed:
            while True:
                for place in range(self.seen, len(self.reports)):
                    found = self.reports[place]
                    if key in found and value in (None, found[key]):
                        self.seen = place + 1
                        return found
                assert not self.is_over, (key, self.reports)
                assert self.changed.wait(end - time.monotonic()), (key, self.reports)

    def all(self, key: str) -> list[Any]:
        with self.changed:
            return [report[key] for report in self.reports if key in report]

    def end(self, seconds: float = 60) -> list[str]:
        """Tell it to end. Returns what is behind."""
        self.say(end=seconds)
        behind = self.wait("ended", seconds=seconds + 30)["behind"]
        assert self.exit() == 0
        return behind

    def exit(self, seconds: float = 60) -> int:
        code = self.process.wait(seconds)
        self.thread.join(10)
        return code

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.thread.join(10)

    def __enter__(self) -> Mirror:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            try:
                pipe.close()
            except BrokenPipeError:  # what was said was never read
                pass


def mirrored(address: str, run: Path, *names: str, **options: Any) -> Optional[dict[str, Any]]:
    """Upload checkpoints, and end. Returns the last report of an upload."""
    report = None
    with Mirror(address, run, **options) as mirror:
        mirror.wait("ready")
        for name in names:
            mirror.say(upload=name)
            report = mirror.wait("mirrored", name)
        assert mirror.end() == []
    return report
