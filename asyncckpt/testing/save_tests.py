"""Tests of whole saves and loads, by asyncckpt.Saver and asyncckpt.Loader."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from asyncckpt.errors import CorruptError, FilterError
from asyncckpt.loader import Loader
from asyncckpt.model.table import Table
from asyncckpt.model.write_block import WriteBlock
from asyncckpt.options import DeviceOptions, HostLevel
from asyncckpt.testing.case import NAME, STEPS, THREAD_S_MAX, TableCase, damage, in_thread, load, save, saver
from asyncckpt.testing.image import Image

Info = dict[str, dict[str, list[str]]]


class SaveTests(TableCase):
    """A save holds the table as it was in the call, and does not affect the live one."""

    @pytest.mark.parametrize("host_level", ["copy", "first_touch"])
    def test_save_async_holds_the_table_of_the_call(self, tmp_path: Path, host_level: HostLevel) -> None:
        """Training goes on at once, in this thread."""
        table = self.trained()
        with saver(table, tmp_path, device=DeviceOptions(host_level=host_level)) as saving:
            expected = self.image(table)
            future = saving.save_async(1)
            in_thread(lambda: self.train_steps(table, range(STEPS, STEPS + 6)))
            assert future.result(THREAD_S_MAX).step == 1
        self.assert_loads(tmp_path, expected)

    def test_blocking_save(self, tmp_path: Path) -> None:
        table = self.trained()
        expected = self.image(table)
        save(table, tmp_path)
        self.train_steps(table, range(STEPS, STEPS + 2))
        self.assert_loads(tmp_path, expected)

    def test_save_without_memory_for_a_snapshot(self, tmp_path: Path) -> None:
        """The call blocks instead and reads the live table, which the cut keeps unchanged."""
        table = self.trained()
        expected = self.image(table)
        with saver(table, tmp_path, host_memory_limit=0) as saving, warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            saving.save_async(1).result(THREAD_S_MAX)
            self.train_steps(table, range(STEPS, STEPS + 2))
        self.assert_loads(tmp_path, expected)

    @pytest.mark.parametrize("host_level", ["copy", "first_touch"])
    def test_every_step_loads_as_it_was(self, tmp_path: Path, host_level: HostLevel) -> None:
        """Saves are queued: a cut begins while another one still keeps old rows."""
        table = self.make_table()
        images: dict[int, Image] = {}
        with saver(table, tmp_path, device=DeviceOptions(host_level=host_level), on_busy="queue") as saving:
            for step in range(1, 5):
                in_thread(partial(self.train, table, step, 3))
                images[step] = self.image(table)
                saving.save_async(step)
        for step, image in images.items():
            self.assert_loads(tmp_path, image, step=step)

    @pytest.mark.parametrize("host_level", ["copy", "first_touch"])
    def test_a_save_changes_nothing(self, tmp_path: Path, host_level: HostLevel) -> None:
        table = self.trained()
        expected, inside = self.image(table), self.inside(table)
        with saver(table, tmp_path, device=DeviceOptions(host_level=host_level)) as saving:
            saving.save_async(1).result(THREAD_S_MAX)
            saving.save(2)
        self.assert_holds(table, expected, what="the table after saves")
        assert self.inside(table) == inside, "the internals changed in a save"

    @pytest.mark.parametrize("host_level", ["copy", "first_touch"])
    def test_training_with_saves_equals_training_without(self, tmp_path: Path, host_level: HostLevel) -> None:
        plain, saved = self.trained(), self.trained()
        with saver(saved, tmp_path, device=DeviceOptions(host_level=host_level)) as saving:
            for step in range(STEPS, STEPS + 4):
                saving.save_async(step, on_busy="wait")
                self.train(plain, step, 1)
                in_thread(partial(self.train, saved, step, 1))
        self.assert_holds(saved, self.image(plain), what="a table that was saved while it was trained")
        assert self.inside(saved) == self.inside(plain)

    def test_a_failed_save_leaves_the_table_usable(self, tmp_path: Path) -> None:
        table = self.trained()
        expected = self.image(table)

        def fail(blocks: list[WriteBlock]) -> list[WriteBlock]:
            raise ValueError("no")

        with saver(table, tmp_path / "failed", filter_func=fail) as saving:
            future = saving.save_async(1)
            with pytest.raises(FilterError):
                future.result(THREAD_S_MAX)
        self.assert_holds(table, expected, what="the table after a failed save")
        self.assert_usable(table, tmp_path / "sound")


class LoadTests(TableCase):
    """A load brings all of a step or nothing."""

    def test_load_empties_first(self, tmp_path: Path) -> None:
        _, expected = self._saved(tmp_path)
        target = self.trained(seed=2, steps=STEPS + 2)
        for _ in range(2):
            report = load(target, tmp_path)
            self.assert_holds(target, expected, what="a table that held other rows before it was loaded")
            assert report.rows[NAME] == len(expected)
        self.assert_usable(target, tmp_path / "again")

    def test_merge_keeps_other_rows(self, tmp_path: Path) -> None:
        _, expected = self._saved(tmp_path)
        target = self.trained(seed=2)
        before = self.image(target)
        load(target, tmp_path, merge=True)
        self.assert_holds(target, before.merged(expected), what="a table that a checkpoint was merged into")
        self.assert_usable(target, tmp_path / "again")

    def test_training_goes_on_where_it_was(self, tmp_path: Path) -> None:
        """A loaded table is trained to the same rows as the one that was saved."""
        table, _ = self._saved(tmp_path)
        target = self.make_table()
        load(target, tmp_path)
        for trained in (table, target):
            self.train_steps(trained, range(STEPS, STEPS + 3))
        self.assert_holds(target, self.image(table), what="a loaded table that was trained on")

    def test_a_failed_load(self, tmp_path: Path) -> None:
        """A damaged block is found during the load; see `failed_load` for what that leaves."""
        table, _ = self._saved(tmp_path)
        damage(tmp_path, f"{NAME}@{table.schema().columns[-1].name}")
        target = self.trained(seed=2)
        before = self.image(target)
        with pytest.raises(CorruptError):
            load(target, tmp_path)
        match self.failed_load:
            case "empty":
                left = self.image(target).ids
                assert not len(left), f"a load that failed left {len(left)} rows"
            case "unchanged":
                self.assert_holds(target, before, what="a table whose load failed")
            case "undefined":
                assert sorted(self.contents(target)) == sorted(self.contents(table))
        self.assert_usable(target, tmp_path / "again")

    def test_damaged_ids_change_nothing(self, tmp_path: Path) -> None:
        self._saved(tmp_path)
        damage(tmp_path, f"{NAME}@id")
        target = self.trained(seed=2)
        before, inside = self.image(target), self.inside(target)
        with pytest.raises(CorruptError):
            load(target, tmp_path)
        self.assert_holds(target, before, what="a table whose load failed at the ids")
        assert self.inside(target) == inside

    def test_rename(self, tmp_path: Path) -> None:
        table, expected = self._saved(tmp_path)
        columns = [column.name for column in table.schema().columns]
        target = self.make_table()

        def rename(info: Info) -> Info:
            return {"other": {NAME: columns}}

        Loader(tmp_path, {"other": target}, filter_func=rename, strict=False).load()
        self.assert_holds(target, expected, what="a table loaded under another name")

    def test_subset_of_columns(self, tmp_path: Path) -> None:
        table, expected = self._saved(tmp_path)
        chosen = self.weight_column(table)
        target = self.make_table()
        load(target, tmp_path, filter_func=lambda info: {**info, NAME: {NAME: ["id", chosen]}})
        self.image(target).only(chosen).assert_equals(expected.only(chosen), what=f"column {chosen!r}")
        self.assert_usable(target, tmp_path / "again")

    def test_no_rows(self, tmp_path: Path) -> None:
        if self.fixed_ids:
            pytest.skip("the table always has its rows (fixed_ids)")
        table = self.make_table()
        with saver(table, tmp_path) as saving:
            saving.save_async(1).result(THREAD_S_MAX)
            saving.save(2)
        for step in (1, 2):
            target = self.trained()
            load(target, tmp_path, step=step)
            assert len(self.image(target)) == 0
        self.assert_usable(target, tmp_path / "again")

    @pytest.mark.parametrize("count", [2, 3])
    def test_resharding(self, tmp_path: Path, count: int) -> None:
        """Load one table into `count` shards by the unsigned value of the ids, and all of these into one again."""
        shards = [self.make_shard(index, count) for index in range(count)]
        if any(shard is None for shard in shards):
            pytest.skip("the table has no shards (make_shard)")
        _, expected = self._saved(tmp_path)
        assert bool((expected.ids < 0).any()), "training makes no negative ids: signed modulo would pass"
        back = self.make_table()
        for index, shard in enumerate(shards):
            assert shard is not None
            assert shard.shard == (index, count)
            load(shard, tmp_path)
            owned = expected.ids.view(np.uint64) % np.uint64(count) == np.uint64(index)
            self.assert_holds(shard, expected.part(owned), what=f"shard {index} of {count}")
            save(shard, tmp_path / str(index))
            load(back, tmp_path / str(index), merge=True, strict=False)  # A part of it.
        self.assert_holds(back, expected, what=f"{count} shards loaded into one table")

    def _saved(self, path: Path) -> tuple[Table, Image]:
        table = self.trained()
        expected = self.image(table)
        save(table, path)
        return table, expected
