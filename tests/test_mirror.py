"""The mirror: law 18, a checkpoint is there if and only if its manifest is. Kills are in
test_mirror_kills.py."""

import errno
import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

pytest.importorskip("obstore")

from servers import (
    BUCKET,
    Bucket,
    moto_url,  # noqa: F401
    proxied,
    rclone_url,  # noqa: F401
    running,
    seaweed_url,  # noqa: F401
    use,
    wait_for,
)
from uploads import MEASURED, PEAK, PROGRAM, ROOT, RUN, Mirror, mirrored, read, save

from fabric_llm.base import files
from fabric_llm.base.describing import describe
from fabric_llm.base.faults import Fault
from fabric_llm.mirror import address, download, fetch, leftovers, store
from fabric_llm.mirror.fetch import checkpoints, folder_of, restore
from fabric_llm.mirror.lease import Lease, Lost
from fabric_llm.mirror.store import Store
from fabric_llm.prepare import storage

# In CI the longer suite has the servers.
pytestmark = pytest.mark.longer


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "checkpoints" / RUN
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def place(tmp_path):
    return f"file://{tmp_path}/mirror"


@pytest.fixture
def on_moto(moto_url, monkeypatch, request):  # noqa: F811
    """An address: a prefix of this test's own."""
    use(moto_url, monkeypatch)
    prefix = re.sub(r"\W", "-", request.node.name)
    Bucket(moto_url).make()
    return f"s3://{BUCKET}/{prefix}"


@pytest.fixture
def proxy(on_moto, monkeypatch):
    """Between who asks and the server."""
    with proxied(os.environ["AWS_ENDPOINT_URL"]) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        yield proxy


@contextmanager
def at_work(place, run, *flags, upload=None, **options):
    """The mirror's process once it is ready. upload: the step that it is told to upload first."""
    with Mirror(place, run, *flags, **options) as mirror:
        mirror.wait("ready")
        if upload is not None:
            mirror.say(upload=f"step-{upload:08d}")
        yield mirror


def probe(there):
    """Without patience."""
    download.patiently(there, lambda: store.probe(there), seconds=0)


def refused(action, code):
    with pytest.raises(Fault) as raised:
        action()
    assert raised.value.code == code, raised.value
    assert str(raised.value).count(". ") <= 1 and len(str(raised.value)) < 400, raised.value
    return str(raised.value)


# ------------------------------------------------------------------------------- addresses


def test_an_address_is_told_from_a_folder():
    assert all(map(address.is_address, ("s3://b/p", "gs://b", "file:///x", "ftp://x", "S3://b")))
    assert not any(map(address.is_address, ("checkpoints/RUN", "/x", "C:\\x", "step-1", "a:b")))


BAD = {
    "must begin with one of s3://": ["ftp://host/x"],
    "must name a bucket": ["s3:///prefix"],
    "no password": ["s3://key:secret@b/x", "s3://b/x?token=secret", "s3://b/x#secret"],
    "must be plain": [
        *"s3://bucket/../x s3://bucket/a//b s3://bucket/./b s3://bucket/a\x07".split(),
        *"file:///mnt/%2e%2e/x file:///mnt/a%2Fb file:///mnt/a%07".split(),
    ],
    "must name a folder": ["file://host/x", "file:///"],
    "Did you mean file:///mnt/my%20disk?": ["/mnt/my disk"],
}


@pytest.mark.parametrize("text, says", [(text, says) for says in BAD for text in BAD[says]])
def test_a_bad_address_is_refused_in_a_sentence(text, says):
    sentence = refused(lambda: address.require(text, "--mirror"), 2)
    assert says in sentence and sentence.startswith("--mirror") and "secret" not in sentence


def test_good_addresses_pass():
    for text in ("s3://b", "s3://b/p/q", "gs://b.c/p", "az://c/p", "file:///m/n"):
        address.require(text, "--mirror")


