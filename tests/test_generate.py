"""python -m fabric_llm.generate: it writes what model.generate does, as it is made, or says in one
sentence why not."""

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import VOCABULARY
from ranks import toy_run, train_ranks
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, TextStreamer

from fabric_llm.generate import PROGRAM, main
from fabric_llm.model import loading

ROOT = Path(__file__).parent.parent
PROMPT = "w5 w9 w30"


@pytest.fixture(scope="module")
def toy(toys, tmp_path_factory):
    """A Hugging Face directory whose tokens are words, and whose model knows 64 positions."""
    folder = tmp_path_factory.mktemp("toy") / "llama"
    shutil.copytree(toys / "llama", folder)
    tokenizer = Tokenizer(
        WordLevel({"end": 0, **{f"w{i}": i for i in range(1, VOCABULARY)}}, unk_token="end")
    )
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="end").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def runs(toy, toys, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    flags = (
        *toy_run(toys, folder), "--max_step", 2, "--save_step_interval", 1, "--eval_iters", 0,
        "--lr", 1e-2,
    )
    flags += ("--micro_batch_size", 2, "--model_name", toy)
    train_ranks(1, *flags, "--run_name", "full")
    train_ranks(1, *flags, "--run_name", "sharded", "--state_dict_type", "sharded")
    return folder


def written(capsys, *words):
    main([str(word) for word in words])
    said = capsys.readouterr()
    assert said.err == "", "nothing is warned of"
    return said.out


def expected(folder, **how):
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    prompt = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    made = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), pad_token_id=0, max_new_tokens=12, **how
    )
    return tokenizer.decode(made[0], skip_special_tokens=True)


def test_at_temperature_0_it_is_the_most_likely_text(toy, capsys):
    text = written(capsys, toy, "--prompt", PROMPT, "--max_new_tokens", 12, "--temperature", 0)
    assert (
        text.split() == expected(toy, do_sample=False).split()
        and text.startswith(PROMPT)
        and len(text.split()) > 6
    )


@pytest.mark.longer
def test_a_run_is_its_latest_checkpoint(runs, capsys):
    words = ("--prompt", PROMPT, "--max_new_tokens", 12, "--temperature", 0)
    latest = written(capsys, runs / "full", *words)
    assert latest == written(capsys, runs / "full" / "step-00000002", *words)
    assert latest.split() == expected(runs / "full" / "step-00000002", do_sample=False).split()
    assert latest != written(capsys, runs / "full" / "step-00000001", *words)


def test_a_seed_gives_the_same_draws_and_another_others(toy, capsys, monkeypatch):
    words = (toy, "--max_new_tokens", 12, "--temperature", 1.5, "--top_p", 0.95)
    texts = []
    for seed in (1, 1, 2):
        monkeypatch.setattr("sys.stdin", io.StringIO(f"{PROMPT}\n"))
        texts.append(written(capsys, *words, "--seed", seed))
    assert texts[0] == texts[1] != texts[2] and texts[0].startswith(PROMPT)
    torch.manual_seed(1)
    assert (
        texts[0].split()
        == expected(toy, do_sample=True, temperature=1.5, top_p=0.95, top_k=0).split()
    )


def test_a_token_is_printed_before_the_next_is_made(toy, capsys, monkeypatch):
    printed, put = [], TextStreamer.put

    def watched(streamer, value):
        put(streamer, value)
        printed.append(capsys.readouterr().out)

    monkeypatch.setattr(TextStreamer, "put", watched)
    main([str(toy), "--prompt", PROMPT, "--max_new_tokens", "12", "--temperature", "0"])
    assert len(printed) > 6 and all(printed[2:-1]), (
        "each call but the first words' prints what came before"
    )


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        ("nowhere --prompt w1", 2, "No checkpoint at 'nowhere'."),
        ("{runs}/sharded --prompt w1", 2, (
            "is sharded: export it first, python export_hf.py {runs}/sharded/step-00000002"
        )),
        ("{toys}/llama --prompt w1", 2, "has no tokenizer"),
        ("{bare} --prompt w1", 2, "has no weights"),
        ("{toy} --prompt w1 --max_new_tokens 64", 2, (
            "with --max_new_tokens 64 must be no more than the model's 64"
        )),
        ("{toy} --prompt=", 2, "There is no text to go on from: give --prompt"),
        ("{toy} --prompt w1 --top_p 0", 2, "--top_p must be positive"),
        ("{toy} --prompt w1 --temprature 1", 2, "Did you mean --temperature?"),
        ("{broken} --prompt w1", 66, "is damaged"),
    ],
)  # fmt: skip
def test_mistakes_are_told_in_one_sentence(
    toy, toys, runs, tmp_path, capsys, words, code, sentence
):
    places = {
        "toy": toy,
        "toys": toys,
        "runs": runs,
        "bare": tmp_path / "bare",
        "broken": tmp_path / "broken",
    }
    shutil.copytree(toy, places["bare"], ignore=shutil.ignore_patterns("*.safetensors"))
    shutil.copytree(runs / "full" / "step-00000002", places["broken"])
    (places["broken"] / "model.safetensors").write_bytes(b"")
    with pytest.raises(SystemExit) as ended:
        main(words.format(**places).split())
    error = capsys.readouterr().err
    assert (
        ended.value.code == code and sentence.format(**places) in error and error.count("\n") == 1
    ), error


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
    with pytest.raises(SystemExit) as ended:
        main([str(toy)])
    assert ended.value.code == 2 and "give --prompt TEXT" in capsys.readouterr().err


