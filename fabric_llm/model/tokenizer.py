"""Tokenizers, read and written beside models."""

import hashlib
import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Optional

from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import cached_file

from fabric_llm.base.faults import REFUSED, Fault
from fabric_llm.base.files import check_name
from fabric_llm.base.names import reach_hub
from fabric_llm.model.tokenizer_file import check_tokenizer_file

SENTENCEPIECE = "tokenizer.model"


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a local folder or a hub name.

    Raises Fault (77) for one that needs Python code of its own or would write files elsewhere when
    it is saved, ValueError for one without a vocabulary, and whatever transformers, huggingface_hub
    and the tokenizer's class raise where it can't be loaded.
    """
    if not os.path.isdir(name):
        reach_hub()
    try:
        # Bounded before tokenizers reads it. Older tokenizers have no tokenizer.json.
        with suppress(OSError):
            check_tokenizer_file(Path(cached_file(name, "tokenizer.json")))
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:
        # transformers has no class of exceptions of its own for this.
        if "custom code" in str(error) or "trust_remote_code" in str(error):
            raise Fault(
                f"tokenizer {name} needs Python code of its own, which is never run.", REFUSED
            ) from error
        raise
    # Where a folder has a model's configuration alone, transformers makes a tokenizer of the
    # special tokens and of the mark of a space.
    if not {*tokenizer.get_vocab()} - {*tokenizer.all_special_tokens, "▁"}:
        raise ValueError("it has no vocabulary, such as tokenizer.json")
    # Asked for here, since classes of transformers that don't read it, such as Gemma's, don't
    # fetch it.
    with suppress(OSError):
        tokenizer.sentencepiece = cached_file(name, SENTENCEPIECE)
    # The names of several templates become names of files when the tokenizer is saved.
    for template in tokenizer.chat_template if isinstance(tokenizer.chat_template, dict) else ():
        check_name(template, Path(name) / "tokenizer_config.json")
    return tokenizer


def identity(tokenizer: Optional[PreTrainedTokenizerBase]) -> Optional[str]:
    """Hash of its tokens, their ids, and which of them are special; None without a tokenizer."""
    if tokenizer is None:
        return None
    facts = sorted(tokenizer.get_vocab().items()), sorted(tokenizer.all_special_ids)
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """As `save_pretrained`, but so that transformers 4 reads it too, and without where it was read.

    The SentencePiece model beside which it was read, which converters ask for, goes with it.
    """
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    document = json.loads(file.read_bytes())
    # transformers writes where it has read the tokenizer, which means nothing elsewhere.
    for name in ("is_local", "local_files_only"):
        document.pop(name, None)
    # transformers 4 knows neither this class nor this list by their new names.
    if document.get("tokenizer_class") == "TokenizersBackend":
        document["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(document.get("extra_special_tokens"), list):
        document["additional_special_tokens"] = document.pop("extra_special_tokens")
    file.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", "utf-8")
    # One that `load_tokenizer` hasn't read has none. The file may be gone by now.
    beside = Path(getattr(tokenizer, "sentencepiece", ""))
    if beside.is_file() and not (folder / SENTENCEPIECE).exists():
        shutil.copyfile(beside, folder / SENTENCEPIECE)
