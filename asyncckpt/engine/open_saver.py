"""Open what a Saver saves to: which rank it is, the features that it was asked for, the directory, the target of saves.

A feature, and what it needs, is imported only where it was asked for. A plain Saver has none.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch

from asyncckpt.commit.attempt import claims
from asyncckpt.commit.discover import Listing
from asyncckpt.engine.process.held_directory import Opened, commits_of, open_alone
from asyncckpt.engine.process.log import is_logged
from asyncckpt.engine.save.feature import SaveFeature
from asyncckpt.engine.save.save_job import SaverMemory, SaveTarget
from asyncckpt.engine.save.stage import device_of
from asyncckpt.errors import UsageError
from asyncckpt.model.own_rank import rank_in_group
from asyncckpt.model.store_url import Place
from asyncckpt.model.table import ChecksLoad, Table
from asyncckpt.options import RankOptions, SaveOptions, UploadOptions
from asyncckpt.plan.named_tables import named_tables
from asyncckpt.plan.save_plan import PlanCache, check_all_here
from asyncckpt.plan.state import flatten
from asyncckpt.signals import uninterrupted
from asyncckpt.staging.pool import pool
from asyncckpt.storage.owner_lock import OwnerLock

if TYPE_CHECKING:
    from asyncckpt.engine.features.event_line import EventLine
    from asyncckpt.engine.ranks.open_directory import OwnShard
    from asyncckpt.engine.ranks.saver_ranks import Ranks
    from asyncckpt.engine.upload.uploads import Uploads
    from asyncckpt.pipeline.filters import FilterFunction
    from asyncckpt.pipeline.row_filters import RowFilter

# In which a save calls its features, and why.
ORDER = {
    "events": "the others note how long they take",
    "log": "it tells of what is durable, whatever the others make of it",
    "ranks": "what other ranks write is neither cut nor planned, and decides what a delta may leave out",
    "filters": "they choose how the save is written, as deltas do",
    "deltas": "which rows are captured follows from what this rank writes",
    "steps": "what has been captured until here is what steps of optimizers wait for",
    "uploads": "a step is to be uploaded before retention looks what may go",
    "retention": "it removes what none of the others needs any more",
}


@dataclass(frozen=True)
class Asked:
    """What a Saver was asked for, checked. own: which rank it is; None: nobody else saves with it."""

    path: Place
    options: SaveOptions
    ranks: RankOptions
    own: OwnShard | None
    tables: Mapping[str, Table]
    state: Mapping[str, Any]
    filter_func: FilterFunction | None
    filters: tuple[RowFilter, ...]
    upload: UploadOptions | None
    exact_modes: bool

    @property
    def rank(self) -> int:
        return 0 if self.own is None else self.own.index

    @property
    def ranks_count(self) -> int:
        return 1 if self.own is None else self.own.count


# -- ranks -------------------------------------------------------------------------------------------------------------


def which_rank(shard_index: int, shard_num: int, path: Any, ranks: RankOptions) -> OwnShard | None:
    """Return which rank this is; None where nothing says, or may find out, that there are others.

    Raises as engine/ranks/open_directory.which_shard.
    """
    is_unsaid = type(shard_index) is type(shard_num) is int and (shard_index, shard_num) == (0, 1)
    if ranks.process_group is None and is_unsaid and (ranks.alone or ranks.in_turn or rank_in_group() is None):
        return None
    from asyncckpt.engine.ranks.open_directory import which_shard

    return which_shard(shard_index, shard_num, path, ranks)


@contextmanager
def announcing_errors(own: OwnShard | None, ranks: RankOptions) -> Iterator[None]:
    """Let the other ranks know of an error before the directory is open: they would wait for this one."""
    try:
        yield
    except BaseException as error:
        if own is not None:
            from asyncckpt.engine.ranks.open_directory import announce_refused

            announce_refused(error, own, ranks)
        raise


def own_tables(
    hashtables: Mapping[str, Table] | torch.nn.Module | None, own: OwnShard | None, ranks: RankOptions
) -> Mapping[str, Table]:
    """Return the tables by name, those of a module too. UsageError for parts that this rank cannot save."""
    if isinstance(hashtables, torch.nn.Module):
        from asyncckpt.modules.walk import tables_of  # It knows tables of other libraries.

        hashtables = tables_of(hashtables)
    tables = named_tables(hashtables)
    if tables:
        from asyncckpt.engine.ranks.holdings import check_said

        index, count = (0, 1) if own is None else (own.index, own.count)
        check_said(tables, index=index, count=count, may_be_parts=ranks.alone)
    return tables


# -- features ----------------------------------------------------------------------------------------------------------


def checked_filters(filters: Sequence[RowFilter], tables: Mapping[str, Table]) -> tuple[RowFilter, ...]:
    """Return row filters that tables can have. UsageError."""
    from asyncckpt.pipeline.filter_rules import check_filters, row_rules

    checked = check_filters(filters, {name: table.schema() for name, table in tables.items()})
    for name, table in tables.items():
        if isinstance(table, ChecksLoad) and (rules := row_rules(checked, name)):
            what = f"filter {rules[0]} leaves out rows of table {name!r}, and then no load takes the others"
            raise UsageError(what, found=type(table), expected="a table whose rows can be removed")
    return checked


def in_order(features: Mapping[str, SaveFeature]) -> tuple[SaveFeature, ...]:
    """Return features by their names in ORDER."""
    return tuple(features[name] for name in ORDER if name in features)


def make_features(asked: Asked) -> dict[str, SaveFeature]:
    """Make the features that can be made before the directory is open. UsageError, UnsupportedError; NotFoundError,
    IOFailedError of a store.
    """
    features: dict[str, SaveFeature] = {}
    options, own = asked.options, asked.own
    if own is not None and own.met is not None:
        check_all_here(flatten(asked.state))  # The first save would find it, too.
    if asked.filters or asked.filter_func is not None:
        from asyncckpt.engine.features.chosen_blocks import Filters

        features["filters"] = Filters()
    if options.deltas is not None or options.debug.audit:
        from asyncckpt.engine.features.deltas import Deltas

        features["deltas"] = Deltas(options.deltas, audit=options.debug.audit)
    if options.device.optimizers:
        from asyncckpt.engine.features.steps import StepFences

        features["steps"] = StepFences(options.device.optimizers)
    if asked.upload is not None:
        from asyncckpt.engine.upload.uploads import Uploads

        in_turn = asked.ranks_count > 1 and asked.ranks.in_turn
        features["uploads"] = Uploads.open(asked.path, asked.upload, rank=asked.rank, in_turn=in_turn)
    return features


# -- the directory -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OpenSaver:
    """What a Saver keeps open. lock: only on the rank that holds it. finalizer: gives all of it back."""

    target: SaveTarget
    lock: OwnerLock | None
    ranks: Ranks | None
    uploads: Uploads | None
    events: EventLine | None
    finalizer: weakref.finalize[Any, SaveTarget] = field(repr=False)


@uninterrupted
def open_saver(asked: Asked, features: dict[str, SaveFeature]) -> OpenSaver:
    """Open the directory, and make the target of all saves. With several ranks, wait for the others."""
    opened: Opened | None = None
    try:
        ranks: Ranks | None = None
        if asked.own is None:
            opened = open_alone(asked.path, exact_modes=asked.exact_modes)
        else:
            from asyncckpt.engine.ranks.open_directory import open_directory

            opened = joined = open_directory(asked.path, asked.own, options=asked.ranks, exact_modes=asked.exact_modes)
            ranks = joined.ranks
        return _open(asked, features, opened, ranks)
    except BaseException:
        events = cast("EventLine | None", features.get("events"))
        if events is not None:  # Its thread would wait for ever.
            events.close()
        if opened is not None:
            opened.close()
        raise


def _open(asked: Asked, features: dict[str, SaveFeature], opened: Opened, ranks: Ranks | None) -> OpenSaver:
    options, claim = asked.options, claims.save
    if ranks is not None:
        from asyncckpt.engine.ranks.in_turn import claim_in_turn
        from asyncckpt.engine.ranks.rank_share import SharesWithRanks

        features["ranks"] = SharesWithRanks(ranks, audit=options.debug.audit)
        if ranks.in_turn:
            claim = partial(claim_in_turn, ranks)
    if options.keep is not None:
        from asyncckpt.engine.features.retention import WAIT_S_MAX, Retention

        # Other ranks wait meanwhile, so not until they call this one silent.
        wait_s_max = WAIT_S_MAX if ranks is None else min(WAIT_S_MAX, ranks.limits.silence_s / 2)
        features["retention"] = Retention(options.keep, wait_s_max=wait_s_max)
    events: EventLine | None = None
    if options.debug.on_event is not None:
        from asyncckpt.engine.features.event_line import EventLine

        features["events"] = events = EventLine(options.debug.on_event)
    if (asked.rank == 0 or asked.ranks.in_turn) and is_logged():
        from asyncckpt.engine.features.log_lines import LogLines

        features["log"] = lines = LogLines()
        if asked.rank == 0:
            lines.opened(opened.root, is_locked=opened.lock is not None)
    uploads = cast("Uploads | None", features.get("uploads"))
    uploader = None if uploads is None else uploads.uploader
    remembers = not features.keys().isdisjoint({"deltas", "retention"})
    plans = PlanCache(parallel=options.parallel, rank=asked.rank, ranks_count=asked.ranks_count, device_of=device_of)
    target = SaveTarget(
        commits=commits_of(opened.root, opened.lock, options.durability, uploader, remembers=remembers),
        options=options,
        tables=asked.tables,
        state=asked.state,
        memory=SaverMemory(plans),
        rank=asked.rank,
        ranks_count=asked.ranks_count,
        filter_func=asked.filter_func,
        filters=asked.filters,
        is_filtered="filters" in features,
        features=in_order(features),
        claim=claim,
    )
    # The directory is given back with the target, which a save in flight holds too: a Saver that is dropped while it
    # saves lets the save end first.
    finalizer = weakref.finalize(target, _give_back, opened, target.memory)
    if events is not None:
        weakref.finalize(target, events.close)
        events.opened(opened.root, rank=asked.rank)
        if uploads is not None:
            uploads.ended = partial(events.ended, "upload", path=asked.path, rank=asked.rank)
    _go_on_uploading(uploads, opened)
    return OpenSaver(target, opened.lock, ranks, uploads, events, finalizer)


def _go_on_uploading(uploads: Uploads | None, opened: Opened) -> None:
    """Upload what earlier Savers of the directory have left; or say, with its lock, how much that is."""
    if uploads is not None:
        uploads.go_on(opened.root)
    elif opened.lock is not None and Listing.of(opened.root).uploads:
        from asyncckpt.engine.upload.uploads import warn_of_left

        warn_of_left(opened.root)


@uninterrupted
def _give_back(opened: Opened, memory: SaverMemory) -> None:
    """Let another process write to the directory, and other Savers use the arenas."""
    for layout in memory.regions.layouts():
        pool.forget(layout)
    opened.close()
