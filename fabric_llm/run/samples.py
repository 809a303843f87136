"""--sample_prompts: continue a few prompts with the model in training, at step 0 and with each
checkpoint.

All ranks take part, with the wrapped model, so nothing is gathered or loaded, under any strategy.
Each token is one forward pass over whole rows, and the number of passes follows from the flags, so
all ranks make the same. The most likely token is taken each time: no random numbers are drawn, so
training goes on as it would have without samples.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from fabric_llm.base import ranks
from fabric_llm.base.fabric import Fabric
from fabric_llm.base.faults import Fault
from fabric_llm.base.flag import Flags
from fabric_llm.checkpoint.keep import SAMPLES, Progress
from fabric_llm.data.sources import read_prompts
from fabric_llm.model.loading import prompt_tokens
from fabric_llm.model.sharded import reshard
from fabric_llm.plan.plan import Plan
from fabric_llm.run.log import Log
from fabric_llm.run.metrics import MetricsFile

# Tokens of a prompt with its continuation, and of all rows of a forward pass together. They bound
# the memory of the logits.
MAX_TOKENS = 1024


class Samples:
    """The samples of a run. All ranks call its methods; rank 0 writes samples.jsonl."""

    def __init__(
        self, fabric: Fabric, plan: Plan, logging: Flags, log: Log, mark: Callable[[int, str], None]
    ) -> None:
        """logging: the group of flags. mark: see `Watch.mark`.

        Raises Fault (2) without a tokenizer, or if a prompt and its continuation are longer than a
        sequence.
        """
        self.device, self.log, self.mark = fabric.device, log, mark
        self.tokenizer, self.count = plan.model.tokenizer, logging.sample_tokens
        if self.tokenizer is None:
            raise Fault(
                "--sample_prompts needs a tokenizer, and there is none beside the model or the "
                "data."
            )
        self.prompts: list[tuple[str, list[int]]] = []  # text, tokens
        # Tokens of a row, which the model can hold.
        longest = min(MAX_TOKENS, *plan.data.contexts)
        # Rank 0 reads the file for all, since other machines may not have it.
        for text in ranks.from_rank_zero(lambda: read_prompts(logging.sample_prompts)):
            tokens = prompt_tokens(self.tokenizer, text)
            of_prompt, room = f"--sample_prompts: {text[:40]!r}", longest - len(tokens)
            if not tokens:
                raise Fault(f"{of_prompt} has no tokens to go on from.")
            if room < self.count:
                fits = f"take --sample_tokens {room}" if room > 0 else "take a shorter prompt"
                raise Fault(
                    f"{of_prompt} has {len(tokens)} tokens, and with --sample_tokens {self.count} "
                    f"more than the {longest} of a row: {fits}."
                )
            self.prompts.append((text, tokens))
        # Rows are padded on the right, which a causal model doesn't see, and all have one length,
        # for which layers are compiled once.
        self.length = max(len(prompt) for _, prompt in self.prompts) + self.count
        # Opening it removes samples of steps that a resumed run makes again.
        self.file = None
        if fabric.global_rank == 0:
            self.file = MetricsFile(plan.run_directory / SAMPLES, plan.begins_at)

    @torch.no_grad()
    def take(self, model: nn.Module, progress: Progress) -> None:
        """Continue each prompt with the most likely tokens, and write the texts. All ranks call
        it."""
        began = time.monotonic()
        # As many rows as have MAX_TOKENS together.
        at_once = max(1, MAX_TOKENS // self.length)
        with self.log.untimed:
            # Without dropout.
            model.eval()
            for start in range(0, len(self.prompts), at_once):
                prompts = self.prompts[start : start + at_once]
                rows = self._continue(model, [tokens for _, tokens in prompts], progress.step)
                if self.file is not None:
                    self._write(progress, prompts, rows)
            model.train()
            # These passes had no backward, so fsdp left the outermost unit whole.
            reshard(model)
            self.mark(progress.step, "in the next step")
        seconds = time.monotonic() - began
        self.log.say(f"samples of {len(self.prompts)} prompts: {seconds:.1f} s, into {SAMPLES}")

    def _continue(self, model: nn.Module, prompts: list[list[int]], step: int) -> list[list[int]]:
        """The prompts with their continuations, in rows of `length` tokens."""
        tokens = torch.zeros((len(prompts), self.length), dtype=torch.int64, device=self.device)
        for row, prompt in zip(tokens, prompts):
            row[: len(prompt)] = torch.tensor(prompt, device=self.device)
        # A row's next token is predicted at its last one, and written behind it.
        rows = torch.arange(len(prompts), device=self.device)
        ends = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        # All ranks make as many passes, also after a text has ended: none may wait for another.
        for _ in range(self.count):
            tokens[rows, ends] = model(tokens)[rows, ends - 1].argmax(dim=-1)
            ends += 1
            self.mark(step, "sampling")
        return tokens.tolist()

    def _write(
        self, progress: Progress, prompts: list[tuple[str, list[int]]], rows: list[list[int]]
    ) -> None:
        for (text, prompt), row in zip(prompts, rows):
            added = continuation(self.tokenizer, prompt, row[: len(prompt) + self.count])
            sample = {"prompt": text, "text": added, "tokens": self.count, "how": "greedy"}
            self.file.write(progress, sample)


def continuation(tokenizer: Any, prompt: Sequence[int], row: Sequence[int]) -> str:
    """The text of what follows `prompt` in `row`, up to the first end-of-sequence token."""
    added = list(row[len(prompt) :])
    # All rows have `count` new tokens, also those whose text ended before.
    if tokenizer.eos_token_id in added:
        added = added[: added.index(tokenizer.eos_token_id)]
    # Decoded with the prompt: whether a space comes first depends on what is before.
    whole, before = tokenizer.decode([*prompt, *added]), tokenizer.decode(prompt)
    if whole.startswith(before):
        return whole.removeprefix(before)
    # Some tokenizers decode the prompt differently with text behind it: then decode the rest alone.
    return tokenizer.decode(added)
