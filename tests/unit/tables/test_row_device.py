"""Tables with a level on a device: nothing is read before it is there, nothing is overtaken, and few calls wait."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from asyncckpt.errors import DeviceError, UnsupportedError
from asyncckpt.tables import HashTable, MultiLevelTable, SparseAdagrad
from asyncckpt.tables import row_device as row_device_module
from asyncckpt.tables.embedding import HashEmbedding
from asyncckpt.tables.levels import Levels
from asyncckpt.tables.row_device import CudaRowDevice, RowDevice
from asyncckpt.tables.row_store import RowStore
from tests.unit.tables.fake_cuda import FakeCuda, FakeStream
from tests.unit.tables.multi_level_world import LevelsBesideDict, new_table
from tests.unit.tables.simulated_rows import SimulatedRows, tables_on_a_device
from tests.worlds.rows import batch

pytestmark = [pytest.mark.any_core, pytest.mark.filterwarnings("ignore:cache of table:RuntimeWarning")]

SEEDS = range(5)


def some_use(random: np.random.Generator) -> tuple[str, Any]:
    """As an operation of the World, mostly of training."""
    kind = random.choice(["train", "train", "train", "prefetch", "prefetch", "write", "remove", "find", "evict"])
    ids = random.integers(0, 30, size=6).tolist()
    return str(kind), int(random.integers(0, 5)) if kind == "evict" else ids


@pytest.mark.parametrize("pin_host_memory", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_any_use_of_levels_equals_the_dict(monkeypatch: pytest.MonkeyPatch, seed: int, pin_host_memory: bool) -> None:
    with tables_on_a_device(monkeypatch, seed=seed, pin_host_memory=pin_host_memory):
        random = np.random.default_rng(seed)
        world = LevelsBesideDict(cache_rows=int(random.integers(1, 10)), pin_host_memory=pin_host_memory)
        for _ in range(25):
            world.apply(some_use(random))
            if random.random() < 0.2:  # Rarely, since it waits for all that is on its way.
                world.check()
        world.check()


@pytest.mark.parametrize("seed", range(4))
def test_rows_that_nobody_lets_land_are_missed(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """The test above can fail."""
    monkeypatch.setattr(Levels, "begin", lambda levels: levels.cache.place.follow())
    with pytest.raises(AssertionError):
        test_any_use_of_levels_equals_the_dict(monkeypatch, seed, False)


def training_op(place: SimulatedRows, column: torch.Tensor, rows: torch.Tensor, amount: float) -> None:
    """An update of rows that takes its time, on the current stream."""
    column.index_put_((rows,), torch.full((len(rows), *column.shape[1:]), amount), accumulate=True)


def trained_beside_prefetch(place: SimulatedRows, table: MultiLevelTable, seed: int) -> dict[int, float]:
    """Train on one stream while a prefetch on another moves rows; what each id must hold is returned."""
    runtime, random = place.runtime, np.random.default_rng(seed)
    ahead, expected = runtime.new_stream(), dict.fromkeys(range(20), 0.0)
    for step in range(8):
        ids = np.unique(random.integers(0, 20, size=3))
        rows = table.lookup(ids)
        training_op(place, table.embedding, rows, step + 1.0)
        for id in ids.tolist():
            expected[id] += step + 1.0
        with runtime.on(ahead):
            table.prefetch(np.arange(20)[random.permutation(20)[:3]])
    return expected


@pytest.mark.parametrize("seed", SEEDS)
def test_a_prefetch_on_another_stream_neither_overtakes_nor_is_overtaken(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    with tables_on_a_device(monkeypatch, seed=seed) as place:
        table = MultiLevelTable("user", 2, cache_rows=6, capacity=32)
        expected = trained_beside_prefetch(place, table, seed)
        ids = table.ids()
        found = dict(zip(ids.tolist(), table.read(ids)["embedding"][:, 0].tolist(), strict=True))
        assert found == {id: value for id, value in expected.items() if id in found}


def test_streams_that_are_not_ordered_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail."""
    monkeypatch.setattr(SimulatedRows, "follow", lambda place: None)
    failures = 0
    for seed in range(30):
        try:
            test_a_prefetch_on_another_stream_neither_overtakes_nor_is_overtaken(monkeypatch, seed)
        except AssertionError:
            failures += 1
    assert failures


