"""The tokens of a dataset are those that the model's tokenizer makes, and its documents end as the
model's texts do."""

import json
import shutil
from copy import deepcopy

import pytest
from ranks import Job
from test_context_parallel import run_of
from test_tasks import WORDS
from tokenizers.normalizers import Lowercase
from transformers import AutoModelForCausalLM, LlamaConfig

import prepare_data
from fabric_llm.prepare.tokenizer import train_byte_level_bpe


@pytest.mark.longer
def test_data_of_a_tokenizer_with_other_rules_or_another_end_is_refused(tmp_path):
    """All have the same vocabulary."""
    texts = [" ".join(WORDS[i:] + WORDS[:i]) for i in range(len(WORDS))]
    corpus = tmp_path / "text.jsonl"
    corpus.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    base = train_byte_level_bpe(texts, vocab_size=280)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = LlamaConfig(vocab_size=len(base), num_attention_heads=2, head_dim=8, **sizes)
    lowercase, ending = deepcopy(base), deepcopy(base)
    lowercase.backend_tokenizer.normalizer = Lowercase()
    ending.eos_token = base.convert_ids_to_tokens(7)
    for name, tokenizer in (("base", base), ("lowercase", lowercase), ("ending", ending)):
        config.eos_token_id = base.eos_token_id
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
        flags = f"--input {corpus} --tokenizer {tmp_path / name} --output {tmp_path / name}-data"
        sizes = "--context_length 8 --validation_fraction 0.3"
        prepare_data.main([*flags.split(), *sizes.split()])

    def said(model, data):
        places = (tmp_path / model, tmp_path / f"{data}-data", tmp_path)
        job = Job(1, *run_of(*places, f"{model}-{data}"))
        return job.wait(), job.output[0]

    assert said("base", "base")[0] == [0]
    code, words = said("base", "lowercase")
    assert code == [2] and "was made with a different tokenizer" in words and "The Quick" in words
    # Without the model's tokenizer, those of the datasets are compared.
    shutil.copytree(tmp_path / "base", tmp_path / "none", ignore=shutil.ignore_patterns("token*"))
    flags = run_of(tmp_path / "none", tmp_path / "base-data", tmp_path, "none")
    job = Job(1, *flags, "--eval_iters", 1, "--eval_data", f"other={tmp_path / 'lowercase-data'}")
    assert job.wait() == [2] and "from that of '" in job.output[0], job.output[0]
    code, words = said("none", "base")
    assert code == [0] and "it isn't known whether" in words
    code, words = said("base", "ending")
    assert code == [2] and "end with token 7, and texts of" in words
    code, words = said("ending", "ending")
    assert code == [0]
    assert f"{base.eos_token_id} ends a text: what is generated won't stop there" in words
