"""Kill runs with --mirror, their disks and their server at random: is anything ever lost?

    python benchmarks/mirror.py --minutes 30 --seed 0

The process dies, or the process of the mirror, or both with the run directory, or the server, which
comes back after some seconds. The same command goes on until the run is done, which must then have
the weights, the optimizer and the log of an undisturbed run, bit for bit, and the bucket must hold
nothing but what is in a manifest, logs and the lease. Seconds of a step with and without a mirror
are measured first, in turns.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import conftest  # noqa: E402, F401  what the tests set in the environment
import servers  # noqa: E402
import test_mirrored_runs as tests  # noqa: E402
import uploads  # noqa: E402
from ranks import Job, metrics  # noqa: E402

from benchmarks import inputs, memory, page  # noqa: E402
from fabric_llm.base.files import MANIFEST  # noqa: E402
from fabric_llm.mirror.fetch import LOGS, checkpoints  # noqa: E402
from fabric_llm.mirror.lease import Lease, Lost  # noqa: E402
from fabric_llm.mirror.store import Store  # noqa: E402

tests.STEPS, tests.INTERVAL, TIMED_STEPS = 40, 4, 60
KINDS = {1: ("auto", "full"), 2: ("fsdp2", "sharded")}  # ranks -> strategy, --state_dict_type
VICTIMS = {"process": 2, "uploader": 1, "machine and disk": 3, "server": 2}  # -> how often
ENDS = {  # docs/results/chaos.md says what they are
    "runs": "runs ended",
    "starts": "starts",
    "different": "runs that differ",
    "strays": "runs with strays in the bucket",
    "unexpected": "unexpected ends",
}
LONGEST_AWAY_SECONDS = 8.0
SLOW_SECONDS = 0.1  # before each answer of a slow server
LARGE = inputs.llama(1024, 4096, 16, 8, vocab_size=8192, max_position_embeddings=128)
OF_LARGE = "--lr 1e-5 --precision 32-true --global_batch_size 2 --micro_batch_size 1 --eval_iters 0"
OF_LARGE += " --save_step_interval 1 --mirror_timeout 300 --resume auto --resume_override max_step"


def main() -> int:
    parser = page.parser(__doc__, rounds=3)
    add = parser.add_argument
    add("--minutes", type=float, default=30.0, help="of chaos; the last run goes to its end")
    add("--seed", type=int, default=0, help="of the moments")
    add("--restore", action="store_true", help="measure also how a model of 1 GiB comes back")
    add("--foreign", type=int, default=0, help="measure with so many objects of others, and end")
    options = page.parse(parser)
    with tempfile.TemporaryDirectory() as name, stored(Path(name)) as (server, bucket):
        folder = Path(name)
        if options.foreign:
            beside_others(folder, bucket, options)
            return 0
        (folder / "site").mkdir()
        (folder / "site" / "sitecustomize.py").write_text(tests.QUICK_LEASES)
        os.environ["PYTHONPATH"] = f"{folder / 'site'}{os.pathsep}{ROOT}"
        inputs.write_toy(folder)
        seconds, requests = timed(folder, server, options.rounds)
        restores = [restored(folder, ranks) for ranks in KINDS if options.restore]
        chaos = Chaos(folder, server, bucket, options.seed)
        chaos.run(60 * options.minutes)
    counts = chaos.counts
    killed = [[victim, counts[victim], counts["restored", victim]] for victim in VICTIMS]
    steps = []
    for name, found in seconds.items():
        rounds = ", ".join(map(page.milliseconds, found))
        steps.append([name, page.milliseconds(statistics.median(found)), rounds])
    body = [
        page.table(["killed", "times", "then fetched from the mirror"], killed),
        page.table(ENDS.values(), [[counts[key] for key in ENDS]], words=0),
        f"A copy took {requests:g} requests (median).",
        page.table(["seconds of a step, in ms", "median", "in each round"], steps),
    ]
    if restores:
        titles = ["a restore on", "seconds to fetch", "GiB fetched", "peak while fetching, GiB"]
        body.append(page.table(titles, restores))
    notes = [
        f"{tests.STEPS} steps, a checkpoint every {tests.INTERVAL}, --keep_last 2",
        f"A dead owner's lease is taken over after {tests.LEASE_SECONDS} s instead of 60",
    ]
    page.write("The mirror", notes, options, body, [seconds, str(counts)])
    return int(any(counts[fault] for fault in ("different", "strays", "unexpected")))


@contextmanager
def stored(folder: Path) -> Iterator[tuple[Any, Any]]:
    """A server of seaweedfs, and its bucket."""
    (folder / "server").mkdir()
    with servers.running(servers.seaweed(folder / "server")) as server:
        os.environ.update(servers.keys(server.url))
        yield server, servers.Bucket(server.url).make()


def beside_others(folder: Path, bucket: Any, options: Any) -> None:
    """`--foreign`: a page of what a small run's mirror takes."""
    rows = []
    for count in (0, options.foreign):
        places = ("others", "RUN/others", "RUN")
        names = [f"foreign-{count}/{places[k % 3]}/{k}" for k in range(count)]
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda name: bucket.put(name, b""), names))
        page.progress(f"{count} objects were put")
        place = f"s3://{bucket.name}/foreign-{count}"
        rows.append([count, *one_beside(folder / str(count), place)])
    titles = ["seconds", "start", "copy", "list", "lease", "restore", "removal"]
    titles += ["MiB of the uploader", "MiB of a restore"]
    notes = ["Objects of others under the prefix"]
    page.write("A mirror among others", notes, options, [page.table(titles, rows)], rows)


