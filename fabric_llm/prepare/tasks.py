"""Tasks of lm-evaluation-harness -> a validation set of their requests, which data/tasks.py judges.

The harness builds the requests and says how they are encoded, so that its numbers of an exported model are those of the run.
"""

import json
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from transformers import PreTrainedTokenizerBase

from fabric_llm.base import files
from fabric_llm.base.faults import one_line
from fabric_llm.base.names import nearest, reach_hub
from fabric_llm.base.program import on_disk
from fabric_llm.data.columns import IGNORED
from fabric_llm.data.tasks import SAID, TASKS
from fabric_llm.prepare import prepare
from fabric_llm.prepare.inputs import prepared_output
from fabric_llm.prepare.tokenizer import packing_tokenizer

MULTIPLE = 64  # of which row lengths are, so that ranks can share rows
SEED = 1234  # of the examples of few-shot tasks, as in lm_eval.simple_evaluate


def prepare_tasks(tasks: str, tokenizer: str, context_length: int, output: str, overwrite: bool = False) -> str:
    """Write the requests of tasks at `output`; returns what it made, in words. The arguments are flags of prepare_data.py.

    A row is as long as the longest request, but at most `context_length` tokens: of longer ones the last. Documents of different
    tasks are mixed evenly, so that an evaluation of the first rows is one of all tasks. Raises ValueError for what a user can correct.
    """
    target = Path(output).resolve()
    prepared_output(target, overwrite)
    encoder = packing_tokenizer(tokenizer)
    found = _documents(_loaded([name.strip() for name in tasks.split(",") if name.strip()]), encoder)
    found.sort(key=lambda document: document[0])  # where it is in its task
    rows = [{"document": number, **row} for number, (_, document) in enumerate(found) for row in document]
    longest = max(len(row["context"]) + len(row["continuation"]) for row in rows)
    length = min(-(-longest // MULTIPLE) * MULTIPLE, context_length)
    ids = np.full((len(rows), length), encoder.eos_token_id, dtype=np.int32)
    labels = np.full_like(ids, IGNORED)
    for row, row_ids, row_labels in zip(rows, ids, labels):
        if len(row["continuation"]) >= length:
            raise ValueError(
                f"--context_length {context_length}: task {row['task']} has an answer of {len(row['continuation'])} tokens"
            )
        kept = (row["context"] + row["continuation"])[-length:]
        row_ids[: len(kept)] = kept
        row_labels[len(kept) - len(row["continuation"]) : len(kept)] = row["continuation"]
    tokens = datasets.List(datasets.Value("int32"), length=length)
    features = datasets.Features(
        {"input_ids": tokens, "labels": tokens, **{name: datasets.Value(SAID[name]) for name in SAID}}
    )
    columns = {"input_ids": list(ids), "labels": list(labels), **{name: [row[name] for row in rows] for name in SAID}}
    counts = {
        name: len({row["document"] for row in rows if row["task"] == name})
        for name in sorted({row["task"] for row in rows})
    }
    with prepare.work_folder(target) as folder, on_disk(target, folder, "the rows need 8 bytes a token"):
        made = folder / "dataset"
        datasets.DatasetDict({"validation": datasets.Dataset.from_dict(columns, features=features)}).save_to_disk(
            str(made)
        )
        encoder.save_pretrained(made / "tokenizer")
        (made / TASKS).write_text(json.dumps(counts, indent=2))
        said = {
            "format": prepare.MANIFEST_FORMAT,
            "packed": False,
            "tasks": counts,
            "context_length": length,
            "tokenizer": tokenizer,
        }
        said |= {
            "versions": {name: metadata.version(name) for name in ("lm_eval", "datasets", "tokenizers", "transformers")}
        }
        prepare.publish(folder, target, {**said, "written": files.describe(made, files.files_in(made))})
    words = ", ".join(f"{count:,} of {name}" for name, count in counts.items())
    return f"{len(rows):,} requests in rows of {length} tokens, {len(found):,} documents: {words}; written to {output}"


def _loaded(names: Sequence[str]) -> dict[str, Any]:
    """{name: task of lm_eval}, of its own names, of groups, and of YAML files and folders of them. Raises ValueError."""
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ValueError(
            f"--tasks needs lm-evaluation-harness: pip install 'fabric_llm[tasks]' ({one_line(error)})"
        ) from error

    folders = [name for name in names if Path(name).is_dir()]
    given = [
        str(file) for name in names for file in ([name] if name not in folders else sorted(Path(name).glob("*.yaml")))
    ]
    # Its own tasks are 14,000 files, which take a while to list.
    manager = TaskManager(include_path=folders, include_defaults=not all(Path(name).exists() for name in names))
    for name in given:
        if name not in manager.task_index and not Path(name).is_file():
            close = nearest(name, manager.all_tasks)
            raise ValueError(
                f"--tasks: lm_eval has no task {name!r}, and there is no such file.{f' Did you mean {close[0]!r}?' if close else ''}"
            )
    reach_hub()
    try:
        return manager.load(given)["tasks"]
    except Exception as error:  # of the harness, of YAML, of functions that a task names, of datasets and the hub
        raise ValueError(
            f"--tasks {','.join(names)}: lm_eval can't load this: {type(error).__name__}: {one_line(error)}"
        ) from error


def _documents(tasks: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> list[tuple[float, list[dict[str, Any]]]]:
    """(part of the documents of its task that come before it, its rows) of each document. Raises ValueError."""
    from lm_eval.models.huggingface import HFLM

    class Encoder(HFLM):
        """Encodes requests as HFLM does, without a model."""

        def __init__(self) -> None:
            self.tokenizer, self.add_bos_token, self.custom_prefix_token_id = tokenizer, None, None
            self.enable_thinking = False

        def _loglikelihood_tokens(self, requests: list[Any], **_: Any) -> list[Any]:
            return requests

    found = []
    for name, task in tasks.items():
        kind = task.OUTPUT_TYPE
        if kind not in ("multiple_choice", "loglikelihood"):
            raise ValueError(
                f"--tasks: {name} is of the kind {kind}: only tasks that compare likelihoods of answers can be rows"
            )
        if callable(task.config.process_results) or "acc_mutual_info" in task._metric_fn_list:
            raise ValueError(f"--tasks: {name} judges answers in a way of its own, which a run doesn't know")
        task.set_fewshot_seed(SEED)
        task.build_all_requests()
        encoded = Encoder().loglikelihood(task.instances, disable_tqdm=True)
        of_documents: dict[int, list[dict[str, Any]]] = {}
        for request, (_, context, continuation) in zip(task.instances, encoded):
            choices, gold = _choices(task, request.doc)
            row = {"task": name, "context": context, "continuation": continuation, "gold": request.idx in gold}
            row |= {"alone": kind == "loglikelihood", "bytes": len(request.args[1].encode())}
            of_documents.setdefault(request.doc_id, []).append({**row, "characters": len(choices[request.idx])})
        found += [(number / len(of_documents), rows) for number, rows in enumerate(of_documents.values())]
    return found


def _choices(task: Any, document: dict[str, Any]) -> tuple[list[str], set[int]]:
    """(the choices of a document, the numbers of the right ones), as lm_eval's process_results takes them."""
    if task.OUTPUT_TYPE == "loglikelihood":
        return [task.doc_to_target(document)], {0}
    choices = task.doc_to_choice(document)
    gold = task.doc_to_text(document) if task.multiple_input else task.doc_to_target(document)
    golds = gold if isinstance(gold, list) else [gold]
    return choices, {choices.index(one) if isinstance(one, str) and one in choices else one for one in golds}
