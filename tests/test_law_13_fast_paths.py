"""Law 13: a fast path is the plain path. Its loss and gradients are equal to rounding, or it is
refused."""

import contextlib
import io
import pickle
import re
import warnings
import weakref
from types import SimpleNamespace

import pytest
import torch
from conftest import documents
from families import COMMON as SIZES
from families import CONTEXT, FAMILIES, GPT_NAMES, VOCABULARY
from ranks import built, metrics, run_ranks, toy_run, train_ranks
from test_law_9_packed_documents import packed_batch
from test_law_10_bf16_learns import final_loss
from test_law_17_kernels import varlen
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from fabric_llm.checkpoint.keep import checkpoint_at as find
from fabric_llm.checkpoint.trainer_state import read_probe
from fabric_llm.data.batches import document_ends
from fabric_llm.model import capabilities, chunked_loss, gate, layers, offload, packed_attention
from fabric_llm.model.language_model import LanguageModel
from fabric_llm.model.weights import PREFIX
from fabric_llm.verify import __main__ as verify
from fabric_llm.weights.export import export

COMMON = {**SIZES, "head_dim": 8}
SLIDING = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
STRATEGIES = [("auto", 1), ("ddp", 2), ("fsdp", 2), ("fsdp2", 2)]
inside_the_compiler = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)
HEADS = {  # what a head can have between hidden states and logits
    "llama": {"tie_word_embeddings": False},
    "qwen2": {"tie_word_embeddings": True},
    "gpt2": {**GPT_NAMES, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0},
    "phi": {},  # a bias
    "gemma2": {**SLIDING, "final_logit_softcapping": 0.5},
    "cohere": {"logit_scale": 0.3},
    "granite": {"logits_scaling": 7.0},
    # a projection after the layers
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 16, "dropout": 0.0},
    "bert": {"is_decoder": True, "hidden_dropout_prob": 0.0},  # a bias that two modules hold
    "gpt_oss": {**SLIDING, "num_local_experts": 4, "num_experts_per_tok": 2},
}


def causal_lm(name, dtype=torch.float32, **more):
    torch.manual_seed(5)
    config = AutoConfig.for_model(name, **{**COMMON, **HEADS.get(name, {}), **more})
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def batch(rows=3):
    torch.manual_seed(6)
    ids = torch.randint(1, VOCABULARY, (rows, CONTEXT))
    labels = ids.clone()
    labels[0, :5] = -100
    return {"input_ids": ids, "labels": labels}


def packed(rows=2):
    positions = torch.stack([torch.arange(CONTEXT) % (7 + row) for row in range(rows)])
    return {**batch(rows), "position_ids": positions}


def gradients(model, inputs, parameters=None):
    loss = model(**inputs)
    found = torch.autograd.grad(
        loss / 40, list(parameters or model.parameters()), allow_unused=True
    )
    return loss.detach(), [g for g in found if g is not None]

def assert_close(found, expected):
    """(loss, gradients) of a fast path are those of the plain one."""
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-6)


def assert_packed_attention_is_masked_attention(model, inputs):
    masked = gradients(LanguageModel(model), inputs)
    with capabilities.attention(model, packed_attention.PACKED):
        assert_close(gradients(LanguageModel(model), inputs), masked)


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that is made in the body."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        outputs = function(*args, **(kwargs or {}))
        for output in outputs if isinstance(outputs, (tuple, list)) else [outputs]:
            if isinstance(output, torch.Tensor):
                self.elements = max(self.elements, output.numel())
        return outputs


@pytest.fixture
def seven_tokens(monkeypatch):
    """Chunks that don't divide the tokens."""
    monkeypatch.setattr(chunked_loss, "_tokens_at_once", lambda *inputs: 7)


@pytest.mark.parametrize("name", HEADS)
def test_a_chunked_loss_has_every_detail_of_the_head(name, seven_tokens):
    model = causal_lm(name)
    assert capabilities.chunks_its_loss(model, "32-true")
    full, chunked = (
        gradients(LanguageModel(model, chunked=chunks), batch()) for chunks in (False, True)
    )
    assert_close(chunked, full)


