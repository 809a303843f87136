"""New tokens: learned where the tokenizer stopped, appended behind the old ones, and the model is
what it was."""

import gzip
import json
import lzma
import random
from collections import Counter

import pytest
import torch
from conftest import TOY_CONFIGS, changed_config, ended
from ranks import Job, toy_run, train_ranks
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from fabric_llm import extend_vocab
from fabric_llm.prepare import corpus, inputs, new_tokens
from fabric_llm.prepare.tokenizer import train_byte_level_bpe
from fabric_llm.weights import extend as extending
from fabric_llm.weights.export import VerificationError

OLD = (
    "the old words of a language that the tokenizer has seen, with some more of them: one, two, "
    "three.\n"
)
NEW = "Grundstücksverkehr und Straßenbahnhaltestelle: überall größere Äpfel. Здравствуй, мир! 你好世界\n"


def texts(line, count, seed):
    """Documents of the line's words, in another order each."""
    generator, words = random.Random(seed), line.split()
    return [" ".join(generator.choices(words, k=40)) + "\n\n  " + line for _ in range(count)]


def byte_level():
    tokenizer = train_byte_level_bpe(texts(OLD, 20, 0), vocab_size=320)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>"]})
    tokenizer.add_tokens(["Wort"])
    tokenizer.chat_template = "{% for m in messages %}<|user|>{{ m['content'] }}{% endfor %}"
    return tokenizer


def llama3():
    """Byte-level too, with digits by threes, and words that are looked up before they are cut."""
    tokenizer = byte_level()
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["model"]["ignore_merges"] = True
    digits = pre_tokenizers.Split(Regex(r"\p{N}{1,3}| ?[^\s\p{N}]+|\s+(?!\S)|\s+"), "isolated")
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend = Tokenizer.from_str(json.dumps(state))
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, letters])
    tokenizer._tokenizer = backend
    return tokenizer


def sentencepiece():
    """As Llama 2 has it: spaces are letters, text isn't split, and what no token has is bytes."""
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    replace = normalizers.Replace(" ", "▁")
    spaces = normalizers.Sequence([normalizers.Prepend("▁"), replace])
    learner = Tokenizer(models.BPE())
    learner.normalizer = spaces
    learner.pre_tokenizer = pre_tokenizers.Split(new_tokens.WORDS, "isolated")
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=specials, show_progress=False)
    learner.train_from_iterator(texts(OLD, 20, 0), trainer)
    state = json.loads(learner.to_str())["model"]
    merges = [tuple(merge) for merge in state["merges"]]
    how = {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}
    backend = Tokenizer(models.BPE(state["vocab"], merges, **how))
    backend.normalizer = spaces
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def unigram():
    """As T5 and XLM-R have it, with an added token behind the pieces."""
    backend = Tokenizer(models.Unigram())
    backend.normalizer, backend.pre_tokenizer = normalizers.NFKC(), pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    how = {"special_tokens": ["<unk>", "</s>"], "unk_token": "<unk>", "show_progress": False}
    trainer = trainers.UnigramTrainer(vocab_size=150, **how)
    backend.train_from_iterator(texts(OLD, 20, 0), trainer)
    names = {"eos_token": "</s>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<extra_0>", "<extra_1>"]})
    return tokenizer


TOKENIZERS = {made.__name__: made for made in (byte_level, llama3, sentencepiece, unigram)}


def make_model(folder, tokenizer, family="llama", rows=None, dtype=torch.float32, **changes):
    rows = rows or new_tokens.size(tokenizer.backend_tokenizer)
    config = changed_config(family, vocab_size=rows, eos_token_id=2, **changes)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def corpus_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for number, text in enumerate(texts(NEW, 60, 1)):
        (folder / f"{number:03d}.txt").write_text(text)
    return folder


def run(*argv):
    """The exit code of the command, in this process."""
    return ended(extend_vocab.main, *argv)


