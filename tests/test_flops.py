"""FLOPs: counted by hand, by torch's own counter, and against published numbers; what a device can
do."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import CONTEXT, TOY_CONFIGS, VOCABULARY
from families import FAMILIES, toy_config
from ranks import metrics, toy_run, train_ranks
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig

from fabric_llm.data.batches import Batches, Prefetch, document_ends, token_places
from fabric_llm.data.dataset import open_dataset
from fabric_llm.model import flops
from fabric_llm.model.weights import repeated_layers
from fabric_llm.run import speed as speeds


def skeleton(config):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


# ------------------------------------------------------------------------------- a model


def test_a_llama_by_hand():
    """2 layers: attention of 4 heads and 2 heads of keys and values, 8 wide; three matrices of 32 x
    56; the output layer."""
    counted = flops.of_model(skeleton(TOY_CONFIGS["llama"]))
    matrices = 2 * (32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 56) + 32 * VOCABULARY
    assert counted.of_token == 3 * 2 * matrices
    assert counted.of_pair == {None: 3 * 2 * 2 * (2 * 32)}, "the scores, and the sum of the values"


def test_a_row_of_one_document_and_of_several():
    counted = flops.Flops(10.0, {None: 1.0, 3: 100.0})
    assert counted.of(np.array([1, 1, 1, 1])) == 4 * 10 + (1 + 2 + 3 + 4) + 100 * (1 + 2 + 3 + 3)
    two_documents = np.array([2, 2, 0, 0])
    assert counted.of(two_documents) == 4 * 10 + 2 * (1 + 2) + 100 * 2 * (1 + 2)


@pytest.mark.parametrize(
    "family",
    # one of each kind: many heads or one of keys, biases, gates, latent attention, experts beside
    # shared ones, heads of another size in some layers
    "llama gpt2 bloom mpt falcon opt gpt_bigcode gemma2 phi3 cohere2 deepseek_v3 minicpm3 mixtral "
    "qwen2_moe gpt_oss granitemoeshared ernie4_5_moe hunyuan_v1_moe gemma4_text".split(),
)
def test_torch_counts_the_same(family):
    """FlopCounterMode sees each matrix multiplication of a forward pass. Eager attention multiplies
    all pairs of the row."""
    config = toy_config(family)
    config._attn_implementation = config._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config).eval()
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        model(input_ids=torch.randint(1, config.vocab_size, (1, CONTEXT)), use_cache=False)
    counted = flops.of_model(model)
    forward = CONTEXT * counted.of_token + CONTEXT**2 * sum(counted.of_pair.values())
    # Up to transformers 5.20 an outer product makes the angles of positions: nothing that a token
    # costs.
    counts = counter.get_flop_counts()
    angles = sum(sum(counts[name].values()) for name in counts if name.endswith("rotary_emb"))
    assert forward == 3 * (counter.get_total_flops() - angles)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "mixtral", "opt"])
@pytest.mark.parametrize("trains", ["all", "first layer", "last layer"])
def test_torch_counts_the_same_where_a_part_of_the_model_trains(family, trains):
    """No backward pass goes through layers below the first weight that trains: to count it would
    make MFU, and the hours of a plan, 1.7 times too large for the last of eight layers."""
    config = toy_config(family)
    config._attn_implementation = config._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config).eval()
    layers = list(repeated_layers(model))
    part = {"all": "", "first layer": f"{layers[0]}.", "last layer": f"{layers[-1]}."}[trains]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(part))
    with FlopCounterMode(display=False) as counter:
        input_ids = torch.randint(1, config.vocab_size, (1, CONTEXT))
        model(input_ids=input_ids, use_cache=False).logits.sum().backward()
    counted = flops.of_model(model)
    of_pairs = CONTEXT**2 * sum(counted.of_pair.values())
    angles = sum(
        sum(of.values())
        for name, of in counter.get_flop_counts().items()
        if name.endswith("rotary_emb")
    )
    of_torch = counter.get_total_flops() - angles
    assert CONTEXT * counted.of_token + of_pairs == pytest.approx(of_torch, rel=1e-9)


def test_llama_2_7b_as_palm_counts():
    """6 N + 12 L H Q T a token, where N leaves out the embedding, and what has no matrix: 65
    norms."""
    model = skeleton(LlamaConfig(max_position_embeddings=4096))  # its defaults are Llama's 7B
    parameters, counted = sum(p.numel() for p in model.parameters()), flops.of_model(model)
    assert parameters == 6_738_415_616, "as published"
    assert counted.of_token == 6 * (parameters - 32000 * 4096 - 65 * 4096)
    palm = 6 * parameters + 12 * 32 * 32 * 128 * 4096
    assert counted.of_token + 4096 * counted.of_pair[None] == pytest.approx(palm, rel=0.02)
    causal = counted.of(np.ones(4096, dtype=np.int64)) / 4096
    assert causal == counted.of_token + counted.of_pair[None] * 4097 / 2


@pytest.mark.parametrize(
    ("family", "windows"),
    [("llama", [None, None]), ("cohere2", [8, None]), ("mamba", []), ("bamba", [None])],
)
def test_layers_that_see_a_part_of_the_row(family, windows):
    assert flops.windows(toy_config(family)) == windows


@pytest.mark.parametrize(
    ("said", "dims"),
    [
        ({}, (0, 0)),
        ({"num_attention_heads": [4, 8]}, (0, 0)),
        ({"num_attention_heads": 4}, (0, 0)),
        ({"num_attention_heads": 0}, (0, 0)),
        ({"num_attention_heads": 4, "hidden_size": 32, "head_dim": None}, (32, 32)),
    ],
)
def test_configurations_that_say_it_in_another_way_end_no_run(said, dims):
    assert flops.head_dims(SimpleNamespace(**said)) == dims


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_counted(family):
    counted = flops.of_model(skeleton(toy_config(family)))
    assert counted.of_token > 6 * 131 * 32
    assert 0 <= counted.of(np.ones(CONTEXT, dtype=np.int64)) < 1e9


# ------------------------------------------------------------------------ the tokens that were seen


def test_places_of_tokens_in_their_documents(toys):
    rows = {"input_ids": torch.zeros(2, 6)}
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]])
    packed = rows | {"document_ends": document_ends(positions)}
    assert token_places([rows, rows]).tolist() == [4] * 6
    assert token_places([packed, rows]).tolist() == [4 + 2, 3 + 2, 2 + 2, 1 + 2, 1 + 2, 1 + 2]
    split = open_dataset(toys / "data").train
    for end in (None, 0):
        prefetch = Prefetch(Batches(split, 1, 3, 2, document_end=end), 1)
        seen = [batch for position in (0, 6) for batch in prefetch.at(position)]
        assert (prefetch.tokens_at == token_places(seen)).all()
        assert prefetch.tokens_at.sum() == 12 * CONTEXT
        prefetch.close()


@pytest.mark.longer
@pytest.mark.parametrize(("ranks", "strategy"), [(1, "auto"), (2, "ddp")])
def test_a_run_logs_what_its_devices_do(toys, tmp_path, ranks, strategy):
    sizes = "--global_batch_size 8 --max_step 3 --eval_iters 0 --run_name run --strategy"
    train_ranks(ranks, *toy_run(toys, tmp_path), *sizes.split(), strategy)
    row = flops.of_model(skeleton(TOY_CONFIGS["llama"])).of(np.ones(CONTEXT, dtype=np.int64))
    for line in map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()):
        rate = line["tokens_per_second"] / ranks
        assert line["tokens_per_second_per_device"] == pytest.approx(rate)
        assert line["model_tflops_per_device"] == pytest.approx(rate * row / CONTEXT / 1e12)
        assert "mfu" not in line, "of a CPU"
        assert line["data_seconds"] > 0 and line["wait_seconds"] > 0
        step_seconds = 8 * CONTEXT / line["tokens_per_second"]
        assert line["data_seconds"] + line["wait_seconds"] < step_seconds
    assert metrics(tmp_path / "run", "tokens") == [8 * CONTEXT * step for step in (1, 2, 3)]


def test_speed_is_that_since_the_last_line(monkeypatch):
    class Batches:
        seconds_waited, tokens_at = 0.0, np.zeros(1, dtype=np.int64)

    batches, clock = Batches(), [0.0]
    monkeypatch.setattr(speeds.time, "monotonic", lambda: clock[0])
    speed = speeds.Speed(flops.Flops(1e9, {None: 1e6}), torch.device("cpu"), 4, batches)
    speed.peak = 10.0
    for lap, (seconds, places) in enumerate([(1.0, [3, 3]), (5.0, [8, 0])], 1):
        batches.seconds_waited += seconds
        batches.tokens_at = batches.tokens_at + np.array(places)
        speed.waits.seconds += 2 * seconds
        speed.steps += 2
        speed.tokens += 4000
        clock[0] += 1.0
        found = speed.lap()
        assert (found["data_seconds"], found["wait_seconds"]) == (seconds / 2, seconds)
        pairs = {1: 1.5e6, 2: 1e6}[lap]  # a token
        assert found["tokens_per_second_per_device"] == 1000.0
        assert found["model_tflops_per_device"] == pytest.approx(1000 * (1e9 + pairs) / 1e12)
        assert found["mfu"] == pytest.approx(found["model_tflops_per_device"] / 10)
    assert speed.lap()["data_seconds"] == 0, "no step since then"


# ------------------------------------------------------------------------------- devices


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA H20", 148),
        ("NVIDIA B200", 2250),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA L40S", 362),
        ("NVIDIA L40", 181),
        ("NVIDIA L4", 121),
        ("NVIDIA A10", 125),
        ("NVIDIA A10G", 70),
        ("NVIDIA GeForce RTX 4090", 165),
        ("NVIDIA GeForce RTX 3090", 71),
        ("Tesla V100-SXM2-16GB", 125),
        ("Tesla T4", 65),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", None),
        ("NVIDIA RTX A1000", None),
        ("", None),
    ],
)
def test_peaks(name, peak):
    assert flops.peak_tflops(name) == peak
