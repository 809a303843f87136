"""benchmarks/mechanisms.py replaces functions and runs tests by their names: both must still be
there."""

import re
import subprocess
import sys

import pytest

from arguments import ROOT
from benchmarks.mechanisms import MECHANISMS, is_stale


def test_no_entry_is_stale():
    assert not [m.key for m in MECHANISMS if is_stale(m)]
    assert len({m.key for m in MECHANISMS}) == len(MECHANISMS)


@pytest.mark.longer
def test_each_entry_has_a_test():
    files = sorted({f"tests/{m.tests}" for m in MECHANISMS})
    words = [
        sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "", "-p", "no:cacheprovider",
        *files,
    ]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert listed.returncode == 0, listed.stdout
    names = [line.split("::", 1) for line in listed.stdout.splitlines() if "::" in line]

    def selects(expression, name):  # as pytest's -k does
        said = re.sub(
            r"[^\s()]+",
            lambda m: m[0] if m[0] in ("and", "or", "not") else str(m[0] in name),
            expression,
        )
        return eval(said)

    without = [
        m.name
        for m in MECHANISMS
        if not any(f == f"tests/{m.tests}" and selects(m.select, n) for f, n in names)
    ]
    assert not without
