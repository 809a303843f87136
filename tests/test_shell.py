"""Between a command and the shell: home folders, quotes, the environment, and the list of
commands."""

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import instead
from test_house import PACKAGE, SOURCES

import prepare_data
from arguments import ROOT, Arguments, PlanArguments
from export_hf import ExportArguments, parse_export
from fabric_llm import __main__ as listing
from fabric_llm.average import AverageArguments
from fabric_llm.base.command_line import parse
from fabric_llm.base.flag import declared
from fabric_llm.base.names import by_flag, command
from fabric_llm.choose import ChooseArguments
from fabric_llm.data import mixture_text
from fabric_llm.data.sources import parse_eval_data
from fabric_llm.extend_vocab import ExtendArguments
from fabric_llm.generate import GenerateArguments
from fabric_llm.verify.__main__ import parse as parse_verify
from parse_arguments import parse_train
from plan_arguments import parse_plan
from prepare_arguments import PrepareArguments, parse_prepare

SCRIPTS = ("train.py", "plan.py", "prepare_data.py", "export_hf.py")
MODULES = ("average", "choose", "extend_vocab", "generate", "report", "verify")
# Flags of text that name no file or folder. A new flag is a path, or it is named here.
NO_PATHS = """auto_wrap_policy steer_bounds run_name resume_override freeze train_only rope logger profile entity project text_field
document_separator pattern exclude max_shard_size push_to_hub accelerator_name sweep weights forgetting_budget prompt probes
activation_checkpointing keep_best_of mirror"""
IN_PARTS = "eval_data"  # name=folder: where it is taken apart

# ------------------------------------------------------------------------------- home folders

PROGRAMS = {  # program -> (groups of flags, what parses, flags that it needs)
    "train": (Arguments, parse_train, ["--model_name", "m", "--train_data_dir", "d"]),
    "plan": (PlanArguments, lambda words: parse_plan(words)[0], ["--model_name", "m"]),
    "prepare_data": (PrepareArguments, parse_prepare, ["--output", "o"]),
    "export_hf": (ExportArguments, parse_export, ["--checkpoint", "c", "--output", "o"]),
    "average": (AverageArguments, None, ["--parts", "p"]),
    "extend_vocab": (
        ExtendArguments, None, "--model_name m --input i --tokens 1 --output o".split(),
    ),
    "choose": (ChooseArguments, None, []),
    "generate": (GenerateArguments, None, ["--model", "m"]),
}


def flags_of(program):
    group = PROGRAMS[program][0]
    return Arguments.declared() if group is Arguments else declared(group)


def parsed(program, words):
    group, parser, needed = PROGRAMS[program]
    words = list(instead(needed, words))
    if parser is None:
        return parse(program, "", [group], words)
    found = parser(words)
    return found.flat() if group is Arguments else vars(found)


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_flag_of_text_is_a_path_or_none(program):
    texts = {name for name, one in flags_of(program).items() if {str, list[str]} & set(one.kinds)}
    paths = {name for name, one in flags_of(program).items() if one.path}
    assert paths <= texts and texts - paths - {IN_PARTS} <= set(NO_PATHS.split())


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_tilde_is_the_home_folder_wherever_it_stands(program, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "at home"))
    config = tmp_path / "at home" / "mine.yaml"
    config.parent.mkdir()
    (config.parent / "x y").write_text("")  # what --code names is read
    flags = {name: one for name, one in flags_of(program).items() if one.path}
    for name in {"replay", "data_mix"} & flags.keys():
        del flags[name]
    is_list = {name for name, one in flags.items() if one.kinds == [list[str]]}
    lines = [f"{name}: {['~/x y'] if name in is_list else '~/x y'}\n" for name in flags]
    config.write_text("".join(lines))
    needed = PROGRAMS[program][2]
    for words in (
        [word for name in flags for word in (f"--{name}", "~/x y")],
        [f"--{name}=~/x y" for name in flags],
        *[["--config=~/mine.yaml"]] * (program != "plan"),  # no file holds flags of plan.py alone
    ):
        found = parsed(program, words)
        # by the command line, which wins
        given = needed if words == ["--config=~/mine.yaml"] else []
        for name in [name for name in flags if f"--{name}" not in given]:
            path = f"{config.parent}/x y"
            assert found[name] == ([path] if name in is_list else path), words


