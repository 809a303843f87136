"""python -m fabric_llm.generate: it writes what model.generate does, as it is made, or says in one
sentence why not."""

import io
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import VOCABULARY, ended
from ranks import refuse_imports, toy_run, train_ranks
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3Config,
    PreTrainedTokenizerFast,
    TextStreamer,
)

from arguments import ROOT
from fabric_llm.generate import PROGRAM, main
from fabric_llm.model import loading

PROMPT = "w5 w9 w30"


@pytest.fixture(scope="module")
def toy(toys, tmp_path_factory):
    """A Hugging Face directory whose tokens are words, and whose model knows 64 positions."""
    folder = shutil.copytree(toys / "llama", tmp_path_factory.mktemp("toy") / "llama")
    words = {"end": 0, **{f"w{i}": i for i in range(1, VOCABULARY)}}
    tokenizer = Tokenizer(WordLevel(words, unk_token="end"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="end").save_pretrained(folder)
    return folder


@pytest.fixture
def copy(toy, tmp_path):
    """A copy of it, to change."""
    return shutil.copytree(toy, tmp_path / "model")


def set_in(file, **values):
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


@pytest.fixture(scope="module")
def runs(toy, toys, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    sizes = "--max_step 2 --save_step_interval 1 --eval_iters 0 --lr 1e-2 --micro_batch_size 2"
    flags = (*toy_run(toys, folder), *sizes.split(), "--model_name", toy)
    for kind in ("full", "sharded"):
        train_ranks(1, *flags, "--run_name", kind, "--state_dict_type", kind)
    return folder


TWELVE = ("--prompt", PROMPT, "--max_new_tokens", 12)
LIKELY = (*TWELVE, "--temperature", 0)


def written(capsys, *words):
    main([str(word) for word in words])
    said = capsys.readouterr()
    assert said.err == "", "nothing is warned of"
    return said.out


def expected(folder, **how):
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    how |= {"attention_mask": torch.ones_like(prompt), "pad_token_id": 0, "max_new_tokens": 12}
    return tokenizer.decode(model.generate(prompt, **how)[0], skip_special_tokens=True)


def test_at_temperature_0_it_is_the_most_likely_text(toy, capsys):
    text = written(capsys, toy, *LIKELY)
    assert text.split() == expected(toy, do_sample=False).split()
    assert text.startswith(PROMPT) and len(text.split()) > 6


@pytest.mark.longer
def test_a_run_is_its_latest_checkpoint(runs, capsys):
    first, last = (runs / "full" / f"step-0000000{number}" for number in (1, 2))
    latest = written(capsys, runs / "full", *LIKELY)
    assert latest == written(capsys, last, *LIKELY) != written(capsys, first, *LIKELY)
    assert latest.split() == expected(last, do_sample=False).split()


@pytest.mark.longer
def test_a_damaged_checkpoint_is_refused_and_the_others_are_named(runs, tmp_path, capsys):
    run = shutil.copytree(runs / "full", tmp_path / "run")
    weights = run / "step-00000002" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    assert ended(main, str(run), *map(str, LIKELY)) == 66
    said = capsys.readouterr().err
    assert "the content of model.safetensors has changed" in said
    assert f"Others of its run: {run / 'step-00000001'}." in said


def test_a_seed_gives_the_same_draws_and_another_others(toy, capsys, monkeypatch):
    texts = []
    for seed in (1, 1, 2):
        monkeypatch.setattr("sys.stdin", io.StringIO(f"{PROMPT}\n"))
        words = f"--max_new_tokens 12 --temperature 1.5 --top_p 0.95 --seed {seed}"
        texts.append(written(capsys, toy, *words.split()))
    assert texts[0] == texts[1] != texts[2] and texts[0].startswith(PROMPT)
    torch.manual_seed(1)
    plain = expected(toy, do_sample=True, temperature=1.5, top_p=0.95, top_k=0)
    assert texts[0].split() == plain.split()


def test_a_token_is_printed_before_the_next_is_made(toy, capsys, monkeypatch):
    printed, put = [], TextStreamer.put

    def watched(streamer, value):
        put(streamer, value)
        printed.append(capsys.readouterr().out)

    monkeypatch.setattr(TextStreamer, "put", watched)
    main([str(word) for word in (toy, *LIKELY)])
    # Each call but the first words' prints what came before.
    assert len(printed) > 6 and all(printed[2:-1])


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        ("nowhere --prompt w1", 2, "No checkpoint at 'nowhere' (from '/"),
        (
            "{runs}/sharded --prompt w1",
            2,
            "is sharded: export it first, python export_hf.py {runs}/sharded/step-00000002",
        ),
        ("{toys}/llama --prompt w1", 2, "has no tokenizer"),
        ("{bare} --prompt w1", 2, "has no weights"),
        (
            "{toy} --prompt w1 --max_new_tokens 64",
            2,
            "with --max_new_tokens 64 must be no more than the model's 64",
        ),
        ("{nested} --prompt w1 --max_new_tokens 32", 2, "must be no more than the model's 32"),
        ("{toy} --prompt=", 2, "There is no text to go on from: give --prompt"),
        ("{toy} --prompt w1 --top_p 0", 2, "--top_p must be positive"),
        ("{toy} --prompt w1 --temprature 1", 2, "Did you mean --temperature?"),
        ("{broken} --prompt w1", 66, "is damaged"),
    ],
)
def test_mistakes_are_told_in_one_sentence(
    toy, toys, runs, tmp_path, capsys, words, code, sentence
):
    bare, broken = tmp_path / "bare", tmp_path / "broken"
    shutil.copytree(toy, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    shutil.copytree(runs / "full" / "step-00000002", broken)
    (broken / "model.safetensors").write_bytes(b"")
    nested = shutil.copytree(toy, tmp_path / "nested")
    text_config = {"max_position_embeddings": 32, "num_hidden_layers": 1}
    Gemma3Config(text_config=text_config).save_pretrained(nested)
    places = {"toy": toy, "toys": toys, "runs": runs, "bare": bare, "broken": broken}
    places["nested"] = nested
    assert ended(main, *words.format(**places).split()) == code
    error = capsys.readouterr().err
    assert sentence.format(**places) in error and error.count("\n") == 1, error


@pytest.mark.parametrize("locale", ["C.UTF-8", "C"])  # in C, Python reads any bytes
def test_text_that_is_not_utf8_is_told_in_one_sentence(toy, locale):
    def of(words, given=b""):
        command = [sys.executable, "-m", "fabric_llm.generate", toy, *words]
        environment = {**os.environ, "LC_ALL": locale}
        ended = subprocess.run(command, input=given, env=environment, capture_output=True)
        assert ended.returncode == 2 and ended.stderr.count(b"\n") == 1, ended.stderr
        return ended.stderr.decode()

    assert "The text on standard input isn't UTF-8." in of([], b"w1 se\xf1or")
    assert "--prompt 'w1 se\\udcf1or' isn't UTF-8 text." in of(["--prompt", b"w1 se\xf1or"])


def test_nothing_is_asked_on_a_terminal(toy, capsys, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

        def read(self):
            raise AssertionError("it waits for somebody to type")

    monkeypatch.setattr("sys.stdin", Terminal())
    assert ended(main, toy) == 2 and "give --prompt TEXT" in capsys.readouterr().err


def test_kernels_that_a_configuration_names_are_not_taken(toy, copy, capsys):
    set_in(copy / "config.json", attn_implementation="some/kernel")
    assert written(capsys, copy, *LIKELY) == written(capsys, toy, *LIKELY)


@pytest.mark.longer
def test_a_reader_that_has_seen_enough_ends_it_without_a_word(toy):
    words = ("-m", "fabric_llm.generate", toy, "--prompt", PROMPT, "--max_new_tokens", "50")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, *words], cwd=ROOT, text=True, **pipes)
    process.stdout.close()
    assert process.communicate()[1] == "" and process.returncode == 1


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("average --help", 0),
        ("extend_vocab --help", 0),
        ("generate --help", 0),
        ("generate nowhere --prompt x", 2),
    ],
)
def test_help_and_mistakes_import_no_torch(tmp_path, words, code):
    site = refuse_imports(tmp_path, ("torch", "transformers", "lightning"))
    name, *words = words.split()
    command = [sys.executable, "-m", f"fabric_llm.{name}", *words]
    environment = {**os.environ, "PYTHONPATH": site}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == code and "Assertion" not in done.stderr, done.stderr
    assert code or "Options" in done.stdout


