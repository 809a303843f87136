"""Each kernel gives the bits of plain PyTorch, or isn't used; and the noise that they round with is
good noise."""

import shutil
import subprocess
import sys

import pytest
import torch
from torch import nn

from arguments import ROOT
from fabric_llm.training import adamw, adamw_rounded
from fabric_llm.training.adamw import AdamW

CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(
    shutil.which("c++") is None, reason="needs a C++ compiler, named c++"
)


@pytest.fixture(scope="module")
def compiled():
    return adamw_rounded.compiled()


@pytest.fixture
def forgetful():
    """The choice of a kernel is made anew, before the test and after it."""
    adamw.fastest.cache_clear()
    yield
    adamw.fastest.cache_clear()


# ------------------------------------------------------------------------------- the same bits


@needs_compiler
@pytest.mark.parametrize("count", [1, 7, 8, 15, 33, 1000, 2**17 + 5])
def test_the_compiled_update_is_the_plain_one(compiled, count):
    """Numbers of all sizes, denormals, infinities and NaNs; steps 1, 2 and 1000; indices up to
    2**32 - 1."""
    assert adamw_rounded.equals_plain(compiled, CPU, count)


@needs_compiler
def test_gradients_of_another_dtype_are_updated_alike(compiled):
    tensors = torch.randn(3, 100, generator=torch.Generator().manual_seed(0)).abs()
    optimizer, grad = AdamW([nn.Parameter(tensors)], lr=0.1), torch.randn(100)
    numbers = adamw_rounded.numbers_of(optimizer.param_groups[0], 3)
    found = []
    for update in (compiled, adamw_rounded.plain_update):
        param, exp_avg, exp_avg_sq = tensors.bfloat16()
        update([([param, grad, exp_avg, exp_avg_sq], 5, (1, 2, 3))], numbers)
        found.append(torch.stack([param, exp_avg, exp_avg_sq]))
    assert torch.equal(*found)


def said_by(code, **environment):
    """What a process without a GPU prints that runs this code with Triton."""
    pytest.importorskip("triton", reason="needs Triton: pip install triton")
    command, own = [sys.executable, "-c", code], {"PATH": "/usr/bin:/bin", **environment}
    done = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


TRITON = """
import torch
from fabric_llm.training import adamw_rounded, adamw_triton
from fabric_llm.training.adamw_rounded import key_of, numbers_of, pieces_of, plain_update
for count in (1, 1000, 2**11 + 5, adamw_rounded.ALIGNED_ELEMENTS):
    assert adamw_rounded.equals_plain(adamw_triton.update, torch.device("cpu"), count), count
generator = torch.Generator().manual_seed(0)
for dtype in (torch.bfloat16, torch.float16, torch.float32):  # of gradients; ragged, and shards that begin anywhere
    pieces = []
    for offset, count in ((0, 1), (77, 1023), (2**32 - 9, 40_000), (5, adamw_triton.TILE_ELEMENTS), (2**33 + 1, 16_385)):
        tensors = list(torch.randn(4, count, generator=generator).abs().bfloat16())
        tensors[1] = tensors[1].to(dtype)
        pieces += pieces_of(tensors, (f"{offset}", offset), 2**32, 0, 3)
    assert len(pieces) == 6
    expected = [([tensor.clone() for tensor in tensors], first, key) for tensors, first, key in pieces]
    numbers = numbers_of({"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}, 3)
    adamw_triton.update(pieces, numbers)
    plain_update(expected, numbers)
    for (found, _, _), (plain, _, _) in zip(pieces, expected):
        assert all(map(torch.equal, found, plain)), dtype
print("the same bits")
"""


def test_the_triton_kernel_is_the_plain_update_in_tritons_interpreter():
    """A GPU isn't needed for it, and what a GPU's compiler does isn't shown by it: `fastest`
    compares again on the GPU."""
    assert said_by(TRITON, TRITON_INTERPRET="1") == "the same bits\n"


PTX = """
import re
import triton.language as tl
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from fabric_llm.training.adamw_triton import _kernel
settings = {"ROW": 9, "GRAD": tl.bfloat16, "ALIGNED": True, "BLOCK": 1024, "TILE": 2**14}
types = dict.fromkeys(_kernel.arg_names, "fp32") | {"table": "*i64", "pieces": "i32"} | dict.fromkeys(settings, "constexpr")
source = ASTSource(_kernel, types, settings)
ptx = compile(source, target=GPUTarget("cuda", 80, 32), options={"enable_fp_fusion": False}).asm["ptx"]
print(*sorted(set(re.findall(r"(?:fma|mad|add|sub|mul|div|sqrt|rsqrt|rcp)[.][a-z.]*f32", ptx))))
print(*sorted(re.findall(r"(?:ld|st)[.]global[.]v\\d[.]b32", ptx)))
"""


def test_the_triton_kernel_compiles_to_single_operations_on_16_bytes(tmp_path):
    """For an A100, without one: each operation is rounded by itself, to nearest, and denormals
    stay. Whole blocks of the four tensors are loaded, and of three stored, 16 bytes at a time."""
    assert said_by(PTX, TRITON_CACHE_DIR=str(tmp_path)).splitlines() == [
        "add.rn.f32 div.rn.f32 mul.rn.f32 sqrt.rn.f32 sub.rn.f32",
        " ".join(4 * ["ld.global.v4.b32"] + 3 * ["st.global.v4.b32"]),
    ]


# ------------------------------------------------------------------------------- which kernel


def train(count, threads):
    param = nn.Parameter(torch.ones(count, dtype=torch.bfloat16))
    optimizer = AdamW([param], lr=1e-3)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for step in range(2):
            param.grad = torch.full_like(param, step + 1.0)
            optimizer.step()
    finally:
        torch.set_num_threads(before)
    return torch.stack([param.detach(), *list(optimizer.state[param].values())[1:]])


