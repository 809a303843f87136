"""Tasks of lm-evaluation-harness -> a validation set of their requests, which data/tasks.py judges.

The harness itself builds the requests, encodes them, and says which choices are right: its numbers of an exported model are the run's.
"""

import json
import random
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import datasets
import numpy as np
from transformers import PreTrainedTokenizerBase

from fabric_llm.base import files
from fabric_llm.base.faults import one_line
from fabric_llm.base.names import nearest, reach_hub
from fabric_llm.base.program import on_disk, uninterrupted
from fabric_llm.data.columns import IGNORED
from fabric_llm.data.tasks import TASKS
from fabric_llm.prepare.tokenizer import packing_tokenizer

KINDS = ("multiple_choice", "loglikelihood")  # of tasks that compare likelihoods of answers
MULTIPLE = 64  # of which row lengths are, so that ranks can share rows
SEED = 1234  # as in lm_eval.simple_evaluate


def prepare_tasks(tasks: str, tokenizer: str, context_length: int, output: str) -> str:
    """Write the requests of tasks into the folder `output`. Returns what it made, in words. The arguments are flags of prepare_data.py.

    Rows are as long as the longest request, but have at most `context_length` tokens: of longer requests the last ones. Documents
    of all tasks are mixed evenly, so that a part of the rows is a part of each task. Raises ValueError for what a user can correct.
    """
    target, encoder = Path(output).resolve(), packing_tokenizer(tokenizer)
    documents = sorted(_documents(_loaded(tasks), encoder), key=lambda found: found[0])
    rows = [{**row, "document": number} for number, (_, document) in enumerate(documents) for row in document]
    length = min(-(-max(len(row["input_ids"]) for row in rows) // MULTIPLE) * MULTIPLE, context_length)
    for row in rows:
        ids, targets = np.array(row["input_ids"][-length:], dtype=np.int32), row.pop("targets")
        if not 0 < targets < length:
            answer = f"task {row['task']!r} has an answer of {targets} tokens"
            raise ValueError(f"{answer}, which a row of --context_length {context_length} can't ask for")
        labels = np.where(np.arange(len(ids)) < len(ids) - targets, np.int32(IGNORED), ids)
        for name, values, filling in (("input_ids", ids, encoder.eos_token_id), ("labels", labels, IGNORED)):
            row[name] = np.pad(values, (0, length - len(ids)), constant_values=filling)
    counts = Counter(document[0]["task"] for _, document in documents)
    target.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=target.parent) as folder, on_disk(target, Path(folder), "rows need 8 bytes a token"):
        made = Path(folder, "dataset")
        datasets.DatasetDict({"validation": datasets.Dataset.from_list(rows)}).save_to_disk(made)
        encoder.save_pretrained(made / "tokenizer")
        (made / TASKS).write_text(json.dumps(counts))
        said = {"tasks": counts, "tokenizer": tokenizer, "lm_eval": metadata.version("lm_eval")}
        said["written"] = files.describe(made, files.files_in(made))
        (made / "manifest.json").write_bytes(files.encode(said))
        with uninterrupted():
            if target.exists():
                target.rename(Path(folder, "old"))
            made.rename(target)
    words = ", ".join(f"{count:,} of {name}" for name, count in counts.items())
    return f"{len(documents):,} documents ({words}), {len(rows):,} rows of {length} tokens: {output}"


def _loaded(tasks: str) -> dict[str, Any]:
    """{name: task of lm_eval}, of its own names and groups, of YAML files and folders of them. Raises ValueError."""
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ValueError(f"--tasks needs lm_eval: pip install 'fabric_llm[tasks]' ({one_line(error)})") from error

    names = [name.strip() for name in tasks.split(",") if name.strip()]
    inside = {name: sorted(map(str, Path(name).glob("*.yaml"))) for name in names}  # of folders
    unknown = [name for name in names if not inside[name] and not Path(name).is_file()]
    # Its own tasks are thousands of files, which take a while to list.
    manager = TaskManager(include_path=[name for name in names if inside[name]], include_defaults=bool(unknown))
    for name in unknown:
        if name not in manager.all_tasks:
            meant = "".join(f" Did you mean {close!r}?" for close in nearest(name, manager.all_tasks))
            raise ValueError(f"--tasks: lm_eval has no task {name!r}, and there is no such file.{meant}")
    reach_hub()
    random.seed(0)  # as lm_eval.simple_evaluate does, for tasks that shuffle their choices
    np.random.seed(SEED)
    try:
        return manager.load([one for name in names for one in inside[name] or [name]])["tasks"]
    except Exception as error:  # of the harness, YAML, functions that a task names, datasets and the hub
        said = f"{type(error).__name__}: {one_line(error).rstrip('.')}"
        raise ValueError(f"--tasks {tasks}: lm_eval can't load this: {said}") from error


def _documents(tasks: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[float, list[dict[str, Any]]]]:
    """(part of its task that comes before it, a row for each choice) of each document. Raises ValueError."""
    from lm_eval.models.huggingface import HFLM

    class Encoder(HFLM):
        """Returns what HFLM would give to a model."""

        def __init__(self) -> None:
            self.tokenizer, self.add_bos_token, self.custom_prefix_token_id = tokenizer, None, None
            self.enable_thinking = False

        def _loglikelihood_tokens(self, requests: list[Any], **_: Any) -> list[Any]:
            return requests

    for name, task in tasks.items():
        kind, metrics, own = task.OUTPUT_TYPE, task.aggregation(), callable(task.config.process_results)
        if kind not in KINDS or own or "acc" not in metrics or "acc_mutual_info" in metrics:
            raise ValueError(f"--tasks: {name!r} ({kind}) doesn't judge answers by their likelihood alone, as acc does")
        task.set_fewshot_seed(SEED)
        task.build_all_requests()
        encoded = zip(task.instances, Encoder().loglikelihood(task.instances, disable_tqdm=True))
        documents = [list(requests) for _, requests in groupby(encoded, lambda each: each[0].doc_id)]
        has_answers = False
        for number, document in enumerate(documents):
            rows, doc, alone = [], document[0][0].doc, kind == "loglikelihood"
            choices = [""] if alone else task.doc_to_choice(doc)
            for choice, (request, (_, context, continuation)) in enumerate(document):
                likeliest = [(float(other == choice), other == choice) for other in range(len(document))]
                row = {"task": name, "gold": task.process_results(doc, likeliest)["acc"] == 1, "alone": alone}
                row |= {"characters": len(choices[choice]), "bytes": len(request.args[1].encode())}
                rows.append({**row, "input_ids": context + continuation, "targets": len(continuation)})
            has_answers |= any(row["gold"] for row in rows)
            yield number / len(documents), rows
        if not has_answers:  # as of a test split whose labels aren't published
            raise ValueError(f"--tasks: {name!r} says of no answer that it is right")
