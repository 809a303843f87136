"""The card of an export: each number is that of a file, what it prints works, and a push that broke
half-way goes on."""

import importlib.metadata
import re
import shlex
import shutil
import sys

import pytest
import torch
import yaml
from conftest import TOY_CONFIGS, ended
from hub import Uploads
from huggingface_hub import ModelCard, constants
from ranks import lines, metrics, train_ranks
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import export_hf
import prepare_data
from export_hf import parse_export
from fabric_llm.checkpoint import keep
from fabric_llm.data.mixture import mixture_of
from fabric_llm.data.periods import ENDLESS
from fabric_llm.weights.card import rename, sources
from parse_arguments import parse_train
from prepare_arguments import parse_prepare

COMMIT = "0123456789abcdef0123456789abcdef01234567"
BASE = f"models--org--base/snapshots/{COMMIT}"  # in the hub's cache
RUN = """--micro_batch_size 4 --max_step 6 --save_step_interval 4 --eval_iters 2
--eval_step_interval 2 --lr 1e-2 --precision 32-true""".split()
WORDS = "to be or not to be that is the question whether it is nobler in the mind to suffer".split()


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A folder with a model in the hub's cache, two prepared datasets, and the run `run` of both,
    of 6 steps, saved after 4."""
    folder = tmp_path_factory.mktemp("card")
    for name, salt in (("new", 3), ("old", 5)):
        (folder / f"{name} text").mkdir()
        for number in range(40):
            text = " ".join(WORDS[(number * salt + k * k) % len(WORDS)] for k in range(60))
            (folder / f"{name} text" / f"{number}.rst").write_text(f"{name} {text}")
    tokenizer = ("--tokenizer", folder / "new" / "tokenizer")
    for name, words in (("new", ("--train_tokenizer", 300)), ("old", tokenizer)):
        words = ("--input", folder / f"{name} text", *words, "--output", folder / name)
        words += tuple("--context_length 24 --pattern *.rst --validation_fraction 0.2".split())
        prepare_data.main([str(word) for word in words])
    base = folder / BASE
    config = LlamaConfig(**{**TOY_CONFIGS["llama"].to_dict(), "vocab_size": 300})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(base)
    said = "license: other\nlicense_name: llama3\nlicense_link: https://example.com/L\nlanguage: en"
    (base / "README.md").write_text(f"---\n{said}\n---\n# Base\n")
    train(folder, base, "run", "--replay", folder / "old", "--forgetting_budget", "replay:0.5")
    return folder


def train(folder, model, name, *more):
    flags = ("--model_name", model, "--output_dir", folder / "checkpoints", "--run_name", name)
    train_ranks(1, *flags, "--train_data_dir", folder / "new", *RUN, *more)


def export(source, output, *more):
    export_hf.main([str(word) for word in (source, "--output", output, *more)])
    return ModelCard.load(output / "README.md")


@pytest.fixture(scope="module")
def made(work):
    """(the card of the checkpoint of step 4, which isn't the run's last; its checkpoint; the
    export)."""
    source, output = work / "checkpoints" / "run" / "step-00000004", work / "hf"
    return export(source, output), source, output


def section(card, title):
    return re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", card.text, re.M | re.S)[1]


def rows(card, title):
    """The cells of a section's table, without its head."""
    table = [line for line in section(card, title).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]


def block(card, title, language):
    return re.search(rf"```{language}\n(.*?)```", section(card, title), re.S)[1]


# ------------------------------------------------------------------------------- what it says


@pytest.mark.longer
def test_the_front_matter_is_that_of_the_hub(made):
    said = made[0].data.to_dict()
    assert (said["base_model"], said["base_model_relation"]) == ("org/base", "finetune")
    assert (said["library_name"], said["pipeline_tag"]) == ("transformers", "text-generation")
    assert (said["license"], said["license_name"]) == ("other", "llama3")
    assert said["license_link"] == "https://example.com/L"
    assert "language" not in said and "datasets" not in said and COMMIT in made[0].text
    assert "`llama3` (https://example.com/L)" in section(made[0], "Licence")


