"""Saves and loads of one rank, and what is refused."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import asyncckpt
from asyncckpt.embcache import EmbCacheEmbeddingBagCollection, Saver
from asyncckpt.embcache.load_ranks import RanksLoad, SparseLoadReport
from asyncckpt.embcache.saver import OPEN_FOLDERS_MAX, _ExactModesSaver
from tests.embcache.models import CachedNet, config, image, union
from tests.worlds.directories import flip_byte
from tests.worlds.gates import Gate
from tests.worlds.gates import nothing_in_flight as nothing_in_flight

UsageError, CorruptError = asyncckpt.UsageError, asyncckpt.CorruptError
IncompatibleError, NotFoundError = asyncckpt.IncompatibleError, asyncckpt.NotFoundError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "save_dir" / "sparse"


def loaded(path: Path, **options: Any) -> Any:
    net = CachedNet(**options)
    with Saver(rank=0) as saver:
        saver.load(net, path)
    return image(net)


def refused(net: nn.Module, path: Path, kind: type[Exception], text: str, **options: Any) -> None:
    """A load is refused, and nothing has changed."""
    before = image(net) if isinstance(net, CachedNet) else None
    with Saver(rank=0) as saver, pytest.raises(kind, match=text):
        saver.load(net, path, **options)
    assert before is None or image(net) == before


# -- round trip --------------------------------------------------------------------------------------------------------


def test_a_copy_without_the_lock_is_loaded(path: Path, tmp_path: Path) -> None:
    """The file LOCK is for writers only."""
    net = CachedNet().trained(range(8))
    with Saver(rank=0) as saver:
        saver.save(net, path)
    copy = tmp_path / "copy"
    shutil.copytree(path, copy, ignore=shutil.ignore_patterns("LOCK"))
    assert loaded(copy) == image(net)


@pytest.mark.parametrize("admit_after", [1, 2])
def test_what_is_saved_comes_back(path: Path, admit_after: int) -> None:
    net = CachedNet(admit_after=admit_after).trained(range(8))
    before = image(net)
    assert all(before.values())
    with Saver(rank=0) as saver:
        result = saver.save(net, path)
        assert image(net) == before
        target = CachedNet(admit_after=admit_after).trained(range(20, 24))
        report = saver.load(target, path)
    assert image(target) == before
    assert result.step == report.step == 0
    assert report.layout == "asyncckpt"
    assert report.rows == {name: len(rows) for name, rows in before.items()}
    assert (report.world_size, report.passed_over, report.ignored) == (1, (), ())


def test_deltas_hold_what_was_trained_since(path: Path) -> None:
    net = CachedNet(admit_after=2).trained(range(8))
    policy = asyncckpt.DeltaPolicy(deltas_max=100, bytes_share_max=1000.0)
    with Saver(rank=0, deltas=policy) as saver:
        results = [saver.save(net, path)]
        images = [image(net)]
        for step in (8, 9):
            net.train_step(step)
            results.append(saver.save_async(net, path, kind="delta" if step == 8 else "auto").result(60))
            images.append(image(net))
    assert [result.kind for result in results] == ["full", "delta", "delta"]
    for step, expected in enumerate(images):
        target = CachedNet(admit_after=2)
        with Saver(rank=0) as saver:
            saver.load(target, path, step=step)
        assert image(target) == expected


@pytest.mark.parametrize("host_level", ["copy", "first_touch"])
def test_training_goes_on_during_a_save(path: Path, host_level: Any) -> None:
    net = CachedNet().trained(range(6))
    with Saver(rank=0, device=asyncckpt.DeviceOptions(host_level=host_level)) as saver:
        future = saver.save_async(net, path)
        at_the_cut = None
        undisturbed = image(CachedNet().trained(range(6)))
        for step in range(6, 14):
            net.train_step(step)
        assert future.result(60).step == 0
        at_the_cut = loaded(path)
    assert at_the_cut == undisturbed
    assert image(net) == image(CachedNet().trained(range(14)))  # Nor does the save disturb the training.


def test_training_continues_as_if_nothing_had_happened(path: Path) -> None:
    with Saver(rank=0) as saver:
        saver.save(CachedNet().trained(range(5)), path)
        net = CachedNet()
        saver.load(net, path)
    assert image(net.trained(range(5, 9))) == image(CachedNet().trained(range(9)))


def test_only_sparse_state_is_saved(path: Path) -> None:
    net = CachedNet().trained(range(3))
    with Saver(rank=0) as saver:
        saver.save(net, path)
        target = CachedNet()
        head = target.head.weight.clone()
        saver.load(target, path)
    assert torch.equal(target.head.weight, head)
    info = asyncckpt.describe(path)
    assert {block.name.split("@")[0] for block in info.blocks} == {"user", "ad", "word"}


def test_second_save_into_the_same_path(path: Path) -> None:
    net = CachedNet()
    images = []
    with Saver(rank=0) as saver:
        for index in range(3):
            images.append(image(net.trained(range(3 * index, 3 * index + 3))))
            assert saver.save(net, path).step == index
        assert len(saver._open) == 1
    for index in range(3):
        target = CachedNet()
        with Saver(rank=0) as other:
            assert other.load(target, path, step=index).step == index
        assert image(target) == images[index]
    assert loaded(path) == images[-1]


def test_step_is_the_callers_to_choose(path: Path) -> None:
    net = CachedNet().trained(range(2))
    with Saver(rank=0) as saver:
        assert saver.save(net, path, step=120).step == 120
        with pytest.raises(asyncckpt.ConflictError, match="step 120 already exists"):
            saver.save(net, path, step=120)
        assert saver.save(net, path).step == 121
        for step in (-1, True, 1.5, 10**12):
            with pytest.raises(UsageError, match="step must be"):
                saver.save(net, path, step=step)
            with pytest.raises(UsageError, match="step must be"):
                saver.load(net, path, step=step)
    refused(net, path, NotFoundError, "step 7 in .* is not complete", step=7)


def test_other_modules_and_paths_in_turn(path: Path) -> None:
    one, two = CachedNet().trained(range(2)), CachedNet().trained(range(4))
    with Saver(rank=0) as saver:
        for index in range(2 * OPEN_FOLDERS_MAX):
            net = (one, two)[index % 2]
            saver.save(net, path)
            saver.save(net, path.parent / f"other{index}")
            assert len(saver._open) <= OPEN_FOLDERS_MAX
            assert loaded(path) == image(net)
            assert loaded(path.parent / f"other{index}") == image(net)


def test_folder_is_free_after_close(path: Path) -> None:
    net = CachedNet()
    saver = Saver(rank=0)
    saver.save(net, path)
    assert (path / "LOCK").exists()
    saver.close()
    saver.close()
    for call in (saver.save, saver.save_async, saver.load):
        with pytest.raises(UsageError, match="is closed"):
            call(net, path)
    shutil.rmtree(path)
    with Saver(rank=0) as again:
        assert again.save(net, path).step == 0


def test_empty_tables_come_back_empty(path: Path) -> None:
    with Saver(rank=0) as saver:
        saver.save(CachedNet(), path)
        target = CachedNet().trained(range(3))
        saver.load(target, path)
    assert not any(image(target).values())


def test_keep_latest(path: Path) -> None:
    net = CachedNet()
    with Saver(rank=0, keep=2) as saver:
        for _ in range(4):
            saver.save(net, path)
    assert asyncckpt.list_steps(path) == [2, 3]


def test_filters(path: Path) -> None:
    net = CachedNet().trained(range(8))
    often = asyncckpt.filters.keep_rows("user", lambda columns: columns["count"] > 1)
    with Saver(rank=0, filters=[often]) as saver:
        saver.save(net, path)
    found, before = loaded(path), image(net)
    table = net.bags.tables()["user"]
    counts = dict(zip(table.ids().tolist(), table.read(table.ids())["count"].tolist(), strict=True))
    assert found["user"] == {id: row for id, row in before["user"].items() if counts[id] > 1}
    assert 0 < len(found["user"]) < len(before["user"])
    assert found["ad"] == before["ad"]


# -- modes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [0, 0o027, 0o077, 0o777])
def test_modes_whatever_the_umask(path: Path, mask: int) -> None:
    net = CachedNet().trained(range(2))
    before = os.umask(mask)
    try:
        with Saver(rank=0) as saver:
            saver.save_async(net, path).result(60)
            saver.save(net, path)
    finally:
        os.umask(before)
    entries = [path.parent, path, *path.rglob("*")]
    modes = {(entry.is_dir(), stat.S_IMODE(entry.stat().st_mode)) for entry in entries}
    assert modes == {(True, 0o750), (False, 0o640)}
    assert {"LOCK", "manifests", "data"} <= {entry.name for entry in entries}


def test_umask_counts_where_exact_modes_are_not_asked_for(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        with asyncckpt.Saver(path=tmp_path / "run", tensors={"w": torch.ones(2)}) as saver:
            saver.save(1)
    finally:
        os.umask(before)
    modes = {(entry.is_dir(), stat.S_IMODE(entry.stat().st_mode)) for entry in (tmp_path / "run").rglob("*")}
    assert modes == {(True, 0o700), (False, 0o600)}


# -- in flight ---------------------------------------------------------------------------------------------------------


def test_one_save_or_load_at_a_time(path: Path) -> None:
    net = CachedNet().trained(range(2))
    with Saver(rank=0) as saver:
        saver.save(net, path)
        with held_background():
            future = saver.save_async(net, path)
            with pytest.raises(asyncckpt.SaveInProgressError):
                saver.save_async(net, path)
            with Saver(rank=0, on_busy="raise") as other:
                for call in (other.save, other.save_async, other.load):
                    with pytest.raises(asyncckpt.SaveInProgressError):
                        call(net, path)
        saver.load(net, path)
        assert future.done()
        assert saver.save(net, path).step == 2


def test_queued_saves_get_steps_of_their_own(path: Path) -> None:
    net = CachedNet().trained(range(2))
    with Saver(rank=0, on_busy="queue") as saver:
        with held_background():
            futures = [saver.save_async(net, path), saver.save_async(net, path)]
        assert [future.result(60).step for future in futures] == [0, 1]
    assert loaded(path) == image(net)


class held_background:
    """Nothing gets on in the background within the block."""

    def __enter__(self) -> None:
        from asyncckpt.engine.process.background import Job, background

        self._gate = gate = Gate()

        async def wait() -> None:
            gate()

        background.submit(Job(run=wait, fail=lambda error: None))
        assert gate.reached.wait(60)

    def __exit__(self, *_: object) -> None:
        self._gate.open()


# -- arguments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"rank": None}, {"rank": True}, {"rank": -1}, {"rank": 10**6}, {"rank": "0"},
                                     {"rank": 0.0}, {"rank": 2, "world_size": 2}, {"rank": 0, "world_size": 0},
                                     {"rank": 0, "world_size": True}, {"rank": 0, "world_size": 10**6}])  # fmt: skip
def test_rank_must_be_one(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"rank|world_size"):
        Saver(**options)


@pytest.mark.parametrize("options", [{"on_busy": "skip"}, {"peers_deadline": 0}, {"peers_deadline": True}])
def test_other_arguments_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        Saver(rank=0, **options)


def test_module_without_tables_is_refused_and_nothing_made(path: Path) -> None:
    for module in (nn.Linear(2, 2), None):
        with Saver(rank=0) as saver:
            for call in (saver.save, saver.save_async):
                with pytest.raises(UsageError, match=r"asyncckpt\.Saver"):
                    call(module, path)  # type: ignore[arg-type]
    assert not path.parent.exists()


def test_tables_must_belong_to_the_rank(path: Path) -> None:
    sharded, whole = CachedNet(shard=(0, 2)), CachedNet()
    for net, options in (
        (sharded, {"rank": 1}),
        (sharded, {"rank": 0, "world_size": 1}),
        (sharded, {"rank": 1, "world_size": 2}),
        (whole, {"rank": 3}),
    ):
        with Saver(**options) as saver, pytest.raises(UsageError, match="table 'user' does not belong to this rank"):
            saver.save(net, path)


def test_the_tables_say_how_many_ranks_there_are(path: Path) -> None:
    with Saver(rank=0) as saver:
        saver.save(CachedNet().trained(range(8)), path)
    nets = [CachedNet(shard=(rank, 4)) for rank in range(4)]
    for rank, net in enumerate(nets):
        with Saver(rank=rank) as saver:
            saver.load(net, path)
    assert union(map(image, nets)) == loaded(path)


# -- what does not fit -------------------------------------------------------------------------------------------------


def saved(path: Path) -> Path:
    with Saver(rank=0) as saver:
        saver.save(CachedNet().trained(range(4)), path)
    return path


def bags(*configs: Any) -> nn.Module:
    return EmbCacheEmbeddingBagCollection(configs)


def test_renamed_table_is_refused(path: Path) -> None:
    net = CachedNet(name="person").trained(range(2))
    refused(net, saved(path), IncompatibleError, r"missing \['person'\], unknown \['user'\].*filter_func")


def test_missing_and_unknown_tables_are_refused(path: Path) -> None:
    saved(path)
    refused(bags(config()), path, IncompatibleError, r"missing \[\], unknown \['ad', 'word'\]")
    net = CachedNet()
    net.more = bags(config("tag", ["tags"]))
    refused(net, path, IncompatibleError, r"missing \['tag'\], unknown \[\]")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dim": 5}, "rows"),
        ({"dtype": torch.float64}, "dtype torch.float64"),
        ({"optimizer_slots": {"sum": ()}}, "column 'sum' of table 'user' has rows"),
        ({"optimizer_slots": {"sum": torch.float64}}, "column 'sum' of table 'user' has dtype"),
        ({"optimizer_slots": {"sum": torch.float32, "m": torch.float32}}, r"columns \['m'\] of table 'user'"),
        ({"metadata": {"last_seen": torch.int32}}, "column 'last_seen' of table 'user' has dtype"),
    ],
)
def test_table_that_does_not_fit_is_refused(path: Path, options: dict[str, Any], text: str) -> None:
    ad, word = config("ad", ["ads"], dim=3), config("word", ["query"])
    module = bags(config(**options), ad, word)
    module.tables()["user"].lookup(torch.tensor([1, 2]))  # type: ignore[operator]
    refused(module, saved(path), IncompatibleError, text)
    assert module.tables()["user"].ids().tolist() == [1, 2]  # type: ignore[operator]


def test_admission_may_change_between_save_and_load(path: Path) -> None:
    with Saver(rank=0) as saver:
        net = CachedNet(admit_after=2).trained(range(8))
        assert image(net)["ad.candidates"]
        saver.save(net, path)
        one, other = CachedNet(), CachedNet(admit_after=2)
        assert saver.load(one, path).ignored == ("ad.candidates",)
        saver.save(one, path)
        other.trained(range(20, 24))
        saver.load(other, path)
    assert image(other)["ad"] == image(net)["ad"]
    assert image(other)["ad.candidates"] == {}


def test_nothing_to_load(path: Path, tmp_path: Path) -> None:
    net = CachedNet()
    refused(net, path, UsageError, "not a folder")
    path.mkdir(0o750, parents=True)
    path.parent.chmod(0o750)
    refused(net, path, NotFoundError, "there is no checkpoint in")
    (path / "rank00000-of-00001").mkdir()
    refused(net, path, NotFoundError, "no step in .* is complete")
    with _ExactModesSaver(path=path, tensors={"w": torch.ones(2)}) as foreign:
        refused(net, path, NotFoundError, r"no step in .* is complete, found \{'.': \[\], 'rank00000-of-00001': \[\]\}")
        foreign.save(3)
    refused(net, path, NotFoundError, r"no step in .* is complete, found \{'.': \[3\], 'rank00000-of-00001': \[\]\}")


# -- damage ------------------------------------------------------------------------------------------------------------


def shard_files(path: Path) -> list[Path]:
    return sorted(path.rglob("*.safetensors"))


@pytest.mark.parametrize("how", ["missing", "shorter", "manifest"])
def test_damage_that_shows_before_reading_changes_nothing(path: Path, how: str) -> None:
    file = shard_files(saved(path))[0]
    if how == "missing":
        file.unlink()
    elif how == "shorter":
        os.truncate(file, file.stat().st_size - 1)
    else:
        manifest = next(path.rglob("*.json"))
        manifest.write_bytes(manifest.read_bytes()[:-9])
    refused(CachedNet().trained(range(2)), path, CorruptError, "shard file|manifest")


def test_a_step_that_is_removed_before_it_is_read_changes_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the retention of another process, while the ranks agree."""
    saved(path)
    real = RanksLoad.run

    def run(load: RanksLoad) -> SparseLoadReport:
        next(path.rglob("*.json")).unlink()
        return real(load)

    monkeypatch.setattr(RanksLoad, "run", run)
    refused(CachedNet().trained(range(2)), path, NotFoundError, "step 0")


def test_damage_found_while_reading_leaves_the_tables_empty(path: Path) -> None:
    file = shard_files(saved(path))[-1]
    flip_byte(file)
    net = CachedNet().trained(range(2))
    with Saver(rank=0) as saver:
        with pytest.raises(CorruptError, match="all multi-level tables of the module are empty now"):
            saver.load(net, path)
        assert not any(image(net).values())
        net.trained(range(3))  # And of use again.
        assert saver.save(net, path).step == 1
        saver.load(net, path)


def test_failed_save_does_not_stay(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of a background save that nobody asked for is raised by the next one; then all goes on."""
    net = CachedNet().trained(range(2))
    with Saver(rank=0) as saver:
        saver.save(net, path)
        shutil.rmtree(path / "data")
        future = saver.save_async(net, path)
        future._inner.exception(60)
        with pytest.raises(asyncckpt.CheckpointError) as caught:
            saver.save(net, path)
        assert caught.value is future._inner.exception()
    path.rename(path.parent / "broken")
    with Saver(rank=0) as saver:
        assert saver.save(net, path).step == 0
