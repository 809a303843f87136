"""--freeze and --train_only: what is frozen keeps every bit and has no gradient and no optimizer
state, under every strategy."""

import json

import pytest
import torch
from conftest import MIXTRAL_CONFIG, TOY_CONFIGS, changed_config, ended, step
from ranks import Job, metrics, planned, toy_run, train_ranks
from transformers import AutoModelForCausalLM

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
    "llama-tied": changed_config("llama", tie_word_embeddings=True),
    "mixtral": MIXTRAL_CONFIG,
}
EMBEDDINGS = {
    "llama": {"model.embed_tokens.weight", "lm_head.weight"},
    "llama-tied": {"model.embed_tokens.weight"},
    "gpt2": {"transformer.wte.weight"},
}


def skeleton(name):
    return build_skeleton(CONFIGS[name], torch.float32)


def names_in(model):
    return {name for name, _ in model.named_parameters()}


SIZES = (
    f"--micro_batch_size 2 --global_batch_size 8 --max_step {STEPS} --save_step_interval {HALF} "
    "--eval_iters 0 --lr 1e-2 --precision 32-true --run_name run"
)


def flags(toys, output, model, *more):
    return (*toy_run(toys, output, model=model, data="ragged"), *SIZES.split(), *more)


def train(ranks, *words):
    """What rank 0 said."""
    job = Job(ranks, *words)
    assert job.wait(240) == [0] * ranks, job.output
    return job.output[0]


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
    counts = [key for key in tensors if key.endswith(".step")]
    return {reading.parameter_of(key): int(tensors[key]) for key in counts}


# ------------------------------------------------------------------------------- names


@pytest.mark.parametrize("name", EMBEDDINGS)
def test_embeddings_are_those_of_any_family(name):
    model = skeleton(name)
    assert freezing.frozen_names(model, "embeddings", None) == EMBEDDINGS[name]
    others = names_in(model) - EMBEDDINGS[name]
    assert freezing.frozen_names(model, None, "embeddings") == others
    assert freezing.frozen_names(model, None, None) == set()


def test_patterns_choose_by_names():
    model, norm = skeleton("llama"), {"model.norm.weight"}
    layer = {name for name in names_in(model) if name.startswith("model.layers.0.")}
    assert len(layer) == 9
    for pattern, expected in (
        ("model.layers.0.*", layer),
        (" model.layers.0.*, *.norm.* ,", layer | norm),
        ("embeddings,*.norm.*", EMBEDDINGS["llama"] | norm),
    ):
        assert freezing.frozen_names(model, pattern, None) == expected
    experts = freezing.frozen_names(skeleton("mixtral"), "*.experts.*", None)
    assert experts and all(".experts." in name for name in experts)


@pytest.mark.parametrize("name", ["lm_head.weight", "model.embed_tokens.*", "embeddings"])
def test_a_tied_weight_is_one_under_both_names(name):
    model = skeleton("llama-tied")
    assert freezing.frozen_names(model, name, None) == {"model.embed_tokens.weight"}
    said = freezing.tied_both_ways(model, name, None)
    assert len(said) == (name != "embeddings")
    assert all("is frozen as well: it is tied" in line for line in said)
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
            "nothing.like.it",
            None,
            "no parameter of LlamaForCausalLM has such a name; its last parameters are "
            "model.norm.weight, lm_head.weight.",
        ),
        ("model.layer.1.*", None, "did you mean 'model.layers.1.*'?"),
        (None, "lm-head", "did you mean '*lm_head*'?"),
        ("layers.0", None, "did you mean '*layers.0*'?"),
        ("*.q_porj.*", None, "did you mean '*.q_proj.*'?"),
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
        assert ended(train.main, *flags(toys, tmp_path, "llama", *more)) == 2
        assert words in capsys.readouterr().err


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


