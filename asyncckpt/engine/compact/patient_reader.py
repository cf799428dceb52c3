"""Read stored blocks beside training, and let saves and loads of this process go first.

They share disk and cores with whatever rewrites a checkpoint, and somebody waits for them. Before each read, which is
of a window, it waits while a save or load is in flight. In all it waits WAIT_S, and WAITS_PER_WORK times as long as it
has worked, and no longer, so it also ends where one save follows upon the other.
"""

from __future__ import annotations

import time

from asyncckpt.commit.root import WriteRoot
from asyncckpt.engine.process.save_lock import save_lock
from asyncckpt.format.manifest import Chain
from asyncckpt.native import Progress
from asyncckpt.shard.reader import ChainReader
from asyncckpt.signals import STEP_S

WAIT_S = 1.0
WAITS_PER_WORK = 4.0


class PatientReader(ChainReader):
    """Reads with one thread. `cancelled` ends a wait; it does not end a read."""

    def __init__(self, root: WriteRoot, chain: Chain, *, cancelled: Progress) -> None:
        self._cancelled = cancelled
        self._begun = time.monotonic()
        self._waited_s = 0.0
        super().__init__(root.data, chain, threads=1, verify=True, progress=Progress())

    def run(self) -> None:
        self._give_way()
        super().run()

    def _give_way(self) -> None:
        began = time.monotonic()
        worked_s = began - self._begun - self._waited_s
        until = began + WAIT_S + WAITS_PER_WORK * worked_s - self._waited_s
        while not self._cancelled.cancelled and (left_s := until - time.monotonic()) > 0:
            if save_lock.wait_until_free(min(left_s, STEP_S)):
                break
        self._waited_s += time.monotonic() - began
