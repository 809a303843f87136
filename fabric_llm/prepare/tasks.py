"""Tasks of lm-evaluation-harness -> a validation set of their requests, which data/tasks.py judges.

The harness itself builds the requests, encodes them, and says which choices are right: its numbers
of an exported model are the run's.
"""

import json
import random
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import metadata
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from transformers import PreTrainedTokenizerBase

from fabric_llm.base import files, work_folder
from fabric_llm.base.describing import describe
from fabric_llm.base.ending import on_disk
from fabric_llm.base.faults import one_line
from fabric_llm.base.flag import Flags
from fabric_llm.base.names import comma_separated, nearest, reach_hub
from fabric_llm.data.folders import IGNORED, TASKS
from fabric_llm.prepare.inputs import place_of, prepared_output
from fabric_llm.prepare.prepare import publish
from fabric_llm.prepare.tokenizer import packing_tokenizer

KINDS = ("multiple_choice", "loglikelihood")  # of tasks that compare likelihoods of answers
MULTIPLE = 64  # of which row lengths are, so that ranks can share rows
SEED = 1234  # as in lm_eval.simple_evaluate


def prepare_tasks(flags: Flags) -> str:
    """Write the requests of --tasks into the folder --output. Returns what it made, in words.

    Rows are as long as the longest request, but have at most --context_length tokens: of longer
    requests the last ones. Documents of all tasks are mixed evenly, so that a fraction of the rows
    is that fraction of each task. Raises ValueError for what a user can correct.
    """
    target, encoder = place_of(flags.output), packing_tokenizer(flags.tokenizer)
    # Sorted by their place in their task, so that any first rows hold the same fraction of each.
    documents = sorted(_documents(_loaded(flags.tasks), encoder), key=itemgetter(0))
    rows = []
    for number, (_, document) in enumerate(documents):
        # Rows of one document stay side by side, as data/tasks.py judges them together.
        rows += [{**row, "document": number} for row in document]
    longest = max(len(row["input_ids"]) for row in rows)
    length = min(-(-longest // MULTIPLE) * MULTIPLE, flags.context_length)
    for row in rows:
        _pad(row, length, flags.context_length, encoder.eos_token_id)
    counts = Counter(document[0]["task"] for _, document in documents)
    target.parent.mkdir(parents=True, exist_ok=True)
    with (
        work_folder.locked(target) as folder,
        on_disk(target, folder, "rows need 8 bytes a token"),
    ):
        try:
            # Once more: another process may have made it since, and given the lock back.
            prepared_output(target, flags.overwrite)
            made = folder / "dataset"
            shutil.rmtree(made, ignore_errors=True)  # of a preparation that was killed
            split = datasets.Dataset.from_list(rows)
            datasets.DatasetDict({"validation": split}).save_to_disk(made)
            # train.py compares it with the model's own.
            encoder.save_pretrained(made / "tokenizer")
            (made / TASKS).write_text(json.dumps(counts))
            manifest = {"tasks": counts, "tokenizer": flags.tokenizer}
            manifest["lm_eval"] = metadata.version("lm_eval")
            manifest["written"] = describe(made, files.files_in(made))
            content = files.encode(manifest)
            files.write_atomically(made / "manifest.json", content, durable=True)
            publish(folder, target, flags)
        finally:
            work_folder.remove(folder)
    words = ", ".join(f"{count:,} of {name}" for name, count in counts.items())
    return (
        f"{len(documents):,} documents ({words}), {len(rows):,} rows of {length} tokens: "
        f"{flags.output}"
    )


def _pad(row: dict[str, Any], length: int, context_length: int, eos: int) -> None:
    """Give a row `length` tokens, and labels of those that are answered. Raises ValueError for an
    answer that leaves no token to be asked with."""
    ids, targets = np.array(row["input_ids"][-length:], dtype=np.int32), row.pop("targets")
    if not 0 < targets < length:
        raise ValueError(
            f"task {row['task']!r} has an answer of {targets} tokens, which a row of "
            f"--context_length {context_length} can't ask for"
        )
    # Only the answer is predicted, and neither its context nor padding.
    labels = np.full(length, IGNORED, dtype=np.int32)
    # Each label stands at the place of its own token: language_model.py shifts them by one.
    labels[len(ids) - targets : len(ids)] = ids[-targets:]
    row["input_ids"] = np.pad(ids, (0, length - len(ids)), constant_values=eos)
    row["labels"] = labels


def _loaded(tasks: str) -> dict[str, Any]:
    """{name: task of lm_eval}, of its own names and groups, of YAML files and folders of them.
    Raises ValueError.

    A task that a group of these files names is as the group has it, and isn't loaded a second time.
    """
    try:
        from lm_eval.tasks import TaskManager
        from lm_eval.tasks._index import TaskIndex
    except ImportError as error:
        raise ValueError(
            f"--tasks needs lm_eval: pip install -e '.[tasks]' ({one_line(error)})"
        ) from error

    names = comma_separated(tasks)
    paths = {name: sorted(Path(name).rglob("*.yaml")) or [Path(name)] for name in names}
    # What isn't a file or a folder of them is a name that lm_eval may know.
    unknown = [name for name in names if not paths[name][0].is_file()]
    given_files: list[Path] = []
    for name in names:
        if name not in unknown:
            given_files += paths[name]
    described = _described(given_files)
    # Which of the two is meant can't be known.
    if twice := [name for name in unknown if name in described]:
        there = str(described[twice[0]][0])
        raise ValueError(f"--tasks has {twice[0]!r} twice: by its name, and in {there!r}")
    # A group names its tasks, of which some may be described in these files as well.
    members = {member for _, content in described.values() for member in _members(content)}
    own: dict[str, Any] = {}
    for path, content in described.values():
        TaskIndex.process_cfg(content, path, own)
    # lm_eval's own tasks are thousands of files, which take a while to list.
    # They are only needed for a name that isn't described here.
    manager = TaskManager(include_defaults=bool(unknown) or not members <= own.keys())
    for name in unknown:
        if name not in manager.all_tasks:
            meant = "".join(
                f" Did you mean {close!r}?" for close in nearest(name, manager.all_tasks)
            )
            raise ValueError(
                f"--tasks: lm_eval has no task {name!r}, and there is no such file.{meant}"
            )
    index = manager.task_index
    index.update(own)
    # The error below may be about these names, so its sentence has them.
    lacking = "".join(
        f", with {name!r}, which isn't known," for name in sorted(members - index.keys())
    )
    for member in members & index.keys():
        members |= index[member].tags  # which are tasks, if it is a tag
    # A described task goes by its own name, and not by that of its file.
    name_in = {path: name for name, (path, _) in described.items()}
    specs: list[str] = []
    for name in names:
        specs += [name_in.get(path, name) for path in paths[name]]
    not_in_groups = [name for name in dict.fromkeys(specs) if name not in members]
    # Without a network, the datasets of tasks are taken from the cache at once.
    reach_hub()
    random.seed(0)  # as lm_eval.simple_evaluate does, for tasks that shuffle their choices
    np.random.seed(SEED)
    with _errors_of_lm_eval(f"--tasks {tasks}{lacking}: lm_eval can't load this"):
        loaded = manager.load(not_in_groups)["tasks"]
    # A group without tasks loads without an error.
    if not loaded:
        raise ValueError(f"--tasks {tasks}: this is no task, but a group without tasks")
    return loaded


def _described(paths: Iterable[Path]) -> dict[str, tuple[Path, dict[str, Any]]]:
    """{name: (file, what is in it)} of the tasks and groups that files describe. Raises
    ValueError."""
    from lm_eval.tasks._yaml_loader import load_yaml

    described: dict[str, tuple[Path, dict[str, Any]]] = {}
    for path in dict.fromkeys(paths):
        with _errors_of_lm_eval(f"--tasks: {str(path)!r} can't be read"):
            content = load_yaml(path, resolve_func=False)
        # A file with `group` describes a group, whose `task` is a list.
        name = content.get("group", content.get("task"))
        if not isinstance(name, str):
            ending = "if others include it, let its name end otherwise"
            raise ValueError(f"--tasks: {str(path)!r} names no task or group; {ending}")
        if name in described:
            both = f"{str(described[name][0])!r} and {str(path)!r}"
            raise ValueError(f"--tasks: {both} have the same name, {name!r}")
        described[name] = path, content
    return described


def _members(content: dict[str, Any]) -> Iterator[str]:
    """Names of what a group consists of, none of a task."""
    if isinstance(members := content.get("task"), list):
        for member in members:
            # A group within a group may be written out in place.
            if isinstance(member, dict):
                yield from _members(member)
                member = member.get("group", member.get("task"))
            if isinstance(member, str):
                yield member


@contextmanager
def _errors_of_lm_eval(wrong: str) -> Iterator[None]:
    """Raise ValueError where lm_eval fails: of the harness, YAML, functions that a task names,
    datasets, the hub."""
    try:
        yield
    except Exception as error:
        # The innermost cause says what went wrong, and those around it only where.
        cause = error
        while cause.__cause__ is not None and isinstance(cause.__cause__, Exception):
            cause = cause.__cause__  # datasets raises its own error from that of a file
        words = f"{type(cause).__name__}: {one_line(cause).rstrip('.')}"
        raise ValueError(f"{wrong}: {words}") from error


def _documents(
    tasks: dict[str, Any], tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[float, list[dict[str, Any]]]]:
    """(fraction of its task that comes before it, a row for each choice) of each document. Raises
    ValueError."""
    from lm_eval.models.huggingface import HFLM

    class Encoder(HFLM):
        """Returns what HFLM would give to a model."""

        def __init__(self) -> None:
            self.tokenizer, self.add_bos_token, self.custom_prefix_token_id = tokenizer, None, None
            self.enable_thinking = False

        def _loglikelihood_tokens(self, requests: list[Any], **_: Any) -> list[Any]:
            return requests

    for name, task in tasks.items():
        kind, metrics = task.OUTPUT_TYPE, task.aggregation()
        # A function of the task's own may judge answers by more than their likelihoods.
        own = callable(task.config.process_results)
        if kind not in KINDS or own or "acc" not in metrics or "acc_mutual_info" in metrics:
            raise ValueError(
                f"--tasks: {name!r} ({kind}) doesn't judge answers by their likelihood alone, as "
                "acc does"
            )
        task.set_fewshot_seed(SEED)
        # Such as more examples than there are documents to draw them from.
        examples = task.config.num_fewshot or 0
        wrong = (
            f"--tasks: lm_eval can't build the requests of {name!r}, with num_fewshot {examples}"
        )
        with _errors_of_lm_eval(wrong):
            task.build_all_requests()
        # Only encodes: `Encoder` returns the requests instead of asking a model.
        encoded = zip(task.instances, Encoder().loglikelihood(task.instances, disable_tqdm=True))
        # lm_eval builds the requests of a document one after the other, as groupby needs them.
        documents = [
            list(requests) for _, requests in groupby(encoded, lambda each: each[0].doc_id)
        ]
        has_answers = False
        for number, document in enumerate(documents):
            # A task of kind loglikelihood has one answer, and no list of choices.
            rows, doc, alone = [], document[0][0].doc, kind == "loglikelihood"
            choices = [""] if alone else task.doc_to_choice(doc)
            for choice, (request, (_, context, continuation)) in enumerate(document):
                # As if this choice alone were likely: is it then judged to be right?
                likeliest = [
                    (float(other == choice), other == choice) for other in range(len(document))
                ]
                rows.append(
                    {
                        "task": name,
                        "gold": task.process_results(doc, likeliest)["acc"] == 1,
                        "alone": alone,
                        "characters": len(choices[choice]),
                        "bytes": len(request.args[1].encode()),
                        "input_ids": context + continuation,
                        "targets": len(continuation),
                    }
                )
            has_answers |= any(row["gold"] for row in rows)
            yield number / len(documents), rows
        if not has_answers:  # as of a test split whose labels aren't published
            raise ValueError(f"--tasks: {name!r} says of no answer that it is right")
