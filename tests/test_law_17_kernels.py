"""Law 17: where a kernel runs elsewhere than it was measured, its own conditions are checked.

The kernels of GPUs can't run here. A checker of their conditions, written from their source, stands
in the place of each, and every family takes the choices that would be made for it on GPUs of
several generations.
"""

import pytest
import torch
from families import FAMILIES, toy_config
from ranks import run_ranks, toy_run
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

import train
from fabric_llm.model import capabilities, packed_attention
from fabric_llm.model.language_model import LanguageModel
from fabric_llm.run import reference

CAPABILITIES = [(7, 0), (7, 5), (8, 0), (9, 0), (10, 0)]  # V100, T4, A100, H100, B200
MLA = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "head_dim": 64}
OTHERS = {  # sizes of heads of models that people train, at toy size else
    "heads of 100 (OpenLLaMA 3B)": ("llama", {"head_dim": 100}),
    "heads of 512 (Gemma 4)": ("llama", {"head_dim": 512}),
    "192 and 128 (DeepSeek-V3)": ("deepseek_v3", {**MLA, "v_head_dim": 128}),
    # values of 256, more than queries of 192
    "192 and 256 (GLM-4 MoE Lite)": ("deepseek_v3", {**MLA, "v_head_dim": 256}),
}


def made(family, more=None):
    torch.manual_seed(0)
    config = toy_config(family)
    for name, value in (more or {}).items():
        setattr(config, name, value)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def varlen(capability, called, dtypes=(torch.float16, torch.bfloat16)):
    """What flash_api.cpp of PyTorch 2.11 to 2.13 asks of `varlen_attn`, and then PyTorch's own
    attention. dtypes: those that it takes."""

    def kernel(
        query, key, value, ends, ends_too, longest, longest_too, *, scale, window_size, **options
    ):
        assert capability >= (8, 0), "FlashAttention only supports Ampere GPUs or newer"
        assert query.dtype in dtypes, "only fp16 and bf16 data type"
        assert query.dtype == key.dtype == value.dtype, "the same dtype"
        size = query.shape[-1]
        assert key.shape[-1] == value.shape[-1] == size, (
            "v must have shape (total_k, num_heads_k, head_size_og)"
        )
        assert size % 8 == 0 and size <= 256, f"head_size {size}"
        assert query.shape[1] % key.shape[1] == 0 and (
            options.get("enable_gqa")
            or not packed_attention.ASKS_FOR_GROUPS  # PyTorch 2.11
            or query.shape[1] == key.shape[1]
        )
        assert ends.dtype == torch.int32 and ends is ends_too or torch.equal(ends, ends_too)
        assert all(tensor.stride(-1) == 1 for tensor in (query, key, value)), (
            "contiguous last dimension"
        )
        assert longest >= ends.diff().max() and window_size[1] == 0
        called.append(size)
        times = query.shape[1] // key.shape[1]
        key, value = (tensor.repeat_interleave(times, dim=1) for tensor in (key, value))
        window = None if window_size[0] < 0 else window_size[0] + 1
        return packed_attention._one_by_one([query, key, value], ends, scale, 0.0, window)

    return kernel


