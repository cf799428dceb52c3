"""A conversion that was killed goes on where it was: the same bytes, and nothing that is sound is written again."""

from __future__ import annotations

import importlib.util
import os
import random
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt import system
from asyncckpt.errors import CorruptError
from asyncckpt.formats import hf, parquet, recis, recsdk
from asyncckpt.formats.block_format import BlockFormat
from asyncckpt.formats.conversion import Conversion
from asyncckpt.shard.files import ShardTarget
from tests.worlds.directories import flip_byte

CHUNK = 1 << 16
KILLS = 3
FORMATS: dict[str, tuple[BlockFormat, dict[str, Any]]] = {
    "hf": (hf.CONVERTER, {"shard_size": 200_000}),
    "recis": (recis.CONVERTER, {"shards": 2, "optimizer": "sparse_adam"}),
    "recsdk": (recsdk.CONVERTER, {"shards": 2}),
}
SOURCES = dict(FORMATS)
if importlib.util.find_spec("pyarrow") is not None:
    SOURCES["parquet"] = (parquet.CONVERTER, {})

pytestmark = [
    pytest.mark.filterwarnings("ignore:(tables|tensors) .* are left out"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="a kill is one of a forked process"),
]
Call = Callable[[], Any]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncckpt.staging.chunks.CHUNK_BYTES", CHUNK)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Tensors of several chunks, and a table whose rows come out of a delta too."""
    path, generator = tmp_path / "run", torch.Generator().manual_seed(1)
    table = asyncckpt.HashTable("user", 8)
    state = {name: torch.randn(30_000, generator=generator) for name in ("a", "b", "c")}
    table.insert(torch.arange(9_000), torch.randn(9_000, 8, generator=generator))
    with asyncckpt.Saver(path=path, tensors=state, hashtables={"user": table}, deltas=asyncckpt.DeltaPolicy()) as saver:
        saver.save(step=1)
        table.insert(torch.arange(8_000, 10_000), torch.randn(2_000, 8, generator=generator))
        saver.save(step=2)
    return path


def asked(source: Path, target: Path) -> Conversion:
    return Conversion.of(source, target, parallel=2)


def killed_behind(writes: int, call: Call) -> bool:
    """Call in a forked process that is killed behind so many writes; return whether it was."""
    pid = os.fork()
    if not pid:
        try:
            _kill_behind(writes)
            call()
        finally:
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def _kill_behind(writes: int) -> None:
    write, left = ShardTarget.write, iter(range(writes))

    def last(self: ShardTarget, *arguments: Any, **more: Any) -> None:
        write(self, *arguments, **more)
        if next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)

    ShardTarget.write = last  # type: ignore[method-assign]


