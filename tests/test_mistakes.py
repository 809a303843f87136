"""What users do wrong is answered before torch is imported, which takes seconds: by one sentence
and the table's code."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from ranks import instead

from arguments import ROOT
from fabric_llm.base import faults, names
from fabric_llm.plan import run_directory, start
from parse_arguments import parse_train

HEAVY = ("torch", "lightning", "transformers", "datasets", "numpy", "pyarrow", "tokenizers")
LIGHT = """
import contextlib, importlib, io, json, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in %r:
            raise AssertionError(f"too late: {name} is imported")

sys.meta_path.insert(0, Refuse())
answers = []
for program, words in json.load(sys.stdin):
    error, code = io.StringIO(), 0
    with contextlib.redirect_stderr(error), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = importlib.import_module(program).main(words)
        except SystemExit as stop:
            code = stop.code
        except AssertionError as late:
            code = str(late)
    answers.append((code, error.getvalue()))
print(json.dumps(answers))
""" % (HEAVY,)


def answers(commands, folder, **variables):
    """[(code, stderr)] of (program, words) in one process in which nothing heavy can be
    imported."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    words = json.dumps([(program, [str(word) for word in flags]) for program, flags in commands])
    given = {"input": words, "cwd": folder, "env": environment, "timeout": 60}
    command = [sys.executable, "-c", LIGHT]
    done = subprocess.run(command, **given, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def place(toys, tmp_path_factory):
    """A folder in which users make mistakes: `model`, `data`, `prepared`, a run, and other things
    by the wrong name."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "model").symlink_to(toys / "llama")
    (folder / "data").symlink_to(toys / "data")
    (folder / "prepared").mkdir()
    (folder / ".long-running.preparing").mkdir()
    (folder / "copied" / "step-00000004").mkdir(parents=True)
    (folder / "prepared" / "dataset_dict.json").write_text('{"splits": ["train", "validation"]}')
    said = {"packed": True, "context_length": 64, "splits": {"train": {"rows": 9}}}
    (folder / "prepared" / "manifest.json").write_text(json.dumps(said))
    for step in (9, 100):
        checkpoint = folder / "checkpoints" / "run" / f"step-{step:08d}"
        checkpoint.mkdir(parents=True)
        for name in ("MANIFEST.json", "config.json", "tokenizer.json"):
            (checkpoint / name).write_text("{}")
    for name, file in {
        "tokenizer": "tokenizer.json",
        "adapter": "adapter_config.json",
        "corpus": "a.txt",
        "hf": "config.json",
        "other": "notes",
    }.items():
        (folder / name).mkdir(parents=True)
        (folder / name / file).write_text('{"base_model_name_or_path": "org/base"}')
    shutil.copytree(folder / "prepared", folder / "sets" / "long")
    for name, column in (("text", "text"), ("body", "body")):
        (folder / "sets" / name / "train").mkdir(parents=True)
        (folder / "sets" / name / "dataset_dict.json").write_text('{"splits": ["train"]}')
        said = {"features": {"number": {"dtype": "int64"}, column: {"dtype": "string"}}}
        (folder / "sets" / name / "train" / "dataset_info.json").write_text(json.dumps(said))
        (folder / "sets" / name / "train" / "state.json").write_text("{}")
    for name, text in {
        "unknown": (
            "{sources: {old: {path: prepared, weight: 1}}, stages: [{from: 0.5, weights: "
            "{lod: 1}}]}"
        ),
        "key": "{sources: {new: {path: prepared, wieght: 1}}}",
        "typo": "seed: 7\nlearning_rat: 1\n",
        "typos": "bf16: true\nlr: 1\nx: 2\n",
        "text": "# a comment\nseed: 7\nlr: fast\n",
        "small": "seed: 7\ndevices: 0\n",
        "clock": "max_hours: 1:30\n",
        "price": "seed: 7\ntokens: 1e9\n",
        "map": "seed: 7\nlr: {a: 1}\n",
        "section": "seed: 7\ntraining:\n  lr: 1\n",
        "tab": "seed: 7\n\tlr: 1\n",
        "indented": "seed: 7\n  lr: 1\n",
        "dashed": "−−lr: 1\n",
        "equals": "[training]\nseed = 7\n",
        "colon": "seed: 7\nlr 1\n",
        "unclosed": "seed: 7\nrun_name: 'mine\n",
        "number": "run_name: 12\n",
        "switch": "--lr: 1\non: 2\n",
        "two": "lr: 1\n---\nlr: 2\n",
        "written": "lr: 1e-4\nmax_step: 1e2\n",
        "boolean": "run_name: yes\n",
    }.items():
        (folder / f"{name}.yaml").write_text(text)
    return folder


GOOD = ("--model_name", "model", "--train_data_dir", "data")
# A command, then its exit code and words of the sentence. train.py has the flags of GOOD as well.
MISTAKES = r"""
train --lr -1
    2: --lr must be positive, not -1.
train --lr .inf
    2: --lr must be a finite number
train --lr 1e−4
    2: not '1e−4'. '−' (U+2212, MINUS SIGN) isn't the '-' of a keyboard: type that.
train small.yaml
    2: unexpected 'small.yaml'. Did you mean --config small.yaml?
train --config dashed.yaml
    2: line 1: unknown key '−−lr' in dashed.yaml. See --help. '−' (U+2212, MINUS SIGN) isn't the '-'
train –lr 1e-4
    2: unexpected '–lr': every flag is written --name value, and a value with spaces in quotes. '–' (
train --logger wandb,tensorbord
    2: --logger takes none, csv, tensorboard, wandb, mlflow, or several of them with commas, not
train --logger wandb,tensorbord
    2: 'tensorbord': take tensorboard.
train --logger WandB
    2: not 'WandB': take wandb.
train --logger csv,
    2: not ''.
train --logger none,csv
    2: --logger none,csv: none goes by itself.
train --log_model lats
    2: --log_model takes false, last or all, not 'lats'.
train --min_lr 1
    2: --min_lr 1.0 is larger than --lr 2e-05.
train --warmup_steps 0.03
    2: --warmup_steps takes a number of steps, not '0.03'.
train --replay data
    2: --train_data_dir and --replay are both 'data'.
train --replay long --replay_fraction 20
    2: must be between 0 and 1, such as 0.2, not 20.
train --resume_override learning_rate
    2: --resume_override learning_rate: did you mean --lr?
train --run_name checkpoints/run
    2: not '/' or '..'. Did you mean 'run'?
train --train_data_dir hf
    2: it has no dataset_dict.json. It is a model's, for --model_name.
train --forgetting_action steer --eval_step_interval 5 --max_step 20
    2: --forgetting_action steer keeps budgets: give --forgetting_budget, each above 0.
train --max_hours 0
    2: --max_hours must be positive, not 0.
train --devices 0
    2: --devices must be positive, not 0.
train --precision bf16
    2: --precision takes bf16-true, bf16-mixed, 16-mixed or 32-true, not 'bf16'.
fabric_llm.average s3://bucket/run --last 2
    2: --last 2 takes runs on a disk: name the checkpoints at an address one by one
train --resume true --checkpoint s3://bucket/run/step-00000040
    2: --checkpoint s3://bucket/run/step-00000040 is read from a disk: copy it there first.
train --initial_checkpoint_dir m --evals_per_epoch 2 --tie_embeddings true
    2: unknown flags: --initial_checkpoint_dir (did you mean --model_name?), --evals_per_epoch (--eval_step_interval
train --join_timeout 1e30
    2: --join_timeout must be less than 1000000000, not 1e30.
train --devices 0,1
    2: --devices takes an integer or auto, not '0,1'.
train --max_step 1e3
    2: --max_step takes an integer, not '1e3': write 1000.
train --max_step 2,000
    2: --max_step takes an integer, not '2,000': write 2000.
train --max_step 1.5k
    2: --max_step takes an integer, not '1.5k': write 1500.
train --activation_checkpointing
    2: takes none, full, every:N (such as every:2), selective or offload, and nothing is given.
train --train_data_dir nowhere
    2: '). Make one with prepare_data.py
train --train_data_dir long-running
    2: No dataset at 'long-running' yet: its preparation isn't finished. Wait for it, or repeat
train --train_data_dir preparde
    2: No dataset at 'preparde'. Did you mean 'prepared'?
train --train_data_dir null --data_mix a=data:1,b=sets/lnog:1
    2: No dataset at 'sets/lnog'. Did you mean 'sets/long'?
train --lr_schedule cos
    2: inverse_sqrt, or one that --code registers, not 'cos'.
train --fsdp full_shard
    2: Did you mean --strategy fsdp or fsdp2?
train --train_data_dir null --replay data
    2: --replay goes with --train_data_dir;
train --eval_data a=stes/long
    2: --eval_data: No dataset at 'stes/long'. Did you mean 'sets/long'?
train --devices 100000 --global_batch_size 100000
    2: would only wait for each other: take --devices
train --devices 100000 --global_batch_size 100000
    2: or insist with --oversubscribe true.
train --train_data_dir corpus
    2: isn't a dataset folder: it has no dataset_dict.json
train --train_data_dir corpus/a.txt
    2: 'corpus/a.txt' is a file. If it holds text, make it with prepare_data.py
train --lr -1e-4
    2: --lr must be positive, not -1e-4.
train --train_data_dir data/train
    2: 'data/train' isn't a dataset folder: it has no dataset_dict.json. Did you mean 'data'?
train --model_name ./modle
    2: No model './modle': there is no such folder, and it can't be a name on the hub. Did you
train --model_name checkpoints/rnu
    2: No model 'checkpoints/rnu': there is no such folder. Did you mean 'checkpoints/run'?
train --train_data_dir sets/text
    2: make it with prepare_data.py --input sets/text --tokenizer NAME_OR_DIR --output sets/text-t
train --eval_data a=sets/text
    2: 'sets/text' holds text, not tokens: make it with prepare_data.py --input sets/text
train --train_data_dir sets/body/train
    2: --tokenizer NAME_OR_DIR --output sets/body/train-tokens --text_field body.
train --train_data_dir null --data_mix a=data:1,b=sets/text:1
    2: 'sets/text' holds text, not tokens: make it with
train --train_data_dir null --data_mix a=data:0,75,b=long:0,25
    2: such as new=data/new:0.75,old=data/old:0.25, each name once; not '75'.
train --train_data_dir null --data_mix a=data,b=long:1
    2: such as new=data/new:0.75,old=data/old:0.25, each name once; not 'a=data'.
train --model_name a/b/c
    2: No model 'a/b/c': there is no such folder
train --model_name checkpoints/run
    2: It is a run: take its newest checkpoint, --model_name checkpoints/run/step-00000100.
train --model_name checkpoints
    2: it has no config.json. It holds run: take a model in Hugging Face's format.
train --model_name data
    2: it has no config.json. It holds dataset_dict.json
train --model_name tokenizer
    2: It holds tokenizer.json: take a model in Hugging Face's format.
train --model_name adapter
    2: 'adapter' holds an adapter: merge it into its model first.
train --model_name corpus/a.txt
    2: --model_name 'corpus/a.txt' is a file
train --model_name https://huggingface.co/org/name
    2: and it can't be a name on the hub. Did you mean org/name?
train --model_name s3://bucket/model
    2: s3://bucket/model is read from a disk: copy it there
train --global_batch_size 6 --micro_batch_size 4 --devices 1
    2: 6 doesn't divide by --micro_batch_size 4 x 1 device
train --global_batch_size 8 --micro_batch_size 1 --devices 3 --accelerator cpu
    2: take --global_batch_size 9, or 2 devices
train --global_batch_size 8 --gradient_accumulation_steps 3 --micro_batch_size 2 --accelerator cpu
    2: steps 4, not 3
train --strategy fsdp2 --precision 16-mixed
    2: --precision 16-mixed doesn't go with --strategy fsdp2
train --strategy fsdp2 --sharding_strategy NO_SHARD
    2: NO_SHARD doesn't go with
train --strategy ddp --cpu_offload true
    2: --cpu_offload true needs
train --strategy fsdp --cpu_offload true --devices 1 --gradient_accumulation_steps 2
    2: 2 micro-batches a step
train --precision 16-mixed --accelerator cpu
    2: --precision 16-mixed needs a GPU
train --auto_wrap_policy size:many
    2: such as size:1e8
train --tpu true
    2: torch_xla
train --run_name ../x
    2: --run_name '../x' must be a plain name
train --run_name run
    2: holds checkpoints up to step-00000100: go on with --resume true
train --checkpoint checkpoints/run/step-00000100
    2: goes with --resume true
train --resume_override precision
    2: --resume_override precision: what can change is data_mix, document_masking, float8, number_
train --model_name null --train_data_dir null --resume auto --run_name other
    2: leave out --model_name and --train_data_dir.
train --resume true --run_name other
    66: (step-N) in 'checkpoints/other', which isn't there (from
train --resume true --run_name other
    66: '); other runs there are 'run'.
train --resume true --run_name rnu --output_dir checkponts
    66: '). Did you mean 'checkpoints'?
train --config
    2: --config takes the name of a YAML file, and nothing is given.
train --config=
    2: --config takes the name of a YAML file, and nothing is given.
train --output_dir=
    2: --output_dir takes text, and nothing is given.
train --lr -.inf
    2: --lr must be positive, not -.inf.
train --max_step -inf
    2: --max_step takes an integer, not '-inf'.
train --config written.yaml
    2: line 2 of written.yaml: max_step takes an integer, not '1e2': write 100.
train --config boolean.yaml
    2: line 1 of boolean.yaml: run_name takes text, not 'yes': write it in quotes.
train --run_name -_run
    2: A value that begins with a dash is written --run_name=VALUE.
train --train_data_dir data,corpus
    2: Several are a mixture, such as --data_mix
train --resume true --checkpoint checkpoints/run
    66: It is a run: its newest is --checkpoint checkpoints/run/step-00000100.
train --resume true
    66: (step-N) in 'checkpoints/model-data', which isn't there (from
train --resume true --checkpoint nowhere
    66: No checkpoint at 'nowhere' (from '/
train --lr fast
    2: --lr takes a number, not 'fast'.
train --resume true --checkpoint checkpoints/run/step-5
    66: 'checkpoints/run' has step-00000009, step-00000100.
train --resume auto --model_name ./modle
    2: No model './modle'
train --output_dir corpus/a.txt
    73: can't be written
train --data_mix a=data:1
    2: --train_data_dir and --data_mix are both given
train --train_data_dir null --data_mix a=data:1,b=data:1
    2: sources 'a' and 'b' are both 'data'; give one of them more
train --train_data_dir null --data_mix a=data:0,b=prepared:0
    2: the weights of the mixture add up to 0.
train --train_data_dir null --data_mix a=data:-1
    2: the weight of source 'a' must be a number of 0 or more, not '-1'.
train --train_data_dir null --data_mix a=data:nan
    2: must be a number of 0 or more, not 'nan'.
train --train_data_dir null --data_mix a=data:1e-9,b=prepared:1
    2: less than one row in 10,000, which rounds to none.
train --train_data_dir null --data_mix data
    2: --data_mix: it takes a YAML file, or name=folder:weight
train --train_data_dir null --data_mix none.yaml
    2: --data_mix 'none.yaml' can't be read: No such file
train --train_data_dir null --data_mix unknown.yaml
    2: names 'lod', which isn't a source. Did you mean 'old'?
train --train_data_dir null --data_mix key.yaml
    2: unknown key 'wieght' of source 'new'. Did you mean 'weight'?
train --config a.yaml --config b.yaml
    2: --config is given 2 times: take one file
train --config smal.yaml
    2: directory. Did you mean 'small.yaml'?
train --config smollm2_135m
    2: /configs/smollm2_135m.yaml'?
train --config configs/smolm2_135m.yaml
    2: /configs/smollm2_135m.yaml'?
train --config switch.yaml
    2: switch.yaml: unknown keys: '--lr' in line 1 (did you mean --lr?), 'on' in line 2. See --help.
train --config two.yaml
    2: line 2 is '---', and a file has one document, without `---` in the middle.
train --no-compile true
    2: unknown flag --no-compile. Did you mean --compile false?
train --config typo.yaml
    2: line 2: unknown key 'learning_rat' in typo.yaml. Did you mean --lr?
train --config typos.yaml
    2: typos.yaml: unknown keys: 'bf16' in line 1 (did you mean --precision bf16-true or bf16-
train --config text.yaml
    2: line 3 of text.yaml: lr takes a number, not 'fast'.
train --config small.yaml
    2: line 2 of small.yaml: devices must be positive, not 0.
train --config clock.yaml
    2: line 1 of clock.yaml: max_hours takes a number, not '1:30'.
train --config map.yaml
    2: line 2 of map.yaml: lr takes a number, not '{a: 1}'.
train --config tab.yaml
    2: 'tab.yaml' can't be read as YAML: line 2 is '\tlr: 1', and keys of
train --config indented.yaml
    2: line 2 is '  lr: 1', and keys of one level begin in the same
train --config equals.yaml
    2: line 2 is 'seed = 7', and keys of one level begin in the same
train --config colon.yaml
    2: line 2 is 'lr 1', and keys of one level begin in the same column
train --config unclosed.yaml
    2: line 2 is "run_name: 'mine", and found unexpected end
train --config number.yaml
    2: line 1 of number.yaml: run_name takes text, not '12': write it in
train --ema_decay 5
    2: --ema_decay must be less than 1, not 5.
train --config section.yaml
    2: line 2: 'training' in section.yaml is a section, but such a file has lines of `flag: value` al
train --config small.yaml --devices -1
    2: --devices must be positive, not -1.
plan --config price.yaml
    2: line 2: unknown key 'tokens' in price.yaml. A file has flags of train.py alone: give --tokens on
prepare_data
    2: missing: --output. It is called like this: python prepare_data.py --input TEXTS --tokenizer M
export_hf
    2: missing: --checkpoint, --output. It is called like this: python export_hf.py checkpoints/R
fabric_llm.average
    2: missing: --parts. It is called like this: python -m fabric_llm
fabric_llm.generate
    2: python -m fabric_llm.generate checkpoints/RUN --prompt TEXT
prepare_data --input a --input b --output c
    2: --input is given 2 times: give all its values behind one --input.
prepare_data --input a --pattern *.md --pattern=*.txt --output c
    2: --pattern is given 2 times
prepare_data --input corpus ––output out
    2: '––output' is among the values of --input. '–' (U+2013, EN DASH) isn't the '-' of a keyboard
prepare_data --input corpus/*.xml --output out --tokenizer tokenizer
    2: input corpus/*.xml: no file or folder matches this pattern
export_hf copied --output_dir x
    2: unknown flag --output_dir. Did you mean --output?
export_hf copied --output x
    2: 'copied/step-00000004' isn't a whole checkpoint: it has no MANIFEST.json. Copy it again
fabric_llm.generate copied/step-00000004 --prompt x
    2: 'copied/step-00000004' isn't a whole checkpoint: it has no MANIFEST.json. Copy it again
prepare_data --output out --train_tokenizer 300
    2: no input: name at least one
prepare_data --input corpus --output out
    2: give --tokenizer, that of your model, or
prepare_data --seq_len 64
    2: Did you mean --context_length?
train --help oblivion
    2: The groups are devices, data,
prepare_data --input corpus --output out --train_tokenizer 9
    2: at least 257
prepare_data --input corpus --output out --tokenizer x --context_length 1
    2: must be at least 2, not 1.
prepare_data --input num_workers 0x10 --output out --tokenizer x --num_workers 0
    2: must be positive, not 0.
prepare_data --input corpus --output out --tokenizer checkpoints/run
    2: --tokenizer checkpoints/run holds none itself: take checkpoints/run/step-00000100.
prepare_data --input corpus --output out --tokenizer x --validation_fraction -0.1
    2: --validation_fraction must be at least 0, not -0.1.
prepare_data --input corpus --output out --tokenizer x --validation_fraction 1.0
    2: --validation_fraction must be less than 1, such as 0.01, not 1.0.
prepare_data --input corpse/ --output out --train_tokenizer 300
    2: input corpse/ is neither a file or folder here
prepare_data --input corpus/b.txt --output out --train_tokenizer 300
    2: input corpus/b.txt is neither
prepare_data --input https://huggingface.co/datasets/org/name --output out --train_tokenizer 300
    2: is neither a file or folder here nor a dataset that can be read from the hub
prepare_data --input other --output out --train_tokenizer 300
    2: no file in other matches *.txt
prepare_data --input corpus --output corpus --train_tokenizer 300
    2: other files than a prepared dataset's, which are never replaced: name a new folder
prepare_data --input corpus --output corpus --train_tokenizer 300 --overwrite true
    2: other files than a prepared dataset's
prepare_data --input corpus --output prepared --train_tokenizer 300
    2: exists and is not empty: pass --overwrite true to replace it
prepare_data --input corpus --output out --tokenizer sets/lnog
    2: Did you mean 'sets/long'?
prepare_data --input sets/lnog --output out --train_tokenizer 300
    2: Did you mean 'sets/long'?
prepare_data --input corpus --output out --tokenizer ./modle
    2: No tokenizer './modle'
export_hf checkpoints/rnu --output x
    2: No checkpoint at 'checkpoints/rnu'. Did you mean 'checkpoints/run'?
export_hf checkpoints/run/step-9 --output x
    2: Did you mean 'checkpoints/run/step-00000009'?
export_hf docs/results --output x
    2: /docs/results'?
export_hf checkpoints --output x
    2: a run with one: no MANIFEST.json, no step-N. It holds the runs run.
export_hf checkpoints/run --output x --dtype int8
    2: --dtype takes auto, float32, bfloat16 or float16, not 'int8'.
export_hf checkpoints/run --output hf
    2: 'hf' isn't an exported model, so it isn't replaced; take another --output.
export_hf checkpoints/run --output corpus --overwrite true
    2: isn't an exported model
fabric_llm.verify.__main__ checkpoints/rnu
    2: No run at 'checkpoints/rnu'. Did you mean 'checkpoints/run'?
fabric_llm.verify.__main__ checkpoints/run/step-00000100
    2: is a checkpoint; what is verified is its run
fabric_llm.verify.__main__ checkpoints/rnu --drill
    2: No run at 'checkpoints/rnu'
fabric_llm.verify.__main__ --drill --launcher nothing_of_the_kind
    2: there is no such program
"""


@pytest.mark.longer
def test_mistakes_are_told_before_torch_is_imported(place):
    lines = MISTAKES.strip().splitlines()
    table = [
        ("train", f"--output_dir {'x' * 300}", "2: File name too long"),
        (
            "train", "--config none.yaml",
            "2: --config 'none.yaml' can't be read: No such file or directory.\n",
        ),
    ]
    for command, answer in zip(lines[::2], lines[1::2], strict=True):
        program, _, flags = command.partition(" ")
        table.append((program, flags, answer.strip()))
    table = [
        (program, instead(GOOD, flags.split()) if program == "train" else flags.split(), answer)
        for program, flags, answer in table
    ]
    found = answers([(program, flags) for program, flags, _ in table], place)
    for (program, flags, answer), (got, said) in zip(table, found, strict=True):
        code, _, words = answer.partition(": ")
        assert got == int(code) and words in said, (program, flags, got, said)
        assert len(said.splitlines()) == 1 and "error: " in said, said


def test_a_rank_looks_at_the_run_that_it_resumes_only_if_it_is_the_first(place):
    """Another machine may not see it yet, or see what rank 0 is changing; flags are the same
    everywhere."""
    rank = {"LOCAL_RANK": "1", "RANK": "1", "WORLD_SIZE": "2"}
    rank |= {"LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "29500"}
    resume = ("train", (*GOOD, "--resume", "true", "--run_name", "other"))
    mistake = ("train", (*GOOD, "--resume", "true", "--lr", "-1"))
    (later, _), (now, said) = answers([resume, mistake], place, **rank)
    assert "too late" in str(later), "it goes on to join the others"
    assert now == 2 and said == "", "the first process of the machine says it"


# ------------------------------------------------------------------------------- what was meant

SLIPS = {  # what is meant -> what is typed
    "lr": "learning_rat learing_rate lrr leraning_rate LR",
    "max_step": "max_stpes",
    "gradient_accumulation_steps": "gradient_acumulation_steps",
    "micro_batch_size": "micro_batchsize per_device_train_batchsize",
    "global_batch_size": "global_batchsize",
    "activation_checkpointing": "activaton_checkpointing gradient_checkpoiting",
    "warmup_steps": "warm_up_steps",
    "weight_decay": "wight_decay",
    "precision": "precison",
    "train_data_dir": "train_datadir",
    "model_name": "model_nam modelname",
    "output_dir": "outputdir outptu_dir",
    "save_step_interval": "save_steps_interval",
    "eval_iters": "eval_iter",
    "keep_last": "keeplast",
    "context_length": "context_lenght seq_lenght",
    "number_epochs": "num_epoch number_epoch",
    "sharding_strategy": "sharding_stategy",
    "strategy": "stategy",
    "logger": "loger",
    "devices": "nproc_per_nod",
    "resume": "resum",
}
# Hugging Face's Trainer, litgpt, torchtitan, axolotl, NeMo Automodel and Megatron, LLM templates
WORDS_OF_OTHERS = {
    "micro_batch_size": "per_device_train_batch_size train_micro_batch_size_per_gpu "
    "local_batch_size",
    "number_epochs": "num_train_epochs",
    "max_step": "max_steps train_iters",
    "lr_schedule": "lr_scheduler_type",
    "keep_last": "save_total_limit",
    "log_step_interval": "logging_steps log_interval",
    "grad_clip": "max_norm",
    "context_length": "seq_len sequence_len block_size",
    "output_dir": "dump_folder out_dir",
    "model_name": "base_model pretrained_model_name_or_path",
    "save_step_interval": "ckpt_every_steps",
    "eval_step_interval": "eval_interval",
    "precision bf16-true or bf16-mixed": "bf16",
    "strategy": "deepspeed",
    "warmup_steps": "warmup_ratio",
    "compile": "torch_compile",
}
NOBODY_KNOWS = (
    "foo tp_comm x n moe_aux_loss router_bias ignore_index label_names dropout z_loss polyak lb"
).split()


def typed(table):
    """[(what is typed, what is meant)]"""
    return [(name, meant) for meant, names in table.items() for name in names.split()]


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What train.py says of one flag, without its name and "error: "."""
    names = [name for name, _ in typed(SLIPS) + typed(WORDS_OF_OTHERS)] + [*NOBODY_KNOWS]
    flags = [("train", (f"--{name}", "1")) for name in names]
    found = answers(flags, tmp_path_factory.mktemp("told"))
    assert all(code == 2 and len(said.splitlines()) == 1 for code, said in found)
    return {
        name: said.strip().removeprefix("train.py: error: ")
        for name, (_, said) in zip(names, found, strict=True)
    }


@pytest.mark.parametrize(("name", "meant"), typed(SLIPS) + typed(WORDS_OF_OTHERS))
def test_slips_and_words_of_other_trainers_lead_to_the_flag_that_is_meant(told, name, meant):
    assert told[name] == f"unknown flag --{name}. Did you mean --{meant}?"


@pytest.mark.parametrize("name", NOBODY_KNOWS)
def test_no_suggestion_is_better_than_a_wrong_one(told, name):
    assert told[name] == f"unknown flag --{name}. See --help."


def test_a_flag_of_another_script_isnt_suggested_by_this_one(tmp_path):
    [(code, said)] = answers([("prepare_data", ("--learning_rate", "1"))], tmp_path)
    assert code == 2 and "lr" not in said.replace("learning_rate", "") and "See --help" in said


ELSEWHERE = {  # what people paste from tutorials of other trainers -> what train.py says of it
    "packing": "it is --packing of prepare_data.py",
    "sample_packing": "it is --packing of prepare_data.py",
    "val_set_size": "it is --validation_fraction of prepare_data.py",
    "tokenizer": "it is --tokenizer of prepare_data.py",
    "dataset_text_field": "it is --text_field of prepare_data.py",
    "text_field": "it is --text_field of prepare_data.py",
    "push_to_hub": "it is --push_to_hub of export_hf.py",
    "hub_model_id": "it is --push_to_hub of export_hf.py",
    "mfu": "it is --mfu of plan.py",
    "betas": "they are --beta1 and --beta2",
    "optim": "the optimizer is AdamW; --code registers another (docs/make_it_yours.md)",
    "lora_r": "all parameters train, or those of --train_only: there are no adapters",
    "trust_remote_code": "leave it out: code that comes with a model is never run",
    "do_train": "leave it out: a run trains, and evaluates where --eval_iters isn't 0",
}


def test_a_flag_of_another_script_or_of_no_script_is_explained(tmp_path):
    found = answers([("train", (f"--{name}", "1")) for name in ELSEWHERE], tmp_path)
    for (name, words), (code, said) in zip(ELSEWHERE.items(), found, strict=True):
        sentence = f"{words[0].upper()}{words[1:]}."
        assert code == 2 and said == f"train.py: error: unknown flag --{name}. {sentence}\n"


def test_all_unknown_flags_are_told_at_once(tmp_path):
    flags = "--lr 1e-4 --packing true --val_set_size=0.1 --optim adamw_torch --foo 2 --bf16 "
    many = ("train", [*flags.split(), "--push_to_hub", "org/name"])
    dotted = ("train", ("--optim.lr", "1", "--lr.max", "1"))
    [(code, said), (_, nested)] = answers([many, dotted], tmp_path)
    assert code == 2 and said == (
        "train.py: error: unknown flags: --packing (it is --packing of prepare_data.py), "
        "--val_set_size (it is --validation_fraction of prepare_data.py), --optim (the optimizer "
        "is AdamW; --code registers another (docs/make_it_yours.md)), --foo, --bf16 (did you mean "
        "--precision bf16-true or bf16-mixed?), --push_to_hub (it is --push_to_hub of export_hf.py). See --help.\n"
    )
    assert "NestedArg" not in nested
    assert "flags: --optim.lr (did you mean --lr?), --lr.max (did you mean --lr?). See" in nested


def test_a_folder_is_looked_for_from_above_and_at_home(tmp_path, monkeypatch):
    for folder in ("data/mine", "below"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "below")
    monkeypatch.setenv("HOME", "/h")
    said = "No run at 'data/mine'. Did you mean '../data/mine'?"
    assert names.no_folder("run", Path("data/mine")) == said
    assert names.at_home("~/a, ~/b,c~/d,~") == "/h/a, /h/b,c~/d,/h"


def test_what_cannot_be_written_in_the_output_directory_is_no_mistake(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", path)

    run = tmp_path / "run"
    with monkeypatch.context() as patch, pytest.raises(faults.Fault) as refused:
        patch.setattr(os, "listdir", refuse)
        run_directory.directory(parse_train([*GOOD, "--output_dir", str(tmp_path)]))
    assert refused.value.code == 73 and f"{str(tmp_path)!r} can't be written" in str(refused.value)
    run_directory.lock(run)
    denied = PermissionError(errno.EACCES, "Permission denied", str(run / "metrics.jsonl"))
    gone = FileNotFoundError(errno.ENOENT, "No such file", str(run / "x"), None, str(run / "y"))
    assert [faults.as_fault(error).code for error in (denied, gone)] == [73, 1]
    shutil.rmtree(run)
    assert str(faults.as_fault(gone)) == f"{str(run / 'y')!r} can't be written: No such file."
    run_directory.unlock(run)
    assert faults.as_fault(denied).code == 2


def test_none_of_a_tutorial_is_a_flag_that_isnt_given(tmp_path):
    config = tmp_path / "mine.yaml"
    given = "{model_name: m, train_data_dir: d, keep_last: 3, checkpoint: None, output_dir: null}"
    config.write_text(given)
    flags = "--model_name m --train_data_dir d --keep_last None --max_hours None".split()
    for words in ([*flags, "--checkpoint", "None"], [*flags, "--config", str(config)]):
        found = parse_train(words).flat()
        assert (found["checkpoint"], found["keep_last"], found["max_hours"]) == (None, None, None)
        assert found["output_dir"] == "checkpoints"
    found = parse_train([*flags, "--backward_prefetch", "none", "--run_name", "none"])
    assert found.checkpoint.run_name == "none"


@pytest.mark.parametrize(
    ("ranks", "cores", "kind", "insists", "starts"),
    [
        (8, 2, "cpu", False, True),
        (9, 2, "cpu", False, False),
        (4, 1, "cpu", False, True),
        (64, 2, "cpu", True, True),
        (64, 2, "cuda", False, True),
    ],
)
def test_ranks_far_beyond_the_cores_are_refused(monkeypatch, ranks, cores, kind, insists, starts):
    monkeypatch.setattr(start, "cores", lambda: cores)
    flags = parse_train([*GOOD, "--oversubscribe", str(insists).lower()])
    placement = SimpleNamespace(devices=ranks, kind=kind)
    if starts:
        return start.require_cores(flags, placement)
    said = f"--devices {ranks}: so many .* {cores} CPU cores .*--devices {cores}, at most 8"
    with pytest.raises(ValueError, match=said):
        start.require_cores(flags, placement)
    assert "oversubscribe" not in flags.kept(), "the next machine is another one"


def test_a_flag_that_is_given_again_with_another_value_is_told_once(capsys, monkeypatch):
    words = "--model_name m --train_data_dir d --lr 1e-3 --max_step 5 --lr 2e-3 --max_step 5"
    assert parse_train(words.split()).training.lr == 2e-3
    assert capsys.readouterr().err == "Warning: --lr is given 2 times: 2e-3 counts, not 1e-3.\n"
    later = ("RANK", "1"), ("TORCHELASTIC_RESTART_COUNT", "1"), ("FABRIC_LLM_AGAIN", " --x=1")
    for name, value in later:
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            parse_train(words.split())
        assert capsys.readouterr().err == "", name
    parse_train("--model_name m --train_data_dir d --eval_data=a=b --eval_data c=d".split())
    said = (
        "Warning: --eval_data is given 2 times: c=d counts, not a=b. It takes all of them in "
        "one, with commas.\n"
    )
    assert capsys.readouterr().err == said
