"""Any causal model that transformers has starts with default flags, and is what transformers makes
of it."""

import time

import pytest
import torch
import transformers
from conftest import same_tensors
from families import COMMON, FAMILIES, Tried, table, toy_config, train, try_family, write_model
from packaging.version import Version
from ranks import Job, metrics, run_ranks
from test_law_7_loaded_equals_reference import loaded
from transformers import AutoConfig, AutoModelForCausalLM

from fabric_llm.model.attention import resolve_attention
from fabric_llm.model.capabilities import find_leak
from fabric_llm.model.loading import build_skeleton, open_weights
from fabric_llm.model.reference import load_reference

QUICK = ("gemma2", "gpt_oss", "mamba", "deepseek_v3")  # in each run of the tests
REFUSED = {  # (family, devices) that can't be, and what is said then
    ("xlstm", 1): "xLSTMForCausalLM as transformers",
    ("xlstm", 2): "xLSTMForCausalLM as transformers",
    ("zamba", 2): "ZambaMambaMixer holds parameters of torch.bfloat16 and torch.float32 itself",
}
if Version(transformers.__version__) >= Version("5.24"):  # a bias of each forget gate is float32
    REFUSED["kimi_linear", 2] = (
        "KimiLinearForgetGate holds parameters of torch.bfloat16 and torch.float32 itself"
    )


@pytest.fixture(scope="module")
def rows(request):
    """What the families gave, as a table where --families_table asks for one."""
    began, found = time.monotonic(), []
    yield found
    if (path := request.config.getoption("--families_table")) and found:
        path.write_text(table(found, time.monotonic() - began))


def words_of(model, data, folder, *more):
    places = ("--model_name", model, "--train_data_dir", data, "--output_dir", folder)
    return (*places, "--run_name", "run", *more)


def short(model, data, folder, *more):
    """The flags of two steps."""
    sizes = "--precision 32-true --global_batch_size 4 --eval_iters 0 --max_step 2"
    return words_of(model, data, folder, *sizes.split(), *more)


def write_config(family, folder):
    """A model directory without weights."""
    toy_config(family).save_pretrained(folder / family)
    return folder / family


def tensors_of(model):
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def loaded_by(ranks, strategy, model, data, folder):
    """What `loaded` of law 7 gives on each rank."""
    words = words_of(model, data, folder, "--strategy", strategy, "--devices", ranks)
    return run_ranks(ranks, loaded, [str(word) for word in words], ranks)


@pytest.mark.every_eighth(0)
@pytest.mark.families
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_trains_resumes_and_exports_on_one_device_and_two(
    tmp_path, packed_data, rows, family
):
    tried = Tried(family, devices={1: "nothing came of it", 2: "nothing came of it"})
    try:
        tried = try_family(family, tmp_path, packed_data)
    finally:
        rows.append(tried)
    for devices, said in tried.devices.items():
        assert said.startswith(REFUSED.get((family, devices), "yes"))


@pytest.mark.longer
@pytest.mark.parametrize("family", QUICK)
def test_families_that_once_were_refused_start_with_defaults(tmp_path, packed_data, family):
    tried = try_family(family, tmp_path, packed_data, devices=(2,))
    assert tried.devices == {2: "yes"}
    assert tried.attention == ("packed" if family == "deepseek_v3" else "eager")
    assert (tried.documents == "apart") == (family in ("gemma2", "deepseek_v3"))


BUFFERS = {  # family -> buffers, with their dtypes in a bfloat16 model
    "gemma3_text": {
        "model.embed_tokens.embed_scale": torch.bfloat16,
        "model.rotary_emb.full_attention_inv_freq": torch.float32,
    },
    "deepseek_v3": {"model.layers.1.mlp.gate.e_score_correction_bias": torch.float32},
}


@pytest.mark.longer
@pytest.mark.parametrize("family", BUFFERS)
def test_buffers_have_the_dtypes_that_the_reference_gives_them(tmp_path, packed_data, family):
    """Under each strategy, before and after FSDP's first forward pass, which casts what it is told
    to."""
    model = write_model(family, tmp_path / family)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    expected = dict(reference.named_buffers())
    assert all(expected[name].dtype == dtype for name, dtype in BUFFERS[family].items())
    for strategy, ranks in (("auto", 1), ("ddp", 2), ("fsdp", 2), ("fsdp2", 2)):
        for _, *found in loaded_by(ranks, strategy, model, packed_data, tmp_path):
            for buffers in found:
                assert same_tensors(buffers, expected), strategy