# ------------------------------------------------------------------------------- tokens


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_tokens_go_behind_the_old_ones_and_text_gets_shorter(kind):
    old = TOKENIZERS[kind]().backend_tokenizer
    learned = new_tokens.learn(old, texts(NEW, 40, 1), 60)
    assert learned == new_tokens.learn(old, texts(NEW, 40, 1), 60) and len(learned) == 60
    new, first = new_tokens.extended(old, learned), new_tokens.size(old)
    assert new.get_vocab().items() >= old.get_vocab().items()
    assert [new.token_to_id(token.text) for token in learned] == list(range(first, first + 60))
    held_out = texts(NEW, 5, 2)
    counts = [sum(len(t.encode(text).ids) for text in held_out) for t in (old, new)]
    assert counts[1] < (0.6 if kind == "unigram" else 0.5) * counts[0]
    others = ["", " ", "\n\n", "  a  b ", "Straßenbahnx", "xStraßenbahn", "🙂 ein", "<|user|>und"]
    for text in [*held_out, OLD, *others]:
        before, after = old.encode(text), new.encode(text)
        assert new.decode(before.ids) == old.decode(before.ids)
        if new_tokens.unknown_id(old) not in before.ids:
            assert new.decode(after.ids) == old.decode(before.ids)
        if kind != "unigram" and max(after.ids, default=0) < first:
            assert after.ids == before.ids, "text without a new token is cut as before"
    assert new.encode(OLD).ids == old.encode(OLD).ids or kind == "unigram"
    for token in learned if kind != "unigram" else learned[-5:]:
        pieces = [piece.value for piece in new.model.tokenize(token.text)]
        assert pieces == [token.text], "each is in reach"
    if kind == "byte_level":
        inside = new.encode("xGrundstücksverkehrs")
        assert max(inside.ids) >= first, inside.tokens


def test_what_a_token_was_made_of_is_what_its_text_was():
    old = sentencepiece().backend_tokenizer
    learned = new_tokens.learn(old, texts(NEW, 40, 1), 60)
    made_of = {token.text: new_tokens.made_of(old, token.text) for token in learned}
    for token in learned:
        if token.pair is not None:
            of_pair = [made_of.get(text, [old.token_to_id(text)]) for text in token.pair]
            assert made_of[token.text] == sum(of_pair, [])
    assert made_of["你"] == [old.token_to_id(name) for name in ("<0xE4>", "<0xBD>", "<0xA0>")]
    assert new_tokens.made_of(unigram().backend_tokenizer, "你") == []


def test_pairs_are_counted_as_byte_pair_encoding_counts_them():
    """Against a plain count over all words after each join."""
    old = byte_level().backend_tokenizer
    learned = new_tokens.learn(old, texts(NEW, 10, 3), 25)
    words = [w for text in texts(NEW, 10, 3) for w in new_tokens.split(old, text, True)]
    cut = [[token.value for token in old.model.tokenize(word)] for word in words]
    total = sum(map(len, cut))
    for token in learned:
        counts = {}
        for symbols in cut:
            for pair in zip(symbols, symbols[1:]):
                counts[pair] = counts.get(pair, 0) + 1
        best = max(count for pair, count in counts.items() if "".join(pair) not in old.get_vocab())
        assert counts[token.pair] == best == round(token.share * total)
        for symbols in cut:
            for at in range(len(symbols) - 1, 0, -1):
                if (symbols[at - 1], symbols[at]) == token.pair:
                    symbols[at - 1 : at + 1] = [token.text]


def test_what_cannot_be_extended_is_one_sentence():
    with pytest.raises(ValueError, match="WordPiece tokenizer can't be extended"):
        new_tokens.require_extendable(Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]")))
    with pytest.raises(ValueError, match="end_of_word_suffix"):
        new_tokens.require_extendable(Tokenizer(models.BPE(end_of_word_suffix="</w>")))


def test_a_part_is_held_out_and_in_no_other():
    learned, held_out = corpus.hold_out([f"text {number}" for number in range(100)])
    assert (len(learned), len(held_out)) == (95, 5) and not set(learned) & set(held_out)
    lines = "".join(f"line {number}\n" for number in range(100))
    [learned], [held_out] = corpus.hold_out([lines])
    assert learned + held_out == lines and len(held_out) < 60
    assert corpus.hold_out(["a", "b", "a", "b"]) == (["a", "a"], ["b"])
    for few in ([], ["one line"], ["same", "same"]):
        with pytest.raises(ValueError, match="no two different texts"):
            corpus.hold_out(few)


