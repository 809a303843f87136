"""Kill runs with --mirror, their disks and their server at random: is anything ever lost?

    python benchmarks/mirror.py --minutes 30 --seed 0

The process dies, or the process of the mirror, or both with the run directory, or the server, which
comes back after some seconds. The same command goes on until the run is done, which must then have
the weights, the optimizer and the log of an undisturbed run, bit for bit, and the bucket must hold
nothing but what is in a manifest, logs and the lease. Seconds of a step with and without a mirror
are measured first, in turns.
"""

from __future__ import annotations

import json
import os
import random
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

from benchmarks import inputs, page  # noqa: E402  the others are imported later: --help is quick

STEPS, INTERVAL, TIMED_STEPS = 40, 4, 60
KINDS = {1: ("auto", "full"), 2: ("fsdp2", "sharded")}  # ranks -> strategy, --state_dict_type
VICTIMS = ("process", "uploader", "machine and disk", "server")
LONGEST_AWAY_SECONDS, LEASE_SECONDS = 8.0, 6.0
MIRROR_SECONDS = 30  # --mirror_timeout
SLOW_SECONDS = 0.1  # before each answer of a slow server
RESTORE = """
import sys
from pathlib import Path
from fabric_llm.mirror.fetch import restore
from fabric_llm.mirror.store import Store
restore(Store(sys.argv[1]), "RUN", Path(sys.argv[2]))
"""


def main() -> int:
    parser = page.parser(__doc__, rounds=3)
    add = parser.add_argument
    add("--minutes", type=float, default=30.0, help="of chaos; the last run goes to its end")
    add("--seed", type=int, default=0, help="of the moments")
    add("--restore", action="store_true", help="measure also how a model of 1 GiB comes back")
    add("--foreign", type=int, default=0, help="measure with so many objects of others, and end")
    options = page.parse(parser)
    os.environ["OMP_NUM_THREADS"] = "1"
    if options.foreign:
        return beside_others(options)
    import conftest  # noqa: F401  what the tests set in the environment
    import test_mirrored_runs as tests

    tests.STEPS, tests.INTERVAL = STEPS, INTERVAL
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "site").mkdir()
        (folder / "site" / "sitecustomize.py").write_text(tests.QUICK_LEASES)
        os.environ["PYTHONPATH"] = f"{folder / 'site'}{os.pathsep}{ROOT}"
        inputs.write_toy(folder)
        with stored(folder) as (server, bucket):
            seconds, requests = timed(folder, server, options.rounds)
            restores = [restored(folder, ranks) for ranks in KINDS if options.restore]
            chaos = Chaos(folder, server, bucket, options.seed)
            chaos.run(60 * options.minutes)
    counts = chaos.counts
    killed = [[victim, counts[victim], counts["restored", victim]] for victim in VICTIMS]
    ends = ["runs", "starts", "different", "strays", "unexpected"]
    titles = ["runs ended", "starts", "runs that differ", "runs with strays in the bucket"]
    steps = []
    for name, found in seconds.items():
        rounds = ", ".join(map(page.milliseconds, found))
        steps.append([name, page.milliseconds(statistics.median(found)), rounds])
    body = [
        page.table(["killed", "times", "then fetched from the mirror"], killed),
        page.table([*titles, "unexpected ends"], [[counts[key] for key in ends]], words=0),
        f"A copy took {requests:g} requests (median).",
        page.table(["seconds of a step, in ms", "median", "in each round"], steps),
    ]
    if restores:
        titles = ["a restore on", "seconds to fetch", "GiB fetched", "peak while fetching, GiB"]
        body.append(page.table(titles, restores))
    notes = [
        f"{STEPS} steps, a checkpoint every {INTERVAL}, --keep_last 2",
        f"A dead owner's lease is taken over after {tests.LEASE_SECONDS} s instead of 60",
    ]
    page.write("The mirror", notes, options, "\n\n".join(body), [dict(seconds), str(counts)])
    return int(any(counts[fault] for fault in ("different", "strays", "unexpected")))


