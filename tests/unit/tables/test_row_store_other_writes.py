"""Ways to write a column in place: torch counts them, and the next save copies all rows, or the pages name them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils import dlpack

from asyncckpt import Loader, Saver
from asyncckpt.tables import HashTable
from tests.unit.tables.test_touched_rows_by_use import touched, version_of

IDS = torch.arange(4)
PAGES = ("docs/tables.md", "docs/tables-in-detail.md", "docs/decisions/0022-versions-beside-marks.md")
REPOSITORY = Path(__file__).resolve().parents[3]
Write = Callable[[torch.Tensor], object]


def step_of(make: Callable[..., torch.optim.Optimizer], **options: Any) -> Write:
    def write(column: torch.Tensor) -> None:
        parameter = nn.Parameter(column)
        parameter.grad = torch.ones_like(parameter)
        make([parameter], lr=0.5, **options).step()

    return write


def inference(column: torch.Tensor) -> None:
    with torch.inference_mode():
        column.add_(1.0)


def load_module(column: torch.Tensor) -> None:
    module = nn.Embedding.from_pretrained(column)
    module.load_state_dict({"weight": column + 1.0})


COUNTED: dict[str, Write] = {
    "add_": lambda column: column.add_(1.0),
    "operator": lambda column: column.__imul__(2.0),
    "setitem": lambda column: column.__setitem__(slice(0, 2), 9.0),
    "masked": lambda column: column.masked_fill_(column > 0, 9.0),
    "copy_": lambda column: column.copy_(column + 1.0),
    "index_put_": lambda column: column.index_put_((torch.tensor([0]),), torch.tensor(9.0)),
    "index_add_": lambda column: column.index_add_(0, torch.tensor([1]), torch.ones(1, 2)),
    "scatter_": lambda column: column.scatter_(0, torch.tensor([[0, 1]]), 9.0),
    "init": lambda column: nn.init.normal_(column),
    "view": lambda column: column.view(-1)[1:3].fill_(9.0),
    "as_strided": lambda column: column.as_strided((2,), (1,)).add_(1.0),
    "unbind": lambda column: column.unbind(0)[1].zero_(),
    "detach": lambda column: column.detach().zero_(),
    "out=": lambda column: torch.add(column, 1.0, out=column),
    "foreach": lambda column: torch._foreach_add_([column], 1.0),
    "renorm": lambda column: nn.functional.embedding(torch.tensor([0, 1]), column, max_norm=0.1),
    "vmap": lambda column: torch.func.vmap(lambda row: row.add_(1.0))(column),
    "SGD": step_of(torch.optim.SGD),
    "Adam": step_of(torch.optim.Adam),
    "Adam foreach": step_of(torch.optim.Adam, foreach=True),
    "inference_mode": inference,
    "load_state_dict": load_module,
    "all_gather": lambda column: dist.all_gather([column], column + 1.0),
}

# Each with the words of the pages.
NOT_COUNTED: dict[str, tuple[str, Write]] = {
    "data": ("`.data`", lambda column: column.data.add_(1.0)),
    "numpy": ("`.numpy()`", lambda column: column.numpy().__iadd__(1.0)),
    "dlpack": ("DLPack", lambda column: dlpack.from_dlpack(dlpack.to_dlpack(column)).add_(1.0)),
    "fused": ("`fused=True`", step_of(torch.optim.SGD, fused=True)),
    "all_reduce": ("`all_reduce`", dist.all_reduce),
    "broadcast": ("`broadcast`", lambda column: dist.broadcast(column, 0)),
    "reduce": ("`reduce`", lambda column: dist.reduce(column, 0)),
    "all_to_all": ("collectives", lambda column: dist.all_to_all_single(column, column + 1.0)),
    "storage fill_": ("`untyped_storage()`", lambda column: column.untyped_storage().fill_(0)),
    "storage copy_": (
        "`untyped_storage()`",
        lambda column: column.untyped_storage().copy_((column + 1.0).untyped_storage()),
    ),
    "set_": ("`set_`", lambda column: torch.empty(0).set_(column).add_(1.0)),  # type: ignore[call-overload]
}
# With one rank they write what is there.
UNCHANGED_BY_ONE_RANK = ("all_reduce", "broadcast", "reduce")


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = tmp_path_factory.mktemp("ranks") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def table() -> HashTable:
    table = HashTable("user", 2, capacity=4, initializer=1.0, replicated=True)
    table.lookup(IDS)
    return table


@pytest.mark.parametrize("way", COUNTED)
def test_after_ways_to_write_that_torch_counts_all_rows_are_saved(way: str, table: HashTable) -> None:
    before, version = table.embedding.clone(), version_of(table)
    COUNTED[way](table.embedding)
    assert not torch.equal(table.embedding, before), "nothing was written"
    assert touched(table, version) is None


@pytest.mark.parametrize("way", NOT_COUNTED)
def test_ways_to_write_that_torch_does_not_count_are_on_the_pages(way: str, table: HashTable) -> None:
    words, write = NOT_COUNTED[way]
    for page in PAGES:
        assert words in (REPOSITORY / page).read_text(encoding="utf-8"), page
    before, version, rows = table.embedding.clone(), version_of(table), table.lookup(IDS, insert=False)
    write(table.embedding)
    assert way in UNCHANGED_BY_ONE_RANK or not torch.equal(table.embedding, before), "nothing was written"
    assert touched(table, version) == [], "torch counts it now: the pages need not name it"
    table.touch(rows)
    assert touched(table, version) == IDS.tolist()


def test_a_vector_of_parameters_leaves_the_table_for_other_memory(table: HashTable) -> None:
    parameter = nn.Parameter(table.embedding)
    nn.utils.vector_to_parameters(torch.full((table.embedding.numel(),), 9.0), [parameter])
    assert (parameter.eq(9.0).all(), table.embedding.eq(1.0).all()) == (True, True)


def test_a_replica_is_summed_as_a_copy(table: HashTable, tmp_path: Path) -> None:
    again = HashTable("user", 2)
    with Saver(path=tmp_path, hashtables={"user": table}) as saver:
        saver.save_async(1).result(60)
        ids = table.ids().sort().values
        sums = table.read(ids)["embedding"]
        sums += 1.0  # The part of another rank.
        dist.all_reduce(sums)
        table.insert(ids, sums)
        saver.save_async(2).result(60)
    Loader(tmp_path, hashtables={"user": again}).load()
    assert again.read(IDS)["embedding"].eq(2.0).all()
