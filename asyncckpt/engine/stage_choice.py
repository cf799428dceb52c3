"""How a save is staged: all of it in an arena, or with tables left open, or not at all.

    what fits the memory limit               host_level="auto"   "copy"    "first_touch"
    everything                               arena               arena     arena, tables left open
    the caches, but not the host levels      left open           blocking  left open
    not even that                            blocking            blocking  blocking

A table that is left open has only its cache level copied while training waits; its host level is exported behind the
fence. A filter needs whole blocks, so with one no table is left open.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from asyncckpt.engine.save_request import Cut, SaveTarget
from asyncckpt.pipeline.filters import identity
from asyncckpt.plan.save_plan import SavePlan, exportable
from asyncckpt.staging.pool import pool


@dataclass(frozen=True)
class StageChoice:
    """The plan of a save; `fallback` says why it cannot be staged, None when it can."""

    plan: SavePlan
    fallback: str | None = None


def choose_stage(target: SaveTarget, cut: Cut) -> StageChoice:
    """Choose for a save that would rather not block."""
    host_level = target.options.host_level
    left_open: list[str] = []
    if host_level != "copy" and target.filter_func is identity:
        left_open = exportable(cut.tables)
    choices: list[list[str]] = [left_open] if host_level == "first_touch" else [[], left_open] if left_open else [[]]
    plans = (target.plans.plan(cut.flat, cut.tables, left_open=names) for names in choices)
    smallest: SavePlan | None = None
    for plan in plans:
        if fits(target, plan):
            return StageChoice(plan)
        smallest = plan
    assert smallest is not None
    return StageChoice(target.plans.plan(cut.flat, cut.tables), _why_not(target, smallest))


def fits(target: SaveTarget, plan: SavePlan) -> bool:
    """Whether there is memory for the arena of a plan."""
    return pool.fits(plan.arena_bytes, limit_bytes=target.options.host_memory_limit)


def warn_of_fallback(reason: str, *, stacklevel: int) -> None:
    """Tell the user that his save blocks."""
    warnings.warn(
        f"asyncckpt: {reason}; this save blocks until it is written", RuntimeWarning, stacklevel=stacklevel + 1
    )


def _why_not(target: SaveTarget, plan: SavePlan) -> str:
    limit = target.options.host_memory_limit
    shown = "a share of what is available" if limit is None else f"{limit} bytes"
    return f"a snapshot of {plan.arena_bytes} bytes does not fit the host memory limit ({shown})"
