"""benchmarks/mechanisms.py takes words out of the source: they must still stand there, each exactly once."""

from arguments import ROOT
from benchmarks.mechanisms import MECHANISMS


def test_no_entry_is_stale():
    stale = [m.name for m in MECHANISMS if (ROOT / m.file).read_text().count(m.old) != 1 or m.old == m.new]
    assert not stale
    assert not [m.name for m in MECHANISMS if not (ROOT / m.tests).is_file()]