def trains_as_chosen(model, capability, precision, monkeypatch):
    """(the choice, sizes that the kernel got) after a backward pass over packed rows with what is
    chosen."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    takes = capabilities.takes_packed_attention(model)
    if not takes or reference.no_kernel(model, "cuda", precision) is not None:
        return "masked", []
    called, most = [], packed_attention.MAX_HEAD_SIZE
    monkeypatch.setattr(packed_attention, "varlen_attn", varlen(capability, called))
    monkeypatch.setattr(packed_attention, "_has_kernel", lambda query, size: size <= most)
    ids = torch.randint(3, 60, (2, 24), generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": ids, "labels": ids, "position_ids": torch.arange(24).expand(2, -1) % 7}
    with capabilities.attention(model, packed_attention.PACKED):
        LanguageModel(model.train())(**inputs).backward()
    return "packed", called


@pytest.mark.quick_cases(r"\[(gpt2|deepseek_v3|gemma3_text)\]|heads of|192")
@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_the_kernel_of_packed_attention_gets_what_it_takes(family, monkeypatch):
    name, more = OTHERS.get(family, (family, None))
    model = made(name, more)
    for capability in CAPABILITIES:
        chosen, sizes = trains_as_chosen(model, capability, "bf16-true", monkeypatch)
        assert (chosen == "packed") == bool(sizes)
        assert capability >= (8, 0) or chosen == "masked"
        monkeypatch.undo()


@pytest.mark.parametrize(
    ("head_size", "dropout", "precision", "capability", "words"),
    [
        (64, 0.0, "bf16-true", (9, 0), None),
        (64, 0.0, "16-mixed", (7, 5), "a GPU of compute capability 8.0, and this one has 7.5"),
        (512, 0.0, "bf16-mixed", (10, 0), "not of 512"),
        (64, 0.1, "bf16-mixed", (9, 0), "no dropout"),
        (64, 0.0, "32-true", (9, 0), "16 bits"),
    ],
)
def test_it_says_why_there_is_no_kernel(head_size, dropout, precision, capability, words):
    why = packed_attention.no_kernel(capability, precision, head_size, dropout)
    assert why is None if words is None else words in why


def test_dropout_of_attention_is_seen(monkeypatch):
    assert capabilities.heads_in_training(made("gpt2"))[1] == toy_config("gpt2").attn_pdrop == 0.1


# ------------------------------------------------------------------------------- messages of NCCL

# getNcclDataType of PyTorch's ProcessGroupNCCL.cpp; without what only some GPUs sum.
SENT = {torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64}
SENT |= {torch.float16, torch.bfloat16, torch.float32, torch.float64}


class Messages(TorchDispatchMode):
    """Keeps (name, dtype, whether it is contiguous) of each tensor that a collective takes, and
    the names of all that is called."""

    def __init__(self):
        super().__init__()
        self.sent, self.called = set(), set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.called.add(function.overloadpacket.__name__.rstrip("_"))
        if function.namespace in ("c10d", "_c10d_functional"):
            for one in tree_leaves((args, kwargs)):
                if isinstance(one, torch.Tensor):
                    self.sent.add((str(function), one.dtype, one.is_contiguous()))
        return function(*args, **(kwargs or {}))


def messages_of(argv):
    with Messages() as messages:
        train.main(argv)
    return messages.sent


@pytest.mark.quick_cases(r"\[fsdp2")
@pytest.mark.parametrize(
    ("strategy", "precision", "more"),
    [
        ("fsdp", "bf16-true", "--state_dict_type full"),
        ("fsdp", "32-true", "--state_dict_type sharded --grad_clip 0"),
        ("fsdp2", "bf16-true", "--state_dict_type full --ema_decay 0.9"),
        ("fsdp2", "bf16-mixed", "--state_dict_type sharded --context_parallel 2"),
        ("ddp", "bf16-true", "--freeze embeddings"),
    ],
)
def test_nccl_sends_what_ranks_tell_each_other(toys, tmp_path, strategy, precision, more):
    words = f"--devices 2 --max_step 2 --save_step_interval 1 --eval_step_interval 1 {more}"
    argv = [*toy_run(toys, tmp_path), *words.split(), "--global_batch_size", 4]
    argv += ["--strategy", strategy, "--precision", precision]
    first, *others = run_ranks(2, messages_of, [str(word) for word in argv])
    assert len(first) > 4, "of the run itself"
    for sent in (first, *others):
        assert {dtype for _, dtype, _ in sent} <= SENT
        assert all(is_contiguous for *_, is_contiguous in sent), sent


def test_an_evaluation_adds_nothing_in_any_order():
    """As these do on a GPU: a resumed run would log other last bits."""
    model, ids = LanguageModel(made("llama"), chunked=True), torch.arange(48).view(2, 24)
    with torch.no_grad(), Messages() as messages:
        model(ids, ids, places=ids % 12)
        model(ids, ids, questions=torch.arange(2))
    assert not messages.called & {"index_add", "scatter_add", "index_put"}