# ------------------------------------------------------------------------------- rows


@pytest.mark.parametrize(
    ("tokens", "rows", "expected"),
    [(100, 100, 100), (101, 100, 101), (130, 256, 256), (257, 256, 384), (101, 96, 128)],
)
def test_unused_rows_come_first_and_padding_is_kept(tokens, rows, expected):
    assert extending.rows_for(tokens, rows) == expected


def test_a_row_is_the_mean_of_its_parts():
    model = AutoModelForCausalLM.from_config(changed_config("llama", vocab_size=128))
    assert extending.tables_of(model) == {"model.embed_tokens.weight", "lm_head.weight"}
    head = model.lm_head.weight.detach()
    parts = [[3, 5], [5, 3], [7], [], *[[1, 2, number] for number in range(20)]]
    now = extending.with_rows(head, 120, parts, 256)
    assert now.shape == (256, head.shape[1])
    assert torch.equal(now[:120], head[:120])
    torch.testing.assert_close(now[120], head[[3, 5]].mean(0))
    torch.testing.assert_close(now[122], head[7])
    torch.testing.assert_close(now[123], head[:120].mean(0))
    torch.testing.assert_close(now[144:], head[:120].mean(0).expand(112, -1))
    torch.testing.assert_close(now[121], now[120], msg="the same parts")
    not_grown = extending.with_rows(head, 120, parts[:3], 128)
    assert torch.equal(not_grown[123:], head[123:]), "as they were"


def test_a_bias_and_a_tie_are_kept():
    model = AutoModelForCausalLM.from_config(TOY_CONFIGS["gpt2"])
    model.lm_head.bias = torch.nn.Parameter(torch.arange(131.0))
    assert extending.tables_of(model) == {"transformer.wte.weight", "lm_head.bias"}
    now = extending.with_rows(model.lm_head.bias.detach(), 131, [[3, 5], [100]], 133)
    assert now[131:].tolist() == [4.0, 100.0]


# ------------------------------------------------------------------------------- the command


@pytest.mark.parametrize(
    ("kind", "family", "more"),
    [
        ("byte_level", "gpt2", {}),
        ("byte_level", "llama", {"dtype": torch.bfloat16, "rows": 384}),
        ("sentencepiece", "llama", {"tie_word_embeddings": True, "rows": 512}),
        ("unigram", "llama", {}),
    ],
)
def test_the_model_is_what_it_was(tmp_path, corpus_folder, capsys, kind, family, more):
    output = tmp_path / "hf"
    folder = make_model(tmp_path / "model", TOKENIZERS[kind](), family, **more)
    assert run(folder, "--input", corpus_folder, "--tokens", 60, "--output", output) == 0
    said = capsys.readouterr().out
    assert "60 tokens more" in said and "keep their old bits" in said
    assert "3 that are held out" in said.replace("texts (0.0 MB) ", "")
    old, new = (AutoModelForCausalLM.from_pretrained(path) for path in (folder, output))
    was, now = (AutoTokenizer.from_pretrained(path) for path in (folder, output))
    positions = old.config.max_position_embeddings
    assert f"--context_length {positions}" in said, "the model takes no longer rows"
    assert now.get_vocab().items() >= was.get_vocab().items() and len(now) == len(was) + 60
    assert now.chat_template == was.chat_template
    assert now.all_special_tokens == was.all_special_tokens
    text = "Здравствуй <|user|> the old words"
    assert now(text).tokens() != was(text).tokens()
    before, after = old.config.to_dict(), new.config.to_dict()
    changed = {name for name in after if after[name] != before.get(name)}
    assert changed <= {"vocab_size", "_name_or_path"} and new.dtype == old.dtype
    is_tied = new.lm_head.weight is new.get_input_embeddings().weight
    assert new.config.tie_word_embeddings == is_tied
    ids = torch.tensor([was(OLD)["input_ids"][:40]])
    with torch.no_grad():
        before, after = (model.float().eval()(ids).logits for model in (old, new))
    torch.testing.assert_close(after[..., : len(was)], before[..., : len(was)], rtol=0, atol=1e-6)
    assert not list(tmp_path.glob(".*"))


