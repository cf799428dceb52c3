"""An open cut of a MultiLevelTable comes out as the table was at the cut, whatever happens to it meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncckpt.errors import DeadlineError, IOFailedError, UsageError
from asyncckpt.model.table import CacheCopy
from asyncckpt.tables import multi_level_cut, undo_log
from asyncckpt.tables.multi_level import MultiLevelTable
from asyncckpt.tables.undo_log import UndoLog
from tests.unit.tables.multi_level_world import CACHE_ROWS, OPS, POLICIES, LevelsBesideDict, Op, Rows, Saving, rows_of
from tests.worlds.rows import batch

pytestmark = pytest.mark.filterwarnings("ignore:cache of table:RuntimeWarning")

# Ids are 19 at most, so a table of this capacity never grows: in one thread nobody could end the wait for it.
ROOM = 32
WINDOW_ROWS = st.integers(1, 8)
SEEDS = range(40)
EXPORT = "export"


def test_a_log_that_cannot_be_ended_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    world = LevelsBesideDict(cache_rows=4, capacity=ROOM)
    world.train([1, 2])
    cut, watchers = Saving(world, window_rows=4).cut, world.table._store.watchers

    def fails(_: UndoLog) -> None:
        raise DeadlineError("a window was not exported")

    monkeypatch.setattr(UndoLog, "end", fails)
    assert len(watchers) == 1
    with pytest.raises(DeadlineError):
        cut.end(ok=True)
    assert len(watchers) == 0


@settings(max_examples=250, deadline=None)
@given(
    cache_rows=CACHE_ROWS,
    policy=POLICIES,
    before=st.lists(OPS, max_size=12),
    window_rows=WINDOW_ROWS,
    # Between exports, and in the middle of them: the number says how many columns have been read by then.
    after=st.lists(
        st.one_of(OPS, st.tuples(st.just(EXPORT), st.integers(0, 7), st.lists(st.tuples(st.integers(0, 5), OPS)))),
        max_size=20,
    ),
)
def test_windows_are_those_of_the_cut(
    cache_rows: int, policy: str, before: list[Op], window_rows: int, after: list[Any]
) -> None:
    world = LevelsBesideDict(cache_rows=cache_rows, policy=policy, capacity=ROOM)
    for op in before:
        world.apply(op)
    saving = Saving(world, window_rows=window_rows)
    for item in after:
        if item[0] == EXPORT:
            with changes_while_reading(world, item[2]):
                saving.export_some(item[1])
        else:
            world.apply(item)
    assert saving.end() == saving.expected
    world.check()


class changes_while_reading:
    """Applies ops between the columns that an export reads from the live storage."""

    def __init__(self, world: LevelsBesideDict, ops: list[tuple[int, Op]]) -> None:
        self._world, self._ops = world, ops
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> None:
        copy_runs, columns_read = multi_level_cut.copy_runs, 0

        def copy_and_change(*arguments: Any, **options: Any) -> None:
            nonlocal columns_read
            for at, op in self._ops:
                if at == columns_read:
                    self._world.apply(op)
            copy_runs(*arguments, **options)
            columns_read += 1

        self._patch.setattr(multi_level_cut, "copy_runs", copy_and_change)

    def __exit__(self, *_: object) -> None:
        self._patch.undo()


def random_ops(random: np.random.Generator, count: int, *, ids_count: int) -> list[Op]:
    names = ["train", "train", "write", "find", "prefetch", "remove", "evict"]
    ops: list[Op] = []
    for _ in range(count):
        name = str(random.choice(names))
        size = int(random.integers(1, 4 if name == "remove" else 10))
        below, ids = int(random.integers(0, 12)), random.integers(0, ids_count, size).tolist()
        ops.append((name, below if name == "evict" else ids))
    return ops


def run_in_one_thread(seed: int) -> tuple[Rows, Rows]:
    """Return (what came out, what the table held at the cut) of a run that the seed decides."""
    random = np.random.default_rng(seed)
    world = LevelsBesideDict(cache_rows=int(random.integers(1, 12)), capacity=ROOM)
    for op in random_ops(random, 10, ids_count=20):
        world.apply(op)
    saving = Saving(world, window_rows=int(random.integers(1, 9)))
    for op in random_ops(random, 12, ids_count=20):
        world.apply(op)
        if random.random() < 0.3:
            saving.export_some(int(random.integers(0, 8)))
    world.check()
    return saving.end(), saving.expected


def test_without_first_touch_the_cut_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the hook that keeps old values switched off, half of the runs come out wrong; with it, none does.

    Of these 40 runs none is wrong with the hook and 19 are without it, so the properties here can fail.
    """
    assert [seed for seed in SEEDS if not run_is_right(seed)] == []
    monkeypatch.setattr(UndoLog, "rows_change", lambda self, rows, columns: None)
    wrong = [seed for seed in SEEDS if not run_is_right(seed)]
    assert len(wrong) > len(SEEDS) // 4


