"""--freeze and --train_only: what is frozen keeps every bit and has no gradient and no optimizer
state, under every strategy."""

import json

import pytest
import torch
from conftest import MIXTRAL_CONFIG, TOY_CONFIGS
from ranks import Job, metrics, planned, toy_run, train_ranks
from transformers import AutoModelForCausalLM, LlamaConfig

from fabric_llm.checkpoint import reading
from fabric_llm.model import freezing, strategy
from fabric_llm.model.flops import of_model
from fabric_llm.model.language_model import LanguageModel
from fabric_llm.model.loading import build_skeleton
from fabric_llm.model.tensor_files import Tensors
from fabric_llm.training.adamw import checkpoint_bytes
from fabric_llm.training.step import sample_weights
from fabric_llm.verify.inspect_run import verify_run

STEPS, HALF = 4, 2
CONFIGS = {
    **TOY_CONFIGS,
    "llama-tied": LlamaConfig(**{**TOY_CONFIGS["llama"].to_dict(), "tie_word_embeddings": True}),
    "mixtral": MIXTRAL_CONFIG,
}
EMBEDDINGS = {
    "llama": {"model.embed_tokens.weight", "lm_head.weight"},
    "llama-tied": {"model.embed_tokens.weight"},
    "gpt2": {"transformer.wte.weight"},
}


def skeleton(name):
    return build_skeleton(CONFIGS[name], torch.float32)


def flags(toys, output, model, *more):
    return (
        *toy_run(toys, output, model=model, data="ragged"),
        *(
            "--micro_batch_size", 2, "--global_batch_size", 8, "--max_step", STEPS,
            "--save_step_interval", HALF,
        ),
        *("--eval_iters", 0, "--lr", 1e-2, "--precision", "32-true", *more),
    )


def weights(folder):
    """Name in memory -> whole tensor, of a model or a checkpoint of either kind."""
    if (folder / "model.safetensors").is_file():
        return dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
    found = Tensors((folder / "weights").glob("*.safetensors"))
    return {name.removeprefix("causal_lm."): tensor for name, tensor in found.items()}


def with_state(checkpoint):
    """Names of the parameters that a checkpoint holds optimizer state of."""
    return {reading.parameter_of(key) for key in reading.optimizer_state(checkpoint)}


def steps_of(checkpoint):
    """Name -> the steps that the optimizer has counted of a parameter."""
    tensors = reading.optimizer_state(checkpoint)
    return {
        reading.parameter_of(key): int(t) for key, t in tensors.items() if key.endswith(".step")
    }


# ------------------------------------------------------------------------------- names


@pytest.mark.parametrize("name", EMBEDDINGS)
def test_embeddings_are_those_of_any_family(name):
    model = skeleton(name)
    everything = {n for n, _ in model.named_parameters()}
    assert freezing.frozen_names(model, "embeddings", None) == EMBEDDINGS[name]
    assert freezing.frozen_names(model, None, "embeddings") == everything - EMBEDDINGS[name]
    assert freezing.frozen_names(model, None, None) == set()


def test_patterns_choose_by_names():
    model = skeleton("llama")
    layer = {n for n, _ in model.named_parameters() if n.startswith("model.layers.0.")}
    assert len(layer) == 9 and freezing.frozen_names(model, "model.layers.0.*", None) == layer
    assert freezing.frozen_names(model, " model.layers.0.*, *.norm.* ,", None) == {
        *layer,
        "model.norm.weight",
    }
    assert freezing.frozen_names(model, "embeddings,*.norm.*", None) == EMBEDDINGS["llama"] | {
        "model.norm.weight"
    }
    experts = freezing.frozen_names(skeleton("mixtral"), "*.experts.*", None)
    assert experts and all(".experts." in name for name in experts)


@pytest.mark.parametrize("name", ["lm_head.weight", "model.embed_tokens.*", "embeddings"])
def test_a_tied_weight_is_one_under_both_names(name):
    model = skeleton("llama-tied")
    assert freezing.frozen_names(model, name, None) == {"model.embed_tokens.weight"}
    said = freezing.tied_both_ways(model, name, None)
    assert len(said) == (name != "embeddings") and all(
        "is frozen as well: it is tied" in line for line in said
    )
    assert freezing.tied_both_ways(skeleton("llama"), name, None) == []