def beside_others(options: Any) -> int:
    """`--foreign`: a page of what a small run's mirror takes."""
    rows = []
    with tempfile.TemporaryDirectory() as name, stored(Path(name)) as (_, bucket):
        for count in (0, options.foreign):
            places = ("others", "RUN/others", "RUN")
            names = [f"foreign-{count}/{places[k % 3]}/{k}" for k in range(count)]
            with ThreadPoolExecutor(16) as pool:
                list(pool.map(lambda name: bucket.put(name, b""), names))
            page.progress(f"{count} objects were put")
            place = f"s3://{bucket.name}/foreign-{count}"
            rows.append([count, *one_beside(Path(name, str(count)), place)])
    titles = ["seconds", "start", "copy", "list", "lease", "restore", "removal"]
    titles += ["MiB of the uploader", "MiB of a restore"]
    notes = ["Objects of others under the prefix"]
    page.write("A mirror among others", notes, options, page.table(titles, rows), rows)
    return 0


@contextmanager
def stored(folder: Path) -> Iterator[tuple[Any, Any]]:
    """A server of seaweedfs, and its bucket."""
    import servers

    (folder / "server").mkdir()
    with servers.running(servers.seaweed(folder / "server")) as server:
        os.environ.update(servers.keys(server.url))
        yield server, servers.Bucket(server.url).make()


def one_beside(folder: Path, place: str) -> list[Any]:
    """Seconds of each act of a run's mirror, and peaks of memory in MiB."""
    import uploads

    from fabric_llm.mirror.fetch import checkpoints
    from fabric_llm.mirror.lease import Lease, Lost
    from fabric_llm.mirror.store import Store

    run, took, began = folder / uploads.RUN, [], time.monotonic()

    def lap() -> None:
        nonlocal began
        took.append(f"{time.monotonic() - began:.2f}")
        began = time.monotonic()

    run.mkdir(parents=True)
    for step in (1, 2):
        uploads.save(run, step, random.Random(step))
    began = time.monotonic()
    with uploads.Mirror(place, run, program=uploads.MEASURED) as mirror:
        mirror.wait("ready")
        lap()
        for name in ("step-00000001", "step-00000002"):
            mirror.say(upload=name)
            mirror.wait("mirrored")
        lap()
        assert len(checkpoints(Store(place), uploads.RUN)) == 2
        lap()
        with suppress(Lost):
            Lease(Store(place), "another").check()
        lap()
        restore = [sys.executable, "-c", RESTORE + uploads.PEAK, place, str(folder / "new")]
        began = time.monotonic()
        done = subprocess.run(restore, cwd=ROOT, capture_output=True, text=True, check=True)
        lap()
        mirror.say(remove=["step-00000001"])
        mirror.wait("removed")
        lap()
        mirror.end()
        took += [mirror.process.stderr.read().split()[-1], done.stderr.split()[-1]]
    return took


def flags(folder: Path, name: str, ranks: int, *more: Any) -> tuple[Any, ...]:
    import test_mirrored_runs as tests

    strategy, kind = KINDS[ranks]
    words = tests.flags(folder, folder / "out", *more, strategy=strategy, kind=kind)
    return (*words, "--run_name", name, "--keep_last", 2, "--keep_best", 0)


def mirrored(name: str) -> tuple[Any, ...]:
    """Each run has a prefix of its own."""
    place = f"s3://models/chaos/{name}"
    return ("--mirror", place, "--mirror_timeout", MIRROR_SECONDS, "--resume", "auto")


