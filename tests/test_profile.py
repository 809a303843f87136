"""--profile: a trace of the steps that were asked for, of rank 0, and its largest costs; and
nothing else changes."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
from ranks import Job, metrics, toy_run

from fabric_llm.run.profile import Profile

STEPS = "--global_batch_size 4 --max_step 6 --eval_iters 1 --eval_step_interval 2 --run_name run"


def run(toys, output, ranks, *more):
    """(output of each rank) of a run that ends well."""
    strategy = ("--strategy", "fsdp" if ranks > 1 else "auto")
    job = Job(ranks, *toy_run(toys, output), *STEPS.split(), *more, *strategy)
    assert job.wait() == [0] * ranks, job.output
    return job.output


def traces(folder):
    return [path.name for path in (folder / "run" / "profile").iterdir()]


@pytest.mark.longer
@pytest.mark.parametrize("ranks", [1, 2])
def test_steps_are_traced_by_rank_0_alone(toys, tmp_path, ranks):
    run(toys, tmp_path / "plain", ranks)
    output = run(toys, tmp_path, ranks, "--profile", "2:3")
    assert traces(tmp_path) == ["steps-2-3.json"]
    trace = json.loads((tmp_path / "run" / "profile" / "steps-2-3.json").read_text())
    names = [event.get("name", "") for event in trace["traceEvents"]]
    assert sum("Optimizer.step" in name for name in names) == 2
    assert any("aten::" in name for name in names)
    begin = r"Profile of steps 2 to 3, .* s: \S+steps-2-3.json. Its largest costs:\n"
    [said] = re.findall(begin + r"((?:  .*\n)*)", output[0])
    costs = [float(line.split("%")[0]) for line in said.splitlines()]
    assert len(costs) == 5 and costs == sorted(costs, reverse=True) and costs[0] > 0
    assert all("Profile of" not in one for one in output[1:])
    assert metrics(tmp_path / "run") == metrics(tmp_path / "plain" / "run")


def test_the_costs_on_a_gpu_are_those_of_its_kernels():
    """torch gives their time to operations and named ranges as well."""
    times = {"mm": ("CPU", 6), "gemm": ("CUDA", 6), "copy": ("CUDA", 2), "step": ("CUDA", 9)}
    events = []
    for key, (kind, time) in times.items():
        one = {"key": key, "count": 1, "self_device_time_total": time}
        one["device_type"] = getattr(torch.autograd.DeviceType, kind)
        events.append(SimpleNamespace(**one, is_user_annotation=key == "step"))
    profile = Profile(1, 2, None, torch.device("cuda"))
    said = profile._costs(SimpleNamespace(key_averages=lambda: events))
    assert [line.split()[::5] for line in said] == [["75.0%", "gemm"], ["25.0%", "copy"]]


@pytest.mark.longer
def test_a_run_that_ends_first_writes_what_it_has(toys, tmp_path):
    run(toys, tmp_path, 1, "--profile", "5:900")
    assert traces(tmp_path) == ["steps-5-6.json"]


@pytest.mark.longer
def test_a_resumed_run_does_not_record_again(toys, tmp_path):
    """Neither from its arguments.yaml, nor where a restart loop repeats the command: those steps
    are done."""
    run(toys, tmp_path, 1, "--profile", "2:2")
    assert "profile" not in (tmp_path / "run" / "arguments.yaml").read_text()
    longer = "--resume true --max_step 8 --resume_override max_step".split()
    output = run(toys, tmp_path, 1, *longer, "--profile", "2:3")
    assert "Profile of" not in output[0]
    assert "Warning: --profile 2:3 has no effect: the run goes on after step 6." in output[0]
    assert traces(tmp_path) == ["steps-2-2.json"]


@pytest.mark.longer
def test_what_cannot_be_written_is_a_warning(toys, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "profile").write_text("a file")
    [said] = run(toys, tmp_path, 1, "--profile", "2:3")
    assert "Warning: the profile of steps 2 to 3 couldn't be written" in said
    assert metrics(tmp_path / "run", "step")[-1] == 6
