"""Text sampled from a model: a replay set where the data that it was trained on isn't there.

Documents of `self_replay` begin as the model's own did, with BOS or else with EOS, and are sampled at temperature 1 from the whole
distribution: whatever the model's generation settings are, these are samples of what it has learned (arXiv 2605.26097 replays such
text). A document ends at its EOS, or where a row is full.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig

from fabric_llm.data.order import random_key
from fabric_llm.model.loading import build_skeleton, disable_progress_bar, has_weights, load_config, open_weights
from fabric_llm.model.reference import load_reference
from fabric_llm.prepare.encoding import Generated, PieceFiles
from fabric_llm.prepare.tokenizer import packing_tokenizer

BATCH = {"cpu": 32, "cuda": 256}  # documents that are sampled side by side, at most


def self_replay(model_name: str, tokens: int, context_length: int, seed: int) -> Generated:
    """At least so many tokens of documents of up to `context_length`. Raises ValueError for a model without weights."""
    if not has_weights(model_name):
        raise ValueError(f"--self_replay {model_name}: it has no weights, and random ones know nothing to replay.")
    positions = getattr(load_config(model_name).get_text_config(), "max_position_embeddings", 2**31)
    longest = min(context_length, positions) - 1
    device = _device().type
    settings = {"model": model_name, "tokens": tokens, "longest_document": longest, "seed": seed}
    settings |= {"largest_batch": BATCH[device], "temperature": 1.0, "top_p": 1.0, "device": device}
    # No files where it is a name on the hub.
    files = [(path.name, path.stat()) for path in sorted(Path(model_name).glob("*.safetensors"))]
    settings |= {"weights": [[name, stat.st_size, stat.st_mtime_ns] for name, stat in files]}
    settings |= {"torch": str(torch.__version__), "transformers": transformers.__version__}
    sampler = cache(lambda: Sampler(model_name, longest))

    def fill(out: PieceFiles, number: int, before: int, documents: int) -> None:
        """A batch of whole documents: to cut the last ones, or to take the first that end, would favour short ones."""
        expected = before / documents if before else longest  # tokens of a document
        count = min(math.ceil((tokens - before) / expected), BATCH[device])
        for ids in sampler().documents(int(random_key(seed, number)) >> 1, count):
            out.add(ids, sampler().tokenizer.decode(ids))

    return Generated(settings, tokens, fill)


class Sampler:
    """A model on the device, and what its documents begin and end with."""

    def __init__(self, model_name: str, longest: int) -> None:
        """longest: tokens of a document, without what it begins with."""
        config, self.device = load_config(model_name), _device()
        stored = getattr(config, "dtype", None) or torch.float32
        disable_progress_bar()  # prepare_data.py has its own
        dtype = stored if self.device.type == "cuda" else torch.float32  # 16 bits are many times slower on most CPUs
        weights = open_weights(model_name, config, dtype, seed=0)
        self.model = load_reference(build_skeleton(config, dtype), weights).to(self.device).eval()
        self.tokenizer = tokenizer = packing_tokenizer(model_name)
        self.begin = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        self.special = np.array(sorted({*tokenizer.all_special_ids} - {tokenizer.unk_token_id}))
        unused = list(range(len(tokenizer), config.get_text_config().vocab_size))
        ids = {"eos_token_id": self.special.tolist(), "pad_token_id": tokenizer.eos_token_id}
        whole = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "suppress_tokens": unused or None}
        self.settings = GenerationConfig(**whole, **ids, bos_token_id=self.begin, max_new_tokens=longest)
        self.model.generation_config = self.settings  # or what the model's own says is filled in

    def documents(self, seed: int, count: int) -> Iterator[np.ndarray]:
        """Documents of a batch without the tokens that they begin and end with, int64 each."""
        start = torch.full((count, 1), self.begin, device=self.device)
        with torch.random.fork_rng(), torch.inference_mode():
            torch.manual_seed(seed)
            sampled: Tensor = self.model.generate(
                input_ids=start, attention_mask=torch.ones_like(start), generation_config=self.settings
            )
        for ids in sampled[:, 1:].cpu().numpy():
            ends = np.flatnonzero(np.isin(ids, self.special))
            yield ids[: ends[0]] if len(ends) else ids


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
