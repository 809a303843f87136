"""The gate before step 1 finds a model that isn't the one transformers loads, and names where it
begins."""

import pytest
from ranks import built, run_ranks, toy_run


def train_with_damage(argv, tensor, damage):
    """train.py, with one tensor damaged on its way to the devices. Returns (exit code, what was
    printed)."""
    import contextlib
    import io

    import train
    from fabric_llm.model import weights

    fill, read = weights.fill, weights.Stored.read

    def damaged(self, unit):
        return {
            name: damage(value) if name == tensor else value
            for name, value in read(self, unit).items()
        }

    def fill_damaged(*given):
        weights.Stored.read = damaged
        fill(*given)
        for name, buffer in given[0].named_buffers():
            if name.endswith(tensor):
                buffer.data = damage(buffer)

    weights.fill = fill_damaged
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        try:
            train.main(argv)
        except SystemExit as stop:
            return stop.code, said.getvalue()
    return 0, said.getvalue()


def halve(value):
    return value * 0.5


def to_bfloat16(value):
    return value.bfloat16()


def swap_rows(value):
    return value.flip(0).contiguous()


def nothing(value):
    return value


def run(toys, folder, strategy, ranks, precision, tensor, damage, *flags):
    words = [*toy_run(toys, folder), "--max_step", 1]
    words += [
        "--strategy", strategy, "--devices", ranks, "--precision", precision, "--eval_iters", 0,
        *flags,
    ]
    return run_ranks(ranks, train_with_damage, [str(word) for word in words], tensor, damage)


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
    for rank, (code, said) in enumerate(
        run(toys, tmp_path, strategy, 2, precision, tensor, damage)
    ):
        assert code == 2
        if rank == 0:
            [sentence] = [line for line in said.splitlines() if line.startswith("train.py: error:")]
            assert f"the first module that differs: {module} (" in sentence


def test_rounded_rope_frequencies_are_found(toys, tmp_path):
    """What Fabric's own bf16-true does to them."""
    for precision in ("32-true", "bf16-true"):
        [(code, said)] = run(
            toys, tmp_path, "auto", 1, precision, "model.rotary_emb.inv_freq", to_bfloat16
        )
        assert code == 2 and "the buffer model.rotary_emb.inv_freq" in said
        assert "torch.bfloat16" in said


@pytest.mark.quick_cases(r"fsdp2-2-bf16-true")
@pytest.mark.every_eighth(1)
@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
@pytest.mark.parametrize(
    ("strategy", "ranks"), [("auto", 1), ("ddp", 2), ("fsdp", 2), ("fsdp2", 2)]
)
def test_a_good_start_passes_and_says_so(toys, tmp_path, strategy, ranks, precision):
    (code, said), *_ = run(toys, tmp_path, strategy, ranks, precision, "none", nothing)
    assert code == 0 and "Start verified: loss" in said


def test_it_can_be_switched_off(toys, tmp_path):
    [(code, said)] = run(
        toys, tmp_path, "auto", 1, "32-true", CASES[0][0], halve, "--verify_start", "false"
    )
    assert code == 0 and "verified" not in said


@pytest.mark.quick_cases(r"fsdp-2")
@pytest.mark.parametrize(("strategy", "ranks"), [("fsdp", 2), ("fsdp2", 2)])
def test_the_reference_is_gone_before_the_model_on_the_devices_is_compared(
    toys, tmp_path, strategy, ranks
):
    """Host memory holds the weights once: the shards, or what they are made from."""
    words = [
        *toy_run(toys, tmp_path),
        "--strategy",
        strategy,
        "--devices",
        ranks,
        "--precision",
        "32-true",
    ]
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