def test_in_bfloat16_it_is_no_further_from_float64_than_the_full_loss(seven_tokens):
    exact = gradients(LanguageModel(causal_lm("llama", torch.bfloat16).double()), batch())
    model = causal_lm("llama", torch.bfloat16)
    errors = []
    for chunks in (False, True):
        loss, found = gradients(LanguageModel(model, chunked=chunks), batch())
        assert loss.dtype == torch.float32 and all(g.dtype == torch.bfloat16 for g in found)
        errors.append(sum((g.double() - e).square().sum() for g, e in zip(found, exact[1])).sqrt())
    assert errors[1] < 1.1 * errors[0]


def test_no_tensor_has_the_size_of_vocabulary_times_tokens(seven_tokens):
    model, sizes = causal_lm("llama", vocab_size=1009), []
    for chunks in (False, True):
        with Largest() as largest:
            gradients(LanguageModel(model, chunked=chunks), batch(rows=8))
        sizes.append(largest.elements)
    assert sizes[0] == 8 * CONTEXT * 1009 and sizes[1] <= max(1009 * 32, 8 * CONTEXT * 48)


def plain_and_compiled(dtype):
    """[(loss, gradients)] of the loss as it is, and compiled."""
    found = []
    for compiles in (False, True):
        model = LanguageModel(causal_lm("gemma2", dtype), chunked=True)
        if compiles:
            layers.compile_loss(model)
        found.append(gradients(model, batch()))
    return found


@pytest.mark.longer
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiled_loss_is_the_plain_one(dtype, seven_tokens):
    """As on a GPU, see build.py; chunks have two sizes."""
    # Not in this process: the compiler starts a pool of workers, which ranks that are forked later
    # would wait for.
    [found] = run_ranks(1, plain_and_compiled, dtype, timeout_seconds=300)
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-5, atol=1e-4)
    close = {"rtol": 1e-4, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 1e-3}
    torch.testing.assert_close(found[1][1], found[0][1], **close)


def record_graphs():
    """From here on in this process, the shapes that layers are compiled for, as text, one a graph:
    symbolic sizes are names."""
    found, compile_layer = [], torch.nn.Module.compile

    def recorded(graph, inputs):
        values = [
            node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"
        ]
        shapes = [tuple(map(str, one.shape)) for one in values if isinstance(one, torch.Tensor)]
        found.append(re.sub(r"s\d+", "s", str(shapes)))
        return graph.forward

    torch.nn.Module.compile = lambda self, **how: compile_layer(self, backend=recorded, **how)
    return found


def graphs_of_training(attention, batches):
    """Those of forward and backward passes, and forward passes of an evaluation, over (rows,
    whether to train)."""
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    found = record_graphs()
    model = LanguageModel(causal_lm("llama", attn_implementation=attention), chunked=True)
    layers.compile_layers(model)
    generator = torch.Generator().manual_seed(9)
    for rows, trains in batches:
        # another number of documents each time
        begins = torch.rand(rows, CONTEXT, generator=generator) < 0.2
        begins[:, 0] = True
        index = torch.arange(CONTEXT).expand(rows, CONTEXT)
        positions = index - torch.where(begins, index, 0).cummax(dim=1).values
        with torch.set_grad_enabled(trains):
            loss = model(**batch(rows), position_ids=positions)
        if trains:
            loss.backward()
    return found


def graphs_of_layers_that_differ(shapes):
    found = record_graphs()
    model = causal_lm("diffllama", num_hidden_layers=3, attn_implementation="sdpa")
    layers.compile_layers(model)
    for rows in range(1, shapes + 1):
        with torch.no_grad():
            model(**batch(rows))
    return len(found)


def test_layers_that_differ_are_all_compiled_for_as_many_shapes(monkeypatch):
    """Each has a number of its own, so none shares the graphs of another."""
    monkeypatch.setattr(layers, "MAX_SHAPES", 9)  # more than torch's own limit for 3 layers
    assert run_ranks(1, graphs_of_layers_that_differ, 9) == [27]