@pytest.mark.parametrize(
    ("freeze", "train_only", "words"),
    [
        ("embeddings", "embeddings", "both given"),
        ("", None, "--freeze takes patterns"),
        (None, " , ", "--train_only takes patterns"),
        ("*", None, "--freeze * leaves nothing to train in LlamaForCausalLM"),
        ("model.*,lm_head.*", None, "leaves nothing to train"),
        (
            "model.layer.1.*",
            None,
            (
                "no parameter of LlamaForCausalLM has such a name; its last parameters are "
                "model.norm.weight"
            ),
        ),
        ("nothing.*", None, "its last parameters are model.norm.weight, lm_head.weight."),
        (None, "lm_haed.weight", "did you mean lm_head.weight?"),
        (None, "embedings", "did you mean embeddings?"),
        ("Model.norm.weight", None, "did you mean model.norm.weight?"),
    ],
)
def test_what_can_not_be_meant_is_one_sentence(freeze, train_only, words):
    with pytest.raises(ValueError) as error:
        freezing.check(freeze, train_only)
        freezing.frozen_names(skeleton("llama"), freeze, train_only)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_mistakes_end_the_command_before_training(toys, tmp_path, capsys):
    import train

    for more, words in (
        (("--freeze", "embeddings", "--train_only", "embeddings"), "both given"),
        (("--train_only", "model.nrom.weight"), "did you mean model.norm.weight?"),
    ):
        with pytest.raises(SystemExit) as ended:
            train.main([str(word) for word in flags(toys, tmp_path, "llama", *more)])
        assert ended.value.code == 2 and words in capsys.readouterr().err


# ------------------------------------------------------------------------------- what is counted


def test_only_what_trains_is_counted():
    model, frozen = skeleton("llama"), skeleton("llama")
    freezing.freeze(frozen, freezing.frozen_names(frozen, None, "embeddings"))
    of_embeddings = sum(p.numel() for n, p in model.named_parameters() if n in EMBEDDINGS["llama"])
    everything = sum(p.numel() for p in model.parameters())
    assert checkpoint_bytes(model.parameters(), "stochastic") == everything * 12
    assert checkpoint_bytes(frozen.parameters(), "stochastic") == everything * 4 + of_embeddings * 8
    head = frozen.lm_head.weight.numel()
    matrices = of_model(model).of_token / 6
    assert of_model(frozen).of_token == pytest.approx(6 * head + 4 * (matrices - head))
    real = torch.nn.Linear(3, 5)
    real.bias.requires_grad_(False)
    assert len(sample_weights(real.parameters())) == 15


def test_the_chunked_loss_makes_no_gradient_of_a_frozen_head(monkeypatch):
    torch.manual_seed(0)
    made, grad = [], torch.autograd.grad
    monkeypatch.setattr(
        torch.autograd,
        "grad",
        lambda *a, **k: made.append([t.shape for t in a[1]]) or grad(*a, **k),
    )
    ids = torch.randint(0, 131, (2, 16))
    for name, words, shapes in (
        ("llama", {"freeze": "embeddings"}, [(32, 32)]),
        ("llama", {"train_only": "lm_head.*"}, [(131, 32)]),
        ("gpt2", {"train_only": "embeddings"}, [(32, 32), (131, 32)]),
    ):
        gradients = []
        for chunked in (False, True):
            torch.manual_seed(1)
            causal_lm = type(skeleton(name))(CONFIGS[name]).eval()
            freezing.freeze(
                causal_lm,
                freezing.frozen_names(causal_lm, words.get("freeze"), words.get("train_only")),
            )
            made.clear()
            LanguageModel(causal_lm, chunked=chunked)(ids, ids).backward()
            gradients.append(
                {n: p.grad for n, p in causal_lm.named_parameters() if p.grad is not None}
            )
            assert [[tuple(s) for s in call] for call in made] == [shapes] * chunked
        plain, of_chunks = gradients
        assert plain.keys() == of_chunks.keys()
        for key, value in plain.items():
            torch.testing.assert_close(of_chunks[key], value)


def test_fsdp_gathers_apart_what_is_unlike_the_outermost_unit():
    for words, expected in (
        (("embeddings", None), {"causal_lm.model.norm"}),
        ((None, "embeddings"), {"causal_lm.model.norm"}),
        (("lm_head.*", None), {"causal_lm.model.embed_tokens", "causal_lm.model.norm"}),
        (("model.layers.0.*", None), set()),
        ((None, None), set()),
    ):
        causal_lm = skeleton("llama")
        freezing.freeze(causal_lm, freezing.frozen_names(causal_lm, *words))
        model = LanguageModel(causal_lm, chunked=True)
        units = strategy.modules_to_wrap(model, "auto")
        names = {module: name for name, module in model.named_modules()}
        apart = strategy._unlike_the_outermost(model, units) - model.keep_in_root
        assert {names[module] for module in apart} == expected, words