@pytest.mark.longer
def test_losses_are_those_of_the_log_at_the_step_of_the_checkpoint(made):
    card, source, _ = made
    evaluated = {line["step"]: line["eval"] for line in lines(source.parent, "eval")}
    before, then = evaluated[0], evaluated[4]
    assert [row[0] for row in rows(card, "Evaluation")] == list(then) == ["new", "replay", "copy"]
    measured = {}
    for name, *cells, rise, budget in rows(card, "Evaluation"):
        measures = ("loss", "bits_per_byte")
        known = [one[name].get(measure) for measure in measures for one in (before, then)]
        assert cells == ["\u2013" if number is None else f"{number:.4f}" for number in known]
        assert rise == f"{then[name]['forgotten']:+.4f}"
        assert budget == ("0.5 (kept)" if name == "replay" else "\u2013")
        for measure in {*measures} & then[name].keys():
            measured[name, measure] = then[name][measure]
    results = card.data.eval_results
    found = {(one.dataset_name, one.metric_type): one.metric_value for one in results}
    assert found == measured, "with all digits"


def test_data_schedule_and_versions_are_those_of_the_checkpoint(made):
    card, source, _ = made
    progress = keep.read_progress(source)
    read = mixture_of(progress).read_before(progress["progress"]["position"])
    tokens = sum(one["tokens"] for one in read.values())
    assert tokens == progress["progress"]["tokens"] == 4 * 4 * 24
    expected = [[name, f"{one['tokens']:,}", f"{one['epochs']:.4f}"] for name, one in read.items()]
    assert [[name, *numbers] for name, _, *numbers in rows(card, "Data")] == expected
    assert "It was trained for 4 of 6 steps, 384 tokens." in card.text
    shown = dict(rows(card, "Schedule"))
    names = ("lr", "min_lr", "max_step", "seed")
    assert [shown[name] for name in names] == ["0.01", "0.0", "6", "1234"]
    without_effect = "number_epochs lr_decay decay_shape steer_bounds"
    assert not shown.keys() & set(without_effect.split())
    version = importlib.metadata.version("torch")  # torch.__version__ may end with +cu132
    assert ["torch", version, version] in rows(card, "Versions")
    assert "logits differ from those in training by" in section(card, "Verification")


def test_curves_are_drawn_where_matplotlib_is(made, work, tmp_path, monkeypatch, capsys):
    card, source, output = made
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    without = export(source, tmp_path / "without")
    assert "curves.png" not in without.text and "need matplotlib" in capsys.readouterr().out
    assert not (tmp_path / "without" / "curves.png").exists()
    assert rows(without, "Evaluation") == rows(card, "Evaluation")
    monkeypatch.undo()
    pytest.importorskip("matplotlib", reason="it isn't installed: pip install -e '.[report]'")
    assert "![Losses over steps](curves.png)" in card.text
    assert (output / "curves.png").read_bytes().startswith(b"\x89PNG")


# ----------------------------------------------------------------------------- what it prints works


def test_it_loads_as_the_card_says(made):
    found = {}
    exec(block(made[0], "Load it", "python"), found)
    assert type(found["model"]) is LlamaForCausalLM and found["tokenizer"]("to be")["input_ids"]


class CappedConfig(LlamaConfig):
    model_type = "capped_llama"


class CappedForCausalLM(LlamaForCausalLM):
    config_class = CappedConfig


AutoConfig.register("capped_llama", CappedConfig)
AutoModelForCausalLM.register(CappedConfig, CappedForCausalLM)