@pytest.mark.longer
@pytest.mark.parametrize("attention", ["packed", "sdpa"])
def test_layers_are_compiled_for_the_shape_they_train_whatever_came_before(attention):
    """A resumed run begins without the evaluation of a new one, and must go on with the same
    kernels. Not in this process, from which ranks are forked: the compiler may start threads."""
    [resumed] = run_ranks(1, graphs_of_training, attention, [(2, True)])
    batches = [(1, True), (8, False), (2, True)]
    [graphs] = run_ranks(1, graphs_of_training, attention, batches)
    assert graphs[-len(resumed) :] == resumed and len(set(graphs)) >= 3


@pytest.mark.longer
@pytest.mark.parametrize("attention", ["packed", "sdpa"])
def test_nothing_is_compiled_again_after_the_second_step(attention):
    few = [(1, True), (8, False), (4, True)]
    many = [(1, True), (8, False), *[(4, True)] * 5, (8, False), (4, True)]
    [before] = run_ranks(1, graphs_of_training, attention, few)
    [graphs] = run_ranks(1, graphs_of_training, attention, many)
    assert len(graphs) == len(before)


def graphs_beside_a_split_gradient():
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    found, model = record_graphs(), LanguageModel(causal_lm("llama"))
    layers.compile_layers(model)
    norm = model.causal_lm.model.layers[0].input_layernorm
    flat = torch.nn.Parameter(torch.ones(16))
    flat.grad, flat.data = torch.ones(16), norm._parameters.pop("weight").data
    norm.weight = flat.view(32)
    model(**batch())
    return found


def test_layers_are_compiled_beside_gradients_that_fsdp_keeps_split():
    """As FSDP1 has it in each micro-batch but the first of a step: the unit is whole, its gradient
    the part of a rank."""
    [graphs] = run_ranks(1, graphs_beside_a_split_gradient)
    assert graphs


def test_an_evaluation_makes_no_gradients(seven_tokens, monkeypatch):
    model, made = causal_lm("gemma2"), []
    monkeypatch.setattr(torch.autograd, "grad", lambda *args, **more: made.append(args))
    with torch.no_grad():
        losses = [LanguageModel(model, chunked=chunks)(**batch()) for chunks in (False, True)]
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-4)
    assert not losses[1].requires_grad and not made


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("llama", {}),
        ("gpt2", {}),
        ("mistral", {"sliding_window": 3}),
        ("gemma3_text", SLIDING),
        ("qwen2", {}),
        ("mixtral", {}),
        ("phimoe", {"num_local_experts": 4}),
        ("qwen2_moe", {"num_experts": 4}),
        ("mistral", {"sliding_window": 40}),
    ],
)
def test_packed_attention_is_the_masked_one(name, more):
    model = causal_lm(name, **more)
    assert capabilities.takes_packed_attention(model)
    assert_packed_attention_is_masked_attention(model, packed())


# Positions are ignored; soft-capping; sinks; a window that is in the mask alone, longer than the
# tokens that are compared.
WINDOW = {"sliding_window": 40, "num_hidden_layers": 1, "num_local_experts": 4, "num_experts": 4}
SOME_LAYERS = {**WINDOW, "use_sliding_window": True}
OTHERWISE = [("opt", {}), ("gemma2", {}), ("gpt_oss", {}), ("phimoe", WINDOW)]
OTHERWISE += [("qwen2_moe", {**SOME_LAYERS, "max_window_layers": number}) for number in (0, 28)]


@pytest.mark.parametrize(("name", "more"), OTHERWISE)
def test_a_model_that_packed_attention_would_change_keeps_its_own(name, more):
    assert not capabilities.takes_packed_attention(causal_lm(name, **more))


def test_packed_attention_makes_no_mask():
    model, context = causal_lm("llama", max_position_embeddings=512), 512
    ids = torch.randint(1, VOCABULARY, (1, context))
    positions = (torch.arange(context) % 32)[None]
    sizes = []
    for name in ("sdpa", packed_attention.PACKED):
        with capabilities.attention(model, name), Largest() as largest:
            LanguageModel(model, chunked=True)(ids, labels=ids, position_ids=positions)
        sizes.append(largest.elements)
    assert sizes[0] >= context**2 > 2 * sizes[1]


