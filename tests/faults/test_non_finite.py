"""200 NaN and infinities in losses and gradients, on random ranks and micro-batches: none gets into
a parameter."""

import math
import random

import pytest
import torch
from ranks import Job, ended_with, metrics, status, toy_run
from safetensors.torch import load_file

from fabric_llm.checkpoint.keep import read_progress

pytestmark = pytest.mark.faults

INJECTED, STEPS = 100, 130  # for each of two strategies


def inject(plan):
    """plan: {(step from 0, rank, micro-batch): (where, value)}. Parameters are looked at after
    every step."""

    def install():
        from fabric_llm.model.language_model import LanguageModel
        from fabric_llm.training import step as steps
        from fabric_llm.training.guard import Guard

        forward, accept = LanguageModel.forward, Guard.accept
        seed_step, accumulate = steps.seed_step, steps.accumulate
        now = {"step": -1, "rank": 0, "micro_batch": 0, "taken": True, "weights": []}

        def seeded(seed, step, rank):
            now.update(step=step, rank=rank, micro_batch=0)
            seed_step(seed, step, rank)

        def faulty(self, *args, **kwargs):
            out = forward(self, *args, **kwargs)
            if not (self.training and torch.is_grad_enabled()):
                return out
            where, value = plan.get((now["step"], now["rank"], now["micro_batch"]), (None, 0.0))
            now["micro_batch"] += 1
            if where == "loss":
                return out * value
            if where == "gradient":
                out.register_hook(lambda gradient: gradient * value)
            return out

        def require_same(model):
            """As it was before the step that is over, if that was left out."""
            after = [local(p).clone() for p in model.parameters()]
            assert all(torch.isfinite(p).all() for p in after)
            assert now["taken"] or all(torch.equal(a, b) for a, b in zip(now["weights"], after))
            now["weights"] = after

        def watched(fabric, model, *args):
            require_same(model)
            return accumulate(fabric, model, *args)

        def accepted(self, *numbers):
            now["taken"] = accept(self, *numbers)
            assert now["taken"] != any(step == now["step"] for step, _, _ in plan)
            return now["taken"]

        LanguageModel.forward, Guard.accept = faulty, accepted
        steps.seed_step, steps.accumulate = seeded, watched

    return install


def local(parameter):
    parameter = parameter.detach()
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


@pytest.mark.parametrize(("strategy", "precision"), [("fsdp", "bf16-true"), ("fsdp2", "32-true")])
def test_none_of_them_gets_into_a_parameter_or_a_checkpoint(toys, tmp_path, strategy, precision):
    generator = random.Random(strategy)
    plan = {}
    for step in sorted(generator.sample(range(STEPS), INJECTED)):
        value = generator.choice([math.nan, math.inf, -math.inf])
        where = (step, generator.randrange(2), generator.randrange(2))
        plan[where] = generator.choice(["loss", "gradient"]), value
    flags = toy_run(toys, tmp_path, model="gpt2")
    flags += ("--strategy", strategy, "--precision", precision)
    flags += ("--max_step", STEPS, "--max_skipped_steps", STEPS)
    more = "--micro_batch_size 1 --global_batch_size 4 --eval_iters 0 --save_step_interval 20"
    job = Job(2, *flags, *more.split(), "--run_name", "run", before=inject(plan))
    assert job.wait(120) == [0, 0], job.output
    assert metrics(tmp_path / "run", "verdict") == ["skip"] * INJECTED
    for folder in (tmp_path / "run").glob("step-*"):
        for file in folder.rglob("*.safetensors"):
            assert all(torch.isfinite(tensor).all() for tensor in load_file(file).values()), file
        assert read_progress(folder)["progress"]["step"] > 0


def test_a_checkpoint_of_a_model_with_a_nan_is_refused(toys, tmp_path):
    """However it came there: the last good checkpoints stay the latest."""

    def spoil():
        from fabric_llm.run import save as saves

        save, calls = saves.save, []

        def spoiled(run, **kwargs):
            calls.append(1)
            if len(calls) == 3 and run.fabric.global_rank == 1:
                parameter = max(run.model.parameters(), key=lambda p: p.numel())
                parameter.data.view(-1)[0] = math.nan
            save(run, **kwargs)

        saves.save = spoiled

    flags = toy_run(toys, tmp_path, model="gpt2")
    more = "--strategy fsdp --state_dict_type sharded --save_step_interval 1 --max_step 6".split()
    job = ended_with([76, 76], *flags, *more, "--eval_iters", 0, "--run_name", "run", before=spoil)
    assert "NaN" in job.output[0]
    left = sorted(path.name for path in (tmp_path / "run").glob("*step-*"))
    assert left == ["step-00000001", "step-00000002"]
    said = status(tmp_path / "run")
    assert said["code"] == 76 and said["last_durable_step"] == 2 and not said["retryable"]