def test_a_registered_class_is_imported_first(work, tmp_path):
    changes = {"vocab_size": 300, "model_type": "capped_llama"}
    config = CappedConfig(**{**TOY_CONFIGS["llama"].to_dict(), **changes})
    config.save_pretrained(tmp_path / "capped")
    train(work, tmp_path / "capped", "capped", "--max_step", 1)
    card, found = export(work / "checkpoints" / "capped", tmp_path / "hf"), {}
    assert "import test_card" in block(card, "Load it", "python")
    exec(block(card, "Load it", "python"), found)
    assert type(found["model"]) is CappedForCausalLM
    assert "trained from random weights with the configuration of" in card.text
    assert "base_model" not in card.data.to_dict()


def test_the_commands_are_those_that_were_given(made, work, tmp_path):
    card, source, output = made
    new, old, train, last = map(shlex.split, block(card, "Commands", "bash").splitlines())
    for name, words in (("new", new), ("old", old)):
        given = parse_prepare(words[2:])
        assert (given.input, given.output) == ([str(work / f"{name} text")], str(work / name))
        assert (given.context_length, given.validation_fraction) == (24, 0.2)
        assert given.pattern == ["*.rst"]
    assert parse_prepare(new[2:]).train_tokenizer == 300
    assert parse_prepare(old[2:]).tokenizer == str(work / "new" / "tokenizer")
    (tmp_path / "arguments.yaml").write_text(block(card, "Commands", "yaml"))
    assert train[:4] == ["python", "train.py", "--config", "arguments.yaml"]
    kept = parse_train(["--config", str(tmp_path / "arguments.yaml"), *train[4:]])
    assert kept.kept() == yaml.safe_load((source.parent / "arguments.yaml").read_text())
    assert kept.checkpoint.run_name == "run"
    assert parse_export(last[2:]) == parse_export([str(source), "--output", str(output)])


# ------------------------------------------------------------------------------- what isn't known


def test_a_checkpoint_without_its_run_and_a_base_without_a_card(made, work, tmp_path):
    shutil.copytree(made[1], tmp_path / "moved")
    card = export(tmp_path / "moved", tmp_path / "hf")
    here, there = ([row[:3] for row in rows(one, "Evaluation")] for one in (card, made[0]))
    assert here == there and rows(card, "Data") == rows(made[0], "Data")
    assert "train.py" not in section(card, "Commands")
    assert not (tmp_path / "hf" / "curves.png").exists()
    shutil.copytree(work / BASE, tmp_path / "local")
    (tmp_path / "local" / "README.md").write_text("---\nlicense: [\n---\n")
    train(work, tmp_path / "local", "of local", "--eval_iters", 0)
    card = export(work / "checkpoints" / "of local", tmp_path / "hf", "--overwrite", "true")
    data = card.data
    assert data.license is data.base_model is data.eval_results is None
    assert "Nothing was evaluated." in card.text and "No card" in section(card, "Licence")
    assert "put a README.md with `license:` beside the config.json" in section(card, "Licence")
    [(name, folder, tokens, epochs)] = rows(card, "Data")
    assert (name, folder, tokens) == ("all", f"`{work / 'new'}`", "576")


def test_tokens_and_epochs_of_one_dataset_are_of_the_same_rows():
    """Rewinds take tokens back and read on. The card had the epochs of all rows beside the tokens
    of those that weren't undone."""
    reached = {"step": 4, "position": 48, "tokens": 32 * 64}  # 16 rows were undone
    progress = {"progress": reached, "fixed": {"train_rows": 96, "context_length": 64}}
    [read] = sources(progress, {"data": {"folder": "d"}})
    assert (read["tokens"], read["epochs"]) == (48 * 64, 0.5)
    progress["fixed"]["train_rows"] = ENDLESS
    assert sources(progress, {})[0]["epochs"] is None, "a stream has none"


def test_tokens_that_rewinds_have_undone_are_said(made, tmp_path, monkeypatch):
    progress = keep.read_progress(made[1])
    progress["progress"]["tokens"] -= 96
    monkeypatch.setattr(keep, "read_progress", lambda folder: progress)
    card = export(made[1], tmp_path / "hf")
    assert "288 tokens.\nRewinds have undone 96 more, which count as read below.\n" in card.text
    assert "Rewinds" not in made[0].text