def test_the_dtype_is_that_of_the_files_whatever_config_json_says(tmp_path, corpus_folder):
    folder = make_model(tmp_path / "model", byte_level())
    file = folder / "config.json"
    file.write_text(file.read_text().replace('"float32"', '"bfloat16"'))
    command = ("--input", corpus_folder, "--tokens", 5, "--output", tmp_path / "hf")
    assert "bfloat16" in file.read_text() and run(folder, *command) == 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "hf").dtype == torch.float32


def test_a_sharded_checkpoint_is_extended_as_any_model(toys, tmp_path, corpus_folder):
    folder = make_model(tmp_path / "model", byte_level())
    flags = "--run_name run --max_step 1 --eval_iters 0 --verify_start false".split()
    flags += ["--state_dict_type", "sharded", "--model_name", folder]
    train_ranks(1, *toy_run(toys, tmp_path), *flags)
    checkpoint, output = tmp_path / "run" / "step-00000001", tmp_path / "hf"
    assert run(checkpoint, "--input", corpus_folder, "--tokens", 20, "--output", output) == 0
    new = AutoModelForCausalLM.from_pretrained(output)
    first = new_tokens.size(byte_level().backend_tokenizer)
    assert len(new.get_input_embeddings().weight) == first + 20 and new.dtype == torch.bfloat16