@pytest.mark.quick_cases(r"3\]|30\]")
@pytest.mark.parametrize("window", [1, 3, 7, 8, 30, 64])
def test_windows_in_a_long_document_make_no_mask_of_the_document(window):
    """One document of 30 tokens and others: gradients of the masked attention; of a long one
    nothing is tokens x tokens."""
    positions = torch.cat([torch.arange(30), torch.arange(5), torch.arange(13)])[None]
    ids = torch.randint(1, VOCABULARY, (1, 48))
    inputs = {"input_ids": ids, "labels": ids, "position_ids": positions}
    model = causal_lm("mistral", sliding_window=window, max_position_embeddings=2048)
    assert_packed_attention_is_masked_attention(model, inputs)
    long = {name: tensor.repeat(1, 40) for name, tensor in inputs.items()}
    long["position_ids"] = torch.arange(48 * 40)[None]
    with capabilities.attention(model, packed_attention.PACKED), Largest() as largest:
        gradients(LanguageModel(model, chunked=True), long)
    assert largest.elements < (48 * 40) ** 2 / 8


def test_rows_of_one_document_beside_rows_of_several():
    inputs = packed(rows=5)
    inputs["position_ids"][[0, 1, 4]] = torch.arange(CONTEXT)
    assert_packed_attention_is_masked_attention(causal_lm("llama"), inputs)


def test_where_documents_end():
    ends = document_ends(torch.tensor([[0, 1, 2, 0, 1], [3, 4, 0, 0, 1]]))
    assert ends.tolist() == [0, 3, 5, 7, 8, 10] and ends.dtype == torch.int32


@pytest.mark.parametrize("which", ["full", "every:2", "selective", "offload"])
def test_recomputed_layers_give_the_same_gradients(which):
    found = []
    for how in ("none", which):
        model = causal_lm("llama").train()
        layers.checkpoint_activations(model, how)
        found.append(gradients(LanguageModel(model), batch()))
    (_, plain), (_, ours) = found
    assert all(torch.equal(one, other) for one, other in zip(ours, plain, strict=True))


@pytest.fixture
def waiting(monkeypatch):
    """What is offloaded. Here it waits as copies, which only the backward pass takes: what a GPU's
    host does, but for the streams."""
    copies = []

    def put(inputs, hidden, tensor):
        copies.append(tensor.clone())
        return copies[-1:]

    monkeypatch.setattr(offload.Inputs, "put", put)
    monkeypatch.setattr(offload.Inputs, "get", lambda _, kept: kept[0])
    return copies


@pytest.mark.parametrize(
    "name", ["llama", "gpt2", "mixtral", "gemma3_text", "phi", "olmo2", "qwen3", "gpt_neox"]
)
def test_what_is_offloaded_is_the_input_of_each_layer(name, waiting):
    model, inputs = causal_lm(name).train(), batch()
    torch.manual_seed(0)  # of dropout
    plain = gradients(LanguageModel(model), inputs)
    layers.checkpoint_activations(model, "offload")
    torch.manual_seed(0)
    found = gradients(LanguageModel(model), inputs)
    # PyTorch 2.11 saves an empty tensor of its own beside each.
    assert [tensor.shape for tensor in waiting if tensor.numel()] == [
        (*inputs["input_ids"].shape, model.config.hidden_size)
    ] * 2
    assert all(torch.equal(one, other) for one, other in zip(found[1], plain[1], strict=True))


def test_nothing_holds_an_input_that_is_offloaded(waiting):
    """Autograd keeps the hooks of what it saves: what they hold would stay on the device."""
    model, inputs = causal_lm("llama").train(), batch()
    layers.checkpoint_activations(model, "offload")
    seen = []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda _, args: seen.append(weakref.ref(args[0])))
    loss = LanguageModel(model)(**inputs)
    assert len(seen) == 2 and [one() for one in seen] == [None, None]
    loss.sum().backward()


def test_what_is_pinned_has_pages_of_its_own_until_it_is_freed(monkeypatch):
    held = {}
    driver = SimpleNamespace(cudaHostRegister=lambda at, size, _: held.update({at: size}))
    driver.cudaHostUnregister = held.pop
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "check_error", lambda result: None)
    host = offload.pinned(5000)
    [(at, size)], room = held.items(), host.untyped_storage()
    assert (at % 4096, len(host), size) == (0, 5000, 8192)
    assert at == host.data_ptr() and at + size <= room.data_ptr() + room.nbytes()
    del host
    assert not held


