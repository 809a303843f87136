"""Kill training at random, again and again: is the latest checkpoint ever unreadable, is anything
ever lost?

    python benchmarks/kills.py --kills 500 --output chaos.json
    python benchmarks/kills.py --mirror --minutes 30

After each kill everything that bears a checkpoint's name is read and hashed, and the steps that are
gone are counted. The same command goes on until the run is done, which must then have the weights,
the optimizer and the log of an undisturbed run, bit for bit. Runs and checks are those of
tests/faults/test_kills.py.

With a mirror the process dies, or the process of the mirror, or both with the run directory, or the
server, which comes back after some seconds; in the end the bucket must hold nothing but what is in
a manifest, logs and the lease. Seconds of a step with and without a mirror are measured first, in
turns.
"""

import argparse
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
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import conftest  # noqa: E402, F401  what the tests set in the environment
import servers  # noqa: E402
import test_mirrored_runs as mirrored  # noqa: E402
import uploads  # noqa: E402
from faults import test_kills as tests  # noqa: E402
from ranks import Job, metrics  # noqa: E402

from benchmarks import inputs, page  # noqa: E402
from benchmarks.turns import alternate  # noqa: E402
from fabric_llm.base.faults import Fault  # noqa: E402
from fabric_llm.base.files import MANIFEST  # noqa: E402
from fabric_llm.mirror.fetch import LOGS, checkpoints  # noqa: E402
from fabric_llm.mirror.lease import Lease, Lost  # noqa: E402
from fabric_llm.mirror.store import Store  # noqa: E402

Kind = tuple[int, str, str, str]  # ranks, --strategy, --state_dict_type, --async_save
ON_ONE, ON_TWO = (1, "auto", "full", "false"), (2, "fsdp2", "sharded", "false")
KINDS = [
    (2, "fsdp", "full", "false"),
    (2, "fsdp", "sharded", "false"),
    (2, "fsdp2", "full", "false"),
    (2, "fsdp2", "sharded", "true"),
    (2, "fsdp", "full", "true"),
]
STEPS = {False: (15, 3), True: (40, 4)}  # with a mirror? -> of a run, and between checkpoints
VICTIMS = {"process": 2, "uploader": 1, "machine and disk": 3, "server": 2}  # -> how often
COUNTS = {  # docs/results/chaos.md says what they are
    "starts": "starts",
    "process": "kills",
    "runs": "runs ended",
    "unreadable": "unreadable",
    "lost": "most steps lost",
    "different": "runs that differ",
    "orphans": "orphans",
    "unexpected": "unexpected ends",
    "strays": "runs with strays in the bucket",
    "leftovers": "leftovers swept",
}
FAULTS = ("unreadable", "different", "orphans", "unexpected", "strays")
LONGEST_AWAY_SECONDS = 8.0
TIMED_STEPS, SLOW_SECONDS = 60, 0.1  # of a run; before each answer of a slow server
LARGE = inputs.llama(1024, 4096, 16, 8, vocab_size=8192, max_position_embeddings=128)
OF_LARGE = "--lr 1e-5 --precision 32-true --global_batch_size 2 --micro_batch_size 1 --eval_iters 0"
OF_LARGE += f" --save_step_interval 1 --mirror_timeout 300 --max_step 1 --run_name {uploads.RUN}"