def test_what_goes_wrong_leaves_nothing(tmp_path, corpus_folder, capsys, monkeypatch):
    folder = make_model(tmp_path / "model", byte_level())
    command = (folder, "--input", corpus_folder, "--tokens", 10, "--output", tmp_path / "hf")
    with_rows = extending.with_rows

    def broken(*_):
        raise RuntimeError("broken")

    def add_and_change(*given):
        return with_rows(*given) * 1.5

    for wrong, instead, words in (
        ("made_of", broken, ""),
        ("with_rows", add_and_change, "old values of model.embed_tokens.weight have changed"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(extending, wrong, instead)
            assert run(*command) == 1
            assert words in capsys.readouterr().err
        assert not list(tmp_path.glob("*hf*"))
    assert run(*command) == 0
    written = (tmp_path / "hf" / "model.safetensors").read_bytes()
    assert run(*command) == 2 and "exists" in capsys.readouterr().err
    assert run(*command, "--overwrite", "true") == 0
    again = (tmp_path / "hf" / "model.safetensors").read_bytes()
    assert again == written, "the same corpus gives the same model"


def test_bad_input_is_one_sentence(tmp_path, corpus_folder, capsys):
    folder = make_model(tmp_path / "model", byte_level())
    bare = tmp_path / "bare"
    TOY_CONFIGS["llama"].save_pretrained(bare)
    byte_level().save_pretrained(bare)
    alone = make_model(tmp_path / "alone", byte_level())
    for file in alone.glob("token*"):
        file.unlink()
    few = make_model(tmp_path / "few", byte_level(), rows=100)
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    for name in "ab":
        (nothing / f"{name}.txt").write_text(name)
    text, output = ("--input", corpus_folder), ("--output", tmp_path / "hf")
    for argv, words in (
        ((folder, *text, *output), "missing: --tokens."),
        ((folder, *text, *output, "--tokens", 0), "must be positive"),
        ((folder, "--input", tmp_path / "none", *output, "--tokens", 9), "none"),
        ((tmp_path / "none", *text, *output, "--tokens", 9), "none"),
        ((bare, *text, *output, "--tokens", 9), "no weights"),
        ((alone, *text, *output, "--tokens", 9), "no tokenizer"),
        ((few, *text, *output, "--tokens", 9), "its model 100 embeddings"),
        ((folder, "--input", nothing, *output, "--tokens", 9), "nothing to learn"),
        ((folder, *text, *output, "--token", 9), "Did you mean --tokens?"),
    ):
        assert run(*argv) == 2
        said = capsys.readouterr().err
        assert words in said and len(said.strip().splitlines()) == 1, said
    (folder / "MANIFEST.json").write_text("{}")  # as of a checkpoint whose bytes have changed
    assert run(folder, *text, *output, "--tokens", 9) == 66
    assert "is damaged" in capsys.readouterr().err
    assert not list(tmp_path.glob("*hf*"))


def test_a_proof_that_fails_is_heard():
    """A tokenizer whose old ids moved."""
    old = byte_level().backend_tokenizer
    state = json.loads(old.to_str())
    vocab = state["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    moved = Tokenizer.from_str(json.dumps(state))
    with pytest.raises(VerificationError, match="the token '[ab]' has the id"):
        extending.compare_tokenizers(old, moved, [OLD])


@pytest.mark.longer
@pytest.mark.parametrize(("kind", "family"), [("byte_level", "gpt2"), ("sentencepiece", "llama")])
def test_extend_prepare_train_the_new_then_all_export(tmp_path, corpus_folder, kind, family):
    """The whole way: what was frozen is as it was after the first stage, and the export holds the
    new vocabulary."""
    import export_hf
    import prepare_data

    folder = make_model(tmp_path / "model", TOKENIZERS[kind](), family)
    extended, data = tmp_path / "hf", tmp_path / "data"
    assert run(folder, "--input", corpus_folder, "--tokens", 60, "--output", extended) == 0
    words = ("--input", corpus_folder, "--tokenizer", extended, "--output", data)
    assert ended(prepare_data.main, *words, "--context_length", 24) == 0
    common = ("--train_data_dir", data, "--output_dir", tmp_path, "--max_step", 6, "--lr", 1e-2)
    common += ("--precision", "32-true", "--run_name")
    first = Job(1, *common, "first", "--model_name", extended, "--train_only", "embeddings")
    assert first.wait() == [0], first.output
    stage = tmp_path / "first" / "step-00000006"
    before, after = (AutoModelForCausalLM.from_pretrained(path) for path in (extended, stage))
    tables = {id(after.get_input_embeddings().weight), id(after.get_output_embeddings().weight)}
    for (name, old), new in zip(before.named_parameters(), after.parameters()):
        assert torch.equal(old, new) == (id(new) not in tables), name
    second = Job(2, *common, "all", "--model_name", stage, "--strategy", "fsdp")
    assert second.wait() == [0, 0], second.output
    assert ended(export_hf.main, tmp_path / "all", "--output", tmp_path / "done") == 0
    was, grown, tokenizer = (
        AutoTokenizer.from_pretrained(path) for path in (folder, extended, tmp_path / "done")
    )
    assert tokenizer.get_vocab() == grown.get_vocab()
    assert max(tokenizer(NEW)["input_ids"]) >= new_tokens.size(was.backend_tokenizer)


@pytest.mark.parametrize(
    ("ending", "open_file"),
    [("txt.gz", gzip.open), ("jsonl", open), ("jsonl.xz", lzma.open)],
    ids=["txt.gz", "jsonl", "jsonl.xz"],
)
def test_of_more_text_than_is_held_some_is_taken_from_all_of_it(
    tmp_path, monkeypatch, ending, open_file
):
    """Files may be compressed: their bytes on the disk don't say how much text there is."""
    for name in "abcd":
        written = [f"{name * 40} {number}" for number in range(500)]
        if "jsonl" in ending:
            content = "".join(json.dumps({"text": text}) + "\n" for text in written)
        else:
            content = "\n\n".join(written)
        with open_file(tmp_path / f"{name}.{ending}", "wt") as file:
            file.write(content)
    monkeypatch.setattr(corpus, "MAX_BYTES", 20_000)
    found = inputs.find_sources([str(tmp_path)], pattern=["*"], exclude=[], output=tmp_path / "out")
    read = corpus.read(found, "text", "\n\n")
    texts = [*read.learned, *read.held_out]
    counts = Counter(text[0] for text in texts)
    assert sorted(counts) == list("abcd") and max(counts.values()) - min(counts.values()) <= 1
    assert 8_000 < sum(map(len, texts)) <= 20_000 and len(texts) == -(-2000 // read.every)