def one_beside(folder: Path, place: str) -> list[Any]:
    """Seconds of each act of a run's mirror, and peaks of memory in MiB."""
    run = folder / uploads.RUN
    run.mkdir(parents=True)
    for step in (1, 2):
        uploads.save(run, step, random.Random(step))
    moments = [time.monotonic()]
    with uploads.Mirror(place, run, program=uploads.MEASURED) as mirror:
        mirror.wait("ready")
        moments.append(time.monotonic())
        for name in ("step-00000001", "step-00000002"):
            mirror.say(upload=name)
            mirror.wait("mirrored")
        moments.append(time.monotonic())
        assert len(checkpoints(Store(place), uploads.RUN)) == 2
        moments.append(time.monotonic())
        with suppress(Lost):
            Lease(Store(place), "another").check()
        moments.append(time.monotonic())
        restore = [sys.executable, "-c", uploads.RESTORE + uploads.PEAK, place, str(folder / "new")]
        done = subprocess.run(restore, cwd=ROOT, capture_output=True, text=True, check=True)
        moments.append(time.monotonic())
        mirror.say(remove=["step-00000001"])
        mirror.wait("removed")
        moments.append(time.monotonic())
        mirror.end()
        peaks = [mirror.process.stderr.read().split()[-1], done.stderr.split()[-1]]
    return [*(f"{end - began:.2f}" for began, end in itertools.pairwise(moments)), *peaks]


def flags(folder: Path, name: str, ranks: int, mirrored: bool) -> tuple[Any, ...]:
    """Of a toy run, whose mirror has a prefix of its own."""
    strategy, kind = KINDS[ranks]
    words = tests.flags(folder, folder / "out", strategy=strategy, kind=kind)
    words += ("--run_name", name, "--keep_last", 2, "--keep_best", 0)
    if not mirrored:
        return words
    place = f"s3://models/chaos/{name}"
    return (*words, "--mirror", place, "--mirror_timeout", 30, "--resume", "auto")