def test_names_of_a_folder_may_be_encoded_and_keys_are_what_they_say(tmp_path):
    for given, name in (("my%20100%25", "my 100%"), ("my disk", "my disk"), ("%C3%A9", "é")):
        place = f"file://{tmp_path}/{given}"
        Store(place).put("a%20b/c", b"x")
        (tmp_path / name / "a%20b" / "c#1").write_bytes(b"")
        assert leftovers.remove(place, "a%20b") == 1
        assert (tmp_path / name / "a%20b" / "c").read_bytes() == b"x"
        assert address.split(place) == (f"file://{tmp_path}", name)
    assert address.split("s3://b/my%20x") == ("s3://b", "my%20x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["my 100%", "my disk", "é"]


def test_who_reads_makes_no_folder(tmp_path):
    place = f"file://{tmp_path}/nowhere/x"
    for read_it in (fetch.local, fetch.dataset, lambda place: storage.corpus(place)):
        assert "no such folder" in refused(lambda: read_it(place), 2)
    assert not (tmp_path / "nowhere").exists()


LASTING = "ENOENT ENOTDIR EEXIST ELOOP ENAMETOOLONG EACCES EPERM EROFS".split()


@pytest.mark.parametrize("name", [*LASTING, "EIO", "ESTALE", "ETIMEDOUT", "ENOSPC", "EDQUOT"])
def test_what_a_folder_keeps_refusing_is_a_mistake_unless_the_run_has_used_it(
    tmp_path, monkeypatch, clock, name
):
    """A start would be tried again for ever."""
    number, began = getattr(errno, name), clock.now

    def open_store(address):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(store, "open_store", open_store)
    place = f"file://{tmp_path}/x"

    def used(in_run):
        there = Store(place, in_run)
        return download.patiently(there, lambda: there.below(""), sleep=clock.sleep)

    sentence = refused(lambda: used(False), 2 if name in LASTING else 74)
    assert sentence.startswith(place) and (clock.now == began) == (name in LASTING)
    began = clock.now
    refused(lambda: used(True), 74)
    assert clock.now > began + 60


def test_a_folder_that_goes_in_the_middle_is_tried_again(place, run, tmp_path):
    save(run, 1, random.Random(1))
    (tmp_path / "mirror").write_text("")
    with Mirror(place, run) as mirror:
        first = mirror.wait("refused")
        assert first["code"] == 2 and "exists" in first["refused"] and place in first["refused"]
    (tmp_path / "mirror").unlink()
    with at_work(place, run) as mirror:
        (tmp_path / "mirror").rename(tmp_path / "aside")
        (tmp_path / "mirror").write_text("")
        mirror.say(upload="step-00000001")
        assert "It is tried again" in mirror.wait("warning")["warning"]
        (tmp_path / "mirror").unlink()
        (tmp_path / "aside").rename(tmp_path / "mirror")
        mirror.wait("mirrored")
        assert mirror.end() == []


def test_a_parent_that_had_to_be_made_is_said(run, tmp_path):
    place = f"file://{tmp_path}/disk/mirror"
    for said in ([f"The folder '{tmp_path}/disk' wasn't there and was made."], []):
        with at_work(place, run) as mirror:
            assert mirror.all("warning") == said and mirror.end() == []


def test_help_needs_no_obstore():
    program = "import sys; sys.modules['obstore'] = sys.modules['torch'] = None; "
    program += "from fabric_llm.mirror.process import main; main(['--help'])"
    done = python(program)
    assert done.returncode == 0 and "--timeout" in done.stdout, done.stderr
    program = "import sys; sys.modules['obstore'] = None; from fabric_llm.mirror.store import Store"
    assert "pip install obstore" in python(f"{program}; Store('s3://x')").stderr


def python(program, *words, **variables):
    words, given = [sys.executable, "-c", program, *map(str, words)], {**os.environ, **variables}
    return subprocess.run(words, cwd=ROOT, env=given, capture_output=True, text=True)


def test_nothing_of_it_imports_torch(place, run):
    save(run, 1, random.Random(0))
    seven = "assert 'torch' not in sys.modules and code == 0; os._exit(7)"
    program = PROGRAM.replace("os._exit(code)", seven)
    with at_work(place, run, program=program) as mirror:
        mirror.say(end=10)
        assert mirror.exit() == 7


# ------------------------------------------------------------------------------- there and back


def test_a_checkpoint_goes_there_and_comes_back(place, run, tmp_path):
    first, second = (save(run, step, random.Random(step)) for step in (1, 2))
    report = mirrored(place, run, "step-00000001", "step-00000002")
    assert report["bytes"] == sum(map(len, second.values())) - len(second[files.MANIFEST])
    store = Store(place)
    assert checkpoints(store, RUN) == ["step-00000001", "step-00000002"]
    there = restore(store, RUN, tmp_path / "new" / RUN)
    assert there.name == "step-00000002" and read(there) == second
    assert {path.name for path in there.parent.iterdir()} == {*fetch.LOGS, "step-00000002"}
    for name in fetch.LOGS:
        assert (there.parent / name).read_bytes() == (run / name).read_bytes()
    assert read(run / "step-00000001") == first
    assert mirrored(place, run, "step-00000001")["bytes"] == 0, "nothing new"


def test_older_ones_that_wait_are_given_up(place, run):
    for step in range(1, 6):
        save(run, step, random.Random(step))
    with at_work(place, run, failpoint="mirror.file:do=hang", program=PROGRAM, upload=1) as mirror:
        wait_for(lambda: Store(place).below(RUN))
        for step in range(2, 6):
            mirror.say(upload=f"step-{step:08d}")
        mirror.wait("given_up", "step-00000003")
        assert mirror.all("given_up") == ["step-00000002", "step-00000003"]
        mirror.say(end=0.1)
        assert mirror.wait("ended")["behind"] == [f"step-{k:08d}" for k in (1, 4, 5)]
        assert mirror.exit() == 0


def test_the_newest_one_is_never_removed_unless_a_run_goes_back(place, run):
    for step in (1, 2, 3):
        save(run, step, random.Random(step))
    store = Store(place)
    with at_work(place, run) as mirror:
        for step in (1, 2, 3):
            mirror.say(upload=f"step-{step:08d}")
            mirror.wait("mirrored")
        mirror.say(remove=["step-00000001", "step-00000003"])
        mirror.wait("removed", "step-00000001")
        mirror.say(remove=["step-00000003"], newest=True)
        mirror.wait("removed", "step-00000003")
        assert mirror.all("removed") == ["step-00000001", "step-00000003"]
        mirror.say(remove=["../x"])
        assert "no checkpoint's name" in mirror.wait("warning")["warning"]
        mirror.end()
    assert checkpoints(store, RUN) == ["step-00000002"]


def test_a_checkpoint_that_disappears_is_given_up(place, run):
    save(run, 1, random.Random(0))
    save(run, 2, random.Random(0))
    (run / "step-00000002" / "model.safetensors").write_bytes(b"damaged")
    with at_work(place, run, upload=9) as mirror:
        mirror.wait("given_up", "step-00000009")
        assert mirror.all("warning") == []
        mirror.say(upload="step-00000002")
        assert "step-00000002" in mirror.wait("warning")["warning"]
        mirror.wait("given_up", "step-00000002")
        assert mirror.end() == []
    assert Store(place).below(f"{RUN}/step-00000002") == []


def test_a_name_that_was_used_before_is_replaced(place, run, tmp_path):
    """Also by a rewind while it is sent: no manifest is put beside files of another one."""
    save(run, 1, random.Random(0))
    mirrored(place, run, "step-00000001")
    os.rename(run / "step-00000001", tmp_path / "aside")
    save(run, 1, random.Random(1))
    with at_work(place, run, failpoint="mirror.before_manifest:do=stop", upload=1) as mirror:
        wait_for(lambda: ") T " in Path(f"/proc/{mirror.process.pid}/stat").read_text())
        os.rename(run / "step-00000001", tmp_path / "undone")
        other = save(run, 1, random.Random(2))
        mirror.process.send_signal(18)  # SIGCONT
        mirror.wait("given_up")
        assert mirror.end() == [] and checkpoints(Store(place), RUN) == []
    mirrored(place, run, "step-00000001")
    assert read(restore(Store(place), RUN, tmp_path / "new")) == other


def test_what_is_foreign_stays(place, run):
    save(run, 1, random.Random(0))
    store = Store(place)
    foreign = ["OTHER/step-00000001/x", f"{RUN}/notes.txt", f"{RUN}/step-1/x"]
    foreign.append(f"{RUN}/step-00000001.pinned")
    for name in foreign:
        store.put(name, b"mine")
    store.put(f"{RUN}/step-00000007/left", b"by a kill")
    mirrored(place, run, "step-00000001")
    there = store.below("")
    assert set(foreign) < set(there) and f"{RUN}/step-00000007/left" not in there


# What rank 0 does at its start.
OPEN = """
import sys
from pathlib import Path
from types import SimpleNamespace as Flags
from fabric_llm.plan.mirrored import open_mirror
save = Flags(mirror=sys.argv[1], mirror_timeout=20.0)
resume = Flags(resume="auto", checkpoint=None)
open_mirror(Flags(save=save, checkpoint=resume), Path(sys.argv[2])).close()
"""


def opened(place, run, failpoint=""):
    done = python(OPEN, place, run, FABRIC_LLM_FAILPOINT=failpoint)
    assert done.returncode == (-9 if failpoint else 0), done.stderr
    return done.stdout


@pytest.mark.parametrize("point", ["mirror.fetching", "mirror.fetched"])
def test_an_interrupted_restore_is_taken_up(place, run, tmp_path, point):
    """On a disk that holds a stale checkpoint, of the name of another one there, and has the lease
    by then."""
    there = {step: save(run, step, random.Random(step)) for step in (1, 2)}
    mirrored(place, run, "step-00000001", "step-00000002")
    other = tmp_path / "other" / RUN
    other.mkdir(parents=True)
    stale = save(other, 1, random.Random(9))
    (other / "arguments.yaml").write_text("of before")
    opened(place, other, f"{point}:count=2" if point == "mirror.fetching" else point)
    assert (other / ".mirror-left").exists() and files.latest(other) is None
    said = opened(place, other)
    assert "Fetched step-00000002" in said
    assert [path.name for path in files.checkpoints(other)] == ["step-00000002"]
    assert read(other / "step-00000002") == there[2]
    [aside] = other.glob("aside-step-00000001*")
    assert read(aside) == stale
    for name in fetch.LOGS:
        assert (other / name).read_bytes() == (run / name).read_bytes(), name
    assert not (other / ".mirror-left").exists()
    # A third start has nothing to do, and what is there has stayed.
    assert opened(place, other) == ""
    for step in (1, 2):
        where = tmp_path / str(step)
        assert read(fetch.one(Store(place), RUN, f"step-{step:08d}", where)) == there[step]


def test_a_disk_that_was_mirrored_last_replaces_a_stale_copy_of_the_same_name(place, run, tmp_path):
    for step in (1, 2):
        save(run, step, random.Random(step))
    mirrored(place, run, "step-00000001", "step-00000002")
    (run / "step-00000002").rename(tmp_path / "given-up")
    again = save(run, 2, random.Random(7))
    opened(place, run)
    assert read(restore(Store(place), RUN, tmp_path / "new")) == again


def test_which_disk_goes_before_the_mirror(place, run, tmp_path):
    save(run, 1, random.Random(1))
    mirrored(place, run, "step-00000001")
    shutil.copytree(run, tmp_path / "copy" / RUN)
    (run / "step-00000001").rename(tmp_path / "pruned")
    save(run, 2, random.Random(2))
    # Not one that another run's lease makes look as if this one had gone on elsewhere.
    (tmp_path / "OTHER").mkdir()
    mirrored(place, tmp_path / "OTHER")
    assert opened(place, run) == ""
    # Nor a copy of a directory that has gone on since.
    assert "Fetched step-00000002" in opened(place, tmp_path / "copy" / RUN)


# ------------------------------------------------------------------------------- damage


DAMAGES = {
    "truncated": lambda content: content[:-1],
    "flipped": lambda content: bytes([content[0] ^ 1]) + content[1:],
    "longer": lambda content: content + b"x",
    "gone": lambda content: None,
}


@pytest.mark.parametrize("file", ["model.safetensors", files.MANIFEST])
@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_object_is_named_and_the_one_before_is_taken(place, run, tmp_path, how, file):
    first = save(run, 1, random.Random(1))
    save(run, 2, random.Random(2))
    mirrored(place, run, "step-00000001", "step-00000002")
    store, said = Store(place), []
    name = f"{RUN}/step-00000002/{file}"
    damaged = DAMAGES[how](store.content(name))
    if damaged is None:
        store.remove([name])
    else:
        store.put(name, damaged)
    there = restore(store, RUN, tmp_path / "new" / RUN, say=said.append)
    assert there.name == "step-00000001" and read(there) == first
    if (how, file) == ("gone", files.MANIFEST):
        assert said == []  # it isn't a checkpoint
    else:
        assert file in said[0] and "step-00000002" in said[0]
    assert not list(there.parent.glob(".*"))
    # both: nothing is taken
    store.remove([f"{RUN}/step-00000001/config.json"])
    if how != "gone":
        assert restore(store, RUN, tmp_path / "newer" / RUN, say=said.append) is None
        # As "damaged" counts what a run that goes on has pruned: the newest is taken.
        third = save(run, 3, random.Random(3))
        goes_on = lambda _: mirrored(place, run, "step-00000003")
        assert read(restore(store, RUN, tmp_path / "newer" / RUN, say=goes_on)) == third


def with_manifest(place, entries, **more):
    store = Store(place)
    manifest = files.encode({"files": entries, **more})
    store.put(f"{RUN}/step-00000001/{files.MANIFEST}", manifest)
    return store


@pytest.mark.parametrize("name", ["../outside", "/etc/x", "x.pkl"])
def test_hostile_names_lead_nowhere(place, tmp_path, name):
    store = with_manifest(place, {name: {"bytes": 1, "sha256": "0" * 64}}, step=1)
    refused(lambda: restore(store, RUN, tmp_path / "a" / RUN), 77)
    assert not list((tmp_path / "a" / RUN).glob("*")) and not (tmp_path / "outside").exists()


@pytest.mark.parametrize(
    "entries",
    [
        {"a": {"bytes": 1, "sha256": "x"}, "a/b": {"bytes": 1, "sha256": "x"}},
        {files.MANIFEST: {"bytes": 1, "sha256": "x"}},
        {"a": {"bytes": -5, "sha256": "x"}},
        {"a": {"bytes": True, "sha256": "x"}},
        {"a": 3},
        [],
        None,
    ],
)
def test_senseless_manifests_are_damaged_ones(place, tmp_path, entries):
    store, said = with_manifest(place, entries), []
    store.put(f"{RUN}/step-00000001/a", b"1")
    assert restore(store, RUN, tmp_path / RUN, say=said.append) is None
    assert "is damaged" in said[0]


def test_no_room_is_said_before_anything_is_fetched(place, tmp_path):
    store = with_manifest(place, {"a": {"bytes": 10**18, "sha256": "x"}})
    assert "GiB" in refused(lambda: restore(store, RUN, tmp_path / RUN), 74)
    assert not list((tmp_path / RUN).glob(".tmp*"))


def test_some_files_only_the_logs_and_folders_of_addresses(place, run, tmp_path):
    content = save(run, 1, random.Random(1))
    mirrored(place, run, "step-00000001")
    store = Store(place)
    first = f"{place}/{RUN}/step-00000001"
    without = lambda name: not name.startswith("trainer/optimizer")
    part = folder_of(first, tmp_path / "part", wanted=without)
    assert set(content) - set(read(part)) == {"trainer/optimizer/part-0.safetensors"}
    assert restore(store, RUN, tmp_path / "logs", only_logs=True) is None
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == sorted(fetch.LOGS)
    cache = tmp_path / "cache"
    folder = folder_of(first, cache)
    assert folder.name == "step-00000001" and read(folder) == content
    stamp = (folder / "config.json").stat().st_mtime_ns
    assert folder_of(first, cache) == folder
    assert (folder / "config.json").stat().st_mtime_ns == stamp
    whole = folder_of(f"{place}/{RUN}", cache)
    assert whole.name == RUN and read(whole / "step-00000001") == content
    # The run goes on, and back: what it has undone isn't its newest any more.
    save(run, 2, random.Random(2))
    mirrored(place, run, "step-00000002")
    assert files.latest(folder_of(f"{place}/{RUN}", cache)).name == "step-00000002"
    store.remove_folder(f"{RUN}/step-00000002")
    (left := whole / ".tmp-step-00000001-0000").mkdir()  # by a kill
    assert folder_of(f"{place}/{RUN}", cache) == whole and not left.exists()
    assert files.latest(whole).name == "step-00000001"
    logs = folder_of(f"{place}/{RUN}", tmp_path / "other", only_logs=True)
    assert (logs / "metrics.jsonl").is_file() and not list(logs.glob("step-*"))
    refused(lambda: folder_of(f"{place}/nothing", cache), 66)


def test_a_dataset_is_a_folder_with_a_manifest(place, tmp_path, monkeypatch):
    store = Store(place)
    store.put("data/mine/train/a.arrow", b"rows")
    entries = {"train/a.arrow": {"bytes": 4, "sha256": hashlib.sha256(b"rows").hexdigest()}}
    store.put("data/mine/manifest.json", files.encode({"written": entries}))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = fetch.dataset(f"{place}/data/mine")
    assert (folder / "train" / "a.arrow").read_bytes() == b"rows"
    store.put("data/mine/train/a.arrow", b"rowz")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache2"))
    refused(lambda: fetch.dataset(f"{place}/data/mine"), 2)
    # Commands that read runs and checkpoints read none.
    refused(lambda: folder_of(f"{place}/data/mine", tmp_path / "cache3"), 66)
    refused(lambda: folder_of("s3://bucket", tmp_path / "cache3"), 2)


def test_a_folder_below_the_root(monkeypatch, tmp_path):
    """Not below the working directory."""
    monkeypatch.chdir(tmp_path)
    first = tmp_path.parts[1]
    place, name = address.split(f"file:///{first}")
    store = Store(place)
    assert (name, f"{store.address}/{name}") == (first, f"file:///{first}")
    assert first in store.folders("") and store.size(f"{first}/nothing") is None


def test_patience_counts_from_the_first_error(place, clock):
    """A file may take longer than that."""
    tries = []

    def long_then_fails():
        tries.append(clock.now)
        clock.sleep(1000)
        if len(tries) == 1:
            raise OSError(5, "lost")
        return "whole"

    assert download.patiently(Store(place), long_then_fails, sleep=clock.sleep) == "whole"
    began = clock.now

    def fails():
        raise OSError(5, "lost")

    refused(lambda: download.patiently(Store(place), fails, sleep=clock.sleep), 74)
    assert 60 <= clock.now - began <= download.PATIENCE_SECONDS


# ------------------------------------------------------------------------------- the lease


class Clock:
    """A monotonic clock, and a wall clock that jumps."""

    def __init__(self):
        self.now = 1000.0

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("fabric_llm.mirror.lease.time.monotonic", lambda: clock.now)
    return clock


def test_a_silent_owner_is_replaced_after_a_minute_and_a_living_one_is_not(place, clock):
    first, second = Lease(Store(place), "a"), Lease(Store(place), "b")
    first.acquire(clock.sleep)
    began = clock.now

    def beats(seconds):
        clock.sleep(seconds)
        if clock.now > began + 20:
            first.beat()

    sentence = refused(lambda: second.acquire(beats), 73)
    assert "in use" in sentence and f"process {os.getpid()}" in sentence
    began = clock.now
    second.acquire(clock.sleep)
    assert 60 <= clock.now - began < 65
    with pytest.raises(Lost, match="taken over"):
        first.beat()
    assert Store(place).below(".leases") == [".leases/lease-000002.json"]
    second.end()
    began = clock.now
    first = Lease(Store(place), "a")
    first.acquire(clock.sleep)
    assert clock.now == began and first.number == 3


def test_one_that_only_finishes_is_waited_for(place, clock):
    """As the process beside a run that was killed, on another machine: that mends itself, so no 73.
    If it falls silent, it is replaced as others are."""
    for ends in (True, False):
        first, second = (Lease(Store(place), f"{name}{ends}") for name in "ab")
        first.finishes = lambda: True
        first.acquire(clock.sleep)
        began, said = clock.now, []

        def beats(seconds, first=first, began=began, ends=ends):
            clock.sleep(seconds)
            if clock.now < began + 300:
                first.beat()
            elif ends and not first.ended:
                first.end()

        second.acquire(beats, said.append)
        assert 300 <= clock.now - began < (305 if ends else 370)
        assert len(said) == 1 and "waited for if it only finishes" in said[0]
        second.end()


def test_the_process_says_that_it_finishes(place, run):
    """Once its trainer is gone, or has told it to end."""
    save(run, 1, random.Random(1))

    def says():
        return json.loads(Store(place).content(".leases/lease-000001.json"))["finishes"]

    point = "mirror.before_manifest:do=hang"
    with at_work(place, run, failpoint=point, lease_seconds=2, upload=1) as mirror:
        assert not says()
        mirror.process.stdin.close()
        wait_for(says)


def test_the_same_run_goes_on_at_once_and_clocks_of_machines_do_not_matter(place, clock):
    one = Lease(Store(place), "a")
    one.acquire(clock.sleep)
    # its times are of another century
    name = ".leases/lease-000001.json"
    said = {**json.loads(Store(place).content(name)), "time": "2999-01-01"}
    Store(place).put(name, json.dumps(said).encode())
    began = clock.now
    Lease(Store(place), "a").acquire(clock.sleep)
    assert clock.now == began
    Lease(Store(place), "b").acquire(clock.sleep)
    assert clock.now - began >= 60


def test_only_one_of_many_takes_over(place):
    owners, errors = [Lease(Store(place), str(k), seconds=0.3) for k in range(8)], []

    def acquire(owner):
        try:
            owner.acquire()
        except Fault as fault:
            errors.append(fault.code)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(acquire, owners))
    numbers = {owner.number for owner in owners if owner.number}
    holding = []
    for owner in owners:
        with suppress(Lost):
            owner.check()
            holding.append(owner.number)
    assert max(numbers) in holding and set(errors) <= {73}
    assert len(numbers) == max(numbers)