def test_kernels_that_a_configuration_names_are_not_taken(toy, tmp_path, capsys):
    words = ("--prompt", PROMPT, "--max_new_tokens", 12, "--temperature", 0)
    expected = written(capsys, toy, *words)
    shutil.copytree(toy, tmp_path / "model")
    config = json.loads((toy / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(
        json.dumps({**config, "attn_implementation": "some/kernel"})
    )
    assert written(capsys, tmp_path / "model", *words) == expected


@pytest.mark.longer
def test_a_reader_that_has_seen_enough_ends_it_without_a_word(toy):
    command = [
        sys.executable, "-m", "fabric_llm.generate", toy, "--prompt", PROMPT,
        "--max_new_tokens", "50",
    ]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.stdout.close()
    assert process.communicate()[1] == "" and process.returncode == 1


def test_help_and_mistakes_import_no_torch():
    code = (
        "import sys; from fabric_llm.generate import main\ntry: main(sys.argv[1:])\nfinally: "
        "assert 'torch' not in sys.modules"
    )
    for words, ends in ((["--help"], 0), (["nowhere", "--prompt", "x"], 2)):
        done = subprocess.run(
            [sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == ends and "Assertion" not in done.stderr


@pytest.mark.longer
def test_it_starts_from_the_shell(toy):
    command = [
        sys.executable, "-m", *PROGRAM.split()[2:], str(toy), "--max_new_tokens", "3",
        "--device", "cpu",
    ]
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
def test_what_a_generation_config_asks_for_changes_nothing(toy, tmp_path, capsys, asks):
    """--temperature 0 is the most likely token, as in samples of the same checkpoint."""
    shutil.copytree(toy, tmp_path / "model")
    said = json.loads((toy / "generation_config.json").read_text())
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({**said, **asks}))
    words = ("--prompt", PROMPT, "--max_new_tokens", 12, "--temperature")
    for temperature in (0, 1.5):
        assert written(capsys, tmp_path / "model", *words, temperature) == written(
            capsys, toy, *words, temperature
        )


def test_any_of_several_ends_of_text_ends_it(toy, tmp_path, capsys):
    shutil.copytree(toy, tmp_path / "model")
    words = ("--prompt", PROMPT, "--max_new_tokens", 12, "--temperature", 0)
    first = written(capsys, toy, *words).split()[3]
    (tmp_path / "model" / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [0, int(first[1:])]})
    )
    assert written(capsys, tmp_path / "model", *words).split() == [*PROMPT.split(), first]


def with_eos_appended(folder, text):
    """The tokenizer in `folder` appends its EOS to a text, with BOS before it if `text` says so."""
    document = json.loads((folder / "tokenizer.json").read_text())
    tokenizer = Tokenizer.from_str(json.dumps(document))
    tokenizer.post_processor = TemplateProcessing(
        single=text, special_tokens=[("end", 0), ("w1", 1)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="end", bos_token="w1"
    ).save_pretrained(folder)


@pytest.mark.parametrize("text", ["$A end", "w1 $A end", "end $A end"])
def test_a_prompt_does_not_end_with_the_eos_that_a_tokenizer_appends(toy, tmp_path, text):
    shutil.copytree(toy, tmp_path / "model")
    with_eos_appended(tmp_path / "model", text)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer(PROMPT)["input_ids"][-1] == tokenizer.eos_token_id
    assert loading.prompt_tokens(tokenizer, PROMPT) == tokenizer(PROMPT)["input_ids"][:-1]
    assert loading.prompt_tokens(tokenizer, f"{PROMPT} end") == tokenizer(PROMPT)["input_ids"], (
        "which the text itself ends with"
    )


def test_what_follows_a_prompt_is_as_if_no_eos_were_appended(toy, tmp_path, capsys):
    shutil.copytree(toy, tmp_path / "model")
    with_eos_appended(tmp_path / "model", "$A end")
    words = ("--prompt", PROMPT, "--max_new_tokens", 12, "--temperature", 0)
    assert written(capsys, tmp_path / "model", *words) == written(capsys, toy, *words)
