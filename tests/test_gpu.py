"""What only a GPU can show: `pytest -m gpu`. The last tests show the laws there, with train.py
itself."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from families import FAMILIES, SLIDING
from ranks import toy_run
from test_law_13_fast_paths import batch, causal_lm, gradients, inside_the_compiler, packed

from fabric_llm.data.batches import Batches, PinnedCopies, Prefetch
from fabric_llm.data.dataset import open_dataset
from fabric_llm.model import capabilities, layers, packed_attention
from fabric_llm.model.language_model import LanguageModel
from fabric_llm.training import adamw, adamw_rounded, step
from fabric_llm.training.adamw import AdamW

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parent.parent
GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


def on_gpu(inputs):
    return {name: tensor.to(GPU) for name, tensor in inputs.items()}


def errors(model, exact, inputs, compiles=False, **more):
    """Of the loss, and of all gradients together, against those of float64."""
    language_model = LanguageModel(model, **more)
    if compiles:
        layers.compile_loss(language_model)
    loss, found = gradients(language_model, inputs)
    squares = [(g.double().cpu() - e).square().sum() for g, e in zip(found, exact[1], strict=True)]
    return abs(loss.double().cpu() - exact[0]), sum(squares).sqrt()


def drawn(count, seed=0):
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("llama", {}),  # queries share keys and values
        ("gpt2", {}),
        ("mistral", {"sliding_window": 3}),
        ("gemma3_text", {**SLIDING, "sliding_window": 4}),
        ("llama", {"head_dim": 20}),  # no multiple of 8
        ("llama", {"head_dim": 320}),  # more than the kernel takes
        # smaller values; no experts
        ("deepseek_v3", {**FAMILIES["deepseek_v3"], "head_dim": 4, "first_k_dense_replace": 2}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_packed_attention_is_no_further_from_float64_than_the_masked_one(name, more, dtype):
    model = causal_lm(name, dtype, **more)
    exact = gradients(LanguageModel(causal_lm(name, dtype, **more).double()), packed())
    masked = errors(model.to(GPU), exact, on_gpu(packed()))
    with capabilities.attention(model, packed_attention.PACKED):
        ours = errors(model, exact, on_gpu(packed()))
    slack = 1e-6 * max(gradient.norm() for gradient in exact[1])
    assert ours[1] < 1.5 * masked[1] + slack, (ours, masked)


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma2", "cohere", "gpt2"])
def test_a_chunked_loss_is_no_further_from_float64_than_the_full_one(name, compiles):
    model = causal_lm(name, torch.bfloat16)
    exact = gradients(LanguageModel(causal_lm(name, torch.bfloat16).double()), batch())
    full = errors(model.to(GPU), exact, on_gpu(batch()))
    chunked = errors(model, exact, on_gpu(batch()), chunked=True, compiles=compiles)
    assert chunked[1] < 1.2 * full[1] and chunked[0] < 1.2 * full[0] + 0.01, (chunked, full)


def test_a_gpu_rounds_as_a_cpu():
    kernel = adamw.fastest(GPU)
    assert kernel is not adamw_rounded.plain_update and adamw_rounded.equals_plain(kernel, GPU)
    found = []
    for device in (CPU, GPU):
        param = torch.nn.Parameter(drawn(2**20).bfloat16().to(device))
        optimizer = AdamW([param], lr=1e-3)
        for seed in range(3):
            param.grad = drawn(2**20, seed).bfloat16().to(device)
            optimizer.step()
        tensors = (param.detach(), *list(optimizer.state[param].values())[1:])
        found.append(torch.stack([tensor.cpu() for tensor in tensors]))
    assert torch.equal(*found)


def test_the_norm_of_a_gradient_is_that_of_a_cpu_and_takes_no_copy():
    gradients = [drawn(7).bfloat16(), drawn(2**25).bfloat16(), drawn(2**12)]  # the last: a router's
    there = [gradient.to(GPU) for gradient in gradients]
    step.sum_of_squares(there)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = step.sum_of_squares(there)
    assert torch.cuda.max_memory_allocated() - before < 2**20
    assert found.dtype == torch.float64
    assert found.item() == pytest.approx(step.sum_of_squares(gradients).item(), rel=1e-13)


def test_pinned_copies_are_the_batches(toys):
    batches = Batches(open_dataset(toys / "data").train, 7, 2, 2, document_end=0)
    prefetch = Prefetch(batches, 2, PinnedCopies(GPU))
    for position in range(0, 10 * batches.global_batch_size, batches.global_batch_size):
        found = prefetch.at(position)
        assert all(tensor.device == GPU for one in found for tensor in one.values())
        torch.cuda._sleep(1_000_000)  # the model's stream is busy, while the next copies are made
        sums = [{name: (tensor + 0).cpu() for name, tensor in one.items()} for one in found]
        del found
        for ours, plain in zip(sums, batches.at(position), strict=True):
            assert all(torch.equal(ours[name], plain[name]) for name in plain)
    prefetch.close()


def flags(toys, output, strategy, precision):
    sizes = "--devices 1 --lr 1e-3 --micro_batch_size 2 --global_batch_size 4 --eval_iters 2"
    how = ("--accelerator", "cuda", "--strategy", strategy, "--precision", precision)
    return (*toy_run(toys, output), *sizes.split(), *how)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed", "bf16-true"])
@pytest.mark.parametrize("strategy", ["auto", "ddp", "fsdp", "fsdp2"])
def test_a_killed_run_goes_on_bit_for_bit(toys, tmp_path, precision, strategy):
    if precision == "16-mixed" and strategy == "fsdp2":
        pytest.skip("fsdp2 has no 16-mixed")
    drill = ("-m", "fabric_llm.verify", "--drill", "--steps", 6, "--seed", 1)
    words = (*flags(toys, tmp_path / "runs", strategy, precision), "--compile", "true")
    run(*drill, "--output", tmp_path / "drill.json", "--", *words)
    assert json.loads((tmp_path / "drill.json").read_text())["verdict"] == "identical"


@pytest.mark.parametrize("strategy", ["auto", "fsdp", "fsdp2"])
def test_the_start_is_verified_and_the_export_holds_the_weights(toys, tmp_path, strategy):
    words = (*flags(toys, tmp_path, strategy, "bf16-true"), "--max_step", 2, "--run_name", "run")
    said = run("train.py", *words).splitlines()
    assert any(line.startswith("Start verified") and "gradients are equal" in line for line in said)
    assert "Verified" in run("export_hf.py", tmp_path / "run", "--output", tmp_path / "hf")


def run(*words):
    """The output of a command of this repository."""
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@inside_the_compiler
@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
def test_inputs_of_layers_wait_on_the_host(compiles):
    """The same gradients, bit for bit, over several passes, and less memory by the inputs of all
    layers but a few."""
    found, peaks = [], []
    # Of longer rows the kernel adds up gradients of queries in any order.
    ids, labels = torch.randint(1, 60, (2, 128, 128), device=GPU)
    inputs, sizes = {"input_ids": ids, "labels": labels}, {"hidden_size": 256}
    sizes |= {"num_hidden_layers": 12, "max_position_embeddings": 4096}
    for how in ("full", "offload"):
        model = causal_lm("llama", torch.bfloat16, **sizes)
        layers.checkpoint_activations(model.to(GPU).train(), how, compiles)
        if compiles:
            layers.compile_layers(model, how)
        language_model = LanguageModel(model, chunked=True)
        for _ in range(3):
            found.append(gradients(language_model, inputs)[1])
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        gradients(language_model, inputs)
        peaks.append(torch.cuda.max_memory_allocated())
    for some in found[1:]:
        for one, other in zip(some, found[0], strict=True):
            # A layer that is compiled together with its checkpoint has other kernels.
            is_close = compiles and (one - other).norm() <= 2e-2 * other.norm()
            assert is_close or torch.equal(one, other)
    assert peaks[0] - peaks[1] > 8 * 4 * 4096 * 256 * 2, peaks