def contents(folder: Path) -> dict[str, bytes]:
    """All files, but for what differs with every attempt."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "manifests" not in path.parts and path.name != "LOCK":
            name = re.sub(r"(\d{12})-[0-9a-f]{32}", r"\1", str(path.relative_to(folder)))
            found[name] = re.sub(rb'("asyncckpt.attempt":"|"attempt":")[0-9a-f]{32}', rb"\1", path.read_bytes())
    return found


def written_by(call: Call, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], Any]:
    """Return the bytes of each chunk that a call writes, and what it returns."""
    sizes: list[int] = []
    write = ShardTarget.write

    def count(self: ShardTarget, shard: Any, address: int, size: int, *, offset: int) -> None:
        sizes.append(size)
        write(self, shard, address, size, offset=offset)

    with monkeypatch.context() as patched:
        patched.setattr(ShardTarget, "write", count)
        return sizes, call()


def points(kind: str, writes: int) -> Iterator[int]:
    chosen = random.Random(kind).sample(range(1, writes), min(KILLS, writes - 1))
    return iter(sorted(chosen))


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORMATS)
def test_an_export_that_was_killed_goes_on(
    kind: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(*FORMATS[kind], "export", kind, run, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("kind", SOURCES)
def test_an_import_that_was_killed_goes_on(
    kind: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    converter, options = SOURCES[kind]
    converter.export_with(asked(run, tmp_path / "source"), **options)
    check(converter, {}, "import", kind, tmp_path / "source", tmp_path, monkeypatch)


def check(
    converter: BlockFormat,
    options: dict[str, Any],
    what: str,
    kind: str,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plans = {"export": converter.plan_export, "import": converter.look_into}[what]
    does = {"export": converter.export_with, "import": converter.import_with}[what]
    whole = tmp_path / "whole" / "out"
    chunks, _ = written_by(lambda: does(asked(source, whole), **options), monkeypatch)
    for number, writes in enumerate(points(kind, len(chunks))):
        target = tmp_path / str(number) / "out"

        def convert(target: Path = target) -> dict[str, Any]:
            return dict(does(asked(source, target), **options))

        assert killed_behind(writes, convert)
        assert plans(asked(source, target), **options)["reused"] == sum(chunks[: writes + 1])
        if writes + 3 < len(chunks):
            assert killed_behind(1, convert)
        again, facts = written_by(convert, monkeypatch)
        assert facts["reused"] > 0
        # The chunk in which what is reused ends is written whole.
        assert sum(again) < sum(chunks) - facts["reused"] + CHUNK
        assert contents(target) == contents(whole)
        assert [path.name for path in target.parent.iterdir()] == ["out"]


@pytest.mark.slow
def test_what_is_damaged_or_of_another_source_is_written_anew(run: Path, tmp_path: Path) -> None:
    converter, options = FORMATS["hf"]

    def convert(target: Path, source: Path = run) -> dict[str, Any]:
        return converter.export_with(asked(source, target), **options)

    convert(tmp_path / "whole")
    for damage in ("bytes", "notes", "torn", "second name", "shorter"):
        target = tmp_path / damage / "out"
        assert killed_behind(3, lambda target=target: convert(target))
        [left] = target.parent.iterdir()
        notes, [file] = left / ".written", left.glob("model-00001-*")
        if damage == "bytes":
            flip_byte(file, 70_000)
        elif damage == "notes":
            notes.write_bytes(notes.read_bytes().replace(b"[", b"{"))
        elif damage == "torn":
            notes.write_bytes(notes.read_bytes()[:-3])
        elif damage == "second name":
            os.link(file, tmp_path / "second")
        else:
            os.truncate(file, 10)
        try:
            convert(target)
        except CorruptError:
            assert damage == "second name"
            continue
        assert contents(target) == contents(tmp_path / "whole")
    assert (tmp_path / "second").read_bytes()[:100]

    asyncckpt.save(run, {"a": torch.zeros(60_000), "b": torch.zeros(60_000)}, step=3)
    other = tmp_path / "other" / "out"
    assert killed_behind(3, lambda: convert(other))
    asyncckpt.save(run, {"a": torch.ones(60_000), "b": torch.ones(60_000)}, step=4)
    assert converter.plan_export(asked(run, other), **options)["reused"] == 0
    assert convert(other)["reused"] == 0


def test_an_import_of_a_source_that_changed_begins_anew(run: Path, tmp_path: Path) -> None:
    converter, _ = SOURCES["hf"]
    source, target = tmp_path / "source", tmp_path / "target"
    converter.export_with(asked(run, source))
    assert killed_behind(3, lambda: converter.import_with(asked(source, target)))
    assert converter.look_into(asked(source, target))["reused"] > 0
    [file] = source.glob("*.safetensors")
    raw, status = bytearray(file.read_bytes()), file.stat()
    raw[-1] ^= 1
    file.write_bytes(raw)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert converter.look_into(asked(source, target))["reused"] == 0
    assert converter.import_with(asked(source, target))["reused"] == 0
    assert asyncckpt.load(target)["c"].numpy().tobytes()[-1] == raw[-1]


def test_two_at_once_do_not_share_what_is_written(run: Path, tmp_path: Path) -> None:
    """What another process still writes is not gone on with."""
    converter, options = FORMATS["hf"]
    target = tmp_path / "at once" / "out"
    assert killed_behind(3, lambda: converter.export_with(asked(run, target), **options))
    [left] = target.parent.iterdir()
    with (left / ".written").open("r+b") as held:
        system.lock(held.fileno())
        assert converter.export_with(asked(run, target), **options)["reused"] == 0
    assert left.is_dir()
