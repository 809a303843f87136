"""Which directories are averaged, and what each of them counts. Nothing here imports torch."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Optional

from fabric_llm.base import plain_yaml, step_names
from fabric_llm.base.files import MANIFEST
from fabric_llm.base.names import nearest_of

NAMED = ("equal", "inverse_sqrt")


def named(given: Sequence[str], last: Optional[int]) -> list[Path]:
    """The directories that are averaged, in the order given, and those of a run by step. Raises ValueError."""
    if last is not None and last < 1:
        raise ValueError(f"--last must be positive, not {last}.")
    folders, runs = [], 0
    for name in given:
        path = Path(name)
        if not path.is_dir():
            raise ValueError(f"No checkpoint, run or model at {name!r}.{nearest_of(path) or _of_hub(name)}")
        if (path / MANIFEST).is_file() or (path / "config.json").is_file():
            folders.append(path)
            continue
        there = step_names.checkpoints(path)
        if not there:
            raise ValueError(f"{name!r} is neither a checkpoint nor a run with one, nor a model with a config.json.")
        if last is not None and last > len(there):
            raise ValueError(f"--last {last}: {name!r} has {len(there)} checkpoint{'s' * (len(there) > 1)}.")
        folders, runs = [*folders, *there[-(last or 1) :]], runs + 1
    if last is not None and not runs:
        raise ValueError(f"--last {last} counts the checkpoints of a run, and {given[0]!r} is none.")
    for run in dict.fromkeys(folder.resolve().parent for folder in folders):
        try:
            plain_yaml.read(run / "arguments.yaml")
        except plain_yaml.NotPlain as error:
            raise ValueError(f"{error}.") from error
        except (OSError, ValueError):
            continue  # there is none, or average_losses.py says what is wrong with it
    return folders


def _of_hub(name: str) -> str:
    """What to give for what may be a name on the hub, as the end of a sentence."""
    is_name = re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not Path(name).parent.exists()
    return " A model of the hub is given by the folder that it was downloaded to." if is_name else ""


def require_apart(folders: Sequence[Path], output: Path) -> None:
    """Raises ValueError where a directory comes twice, or would be overwritten."""
    seen = set()
    for folder in folders:
        place = folder.resolve()
        if place in seen:
            raise ValueError(f"{str(folder)!r} is given twice; what counts more gets a larger number in --weights.")
        if place == output.resolve():
            raise ValueError(f"--output {str(output)!r} is one of the parts; take another.")
        seen.add(place)


def weights_of(given: str, folders: Sequence[Path]) -> list[float]:
    """The weight of each of the `folders`, which add up to 1, for what --weights says. Raises ValueError."""
    if given == "equal":
        return [1 / len(folders)] * len(folders)
    if given == "inverse_sqrt":
        return inverse_sqrt(_steps(folders))
    return _by_hand(given, len(folders))


def inverse_sqrt(steps: Sequence[int]) -> list[float]:
    """Weights with which checkpoints of a constant learning rate imitate its decay by 1 - sqrt(x). `steps` ascend.

    Tian et al. (2025), WSM: Decay-Free Learning Rate Schedule via Checkpoint Merging, arXiv:2507.17634. An average of the
    checkpoints t_0 ... t_k with weights c_0 ... c_k equals t_0 plus what training has changed since, in which the stretch
    from t_(i-1) to t_i counts w_i = c_i + ... + c_k. So a decay that multiplies the learning rate of that stretch by w_i is
    imitated by

        c_0 = 1 - w_1,   c_j = w_j - w_(j+1),   c_k = w_k.

    Here w_i = 1 - sqrt(x_i) with x_i = (s_i - s_0) / (s_k - s_0) * k / (k + 1) of the steps s: the decay begins at the
    first checkpoint and would come to 0 one mean interval after the last one, which therefore counts as well. Hence
    c_j = sqrt(x_(j+1)) - sqrt(x_j) with x_0 = 0 and x_(k+1) = 1: the first checkpoint counts most. A linear decay, w_i =
    1 - x_i, of evenly spaced checkpoints gives equal weights by the same formula.
    """
    last = len(steps) - 1
    if last == 0:
        return [1.0]
    span = steps[-1] - steps[0]
    roots = [math.sqrt((step - steps[0]) / span * last / (last + 1)) for step in steps] + [1.0]
    return [after - before for before, after in zip(roots, roots[1:])]


def _steps(folders: Sequence[Path]) -> list[int]:
    """Raises ValueError unless the folders are checkpoints of one run, in the order of their steps."""
    rule = "--weights inverse_sqrt imitates a decay of the learning rate over the checkpoints of one run"
    folders = [folder.resolve() for folder in folders]
    for folder in folders:
        if not folder.name.startswith("step-"):
            raise ValueError(f"{rule}, and {str(folder)!r} isn't one; take equal, or a number for each part.")
    if len({folder.parent for folder in folders}) > 1:
        raise ValueError(f"{rule}, and these are of several; take equal, or a number for each part.")
    steps = [step_names.step_of(folder) for folder in folders]
    if steps != sorted(steps):
        raise ValueError(f"{rule}: give them in the order of their steps, not {', '.join(map(str, steps))}.")
    return steps


def _by_hand(given: str, count: int) -> list[float]:
    try:
        numbers = [float(word) for word in given.split(",")]
    except ValueError:
        takes = f"{', '.join(NAMED)} or a number for each part, such as 0.7,0.3"
        raise ValueError(f"--weights takes {takes}, not {given!r}.") from None
    if len(numbers) != count:
        raise ValueError(f"--weights {given}: {len(numbers)} numbers for {count} part{'s' * (count != 1)}.")
    total = math.fsum(numbers)
    if not all(number >= 0 for number in numbers) or not 0 < total < math.inf:
        raise ValueError(f"--weights {given}: weights are 0 or more, finite, and not all 0.")
    return [number / total for number in numbers]
