"""The command line of a run: words to `Arguments`, with the file of --config, the flags of --code,
and one sentence for a mistake. Nothing here imports torch."""

import argparse
import os
import re
import sys
from collections import Counter
from collections.abc import Collection
from dataclasses import fields
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional

from arguments import DEMO_CONFIG, ROOT, Arguments, PlanArguments, groups_of_run
from fabric_llm.base import register
from fabric_llm.base.command_line import parse
from fabric_llm.base.flag import declared, groups
from fabric_llm.base.names import at_home
from fabric_llm.base.plain_yaml import load_yaml, read_yaml, yaml_text
from fabric_llm.data.mixture_text import text_of, with_replay
from fabric_llm.data.sources import SOURCES
from fabric_llm.run import metrics, trackers
from fabric_llm.training.schedule import SCHEDULES
from prepare_arguments import PrepareArguments

# What people paste from other trainers and train.py has no flag for: names -> what is said of them.
NOT_A_FLAG = {
    "optim optimizer optimizer_name optim_type": (
        "the optimizer is AdamW; --code registers another (docs/make_it_yours.md)"
    ),
    "betas adam_betas": "they are --beta1 and --beta2",
    "lora lora_r lora_rank lora_alpha lora_dropout lora_target_modules use_lora use_peft peft "
    "adapter load_in_4bit load_in_8bit quantize": (
        "all parameters train, or those of --train_only: there are no adapters"
    ),
    "do_train do_eval do_predict": (
        "leave it out: a run trains, and evaluates where --eval_iters isn't 0"
    ),
    "eval_strategy evaluation_strategy save_strategy logging_strategy evals_per_epoch "
    "saves_per_epoch": (
        "--eval_step_interval, --save_step_interval and --log_step_interval say after which steps"
    ),
    "resume_from_checkpoint": (
        "--resume true takes the newest checkpoint of the run, with --checkpoint FOLDER another"
    ),
    "trust_remote_code": "leave it out: code that comes with a model is never run",
    "token hf_token use_auth_token hub_token": "set HF_TOKEN, or log in with hf auth login",
    "chat_template prompt_style train_on_inputs": (
        "rows are plain text: a chat template is applied before prepare_data.py"
    ),
    # Not derived from export_hf.py, which a run doesn't import; a test compares the names.
    "push_to_hub hub_model_id push_to_hub_model_id": "it is --push_to_hub of export_hf.py",
    "private hub_private_repo": "it is --private of export_hf.py",
    "dtype": "it is --dtype of export_hf.py",
    "ema": "it is --ema of export_hf.py",
    "max_shard_size": "it is --max_shard_size of export_hf.py",
    "compare_plan": "it was removed: plan.py --like RUN takes the speed of a run",
    "tie_embeddings tie_word_embeddings": "leave it out: the model's config.json says it",
    "overwrite_output_dir": "leave it out: a run never overwrites another; take another --run_name",
}


# ignored in the arguments.yaml of a run that an earlier version has begun
REMOVED = ("compare_plan",)


def not_here() -> dict[str, str]:
    """{name: what is said of it} of names that are no flags of train.py, also those of other
    scripts."""
    # Each key of NOT_A_FLAG holds several names of the same meaning.
    found = {name: said for names, said in NOT_A_FLAG.items() for name in names.split()}
    scripts = {
        "plan.py": PlanArguments,
        "prepare_data.py": PrepareArguments,
    }
    # Flags that another script has: the sentence names the script.
    for script, group in scripts.items():
        for name, one in declared(group).items():
            found |= dict.fromkeys((name, *one.aliases.split()), f"it is --{name} of {script}")
    return found


TRAIN = """usage: python train.py --devices 4 --model_name MODEL --train_data_dir FOLDER
Train a Hugging Face causal language model. Without flags: a demo."""


def parse_train(argv: Optional[list[str]] = None) -> Arguments:
    """Arguments of train.py from `argv` (default: sys.argv). The command line wins over `--config`.

    With neither --config nor --model_name nor --train_data_dir, a resumed run goes on with its own
    arguments.yaml, and otherwise configs/demo.yaml applies. Exits with code 2 and one sentence on
    anything unknown; raises ValueError for what --code, --logger or a mixture can't be.
    """
    return parse_run("train.py", TRAIN, [], argv)[0]