@pytest.mark.parametrize("seed", SEEDS)
def test_a_cut_shows_what_other_streams_have_queued(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    with tables_on_a_device(monkeypatch, seed=seed) as place:
        table = MultiLevelTable("user", 2, cache_rows=6, capacity=32)
        expected = trained_beside_prefetch(place, table, seed)
        cut = table.begin_cut()
        held, cached = cut.cache_map.numpy(), cut.cached_column("embedding")
        assert cached is not None
        newest = cut.column("embedding").clone()
        used = np.flatnonzero(held >= 0)
        newest[torch.from_numpy(held[used])] = place.runtime.read(cached)[torch.from_numpy(used)]
        ids = cut.column("id").tolist()
        cut.end(True)
        assert {id: newest[row, 0].item() for row, id in enumerate(ids)} == {id: expected[id] for id in ids}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_load_on_another_stream_neither_overtakes_nor_is_overtaken(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """A load inserts ids on threads of its own, whose current stream is not that of training."""
    ids = np.arange(30)
    with tables_on_a_device(monkeypatch, seed=seed) as place:
        table = HashTable("user", 2, capacity=64, optimizer_slots={"sum": torch.float32})
        rows = table.lookup(ids)
        for _ in range(5):
            training_op(place, table.slot("sum"), rows, 1.0)
        load = table.begin_load(clear=True, rows_count=30, filled={"embedding"})
        with place.runtime.on(place.runtime.new_stream()):
            load.insert(torch.from_numpy(ids))
        load.end(True)
        training_op(place, table.slot("sum"), table.lookup(ids), 2.0)
        assert torch.equal(place.runtime.read(table.slot("sum"))[:30], torch.full((30, 2), 2.0))


def test_a_lookup_waits_for_what_the_one_before_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    with tables_on_a_device(monkeypatch, seed=1) as place:
        table = new_table(cache_rows=2, capacity=8)
        waits = []
        for ids in ([1, 2], [3, 4], [1, 2], [1, 2], [1, 2]):
            before = place.waits_count
            table.lookup(batch(ids))
            waits.append(place.waits_count - before)
        # The second and third evict; so the third and fourth find rows on their way.
        assert waits == [0, 0, 1, 1, 0]


def test_a_failure_to_land_keeps_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    with tables_on_a_device(monkeypatch, seed=3):
        world = LevelsBesideDict(cache_rows=2)
        world.train([1, 2])
        world.train([3, 4])
        world.find([1, 2])

        def no_memory(*_: Any, **__: Any) -> None:
            raise MemoryError

        with monkeypatch.context() as patch:
            patch.setattr(RowStore, "take_rows", no_memory)
            with pytest.raises(MemoryError):
                world.table.lookup(batch([3]))
        world.check()


@pytest.mark.parametrize("seed", range(3))
def test_a_hash_table_on_a_device_trains_as_on_the_host(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    def trained() -> dict[int, list[float]]:
        torch.manual_seed(seed)
        table = HashTable("user", 3, optimizer_slots={"sum": torch.float32}, capacity=2)
        random = np.random.default_rng(seed)
        column: torch.Tensor
        for step in range(6):
            rows = torch.from_numpy(table.lookup_rows(random.integers(0, 40, size=8)))
            for column in (table.embedding, table.slot("sum")):
                column[rows.unique()] = float(step) + torch.arange(len(rows.unique()) * 3).view(-1, 3)
            table.remove(random.integers(0, 40, size=2))
            table.insert(batch([step, 50]), torch.full((2, 3), float(step)))
        values = places[0].runtime.read(table.embedding) if places else table.embedding
        return dict(zip(table.ids().tolist(), values[table.used_rows()].tolist(), strict=True))

    places: list[SimulatedRows] = []
    expected = trained()
    with tables_on_a_device(monkeypatch, seed=seed) as place:
        places.append(place)
        assert trained() == expected


class OnlyLookups:
    """A TrainableTable without rows on the host, as others write them."""

    def __init__(self, table: HashTable) -> None:
        self._table = table


for _name in dir(HashTable):  # On the class, where newer Pythons look for what a protocol asks for.
    if not _name.startswith("_") and _name != "lookup_rows":
        setattr(OnlyLookups, _name, property(lambda self, name=_name: getattr(self._table, name)))


def test_modules_do_with_tables_that_find_rows_on_their_device_only() -> None:
    tables = [HashTable("user", 3, optimizer_slots={"sum": torch.float32}) for _ in range(2)]
    for table in (tables[0], OnlyLookups(tables[1])):
        module = HashEmbedding(table)
        optimizer = SparseAdagrad(module, lr=0.5)
        for ids in ([1, 2, 1], [2, 3]):
            module(torch.tensor(ids)).sum().backward()
            optimizer.step()
    assert torch.equal(tables[0].embedding[:3], tables[1].embedding[:3])
    assert bool(tables[0].embedding[:3].any())


# -- CUDA, as far as it can be told without ----------------------------------------------------------------------------


def test_a_stream_waits_for_the_one_before_and_never_for_itself() -> None:
    cuda = FakeCuda()
    place = CudaRowDevice(torch.device("cuda", 1), cuda=cuda)
    first, second = cuda.current, FakeStream("second")
    for stream in (first, first, second, second, first):
        cuda.current = stream
        place.follow()
    assert (first.waits_for, second.waits_for) == (["second"], ["first"])


class LostEvent:
    """An event of a device that has failed."""

    def synchronize(self) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")


def test_a_device_that_fails_with_rows_on_it_says_so() -> None:
    with pytest.raises(DeviceError, match=r"a device failed before rows evicted from its cache .* device-side assert"):
        row_device_module.Landing({}, LostEvent()).wait()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_cuda_it_is_said_what_cannot_be() -> None:
    for make in (HashTable, lambda name, dim, **more: MultiLevelTable(name, dim, cache_rows=4, **more)):
        with pytest.raises(UnsupportedError, match="device of table 'user' does not exist, found 'cuda:3'"):
            make("user", 2, device="cuda:3")


def test_other_devices_get_their_values_by_torch() -> None:
    """The way of devices that are not CUDA's: as with the host, but by torch's own copies."""
    place = RowDevice(torch.device("cpu"))
    source, target = torch.arange(12.0).view(4, 3), torch.zeros(4, 3)
    place.is_host = False
    place.take_rows({"x": source}, np.array([3, 1]), {"x": target}, np.array([0, 2]))
    assert target.tolist() == [[9, 10, 11], [0, 0, 0], [3, 4, 5], [0, 0, 0]]
