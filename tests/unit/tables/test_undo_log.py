"""What would move or free the memory that an export reads waits for it, and not for ever."""

from __future__ import annotations

import numpy as np
import pytest

from asyncckpt.errors import DeadlineError
from asyncckpt.tables import undo_log
from asyncckpt.tables.undo_log import CutPlaces, UndoLog


@pytest.mark.parametrize("change", ["storage_moves", "end"])
def test_an_export_that_never_ends_stops_nobody_for_good(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    monkeypatch.setattr(undo_log, "READERS_S_MAX", 0.01)
    places = CutPlaces(np.array([[0, 4]]), rows_count=4, window_rows=4)
    spared = np.empty(0, dtype=np.int64)
    log = UndoLog("user", places=places, columns={}, spared=spared, bytes_max=1000, on_pause=lambda seconds: None)
    with log.reading(0):
        log.lay_over(0, {})
        with pytest.raises(DeadlineError, match=r"table 'user' was not exported within 0\.01 s"):
            getattr(log, change)()
    getattr(log, change)()
