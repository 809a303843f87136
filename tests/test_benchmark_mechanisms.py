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
    words = "-m pytest --collect-only -q -p no:cacheprovider -m".split()
    command = [sys.executable, *words, "", *files]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert listed.returncode == 0, listed.stdout
    names = [line.split("::", 1) for line in listed.stdout.splitlines() if "::" in line]

    def selects(expression, name):  # as pytest's -k does
        def said(word):
            return word[0] if word[0] in ("and", "or", "not") else str(word[0] in name)

        return eval(re.sub(r"[^\s()]+", said, expression))

    for m in MECHANISMS:
        of_file = [name for file, name in names if file == f"tests/{m.tests}"]
        assert any(selects(m.select, name) for name in of_file), m.name
