"""The gate before step 1 finds a model that isn't the one transformers loads, and names where it
begins."""

import pytest
from ranks import built, run_ranks, toy_run
from test_law_13_fast_paths import train_with


def train_with_damage(argv, tensor, damage):
    """train.py, with one tensor damaged on its way to the devices. Returns (exit code, what was
    printed)."""
    from fabric_llm.model import sharded, weights

    fill, read = sharded.fill, weights.Stored.read

    def damaged(self, unit):
        found = read(self, unit)
        return {name: damage(one) if name == tensor else one for name, one in found.items()}

    def fill_damaged(*given):
        weights.Stored.read = damaged
        fill(*given)
        for name, buffer in given[0].named_buffers():
            if name.endswith(tensor):
                buffer.data = damage(buffer)

    def patch():
        sharded.fill = fill_damaged

    return train_with(patch, argv)


def halve(value):
    return value * 0.5


def to_bfloat16(value):
    return value.bfloat16()


def swap_rows(value):
    return value.flip(0).contiguous()


def run(toys, folder, strategy, ranks, precision, tensor, damage, *flags):
    words = f"--max_step 1 --eval_iters 0 --strategy {strategy} --devices {ranks} --precision"
    words = [*toy_run(toys, folder), *words.split(), precision, *flags]
    return run_ranks(ranks, train_with_damage, words, tensor, damage)


CASES = [
    ("model.layers.1.mlp.down_proj.weight", halve, "model.layers.1.mlp.down_proj"),
    ("model.layers.0.self_attn.q_proj.weight", swap_rows, "model.layers.0.self_attn.q_proj"),
    ("model.norm.weight", halve, "model.norm"),
    ("lm_head.weight", swap_rows, "lm_head"),
    ("model.embed_tokens.weight", halve, "model.embed_tokens"),
]


@pytest.mark.quick_cases(r"(embed_tokens|q_proj).*fsdp2")
@pytest.mark.every_eighth(6)
@pytest.mark.parametrize(
    ("strategy", "precision"), [("fsdp", "32-true"), ("fsdp", "bf16-mixed"), ("fsdp2", "bf16-true")]
)
@pytest.mark.parametrize(("tensor", "damage", "module"), CASES)
def test_the_first_module_that_differs_is_named(
    toys, tmp_path, strategy, precision, tensor, damage, module
):
    results = run(toys, tmp_path, strategy, 2, precision, tensor, damage)
    for rank, (code, said) in enumerate(results):
        assert code == 2
        if rank == 0:
            [sentence] = [line for line in said.splitlines() if line.startswith("train.py: error:")]
            assert f"the first module that differs: {module} (" in sentence


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_rounded_rope_frequencies_are_found(toys, tmp_path, precision):
    """What Fabric's own bf16-true does to them."""
    buffer = "model.rotary_emb.inv_freq"
    [(code, said)] = run(toys, tmp_path, "auto", 1, precision, buffer, to_bfloat16)
    assert code == 2 and f"the buffer {buffer}" in said and "torch.bfloat16" in said


def test_it_can_be_switched_off(toys, tmp_path):
    off = ("--verify_start", "false")
    [(code, said)] = run(toys, tmp_path, "auto", 1, "32-true", CASES[0][0], halve, *off)
    assert code == 0 and "verified" not in said


@pytest.mark.quick_cases(r"fsdp-2")
@pytest.mark.parametrize(("strategy", "ranks"), [("fsdp", 2), ("fsdp2", 2)])
def test_the_reference_is_gone_before_the_model_on_the_devices_is_compared(
    toys, tmp_path, strategy, ranks
):
    """Host memory holds the weights once: the shards, or what they are made from."""
    words = f"--strategy {strategy} --devices {ranks} --precision 32-true".split()
    words = [*toy_run(toys, tmp_path), *words]
    assert run_ranks(ranks, references_at_the_comparison, words) == [[None], []]


def references_at_the_comparison(argv):
    import gc
    import weakref

    from fabric_llm.run import reference

    loaded, seen, load, verify = [], [], reference.load_reference, reference.verify_start

    def load_reference(*given):
        model = load(*given)
        loaded.append(weakref.ref(model))
        return model

    def verify_start(*given):
        gc.collect()
        seen.extend(model() for model in loaded)
        verify(*given)

    reference.load_reference, reference.verify_start = load_reference, verify_start
    built(argv)
    return seen