def main() -> int:
    parser = page.parser(__doc__, rounds=3)
    add = parser.add_argument
    add("--kills", type=int, default=500, help="of all kinds of runs together")
    add("--seed", type=int, default=0, help="of the moments")
    add("--mirror", action="store_true", help="beside a server of seaweedfs")
    add("--minutes", type=float, default=30.0, help="of kills beside a mirror")
    add("--restore", action="store_true", help="measure also how a model of 1 GiB comes back")
    add("--foreign", type=int, default=0, help="measure with so many objects of others, and end")
    options = page.parse(parser)
    tests.STEPS, tests.INTERVAL = STEPS[options.mirror]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        inputs.write_toy(folder)
        if options.mirror or options.foreign:
            (folder / "server").mkdir()
            with servers.running(servers.seaweed(folder / "server")) as server:
                os.environ.update(servers.keys(server.url))
                bucket = servers.Bucket(server.url).make()
                measure = beside_others if options.foreign else with_a_mirror
                return measure(folder, server, bucket, options)
        counted = []
        for number, kind in enumerate(KINDS):
            chaos = Chaos(folder, kind, options.seed + number)
            while chaos.counts["process"] < options.kills / len(KINDS):
                chaos.one()
            counted.append(chaos)
    return written("Chaos: random kills", counted, [], options)


def written(
    title: str, counted: "list[Chaos]", more: list[str], options: argparse.Namespace
) -> int:
    """The page, and the exit code: 1 if anything is wrong."""
    lines = [[*chaos.kind, *(chaos.counts[key] for key in COUNTS)] for chaos in counted]
    notes = [f"{tests.STEPS} steps, a checkpoint every {tests.INTERVAL}"]
    table = page.table(["ranks", "strategy", "checkpoint", "async", *COUNTS.values()], lines, 4)
    page.write(title, notes, options, [table, *more], [str(chaos.counts) for chaos in counted])
    return int(any(chaos.counts[fault] for chaos in counted for fault in FAULTS))


def with_a_mirror(folder: Path, server: Any, bucket: Any, options: argparse.Namespace) -> int:
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(mirrored.QUICK_LEASES)
    os.environ["PYTHONPATH"] = f"{folder / 'site'}{os.pathsep}{ROOT}"
    more = timed(folder, server, options.rounds)
    if options.restore:
        rows = [restored(folder, kind) for kind in (ON_ONE, ON_TWO)]
        more.append(page.table(["ranks", "GiB fetched", "seconds", "MiB at the peak"], rows))
    counted = []
    for kind in (ON_ONE, ON_TWO):
        chaos, ends = Chaos(folder, kind, options.seed, server, bucket), 30 * options.minutes
        ends += time.monotonic()
        while time.monotonic() < ends:
            chaos.one()
        counted.append(chaos)
    counts = sum((chaos.counts for chaos in counted), Counter())
    killed = [[victim, counts[victim], counts["restored", victim]] for victim in VICTIMS]
    more.append(page.table(["killed", "times", "then fetched from the mirror"], killed))
    return written("The mirror", counted, more, options)


def beside_others(folder: Path, server: Any, bucket: Any, options: argparse.Namespace) -> int:
    """`--foreign`: a page of what a small run's mirror takes."""
    rows = []
    for count in (0, options.foreign):
        places = ("others", "RUN/others", "RUN")
        names = [f"foreign-{count}/{places[k % 3]}/{k}" for k in range(count)]
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda name: bucket.put(name, b""), names))
        page.progress(f"{count} objects were put")
        place = f"s3://{bucket.name}/foreign-{count}"
        rows.append({"objects": count, **one_beside(folder / str(count), place)})
    table = page.table(rows[0], [row.values() for row in rows])
    page.write("A mirror among objects of others", [], options, [table], rows)
    return 0


def one_beside(folder: Path, place: str) -> dict[str, Any]:
    """Seconds of each act of a run's mirror, and peaks of memory in MiB."""
    run, names = folder / uploads.RUN, ["step-00000001", "step-00000002"]
    run.mkdir(parents=True)
    for step in (1, 2):
        uploads.save(run, step, random.Random(step))
    row, restores = {}, []
    with uploads.Mirror(place, run, program=uploads.MEASURED) as mirror:

        def asked(report: str, **command: Any) -> None:
            mirror.say(**command)
            mirror.wait(report)

        for act, function in {
            "start": lambda: mirror.wait("ready"),
            "copy": lambda: [asked("mirrored", upload=name) for name in names],
            "list": lambda: checkpoints(Store(place), uploads.RUN),
            "lease": lambda: Lease(Store(place), "another").check(),
            "restore": lambda: restores.append(fetched(place, folder / "new")),
            "removal": lambda: asked("removed", remove=names[:1]),
        }.items():
            began = time.monotonic()
            with suppress(Lost):
                function()
            row[act] = f"{time.monotonic() - began:.2f}"
        mirror.end()
        row["MiB of the uploader"] = mirror.process.stderr.read().split()[-1]
    return {**row, "MiB of a restore": restores[0][1]}


