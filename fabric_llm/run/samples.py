"""--sample_prompts: what the model in training makes of a few prompts, at step 0 and with each checkpoint.

All ranks take part, with the wrapped model as it is, so that nothing is gathered or loaded for it: any strategy will do. Each
token is one forward pass over whole rows, and how many passes that are follows from the flags alone, so that no rank waits for
another. The most likely token is taken each time, and nothing random is drawn: training goes on as it would have without.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fabric_llm.base import ranks
from fabric_llm.base.command_line import Flags
from fabric_llm.base.fabric import Fabric
from fabric_llm.base.faults import Fault
from fabric_llm.checkpoint.progress import Progress
from fabric_llm.data import prompts
from fabric_llm.model.strategy import reshard
from fabric_llm.plan.plan import Plan
from fabric_llm.run.log import Log
from fabric_llm.run.metrics import MetricsFile

SAMPLES = "samples.jsonl"
DEFAULT_TOKENS = 64
MOST_TOKENS = 1024  # of a prompt and its continuation, and of the rows of a forward pass: it bounds the logits' memory


class Samples:
    """The samples of a run. All ranks call its methods; rank 0 writes samples.jsonl."""

    def __init__(self, fabric: Fabric, plan: Plan, logging: Flags, log: Log, mark: Callable[[int, str], None]) -> None:
        """logging: that group of flags. mark(step, doing): says that this rank works.

        Raises Fault (2) for prompts that can't be continued.
        """
        self.texts: list[str] = []
        if logging.sample_prompts is None:
            return
        self.device, self.log, self.mark = fabric.device, log, mark
        self.tokenizer, self.count = plan.model.tokenizer, logging.sample_tokens or DEFAULT_TOKENS
        self.texts = ranks.from_rank_zero(lambda: prompts.read(logging.sample_prompts))
        self.prompts = encoded(self.texts, self.tokenizer, self.count, min(MOST_TOKENS, *plan.contexts))
        is_writer = fabric.global_rank == 0
        self.file = MetricsFile(plan.run_directory / SAMPLES, plan.start.step) if is_writer else None
        self.told = False

    def take(self, model: nn.Module, progress: Progress) -> None:
        """Continue each prompt, if there are any, and write what came out."""
        if not self.texts:
            return
        began, step = time.monotonic(), progress.step
        with self.log.untimed:
            rows = continued(model, self.prompts, self.count, self.device, lambda: self.mark(step, "sampling"))
            self.mark(step, "in the next step")
        if self.file is not None:
            for text, prompt, row in zip(self.texts, self.prompts, rows):
                said = {"prompt": text, "text": continuation(self.tokenizer, prompt, row), "tokens": self.count}
                self.file.write(step, {**said, "how": "greedy"})
        if not self.told:
            self.log.line(f"Samples of {len(self.texts)} prompts: {time.monotonic() - began:.1f} s, into {SAMPLES}.")
            self.told = True


def encoded(texts: Sequence[str], tokenizer: Any, count: int, most: int) -> list[list[int]]:
    """The tokens of each prompt. Raises Fault (2) without a tokenizer, or where `most` tokens don't hold it and `count` more."""
    if tokenizer is None:
        raise Fault("--sample_prompts needs a tokenizer, and there is none beside the model or the data.")
    found = [tokenizer(text)["input_ids"] for text in texts]
    for text, tokens in zip(texts, found):
        if not tokens:
            raise Fault(f"--sample_prompts: {text[:40]!r} has no token.")
        if len(tokens) + count > most:
            raise Fault(
                f"--sample_prompts: {text[:40]!r} has {len(tokens)} tokens, which with --sample_tokens {count} is more than "
                f"{most}: those of a sequence of the run, and {MOST_TOKENS:,} at most."
            )
    return found


@torch.no_grad()
def continued(
    model: nn.Module, given: Sequence[Sequence[int]], count: int, device: torch.device, working: Callable[[], None]
) -> list[list[int]]:
    """`given` token lists, each with the `count` tokens that the model takes for the most likely ones. All ranks call it.

    Rows are filled up on the right, which a causal model doesn't see, and keep their length, so that compiled layers are
    compiled for one shape. working(): called after each forward pass, to say that this rank goes on.
    """
    length = max(map(len, given)) + count
    size = max(1, MOST_TOKENS // length)
    model.eval()
    found = []
    for start in range(0, len(given), size):
        found += _continue_rows(model, given[start : start + size], count, length, device, working)
    model.train()
    reshard(model)
    return found


def _continue_rows(
    model: nn.Module,
    given: Sequence[Sequence[int]],
    count: int,
    length: int,
    device: torch.device,
    working: Callable[[], None],
) -> list[list[int]]:
    tokens: Tensor = torch.zeros((len(given), length), dtype=torch.int64, device=device)
    for row, prompt in zip(tokens, given):
        row[: len(prompt)] = torch.tensor(prompt, device=device)
    rows = torch.arange(len(given), device=device)
    ends = torch.tensor([len(prompt) for prompt in given], device=device)
    for _ in range(count):
        tokens[rows, ends] = model(tokens)[rows, ends - 1].argmax(dim=-1)
        ends += 1
        working()
    return [row[: len(prompt) + count].tolist() for row, prompt in zip(tokens, given)]


def continuation(tokenizer: Any, prompt: Sequence[int], row: Sequence[int]) -> str:
    """The text of what follows `prompt` in `row`, up to the first end-of-sequence token."""
    added = list(row[len(prompt) :])
    if tokenizer.eos_token_id in added:
        added = added[: added.index(tokenizer.eos_token_id)]
    # Decoded together: spaces depend on what is before.
    whole, before = tokenizer.decode([*prompt, *added]), tokenizer.decode(prompt)
    return whole.removeprefix(before) if whole.startswith(before) else tokenizer.decode(added)