@pytest.mark.parametrize(
    ("name", "chosen", "shapes"),
    [
        ("llama", ("embeddings", None), [(32, 32)]),
        ("llama", (None, "lm_head.*"), [(131, 32)]),
        ("gpt2", (None, "embeddings"), [(32, 32), (131, 32)]),
    ],
)
def test_the_chunked_loss_makes_no_gradient_of_a_frozen_head(monkeypatch, name, chosen, shapes):
    made, grad = [], torch.autograd.grad

    def counted(outputs, inputs, *more, **how):
        made.append([tuple(tensor.shape) for tensor in inputs])
        return grad(outputs, inputs, *more, **how)

    monkeypatch.setattr(torch.autograd, "grad", counted)
    ids, gradients = torch.arange(32).view(2, 16), []
    for chunked in (False, True):
        torch.manual_seed(1)
        causal_lm = type(skeleton(name))(CONFIGS[name]).eval()
        freezing.freeze(causal_lm, freezing.frozen_names(causal_lm, *chosen))
        made.clear()
        LanguageModel(causal_lm, chunked=chunked)(ids, ids).backward()
        parameters = dict(causal_lm.named_parameters())
        gradients.append({n: p.grad for n, p in parameters.items() if p.grad is not None})
        assert made == [shapes] * chunked
    plain, of_chunks = gradients
    assert plain.keys() == of_chunks.keys()
    for key, value in plain.items():
        torch.testing.assert_close(of_chunks[key], value)


@pytest.mark.parametrize(
    ("freeze", "train_only", "expected"),
    [
        ("embeddings", None, {"model.norm"}),
        (None, "embeddings", {"model.norm"}),
        ("lm_head.*", None, {"model.embed_tokens", "model.norm"}),
        ("model.layers.0.*", None, set()),
        (None, None, set()),
    ],
)
def test_fsdp_gathers_apart_what_is_unlike_the_outermost_unit(freeze, train_only, expected):
    causal_lm = skeleton("llama")
    freezing.freeze(causal_lm, freezing.frozen_names(causal_lm, freeze, train_only))
    model = LanguageModel(causal_lm, chunked=True)
    units = strategy.modules_to_wrap(model, "auto")
    names = {module: name for name, module in causal_lm.named_modules()}
    apart = strategy._unlike_the_outermost(model, units) - model.keep_in_root
    assert {names[module] for module in apart} == expected


# ------------------------------------------------------------------------------- runs


@pytest.mark.quick_cases(r"fsdp2-2-gpt2")
@pytest.mark.every_eighth(2)
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # inside torch's compiler
@pytest.mark.parametrize(
    ("strategy_name", "ranks", "model", "words", "more"),
    [
        ("auto", 1, "llama-tied", "--train_only embeddings", ""),
        ("fsdp", 2, "llama", "--train_only embeddings", "--activation_checkpointing full"),
        ("fsdp2", 2, "gpt2", "--freeze embeddings", "--state_dict_type sharded"),
        ("ddp", 2, "gpt2", "--train_only embeddings", ""),
        ("fsdp", 2, "llama", "--freeze *.mlp.*", "--loss full"),
        ("fsdp", 2, "llama", "--freeze embeddings", ""),
        ("fsdp", 2, "gpt2", "--freeze *.bias", ""),
        ("fsdp", 2, "mixtral", "--train_only *.mlp.*", ""),
        ("fsdp", 2, "llama", "--train_only lm_head.*", ""),
        ("fsdp2", 2, "llama", "--train_only lm_head.*", ""),
        ("fsdp2", 2, "llama-tied", "--train_only embeddings", ""),
        ("fsdp2", 2, "mixtral", "--freeze *.mlp.*", ""),
        ("auto", 1, "llama", "--freeze model.layers.0.*", "--compile true"),
        ("auto", 1, "llama", "--train_only *norm*", "--precision bf16-true"),
        (
            "fsdp", 2, "llama", "--train_only embeddings",
            "--precision bf16-true --bf16_updates master",
        ),
        ("fsdp2", 2, "llama", "--train_only embeddings", "--precision bf16-mixed"),
    ],
)
def test_what_is_frozen_keeps_every_bit_and_a_run_goes_on_to_the_same(
    toys, tmp_path, strategy_name, ranks, model, words, more
):
    """One run, its second half again from its first, and the files of both."""
    flag, pattern = words.split()
    how = ("--strategy", strategy_name, flag, pattern, *more.split())
    run, folder = flags(toys, tmp_path, model, *how), tmp_path / "run"
    said = train(ranks, *run)
    chosen = (pattern, None) if flag == "--freeze" else (None, pattern)
    frozen, everything = freezing.frozen_names(skeleton(model), *chosen), names_in(skeleton(model))
    assert "of which are trained" in said and "Start verified" in said
    last = step(folder, STEPS)
    before, after = weights(toys / model), weights(last)
    assert before.keys() == after.keys() == everything
    for name, value in after.items():
        assert torch.equal(before[name].to(value.dtype), value) == (name in frozen), name
    assert with_state(last) == everything - frozen
    assert set(metrics(folder, "updated_fraction")) != {0.0}
    train(ranks, *run, "--resume", "true", "--checkpoint", step(folder, HALF))
    for name, value in weights(last).items():
        assert torch.equal(value, after[name]), name
    assert len(set(metrics(folder, "grad_norm"))) == STEPS
    assert verify_run(folder, exports=ranks == 1).findings == []


