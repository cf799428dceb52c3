"""Save to a disk, upload, and read from the store alone: the shortest way through all of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import asyncckpt
from asyncckpt.checkpoints import summaries
from asyncckpt.cli.findings import ExitCode
from asyncckpt.dcp import StorageReader
from asyncckpt.inspection import compare
from asyncckpt.model.store_url import StoreUrl
from asyncckpt.observe.serve import Watched, server_of
from asyncckpt.storage.object_store import ObjectStore
from tests.cloud import seaweed
from tests.cloud.fault_proxy import FaultProxy, Mishap
from tests.program import invoke

MIB = 1 << 20


def state(seed: int, *, mib: int = 3) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return {
        "weight": torch.randn(mib * MIB // 8, generator=made),
        "bias": torch.randn(1000, generator=made),
        "other": torch.randn(mib * MIB // 8, generator=made).to(torch.bfloat16),
    }


def saved(path: Path, url: str, *, steps: int = 1) -> dict[str, torch.Tensor]:
    tensors = state(0)
    with asyncckpt.Saver(path=path, tensors=tensors, upload=url) as saver:
        for step in range(steps):
            tensors["weight"] += step
            saver.save_async(step).wait_uploaded()
    return tensors


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("unsigned", ["true", "false"])
def test_bodies_are_signed_unless_the_environment_says_else(
    unsigned: str, proxy: FaultProxy, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_UNSIGNED_PAYLOAD", unsigned)
    tensors = saved(tmp_path / "ckpt", url)
    asyncckpt.save(f"{url}-direct", tensors)
    for place in (url, f"{url}-direct"):
        assert_equal(asyncckpt.load(place), tensors)
    puts = [request.headers["x-amz-content-sha256"] for request in proxy.of_kind("put")]
    assert {found == "UNSIGNED-PAYLOAD" for found in puts} == {unsigned == "true"}


def test_what_was_uploaded_is_what_was_saved(owner: seaweed.Server, url: str, tmp_path: Path) -> None:
    tensors = saved(tmp_path / "ckpt", url, steps=2)
    target = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    report = asyncckpt.Loader(url, tensors=target, verify="before").load()
    assert_equal(target, tensors)
    assert (report.step, str(report.path)) == (1, url)
    assert_equal(asyncckpt.load(url), tensors)
    assert asyncckpt.list_steps(url) == [0, 1]
    assert asyncckpt.verify(url).step == 1
    assert asyncckpt.describe(url, 0).tensors_count == 3
    assert summaries(url).keys() == {0, 1}
    assert compare(tmp_path / "ckpt", 1, 1, other_path=url).is_same
    assert [*compare(url, 0, 1).tensors] == ["weight"]


def test_a_saver_writes_to_the_store_itself(owner: seaweed.Server, url: str) -> None:
    tensors, table = state(0), asyncckpt.HashTable("user", 4)
    table.lookup(torch.arange(1000), insert=True)
    with asyncckpt.Saver(path=url, hashtables={"user": table}, tensors=tensors, keep=2) as saver:
        for step in range(5):
            tensors["weight"] += step
            table.lookup(torch.arange(1000 + step), insert=True)
            saver.save_async(step, kind="delta" if step % 2 else "full").result()
    assert_equal(asyncckpt.load(url), tensors)
    assert asyncckpt.list_steps(url) == [2, 3, 4]  # 3 needs 2.
    loaded = asyncckpt.HashTable("user", 4)
    asyncckpt.Loader(url, hashtables={"user": loaded}, verify="before").load()
    assert len(loaded) == 1004


def test_tables_and_their_deltas_come_back(owner: seaweed.Server, url: str, tmp_path: Path) -> None:
    table = asyncckpt.HashTable("user", 4)
    with asyncckpt.Saver(path=tmp_path / "ckpt", hashtables={"user": table}, upload=url) as saver:
        table.lookup(torch.arange(1000), insert=True)
        saver.save(0, kind="full")
        table.lookup(torch.arange(1000, 1010), insert=True)
        saver.save(1, kind="delta")
        saver.save_async(2, kind="delta").wait_uploaded()
        assert asyncckpt.describe(url).parents == (1, 0)
        assert saver.compact().result().kind == "full"
        saver.wait_idle()
    assert asyncckpt.describe(url).compacted
    loaded = asyncckpt.HashTable("user", 4)
    for step in (1, 2):
        asyncckpt.Loader(url, hashtables={"user": loaded}, step=step).load()
        assert len(loaded) == 1010


async def test_a_store_is_followed(owner: seaweed.Server, url: str, tmp_path: Path) -> None:
    saved(tmp_path / "ckpt", url, steps=3)
    assert [update.step async for update in asyncckpt.follow(url, until=2)] == [0, 1, 2]


def test_dcp_loads_from_a_store(owner: seaweed.Server, url: str, tmp_path: Path) -> None:
    tensors = saved(tmp_path / "ckpt", url)
    target = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    dcp.load(target, storage_reader=StorageReader(url), no_dist=True)
    assert_equal(target, tensors)


def test_a_checkpointer_uploads_what_it_saves(owner: seaweed.Server, url: str, tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    with asyncckpt.Checkpointer(tmp_path / "ckpt", every=2, options={"upload": url}, model=model) as checkpointer:
        checkpointer.restore()
        for step in range(1, 4):
            checkpointer.step(step)
    assert asyncckpt.list_steps(url)[-1] == 3


def test_a_load_reads_little_more_than_it_needs(proxy: FaultProxy, url: str, tmp_path: Path) -> None:
    tensors = saved(tmp_path / "ckpt", url)
    proxy.requests.clear()
    target = {"other": torch.zeros_like(tensors["other"])}
    asyncckpt.Loader(url, tensors=target, strict=False).load()
    assert torch.equal(target["other"], tensors["other"])
    needed = target["other"].nbytes
    assert needed < sum(request.bytes_down for request in proxy.requests) < 1.1 * needed
    assert {request.method for request in proxy.requests} <= {"GET", "HEAD"}


def test_the_command_shows_what_is_in_a_store(owner: seaweed.Server, url: str, tmp_path: Path) -> None:
    saved(tmp_path / "ckpt", url)
    for command in (
        ["ls", url],
        ["show", url],
        ["tree", url],
        ["verify", url],
        ["diff", url, "0", "0"],
        ["report", url, "-o", str(tmp_path / "page.html")],
        ["doctor", url, "--mib", "6"],
    ):
        ran = subprocess.run([sys.executable, "-m", "asyncckpt", *command], capture_output=True, text=True, check=False)
        assert (ran.returncode, ran.stderr) == (0, ""), command
    assert url in ran.stdout or "same" in ran.stdout.lower()


def test_answers_in_json_name_the_url(owner: seaweed.Server, url: str) -> None:
    asyncckpt.save(url, {"x": torch.zeros(1)}, step=1)
    for command, *more in (["pin", "1"], ["unpin", "1"], ["prune", "--latest", "1"], ["gc"], ["rm", "1"]):
        assert json.loads(invoke(command, url, *more, "--json").stdout)["path"] == url


def test_a_doctor_who_is_refused_says_so_and_leaves_nothing(proxy: FaultProxy, url: str) -> None:
    proxy.fault = lambda request: Mishap(answer=(403, "AccessDenied")) if request.kind == "get" else None
    answer = invoke("doctor", url, "--mib", "1")
    assert (answer.exit_code, "AccessDenied" in answer.output) == (ExitCode.FAILED, True)
    assert ObjectStore(StoreUrl.of(url)).below("") == []


def test_a_store_is_watched(owner: seaweed.Server, url: str, tmp_path: Path) -> None:
    saved(tmp_path / "ckpt", url)
    _, facts = Watched(url).now()
    assert url in facts.decode()
    with server_of(url, port=0) as server:
        assert server.server_address[1] > 0


def test_what_is_no_directory_says_so(owner: seaweed.Server, url: str) -> None:
    with pytest.raises(asyncckpt.NotFoundError, match="no manifests"):
        asyncckpt.load(url)


def test_no_key_is_written_anywhere(owner: seaweed.Server, url: str, tmp_path: Path) -> None:
    saved(tmp_path / "ckpt", url)
    for file in (tmp_path / "ckpt").rglob("*"):
        if file.is_file():
            raw = file.read_bytes()
            assert not any(key.encode() in raw for key in (seaweed.OWNER.key, seaweed.OWNER.secret)), file


WITHOUT = """
import sys
sys.modules["obstore"] = None
import asyncckpt, torch
from asyncckpt.checkpoints import list_steps
for call in (
    lambda: asyncckpt.Loader("s3://bucket/run", tensors={}).load(),
    lambda: list_steps("s3://bucket/run"),
    lambda: asyncckpt.Saver(path=sys.argv[1], tensors={}, upload="s3://bucket/run"),
):
    try:
        call()
    except asyncckpt.UnsupportedError as error:
        assert "asyncckpt[cloud]" in str(error), error
    else:
        raise AssertionError("it was not refused")
