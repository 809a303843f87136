"""Law 4: the checkpoint, read by plain transformers, gives the logits of the model in training."""

import pytest
import torch
from ranks import toy_run, train_ranks
from transformers import AutoModelForCausalLM

from fabric_llm.checkpoint.keep import checkpoint_at as find
from fabric_llm.checkpoint.trainer_state import read_probe
from fabric_llm.weights.export import export

# mean, as a part of the logits' deviation
DIFFERENCE = {"32-true": 1e-5, "bf16-true": 2e-2, "bf16-mixed": 2e-2}


@pytest.mark.quick_cases(r"\[(fsdp-32-true-full-llama-tied|fsdp2-bf16-true-sharded-gpt2)")
@pytest.mark.every_eighth(7)
@pytest.mark.parametrize("model", ["llama", "llama-tied", "gpt2"])
@pytest.mark.parametrize("kind", ["full", "sharded"])
@pytest.mark.parametrize(
    ("strategy", "precision"),
    [("ddp", "32-true"), ("fsdp", "32-true"), ("fsdp", "bf16-true"), ("fsdp", "bf16-mixed"), ("fsdp2", "32-true"),
     ("fsdp2", "bf16-true"), ("fsdp2", "bf16-mixed")],
)  # fmt: skip
def test_transformers_gives_the_logits_of_the_model_in_training(
    toys, tmp_path, model, kind, strategy, precision
):
    flags = "--run_name run --lr 1e-2 --micro_batch_size 4 --max_step 3 --eval_iters 0".split()
    flags += ["--strategy", strategy, "--state_dict_type", kind, "--precision", precision]
    train_ranks(2, *toy_run(toys, tmp_path, model=model), *flags)
    checkpoint = find(tmp_path / "run")
    folder = checkpoint
    if kind == "sharded":
        folder = tmp_path / "hf"
        export(checkpoint, folder)
    model_again = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert model_again.dtype == (torch.bfloat16 if precision == "bf16-true" else torch.float32)
    probe = read_probe(checkpoint)
    with torch.no_grad():
        logits = model_again(probe["input_ids"]).logits[0, probe["positions"]].float()
    difference = (logits - probe["logits"]).abs().mean() / probe["logits"].std()
    assert difference < DIFFERENCE[precision]
    untrained = AutoModelForCausalLM.from_pretrained(toys / model).eval()
    with torch.no_grad():
        before = untrained(probe["input_ids"]).logits[0, probe["positions"]].float()
    assert (before - probe["logits"]).abs().mean() / probe["logits"].std() > 0.1, (
        "training has changed the model"
    )