def run_is_right(seed: int) -> bool:
    try:
        found, expected = run_in_one_thread(seed)
    except AssertionError:  # An id came out twice.
        return False
    return found == expected


class Exporter:
    """Exports all windows of a save on a thread of its own, in random order or as the table wants them."""

    def __init__(self, saving: Saving, random: np.random.Generator, *, begin: threading.Event | None = None) -> None:
        self.found: Rows = {}
        self._error: BaseException | None = None
        choices = random.integers(0, 8, size=len(saving.left)).tolist()

        def work() -> None:
            try:
                if begin is not None:
                    assert begin.wait(60)
                for choice in choices:
                    saving.export_some(choice)
                self.found = saving.end()
            except BaseException as error:
                self._error = error
                saving.cut.end(False)

        self._thread = threading.Thread(target=work)
        self._thread.start()

    def join(self) -> Rows:
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self.found


@pytest.mark.parametrize("seed", [*range(20), *(pytest.param(n, marks=pytest.mark.slow) for n in range(20, 60))])
def test_export_on_a_thread_while_training_goes_on(seed: int) -> None:
    """Growth waits for the exporter and goes on; a small log makes changes wait for it too."""
    random = np.random.default_rng(seed)
    world = LevelsBesideDict(
        cache_rows=int(random.integers(1, 30)),
        policy=str(random.choice(["lru", "lfu"])),
        capacity=8,
        undo_bytes_max=int(random.choice([1, 200, 1000, 1 << 20])),
    )
    for op in random_ops(random, 15, ids_count=60):
        world.apply(op)
    for _ in range(3):
        saving = Saving(world, window_rows=int(random.integers(1, 9)))
        exporter = Exporter(saving, random)
        for op in random_ops(random, 20, ids_count=90):
            world.apply(op)
        assert exporter.join() == saving.expected
        world.check()


@pytest.mark.parametrize("seed", range(10))
def test_cuts_open_at_once(seed: int) -> None:
    """A queued save cuts the table while the one before is still exported."""
    random = np.random.default_rng(seed)
    world = LevelsBesideDict(cache_rows=4, capacity=ROOM)
    savings: list[Saving] = []
    for _ in range(3):
        for op in random_ops(random, 8, ids_count=20):
            world.apply(op)
        savings.append(Saving(world, window_rows=int(random.integers(1, 9))))
        savings[0].export_some(1)
    for saving in savings:
        for op in random_ops(random, 4, ids_count=20):
            world.apply(op)
        assert saving.end() == saving.expected
    world.check()
    assert len(world.table._store.watchers) == 0