asyncckpt.Saver(path=sys.argv[1], tensors={"a": torch.zeros(3)}).save(0)
"""


def test_without_the_extra_stores_are_refused_by_its_name(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", WITHOUT, str(tmp_path / "ckpt")], check=True)


def test_nothing_imports_the_extra_before_a_store_is_used(tmp_path: Path) -> None:
    program = (
        "import sys, torch, asyncckpt\n"
        f"asyncckpt.Saver(path={str(tmp_path / 'ckpt')!r}, tensors={{'a': torch.zeros(3)}}).save(0)\n"
        f"asyncckpt.load({str(tmp_path / 'ckpt')!r})\n"
        "sys.exit('obstore' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ})


def test_parts_of_many_tensors_are_put_together(owner: seaweed.Server, url: str, tmp_path: Path) -> None:
    tensors = {f"t{number}": torch.from_numpy(np.full(97, number, np.float32)) for number in range(500)}
    with asyncckpt.Saver(path=tmp_path / "ckpt", tensors=tensors, upload=url) as saver:
        saver.save_async(0).wait_uploaded()
    assert_equal(asyncckpt.load(url), tensors)


def test_an_object_without_bytes_is_damaged_and_a_load_falls_back(owner: seaweed.Server, url: str) -> None:
    """As `aws s3 sync` makes of a file that a crash has emptied: a range of it is refused."""
    for step in (1, 2):
        asyncckpt.save(url, {"x": torch.full((5,), float(step))}, step=step)
    store = ObjectStore(StoreUrl.of(url))
    (file,) = asyncckpt.describe(url, 2).files
    store.put(file, [b""], part_bytes=MIB, parallel=1)
    with pytest.raises(asyncckpt.CorruptError, match="wrong size"):
        asyncckpt.verify(url)
    assert invoke("verify", url).exit_code == ExitCode.DAMAGED
    target = torch.zeros(5)
    assert asyncckpt.Loader(url, tensors={"x": target}, fallback=True).load().step == 1
    assert target.eq(1).all()


def test_many_small_blocks_are_few_requests(proxy: FaultProxy, url: str) -> None:
    """Who reads one block behind the other: verify, diff, compactions, conversions."""
    tensors = {f"p{number}": torch.full((3,), float(number)) for number in range(300)}
    tables = {f"t{number}": asyncckpt.HashTable(f"t{number}", dim=2) for number in range(20)}
    for table in tables.values():
        table.insert(torch.arange(10), torch.rand(10, 2))
    with asyncckpt.Saver(path=url, tensors=tensors, hashtables=tables) as saver:
        saver.save(1)
        for tensor in tensors.values():
            tensor += 1
        saver.save(2)
    proxy.requests.clear()
    report = asyncckpt.verify(url)
    assert report.blocks_count == 340
    assert len(proxy.of_kind("get")) <= 8
    assert sum(request.bytes_down for request in proxy.of_kind("get")) < 1 * MIB
    proxy.requests.clear()
    assert len(compare(url, 1, 2).tensors) == 300
    assert len(proxy.of_kind("get")) <= 16