def parse_run(
    program: str, about: str, more: list[type], argv: Optional[list[str]]
) -> tuple[Arguments, dict[str, Any]]:
    """(arguments of a run, all flags by name). more: groups of flags that the program has besides
    those of train.py."""
    argv = list(sys.argv[1:] if argv is None else argv)
    # These decide whether the demo or the flags of a resumed run apply, and so which file is read:
    # they must be known before anything is parsed.
    named = any(re.match(r"--(config|model_name|train_data_dir)(=|$)", word) for word in argv)
    # The flags that the user has typed, before those of a file are put in front of them.
    on_command_line = frozenset(re.findall(r"^--(\w+)", "\n".join(argv), re.M))
    # An explicit model, dataset or file says what to train, so arguments.yaml isn't looked for.
    wanted = None if named else _arguments_of_resumed_run(argv)
    # False as well in a folder that can't be searched, of which run_directory has a sentence.
    resumed = wanted if wanted is not None and os.path.isfile(wanted) else None
    of_data = {"data_mix", "replay", "replay_fraction"} & on_command_line
    demo = not named and wanted is None and not of_data
    if demo or resumed is not None:
        # A run stays in its directory, also if it was moved since its file was written.
        # Over that of the file, and not over what the user has typed.
        is_placed = resumed is None or "output_dir" in on_command_line
        place = [] if is_placed else ["--output_dir", str(resumed.parent.parent)]
        argv = ["--config", str(DEMO_CONFIG if demo else resumed), *place, *argv]
    # First, because the flags and schedules that it registers are parsed with all others.
    _load_code(argv, more)
    flag_groups = [*more, *groups_of_run().values()]
    # A resumed run's file may hold flags that no longer exist. They are read and dropped.
    removed = {*REMOVED, *_flags_of_other_code(resumed, argv, flag_groups)}
    # train.py reads the same file, and refuses what it doesn't know.
    typed = {
        name: f"a file has flags of train.py alone: give --{name} on the command line"
        for group in more
        for name in declared(group)
    }
    flat = parse(
        program,
        about,
        flag_groups,
        argv,
        of_run=resumed is not None,
        elsewhere=not_here() | typed,
        removed=removed,
        only_typed=typed,
    )
    # It raises ValueError for a tracker that doesn't exist.
    trackers.named(flat["logger"])
    # arguments.yaml keeps the mixture itself, since its file may change.
    if flat["replay"] is not None or flat["replay_fraction"] is not None:
        mix = with_replay(
            flat["train_data_dir"], flat["data_mix"], flat["replay"], flat["replay_fraction"]
        )
        flat |= dict.fromkeys(("train_data_dir", "replay", "replay_fraction")) | {"data_mix": mix}
    elif flat["data_mix"]:
        flat["data_mix"] = text_of(flat["data_mix"])
    if demo:  # the preset's paths are relative to this repository, not to the current directory
        for name in ("model_name", "train_data_dir"):
            flat[name] = str(ROOT / flat[name])
    # `flat` has all flags by name. Each group takes the values of its own fields.
    by_group = {
        name: group(**{f.name: flat[f.name] for f in fields(group)})
        for name, group in groups(Arguments).items()
    }
    own = {name: flat[name] for group in register.FLAGS.values() for name in declared(group)}
    arguments = Arguments(
        **by_group, own=SimpleNamespace(**own), demo=demo, on_command_line=on_command_line
    )
    # What functions of --code get as `flags`.
    if register.LOADED:
        register.LOADED["flags"] = arguments
    return arguments, flat