def test_an_owner_that_begins_while_another_process_probes(place, monkeypatch):
    """It takes the object of the probe for one that a kill left."""
    create, owners = Store.create, []

    def interrupted(own, name, content):
        made = create(own, name, content)
        if store.PROBE in name and not owners:
            owners.append(Lease(Store(place), "a"))
            owners[0].acquire()
        return made

    monkeypatch.setattr(Store, "create", interrupted)
    probe(Store(place))
    assert owners and Store(place).below(".leases") == [".leases/lease-000001.json"]


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"ended": 1}', b"\xff"])
def test_a_foreign_lease_is_waited_for(place, clock, content):
    Store(place).put(".leases/lease-000004.json", content)
    Store(place).put(".leases/notes.txt", b"x")
    one, began = Lease(Store(place), "a"), clock.now
    one.acquire(clock.sleep)
    assert one.number == 5 and clock.now - began >= 60


def test_a_second_run_is_refused_and_a_killed_one_is_taken_over(place, run, tmp_path):
    save(run, 1, random.Random(1))
    other = tmp_path / "elsewhere" / RUN
    other.mkdir(parents=True)
    save(other, 2, random.Random(2))
    with at_work(place, run, lease_seconds=2) as first:
        with Mirror(place, other, lease_seconds=2) as second:
            report = second.wait("refused")
            assert report["code"] == 73 and "in use" in report["refused"]
            assert second.exit() == 73
        first.process.send_signal(19)  # SIGSTOP: silent, but not gone
        with at_work(place, other, lease_seconds=2) as second:
            first.process.send_signal(18)
            first.say(upload="step-00000001")
            assert "taken over" in first.wait("warning")["warning"]
            second.say(upload="step-00000002")
            second.wait("mirrored")
            assert first.end(5) == ["step-00000001"] or first.all("given_up")
            assert second.end() == []
    assert checkpoints(Store(place), RUN) == ["step-00000002"]