# ------------------------------------------------------------------------------- runs


@pytest.mark.quick_cases(r"fsdp2-2-gpt2")
@pytest.mark.every_eighth(2)
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # inside torch's compiler
@pytest.mark.parametrize(
    ("strategy_name", "ranks", "model", "words", "more"),
    [
        ("auto", 1, "llama-tied", ("--train_only", "embeddings"), ()),
        ("fsdp", 2, "llama", ("--train_only", "embeddings"), ("--activation_checkpointing", "full")),
        ("fsdp2", 2, "gpt2", ("--freeze", "embeddings"), ("--state_dict_type", "sharded")),
        pytest.param("ddp", 2, "gpt2", ("--train_only", "embeddings"), (), marks=pytest.mark.longer),
        pytest.param("fsdp", 2, "llama", ("--freeze", "*.mlp.*"), ("--loss", "full"), marks=pytest.mark.longer),
        pytest.param("fsdp", 2, "llama", ("--freeze", "embeddings"), (), marks=pytest.mark.longer),
        pytest.param("fsdp", 2, "gpt2", ("--freeze", "*.bias"), (), marks=pytest.mark.longer),
        pytest.param("fsdp", 2, "mixtral", ("--train_only", "*.mlp.*"), (), marks=pytest.mark.longer),
        pytest.param("fsdp", 2, "llama", ("--train_only", "lm_head.*"), (), marks=pytest.mark.longer),
        pytest.param("fsdp2", 2, "llama", ("--train_only", "lm_head.*"), (), marks=pytest.mark.longer),
        pytest.param("fsdp2", 2, "llama-tied", ("--train_only", "embeddings"), (), marks=pytest.mark.longer),
        pytest.param("fsdp2", 2, "mixtral", ("--freeze", "*.mlp.*"), (), marks=pytest.mark.longer),
        pytest.param("auto", 1, "llama", ("--freeze", "model.layers.0.*"), ("--compile", "true"), marks=pytest.mark.longer),
        pytest.param("auto", 1, "llama", ("--train_only", "*norm*"), ("--precision", "bf16-true"), marks=pytest.mark.longer),
        pytest.param("fsdp", 2, "llama", ("--train_only", "embeddings"), ("--precision", "bf16-true", "--bf16_updates", "master"), marks=pytest.mark.longer),
        pytest.param("fsdp2", 2, "llama", ("--train_only", "embeddings"), ("--precision", "bf16-mixed"), marks=pytest.mark.longer),
    ],
)  # fmt: skip
def test_what_is_frozen_keeps_every_bit_and_a_run_goes_on_to_the_same(
    toys, tmp_path, strategy_name, ranks, model, words, more
):
    """One run, its second half again from its first, and the files of both."""
    run = flags(
        toys, tmp_path, model, "--strategy", strategy_name, *words, *more, "--run_name", "run"
    )
    job = Job(ranks, *run)
    assert job.wait(240) == [0] * ranks, job.output
    given = dict(zip(words[::2], words[1::2]))
    frozen = freezing.frozen_names(
        skeleton(model), given.get("--freeze"), given.get("--train_only")
    )
    everything = {name for name, _ in skeleton(model).named_parameters()}
    assert "of which are trained" in job.output[0] and "Start verified" in job.output[0]
    last = tmp_path / "run" / f"step-{STEPS:08d}"
    before, after = weights(toys / model), weights(last)
    assert before.keys() == after.keys() == everything
    for name, value in after.items():
        assert torch.equal(before[name].to(value.dtype), value) == (name in frozen), name
    assert with_state(last) == everything - frozen
    assert set(metrics(tmp_path / "run", "updated_fraction")) != {0.0}
    again = Job(
        ranks, *run, "--resume", "true", "--checkpoint", tmp_path / "run" / f"step-{HALF:08d}"
    )
    assert again.wait(240) == [0] * ranks, again.output
    for name, value in weights(last).items():
        assert torch.equal(value, after[name]), name
    assert len(set(metrics(tmp_path / "run", "grad_norm"))) == STEPS
    assert verify_run(tmp_path / "run", exports=ranks == 1).findings == []


