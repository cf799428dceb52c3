"""Files of torch.save come in as the same dict, and go out for torch.load with `weights_only`."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import asyncckpt
from asyncckpt.errors import ConflictError, CorruptError, UnsupportedError
from asyncckpt.formats import torch_file
from tests.formats.states import same, tree_state


def test_a_file_comes_in_as_the_same_dict(tmp_path: Path) -> None:
    state = tree_state()
    torch.save(state, tmp_path / "state.pt")
    result = torch_file.import_checkpoint(tmp_path / "state.pt", tmp_path / "run", step=7)
    assert (result.step, result.kind) == (7, "full")
    found = asyncckpt.load(tmp_path / "run")
    assert same(found, state)
    assert found["tied"]["head"] is found["tied"]["embedding"]
    assert asyncckpt.verify(tmp_path / "run").strays == ()


def test_a_checkpoint_goes_out_as_the_same_tree(tmp_path: Path) -> None:
    state = tree_state()
    asyncckpt.save(tmp_path / "run", state, step=3)
    report = torch_file.export_checkpoint(tmp_path / "run", tmp_path / "below" / "state.pt")
    found = torch.load(tmp_path / "below" / "state.pt", weights_only=True)
    assert same(found, asyncckpt.load(tmp_path / "run"))
    assert same(found, state)
    assert found["tied"]["head"].data_ptr() == found["tied"]["embedding"].data_ptr()
    assert (report.step, len(report.tensors), report.left_out) == (3, 20, ())
    assert report.bytes_written == os.path.getsize(tmp_path / "below" / "state.pt")
    assert [path.name for path in (tmp_path / "below").iterdir()] == ["state.pt"]


def test_an_optimizer_goes_on_from_a_file(tmp_path: Path) -> None:
    """Its state has numbers as keys, which DCP turns into text."""
    asyncckpt.save(tmp_path / "run", tree_state())
    torch_file.export_checkpoint(tmp_path / "run", tmp_path / "state.pt")
    optimizer = torch.optim.AdamW(torch.nn.Linear(5, 3).parameters())
    optimizer.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True)["optimizer"])
    assert same(optimizer.state_dict(), asyncckpt.load(tmp_path / "run")["optimizer"])


def test_parameters_and_steps_and_numpy(tmp_path: Path) -> None:
    torch.save({"w": torch.nn.Parameter(torch.ones(2))}, tmp_path / "state.pt")
    assert torch_file.import_checkpoint(tmp_path / "state.pt", tmp_path / "run").step == 0
    assert same(asyncckpt.load(tmp_path / "run"), {"w": torch.ones(2)})
    asyncckpt.save(tmp_path / "run", {"a": np.arange(3, dtype=np.int16), "n": np.float32(2.5)}, step=4)
    torch_file.export_checkpoint(tmp_path / "run", tmp_path / "four.pt")
    torch_file.export_checkpoint(tmp_path / "run", tmp_path / "zero.pt", step=0)
    found = torch.load(tmp_path / "four.pt", weights_only=True)
    assert same(found, {"a": torch.arange(3, dtype=torch.int16), "n": 2.5})
    assert list(torch.load(tmp_path / "zero.pt", weights_only=True)) == ["w"]
    with pytest.raises(ConflictError, match="step 4"):
        torch_file.import_checkpoint(tmp_path / "state.pt", tmp_path / "run", step=4)


def test_views_of_one_memory_as_other_dtypes_go_out(tmp_path: Path) -> None:
    whole = torch.arange(4.0)
    state = {"a": whole, "b": whole.view(torch.int32), "c": whole[1:], "n": [whole.view(torch.uint8)]}
    asyncckpt.save(tmp_path / "run", state)
    torch_file.export_checkpoint(tmp_path / "run", tmp_path / "out.pt")
    assert same(torch.load(tmp_path / "out.pt"), state)


def test_tables_are_left_out_and_named(tmp_path: Path) -> None:
    table = asyncckpt.HashTable("user", 2)
    table.insert(torch.arange(3), torch.ones(3, 2))
    asyncckpt.save(tmp_path / "run", {"x": torch.ones(2)}, hashtables={"user": table})
    with pytest.warns(RuntimeWarning, match=r"tables \['user'\] are left out"):
        report = torch_file.export_checkpoint(tmp_path / "run", tmp_path / "state.pt")
    assert report.tables == ("user",)
    assert same(torch.load(tmp_path / "state.pt", weights_only=True), {"x": torch.ones(2)})


def test_what_torch_would_not_give_back_is_refused(tmp_path: Path) -> None:
    asyncckpt.save(tmp_path / "run", {"x": torch.ones(2), "span": {"of": range(3)}})
    with pytest.raises(UnsupportedError, match=r"value 'span\.of' cannot be in a file that torch\.load reads"):
        torch_file.export_checkpoint(tmp_path / "run", tmp_path / "state.pt")
    table = asyncckpt.HashTable("user", 2)
    asyncckpt.save(tmp_path / "tables", {}, hashtables={"user": table})
    with pytest.raises(UnsupportedError, match="nothing but tables"):
        torch_file.export_checkpoint(tmp_path / "tables", tmp_path / "state.pt")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "tables"]


def test_what_is_not_read_back_as_written_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.save
    asyncckpt.save(tmp_path / "run", {"a": {"x": torch.ones(100)}, "n": 1})
    for changed in ({"a": {"x": torch.zeros(100)}, "n": 1}, {"a": {"x": torch.ones(100)}, "n": 2}, {"n": 1}):

        def damage(state: Any, out: Any, _changed: Any = changed) -> None:
            real(_changed if isinstance(state, dict) else state, out)

        with monkeypatch.context() as patched:
            patched.setattr(torch, "save", damage)
            with pytest.raises(CorruptError, match="not read back as it was written"):
                torch_file.export_checkpoint(tmp_path / "run", tmp_path / "state.pt")
        assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says how much memory has no file")
def test_tensors_take_no_memory_of_the_process(tmp_path: Path) -> None:
    """What is imported is mapped, and what is exported is in a file: neither adds to the memory that has no file."""
    size = 64 << 20  # Above what malloc takes from memory that was free before.
    torch.save({"w": torch.ones(size, dtype=torch.uint8)}, tmp_path / "state.pt")
    file, run, none = tmp_path / "state.pt", tmp_path / "run", {"durability": "none", "verify": False}
    torch_file.import_checkpoint(file, tmp_path / "warm", **none)  # The chunk buffers stay.
    went_in = anonymous_growth(lambda: torch_file.import_checkpoint(file, run, **none))
    went_out = anonymous_growth(lambda: torch_file.export_checkpoint(run, tmp_path / "out.pt", durability="none"))
    # Memory that was freed before may go back meanwhile.
    control = anonymous_growth(lambda: torch.ones(4 * size, dtype=torch.uint8))
    assert went_in < size // 2
    assert went_out < size // 2
    assert control > size // 2


def anonymous_growth(call: Any) -> int:
    """The most memory without a file that a call added to that of the process, looked at by another thread."""
    ended, found = threading.Event(), [anonymous_bytes()]

    def look() -> None:
        while not ended.wait(0.002):
            found.append(anonymous_bytes())

    looking = threading.Thread(target=look)
    looking.start()
    try:
        made = call()
        found.append(anonymous_bytes())  # With what it returns, whenever the other thread had a turn.
        del made
    finally:
        ended.set()
        looking.join()
    return max(found) - found[0]


def anonymous_bytes() -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.split("RssAnon:")[1].split()[0]) << 10