@pytest.mark.longer
@needs_compiler
@pytest.mark.parametrize("threads", [1, 2])
def test_large_models_take_the_compiled_update_with_the_same_bits(forgetful, monkeypatch, threads):
    monkeypatch.setattr(adamw_rounded, "PIECE_ELEMENTS", {"cpu": 999})
    expected = train(5000, threads)
    assert adamw.fastest.cache_info().misses == 0  # toy models don't wait for a compiler
    monkeypatch.setattr(adamw, "MIN_ELEMENTS", 5000)
    assert torch.equal(train(5000, threads), expected)
    assert adamw.fastest(CPU) is not adamw_rounded.plain_update


@pytest.mark.parametrize(
    ("compiler", "sentence"),
    [
        ("no-such-compiler", "No such file or directory: 'no-such-compiler'"),
        ("false", "returned non-zero exit status 1"),
    ],
)
def test_without_a_compiler_plain_pytorch_goes_on_and_says_so_once(
    forgetful, monkeypatch, compiler, sentence
):
    monkeypatch.setenv("CXX", compiler)
    expected = train(5000, 1)
    monkeypatch.setattr(adamw, "MIN_ELEMENTS", 5000)
    with pytest.warns() as said:
        assert torch.equal(train(5000, 1), expected)
    [warning] = [str(warning.message) for warning in said]
    assert "plain PyTorch takes several times as long for the same numbers" in warning
    assert sentence in warning and "\n" not in warning


def test_a_kernel_with_other_bits_is_refused(forgetful, monkeypatch):
    def contracted(pieces, numbers):
        adamw_rounded.plain_update(pieces, numbers)
        pieces[0][0][0].view(torch.int16)[-1] ^= 1

    monkeypatch.setattr(adamw, "compiled", lambda: contracted)
    with pytest.warns(UserWarning, match="its bits differ from those of plain PyTorch"):
        assert adamw.fastest(CPU) is adamw_rounded.plain_update


# ------------------------------------------------------------------------------- the noise

COUNT = 2**18


def noises(step=1, *, seed=0, name="weight", first=0, high=0, count=COUNT):
    """The noise of the three tensors, float64 [3, count], uniform in 0..1."""
    key = adamw_rounded.key_of(seed, step, name, high)
    return (torch.stack(adamw_rounded.noise(first, count, key, CPU)).double() + 0.5) / 2**16


def assert_independent(a, b):
    """Correlation of two samples, of their upper halves, and of where they are near their ends:
    below 5 deviations."""
    for x, y in ((a, b), (a < 0.5, b < 0.5), (a < 0.01, b < 0.01), ((32 * a) % 1, (32 * b) % 1)):
        x, y = (value.double() - value.double().mean() for value in (x, y))
        correlation = (x * y).mean() / (x.square().mean() * y.square().mean()).sqrt()
        assert abs(correlation) < 5 / len(a) ** 0.5


@pytest.mark.parametrize("first", [0, 12345, 2**31 - COUNT // 2, 2**32 - COUNT])
def test_noise_is_uniform(first):
    for values in noises(first=first):
        deviation = COUNT**-0.5
        assert abs(values.mean() - 1 / 2) < 5 * (1 / 12) ** 0.5 * deviation
        assert abs((values - 0.5).square().mean() - 1 / 12) < 5 * (1 / 180) ** 0.5 * deviation
        counts = torch.histc(values, 256, 0, 1)
        chi_square = (counts - COUNT / 256).square().sum() / (COUNT / 256)
        assert abs(chi_square - 255) < 5 * (2 * 255) ** 0.5
        bits = (values * 2**16).long()
        for bit in range(16):
            assert abs((bits >> bit & 1).double().mean() - 0.5) < 5 * 0.5 * deviation


@pytest.mark.parametrize("lag", [1, 2, 3, 4, 8, 16, 64, 256, 576, 1024, 1536, 4096, 2**15, 2**17])
def test_neighbours_are_independent(lag):
    """In a row, and, at the lengths of rows, in a column."""
    for values in noises():
        assert_independent(values[lag:], values[:-lag])


def test_tensors_are_independent():
    param, exp_avg, exp_avg_sq = noises()
    for a, b in ((param, exp_avg), (param, exp_avg_sq), (exp_avg, exp_avg_sq)):
        for lag in (0, 1, 2, 64):
            assert_independent(a[lag:], b[: COUNT - lag])
            assert_independent(b[lag:], a[: COUNT - lag])


@pytest.mark.parametrize(
    "other", [{"step": 2}, {"step": 2**20}, {"seed": 1}, {"name": "weighu"}, {"high": 1}]
)
def test_steps_seeds_and_parameters_are_independent(other):
    """And none is another one's, shifted: not by a little, nor, at the peak of their circular
    correlation, by anything."""
    first, second = noises(), noises(**other)
    for a, b in zip(first, second):
        assert_independent(a, b)
        spectra = [torch.fft.rfft(x - x.mean()) for x in (a, b)]
        peak = torch.fft.irfft(spectra[0] * spectra[1].conj()).abs().max() * 12 / COUNT**0.5
        assert peak < 7  # of 2**18 normal numbers the largest is 4.6 on average


def test_neighbouring_steps_do_not_share_errors_over_time():
    """Of one element over many steps: lags of one and two steps."""
    values = torch.stack([noises(step, count=64) for step in range(1, 2049)])
    for lag in (1, 2):
        assert_independent(values[lag:].flatten(), values[:-lag].flatten())