def fetched(place: str, folder: Path) -> tuple[str, str]:
    """Seconds of a restore onto an empty disk, and its peak of memory in MiB."""
    command = [sys.executable, "-c", uploads.RESTORE + uploads.PEAK, place, str(folder)]
    began = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return f"{time.monotonic() - began:.1f}", done.stderr.split()[-1]


def restored(folder: Path, kind: Kind) -> list[Any]:
    """A row: what it takes to fetch a model of 1.06 GiB with its moments."""
    ranks, strategy, state_dict_type, _ = kind
    place, output = f"s3://models/restore-{ranks}", folder / f"restore-{ranks}"
    inputs.write_llama(folder / "large", True, **LARGE)
    how = f"--strategy {strategy} --state_dict_type {state_dict_type} --devices {ranks}"
    folders = {"model_name": folder / "large", "train_data_dir": folder / "data"}
    inputs.call("train.py", OF_LARGE, how, output_dir=output, mirror=place, **folders)
    size = sum(path.stat().st_size for path in output.rglob("step-*/**/*.*"))
    shutil.rmtree(output)
    return [ranks, f"{size / page.GIB:.2f}", *fetched(place, folder / "fetched" / str(ranks))]


def train(folder: Path, kind: Kind, name: str, *more: Any) -> Job:
    """A toy run, whose mirror has a prefix of its own."""
    ranks, strategy, state_dict_type, async_save = kind
    words = f"--strategy {strategy} --async_save {async_save} --hang_timeout 60 --run_name {name}"
    flags = tests.flags(folder, folder / "out", state_dict_type, *words.split(), *more)
    return Job(ranks, *flags)


def mirror_of(name: str) -> tuple[Any, ...]:
    return "--mirror", f"s3://models/chaos/{name}", "--mirror_timeout", 30


def timed(folder: Path, server: Any, rounds: int) -> list[str]:
    """What the page says of the seconds of a step, and of the requests of a copy."""
    seconds: dict[str, list[float]] = {"no mirror": [], "a mirror": [], "a mirror that is slow": []}
    requests = []
    with servers.proxied(server.url) as proxy:
        proxy.slow_seconds = SLOW_SECONDS
        for number, contender in enumerate(alternate([*seconds], rounds)):
            name = f"timed-{number}"
            # Which the ranks inherit.
            os.environ["AWS_ENDPOINT_URL"] = proxy.url if "slow" in contender else server.url
            more = mirror_of(name) if "no" not in contender else ()
            mirrored.ended(train(folder, ON_ONE, name, *more, "--max_step", TIMED_STEPS))
            run = folder / "out" / name
            # The first steps are slower, whoever makes them.
            steps = metrics(run, "tokens_per_second")[5:]
            tokens = metrics(run, "tokens")[0]
            seconds[contender].append(statistics.median(tokens / each for each in steps))
            if contender == "a mirror":
                events = mirrored.events(run, "mirrored")
                requests += [event["report"]["requests"] for event in events]
    os.environ["AWS_ENDPOINT_URL"] = server.url
    rows = []
    for name, found in seconds.items():
        rounds_of = ", ".join(map(page.milliseconds, found))
        rows.append([name, page.milliseconds(statistics.median(found)), rounds_of])
    said = f"A copy took {statistics.median(requests):g} requests (median)."
    return [page.table(["seconds of a step, in ms", "median", "in each round"], rows), said]