def graphs_of_recomputed_layers(which, shares):
    """Of how many products the graphs are that layers are compiled to, where attention is of whole
    rows as on a GPU."""
    found, compile_function = [], torch.compile

    def counted(graph, inputs):
        # of what is checkpointed, a part
        parts = [one for one in graph.modules() if isinstance(one, torch.fx.GraphModule)]
        found.append(sum("linear" in str(node.target) for one in parts for node in one.graph.nodes))
        return graph.forward

    def of_whole_rows(flat, ends, scaling, *_):
        query, key, value = (tensor.transpose(0, 1)[None] for tensor in flat)
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling
        )
        return out[0].transpose(0, 1)

    torch.compile = lambda function, **how: compile_function(function, backend=counted, **how)
    packed_attention._one_by_one = of_whole_rows
    model = LanguageModel(causal_lm("llama", attn_implementation="packed").train())
    layers.checkpoint_activations(model.causal_lm, which, compiles=True)
    layers.compile_layers(model, which)
    row = torch.arange(32)[None]
    inputs = {"input_ids": row, "position_ids": row, "labels": row}
    if shares:
        model.context_group = torch.distributed.group.WORLD
        inputs["labels"] = torch.nn.functional.pad(row, (0, 1), value=-100)
    model(**inputs).backward()
    return found


@pytest.mark.quick_cases(r"full-alone")
@inside_the_compiler
@pytest.mark.parametrize("shares", [False, True], ids=["alone", "context parallel"])
@pytest.mark.parametrize("which", ["none", "full", "offload"])
def test_recomputed_layers_are_compiled_as_a_whole(which, shares):
    [found] = run_ranks(1, graphs_of_recomputed_layers, which, shares)
    assert found == [7], "both layers share one graph, of all products of a layer"


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += "mm" in function.name()
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_how_much_is_recomputed(family):
    counts = {}
    for which in ("none", "selective", "every:2", "full"):
        model = causal_lm(family).train()
        layers.checkpoint_activations(model, which)
        loss = LanguageModel(model)(**batch())
        with Products() as products:
            loss.backward()
        counts[which] = products.count
    assert counts["none"] == counts["selective"] < counts["every:2"] < counts["full"]


def train_with(patch, argv):
    """train.py after `patch()`. Returns (exit code, what was printed)."""
    import train

    patch()
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        try:
            train.main([str(word) for word in argv])
        except SystemExit as stop:
            return stop.code, said.getvalue()
    return 0, said.getvalue()


def nothing():
    pass


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_mixed_precision_gives_packed_attention_half_precision_as_it_gives_sdpa(name, monkeypatch):
    """On a GPU its kernel takes no other."""
    seen, one_by_one = [], packed_attention._one_by_one

    def recorded(flat, *more):
        seen.extend(tensor.dtype for tensor in flat)
        return one_by_one(flat, *more)

    monkeypatch.setattr(packed_attention, "_one_by_one", recorded)
    losses = []
    for attention in ("packed", "sdpa"):
        model = LanguageModel(causal_lm(name, attn_implementation=attention))
        with torch.autocast("cpu", torch.bfloat16):
            losses.append(model(**packed()).item())
    assert set(seen) == {torch.bfloat16} and losses[0] == pytest.approx(losses[1], rel=1e-3)


def break_the_chunked_loss():
    """The gradient of the head isn't multiplied by what the loss is multiplied by."""
    backward = chunked_loss._ChunkedLoss.backward

    def broken(context, factor):
        *none, hidden = backward(context, factor)[:4]
        return (*none, hidden, *(None for _ in context.dtypes[1:]))

    chunked_loss._ChunkedLoss.backward = staticmethod(broken)


def break_packed_attention():
    """Scores are scaled by something else, where gradients are made."""
    of_document = packed_attention._of_document

    def broken(query, key, value, scaling, *more):
        factor = 20 if torch.is_grad_enabled() else 1
        return of_document(query, key, value, scaling * factor, *more)

    packed_attention._of_document = broken