def test_the_title_is_no_path_and_a_licence_that_is_missing_can_be_had(made, work, tmp_path):
    assert made[0].text.lstrip().startswith("# hf\n") and made[0].data.model_name == "hf"
    readme = work / BASE / "README.md"
    readme.rename(tmp_path / "README.md")
    try:
        said = section(export(made[1], tmp_path / "hf"), "Licence")
    finally:
        (tmp_path / "README.md").rename(readme)
    assert f"`hf download org/base README.md --revision {COMMIT}`" in said
    assert "https://huggingface.co/org/base" in said


@pytest.mark.longer
def test_what_a_checkpoint_has_begun_with_goes_on_in_later_runs(made, work):
    shutil.copytree(work / "checkpoints" / "run", work / "checkpoints" / "resumed")
    shutil.rmtree(work / "checkpoints" / "resumed" / "step-00000006")
    shutil.copytree(work / BASE, work / "copy")
    more = ("--replay", work / "old", "--forgetting_budget", "replay:0.5")
    train(work, work / "copy", "resumed", "--resume", "true", *more)
    train(work, work / "checkpoints" / "resumed" / "step-00000006", "second", "--max_step", 1)
    for name in ("resumed", "second"):
        card = export(work / "checkpoints" / name, work / f"hf-{name}")
        assert card.data.base_model == "org/base" and COMMIT in card.text
    assert "The run began with" in card.text


@pytest.mark.longer
@pytest.mark.parametrize("random", [True, False])
def test_a_moved_checkpoint_of_a_branch_says_what_the_trunk_began_with(work, tmp_path, random):
    shutil.copytree(work / BASE, tmp_path / "base")
    file = tmp_path / "base" / "model.safetensors"
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file({**load_file(file), **old}, file, {"format": "pt"})
    said = ["Not in this model, though.* leaves them out: `.*inv_freq`", "before step 1, with the base"]
    if random:
        file.unlink()
        said = ["trained from random weights", "before step 1, with random weights"]
    runs, of_trunk = work / "checkpoints", f"trunk-{random}/step-00000004"
    train(work, tmp_path / "base", f"trunk-{random}")
    more = ("--resume", "true", "--checkpoint", runs / of_trunk)
    train(work, tmp_path / "base", f"branch-{random}", *more)
    shutil.copytree(runs / f"branch-{random}" / "step-00000006", tmp_path / "moved")
    card = export(tmp_path / "moved", tmp_path / "hf")
    for words in (*said, f"It branched from `{of_trunk}`"):
        assert re.search(words, card.text), words


@pytest.mark.longer
def test_losses_of_other_weights_are_not_said_to_be_its_own(made, work, tmp_path):
    base = work / BASE
    train(work, base, "between", "--save_step_interval", 1, "--eval_step_interval", 2)
    for step, sentence in ((1, "Nothing was evaluated since step 1."), (3, "and after step 2.")):
        card = export(work / "checkpoints" / "between" / f"step-{step:08d}", tmp_path / f"{step}")
        assert card.data.eval_results is None and sentence in section(card, "Evaluation")
    shutil.copytree(work / "checkpoints" / "run", work / "checkpoints" / "again")
    more = "--forgetting_budget replay:0.5 --resume true --resume_override lr --lr 1e-4".split()
    more += ["--checkpoint", work / "checkpoints" / "again" / "step-00000004"]
    train(work, base, "again", "--replay", work / "old", *more)
    [aside] = (work / "checkpoints" / "again").glob("aside-step-00000006-*")
    card = export(work / "checkpoints" / "again", tmp_path / "again")
    assert "- step 4: lr: 0.0001 from here on, 0.01 before." in section(card, "Schedule")
    said = {row[0]: row[2] for row in rows(export(aside, tmp_path / "aside"), "Evaluation")}
    losses = keep.read_progress(aside)["eval_losses"]
    assert said == {name: f"{loss:.4f}" for name, loss in losses.items()}


