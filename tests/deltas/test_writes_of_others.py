"""Code that writes to columns past the methods of their table: every save holds what it wrote, and copies all rows."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt import DeltaPolicy, HashTable, Loader, MultiLevelTable, Saver
from tests.deltas.test_kinds import save
from tests.shares import slow_but_for_a_share
from tests.worlds.rows import rows_of

ALWAYS = DeltaPolicy(deltas_max=1000, bytes_share_max=1000.0)
ROWS = 300
Table = HashTable | MultiLevelTable


def new_hash_table() -> HashTable:
    return HashTable("t", 4, optimizer_slots={"sum": torch.float32})


def new_levels() -> MultiLevelTable:
    return MultiLevelTable("t", 4, cache_rows=ROWS // 2, optimizer_slots={"sum": torch.float32})


TABLES: dict[str, Callable[[], Any]] = {"hash": new_hash_table, "levels": new_levels}


@pytest.fixture(params=TABLES)
def table(request: pytest.FixtureRequest) -> Table:
    table: Table = TABLES[request.param]()
    for ids in torch.arange(ROWS).split(100):
        table.lookup(ids)
        with table.rows(ids) as rows:
            rows.embedding += ids.unsqueeze(1)
    return table


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "columns .* were written in place")
        yield


def loaded(path: Path, step: int) -> dict[int, tuple[float, ...]]:
    target = new_hash_table()
    Loader(path, {"t": target}, step=step).load()
    return rows_of(target)


def kept_rows(table: Table, rows: torch.Tensor) -> None:
    table.embedding[rows] += 1.0


def whole_column(table: Table, rows: torch.Tensor) -> None:
    table.embedding.mul_(1.5)


def slot(table: Table, rows: torch.Tensor) -> None:
    table.slot("sum")[rows] += 3.0


def view(table: Table, rows: torch.Tensor) -> None:
    table.embedding.view(-1)[:8] += 1.0


def detached(table: Table, rows: torch.Tensor) -> None:
    table.embedding.detach().index_add_(0, rows, torch.ones(len(rows), 4))


def without_gradients(table: Table, rows: torch.Tensor) -> None:
    with torch.no_grad():
        torch.add(table.embedding, 1.0, out=table.embedding)


def in_inference_mode(table: Table, rows: torch.Tensor) -> None:
    with torch.inference_mode():
        table.embedding.index_add_(0, rows, torch.ones(len(rows), 4))


def initialized(table: Table, rows: torch.Tensor) -> None:
    torch.nn.init.uniform_(table.embedding)


def optimizer_of_torch(table: Table, rows: torch.Tensor) -> None:
    weight = torch.nn.Parameter(table.embedding)
    optimizer = torch.optim.SGD([weight], lr=0.1, foreach=True)
    weight[rows].square().sum().backward()
    optimizer.step()


def embedding_of_torch(table: Table, rows: torch.Tensor) -> None:
    module = torch.nn.Embedding.from_pretrained(table.embedding, freeze=False, sparse=True)
    optimizer = torch.optim.SparseAdam(list(module.parameters()))
    module(rows).sum().backward()
    optimizer.step()


def then_marked(table: Table, rows: torch.Tensor) -> None:
    """Marks of other rows do not hide it."""
    table.embedding.mul_(1.5)
    table.lookup(torch.arange(5))
    table.touch(rows)
    table.update(rows, lambda values: values.embedding.add_(1.0))


def then_grown(table: Table, rows: torch.Tensor) -> None:
    """The column that was written is gone at the next cut."""
    table.embedding.mul_(1.5)
    first = torch.arange(10_000, 10_000 + 1000)
    for ids in first.split(ROWS):
        table.lookup(ids)


def in_an_update(table: Table, rows: torch.Tensor) -> None:
    """Versions move while the table writes itself."""
    live = table.embedding

    def write(values: Any) -> None:
        values.embedding += 1.0
        live.mul_(1.5)

    table.update(rows, write)


WRITES = [
    kept_rows, whole_column, slot, view, detached, without_gradients, in_inference_mode, initialized,
    optimizer_of_torch, embedding_of_torch, then_marked, then_grown, in_an_update,
]  # fmt: skip
KINDS = ["full", "delta"]


@pytest.mark.filterwarnings("ignore:cache of table")
@pytest.mark.parametrize(("write", "kind"), slow_but_for_a_share(product(WRITES, KINDS), "writes of others", every=2))
def test_saves_hold_what_others_have_written(table: Table, write: Any, kind: Any, tmp_path: Path) -> None:
    with Saver(path=tmp_path, hashtables={"t": table}, deltas=ALWAYS) as saver:
        for step in (1, 2):
            save(saver, step, kind="full")
        for step in (3, 4, 5):
            rows = table.lookup(torch.arange(10))
            future = saver.save_async(10 * step, kind=kind)
            before = rows_of(table)
            write(table, rows)
            after = rows_of(table)
            future.result(60)
            assert loaded(tmp_path, 10 * step) == before
            save(saver, 10 * step + 1, kind=kind)
            assert loaded(tmp_path, 10 * step + 1) == after != before


def test_a_delta_compares_a_table_that_others_write(table: Table, tmp_path: Path) -> None:
    """From the second one on: before that, nobody knew that it would have to."""
    with Saver(path=tmp_path, hashtables={"t": table}, deltas=ALWAYS) as saver:
        save(saver, 1)
        written = []
        for step in range(2, 6):
            rows = table.lookup(torch.arange(10 * step, 10 * step + 10), insert=False)
            table.embedding[rows[:3]] = float(-step)
            table.remove(torch.tensor([200 + step]))
            result = save(saver, step)
            written.append((result.kind, result.rows_count))
            assert loaded(tmp_path, step) == rows_of(table)
    assert written == [("delta", ROWS - 1), ("delta", 3), ("delta", 3), ("delta", 3)]


def test_marks_count_again_after_the_copy(table: Table, tmp_path: Path) -> None:
    with Saver(path=tmp_path, hashtables={"t": table}) as saver:
        copied = []
        for step in range(8):
            if step == 3:
                table.embedding[table.lookup(torch.tensor([7]))] = 5.0
            else:
                table.update(table.lookup(torch.tensor([step])), lambda rows: rows.embedding.add_(1.0))
            copied.append(save(saver, step).rows_copied)
            assert loaded(tmp_path, step) == rows_of(table)
    assert copied == [ROWS, 1, 1, ROWS, 1, 1, 1, 1]


def test_each_of_two_savers_notices(table: Table, tmp_path: Path) -> None:
    with (
        Saver(path=tmp_path / "a", hashtables={"t": table}) as first,
        Saver(path=tmp_path / "b", hashtables={"t": table}, deltas=ALWAYS) as second,
    ):
        for step in (1, 2):
            save(first, step)
            save(second, step)
        table.embedding.neg_()
        save(first, 3)  # Notices it, and the other one has to know all the same.
        table.update(table.lookup(torch.tensor([3])), lambda rows: rows.embedding.add_(1.0))
        save(second, 3)
        save(first, 4)
        for path, step in (("a", 4), ("b", 3)):
            assert loaded(tmp_path / path, step) == rows_of(table)


def test_one_warning_names_the_faster_call(table: Table, tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as caught, Saver(path=tmp_path, hashtables={"t": table}) as saver:
        warnings.simplefilter("always")
        for step in range(6):
            table.embedding.mul_(0.5)
            assert (step < 2) == (not caught), "nothing is lost before an arena could be brought up to date"
            saver.save_async(step).result(60)  # The warning names the file that calls.
    found = [warning for warning in caught if "written in place" in str(warning.message)]
    messages = [str(warning.message) for warning in found]
    assert [warning.filename for warning in found] == [__file__]
    assert "['embedding'] of table 't'" in messages[0]
    assert "table.update(rows, function)" in messages[0]


def test_a_program_that_turns_the_warning_into_an_error_can_go_on(table: Table, tmp_path: Path) -> None:
    with Saver(path=tmp_path, hashtables={"t": table}) as saver, warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in (1, 2):
            save(saver, step)
        table.embedding.mul_(0.5)
        with pytest.raises(RuntimeWarning, match="written in place"):
            saver.save_async(3)
        save(saver, 4)
        assert loaded(tmp_path, 4) == rows_of(table)


@pytest.mark.parametrize("clear", [True, False])
def test_a_load_is_no_write_of_others(table: Table, clear: bool, tmp_path: Path) -> None:
    """Marks count again right after it."""
    with Saver(path=tmp_path, hashtables={"t": table}) as saver:
        for step in (1, 2):
            save(saver, step)
        table.embedding.mul_(0.5)
        Loader(tmp_path, {"t": table}, step=1, merge=not clear).load()
        assert [save(saver, step).rows_copied for step in (3, 4)] == [ROWS, 0]
        table.update(table.lookup(torch.tensor([3])), lambda rows: rows.embedding.add_(1.0))
        assert save(saver, 5).rows_copied == 1
        assert loaded(tmp_path, 5) == rows_of(table)


def test_our_modules_and_optimizers_are_no_others(table: Table, tmp_path: Path) -> None:
    module = asyncckpt.nn.HashEmbedding(table)
    optimizer = asyncckpt.optim.SparseAdagrad(module, lr=0.1)
    with warnings.catch_warnings(), Saver(path=tmp_path, hashtables={"t": table}) as saver:
        warnings.simplefilter("error")
        for step in range(6):
            module(torch.tensor([step, 500 + step])).sum().backward()
            future = saver.save_async(step)
            optimizer.step()  # Rows that were looked up before the save.
            result = future.result(60)
            assert result.rows_copied <= (ROWS + 2 if step < 2 else 6)
        table.remove(torch.tensor([1]))
        table.insert(torch.tensor([1]), torch.ones(1, 4))
        save(saver, 6)
        assert loaded(tmp_path, 6) == rows_of(table)