def break_compiled_layers():
    """Layers are compiled to something else."""

    def compile_layers(model, recomputed):
        for layer in layers.repeated_layers(model).values():
            layer.register_forward_hook(
                lambda module, inputs, output: output * (1 + 0.5 * torch.is_grad_enabled())
            )

    layers.compile_layers = compile_layers


CASES = [
    (break_the_chunked_loss, "--loss full", ("--loss", "chunked")),
    (break_packed_attention, "--attention sdpa", ("--attention", "packed")),
    (break_compiled_layers, "--compile false", ("--compile", "true")),
]


def flags(toys, folder, data, strategy, *more):
    words = "--max_step 2 --eval_iters 0 --global_batch_size 4 --run_name run --strategy"
    data = ("--train_data_dir", data, *words.split(), strategy)
    return [*toy_run(toys, folder), *data, *more]


@pytest.mark.longer
@pytest.mark.parametrize(
    ("strategy", "ranks", "precision"),
    [("auto", 1, "32-true"), ("fsdp", 2, "bf16-true"), ("fsdp2", 2, "32-true")],
)
@pytest.mark.parametrize(("patch", "flag", "more"), CASES)
def test_a_fast_path_that_is_another_model_is_refused(
    toys, tmp_path, packed_data, patch, flag, more, strategy, ranks, precision
):
    more = (*more, "--devices", ranks, "--precision", precision)
    words = flags(toys, tmp_path, packed_data, strategy, *more)
    for rank, (code, said) in enumerate(run_ranks(ranks, train_with, patch, words)):
        assert code == 2
        if rank == 0:
            [sentence] = [line for line in said.splitlines() if line.startswith("train.py: error:")]
            assert "isn't plain transformers'" in sentence and flag in sentence


@pytest.mark.quick_cases(r"(auto-1|fsdp-2)-bf16-true")
@pytest.mark.every_eighth(5)
@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
@pytest.mark.parametrize(("strategy", "ranks"), STRATEGIES)
def test_the_defaults_are_fast_and_pass(toys, tmp_path, packed_data, strategy, ranks, precision):
    more = ("--devices", ranks, "--precision", precision)
    words = flags(toys, tmp_path, packed_data, strategy, *more)
    (code, said), *_ = run_ranks(ranks, train_with, nothing, words)
    assert code == 0 and "Start verified: loss" in said, said
    assert "packed attention, chunked loss" in said and "compiled layers" not in said
    assert "the gradients are equal to rounding" in said


@pytest.mark.quick_cases(r"auto")
@pytest.mark.parametrize(("strategy", "ranks"), STRATEGIES)
def test_a_run_on_fast_paths_is_the_run_on_plain_ones(toys, tmp_path, packed_data, strategy, ranks):
    plain, found = "--loss full --attention sdpa", []
    for name, more in (("fast", "--activation_checkpointing selective"), ("plain", plain)):
        more = f"{more} --precision 32-true --lr 1e-3 --max_step 5".split()
        train_ranks(ranks, *flags(toys, tmp_path / name, packed_data, strategy, *more))
        run = tmp_path / name / "run"
        found.append((metrics(run), metrics(run, "grad_norm")))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-5)


FAST = "--loss chunked --attention packed --compile true".split()
PLAIN = "--loss full --attention sdpa --compile false --verify_start false".split()
SLOW = [("ddp", 2, "full"), ("fsdp", 2, "sharded"), ("fsdp2", 2, "sharded"), ("fsdp2", 2, "full")]