def timed(folder: Path, server: Any, rounds: int) -> tuple[dict[str, list[float]], float]:
    """Seconds of a step, by contender and round, and the requests of a copy."""
    from ranks import Job, metrics
    from servers import proxied
    from test_mirrored_runs import ended, events

    seconds: dict[str, list[float]] = {"no mirror": [], "a mirror": [], "a mirror that is slow": []}
    requests = []
    with proxied(server.url) as proxy:
        proxy.slow_seconds = SLOW_SECONDS
        for number in range(rounds):
            for place, (contender, found) in enumerate(seconds.items()):
                name = f"timed-{number}-{place}"
                more = () if place == 0 else mirrored(name)
                words = flags(folder, name, 1, *more)
                url = proxy.url if place == 2 else server.url

                def before(url: str = url) -> None:
                    os.environ["AWS_ENDPOINT_URL"] = url

                job = Job(1, *words, "--max_step", TIMED_STEPS, before=before)
                ended(job)
                run = folder / "out" / name
                # The first steps are slower, whoever makes them.
                steps = metrics(run, "tokens_per_second")[5:]
                tokens = metrics(run, "tokens")[0]
                found.append(statistics.median(tokens / each for each in steps))
                if place == 1:
                    requests += [one["report"]["requests"] for one in events(run, "mirrored")]
                page.progress(f"{name}, {contender}: {page.milliseconds(found[-1])} ms a step")
    return seconds, statistics.median(requests)


