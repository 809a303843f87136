"""What is installed is what was reviewed: the lock, the lowest versions, the image, the workflow."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ADVISORIES = tomllib.loads((ROOT / ".ci" / "advisories.toml").read_text())["advisory"]
DOCKERFILE = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
LOCK = ROOT / "requirements.lock"
TOOLS = ROOT / ".ci" / "tools.lock"  # of .ci/supply_chain
# What the lock is for, see its first line.
PLACE = {
    "python_version": "3.12",
    "python_full_version": "3.12.3",
    "sys_platform": "linux",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
    "platform_python_implementation": "CPython",
    "implementation_name": "cpython",
    "os_name": "posix",
}


def locked(path=LOCK):
    """{name: (version, number of hashes)} of a lock; any other line in it is an error."""
    found = {}
    text = re.sub(r"^ *#.*\n", "", path.read_text(), flags=re.M).replace("\\\n", " ")
    for line in filter(None, text.splitlines()):
        # What stands behind a semicolon says on which platforms.
        pinned, *hashes = re.sub(r";.*?(?=--hash)", "", line).split()
        name, version = pinned.split("==")
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", one) for one in hashes), line
        assert name not in found
        found[name] = (Version(version), len(hashes))
    return found


def declared(*extras):
    """The requirements of the package and of some of its extras."""
    lines = list(PROJECT["dependencies"])
    for extra in extras:
        lines += PROJECT["optional-dependencies"][extra]
    return [Requirement(line) for line in lines]


def base_image():
    """The version of torch in the Dockerfile's base image."""
    return Version(re.search(r"^FROM pytorch/pytorch:([\d.]+)-", DOCKERFILE, re.M)[1])


def test_the_lock_has_all_that_is_declared():
    found = locked()
    assert len(found) > 40
    for requirement in declared("mirror"):
        name = canonicalize_name(requirement.name)
        version = base_image() if name == "torch" else found[name][0]
        assert requirement.specifier.contains(version), f"{requirement}, but {version} is locked"
    # They are in the image, and other versions would break its torch.
    assert not [name for name in found if re.match(r"(torch|triton)$|nvidia-|cuda-", name)]
    assert f"torch {base_image()}," in LOCK.read_text().splitlines()[0]


@pytest.mark.parametrize("path", [LOCK, TOOLS], ids=lambda path: path.name)
def test_a_lock_has_hashes_and_names_no_machine_and_no_index(path):
    assert all(hashes > 0 for _, hashes in locked(path).values())
    lines = re.sub(r"^ +# .*\n", "", path.read_text(), flags=re.M)
    assert not re.search(r"https?:|file:|--index|--find-links|/opt/|/tmp/|@ ", lines)


def test_what_is_locked_goes_together():
    """As far as the same versions are installed here, their own requirements say."""
    from importlib import metadata

    found, compared = locked(), 0
    for name, (version, _) in found.items():
        try:
            there = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        if Version(there.version) != version:
            continue
        for line in there.requires or ():
            needed = Requirement(line)
            other = canonicalize_name(needed.name)
            if needed.marker and not needed.marker.evaluate({**PLACE, "extra": ""}):
                continue
            if other == "torch":
                assert needed.specifier.contains(base_image()), f"{name} needs {line}"
                continue
            assert other in found, f"{name} needs {line}"
            assert needed.specifier.contains(found[other][0], prereleases=True), (name, line)
            compared += 1
    if compared == 0:
        pytest.skip("none of the locked versions is installed here")


def lowest(requirement):
    """The lowest version that is declared, and None where there is none."""
    versions = [Version(one.version) for one in requirement.specifier if one.operator == ">="]
    return max(versions, default=None)


def test_no_advisory_is_known_of_what_may_be_installed():
    """Neither of the lowest versions, with each extra, nor of those of the lock and the image."""
    versions = [(name, version) for name, (version, _) in locked().items()]
    versions.append(("torch", base_image()))
    for requirement in declared(*PROJECT["optional-dependencies"]):
        if (version := lowest(requirement)) is not None:
            versions.append((canonicalize_name(requirement.name), version))
    for one in ADVISORIES:
        assert re.fullmatch(r"GHSA(-[0-9a-z]{4}){3}|CVE-\d{4}-\d+|PYSEC-\d{4}-\d+", one["id"])
        affected = SpecifierSet(one["affected"])
        for name, version in versions:
            if name in one["packages"] and affected.contains(version, prereleases=True):
                assert one.get("accepted"), f"{name} {version} has {one['id']}"


def test_an_advisory_is_of_what_is_declared():
    names = {canonicalize_name(one.name) for one in declared(*PROJECT["optional-dependencies"])}
    for one in ADVISORIES:
        assert set(one["packages"]) <= names, one["id"]
    of_lightning = [one for one in ADVISORIES if "lightning" in one["packages"]]
    assert "GHSA-qqmf-gpg7-g8gw" in {one["id"] for one in of_lightning}


def test_the_image_is_built_of_the_lock_alone():
    installs = re.findall(r"pip install (.*)", DOCKERFILE)
    assert len(installs) == 2
    flags = re.findall(r"--?[a-z-]+(?: [^-\s]\S*)?", installs[0])
    assert {"--require-hashes", "--only-binary :all:", "-r requirements.lock"} <= set(flags)
    # The package itself, which fetches neither what it needs nor what builds it.
    assert {"--no-index", "--no-deps", "--no-build-isolation"} <= set(installs[1].split())
    assert "setuptools" in locked()
    assert re.search(r"^ARG DIGEST=sha256:[0-9a-f]{64}\nFROM \S+@\$\{DIGEST\}$", DOCKERFILE, re.M)


def test_a_release_runs_tools_of_a_lock():
    assert {"cyclonedx-bom", "pip-audit"} <= locked(TOOLS).keys()
    script = (ROOT / ".ci" / "supply_chain").read_text()
    [install] = re.findall(r"pip install (.*)", script)
    assert install == "--quiet --require-hashes --only-binary :all: -r .ci/tools.lock"


def test_workflows_name_actions_by_commit_and_may_write_nothing_unasked():
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        text = path.read_text()
        workflow = yaml.safe_load(text)
        assert workflow["permissions"] == {"contents": "read"}
        used = re.findall(r"uses: (.*)", text)
        by_commit = r"[\w-]+/[\w-]+@[0-9a-f]{40} # v[\d.]+"
        assert used and all(re.fullmatch(by_commit, one) for one in used)
        for job in workflow["jobs"].values():
            for command in [step["run"] for step in job["steps"] if "run" in step]:
                assert "${{" not in command, "what an event holds would become part of the command"


def test_the_policy_is_short_and_names_what_exists():
    policy = (ROOT / "SECURITY.md").read_text()
    assert len(policy.split()) <= 180
    for place in re.findall(r"\]\(([^)#:]+)", policy):
        assert (ROOT / place).exists(), place
