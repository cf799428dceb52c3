"""A delta whose base was damaged, removed or replaced is refused with an error that prints the chain; nothing loads."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import asyncckpt
from tests.deltas.table_world import TableWorld, new_table
from tests.deltas.test_lost_parents import remove_manifest
from tests.worlds.directories import document_of, flip_byte, manifest_path
from tests.worlds.rows import rows_of

CHAIN = "chain 30 -> 20 -> 10 (full)"


def saved(root: Path, *, seed: int) -> None:
    """Steps 10 (full), 20 and 30 (deltas)."""
    world = TableWorld(new_table("t"))
    world.number = seed
    with asyncckpt.Saver(
        path=root, hashtables={"t": world.table}, deltas=asyncckpt.DeltaPolicy(bytes_share_max=1e9)
    ) as saver:
        world.insert(range(40))
        for step, kind in ((10, "full"), (20, "delta"), (30, "delta")):
            world.train(range(step // 10, 20))
            assert saver.save(step, kind=kind).kind == kind  # type: ignore[arg-type]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    saved(tmp_path / "checkpoints", seed=0)
    return tmp_path / "checkpoints"


def files(root: Path, step: int) -> list[Path]:
    return [root / file["path"] for file in document_of(root, step)["files"]]


def replace_step(root: Path, step: int) -> None:
    """Put a checkpoint of another training run in the place of a step."""
    other = root.parent / "other"
    saved(other, seed=1000)
    shutil.copy(manifest_path(other, step), manifest_path(root, step))
    for file in files(other, step):
        target = root / file.relative_to(other)
        target.parent.mkdir(exist_ok=True)
        shutil.copy(file, target)


def damage_manifest(root: Path, step: int) -> None:
    raw = bytearray(manifest_path(root, step).read_bytes())
    raw[len(raw) // 2] ^= 1
    manifest_path(root, step).write_bytes(raw)


def remove_file(root: Path, step: int) -> None:
    files(root, step)[0].unlink()


def cut_file(root: Path, step: int) -> None:
    file = files(root, step)[0]
    file.write_bytes(file.read_bytes()[:-1])


def damage_file(root: Path, step: int) -> None:
    """A bit of the last row of the last column."""
    spoilt = next(block for block in document_of(root, step)["blocks"] if block["role"] == "id")
    file = root / document_of(root, step)["files"][spoilt["file"]]["path"]
    flip_byte(file, spoilt["offset"])


def assert_refused(root: Path, *, told: str) -> None:
    table = new_table("t")
    table.insert(torch.tensor([5]), torch.ones(1, 2))
    before = rows_of(table)
    for refused in (
        lambda: asyncckpt.Loader(root, hashtables={"t": table}).load(),
        lambda: asyncckpt.verify(root, 30),
        lambda: asyncckpt.compact(root, 30),
    ):
        with pytest.raises(asyncckpt.CorruptError) as caught:
            refused()
        print(caught.value)
        assert told in str(caught.value)
    assert rows_of(table) == before, "a load that was refused changed the table"


@pytest.mark.parametrize("step", [10, 20])
@pytest.mark.parametrize(
    ("spoil", "what"),
    [(replace_step, "was rewritten"), (remove_manifest, "is missing"), (damage_manifest, "is damaged")],
)
def test_spoilt_base_is_named_with_the_chain(
    spoil: Callable[[Path, int], None], what: str, step: int, root: Path
) -> None:
    spoil(root, step)
    assert_refused(root, told=CHAIN)
    with pytest.raises(asyncckpt.CorruptError, match=f"parent step {step} {what}"):
        asyncckpt.Loader(root, hashtables={"t": new_table("t")}).load()
    below = 20 if step == 10 else 10
    if below == 10:
        asyncckpt.Loader(root, hashtables={"t": new_table("t")}, step=below).load()


@pytest.mark.parametrize("step", [10, 20])
@pytest.mark.parametrize("spoil", [remove_file, cut_file, damage_file])
def test_spoilt_file_of_a_base_is_named(spoil: Callable[[Path, int], None], step: int, root: Path) -> None:
    spoil(root, step)
    assert_refused(root, told=f"step {step}")
