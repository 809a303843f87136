"""`python -m fabric_llm.generate checkpoints/RUN --prompt TEXT`: what a model writes after a text,
as it is made (docs/runs.md)."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Optional

from fabric_llm.base import register
from fabric_llm.base.command_line import parse
from fabric_llm.base.ending import in_one_sentence
from fabric_llm.base.flag import option
from fabric_llm.base.names import command
from fabric_llm.base.program import plain_output
from fabric_llm.checkpoint import keep
from fabric_llm.mirror.fetch import local

PROGRAM = "python -m fabric_llm.generate"
DESCRIPTION = (
    f"usage: {PROGRAM} checkpoints/RUN --prompt TEXT\nPrint what a model writes after a text, "
    "without a chat template."
)
NO_TEXT = "There is no text to go on from: give --prompt TEXT, or pass it on standard input."


@dataclass
class GenerateArguments:
    """Options"""

    model: str = option(
        None,
        (
            "run (its latest checkpoint), checkpoint or Hugging Face directory; its flag may be "
            "left out"
        ),
        path=True,
    )
    prompt: Optional[str] = option(None, "the text to go on from (default: all of standard input)")
    max_new_tokens: int = option(128, "tokens at most; the model may end its text before", above=0)
    temperature: float = option(
        0.8, "what the logits are divided by; 0: always the most likely token", at_least=0
    )
    top_p: float = option(
        1.0, "draw from the most likely tokens that have this probability together", above=0
    )
    seed: int = option(1234, "the same seed gives the same text", at_least=0)
    device: Literal["auto", "cpu"] = option("auto", "auto: a GPU where there is one")


def write(folder: str, text: str, given: GenerateArguments) -> None:
    """Print `text` and what the model in `folder` writes after it. Raises ValueError where they
    don't go together, or Fault."""
    import torch  # for which --help and mistakes don't wait
    from transformers import AutoModelForCausalLM, GenerationConfig, TextStreamer

    from fabric_llm.model import loading

    loading.disable_progress_bar()
    # Refuses a model that would run code of its own.
    config, tokenizer = loading.load_config(folder), loading.tokenizer_beside(folder)
    if tokenizer is None or not loading.has_weights(folder):
        lacking = "tokenizer" if tokenizer is None else "weights"
        raise ValueError(f"{folder!r} has no {lacking} to generate with.")
    # int64 [1, tokens]
    prompt = torch.tensor([loading.prompt_tokens(tokenizer, text)])
    # Beyond its positions a model writes noise. Some have no such limit.
    most = getattr(config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
    if prompt.shape[1] == 0:
        raise ValueError(NO_TEXT)
    if prompt.shape[1] > most - given.max_new_tokens:
        raise ValueError(
            f"The prompt has {prompt.shape[1]} tokens, which with --max_new_tokens "
            f"{given.max_new_tokens} must be no more than the model's {most}."
        )
    device = "cuda" if given.device == "auto" and torch.cuda.is_available() else "cpu"
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, config=config, trust_remote_code=False, output_loading_info=True
    )
    # transformers would only warn, and draw them at random.
    if info["missing_keys"]:
        raise ValueError(f"{folder!r} has no weights for {sorted(info['missing_keys'])[0]}.")
    torch.manual_seed(given.seed)
    how: dict[str, Any] = {
        "do_sample": given.temperature > 0,
        "max_new_tokens": given.max_new_tokens,
    }
    # At temperature 0 nothing is drawn, and transformers warns of settings for it.
    if given.temperature:
        how |= {"temperature": given.temperature, "top_p": given.top_p, "top_k": 0}
    # What else the model's own file asks for, such as a penalty or beams, isn't what this command
    # says it does.
    how |= {
        name: getattr(model.generation_config, name)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
    model.generation_config = GenerationConfig(**how)
    model.to(device).generate(
        prompt.to(device), streamer=TextStreamer(tokenizer, skip_special_tokens=True)
    )


def main(argv: Optional[list[str]] = None) -> None:
    """Run the command. Raises SystemExit with an exit code of docs/faults.md where it fails."""
    with in_one_sentence(PROGRAM) as ending:
        given = GenerateArguments(
            **parse(PROGRAM, DESCRIPTION, [GenerateArguments], argv, first="model")
        )
        ending.left = "the text is cut off"
        if given.top_p > 1:
            raise ValueError(f"--top_p must be at most 1, such as 0.9, not {given.top_p:g}.")
        # A terminal would wait for a text without a word. Told before the model is verified.
        is_at_terminal = given.prompt is None and (sys.stdin is None or sys.stdin.isatty())
        if given.prompt == "" or is_at_terminal:
            raise ValueError(NO_TEXT)
        folder = Path(local(given.model))
        # A run stands for its latest checkpoint, and a checkpoint must be whole.
        # A full checkpoint has a config.json as a model has, and besides it the folder `trainer`.
        if not (folder / "config.json").is_file() or (folder / "trainer").is_dir():
            folder = keep.checkpoint_at(folder)
            keep.whole(folder)
            register.load_of_run(folder)
        # transformers can't read a sharded checkpoint.
        if (folder / "weights").is_dir():
            exporting = command("python", "export_hf.py", folder, output="hf/NAME")
            raise ValueError(f"{str(folder)!r} is sharded: export it first, {exporting}.")
        # The line feed that `echo` adds would be part of the prompt.
        try:
            text = given.prompt
            if text is None:
                text = sys.stdin.read().removesuffix("\n")
            # Half of a surrogate pair stands for a byte that isn't UTF-8.
            text.encode()  # in the locale C, Python reads any bytes
        except UnicodeError as error:
            raise ValueError("The text on standard input isn't UTF-8.") from error
        write(str(folder), text, given)


if __name__ == "__main__":
    plain_output()
    main()
