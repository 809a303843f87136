"""benchmarks/optimizer.py at toy size: every row is there. No test here looks at a clock."""

import pytest
import torch

from benchmarks import optimizer


@pytest.mark.longer
def test_the_page_has_every_row(tmp_path, capsys):
    threads = torch.get_num_threads()
    page = tmp_path / "page.md"
    flags = ["--sizes", "toy", "--threads", "1", "--rounds", "1", "--markdown", str(page)]
    assert optimizer.main(flags) == 0
    torch.set_num_threads(threads)
    assert page.read_text() == capsys.readouterr().out
    for row in optimizer.ROWS:
        assert f"| {row.name} |" in page.read_text()