@pytest.mark.longer
def test_a_frozen_run_goes_on_on_other_ranks_and_strategies(toys, tmp_path):
    words = (
        "--train_only", "embeddings,*.norm.*", "--run_name", "run", "--state_dict_type", "sharded",
    )
    train_ranks(2, *flags(toys, tmp_path, "llama", "--strategy", "fsdp", *words))
    losses, last = metrics(tmp_path / "run"), weights(tmp_path / "run" / f"step-{STEPS:08d}")
    half = tmp_path / "run" / f"step-{HALF:08d}"
    for number, (ranks, name) in enumerate(((1, "auto"), (2, "fsdp2"), (2, "ddp"))):
        there = (
            *words,
            "--resume",
            "true",
            "--checkpoint",
            half,
            "--run_name",
            f"branch-{number}",
            "--strategy",
            name,
        )
        train_ranks(ranks, *flags(toys, tmp_path, "llama", *there))
        assert metrics(tmp_path / f"branch-{number}") == pytest.approx(losses, rel=1e-5)
        for key, value in weights(tmp_path / f"branch-{number}" / f"step-{STEPS:08d}").items():
            torch.testing.assert_close(value, last[key], rtol=1e-3, atol=1e-5)


@pytest.mark.longer
@pytest.mark.parametrize(
    ("strategy_name", "ranks"),
    [
        ("auto", 1),
        *(pytest.param(name, 2, marks=pytest.mark.longer) for name in ("ddp", "fsdp", "fsdp2")),
    ],
)
def test_what_trains_changes_on_purpose_only(toys, tmp_path, strategy_name, ranks):
    """What begins to train has the moments of a first step; what goes on has its own."""
    run = flags(toys, tmp_path, "gpt2", "--run_name", "run", "--strategy", strategy_name)
    job = Job(ranks, *run, "--freeze", "transformer.h.0.*")
    assert job.wait() == [0] * ranks, job.output
    half = tmp_path / "run" / f"step-{HALF:08d}"
    resumed = (*run, "--resume", "true", "--checkpoint", half)
    job = Job(ranks, *resumed)
    assert job.wait()[0] == 2, job.output
    assert (
        "freeze transformer.h.0.*, not None" in job.output[0]
        and "--resume_override freeze" in job.output[0]
    )
    other = (
        "--train_only", "transformer.h.0.*,transformer.wpe.*",
        "--resume_override", "freeze,train_only",
    )
    job = Job(ranks, *resumed, *other)
    assert job.wait() == [0] * ranks, job.output
    assert "freeze: None from here on, transformer.h.0.* before." in job.output[0]
    steps = steps_of(tmp_path / "run" / f"step-{STEPS:08d}")
    assert steps.pop("transformer.wpe.weight") == STEPS
    assert len(steps) == 12 and set(steps.values()) == {STEPS - HALF}, (
        "the layer's, from its first step on"
    )
    assert verify_run(tmp_path / "run", exports=False).findings == []
    job = Job(
        ranks,
        *run,
        *other[:2],
        "--resume",
        "true",
        "--max_step",
        STEPS + 1,
        "--resume_override",
        "max_step",
    )
    assert job.wait() == [0] * ranks, "a restart goes on without naming it again"


@pytest.mark.parametrize(
    ("strategy_name", "ranks"), [("auto", 1), pytest.param("fsdp2", 2, marks=pytest.mark.longer)]
)
def test_all_that_trained_may_be_frozen_by_a_resume(toys, tmp_path, strategy_name, ranks):
    run = flags(toys, tmp_path, "llama", "--run_name", "run", "--strategy", strategy_name)
    job = Job(ranks, *run, "--train_only", "*.layers.1.*")
    assert job.wait() == [0] * ranks, job.output
    half, last = (tmp_path / "run" / f"step-{step:08d}" for step in (HALF, STEPS))
    other = ("--freeze", "*.layers.1.*", "--resume_override", "freeze,train_only")
    before = weights(half)
    job = Job(ranks, *run, "--resume", "true", "--checkpoint", half, *other)
    assert job.wait() == [0] * ranks, job.output
    for name, value in weights(last).items():
        assert torch.equal(value, before[name]) == (".layers.1." in name), name
    assert set(steps_of(last).values()) == {STEPS - HALF}


def test_the_order_of_words_does_not_matter(toys, tmp_path):
    job = Job(
        1, *flags(toys, tmp_path, "llama", "--freeze", "embeddings,*.norm.*", "--run_name", "run")
    )
    assert job.wait() == [0], job.output
    more = (
        "--run_name", "run", "--resume", "true", "--max_step", STEPS + 1,
        "--resume_override", "max_step",
    )
    planned(flags(toys, tmp_path, "llama", "--freeze", " *.norm.*,embeddings", *more))
    file = tmp_path / "run" / f"step-{STEPS:08d}" / "trainer" / "progress.json"
    assert json.loads(file.read_text())["schedule"]["freeze"] == "*.norm.*,embeddings"
    with pytest.raises(ValueError, match="freeze .*, not None"):
        planned(flags(toys, tmp_path, "llama", *more))