@pytest.mark.longer
@inside_the_compiler
@pytest.mark.parametrize(
    ("strategy", "ranks", "kind"),
    [("auto", 1, "full"), *(pytest.param(*one, marks=pytest.mark.slow) for one in SLOW)],
)
def test_laws_1_to_4_hold_on_all_fast_paths(toys, tmp_path, packed_data, strategy, ranks, kind):
    steps, half = 8, 4
    every = f"--precision 32-true --lr 1e-3 --max_step {steps} --save_step_interval {half} "
    every = [*every.split(), "--state_dict_type", kind, "--grad_clip", 1.0]
    fast = [*flags(toys, tmp_path, packed_data, strategy, *every, *FAST), "--micro_batch_size", 1]
    train_ranks(ranks, *fast, "--run_name", "whole", timeout_seconds=300)

    plain = flags(toys, tmp_path, packed_data, "auto", *every, *PLAIN)
    train_ranks(1, *plain, "--micro_batch_size", 4, "--run_name", "plain")
    expected = {key: metrics(tmp_path / "whole", key) for key in ("loss", "grad_norm")}
    for key, values in expected.items():  # law 1: micro-batches on ranks are one big batch
        assert values == pytest.approx(metrics(tmp_path / "plain", key), rel=1e-5), key

    checkpoint = tmp_path / "whole" / f"step-{half:08d}"
    go_on = ("--run_name", "whole", "--resume", "true", "--checkpoint", checkpoint)
    train_ranks(ranks, *fast, *go_on, timeout_seconds=300)
    for key, values in expected.items():  # law 2: bit for bit
        assert metrics(tmp_path / "whole", key) == values, key
    other = ("--strategy", strategy if ranks == 1 else "auto")
    train_ranks(1, *fast, *go_on, *other, timeout_seconds=300)
    for key, values in expected.items():  # law 3: on another number of ranks
        assert metrics(tmp_path / "whole", key) == pytest.approx(values, rel=2e-6), key

    last = find(tmp_path / "whole")
    if kind == "sharded":
        export(last, tmp_path / "hf")
        last = tmp_path / "hf"
    trained = AutoModelForCausalLM.from_pretrained(last).eval()
    probe = read_probe(find(tmp_path / "whole"))
    with torch.no_grad():  # law 4: plain transformers gives the logits of the model in training
        logits = trained(probe["input_ids"]).logits[0, probe["positions"]]
    assert (logits - probe["logits"]).abs().mean() / probe["logits"].std() < 1e-5