@pytest.mark.longer
@pytest.mark.parametrize("family", ["gemma3_text", "deepseek_v3"])
@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_random_weights_start_under_fsdp_and_go_on(tmp_path, packed_data, family, kind):
    """Saved, resumed and gone back in, the model has the buffers that the reference has each
    time."""
    sizes = f"--state_dict_type {kind} --global_batch_size 4 --max_step 2 --save_step_interval 1"
    model, more = write_config(family, tmp_path), (*sizes.split(), "--eval_iters", 1)
    flags = words_of(model, packed_data, tmp_path, *more)
    assert train(2, *flags) is None
    losses = metrics(tmp_path / "run")
    go_on = ("--resume", "true", "--checkpoint", tmp_path / "run" / "step-00000001")
    assert train(2, *flags, *go_on) is None
    assert metrics(tmp_path / "run") == losses


@pytest.mark.quick_cases(r"fsdp2-ernie")
@pytest.mark.parametrize("family", ["ernie4_5_moe", "hunyuan_v1_moe"])
@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_parameters_that_stay_float32_in_a_bfloat16_model(tmp_path, packed_data, family, strategy):
    """FSDP flattens parameters of one dtype only; the router's are gathered alone, and compute in
    float32."""
    model = write_model(family, tmp_path / family)
    expected = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).state_dict()
    assert torch.float32 in {value.dtype for value in expected.values()}
    for state, *_ in loaded_by(2, strategy, model, packed_data, tmp_path):
        assert same_tensors(state, {name: expected[name] for name in state})


@pytest.mark.parametrize("family", ["gemma3_text", "deepseek_v3", "ernie4_5_moe"])
def test_random_weights_have_the_dtypes_of_those_that_are_read(tmp_path, family):
    model, config = write_model(family, tmp_path / "full"), toy_config(family)
    read = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    skeleton, other = (build_skeleton(config, torch.bfloat16) for _ in range(2))
    empty = str(write_config(family, tmp_path))
    drawn = load_reference(other, open_weights(empty, config, torch.bfloat16, seed=0))
    for model in (drawn, skeleton):
        dtypes = {name: tensor.dtype for name, tensor in tensors_of(model).items()}
        for name, tensor in tensors_of(read).items():
            assert dtypes[name] == tensor.dtype, name


@pytest.mark.parametrize("decoder", [False, True])
def test_a_model_that_sees_the_tokens_it_is_to_predict_is_refused(tmp_path, packed_data, decoder):
    """transformers counts BERT among its causal models: it is one where is_decoder says so."""
    sizes = {**COMMON, "is_decoder": decoder, "model_type": "bert", "architectures": None}
    AutoConfig.for_model(**sizes).save_pretrained(tmp_path / "bert")
    flags = short(tmp_path / "bert", packed_data, tmp_path, "--document_masking", "false")
    said = train(1, *flags)
    if decoder:
        assert said is None
    else:
        assert said.startswith("BertLMHeadModel, as '") and "isn't causal" in said


@pytest.mark.parametrize(("family", "key"), [("opt", "layerdrop"), ("bart", "decoder_layerdrop")])
def test_ranks_do_not_leave_out_layers_each_by_itself(tmp_path, packed_data, family, key):
    """One rank would wait for the other in another layer. Where both leave out as many, it would
    compute with the weights of a layer that it isn't in, without a word."""
    sizes = {"ffn_dim": 32, "decoder_ffn_dim": 32, "decoder_layers": 2, "word_embed_proj_dim": 16}
    sizes |= {**COMMON, "decoder_attention_heads": 2, "d_model": COMMON["hidden_size"]}
    AutoConfig.for_model(family, **{**sizes, key: 0.5}).save_pretrained(tmp_path / family)
    flags = short(tmp_path / family, packed_data, tmp_path / "out")
    assert "(0.5 as layerdrop in the configuration of" in train(2, *flags, "--hang_timeout", 10)
    assert train(1, *flags, "--document_masking", "false") is None


# ------------------------------------------------------------------------------- --attention


@pytest.mark.parametrize(("family", "attention"), [("llama", "sdpa"), ("gemma2", "eager")])
def test_auto_takes_sdpa_where_the_model_has_it(family, attention):
    assert resolve_attention(toy_config(family), "auto", "cpu") == attention


