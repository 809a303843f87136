"""Families of causal models at toy size, each trained, resumed and exported by the code that users
start.

FAMILIES: model_type of transformers -> what its configuration class is given besides COMMON.
"""

from __future__ import annotations

import os
import platform
import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from conftest import CONTEXT, SIZES, VOCABULARY, write_data  # noqa: F401
from ranks import Job, run_ranks
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.utils import logging

LAYERS = 2
TIMEOUT_SECONDS = 300.0
COMMAND = "python -m pytest -m families --families_table docs/results/families.md"

# Names that most configuration classes share.
COMMON: dict[str, Any] = {
    **SIZES, "intermediate_size": 48, "num_hidden_layers": LAYERS, "pad_token_id": None,
}
GPT_NAMES: dict[str, Any] = {"n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_positions": 64}
KV_4: dict[str, Any] = {"num_key_value_heads": 4}
MLA: dict[str, Any] = {  # multi-head latent attention
    "kv_lora_rank": 16, "q_lora_rank": 24,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
}
MAMBA: dict[str, Any] = {"mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2}
MAMBA2: dict[str, Any] = {
    **MAMBA, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}
LINEAR_LAYER: dict[str, Any] = {"layer_types": ["linear_attention", "full_attention"]}
LINEAR: dict[str, Any] = {  # gated delta net
    **LINEAR_LAYER, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}
SLIDING: dict[str, Any] = {
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}
HEAD: dict[str, Any] = {"head_dim": 8}
GEMMA: dict[str, Any] = {**SLIDING, **HEAD, "query_pre_attn_scalar": 8}
LAYER_INPUT: dict[str, Any] = {
    "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 0,
}
NARROW: dict[str, Any] = {"moe_intermediate_size": 16}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2}
LOCAL: dict[str, Any] = {"num_local_experts": 4}
DENSE_FIRST: dict[str, Any] = {
    **NARROW, "n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
}
DEEPSEEK: dict[str, Any] = {**MLA, **KV_4, **DENSE_FIRST, "topk_group": 1}