def test_the_logs_of_the_next_owner_stay(place, run):
    save(run, 1, random.Random(1))
    there = {".leases/lease-000002.json": b"{}", f"{RUN}/metrics.jsonl": b"of the next"}
    with at_work(place, run, lease_seconds=2400) as mirror:
        for name, content in there.items():
            Store(place).put(name, content)
        mirror.end(5)
    assert {name: Store(place).content(name) for name in there} == there


# ------------------------------------------------------------------------------- servers


@pytest.fixture(params=["moto_url", "seaweed_url"])
def url(request, monkeypatch):
    """Of servers, which are asked from here on. seaweedfs checks signatures."""
    found = request.getfixturevalue(request.param)
    use(found, monkeypatch)
    return found


def test_parts_that_a_kill_left_are_removed(url, monkeypatch):
    bucket = Bucket(url, "parts").make()
    for name in (f"p/{RUN}/step-00000001/a ä+b~(c)", f"p/{RUN}/b", "p/OTHER/x"):
        bucket.client.create_multipart_upload(Bucket="parts", Key=name)
    assert leftovers.remove("s3://parts/p", RUN) == 2
    assert bucket.parts() == ["p/OTHER/x"]
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    assert leftovers.remove("s3://parts/p", "OTHER") == 0


def test_credentials_that_expire_are_read_again(on_moto, run, proxy, monkeypatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    path = tmp_path / "credentials"
    text = "[default]\naws_access_key_id = OLD\naws_secret_access_key = secret\n"
    path.write_text(text)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))
    save(run, 1, random.Random(1))
    with at_work(on_moto, run) as mirror:
        proxy.answer = lambda *_: EXPIRED if "OLD" in proxy.authorization else None
        mirror.say(upload="step-00000001")
        warning = mirror.wait("warning")["warning"]
        assert "ExpiredToken" in warning and "OLD" not in warning
        path.write_text(text.replace("OLD", "NEW"))
        mirror.wait("recovered")
        mirror.wait("mirrored")
        assert mirror.end() == []
    assert checkpoints(Store(on_moto), RUN) == ["step-00000001"]
    # So they are by who fetches.
    path.write_text(text)

    def answer(method, *_):
        if method == "GET" and "/step-" in proxy.requests[-1][1] and "OLD" in proxy.authorization:
            path.write_text(text.replace("OLD", "NEW"))
            return EXPIRED

    proxy.answer = answer
    assert restore(Store(on_moto), RUN, tmp_path / "new")


