"""Announce to the other ranks a call in which this rank does not save: it was skipped, or failed before it began."""

from __future__ import annotations

import threading

from asyncckpt.coordination.driver import run_call
from asyncckpt.coordination.messages import Failed, Skipped, cause_of
from asyncckpt.engine.process.background import Job, background
from asyncckpt.engine.process.log import log_warning
from asyncckpt.engine.ranks.saver_ranks import Ranks, talkers


def announce_skipped(ranks: Ranks, call: int) -> None:
    """All ranks skip a save that this one skips."""
    _announce(ranks, call, Skipped("a save or load was in flight"))


def announce_failed(ranks: Ranks, call: int, error: BaseException) -> None:
    """No rank saves what this one cannot save."""
    _announce(ranks, call, Failed(cause_of(error)))


def _announce(ranks: Ranks, call: int, message: Skipped | Failed) -> None:
    """Behind what is in flight: the others come to this call no sooner either."""
    ranks.replicas.forget()
    sent = threading.Event()
    ranks.announcing[:] = [*(item for item in ranks.announcing if not item.is_set()), sent]
    try:
        background.submit(
            Job(run=lambda: _run(ranks, call, message, sent), fail=lambda error: _lose(call, error, sent))
        )
    except Exception as error:
        _lose(call, error, sent)


async def _run(ranks: Ranks, call: int, message: Skipped | Failed, sent: threading.Event) -> None:
    try:
        await run_call(ranks.channel, call, message, None, ranks.limits, threads=talkers)
    except Exception as error:
        _lose(call, error, sent)
    finally:
        sent.set()


def _lose(call: int, error: BaseException, sent: threading.Event) -> None:
    """They will find out when they have waited for too long."""
    sent.set()
    log_warning("other ranks could not be informed of save number %d: %s", call, error)