def _given(argv: list[str], *names: str) -> SimpleNamespace:
    """The values of these flags, before all flags can be parsed; None where one isn't given."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in names:
        # One without a value is None here, and parse() says what is wrong with it.
        parser.add_argument(f"--{name}", nargs="?")
    words = vars(parser.parse_known_args(argv)[0])
    return SimpleNamespace(**{name: word and at_home(word) for name, word in words.items()})


def _load_code(argv: list[str], more: list[type]) -> None:
    """Load the module of --code, whose flags are parsed next. Raises ValueError.

    more: as of `parse_run`.
    """
    # what comes behind --help are names of flags
    before_help = takewhile(lambda word: word.partition("=")[0] not in ("--help", "-h"), argv)
    # Only these two are parsed here; the flags of the module aren't known yet.
    given = _given(list(before_help), "code", "config")
    code, runs = given.code, set()
    # The command line wins over the file, so the file is read only without a --code.
    if code is None and given.config is not None:
        config = Path(given.config)
        try:
            text = yaml_text(config)
            # parse() reads the file again, which takes seconds for a hostile one.
            values = load_yaml(text) if "code" in text else {}
        except (OSError, ValueError):
            return  # parse() says what is wrong with it
        code = values.get("code") if isinstance(values, dict) else None
        # The file came with a run, so register.load refuses a module that lies beside it.
        if config.name == "arguments.yaml":
            runs = register.folders_of_run(config)
    if not isinstance(code, str) or code.lower() in ("none", "null"):
        code = None
    register.load(code and at_home(code), runs)
    # The module is loaded now, so its names can be compared with the built-in ones.
    if code is not None:
        _refuse_taken_names([*more, *groups_of_run().values()])


def _flags_of_other_code(
    resumed: Optional[Path], argv: list[str], flag_groups: list[type]
) -> set[str]:
    """Names in the arguments.yaml of a resumed run that are no flags any more, because
    --resume_override code takes another module, or none."""
    overridden = _given(argv, "resume_override").resume_override or ""
    # With the same module its flags are still declared, and nothing has to be dropped.
    if resumed is None or "code" not in overridden.split(","):
        return set()
    try:
        values = read_yaml(resumed)
    except (OSError, ValueError):
        return set()  # parse() says what is wrong with it
    # What the file holds beyond the declared flags belonged to the module that is gone.
    known = {name for group in flag_groups for name in declared(group)}
    return {str(name) for name in values} - known if isinstance(values, dict) else set()


def _refuse_taken_names(flag_groups: list[type]) -> None:
    """Raises ValueError where --code registers a name that there is already."""
    # What the sentence calls the name -> (names of --code, names that exist already).
    tables: dict[str, tuple[Collection[str], Collection[str]]] = {
        "schedule": (register.SCHEDULES, SCHEDULES),
        "source": (register.SOURCES, SOURCES),
        "metric": (register.METRICS, metrics.STEP_NUMBERS),
        "number of the log": (register.added_by_loss(), {*metrics.STEP_NUMBERS, *register.METRICS}),
        "tracker": (register.TRACKERS, trackers.TRACKERS),
    }
    for what, (own, ours) in tables.items():
        for name in own:
            if name in ours:
                raise ValueError(f"--code: there is a {what} {name!r} already; take another name.")
    # `config` and `help` are no fields of a group, but can't be taken either.
    count = Counter(["config", "help", *(name for one in flag_groups for name in declared(one))])
    for name in count:
        if count[name] > 1:
            raise ValueError(f"--code: there is a flag --{name} already; take another name.")


def _arguments_of_resumed_run(argv: list[str]) -> Optional[Path]:
    """arguments.yaml of the run that is resumed by --run_name or --checkpoint, whether it is there
    or not; None without these flags, or if it may be at --mirror."""
    given = _given(argv, "resume", "run_name", "checkpoint", "output_dir", "mirror")
    # Without a name of the run, or one of its checkpoints, no directory is looked for.
    # As YAML has them, in which a flag of true or false is read.
    resumes = str(given.resume).lower() in ("true", "yes", "on", "auto")
    if not resumes or not (given.run_name or given.checkpoint):
        return None
    folder = Path(given.output_dir or "checkpoints", given.run_name or "")
    # --checkpoint names a folder in the directory of its run, whatever --output_dir says.
    file = (
        Path(os.path.abspath(given.checkpoint)).parent if given.checkpoint else folder
    ) / "arguments.yaml"
    return file if os.path.isfile(file) or given.mirror is None else None