def test_a_run_on_a_server(url, run, tmp_path):
    bucket = Bucket(url, "runs").make()
    place = "s3://runs/my%20deep/prefix"
    content = save(run, 1, random.Random(1), large=20 * 2**20)
    report = mirrored(place, run, "step-00000001")
    assert report["requests"] < 60, report
    prefix = f"my%20deep/prefix/{RUN}/step-00000001/"
    assert bucket.names(prefix) == {prefix + name for name in content}
    assert all(bucket.content(prefix + name) == content[name] for name in content)
    assert read(restore(Store(place), RUN, tmp_path / "new")) == content
    assert bucket.parts() == []
    # half an upload, as a kill leaves it
    bucket.client.create_multipart_upload(Bucket="runs", Key=f"{prefix}large.safetensors")
    save(run, 2, random.Random(1))
    mirrored(place, run, "step-00000002")
    assert bucket.parts() == []


def test_an_error_costs_nothing_of_what_went_before(on_moto, run, proxy, tmp_path, monkeypatch):
    """Longer than the client's own tries, in a large file that is read back, and fetched."""
    content = save(run, 1, random.Random(1), large=20 * 2**20)
    reads, fail = iter(range(99)), range(2, 8)

    def answer(method, path, _):
        return SLOW if method == "GET" and "large" in path and next(reads) in fail else None

    proxy.answer = answer
    mirrored(on_moto, run, "step-00000001")
    assert sum(method == "PUT" and "partNumber" in path for method, path in proxy.requests) == 3
    reads, fail = iter(range(99)), range(15, 35)
    monkeypatch.setattr(store, "PART_BYTES", 2**20)
    assert read(restore(Store(on_moto), RUN, tmp_path / "new")) == content
    assert next(reads) <= 20 + len(fail) + store.AT_ONCE