@pytest.mark.longer
def test_it_starts_from_the_shell(toy):
    command = [sys.executable, *PROGRAM.split()[1:], str(toy), "--max_new_tokens", "3"]
    command += ["--device", "cpu"]
    done = subprocess.run(command, input=PROMPT, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith(PROMPT)


# ------------------------------------------------------------------- what the model's own files say


@pytest.mark.parametrize(
    "asks",
    [
        {"repetition_penalty": 5.0},
        {"num_beams": 3},
        {"no_repeat_ngram_size": 1},
        {"min_new_tokens": 9, "top_k": 1},
    ],
)
def test_what_a_generation_config_asks_for_changes_nothing(toy, copy, capsys, asks):
    """--temperature 0 is the most likely token, as in samples of the same checkpoint."""
    set_in(copy / "generation_config.json", **asks)
    for temperature in (0, 1.5):
        words = (*TWELVE, "--temperature", temperature)
        assert written(capsys, copy, *words) == written(capsys, toy, *words)


def test_any_of_several_ends_of_text_ends_it(toy, copy, capsys):
    first = written(capsys, toy, *LIKELY).split()[3]
    set_in(copy / "generation_config.json", eos_token_id=[0, int(first[1:])])
    assert written(capsys, copy, *LIKELY).split() == [*PROMPT.split(), first]


def append_eos(folder, text):
    """The tokenizer in `folder` appends its EOS to a text, with BOS before it if `text` says so."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    names = [("end", 0), ("w1", 1)]
    tokenizer.post_processor = TemplateProcessing(single=text, special_tokens=names)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="end", bos_token="w1"
    )
    tokenizer.save_pretrained(folder)


@pytest.mark.parametrize("text", ["$A end", "w1 $A end", "end $A end"])
def test_a_prompt_does_not_end_with_the_eos_that_a_tokenizer_appends(copy, text):
    append_eos(copy, text)
    tokenizer = AutoTokenizer.from_pretrained(copy)
    ids = tokenizer(PROMPT)["input_ids"]
    assert ids[-1] == tokenizer.eos_token_id
    assert loading.prompt_tokens(tokenizer, PROMPT) == ids[:-1]
    assert loading.prompt_tokens(tokenizer, f"{PROMPT} end") == ids, "which the text ends with"


def test_what_follows_a_prompt_is_as_if_no_eos_were_appended(toy, copy, capsys):
    append_eos(copy, "$A end")
    assert written(capsys, copy, *LIKELY) == written(capsys, toy, *LIKELY)