@pytest.mark.longer
def test_a_frozen_run_goes_on_on_other_ranks_and_strategies(toys, tmp_path):
    words = ("--train_only", "embeddings,*.norm.*", "--state_dict_type", "sharded", "--strategy")
    run = flags(toys, tmp_path, "llama", *words)
    train_ranks(2, *run, "fsdp")
    losses, last = metrics(tmp_path / "run"), weights(step(tmp_path / "run", STEPS))
    from_half = ("--resume", "true", "--checkpoint", step(tmp_path / "run", HALF))
    for ranks, name in ((1, "auto"), (2, "fsdp2"), (2, "ddp")):
        train_ranks(ranks, *run, name, *from_half, "--run_name", name)
        assert metrics(tmp_path / name) == pytest.approx(losses, rel=1e-5)
        for key, value in weights(step(tmp_path / name, STEPS)).items():
            torch.testing.assert_close(value, last[key], rtol=1e-3, atol=1e-5)


@pytest.mark.longer
@pytest.mark.parametrize(
    ("strategy_name", "ranks"), [("auto", 1), ("ddp", 2), ("fsdp", 2), ("fsdp2", 2)]
)
def test_what_trains_changes_on_purpose_only(toys, tmp_path, strategy_name, ranks):
    """What begins to train has the moments of a first step; what goes on has its own."""
    run = flags(toys, tmp_path, "gpt2", "--strategy", strategy_name)
    train(ranks, *run, "--freeze", "transformer.h.0.*")
    run += ("--resume", "true")
    from_half = ("--checkpoint", step(tmp_path / "run", HALF))
    job = Job(ranks, *run, *from_half)
    assert job.wait()[0] == 2, job.output
    for words in ("freeze transformer.h.0.*, not None", "--resume_override freeze"):
        assert words in job.output[0]
    run += ("--train_only", "transformer.h.0.*,transformer.wpe.*", "--resume_override")
    said = train(ranks, *run, "freeze,train_only", *from_half)
    assert "freeze: None from here on, transformer.h.0.* before." in said
    steps = steps_of(step(tmp_path / "run", STEPS))
    assert steps.pop("transformer.wpe.weight") == STEPS
    of_layer = {STEPS - HALF}  # from its first step on
    assert len(steps) == 12 and set(steps.values()) == of_layer
    assert verify_run(tmp_path / "run", exports=False).findings == []
    # A restart goes on without naming it again.
    train(ranks, *run, "max_step", "--max_step", STEPS + 1)


@pytest.mark.parametrize(
    ("strategy_name", "ranks"), [("auto", 1), pytest.param("fsdp2", 2, marks=pytest.mark.longer)]
)
def test_all_that_trained_may_be_frozen_by_a_resume(toys, tmp_path, strategy_name, ranks):
    run = flags(toys, tmp_path, "llama", "--strategy", strategy_name)
    train(ranks, *run, "--train_only", "*.layers.1.*")
    half, last = (step(tmp_path / "run", number) for number in (HALF, STEPS))
    before = weights(half)
    other = ("--freeze", "*.layers.1.*", "--resume_override", "freeze,train_only")
    train(ranks, *run, "--resume", "true", "--checkpoint", half, *other)
    for name, value in weights(last).items():
        assert torch.equal(value, before[name]) == (".layers.1." in name), name
    assert set(steps_of(last).values()) == {STEPS - HALF}


def test_the_order_of_words_does_not_matter(toys, tmp_path):
    run = flags(toys, tmp_path, "llama")
    train(1, *run, "--freeze", "embeddings,*.norm.*")
    run += ("--resume", "true", "--max_step", STEPS + 1, "--resume_override", "max_step")
    planned((*run, "--freeze", " *.norm.*,embeddings"))
    file = step(tmp_path / "run", STEPS) / "trainer" / "progress.json"
    assert json.loads(file.read_text())["schedule"]["freeze"] == "*.norm.*,embeddings"
    with pytest.raises(ValueError, match="freeze .*, not None"):
        planned(run)