def test_a_server_that_replaces_objects_is_refused(rclone_url, run, monkeypatch):  # noqa: F811
    use(rclone_url, monkeypatch)
    place = f"s3://{BUCKET}/x"
    assert "If-None-Match" in refused(lambda: probe(Store(place)), 2)
    with Mirror(place, run) as mirror:
        assert mirror.wait("refused")["code"] == 2
        assert mirror.exit() == 2
    assert Bucket(rclone_url).names() == set()


REGION = """<?xml version="1.0" encoding="UTF-8"?><Error><Code>AuthorizationHeaderMalformed</Code>
<Message>The authorization header is malformed; the region 'us-east-1' is wrong; expecting
'eu-west-3'</Message><Region>eu-west-3</Region></Error>"""
DENIED = "<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
EXPIRED = (400, DENIED.replace("AccessDenied", "ExpiredToken"))
SLOW = (503, DENIED.replace("AccessDenied", "SlowDown"))
ANSWERS = {
    "region": ((400, REGION), 2, "AWS_REGION to eu-west-3"),
    "redirect": ((301, REGION.replace("AuthorizationHeaderMalformed", "PermanentRedirect")), 2, "region"),
    "key": ((403, DENIED.replace("AccessDenied", "InvalidAccessKeyId")), 2, "aren't accepted"),
    "expired": (EXPIRED, 2, "aren't accepted"),
    "slow": (SLOW, 74, "503"),
}  # fmt: skip


