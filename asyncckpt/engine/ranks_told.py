"""Tell the other ranks of a call in which this rank does not save: it was skipped, or failed before it began."""

from __future__ import annotations

import threading

from asyncckpt.coordination.driver import run_call
from asyncckpt.coordination.messages import Failed, Skipped, cause_of
from asyncckpt.engine.background import Job, background
from asyncckpt.engine.messages import log_warning
from asyncckpt.engine.ranks import Ranks, talkers


def tell_skipped(ranks: Ranks, call: int) -> None:
    """All ranks skip a save that this one skips."""
    _tell(ranks, call, Skipped("a save or load was in flight"))


def tell_failed(ranks: Ranks, call: int, error: BaseException) -> None:
    """No rank saves what this one cannot save."""
    _tell(ranks, call, Failed(cause_of(error)))


def _tell(ranks: Ranks, call: int, message: Skipped | Failed) -> None:
    """Behind what is in flight: the others come to this call no sooner either."""
    ranks.replicas.forget()
    told = threading.Event()
    ranks.telling[:] = [*(item for item in ranks.telling if not item.is_set()), told]
    try:
        background.submit(
            Job(run=lambda: _run(ranks, call, message, told), lose=lambda error: _lose(call, error, told))
        )
    except Exception as error:
        _lose(call, error, told)


async def _run(ranks: Ranks, call: int, message: Skipped | Failed, told: threading.Event) -> None:
    try:
        await run_call(ranks.channel, call, message, None, ranks.limits, threads=talkers)
    except Exception as error:
        _lose(call, error, told)
    finally:
        told.set()


def _lose(call: int, error: BaseException, told: threading.Event) -> None:
    """They will find out when they have waited for too long."""
    told.set()
    log_warning("other ranks could not be told about save number %d: %s", call, error)