def timed(folder: Path, server: Any, rounds: int) -> tuple[dict[str, list[float]], float]:
    """Seconds of a step, by contender and round, and the requests of a copy."""
    seconds: dict[str, list[float]] = {"no mirror": [], "a mirror": [], "a mirror that is slow": []}
    requests = []
    with servers.proxied(server.url) as proxy:
        proxy.slow_seconds = SLOW_SECONDS
        for number, (contender, found) in itertools.product(range(rounds), seconds.items()):
            name = f"timed-{number}-{contender.replace(' ', '-')}"
            # Which the ranks inherit.
            os.environ["AWS_ENDPOINT_URL"] = proxy.url if "slow" in contender else server.url
            words = flags(folder, name, 1, mirrored=contender != "no mirror")
            tests.ended(Job(1, *words, "--max_step", TIMED_STEPS))
            run = folder / "out" / name
            # The first steps are slower, whoever makes them.
            steps = metrics(run, "tokens_per_second")[5:]
            tokens = metrics(run, "tokens")[0]
            found.append(statistics.median(tokens / each for each in steps))
            if contender == "a mirror":
                events = tests.events(run, "mirrored")
                requests += [event["report"]["requests"] for event in events]
            page.progress(f"{name}: {page.milliseconds(found[-1])} ms a step")
    os.environ["AWS_ENDPOINT_URL"] = server.url
    return seconds, statistics.median(requests)


def restored(folder: Path, ranks: int) -> list[Any]:
    """A row: what it takes to go on with a model of 1.06 GiB on an empty disk."""
    model, run = folder / "large", folder / "out" / f"restore-{ranks}"
    if not model.is_dir():
        inputs.write_llama(model, True, **LARGE)
    strategy, kind = KINDS[ranks]
    how = f"--strategy {strategy} --state_dict_type {kind} --devices {ranks} --run_name {run.name}"
    words = {"model_name": model, "train_data_dir": folder / "data", "output_dir": run.parent}
    words["mirror"] = f"s3://models/{run.name}"
    inputs.call("train.py", OF_LARGE, how, "--max_step 1", **words)
    size = sum(path.stat().st_size for path in run.glob("step-*/**/*.*"))
    shutil.rmtree(run)
    log = folder / f"{run.name}.txt"
    began, fetched, peak = time.monotonic(), 0.0, 0

    def seen(held: Any) -> None:
        nonlocal fetched, peak
        if not fetched:
            peak = max(peak, held.pss)
            if "Fetched step-" in log.read_text():
                fetched = time.monotonic() - began

    command = inputs.flags(ROOT / "train.py", OF_LARGE, how, "--max_step 2", **words)
    with log.open("w") as file:
        code = memory.watched([sys.executable, *command], 0.05, seen, stdout=file, stderr=file)
    assert code == 0, log.read_text()
    gib = [f"{number / page.GIB:.2f}" for number in (size, peak)]
    return [f"{ranks} rank{'s' * (ranks > 1)}, {kind}", f"{fetched:.1f}", *gib]


