"""Tasks of several choices as a validation set: each row is a context and a choice, and only the
choice's tokens are targets.

The rows and how they are judged are those of lm-evaluation-harness; prepare/tasks.py writes them.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np

from fabric_llm.base.faults import one_line
from fabric_llm.data.columns import Rows
from fabric_llm.data.dataset import TokenDataset, open_dataset
from fabric_llm.data.order import spread

# Of each row: its task; its document, whose rows are in the order of the choices; whether it is a
# right answer; whether it is the only choice, right if each of its tokens is the likeliest;
# characters of the choice, and bytes of what is predicted.
ABOUT_ROWS = ("task", "document", "gold", "alone", "characters", "bytes")


class Tasks(Rows):
    """Requests, and how the answers to them are judged."""

    def __init__(self, rows: Rows, about: Mapping[str, np.ndarray]) -> None:
        """about: ABOUT_ROWS of each row."""
        super().__init__(rows.chunks)
        self.about = about

    def sample(self, count: int) -> np.ndarray:
        """The rows of documents that are evenly spread over each task: all choices of as many
        documents as have at most `count` rows together, or of one document."""
        firsts = np.append(0, np.flatnonzero(np.diff(self.about["document"])) + 1)
        sizes = np.diff(np.append(firsts, len(self)))
        # Task by task, so that evenly spread documents give each task its share.
        by_task = np.argsort(self.about["task"][firsts], kind="stable")
        chosen = by_task[: min(count, 1)]
        # Fewer and fewer documents, until all of their choices fit into `count` rows.
        for documents in range(min(count // int(sizes.min()), len(sizes)), 1, -1):
            fewer = by_task[spread(documents, len(sizes))]
            if sizes[fewer].sum() <= count:
                chosen = fewer
                break
        return np.flatnonzero(np.isin(np.repeat(np.arange(len(sizes)), sizes), chosen))

    def answered(self, sums: np.ndarray, targets: np.ndarray) -> dict[str, float]:
        """`accuracy`, `accuracy_norm` and `bits_per_byte`, of all `documents` and of each task,
        such as accuracy_of_arc_easy.

        As lm_eval's acc and acc_norm: the choice of the largest likelihood, or of the largest
        logarithm of it a character, is a right one. Bits per byte, and `loss`, nats a token, are of
        the right answers. Documents that weren't evaluated are left out. sums: as
        language_model.by_row has them, [rows, 3]. targets: [rows].
        """
        judged: dict[str, list[list[float]]] = defaultdict(list)
        # Rows of one document stand side by side, so another number begins the next document.
        firsts = np.flatnonzero(np.diff(self.about["document"])) + 1
        for rows in np.split(np.arange(len(self)), firsts):
            # Not all choices of the document were evaluated.
            if not targets[rows].all():
                continue
            losses, gold = sums[rows, 0], self.about["gold"][rows]
            with np.errstate(divide="ignore"):  # an empty choice
                # Each is the first of equal ones.
                chosen = losses.argmin(), (losses / self.about["characters"][rows]).argmin()
            right = [gold[choice] for choice in chosen]
            # Without another choice to compare with, it is right if greedy decoding gives it.
            if self.about["alone"][rows[0]]:
                right = [sums[rows[0], 1] == targets[rows[0]]] * 2
            # Several choices of a document may be right. Bits per byte are of all of these.
            counted = (losses, targets[rows], self.about["bytes"][rows])
            of_right = [numbers[gold].sum() for numbers in counted]
            # Of all tasks together, and of the document's own.
            for name in ("", f"_of_{self.about['task'][rows[0]]}"):
                judged[name].append([*right, *of_right])
        answers = {"loss": math.nan, "documents": 0.0}
        for name, each in judged.items():  # the first is that of all tasks
            right, norm, nats, tokens, size = np.sum(each, axis=0, dtype=float).tolist()
            answers[f"accuracy{name}"] = right / len(each)
            answers[f"accuracy_norm{name}"] = norm / len(each)
            # Without text, such as only empty choices, there is nothing to divide by.
            if size:
                answers[f"bits_per_byte{name}"] = nats / math.log(2) / size
            if not name:
                answers["documents"] = float(len(each))
            if not name and tokens:
                answers["loss"] = nats / tokens
        return answers


def open_tasks(folder: Path, verify: str) -> TokenDataset:
    """The tasks that prepare_data.py has written into `folder`. Raises ValueError as `open_dataset`
    does."""
    dataset = open_dataset(folder, verify, ("validation",))
    try:
        table = (
            datasets.load_from_disk(str(folder / "validation"))
            .select_columns(ABOUT_ROWS)
            .with_format("numpy")[:]
        )
        rows = Tasks(dataset.validation, table)
    except ValueError as error:
        raise ValueError(
            f"{str(folder)!r} isn't as prepare_data.py --tasks writes it: {one_line(error)}"
        ) from error
    # A TokenDataset has two splits. Here both are the requests, which are only evaluated.
    unread = tuple(name for name in dataset.unread if name not in ABOUT_ROWS)
    return replace(dataset, train=rows, validation=rows, unread=unread)