def test_a_tilde_in_a_mixture_and_in_eval_data(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    sources = "{a: {path: ~/one, weight: 1}, b: {path: '~/two', weight: 1}}"
    (tmp_path / "mix.yaml").write_text(f"sources: {sources}\n")
    for given in (
        ["--data_mix=a=~/one:1,b=~/two:1"],
        ["--data_mix=~/mix.yaml"],
        ["--train_data_dir", "~/one", "--replay=~/two"],
    ):
        mix = mixture_text.parse(parse_train(["--model_name", "m", *given]).data.data_mix)
        assert [source.path for source in mix.sources] == [f"{tmp_path}/one", f"{tmp_path}/two"]
    assert parse_eval_data("g=~/g,c=c") == {"g": f"{tmp_path}/g", "c": "c"}


def test_a_run_is_resumed_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "out" / "run").mkdir(parents=True)
    text = "model_name: m\ntrain_data_dir: d\nlr: 0.5\n"
    (tmp_path / "out" / "run" / "arguments.yaml").write_text(text)
    found = parse_train(["--resume", "true", "--output_dir=~/out", "--run_name", "run"])
    assert found.training.lr == 0.5 and found.checkpoint.output_dir == str(tmp_path / "out")
    assert parse_verify(["~/out/run"]).run == str(tmp_path / "out" / "run")


def test_what_is_prepared_at_home_is_where_the_next_command_looks(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "home").mkdir()
    text = "".join(f"The {n}th line of a text, and {n + 1} comes next.\n\n" for n in range(200))
    (tmp_path / "home" / "text.txt").write_text(text)
    flags = "--input ~/text.txt --train_tokenizer 300 --context_length 16 --num_workers 1"
    prepare_data.main([*flags.split(), "--output=~/größe - 1"])
    following = shlex.split(re.search("Next: (.*)", capsys.readouterr().out)[1])
    folder = tmp_path / "home" / "größe - 1"
    assert following[-2:] == ["--train_data_dir", str(folder)]
    assert (folder / "dataset_dict.json").is_file()
    assert not (tmp_path / "~").exists()
    made_by = shlex.split(json.loads((folder / "manifest.json").read_text())["made_by"]["command"])
    assert parse_prepare(made_by[2:]).output == str(folder)


def test_the_model_of_a_tokenizer_is_named_in_the_next_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("".join(f"Line {n} of a text.\n\n" for n in range(300)))
    flags = ["--input", "text.txt", "--context_length", "16", "--num_workers", "1"]

    def next_model(*more):
        prepare_data.main([*flags, *more])
        following = shlex.split(re.search("Next: (.*)", capsys.readouterr().out)[1])
        return following[following.index("--model_name") + 1]

    assert next_model("--train_tokenizer", "300", "--output", "own") == "NAME_OR_DIR"
    tokenizer = Path("own", "tokenizer")
    assert next_model("--tokenizer", str(tokenizer), "--output", "again") == "NAME_OR_DIR"
    shutil.copy(ROOT / "configs" / "demo_llama" / "config.json", tokenizer)
    model = Path("my model").resolve()
    tokenizer.rename(model)
    assert next_model("--tokenizer", str(model), "--output", "of_model") == str(model)


# ------------------------------------------------------------------------------- quotes

NAMES = [
    "plain", "two words", "größe", "it's", 'a "b"', "-dash", "--dash", "$HOME", "a;b", "*", "a=b",
    "#1", "a\\b", "-1",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_printed_command_gives_back_what_it_was_made_from(name, tmp_path):
    said = command("python", "export_hf.py", Path(name, "run"), output=name)
    found = parse_export(shlex.split(said)[2:])
    assert Path(found.checkpoint) == Path(name, "run") and found.output == name
    shell = ["bash", "-c", f"printf '%s\\n' {said}"]
    printed = subprocess.run(shell, capture_output=True, text=True, cwd=tmp_path)
    assert printed.stdout.splitlines() == shlex.split(said), "as a shell reads it"
    said = command(model_name=name, train_data_dir="d", run_name=name, resume="true")
    run = parse_train(shlex.split(said))
    assert (run.model.model_name, run.checkpoint.run_name) == (name, name)
    words = [f"--run_name={name}", "--model_name", "m", "--train_data_dir=d"]
    planned = shlex.split(command("python", "train.py", **by_flag(words)))
    assert parse_train(planned[2:]).checkpoint.run_name == name


def test_no_command_is_put_together_without_quotes():
    """In the source: after a script's name in an f-string there is no value that `command` hasn't
    quoted."""
    found, value = [], r"python (\w+\.py|-m fabric_llm\.\w+)\b[^.;]*\{\}"
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr) and "PROGRAM" not in ast.unparse(node):
                is_text = [isinstance(part, ast.Constant) for part in node.values]
                parts = zip(is_text, node.values)
                words = "".join(part.value if text else "{}" for text, part in parts)
                if re.search(value, words):
                    found.append(f"{path.name}: {words}")
    assert found == []


# ------------------------------------------------------------------------------- the environment


