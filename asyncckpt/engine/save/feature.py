"""What a Saver was asked for beside the plain save: features, each called at its places in a save.

    place                                   who needs it
    begin         the step is claimed       events, ranks, filters: how this save is noted, written and committed
    flattened     the dense state is read   ranks: what other ranks write is not captured
    frozen        all is held still         ranks: which ids each rank holds
    chosen        the same, of a save       deltas: which rows it writes
    planned       it is known how to stage  deltas and audits: whether rows are chosen; steps: how it is captured
    captured      before the fence          steps: those of optimizers wait for what is not copied yet
    before_files  in the background         retention: it may not fall behind for ever
    committed     it is durable             uploads, then retention, which may remove what was uploaded
    skipped       there is no save          ranks: the others skip it, too

A plain Saver has none, and its saves cross none. The order of features is that of engine/open_saver.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from asyncckpt.model.table import Table

if TYPE_CHECKING:
    from asyncckpt.engine.save.save_job import Committed, SaveJob
    from asyncckpt.engine.save.stage import StageChoice
    from asyncckpt.engine.save.state_cut import Cut


class SaveFeature:
    """One feature of a Saver. A method that it does not override does nothing."""

    def begin(self, job: SaveJob) -> None:
        """The step is claimed, and nothing has been read. On the caller's thread."""

    def flattened(self, cut: Cut, tables: Mapping[str, Table], call: int | None) -> None:
        """The dense state has been read, and no table is frozen. call: its number, of several ranks."""

    def frozen(self, cut: Cut) -> None:
        """The whole state is held still; no plan is made."""

    def chosen(self, job: SaveJob) -> None:
        """As `frozen`, of a save."""

    def planned(self, job: SaveJob, stage: StageChoice) -> None:
        """It is decided how the save is staged."""

    def captured(self, job: SaveJob) -> None:
        """The state is in the arena, or on its way there; the caller goes on soon."""

    async def before_files(self, job: SaveJob) -> None:
        """Nothing has been written. In the background."""

    def committed(self, job: SaveJob, committed: Committed) -> None:
        """The checkpoint is durable; its future has not been resolved. In the background."""

    def skipped(self, call: int | None) -> None:
        """This call saves nothing, for another one was in flight. On the caller's thread."""