def state_of(table: MultiLevelTable) -> dict[str, Any]:
    """Every bit of a table: both levels, both maps, use of the cache."""
    cache, store = table._cache, table._store
    state: dict[str, Any] = {f"cache {name}": column.numpy().tobytes() for name, column in cache.columns().items()}
    state |= {f"host {name}": store.column(name).numpy().tobytes() for name in cache.columns()}
    state["host id"] = store.ids_by_row().tobytes()
    state |= {name: getattr(cache.use, name).tobytes() for name in ("ticks", "hits", "awaited_until")}
    state |= {"map": cache.host_rows.tobytes(), "tick": cache.use.tick, "cached ids": cache.ids_by_row().tobytes()}
    return state | {"runs": store.runs().tolist(), "capacity": table.capacity}


def test_cut_leaves_the_table_as_it_is() -> None:
    world = LevelsBesideDict(cache_rows=3, capacity=ROOM)
    for ids in ([1, 2, 3], [4, 5], [1, 6]):
        world.train(ids)
    world.remove([2])
    world.prefetch([3])
    before, counts = state_of(world.table), world.table.statistics()
    saving = Saving(world, window_rows=2)
    assert saving.end() == saving.expected
    assert state_of(world.table) == before
    assert world.table.statistics() == counts


def test_training_with_cuts_equals_training_without() -> None:
    tables = []
    for with_cuts in (False, True):
        random, world = np.random.default_rng(1), LevelsBesideDict(cache_rows=5, capacity=4)
        exporter = None
        for number, op in enumerate(random_ops(random, 60, ids_count=50)):
            world.apply(op)
            if with_cuts and number % 10 == 0:
                if exporter is not None:
                    exporter.join()
                exporter = Exporter(Saving(world, window_rows=3), np.random.default_rng(number))
        if exporter is not None:
            exporter.join()
        tables.append(world.table)
    # What free rows hold is no one's business.
    names = ("map", "ticks", "hits", "runs", "capacity")
    plain, cut = ({name: state_of(table)[name] for name in names} for table in tables)
    assert cut == plain
    ids = tables[0].ids()
    assert torch.equal(ids, tables[1].ids())
    rows = [rows_of(ids, table.read(ids)) for table in tables]
    assert rows[0] == rows[1]


def test_a_row_in_the_cache_at_the_cut_needs_no_old_value(monkeypatch: pytest.MonkeyPatch) -> None:
    world = LevelsBesideDict(cache_rows=3, capacity=ROOM)
    world.train([1, 2, 3])
    saving = Saving(world, window_rows=8)
    monkeypatch.setattr(UndoLog, "_keep", lambda *_: pytest.fail("a cached row was kept"))
    world.train([4, 5, 6])
    world.remove([1, 2])
    world.train([7, 8])
    assert saving.end() == saving.expected


def uncached_rows(count: int, **options: Any) -> LevelsBesideDict:
    """A world with ids 0 to count - 1 in the host level, and one other in the cache."""
    world = LevelsBesideDict(cache_rows=1, **{"capacity": ROOM, **options})
    world.write(range(count))
    world.train([-1])
    return world