FAMILIES: dict[str, dict[str, Any]] = {
    "apertus": {},
    "arcee": HEAD,
    "bamba": {**MAMBA2, "attn_layer_indices": [1]},
    "biogpt": {**KV_4, "pad_token_id": 1},
    "bitnet": {},
    "bloom": {"n_layer": LAYERS, "n_head": 4},
    "codegen": {**GPT_NAMES, "rotary_dim": 4, "n_ctx": 64},
    "cohere": {},
    "cohere2": {**SLIDING, **HEAD},
    "ctrl": {**GPT_NAMES, "dff": 48},
    "dbrx": {
        "d_model": 32, "n_heads": 4, "n_layers": LAYERS, "max_seq_len": 64,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {**DEEPSEEK, "n_group": 1},
    "deepseek_v3": {**DEEPSEEK, "n_group": 2},
    "diffllama": HEAD,
    "doge": KV_4,
    "dots1": {**HEAD, **DENSE_FIRST, "n_shared_experts": 1},
    "ernie4_5": HEAD,
    "ernie4_5_moe": {
        **NARROW, "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1,
        "moe_layer_end_index": 1,
    },
    "exaone4": {**SLIDING, "sliding_window_pattern": 2},
    "falcon": {"num_kv_heads": 2, "new_decoder_architecture": True, "ffn_hidden_size": 48},
    "falcon_h1": {**MAMBA2, "mamba_d_ssm": 64, **HEAD},
    "falcon_mamba": {"state_size": 8, "time_step_rank": 4, "intermediate_size": 64},
    "flex_olmo": EXPERTS,
    "gemma": HEAD,
    "gemma2": GEMMA,
    "gemma3_text": GEMMA,
    "gemma3n_text": {
        **SLIDING, **HEAD, **LAYER_INPUT, "intermediate_size": [48, 48],
        "laurel_rank": 4, "activation_sparsity_pattern": [0.5, 0.0],
    },
    "gemma4_text": {**SLIDING, **HEAD, **LAYER_INPUT, "global_head_dim": 16},
    "glm": HEAD,
    "glm4": HEAD,
    "glm4_moe": {**HEAD, **DENSE_FIRST},
    "gpt2": {**GPT_NAMES, "n_inner": 48},
    "gpt_bigcode": {**GPT_NAMES, "n_inner": 48},
    "gpt_neo": {
        "num_layers": LAYERS, "num_heads": 4, "window_size": 8,
        "attention_types": [[["global", "local"], 1]],
    },
    "gpt_neox": {},
    "gpt_neox_japanese": {},
    "gpt_oss": {**SLIDING, **HEAD, **LOCAL, "num_experts_per_tok": 2},
    "gptj": {**GPT_NAMES, "rotary_dim": 4, "n_inner": 48},
    "granite": {},
    "granitemoe": LOCAL,
    "granitemoehybrid": {**MAMBA2, **LOCAL, **LINEAR_LAYER, "shared_intermediate_size": 16},
    "granitemoeshared": {**LOCAL, "shared_intermediate_size": 16},
    "helium": HEAD,
    "hunyuan_v1_dense": HEAD,
    "hunyuan_v1_moe": {**HEAD, "num_experts": 4, "moe_topk": 2},
    "jamba": {
        **MAMBA, "mamba_dt_rank": 4, "attn_layer_period": 2, "attn_layer_offset": 1,
        "num_experts": 4, "use_mamba_kernels": False,
    },
    "jetmoe": {**LOCAL, "kv_channels": 8},
    "kimi_linear": {
        **MLA, **NARROW, **KV_4, **LINEAR_LAYER, "num_experts": 4, "num_experts_per_token": 2,
        "linear_head_dim": 8, "linear_num_heads": 4, "mlp_layer_types": ["dense", "sparse"],
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_multiple_of": 16},
    "llama": {},
    "llama4_text": {
        **HEAD, **LOCAL, "intermediate_size_mlp": 48, "attention_chunk_size": 8,
        "no_rope_layers": [1, 0], "moe_layers": [1],
        "layer_types": ["chunked_attention", "full_attention"],
    },
    "longcat_flash": {
        **MLA, **KV_4, "num_layers": LAYERS, "ffn_hidden_size": 48, "n_routed_experts": 4,
        "zero_expert_num": 2, "moe_topk": 2, "expert_ffn_hidden_size": 16, "head_dim": 4,
    },
    "mamba": {"state_size": 8, "time_step_rank": 4},
    "mamba2": {
        **HEAD, "state_size": 8, "num_heads": 8, "n_groups": 2, "time_step_rank": 4,
        "chunk_size": 8,
    },
    "minicpm3": {**MLA, **KV_4, "dim_model_base": 32},
    "minimax": {**HEAD, **LOCAL, **LINEAR_LAYER, "block_size": 8},
    "ministral": {**SLIDING, **HEAD},
    "mistral": {**HEAD, "sliding_window": 8},
    "mixtral": {**HEAD, **LOCAL},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": LAYERS, "max_seq_len": 64},
    "nanochat": KV_4,
    "nemotron": HEAD,
    "nemotron_h": {
        **HEAD, **NARROW, "moe_shared_expert_intermediate_size": 16, "n_routed_experts": 4,
        "ssm_state_size": 8, "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2,
        "chunk_size": 8, "use_mamba_kernels": False,
        "layers_block_type": ["linear_attention", "full_attention", "mlp", "moe"],
    },
    "olmo": {},
    "olmo2": {},
    "olmo3": SLIDING,
    "olmoe": EXPERTS,
    "openai-gpt": GPT_NAMES,
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "pad_token_id": 1},
    "persimmon": {},
    "phi": {},
    "phi3": {"original_max_position_embeddings": 64},
    "phimoe": LOCAL,
    "qwen2": {},
    "qwen2_moe": {**NARROW, **EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3": HEAD,
    "qwen3_5_text": {**HEAD, **LINEAR},
    "qwen3_moe": {**HEAD, **NARROW, **EXPERTS},
    "qwen3_next": {
        **HEAD, **LINEAR, **NARROW, **EXPERTS,
        "shared_expert_intermediate_size": 16,
    },
    "recurrent_gemma": {
        **HEAD, "block_types": ["recurrent", "attention"],
        "attention_window_size": 8, "lru_width": 32,
    },
    "rwkv": {"attention_hidden_size": 32, "rescale_every": 1},
    "seed_oss": HEAD,
    "smollm3": {"no_rope_layers": [1, 0]},
    "stablelm": {},
    "starcoder2": {},
    "vaultgemma": GEMMA,
    "xglm": {
        "d_model": 32, "num_layers": LAYERS, "attention_heads": 4,
        "ffn_dim": 48, "pad_token_id": 1,
    },
    "xlstm": {"num_heads": 4, "embedding_dim": 32, "chunk_size": 8},
    "youtu": {**MLA, **KV_4},
    "zamba": {
        **MAMBA, **KV_4, "mamba_dt_rank": 4, "n_mamba_heads": 2, "num_hidden_layers": 4,
        "attention_hidden_size": 64, "attention_head_dim": 16, "use_mamba_kernels": False,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
    },
    "zamba2": {
        **MAMBA, **KV_4, "n_mamba_heads": 8, "mamba_ngroups": 1, "chunk_size": 8,
        "adapter_rank": 4, "num_mem_blocks": 1, "use_mem_rope": True,
        "layers_block_type": ["linear_attention", "hybrid"],
    },
}


def toy_config(family: str) -> PretrainedConfig:
    """The configuration of `family` at toy size. Its class may refuse names that it doesn't
    know."""
    return AutoConfig.for_model(family, **{**COMMON, **FAMILIES[family]})


def write_model(family: str, folder: Path) -> Path:
    """A model directory with random weights as the family's files have them."""
    with warnings.catch_warnings():  # of what a toy size leaves unused
        warnings.simplefilter("ignore")
        verbosity = logging.get_verbosity()
        logging.set_verbosity_error()
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(toy_config(family)).save_pretrained(folder)
        logging.set_verbosity(verbosity)
    return folder


# ------------------------------------------------------------------------------- what a family does


@dataclass
class Tried:
    """What came of one family."""

    family: str
    model_class: str = ""
    attention: str = ""
    documents: str = ""  # "apart", or what a document sees of the one before it
    # number of devices -> "yes", or what was said
    devices: dict[int, str] = field(default_factory=dict)
    # number of devices -> difference of the export's
    logits: dict[int, str] = field(default_factory=dict)
    kept: str = ""  # tensors of other dtypes than a cast of the whole model would give them


def try_family(
    family: str, folder: Path, data: Path, devices: tuple[int, ...] = (1, 2), more: Iterable[Any] = ()
) -> Tried:
    """Train two steps with default flags, resume at the first, train to the second again, export;
    on so many devices. more: other flags."""
    tried = Tried(family)
    model = write_model(family, folder / family)
    for count in devices:
        run = folder / f"{family}-{count}"
        flags = ("--model_name", model, "--train_data_dir", data, "--output_dir", folder)
        flags += ("--run_name", run.name, "--global_batch_size", 4, "--max_step", 2)
        flags += ("--save_step_interval", 1, "--eval_iters", 1, *more)
        said = train(count, *flags)
        if said is None:
            describe(tried, run)
            said = train(count, *flags, "--resume", "true", "--checkpoint", run / "step-00000001")
        if said is None:
            try:
                call = (export_difference, run, folder / f"{run.name}-hf")
                [difference] = run_ranks(1, *call, timeout_seconds=TIMEOUT_SECONDS)
                tried.logits[count] = f"{difference:.1e}" if difference else "0"
            except AssertionError as error:
                said = str(error).strip().splitlines()[-1]
        tried.devices[count] = said or "yes"
    return tried


outputs: dict[str, str] = {}  # run's name -> what rank 0 printed when it was trained


def train(count: int, *flags: Any) -> str | None:
    """Run train.py. What it said where it failed, else None."""
    job = Job(count, *flags, before=warn_only)
    codes = job.wait(TIMEOUT_SECONDS)
    lines = job.output[0].splitlines()
    outputs[str(flags[flags.index("--run_name") + 1])] = job.output[0]
    if not any(codes):
        return None
    said = [line for line in lines if line.startswith("train.py: ")] or lines[-1:] or ["nothing"]
    return said[0].removeprefix("train.py: error: ")


def warn_only() -> None:
    """As for users: what a model's code warns of doesn't end a run."""
    warnings.simplefilter("default")


def export_difference(run: Path, output: Path) -> float:
    from fabric_llm.checkpoint.keep import checkpoint_at as find
    from fabric_llm.weights.export import export

    warn_only()
    return export(find(run), output).logits_difference


def describe(tried: Tried, run: Path) -> None:
    """Fill in what a run that trained says of its model."""
    from fabric_llm.checkpoint.keep import checkpoint_at as find
    from fabric_llm.model.loading import build_skeleton, causal_lm_class, load_config

    config = load_config(str(find(run)))
    skeleton = build_skeleton(config, torch.bfloat16)
    tried.model_class = causal_lm_class(config).__name__
    said = outputs[run.name]
    tried.attention = found[1] if (found := re.search(r"(\w+) attention, ", said)) else "sdpa"
    leak = re.search(r"change by up to (\S+) of their standard deviation", said)
    tried.documents = "apart" if leak is None else f"see each other, {leak[1]}"
    buffers = [one for one in skeleton.named_buffers() if not one[0].endswith("inv_freq")]
    kept = {
        "float32 parameters": short_names(skeleton.named_parameters(), torch.float32),
        "float32 buffers": short_names(buffers, torch.float32),
        "bfloat16 buffers": short_names(buffers, torch.bfloat16),
    }
    tried.kept = "; ".join(f"{kind}: {names}" for kind, names in kept.items() if names)


def short_names(tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype) -> str:
    """The last two words of the names of tensors of this dtype, each once."""
    names = {".".join(name.split(".")[-2:]) for name, one in tensors if one.dtype == dtype}
    return ", ".join(sorted(names))


# ------------------------------------------------------------------------------- the table


def table(rows: list[Tried], seconds: float) -> str:
    """docs/results/families.md"""
    packages = ("torch", "lightning", "transformers")
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    good = [row for row in rows if set(row.devices.values()) == {"yes"}]
    lines = [
        "# Families of models: what trains with default flags",
        "",
        f"- Command: `{COMMAND}`",
        f"- Date: {date.today()}; {seconds:,.0f} s on {os.cpu_count()} CPU cores, load "
        f"{os.getloadavg()[1]:.1f}",
        f"- Versions: Python {platform.python_version()}, {versions}",
        f"- Models: toy sizes of the causal LM classes, random weights, vocabulary of {VOCABULARY}",
        "- Each: bf16-true, --attention auto, --document_masking auto, on one device and on two "
        "with fsdp: two steps, resumed after the first, exported, and logits compared",
        "- Documents: *see each other* means that --document_masking auto is off. The number is "
        "the largest change of a document's logits when the one before it is another, relative to "
        "their standard deviation; with random weights it shows that there is a way, not how much "
        "a trained model makes of it",
        "- Attention: what `--attention auto` takes; eager where the class has no SDPA",
        "- Kept as transformers has it: what a cast of the whole model to bfloat16, or FSDP's "
        "casts of buffers, would change, besides RoPE's frequencies, which are float32 in all",
        "- Logits: mean difference between the export and the model in training, relative to "
        "their standard deviation",
        "- Not measured: GPUs, trained weights",
        "",
        f"{len(good)} of {len(rows)} families train, resume and export on one device and on two.",
        "",
        "| model_type | class | attention | documents | one device | two, fsdp | logits, one / "
        "two | kept as transformers has it |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: row.family):
        devices = [row.devices.get(count, "not tried") for count in (1, 2)]
        devices = [said if said in ("yes", "not tried") else f"refused: {said}" for said in devices]
        logits = " / ".join(row.logits.get(count, "-") for count in (1, 2))
        cells = [row.family, row.model_class, row.attention, row.documents, *devices, logits]
        cells.append(row.kept or "-")
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"