def laws_7_and_9(argv):
    """(whether all parameters of the wrapped model equal the reference's, loss of a packed row, of
    its documents alone)."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    _, plan, model, _ = built(argv)
    reference = AutoModelForCausalLM.from_pretrained(plan.model.source, dtype=torch.float32)
    reference = reference.state_dict()
    state = get_model_state_dict(model.module, options=StateDictOptions(full_state_dict=True))
    equal = all(
        torch.equal(value, reference[name.removeprefix(PREFIX)]) for name, value in state.items()
    )
    first, second, third = documents([9, 7, 8], seed=1)
    model.eval()
    with torch.no_grad():
        packed = model(**packed_batch([first + second + third])).item()
        alone = sum(model(**packed_batch([document])).item() for document in (first, second, third))
    return plan.model.config._attn_implementation, equal, len(state), packed, alone


@pytest.mark.longer
@inside_the_compiler
@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [("fsdp2", 2), *(pytest.param(*one, marks=pytest.mark.slow) for one in STRATEGIES[:3])],
)
def test_laws_5_7_and_9_hold_on_all_fast_paths(toys, tmp_path, packed_data, strategy, ranks):
    words = flags(toys, tmp_path, packed_data, strategy, "--precision", "32-true", *FAST)
    words += ["--micro_batch_size", 1]
    argv = [str(word) for word in [*words, "--devices", ranks]]
    results = run_ranks(ranks, laws_7_and_9, argv, timeout_seconds=300)
    for attention, equal, count, packed, alone in results:
        assert attention == "packed" and equal and count > 10
        assert packed == pytest.approx(alone, rel=1e-5)
    run = (*words, "--max_step", 2 * 40 // 4, "--save_step_interval", 7, "--run_name", "run")
    train_ranks(ranks, *run, timeout_seconds=300)
    assert verify.main([str(tmp_path / "run")]) == 0, (
        "the rows that were read are those of two whole epochs"
    )


@pytest.mark.slow
@inside_the_compiler
@pytest.mark.parametrize(("strategy", "ranks"), STRATEGIES)
def test_law_10_holds_with_compiled_layers_and_chunks(toys, tmp_path, strategy, ranks):
    plain = ("--strategy", strategy, "--precision", "32-true")
    fp32, _ = final_loss(toys, tmp_path, "fp32", ranks, *plain)
    fast = "--loss chunked --compile true".split()
    bf16, _ = final_loss(toys, tmp_path, "bf16", ranks, "--strategy", strategy, *fast)
    assert abs(bf16 - fp32) < 0.01


ACTIVATIONS = "takes none, full, every:N (such as every:2), selective or offload"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--activation_checkpointing every:0", ACTIVATIONS),
        ("--activation_checkpointing half", ACTIVATIONS),
        ("--loss liger", "--loss takes auto, full or chunked (--code"),
    ],
)
def test_a_value_that_is_none_of_them_gets_one_sentence(toys, tmp_path, words, sentence):
    [(code, said)] = run_ranks(1, train_with, nothing, [*toy_run(toys, tmp_path), *words.split()])
    assert code == 2 and sentence in said


def test_layers_that_are_no_part_of_a_gradient_are_compared_as_well():
    """A gradient of NaN, of zero, and one that is missing are all found."""
    model = LanguageModel(causal_lm("llama"))
    reference = gate.gradients_of_reference(model, batch())
    assert gate.gradient_difference(reference, reference, "32-true") is None
    assert all(parameter.grad is None for parameter in model.parameters())
    name = "causal_lm.model.layers.1.mlp.up_proj.weight"
    for factor in (0.0, float("nan"), -1.0, 1.2):
        samples = {n: s * factor if n == name else s for n, s in reference.samples.items()}
        squares = {n: s * factor**2 if n == name else s for n, s in reference.squares.items()}
        found = gate.gradient_difference(
            gate.Gradients(reference.loss, squares, samples), reference, "32-true"
        )
        assert "model.layers.1" in found, factor


def test_what_the_gate_keeps_and_sends_is_as_small_as_it_looks():
    """A view holds all that is behind it, and is pickled with it: whole gradients on all ranks."""
    model = LanguageModel(causal_lm("llama", vocab_size=2000))
    gradients = gate.gradients_of_reference(model, batch())
    outputs = gate.outputs_of(model.causal_lm, batch(1)["input_ids"], model)
    kept = {**gradients.samples, "logits": outputs.logits, **outputs.modules}
    assert [
        name
        for name, t in kept.items()
        if t.untyped_storage().nbytes() > t.numel() * t.element_size()
    ] == []
    head = gradients.samples["causal_lm.lm_head.weight"]  # of 64,000 elements
    assert len(pickle.dumps(head)) < 4 * gate.SAMPLED_ELEMENTS + 1000


def test_an_embedding_of_which_the_sample_has_no_token_passes():
    """Its gradient is zero but for the probe's few tokens: at a large vocabulary the sample may
    miss them all."""
    model = LanguageModel(causal_lm("llama", vocab_size=40_000))
    step = -(-40_000 * COMMON["hidden_size"] // gate.SAMPLED_ELEMENTS)
    missed = [
        row for row in range(100) if -row * COMMON["hidden_size"] % step >= COMMON["hidden_size"]
    ]
    ids = torch.tensor([missed[:CONTEXT]])
    reference = gate.gradients_of_reference(model, {"input_ids": ids, "labels": ids})
    name = "causal_lm.model.embed_tokens.weight"
    assert reference.squares[name] > 0 and not reference.samples[name].any()
    assert gate.gradient_difference(reference, reference, "32-true") is None
    others = {**reference.samples, name: torch.ones_like(reference.samples[name])}
    ours = gate.Gradients(reference.loss, reference.squares, others)
    assert "embed_tokens" in gate.gradient_difference(ours, reference, "32-true")


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("llama", {"head_dim": 20}),
        ("llama", {"head_dim": 320}),
        ("deepseek_v3", {**FAMILIES["deepseek_v3"], "head_dim": 4}),
    ],
)
def test_the_kernel_of_gpus_gets_the_head_sizes_that_it_takes(name, more, monkeypatch):
    """The kernel's conditions but that of 16 bits, with PyTorch's own attention in its place."""
    called = []
    monkeypatch.setattr(packed_attention, "varlen_attn", varlen((9, 0), called, [torch.float32]))
    monkeypatch.setattr(packed_attention, "_has_kernel", lambda query, head_size: head_size <= 256)
    assert_packed_attention_is_masked_attention(causal_lm(name, **more), packed())
    assert bool(called) == (more.get("head_dim") != 320)