def started(words, folder, *options):
    return subprocess.run(
        [sys.executable, *options, *words], cwd=folder, capture_output=True, text=True, timeout=60
    )


@pytest.mark.quick_cases(r"train|average")
@pytest.mark.parametrize("name", [*SCRIPTS, *MODULES])
def test_a_command_outside_of_its_environment_says_so(name):
    """-S leaves all installed packages out."""
    words = ["-m", f"fabric_llm.{name}", "x"]
    if name in SCRIPTS:
        words = [name, "--input", "x", "--output", "y"]
    done = started(words, ROOT, "-S")
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1), done.stderr
    first = "jinja2" if name == "report" else "yaml"  # the one that is imported first
    said = f"the package {first} isn't installed for {sys.executable}: activate the environment"
    assert said in done.stderr


WITHOUT = """
import runpy, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == %r:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refuse())
sys.argv = %r
runpy.run_path(sys.argv[0], run_name="__main__")
"""


TOYS = "--model_name {toys}/llama --train_data_dir {toys}/data --max_step 1 --output_dir {tmp}"


@pytest.mark.quick_cases(r"yaml-train|torch-train")
@pytest.mark.parametrize(
    ("package", "words"),
    [
        *(("yaml", script) for script in SCRIPTS),
        ("torch", f"train.py {TOYS}"),
        ("lightning_fabric", f"train.py {TOYS}"),
        ("torch", "plan.py --accelerator cpu --max_step 1"),
        ("pyarrow", "prepare_data.py --input LICENSE --train_tokenizer 300 --output {tmp}/x"),
    ],
)
def test_a_missing_package_is_named(package, words, toys, tmp_path):
    words = words.format(tmp=tmp_path, toys=toys).split()
    done = started(["-c", WITHOUT % (package, words)], ROOT)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert f"the package {package} isn't installed for" in done.stderr.splitlines()[-1], done.stderr


@pytest.mark.quick_cases(r"3, 8")
@pytest.mark.parametrize("version", ["(3, 8, 1)", "(3, 10, 9)"])
def test_an_old_python_is_told_in_one_sentence(version):
    for name in [*SCRIPTS, *(f"fabric_llm.{name}" for name in MODULES)]:
        run = "run_path" if name in SCRIPTS else "run_module"
        code = f"runpy.{run}({name!r}, run_name='__main__')"
        code = f"import runpy, sys; sys.version_info = {version}; {code}"
        done = started(["-c", code], ROOT)
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
        assert "fabric_llm needs Python 3.11 or newer, which" in done.stderr
        assert "README.md" in done.stderr


def test_an_old_python_can_read_what_asks_for_its_version():
    """What runs before fabric_llm/__init__.py: the scripts down to their first import of the
    package, and arguments.py."""
    for path in (*ROOT.glob("*.py"), PACKAGE / "__init__.py"):
        tree = ast.parse(path.read_text(), feature_version=(3, 8))
        for node in tree.body:
            if isinstance(node, ast.ImportFrom):
                if node.module.startswith(("fabric_llm", "arguments")):
                    break
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = {alias.name for alias in node.names}
                newer = {"cache", "pairwise", "batched", "tomllib", "Self", "StrEnum"}
                assert not newer & names, path


# ------------------------------------------------------------------------------- what there is


def test_all_commands_are_listed(capsys):
    listing.main([])
    said = capsys.readouterr().out
    names = set()
    for path in PACKAGE.rglob("*.py"):
        if 'if __name__ == "__main__"' in path.read_text():
            names.add(path.parent.name if path.stem == "__main__" else path.stem)
    names -= {"fabric_llm", "process"}  # the second is of the mirror: train.py starts it
    assert set(listing.commands()) == names == set(MODULES)
    assert "about a run, or about several beside each other.\n" in said, "whole sentences"
    assert all(f"python -m fabric_llm.{name} " in said for name in names)
    assert all(script in said for script in SCRIPTS)


@pytest.mark.parametrize(
    ("word", "meant"),
    [("verfy", "take python -m fabric_llm.verify."), ("x", "lists its commands.")],
)
def test_a_command_behind_the_package_is_a_mistake(word, meant, capsys):
    with pytest.raises(SystemExit) as exit:
        listing.main([word])
    said = capsys.readouterr().err
    assert exit.value.code == 2 and len(said.splitlines()) == 1
    assert repr(word) in said and meant in said


def test_the_readme_activates_the_environment_before_it_says_python():
    for page in (ROOT / "README.md", ROOT / "docs" / "es" / "README.md"):
        first = re.findall(r"^(.*\bpython \S+\.py.*)$", page.read_text(), re.M)[0]
        assert "source .venv/bin/activate" in first
        assert os.path.basename(first.split()[-1]) == "train.py"