def restored(folder: Path, ranks: int) -> list[Any]:
    """A row: what it takes to go on with a model of 1.06 GiB on an empty disk."""
    from benchmarks import memory

    model, out, name = folder / "large", folder / "out", f"restore-{ranks}"
    if not model.is_dir():
        more = {"vocab_size": 8192, "max_position_embeddings": 128}
        inputs.write_llama(model, True, **inputs.llama(1024, 4096, 16, 8, **more))
    strategy, kind = KINDS[ranks]
    words = {"model_name": model, "train_data_dir": folder / "data", "lr": 1e-5}
    words |= {"strategy": strategy, "state_dict_type": kind, "devices": ranks}
    words |= {"precision": "32-true", "global_batch_size": 2, "micro_batch_size": 1}
    words |= {"eval_iters": 0, "save_step_interval": 1, "output_dir": out, "run_name": name}
    words |= {"mirror": f"s3://models/{name}", "mirror_timeout": 300, "resume": "auto"}
    words |= {"resume_override": "max_step"}
    command = [sys.executable, str(ROOT / "train.py"), *inputs.flags(**words), "--max_step"]
    log = folder / f"{name}.txt"
    began, fetched, peak = 0.0, 0.0, 0

    def seen(held: Any) -> None:
        nonlocal fetched, peak
        if not fetched:
            peak = max(peak, held.pss)
            if "Fetched step-" in log.read_text():
                fetched = time.monotonic() - began

    for steps in ("1", "2"):
        began, peak = time.monotonic(), 0
        with log.open("w") as file:
            code = memory.watched([*command, steps], 0.05, seen, stdout=file, stderr=file)
        assert code == 0, log.read_text()
        if steps == "1":
            size = sum(path.stat().st_size for path in out.glob(f"{name}/step-*/**/*.*"))
            shutil.rmtree(out / name)
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
        from ranks import Job

        began = time.monotonic()
        for ranks in KINDS:
            start = time.monotonic()
            job = Job(ranks, *flags(self.folder, f"whole-{ranks}", ranks))
            assert job.wait(120) == [0] * ranks, job.output
            self.longest[ranks] = time.monotonic() - start
        while time.monotonic() < began + seconds:
            self.one(f"run-{self.counts['runs']}", self.generator.choice([*KINDS]))

    def one(self, name: str, ranks: int) -> None:
        """Start, disturb and start again one run until it is done, and check what is left."""
        from test_mirrored_runs import assert_same_end

        run, before, done = self.folder / "out" / name, "nobody", False
        while not done:
            done, before = self.attempt(run, ranks, self.victim(), before)
            page.progress(f"{name} on {ranks}, {before}: {dict(self.counts)}")
        self.counts["runs"] += 1
        try:
            assert_same_end(run, self.folder / "out" / f"whole-{ranks}")
        except AssertionError as error:
            page.progress(f"DIFFERENT: {name} {error}")
            self.counts["different"] += 1
        if strays := self.strays(f"chaos/{name}/"):
            page.progress(f"STRAYS: {name} {strays}")
            self.counts["strays"] += 1
        shutil.rmtree(run)

    def victim(self) -> str:
        """The loss of all is what a mirror is for."""
        return self.generator.choices(VICTIMS, [2, 1, 3, 2])[0]

    def attempt(self, run: Path, ranks: int, victim: str, before: str) -> tuple[bool, str]:
        """One start, in which `victim` dies. Returns whether the run is done, and who died:
        "nobody" if it was over before that.

        before: who died in the last start.
        """
        from ranks import Job

        self.counts["starts"] += 1
        # Half of them meet a server that is gone already.
        gone = victim == "server" and self.generator.random() < 0.5
        if gone:
            self.server.kill()
        job = Job(ranks, *flags(self.folder, run.name, ranks, *mirrored(run.name)))
        moment = self.generator.uniform(0.0, 0.9 * self.longest[ranks])
        # A lost disk is fetched, and a dead owner's lease waited for, before it trains again.
        if not gone:
            time.sleep(moment + (LEASE_SECONDS if before == "machine and disk" else 0))
        victims = self.kill(job, run, ranks, victim)
        try:
            codes = job.wait(180)
        except AssertionError as error:
            page.progress(f"HANGS: {run.name} {victim} {error}")
            self.counts["unexpected"] += 1
            return False, victim
        said = "\n".join(job.output)
        if victim in ("process", "machine and disk") and -9 not in codes or not victims:
            victim = "nobody"
        self.counts[victim] += 1
        if "Fetched step-" in said:
            self.counts["restored", before] += 1
        # 71: the other rank was killed. Without server or uploader a start ends with 74, an end
        # with 80.
        allowed = {0} if victim == "nobody" else {0, -9, 71}
        allowed |= {"server": {74, 80}, "uploader": {74, 80}}.get(victim, set())
        if not allowed.issuperset(codes):
            page.progress(f"UNEXPECTED: {run.name} {codes} {victim}\n{said}")
            self.counts["unexpected"] += 1
        if victim == "machine and disk":
            shutil.rmtree(run, ignore_errors=True)
        return not any(codes), victim

    def kill(self, job: Any, run: Path, ranks: int, victim: str) -> bool:
        """Returns whether there was anybody to be killed."""
        if victim == "server":
            self.server.kill()
            time.sleep(self.generator.uniform(0.5, LONGEST_AWAY_SECONDS))
            self.server.start()
            self.bucket.make()  # returns once the server takes requests
            return True
        if victim == "uploader":
            return end_uploaders(run)
        if victim == "process":
            # On a machine with two ranks one may die alone.
            job.kill(self.generator.choice([[0], [*range(ranks)]]))
            return True
        # Either may come first, as where the power goes.
        if self.generator.random() < 0.5:
            job.kill([*range(ranks)])
        end_uploaders(run)
        job.kill([*range(ranks)])
        end_uploaders(run)  # one that was being started
        return True

    def strays(self, prefix: str) -> list[str]:
        """Objects that are in no manifest, and are neither a log nor the lease, and parts of
        uploads."""
        from fabric_llm.base.files import MANIFEST
        from fabric_llm.mirror.fetch import LOGS

        there = self.bucket.names(prefix)
        known = set()
        for name in there:
            folder, _, file = name.rpartition("/")
            if file == MANIFEST and folder.rpartition("/")[2].startswith("step-"):
                entries = json.loads(self.bucket.content(name))["files"]
                known |= {name, *(f"{folder}/{entry}" for entry in entries)}
        run = f"{prefix}{prefix.rstrip('/').rpartition('/')[2]}"
        known |= {f"{run}/{log}" for log in LOGS}
        leases = [name for name in there if name.startswith(f"{prefix}.leases/lease-")]
        missing = sorted(name for name in known - there if "/step-" in name)
        strays = sorted(there - known - set(leases[:1]))
        parts = [part for part in self.bucket.parts() if part.startswith(prefix)]
        return [*strays, *(f"missing {name}" for name in missing), *(f"part {p}" for p in parts)]


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