def test_of_an_average_no_loss_is_said_to_be_its_own(work, tmp_path):
    train(work, work / BASE, "ema", "--ema_decay", 0.5)
    card = export(work / "checkpoints" / "ema", tmp_path / "hf", "--ema", "true")
    loss = metrics(work / "checkpoints" / "ema", "eval_loss_ema")[-1]
    assert f"The average has a loss of {loss:.4f} over the sets of the" in card.text
    assert "equal the moving average in the checkpoint" in card.text
    assert card.data.eval_results is None and "their moving average (decay 0.5)" in card.text


# ----------------------------------------------------------------------- a push that broke half-way


@pytest.fixture
def hub(monkeypatch):
    """A hub on this machine that takes what is pushed."""
    server = Uploads()
    monkeypatch.setattr(constants, "ENDPOINT", server.address)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    for name, value in {"HF_TOKEN": "hf_token", "NO_PROXY": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    yield server
    server.shutdown()
    server.server_close()


# of huggingface_hub's own request
@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
def test_a_push_that_broke_half_way_is_repeated_with_the_same_command(made, hub, tmp_path, capsys):
    more = ("--push_to_hub", "org/name", "--max_shard_size", "50KB")
    hub.breaks_at = 2
    assert ended(export_hf.main, made[1], "--output", tmp_path / "hf", *more) == 2
    said = capsys.readouterr().err
    assert "is complete, but pushing it failed (repeat the command): " in said
    assert len(hub.stored) == 1 and hub.repository == {}
    readme = tmp_path / "hf" / "README.md"
    readme.write_text(readme.read_text() + "\nA sentence of mine.\n")
    index = tmp_path / "hf" / "model.safetensors.index.json"
    hub.breaks_at, broken, before = float("inf"), len(hub.put), index.stat()
    card = export(made[1], tmp_path / "hf", *more)
    said = capsys.readouterr().out
    assert "which is there: comparing them" in said and "Pushed to" in said
    assert index.stat() == before, "not written again"
    assert hub.repository == {path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir()}
    assert len(hub.put) - broken == len(hub.stored) - 1, "what was stored isn't sent again"
    assert card.text.endswith("A sentence of mine.\n")
    assert 'from_pretrained("org/name")' in card.text
    assert len(hub.asked_for) == 2 and all("private" in said for said in hub.asked_for)


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
def test_what_was_exported_is_pushed_later_with_its_card(made, hub, tmp_path):
    export(made[1], tmp_path / "hf")
    card = export(made[1], tmp_path / "hf", "--push_to_hub", "org/name")
    assert block(card, "Load it", "python").count('from_pretrained("org/name")') == 2
    assert f"--output {tmp_path / 'hf'}" in section(card, "Commands")
    assert card.text.lstrip().startswith("# org/name\n") and card.data.model_name == "org/name"
    assert hub.repository["README.md"] == (tmp_path / "hf" / "README.md").read_bytes()
    rename(tmp_path / "hf", "org/other's")
    card = ModelCard.load(tmp_path / "hf" / "README.md")
    assert card.text.count('from_pretrained("org/other\'s")') == 2
    assert card.text.lstrip().startswith("# org/other's\n")


@pytest.mark.parametrize(
    ("name", "more"), [("step-00000006", ""), ("step-00000004", "--dtype bfloat16")]
)
def test_what_is_there_is_pushed_only_if_it_is_this_export(made, hub, tmp_path, capsys, name, more):
    export(made[1], tmp_path / "hf")
    words = ("--output", tmp_path / "hf", "--push_to_hub", "org/name", *more.split())
    assert ended(export_hf.main, made[1].with_name(name), *words) == 2
    said = capsys.readouterr().err
    assert "exists and isn't this export: take another --output, or --overwrite true" in said
    assert hub.asked_for == [] and hub.repository == {}