class Chaos:
    """Runs of one kind. counts: by kind of victim, ("restored", victim) and more."""

    def __init__(
        self, folder: Path, kind: Kind, seed: int, server: Any = None, bucket: Any = None
    ) -> None:
        self.folder, self.kind, self.server, self.bucket = folder, kind, server, bucket
        self.generator, self.counts = random.Random(seed), Counter()
        self.name, began = "-".join(map(str, kind)), time.monotonic()
        mirrored.ended(train(folder, kind, f"{self.name}-undisturbed"))
        self.longest = time.monotonic() - began

    def one(self) -> None:
        """Start, disturb and start again one run until it is done, and check what is left."""
        name = f"{self.name}-{self.counts['runs']}"
        run, before, done = self.folder / "out" / name, "nobody", False
        while not done:
            done, before = self.attempt(run, before)
            page.progress(f"{name}, {before}: {dict(self.counts)}")
        self.counts["runs"] += 1
        try:
            tests.assert_same_run(run, run.with_name(f"{self.name}-undisturbed"))
        except AssertionError as error:
            self.fault("different", f"{name} {error}")
        if strays := self.bucket and self.strays(f"chaos/{name}/"):
            self.fault("strays", f"{name} {strays}")
        shutil.rmtree(run)

    def fault(self, kind: str, words: Any) -> None:
        page.progress(f"{kind.upper()}: {words}")
        self.counts[kind] += 1

    def attempt(self, run: Path, before: str) -> tuple[bool, str]:
        """One start, in which a victim dies. Returns whether the run is done, and who died:
        "nobody" if it was over before that.

        before: who died in the last start.
        """
        self.counts["starts"] += 1
        [victim] = self.generator.choices([*VICTIMS], VICTIMS.values())
        victim = victim if self.server else "process"
        # Half of them meet a server that is gone already.
        gone = victim == "server" and self.generator.random() < 0.5
        if gone:
            self.server.kill()
        job = train(self.folder, self.kind, run.name, *(mirror_of(run.name) if self.server else ()))
        moment = self.generator.uniform(0.0, self.longest)
        # A lost disk is fetched, and a dead owner's lease waited for, before it trains again.
        if not gone:
            time.sleep(moment + mirrored.LEASE_SECONDS * (before == "machine and disk"))
        found = self.kill(job, run, victim)
        try:
            codes = job.wait(180)
        except AssertionError as error:
            self.fault("orphans", f"{run.name} hangs: {victim} {error}")
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
        self.counts["leftovers"] += any([*run.glob(".tmp-*"), *run.glob(".trash-*")])
        try:
            durable = tests.assert_intact(run, tests.STEPS)
            lost = max(tests.logged_steps(run), default=0) - durable
            self.counts["lost"] = max(self.counts["lost"], lost)
        except Fault as fault:
            self.fault("unreadable", fault)
        if victim == "machine and disk":
            shutil.rmtree(run, ignore_errors=True)
        return not any(codes), victim

    def kill(self, job: Job, run: Path, victim: str) -> bool:
        """Returns whether there was anybody to be killed."""
        everyone = [*range(self.kind[0])]
        if victim == "server":
            self.server.kill()
            time.sleep(self.generator.uniform(0.5, LONGEST_AWAY_SECONDS))
            self.server.start()
            self.bucket.make()  # returns once the server takes requests
        elif victim == "uploader":
            return end_uploaders(run)
        elif victim == "process":
            # On a machine with two ranks one may die alone.
            job.kill(self.generator.choice([everyone[:1], everyone[-1:], everyone, everyone]))
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
        known = {*leases[:1], f"{prefix}.leases/owner-{Path(prefix).name}"}
        strays = there - written - {f"{run}/{log}" for log in LOGS} - known
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
