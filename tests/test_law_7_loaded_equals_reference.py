"""Law 7: after loading, every parameter and buffer equals the reference in transformers."""

import pytest
import torch
from ranks import built, run_ranks, toy_run
from transformers import AutoModelForCausalLM


def loaded(argv, world_size):
    """What a rank holds after set-up, gathered whole, and its buffers again after a forward
    pass."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    from fabric_llm.data.batches import Batches
    from fabric_llm.model.weights import PREFIX

    _, plan, model, _ = built(argv)
    state = get_model_state_dict(model.module, options=StateDictOptions(full_state_dict=True))
    state = {name.removeprefix(PREFIX): value.clone() for name, value in state.items()}

    def buffers():
        named = [(name.split("causal_lm.", 1)[1], b) for name, b in model.module.named_buffers()]
        return {name.replace("_fsdp_wrapped_module.", ""): b.clone() for name, b in named}

    before = buffers()
    [batch] = Batches(plan.data.dataset.train, 0, 2, 1).at(0)
    model(**batch)
    return state, before, buffers()


def assert_equal(found, expected):
    for name, value in found.items():
        assert value.dtype == expected[name].dtype and torch.equal(value, expected[name]), name


CASES = [("auto", 1, "auto"), ("ddp", 2, "auto")]
CASES += [("fsdp", 2, wrap) for wrap in ("auto", "none", "size:5000")]
CASES += [("fsdp2", 2, "auto"), ("fsdp2", 2, "size:5000"), ("fsdp2", 3, "none")]


@pytest.mark.quick_cases(r"(fsdp-2-size:5000|fsdp2-3-none|auto-1-auto)-gpt2-bf16-true")
@pytest.mark.every_eighth(7)
@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
@pytest.mark.parametrize("model", ["llama", "llama-tied", "gpt2"])
@pytest.mark.parametrize(("strategy", "ranks", "wrap"), CASES)
def test_parameters_and_buffers_equal_the_reference(
    toys, tmp_path, model, precision, strategy, ranks, wrap
):
    words = f"--strategy {strategy} --precision {precision} --auto_wrap_policy {wrap} --devices"
    argv = [*toy_run(toys, tmp_path, model=model), *words.split(), ranks]
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    reference = AutoModelForCausalLM.from_pretrained(toys / model, dtype=dtype)
    expected = reference.state_dict()
    expected_buffers = dict(reference.named_buffers())
    for state, *buffers in run_ranks(ranks, loaded, [str(word) for word in argv], ranks):
        assert state.keys() <= expected.keys()
        assert {name for name, _ in reference.named_parameters()} <= state.keys()
        assert_equal(state, expected)
        for found in buffers:
            assert found.keys() == expected_buffers.keys()
            assert_equal(found, expected_buffers)