class Chaos:
    """Run after run. counts: by kind of victim, ("restored", victim) and more."""

    def __init__(self, folder: Path, server: Any, bucket: Any, seed: int) -> None:
        self.folder, self.server, self.bucket = folder, server, bucket
        self.generator = random.Random(seed)
        self.counts: Counter[Any] = Counter()
        self.longest: dict[int, float] = {}  # seconds of an undisturbed run, by ranks

    def run(self, seconds: float) -> None:
        began = time.monotonic()
        for ranks in KINDS:
            start = time.monotonic()
            tests.ended(Job(ranks, *flags(self.folder, f"whole-{ranks}", ranks, mirrored=False)))
            self.longest[ranks] = time.monotonic() - start
        while time.monotonic() < began + seconds:
            self.one(f"run-{self.counts['runs']}", self.generator.choice([*KINDS]))

    def one(self, name: str, ranks: int) -> None:
        """Start, disturb and start again one run until it is done, and check what is left."""
        run, before, done = self.folder / "out" / name, "nobody", False
        while not done:
            done, before = self.attempt(run, ranks, before)
            page.progress(f"{name} on {ranks}, {before}: {dict(self.counts)}")
        self.counts["runs"] += 1
        try:
            tests.assert_same_end(run, self.folder / "out" / f"whole-{ranks}")
        except AssertionError as error:
            self.fault("different", f"{name} {error}")
        if strays := self.strays(f"chaos/{name}/"):
            self.fault("strays", f"{name} {strays}")
        shutil.rmtree(run)

    def fault(self, kind: str, words: str) -> None:
        page.progress(f"{kind.upper()}: {words}")
        self.counts[kind] += 1

    def attempt(self, run: Path, ranks: int, before: str) -> tuple[bool, str]:
        """One start, in which a victim dies. Returns whether the run is done, and who died:
        "nobody" if it was over before that.

        before: who died in the last start.
        """
        self.counts["starts"] += 1
        [victim] = self.generator.choices([*VICTIMS], VICTIMS.values())
        # Half of them meet a server that is gone already.
        gone = victim == "server" and self.generator.random() < 0.5
        if gone:
            self.server.kill()
        job = Job(ranks, *flags(self.folder, run.name, ranks, mirrored=True))
        moment = self.generator.uniform(0.0, 0.9 * self.longest[ranks])
        # A lost disk is fetched, and a dead owner's lease waited for, before it trains again.
        if not gone:
            time.sleep(moment + tests.LEASE_SECONDS * (before == "machine and disk"))
        found = self.kill(job, run, ranks, victim)
        try:
            codes = job.wait(180)
        except AssertionError as error:
            self.fault("unexpected", f"{run.name} hangs: {victim} {error}")
            return False, victim
        said = "\n".join(job.output)
        if victim in ("process", "machine and disk") and -9 not in codes or not found:
            victim = "nobody"
        self.counts[victim] += 1
        if "Fetched step-" in said:
            self.counts["restored", before] += 1
        # 71: the other rank was killed. Without server or uploader a start ends with 74, an end
        # with 80.
        allowed = {0} if victim == "nobody" else {0, -9, 71}
        allowed |= {74, 80} if victim in ("server", "uploader") else set()
        if not allowed.issuperset(codes):
            self.fault("unexpected", f"{run.name} {codes} {victim}\n{said}")
        if victim == "machine and disk":
            shutil.rmtree(run, ignore_errors=True)
        return not any(codes), victim

    def kill(self, job: Job, run: Path, ranks: int, victim: str) -> bool:
        """Returns whether there was anybody to be killed."""
        everyone = [*range(ranks)]
        if victim == "server":
            self.server.kill()
            time.sleep(self.generator.uniform(0.5, LONGEST_AWAY_SECONDS))
            self.server.start()
            self.bucket.make()  # returns once the server takes requests
        elif victim == "uploader":
            return end_uploaders(run)
        elif victim == "process":
            # On a machine with two ranks one may die alone.
            job.kill(self.generator.choice([[0], everyone]))
        else:
            # Either may come first, as where the power goes.
            if self.generator.random() < 0.5:
                job.kill(everyone)
            end_uploaders(run)
            job.kill(everyone)
            end_uploaders(run)  # one that was being started
        return True

    def strays(self, prefix: str) -> list[str]:
        """Objects that are in no manifest, and are neither a log nor the lease, and parts of
        uploads."""
        there = self.bucket.names(prefix)
        written = set()
        for name in there:
            if re.search(rf"/step-[^/]*/{MANIFEST}$", name):
                entries = json.loads(self.bucket.content(name))["files"]
                written |= {name, *(name.removesuffix(MANIFEST) + entry for entry in entries)}
        run = prefix + Path(prefix).name
        leases = [name for name in there if name.startswith(f"{prefix}.leases/lease-")]
        strays = there - written - {f"{run}/{log}" for log in LOGS} - set(leases[:1])
        parts = [part for part in self.bucket.parts() if part.startswith(prefix)]
        return [*strays, *(f"missing {name}" for name in written - there), *parts]


def end_uploaders(run: Path) -> bool:
    """SIGKILL for the processes of --mirror of a run. Returns whether there was one."""
    ended = False
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if b"fabric_llm.mirror.process" in words and str(run).encode() in words:
                os.kill(int(folder.name), signal.SIGKILL)
                ended = True
    return ended


if __name__ == "__main__":
    sys.exit(main())
