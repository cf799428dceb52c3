"""Acknowledged means readable: what a limit of the reader would refuse, every writer refuses, and leaves nothing.

Every case goes in steps from below a limit to above it. Limits that are too large for a test are lowered, in the one
module where writers and readers find them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
import asyncckpt.plan.image
from asyncckpt.errors import CheckpointError, CorruptError
from asyncckpt.format import limits
from asyncckpt.model.sharded import Piece, Sharded
from tests.limits.writers import WRITERS, InBackground, LimitWriter, State, leaves_of
from tests.shares import share_of

pytestmark = [pytest.mark.filterwarnings("ignore:torch.distributed is")]


@dataclass(frozen=True)
class LimitCase:
    """States of sizes around a limit. names: what a refusal says; in_call: a Saver refuses in the call itself."""

    name: str
    make: Callable[[int], State]
    sizes: Sequence[int]
    lowered: dict[str, int] = field(default_factory=dict)
    names: str = ""
    in_call: bool = True
    skipped: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name


def nested(depth: int) -> State:
    inner: Any = torch.arange(3)
    for _ in range(depth):
        inner = {"k": inner}
    return {"deep": inner}


def tensors(count: int, name: str = "t") -> State:
    return {f"{name}{number}": torch.full((2,), number) for number in range(count)}


DCP = ("dcp", "dcp staged")
IN_CALL = ("async", "first touch")
STRATEGIES = ("strategies", "remove")
NO_PIECES = (*DCP, *STRATEGIES)  # They take whole tensors, or pieces of another kind.
CASES = [
    LimitCase("dimensions", lambda n: {"wide": torch.ones([1] * n)}, range(62, 68), names="wide"),
    LimitCase(
        "dimensions of pairs",
        lambda n: {"wide": torch.full([1] * n, 1j, dtype=torch.complex128)},
        range(61, 67),
        names="wide",
    ),
    LimitCase("array bytes", lambda n: {"wide": torch.empty((0, 2**61 + n))}, range(-2, 3), names="wide"),
    LimitCase(
        "values",
        lambda n: {"x": torch.ones(2), "v": {f"v{number}": number for number in range(n)}},
        [14, 15, 18, 19, 20, 21, 22, 30],
        {"VALUES_MAX": 20},
        names="v",
    ),
    LimitCase(
        "bytes of the manifest",
        lambda n: {"x": torch.ones(2), "v": "x" * n},
        [*range(1_000, 9_000, 1_500), 20_000],
        {"MANIFEST_BYTES_MAX": 9_000},
        names="manifest",
        in_call=False,
    ),
    LimitCase(
        "one text over the bytes of the manifest",
        lambda n: {"x": torch.ones(2), "v": "x" * n},
        [100, 20_000],
        {"MANIFEST_BYTES_MAX": 9_000},
        names="v",
        skipped=(*DCP, *STRATEGIES),
    ),
    LimitCase(
        "bytes of a header", lambda n: tensors(n, "n" * 500), range(4, 22, 3), {"HEADER_BYTES_MAX": 8192}, names="nnn"
    ),
    LimitCase("arrays of a header", tensors, range(4, 14), {"HEADER_ARRAYS_MAX": 9}),
    LimitCase("blocks", tensors, range(4, 14), {"BLOCKS_MAX": 9}),
    LimitCase("files", tensors, range(1, 8), {"FILES_MAX": 4}),
    LimitCase("depth of the tree", nested, [60, 63, 64, 65, 254, 255, 256, 257, 258], names="deep"),
    LimitCase("depth of the tree, lowered", nested, range(4, 16), {"TREE_DEPTH_MAX": 9}),
    LimitCase(
        "depth of values",
        lambda n: {"x": torch.ones(2), "v": in_tuples("text", n)},
        range(5, 10),
        {"VALUE_DEPTH_MAX": 7},
        skipped=("async", "blocking", "filter_func", "row filters", "first touch", "delta", "compaction", *STRATEGIES),
    ),
    LimitCase(
        "bits of keys",
        lambda n: {"keys": {2**n: torch.ones(1)}},
        [12_990, 12_999, 13_000, 13_010, 20_000],
        skipped=(*DCP, *STRATEGIES),
        names="keys",
    ),
    LimitCase(
        "unicode of keys",
        lambda n: {"keys": {chr(0xD800 + n): 1, "other": torch.ones(1)}},
        [-1, 0],
        skipped=STRATEGIES,
    ),
    LimitCase(
        "NaN as a key",
        lambda n: {"keys": {[0.5, math.nan][n]: torch.ones(1)}},
        [0, 1],
        skipped=(*DCP, *STRATEGIES),
        names="keys",
    ),
    LimitCase(
        "coverage",
        lambda n: {"cut": cut_up(n)},
        range(10, 60, 7),
        {"COVERAGE_WORK_MAX": 150},
        names="cut",
        skipped=NO_PIECES,
    ),
    LimitCase("pieces that overlap", lambda n: {"cut": cut_up(4, shift=n)}, [0, 1], names="cut", skipped=NO_PIECES),
]


def in_tuples(value: Any, depth: int) -> Any:
    for _ in range(depth):
        value = (value,)
    return value


def cut_up(count: int, *, shift: int = 0) -> Sharded:
    """Stairs: pieces that no cut separates in few slabs. shift: the last one lies where another is."""
    whole = torch.arange(count * (count + 1)).view(count + 1, count)
    pieces = []
    for at in range(count):
        pieces += [Piece(whole[: at + 1, at : at + 1], (0, at)), Piece(whole[at + 1 :, at : at + 1], (at + 1, at))]
    if shift:
        pieces[-1] = Piece(pieces[-1].tensor, (0, count - 1))
    return Sharded(whole_shape=tuple(whole.shape), dtype=whole.dtype, pieces=tuple(pieces))


def whole_of(state: State) -> State:
    """The state with tensors in place of pieces, as a reader wants it."""
    made = dict(state)
    for name, value in state.items():
        if isinstance(value, Sharded):
            made[name] = torch.zeros(value.whole_shape, dtype=value.dtype)
            for piece in value.pieces:
                spans = zip(piece.begin, piece.tensor.shape, strict=True)
                made[name][tuple(slice(at, at + size) for at, size in spans)] = piece.tensor
    return made


def tried(case: LimitCase, writer: LimitWriter, folder: Path, size: int) -> bool:
    """Whether a state of this size was acknowledged; then it is verified and loaded, else there is nothing of it."""
    state = case.make(size)
    root = folder / writer.root
    raised = error_of(writer, folder, state)
    if raised is not None:
        error = raised.error if isinstance(raised, InBackground) else raised
        assert isinstance(error, CheckpointError), repr(error)
        assert not isinstance(error, CorruptError), repr(error)
        assert case.names in str(error)
        assert not (case.in_call and writer.name in IN_CALL and isinstance(raised, InBackground)), repr(error)
        check_nothing_left(root)
        if writer.step not in steps_of(root):
            return False  # Else it is there, and what was to be made of it was refused.
    asyncckpt.verify(root)
    check_loaded(writer.load(folder, whole_of(state)), leaves_of(whole_of(state)))
    return True


def error_of(writer: LimitWriter, folder: Path, state: State) -> BaseException | None:
    try:
        writer.save(folder, state)
    except BaseException as error:
        return error
    return None


def steps_of(root: Path) -> list[int]:
    return asyncckpt.list_steps(root) if (root / "manifests").is_dir() else []


def check_nothing_left(root: Path) -> None:
    """What is there can be read, and there is no file that no manifest names."""
    steps = steps_of(root)
    for step in steps:
        asyncckpt.verify(root, step)
    assert len(list((root / "data").glob("*"))) == len(steps)
    assert len(list((root / "manifests").glob("*"))) == len(steps)


def check_loaded(found: State, saved: State) -> None:
    for name, value in saved.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(found[name], value), name
        else:
            assert (type(found[name]), found[name]) == (type(value), value), name


def pairs() -> Iterator[Any]:
    for case in CASES:
        for writer in WRITERS:
            if writer.name not in case.skipped:
                yield pytest.param(case, writer, id=f"{case.name}-{writer.name}")


@pytest.mark.parametrize(("case", "writer"), share_of(pairs(), "pairs", by=lambda pair: pair.values[0].name))
def test_acknowledged_means_readable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: LimitCase, writer: LimitWriter
) -> None:
    for name, value in case.lowered.items():
        monkeypatch.setattr(limits, name, value)
    if case.name == "files":
        monkeypatch.setattr(asyncckpt.plan.image, "FILE_TARGET_BYTES", 1)
    outcomes = [tried(case, writer, tmp_path / str(size), size) for size in case.sizes]
    assert True in outcomes
    assert False in outcomes
