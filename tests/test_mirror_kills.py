"""Law 18: a mirrored checkpoint is there if and only if its manifest is, wherever its uploader is
killed, and in the end no object is there that is in no manifest."""

import json
import os
import random
import re
import shutil
import subprocess
import sys

import pytest

pytest.importorskip("obstore")

from servers import (
    Bucket,
    moto_url,  # noqa: F401
    seaweed_url,  # noqa: F401
    use,
)
from uploads import RESTORE, ROOT, RUN, Mirror, mirrored, read, save

from fabric_llm.base import failpoints, files
from fabric_llm.checkpoint import retention
from fabric_llm.mirror import fetch
from fabric_llm.mirror.client import LEFT
from fabric_llm.mirror.fetch import checkpoints, restore
from fabric_llm.mirror.store import PART_BYTES, Store

pytestmark = pytest.mark.longer

POINTS = [name for name in failpoints.NAMES if name.startswith("mirror.")]
OF_UPLOADS = [name for name in POINTS if name not in ("mirror.fetching", "mirror.fetched")]
LARGE = 3 * PART_BYTES  # so that its parts are several


@pytest.fixture(params=["moto_url", pytest.param("seaweed_url", marks=pytest.mark.slow)])
def place(request, monkeypatch):
    """(address, bucket) of a server, at a prefix of this test's own."""
    url = request.getfixturevalue(request.param)
    use(url, monkeypatch)
    prefix = re.sub(r"\W", "-", request.node.name)
    bucket = Bucket(url, "kills").make()
    bucket.prefix = prefix
    return f"s3://kills/{prefix}", bucket


def assert_whole(bucket, contents):
    """Every checkpoint with a manifest is what was saved, seen with boto3. Returns their names."""
    there = bucket.names(f"{bucket.prefix}/")
    manifests = [name for name in there if name.endswith(f"/{files.MANIFEST}")]
    for name in manifests:
        folder = name.removesuffix(files.MANIFEST)
        content = contents[folder.rstrip("/").rpartition("/")[2]]
        for file, expected in content.items():
            assert bucket.content(folder + file) == expected, folder + file
    return sorted(name.split("/")[-2] for name in manifests)


def assert_nothing_else(bucket, contents):
    """No object is in no manifest, and no part is left."""
    expected = set()
    for name in assert_whole(bucket, contents):
        expected |= {f"{bucket.prefix}/{RUN}/{name}/{file}" for file in contents[name]}
    expected |= {f"{bucket.prefix}/{RUN}/{name}" for name in fetch.LOGS}
    there = bucket.names(f"{bucket.prefix}/")
    expected.add(f"{bucket.prefix}/.leases/owner-{RUN}")
    leases = {name for name in there if "/.leases/lease-" in name}
    assert there - leases == expected
    assert len(leases) == 1 and json.loads(bucket.content(*leases))["ended"] is True
    assert [name for name in bucket.parts() if name.startswith(f"{bucket.prefix}/")] == []


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "checkpoints" / RUN
    folder.mkdir(parents=True)
    return folder


@pytest.mark.parametrize("point", OF_UPLOADS)
def test_killed_anywhere_it_is_finished_by_the_next(place, run, tmp_path, point):
    place, bucket = place
    contents = {"step-00000001": save(run, 1, random.Random(1))}
    mirrored(place, run, "step-00000001")
    contents["step-00000002"] = save(run, 2, random.Random(2), large=LARGE)
    count = {"mirror.part": 6}.get(point, 1)  # inside of the large file
    with Mirror(place, run, failpoint=f"{point}:count={count}") as mirror:
        mirror.say(upload="step-00000002")
        mirror.say(remove=["step-00000001"])
        assert mirror.exit() == -9
    there = assert_whole(bucket, contents)
    assert "step-00000002" in there or there == ["step-00000001"]
    assert checkpoints(Store(place), RUN) == there
    # Whatever is there comes back.
    assert read(restore(Store(place), RUN, tmp_path / "between")) == contents[there[-1]]
    with Mirror(place, run) as mirror:
        assert mirror.wait("ready")["checkpoints"] == there
        mirror.say(upload="step-00000002")
        mirror.wait("mirrored", "step-00000002")
        mirror.say(remove=["step-00000001"])
        assert mirror.end() == []
    assert_nothing_else(bucket, contents)
    assert read(restore(Store(place), RUN, tmp_path / "new")) == contents["step-00000002"]


@pytest.mark.parametrize("point", ["mirror.fetching", "mirror.fetched"])
def test_killed_while_it_fetches(place, run, tmp_path, point):
    place, _ = place
    content = save(run, 1, random.Random(1), large=LARGE)
    mirrored(place, run, "step-00000001")
    new = tmp_path / "new"
    for count in (1, 3):
        done = subprocess.run(
            [sys.executable, "-c", RESTORE, place, str(new)],
            cwd=ROOT, env={**os.environ, "FABRIC_LLM_FAILPOINT": f"{point}:count={count}"},
        )  # fmt: skip
        if (point, count) == ("mirror.fetched", 3):  # it is reached once
            assert done.returncode == 0
        else:
            assert done.returncode == -9 and files.checkpoints(new) == []
    assert read(restore(Store(place), RUN, new)) == content
    retention.sweep(new)
    assert not list(new.glob(".*"))


@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_each_manifest_is_a_checkpoint(place, run, tmp_path, seed):
    """Random saves, removals, rewinds, kills at random points and of machines with their disks."""
    place, bucket = place
    draw = random.Random(seed)
    contents, step, here = {}, 0, run
    for life in range(6):
        point = f"{draw.choice(OF_UPLOADS)}:count={draw.randrange(1, 9)}"
        if life == 5:
            point = ""
        with Mirror(place, here, failpoint=point, lease_seconds=2) as mirror:
            try:
                ready = mirror.wait("ready")
                # As the trainer does: this disk holds what is there.
                (here / LEFT).unlink(missing_ok=True)
                behind = [path.name for path in files.checkpoints(here)]
                for name in behind:
                    if name not in ready["checkpoints"]:
                        mirror.say(upload=name)
                for _ in range(draw.randrange(1, 4)):
                    step += 1
                    name = f"step-{step:08d}"
                    large = draw.choice((0, 0, LARGE))
                    contents[name] = save(here, step, draw, large=large)
                    mirror.say(upload=name)
                    if draw.random() < 0.4 and (old := files.checkpoints(here)[:-2]):
                        mirror.say(remove=[path.name for path in old])
                        for path in old:
                            shutil.rmtree(path)
                    if draw.random() < 0.5:
                        mirror.wait("mirrored", name)
                if draw.random() < 0.2 and life < 5:
                    mirror.kill()
                else:
                    mirror.say(end=60)
                    mirror.wait("ended")
            except (AssertionError, BrokenPipeError):
                assert mirror.exit() == -9, mirror.reports
        there = assert_whole(bucket, contents)
        assert checkpoints(Store(place), RUN) == there
        # The machine is gone, and the next one has an empty disk.
        if draw.random() < 0.4 and life < 5:
            here = tmp_path / str(life) / RUN
            here.mkdir(parents=True)
            found = restore(Store(place), RUN, here)
            assert (None if found is None else found.name) == (there[-1:] or [None])[0]
            if found is not None:
                assert read(found) == contents[found.name]
                step = files.step_of(found)
            else:
                step = 0
    assert there and there[-1] == f"step-{step:08d}"
    assert_nothing_else(bucket, contents)
