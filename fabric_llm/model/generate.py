"""A short text from a finished model, with plain transformers: the quickest look at what was learned."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def generate(folder: str, prompt: str, max_new_tokens: int, seed: int = 0) -> str:
    """Sampled continuation of `prompt`, prompt included, from a directory that `from_pretrained` opens."""
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(folder, use_safetensors=True, trust_remote_code=False).eval()
    inputs = tokenizer(prompt, return_tensors="pt")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokens = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=max_new_tokens,
            do_sample=True,
            temperature=0.7,
            top_k=50,
            pad_token_id=tokenizer.eos_token_id,
        )
    return tokenizer.decode(tokens[0], skip_special_tokens=True)