@pytest.mark.parametrize("name", ANSWERS)
def test_what_a_server_refuses_is_one_sentence(on_moto, proxy, name):
    answer, code, says = ANSWERS[name]
    proxy.answer = lambda *_: answer
    sentence = refused(lambda: probe(Store(on_moto)), code)
    assert says in sentence and "127.0.0.1" not in sentence and "secret" not in sentence


def test_no_bucket_no_server_no_key(on_moto, monkeypatch):
    assert "no such bucket" in refused(lambda: probe(Store("s3://nothing-here/x")), 2)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    assert "can't be reached" in refused(lambda: probe(Store("s3://bucket/x")), 74)


def test_a_server_that_is_away_at_the_start_is_waited_for(on_moto, run, proxy):
    save(run, 1, random.Random(1))
    proxy.answer = lambda *_: SLOW
    with Mirror(on_moto, run, "--timeout", "0") as mirror:
        assert mirror.wait("refused")["code"] == 74
        assert mirror.all("warning") == []
    with Mirror(on_moto, run, "--timeout", "60") as mirror:
        said = mirror.wait("warning")["warning"]
        assert "503 Service Unavailable (SlowDown). It is tried" in said
        began = len(proxy.requests)
        wait_for(lambda: len(proxy.requests) > began)
        proxy.answer = lambda *_: None
        mirror.wait("ready")
        assert len(mirror.all("warning")) == 1
        mirror.say(upload="step-00000001")
        mirror.wait("mirrored")
    # Nothing is left to be done for a trainer that is gone by then.
    proxy.answer = lambda *_: SLOW
    with Mirror(on_moto, run, "--timeout", "60") as mirror:
        mirror.wait("warning")
        mirror.process.stdin.close()
        assert mirror.exit(20) == 0


@pytest.mark.parametrize("words", ["/lease-", f"{RUN}%2F"])  # of a request for the lease, a list
def test_what_is_refused_after_the_probe_ends_the_start(on_moto, run, proxy, words):
    """Where the server goes away then, or a key has rights to a part of the prefix alone."""
    for answer, code in ((SLOW, 74), ((403, DENIED), 2)):

        def refuses(method, path, count, answer=answer):
            return answer if words in path else None

        proxy.answer = refuses
        with Mirror(on_moto, run, "--timeout", "1") as mirror:
            assert mirror.wait("refused")["code"] == code
            assert mirror.exit() == code


def test_rights_that_miss_one_of_four(on_moto, proxy):
    for kind in ("PUT", "GET", "POST"):  # which removes several
        proxy.answer = lambda method, *_, kind=kind: (403, DENIED) if method == kind else None
        assert "no right to" in refused(lambda: probe(Store(on_moto)), 2), kind
    proxy.answer = lambda method, path, _: (403, DENIED) if "list-type" in path else None
    assert "no right to" in refused(lambda: probe(Store(on_moto)), 2)


