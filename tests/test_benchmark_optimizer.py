"""benchmarks/optimizer.py at toy size: every row is there, in each table. No test here looks at a clock."""

import torch

from benchmarks import optimizer


def test_the_page_has_every_row(tmp_path, capsys):
    threads = torch.get_num_threads()
    page = tmp_path / "page.md"
    flags = ["--sizes", "toy", "--threads", "1", "--rounds", "1", "--elements", "20000", "--markdown", str(page)]
    assert optimizer.main(flags) == 0
    torch.set_num_threads(threads)
    assert page.read_text() == capsys.readouterr().out
    times, accuracy = page.read_text().split("## ")[2:]
    for row in optimizer.ROWS:
        assert f"| {row.name} |" in times and f"| {row.name} |" in accuracy
    cells = [line.split(" | ") for line in accuracy.splitlines() if "±" in line and line.startswith("| ")]
    kept = {name.removeprefix("| "): float(part.split()[0]) for name, part, _ in cells}
    assert abs(kept["master"] - 1) < 1e-3 and abs(kept["torch fused, float32"] - 1) < 1e-3
    assert abs(kept["stochastic, kernel"] - 1) < 0.2 and kept["stochastic, kernel"] == kept["stochastic, plain PyTorch"]
    assert kept["nearest"] == kept["torch fused"] < 0.5
