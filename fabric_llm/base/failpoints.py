"""Named places where tests make a run fail. The environment variable FABRIC_LLM_FAILPOINT says
where and how:

    FABRIC_LLM_FAILPOINT=publish.before_rename            every rank that reaches it is killed with
                                                          SIGKILL
    FABRIC_LLM_FAILPOINT=forward:rank=1:count=5:do=hang   rank 1 hangs when it reaches it for the
                                                          fifth time

`do`: kill, stop, term, int (SIGKILL, SIGSTOP: frozen, with open connections, SIGTERM or SIGINT to
itself), hang (sleep forever), enospc (raise OSError, disk full), raise (RuntimeError), oom
(allocate more memory than there is).
"""

import errno
import os
import signal
import time

VARIABLE = "FABRIC_LLM_FAILPOINT"
# Each line has the places of one part of the program, roughly in the order of a run.
NAMES = (
    "joining joined assembled set_up fill read_data forward between_micro_batches "
    "optimizer_step between_steps evaluate finish "
    "save.begin save.parts save.rest save.hash "
    "publish.begin publish.manifest publish.before_rename publish.renamed publish.done "
    "prepare.documents prepare.mark prepare.marked prepare.rows prepare.publish "
    "prune.begin prune.renamed prune.done resume.moved_aside metrics.replace "
    "mirror.lease mirror.part mirror.file mirror.before_manifest "
    "mirror.after_manifest mirror.removing mirror.fetching mirror.fetched"
).split()
# Name of a place -> how often this process has reached it.
_reached: dict[str, int] = {}


def failpoint(name: str) -> None:
    """Fail if the environment names this place for this rank and this count; otherwise do
    nothing."""
    # A mistyped name in a call would make its test pass without a failure.
    assert name in NAMES, name
    point, *options = os.environ.get(VARIABLE, "").split(":")
    given = dict(option.split("=", 1) for option in options)
    # The process group may not exist yet, so the environment says which rank this is.
    own_rank = os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))
    # Without `rank`, each rank that gets here fails.
    if point == name and given.get("rank", own_rank) == own_rank:
        _reached[name] = _reached.get(name, 0) + 1
        if _reached[name] == int(given.get("count", 1)):
            _do(given.get("do", "kill"), name)


def _do(action: str, name: str) -> None:
    if action == "hang":
        # Sleeping, unlike SIGSTOP, leaves the other threads of the process running.
        while True:
            time.sleep(1)
    elif action == "enospc":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
    elif action == "raise":
        raise RuntimeError(f"failpoint {name}")
    elif action == "oom":
        # Only this action needs torch, which takes seconds to import.
        import torch

        # No machine has so much, so the real error of the allocator is raised.
        torch.empty(2**60, dtype=torch.uint8)
    else:
        os.kill(os.getpid(), getattr(signal, f"SIG{action.upper()}"))