def waits(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Return an event that is set as soon as a change waits for an export."""
    waiting, wait = threading.Event(), UndoLog._wait

    def announce(self: UndoLog, done: Callable[[], bool], **options: Any) -> None:
        if not done():
            waiting.set()
        wait(self, done, **options)

    monkeypatch.setattr(UndoLog, "_wait", announce)
    return waiting


def test_full_log_makes_changes_wait_until_windows_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    world = uncached_rows(8, undo_bytes_max=1)
    begin = waits(monkeypatch)
    saving = Saving(world, window_rows=2)
    # The log has room for one row: the write goes on only as windows leave.
    exporter = Exporter(saving, np.random.default_rng(0), begin=begin)
    world.write(range(8))
    assert begin.is_set()
    assert exporter.join() == saving.expected
    assert world.table.statistics().cache.paused_seconds > 0.0
    world.check()


def log_room(rows_count: int) -> int:
    """How many bytes a log for rows_count rows may take."""
    return rows_count * (undo_log.ENTRY_OVERHEAD_BYTES + 8 + 12 + 8 + 3 + 8)


@pytest.mark.usefixtures("no_patience")
def test_exported_windows_make_room_in_the_log() -> None:
    world = uncached_rows(8, undo_bytes_max=log_room(2))
    saving = Saving(world, window_rows=2)
    for index in range(4):
        world.write([2 * index, 2 * index + 1])
        saving.export(index)
        world.remove([2 * index])
    assert saving.end() == saving.expected


def test_rows_of_a_window_that_left_meanwhile_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    world = uncached_rows(8, undo_bytes_max=log_room(1))
    begin, taken, take = waits(monkeypatch), [], undo_log._Entries.take

    def record(self: Any, count: int) -> Any:
        taken.append(count)
        return take(self, count)

    monkeypatch.setattr(undo_log._Entries, "take", record)
    saving = Saving(world, window_rows=2)

    def export() -> None:
        assert begin.wait(60)
        for index in (3, 2, 1, 0, 4):
            saving.export(index)

    thread = threading.Thread(target=export)
    thread.start()
    # Row 0 is kept and fills the log. When its window, the last but one, has left, nothing else needs keeping.
    world.write(range(8))
    thread.join()
    assert taken == [1]
    assert saving.end() == saving.expected
    world.check()


def test_most_urgent_is_the_window_with_most_kept_rows() -> None:
    world = uncached_rows(8, undo_bytes_max=log_room(6))
    saving = Saving(world, window_rows=2)
    world.write([2, 6])
    assert saving.cut.most_urgent([0, 1, 2, 3]) == 0
    world.write([7, 4])
    assert saving.cut.most_urgent([0, 1, 2, 3]) == 3
    assert saving.cut.most_urgent([0, 1, 2]) == 1
    assert saving.end() == saving.expected


@pytest.mark.parametrize("use", ["lookup", "reserve", "clear", "load"])
def test_storage_moves_only_when_all_windows_are_exported(monkeypatch: pytest.MonkeyPatch, use: str) -> None:
    world = uncached_rows(8, capacity=9)
    table = world.table
    uses: dict[str, Callable[[], object]] = {
        "lookup": lambda: table.lookup(batch([100, 101])),
        "reserve": lambda: table.reserve(1000),
        "clear": table.clear,
        "load": lambda: table.begin_load(clear=False, rows_count=0).end(True),
    }
    begin, storage_moves, left_at_move = waits(monkeypatch), UndoLog.storage_moves, []
    saving = Saving(world, window_rows=2)

    def record(self: UndoLog) -> None:
        storage_moves(self)
        left_at_move.append(len(saving.left))

    monkeypatch.setattr(UndoLog, "storage_moves", record)
    exporter = Exporter(saving, np.random.default_rng(0), begin=begin)
    uses[use]()
    assert exporter.join() == saving.expected
    assert left_at_move[0] == 0
    assert (table.capacity == 9) == (use in ("clear", "load"))


@pytest.mark.parametrize("ok", [True, False])
def test_end_lets_waiting_growth_go_on(monkeypatch: pytest.MonkeyPatch, ok: bool) -> None:
    world = uncached_rows(8, capacity=9)
    begin = waits(monkeypatch)
    saving = Saving(world, window_rows=2)

    def end() -> None:
        assert begin.wait(60)
        saving.cut.end(ok)

    thread = threading.Thread(target=end)
    thread.start()
    world.write(range(20))
    thread.join()
    world.check()
    assert world.table.capacity >= 20


@pytest.fixture
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(undo_log, "PAUSE_S_MAX", 0.0)


@pytest.mark.usefixtures("no_patience")
@pytest.mark.parametrize("use", ["write", "grow"])
def test_cut_that_is_waited_for_too_long_is_given_up(use: str) -> None:
    world = uncached_rows(8, undo_bytes_max=1, capacity=9)
    saving = Saving(world, window_rows=2)
    saving.export(3)
    if use == "write":
        world.write(range(8))
    else:
        world.train([50, 51])
    message = r"cut of table 'user' was given up: training waited 0.0 s for .*\(training continued; save again\)"
    with pytest.raises(IOFailedError, match=message):
        saving.export(0)
    world.write(range(30))
    saving.cut.end(False)
    world.check()
    again = Saving(world, window_rows=4)
    assert again.end() == again.expected


def test_cut_without_memory_for_old_values_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    world = uncached_rows(4)
    saving = Saving(world, window_rows=2)

    def no_memory(bytes: int) -> None:
        raise MemoryError(f"cannot map {bytes} bytes")

    monkeypatch.setattr(undo_log.core, "map_memory", no_memory)
    world.write(range(4))
    world.check()
    with pytest.raises(IOFailedError, match="was given up: no memory to keep old values of rows: cannot map"):
        saving.export(0)
    saving.cut.end(False)
    assert len(world.table._store.watchers) == 0


def test_ends_of_a_cut() -> None:
    world = uncached_rows(4)
    saving = Saving(world, window_rows=3)
    saving.export(1)
    with pytest.raises(UsageError, match="window 1 of a cut of table 'user' was exported before"):
        saving.cut.export(1, {})
    with pytest.raises(UsageError, match="window of a cut of table 'user' must be below 2; got 2"):
        saving.cut.export(2, {})
    for ok in (False, True):
        saving.cut.end(ok)
    with pytest.raises(UsageError, match="export of a cut of table 'user' was asked for after its end"):
        saving.cut.export(0, {})
    with pytest.raises(UsageError, match="'embedding' of a cut of table 'user' was asked for after its fence"):
        saving.cut.column("embedding")
    with pytest.raises(UsageError, match="the cache map of a cut of table 'user' was asked for after its fence"):
        _ = saving.cut.cache_map
    with pytest.raises(UsageError, match="the cache level of column 'sum' of a cut"):
        saving.cut.cached_column("sum")
    world.train([1, 2])
    world.check()


def test_cut_that_does_not_stay_open() -> None:
    world = uncached_rows(4)
    cut = world.table.begin_cut()
    assert cut.cached_column("id") is None
    assert cut.cached_column("embedding") is world.table.embedding
    for column in (cut.column, cut.cached_column):
        with pytest.raises(UsageError, match="table 'user' has no column 'age', expected"):
            column("age")
    for window_rows in (0, -1):
        with pytest.raises(UsageError, match="window_rows of table 'user' must be"):
            cut.be_deferred(CacheCopy(map=cut.cache_map.numpy(), columns={}), window_rows=window_rows)
    cut.fence()
    for use in (lambda: cut.export(0, {}), lambda: cut.most_urgent([0])):
        with pytest.raises(UsageError, match="without be_deferred"):
            use()
    with pytest.raises(UsageError, match="be_deferred of a cut of table 'user' was asked for after its fence"):
        cut.be_deferred(CacheCopy(map=np.empty(0, dtype=np.int64), columns={}), window_rows=1)
    cut.end(True)
    # Without a fence the end gives the table back.
    world.table.begin_cut().end(False)
    world.train([1])
    world.check()


def test_cut_of_an_empty_table() -> None:
    world = LevelsBesideDict(cache_rows=2, capacity=ROOM)
    saving = Saving(world, window_rows=4)
    assert saving.left == []
    world.train([1, 2, 3])
    assert saving.end() == {}
    world.check()


def test_second_stay_open_is_refused() -> None:
    world = uncached_rows(2)
    cut = world.table.begin_cut()
    columns = {name: column.clone() for name, column in world.table._cache.columns().items()}
    copy = CacheCopy(map=cut.cache_map.numpy().copy(), columns=columns)
    cut.be_deferred(copy, window_rows=1)
    with pytest.raises(UsageError, match="be_deferred of a cut of table 'user' was called before"):
        cut.be_deferred(copy, window_rows=1)
    cut.end(False)