def test_keys_of_a_profile(on_moto, monkeypatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.delenv(name)
    path = tmp_path / "credentials"
    path.write_text("[mine]\naws_access_key_id = key\naws_secret_access_key = secret\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    (tmp_path / "config").write_text("[profile mine]\nregion = us-east-1\n")
    monkeypatch.setenv("AWS_PROFILE", "mine")
    probe(Store(on_moto))
    assert leftovers.remove(on_moto, RUN) == 0


def test_a_throttled_server_gets_one_warning(on_moto, run, proxy, moto_url):  # noqa: F811
    content = save(run, 1, random.Random(1))
    with at_work(on_moto, run) as mirror:
        proxy.answer = lambda *_: SLOW
        mirror.say(upload="step-00000001")
        warning = mirror.wait("warning")["warning"]
        assert "503" in warning and "SlowDown" in warning and len(warning) < 200
        began = len(proxy.requests)
        wait_for(lambda: len(proxy.requests) > began + 6)  # it is tried again
        proxy.answer = lambda method, path, count: SLOW if count % 3 == 0 else None
        mirror.wait("recovered")
        mirror.wait("mirrored")
        assert len(mirror.all("warning")) == len(mirror.all("recovered"))
        proxy.answer = lambda *_: None
        assert mirror.end() == []
    prefix = on_moto.removeprefix(f"s3://{BUCKET}/") + f"/{RUN}/step-00000001/"
    assert Bucket(moto_url).names(prefix) == {prefix + name for name in content}


@pytest.mark.slow
def test_a_server_that_goes_away_and_comes_back(run, tmp_path, monkeypatch):
    """Its memory is gone with it: moto holds nothing on a disk. So seaweedfs."""
    from servers import seaweed

    (tmp_path / "server").mkdir()
    with running(seaweed(tmp_path / "server")) as server:
        use(server.url, monkeypatch)
        bucket = Bucket(server.url).make()
        content = save(run, 1, random.Random(1), large=30 * 2**20)
        with at_work(f"s3://{BUCKET}", run) as mirror:
            server.kill()
            mirror.say(upload="step-00000001")
            assert "can't be reached" in mirror.wait("warning")["warning"]
            server.start()
            mirror.wait("recovered", seconds=120)
            mirror.wait("mirrored", seconds=120)
            assert mirror.end() == []
            assert len(mirror.all("warning")) == len(mirror.all("recovered"))
        prefix = f"{RUN}/step-00000001/"
        assert bucket.names(prefix) == {prefix + name for name in content}


def test_the_end_comes_in_time_whatever_the_server_does(on_moto, run, proxy):
    save(run, 1, random.Random(1))
    with at_work(on_moto, run) as mirror:
        proxy.gate.clear()  # it takes requests and answers none
        mirror.say(upload="step-00000001")
        mirror.say(end=1)
        assert mirror.wait("ended", seconds=20)["behind"] == ["step-00000001"]
        assert mirror.exit(20) == 0


def test_a_hundred_thousand_other_objects(on_moto, run, tmp_path):
    """Beside the run and in it: neither are they listed one by one, nor do they matter. moto takes
    a while for as many, so 1,500 are there, and requests are counted."""
    save(run, 1, random.Random(1))
    mirrored(on_moto, run, "step-00000001")
    store = Store(on_moto)
    for count in range(1500):
        store.put(f"{('others', f'{RUN}/others', RUN)[count % 3]}/{count}", b"")
    store = Store(on_moto)
    assert checkpoints(store, RUN) == ["step-00000001"] and store.requests == 2


def test_what_is_pinned_stays_so_on_another_disk(place, run, tmp_path):
    save(run, 1, random.Random(1))
    save(run, 2, random.Random(2))
    pin = run / "step-00000001.pinned"
    pin.touch()
    (run / "step-note.pinned").touch()
    mirrored(place, run, "step-00000001", "step-00000002")
    there = restore(Store(place), RUN, tmp_path / "new")
    assert there.name == "step-00000002"
    assert sorted(path.name for path in there.parent.glob("*.pinned")) == [pin.name]


def test_a_new_uploader_waits_for_the_old_one(place, run):
    save(run, 1, random.Random(1))
    with at_work(place, run, failpoint="mirror.before_manifest:do=hang", upload=1) as old:
        with Mirror(place, run) as new:
            assert "still at work" in new.wait("warning")["warning"]
            new.say(upload="step-00000001")
            old.kill()
            new.wait("ready")
            new.wait("mirrored", "step-00000001")
            assert new.end() == []


def test_the_end_of_stdin_is_the_end_of_the_trainer(place, run):
    save(run, 1, random.Random(1))
    with at_work(place, run, "--timeout", "60", upload=1) as mirror:
        mirror.process.stdin.close()
        mirror.process.send_signal(15)  # a signal to all of a job isn't its own
        mirror.wait("mirrored")
        assert mirror.wait("ended")["behind"] == [] and mirror.exit() == 0


@pytest.mark.size
def test_memory_is_bounded(on_moto, run, tmp_path):
    """Half a GiB there and back, through a server of another process."""
    size = 512 * 2**20
    (run / "step-00000001").mkdir()
    with (run / "step-00000001" / "model.safetensors").open("wb") as file:
        block = random.Random(0).randbytes(2**20)
        for count in range(512):
            file.write(count.to_bytes(8, "big") + block[8:])
    entries = describe(run / "step-00000001", ["model.safetensors"])
    (run / "step-00000001" / files.MANIFEST).write_bytes(files.encode({"files": entries}))
    with at_work(on_moto, run, program=MEASURED, upload=1) as mirror:
        report = mirror.wait("mirrored", seconds=300)
        mirror.say(end=10)
        mirror.exit()
        up = int(mirror.process.stderr.read().split()[-1])
    program = "import sys; from pathlib import Path; "
    program += "from fabric_llm.mirror.fetch import restore; "
    program += "from fabric_llm.mirror.store import Store; "
    program += "restore(Store(sys.argv[1]), 'RUN', Path(sys.argv[2])); "
    done = python(program + PEAK, on_moto, tmp_path / "new")
    down = int(done.stderr.split()[-1])
    print(f"up {up} MiB, down {down} MiB, {report}")
    assert (tmp_path / "new" / "step-00000001" / "model.safetensors").stat().st_size == size
    assert up < 200 and down < 200
