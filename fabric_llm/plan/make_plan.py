"""Flags -> Plan: what they mean on this machine, with this dataset and model. Mistakes that need
these are found here, by data_plan.py, schedule.py and model_plan.py."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Optional

from fabric_llm.base.command_line import is_rank_zero
from fabric_llm.base.flag import Flags
from fabric_llm.checkpoint import keep
from fabric_llm.model.strategy_rules import Placement
from fabric_llm.plan import checks, same_run
from fabric_llm.plan.data_plan import plan_data
from fabric_llm.plan.model_plan import plan_model, require_model_can, require_shares
from fabric_llm.plan.plan import Plan
from fabric_llm.plan.schedule import plan_schedule
from fabric_llm.plan.start import batch_sizes


def make_plan(
    flags: Flags,
    placement: Placement,
    directory: Path,
    resume_from: Optional[Path],
    resumed: Optional[dict[str, Any]] = None,
    place: Optional[Path] = None,
) -> Plan:
    """The plan of a run in `directory`, new or resumed from the checkpoint `resume_from`. Raises
    ValueError.

    resumed: progress.json of that checkpoint, as rank 0 has read it; None: as this rank reads it.
    place: where this rank reads the checkpoint, None: where it is.
    """
    place = place or resume_from
    # Each rank checks that it sees the checkpoint, also where rank 0's document counts. A copy
    # elsewhere was checked as it was made, and has no weights.
    read = {}
    if place is not None:
        read = keep.verified(place) if place == resume_from else keep.read_progress(place)
    resumed = read if resumed is None else resumed
    # Before the data is opened, since it needs nothing but flags.
    batches = batch_sizes(flags, placement.devices, placement.num_nodes)
    with same_run.written_by_a_run(resume_from):
        data, mix = plan_data(flags, resumed)
        schedule = plan_schedule(flags, batches, data.sources, mix, resumed)
    # A resumed run opens what its checkpoint holds, not what --model_name may hold by now.
    source = flags.model.model_name if place is None else str(place)
    model, skeleton = plan_model(flags, source, data, placement.kind)
    plan = Plan(placement, model, data, schedule, directory, resume_from, resumed)
    # These compare parts of the plan with each other, with the same result on all ranks.
    if is_rank_zero():
        require_model_can(plan, skeleton)
        _require_rows_to_share(plan, flags.model.attention)
        # Checked again, now that the data has said how long the run is.
        checks.check_length(flags, schedule.max_step)
        if resume_from is not None:
            with same_run.written_by_a_run(resume_from):
                plan = replace(plan, changes=same_run.require_same_run(plan, flags))
    return plan


def _require_rows_to_share(plan: Plan, attention: str) -> None:
    """Raises ValueError if --context_parallel ranks can't have equal parts of each row, or of the
    heads."""
    sharing = plan.placement.context_parallel
    for dataset in plan.data.opened:
        folder = repr(dataset.given)
        require_shares(sharing, plan.model, attention, f"rows of {folder}", dataset.context_length)
        if sharing > 1 and "attention_mask" in dataset.train[0]:
            raise ValueError(
                f"--context_parallel {sharing}: {folder} has an attention_mask, which packed "
                "attention doesn't read."
            )