@pytest.mark.parametrize(
    ("family", "attention", "sentence"),
    [
        ("bloom", "sdpa", ": BloomForCausalLM has eager; auto takes the best."),
        ("mamba", "flex_attention", ": MambaForCausalLM has eager; auto takes the best."),
        ("llama", "flex_attention", " needs a GPU: on a CPU torch has no"),
        ("gpt2", "flash_attention_2", " needs a GPU and the package flash_attn"),
        ("gpt_oss", "flash_attention_2", ": GptOssForCausalLM has flex_attention and eager;"),
    ],
)
def test_an_attention_that_the_model_has_not_is_one_sentence(
    tmp_path, packed_data, family, attention, sentence
):
    model = write_config(family, tmp_path)
    said = train(1, *words_of(model, packed_data, tmp_path, "--attention", attention))
    assert said.startswith(f"--attention {attention}{sentence}")


# ------------------------------------------------------------------------------- --document_masking


@pytest.mark.parametrize("family", ["xglm", "openai-gpt", "lfm2", "jamba"])
def test_a_leak_is_found_however_small(family):
    """Of random weights at toy size, a logit changes by less than 0.001, which once was taken for
    rounding."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(toy_config(family), dtype=torch.float32)
    assert find_leak(model) is not None


@pytest.mark.parametrize("family", ["gemma2", "mixtral", "gpt_neo", "ctrl"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_no_leak(family, dtype):
    torch.manual_seed(0)
    leak = find_leak(AutoModelForCausalLM.from_config(toy_config(family), dtype=dtype))
    assert leak is None


def test_positions_that_go_on_are_a_leak(toys):
    """The document before can't be seen, but where this one stands depends on it."""
    gpt2 = AutoModelForCausalLM.from_pretrained(toys / "gpt2", dtype=torch.float32)
    assert find_leak(gpt2) is None
    embedding = gpt2.transformer.wpe.forward
    gpt2.transformer.wpe.forward = lambda ids: embedding(torch.arange(ids.shape[-1]).expand_as(ids))
    assert find_leak(gpt2) is not None


def test_auto_is_on_where_the_model_can(toys, tmp_path, packed_data):
    losses = []
    for masking in ("auto", "true", "false"):
        folder, more = tmp_path / masking, ("--document_masking", masking)
        assert train(1, *short(toys / "llama", packed_data, folder, *more)) is None
        losses.append(metrics(folder / "run"))
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.longer
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("family", ["mamba", "bloom"])
def test_auto_is_off_with_one_warning_where_it_can_not(tmp_path, packed_data, family, ranks):
    model, losses = write_model(family, tmp_path / family), []
    for masking in ("auto", "false"):
        folder, more = tmp_path / masking, ("--document_masking", masking)
        job = Job(ranks, *short(model, packed_data, folder, *more))
        assert not any(job.wait(120)), job.output[0]
        lines = [line for output in job.output for line in output.splitlines()]
        warned = [line for line in lines if "packed documents apart" in line]
        assert len(warned) == (masking == "auto")
        for line in warned:
            assert "logits change by up to " in line and "--document_masking is off" in line
        losses.append(metrics(folder / "run"))
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("family", "sentence"),
    [
        ("bloom", "BloomForCausalLM takes no positions, so packed documents can't be kept apart"),
        ("opt", "OPTForCausalLM doesn't keep packed documents apart with --attention sdpa"),
    ],
)
def test_true_stays_strict(tmp_path, packed_data, family, sentence):
    model = write_config(family, tmp_path)
    said = train(1, *short(model, packed_data, tmp_path, "--document_masking", "true"))
    assert said.startswith(sentence)


@pytest.mark.longer
@pytest.mark.parametrize(
    ("before", "family"),
    [("true", "llama"), ("false", "llama"), ("auto", "mamba"), ("auto", "llama")],
)
def test_a_resumed_run_keeps_what_it_had(tmp_path, packed_data, before, family):
    flags = short(write_model(family, tmp_path / family), packed_data, tmp_path)
    assert train(1, *flags, "--document_masking", before, "--save_step_interval", 1) is None
    losses = metrics(tmp_path / "run")
    flags += ("--resume", "true", "--checkpoint", tmp_path / "run" / "step-00000001")
    for more in ((), ("--document_masking", before)):  # auto, and as before
        assert train(1, *flags, *more) is None
        assert metrics(tmp_path / "run") == losses
    if family == "llama":
        other = "true" if before == "false" else "false"
        said = train(1, *flags, "--document_masking", other)
        assert f"To go on as it was: --document_masking {other == 'false'}." in said
        assert said.endswith("To change that on purpose: --resume_override document_masking.")
