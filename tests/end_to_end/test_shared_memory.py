"""Tensors that share memory: tied ones are stored once, and all of them share memory again when they come back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import asyncckpt
from asyncckpt.dcp import StorageReader
from asyncckpt.engine.load import whole_state
from asyncckpt.plan import leaf_facts
from tests.end_to_end.merged_ranks import save_each
from tests.end_to_end.trees import differences, live, shared_bytes
from tests.worlds.objects import Stateful, TiedWeights

ALWAYS = asyncckpt.DeltaPolicy(deltas_max=1000, bytes_share_max=1e9)


class ChannelsLast:
    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02, fused=True)
        self.state: dict[str, Any] = {"model": self.model, "optimizer": optimizer}

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.state["optimizer"].zero_grad()
            self.model(torch.arange(50.0).view(1, 2, 5, 5)).square().mean().backward()
            self.state["optimizer"].step()


def names_of(path: Path, step: int | None = None) -> list[str]:
    return [block.name for block in asyncckpt.describe(path, step).blocks]


def test_tied_weights_are_stored_once_and_come_back_tied(tmp_path: Path) -> None:
    asyncckpt.save(tmp_path / "d", {"model": TiedWeights(1.0), "n": 1})
    assert names_of(tmp_path / "d") == ["model.embed.weight"]
    assert asyncckpt.describe(tmp_path / "d").tied == {"model.lm_head.weight": "model.embed.weight"}
    assert asyncckpt.verify(tmp_path / "d").strays == ()
    found = asyncckpt.load(tmp_path / "d")
    assert found["model"]["lm_head.weight"] is found["model"]["embed.weight"]
    assert list(differences(found, live({"model": TiedWeights(1.0), "n": 1}))) == []


@pytest.mark.parametrize("verify", [True, False, "before"])
@pytest.mark.parametrize("tied", [True, False])
def test_all_their_names_are_filled(tmp_path: Path, tied: bool, verify: Any) -> None:
    asyncckpt.save(tmp_path / "d", {"model": TiedWeights(1.0)})
    model = TiedWeights(0.0) if tied else TiedWeights(0.0).untie()
    report = asyncckpt.Loader(tmp_path / "d", tensors={"model": model}, verify=verify).load()
    assert bool(model.embed.weight.eq(1).all())
    assert bool(model.lm_head.weight.eq(1).all())
    assert (report.missing, report.unexpected, len(report.loaded)) == ((), (), 2)
    assert report.bytes_read == (4800 if tied else 9600), "the same memory is filled once"


def test_what_is_tied_and_untied_between_saves_is_seen(tmp_path: Path) -> None:
    """Of the same shapes, so that nothing but the addresses says it."""
    tied, apart = TiedWeights(1.0), TiedWeights(1.0).untie()
    state = {"model": tied}
    with asyncckpt.Saver(path=tmp_path / "d", tensors=state) as saver:
        for step, model in enumerate((tied, apart, tied, TiedWeights(3.0))):
            with torch.no_grad():
                model.embed.weight.fill_(3.0)
                apart.lm_head.weight.fill_(2.0)
            state["model"] = model
            saver.save_async(step).result(60)
            is_tied = model is not apart
            found = asyncckpt.load(tmp_path / "d")["model"]
            assert float(found["lm_head.weight"].mean()) == (3.0 if is_tied else 2.0)
            assert (found["lm_head.weight"] is found["embed.weight"]) == is_tied
            assert len(names_of(tmp_path / "d")) == (1 if is_tied else 2)
        assert saver.statistics().plans_made_count == 3, "other addresses alone are no other plan"


def test_tied_weights_of_a_delta_and_of_what_it_is_folded_into(tmp_path: Path) -> None:
    table = asyncckpt.HashTable("user", 2)
    model = TiedWeights(1.0)
    options: dict[str, Any] = {"path": tmp_path / "d", "hashtables": {"user": table}, "tensors": {"model": model}}
    with asyncckpt.Saver(**options, deltas=ALWAYS) as saver:
        for step in (1, 2):
            table.lookup(torch.arange(step, step + 3))
            with torch.no_grad():
                model.embed.weight.fill_(float(step))
            saver.save(step)
        assert asyncckpt.describe(tmp_path / "d").kind == "delta"
        for _ in range(2):
            found = asyncckpt.load(tmp_path / "d")["model"]
            assert found["lm_head.weight"] is found["embed.weight"]
            assert bool(found["lm_head.weight"].eq(2).all())
            saver.compact().result(60)
        assert asyncckpt.describe(tmp_path / "d").compacted
    assert list(asyncckpt.describe(tmp_path / "d").tied) == ["model.lm_head.weight"]


def test_filters_see_every_name(tmp_path: Path) -> None:
    seen: list[str] = []

    def double_the_head(blocks: list[asyncckpt.filters.WriteBlock]) -> list[asyncckpt.filters.WriteBlock]:
        seen.extend(block.tensor_name() for block in blocks)
        return [
            block.replace(data=block.data * 2) if block.tensor_name() == "model.lm_head.weight" else block
            for block in blocks
        ]

    cast = asyncckpt.filters.cast("model.lm_head.weight", torch.float16)
    each: list[dict[str, Any]] = [{"filter_func": double_the_head}, {"filters": [cast]}]
    for step, options in enumerate(each):
        with asyncckpt.Saver(path=tmp_path / "d", tensors={"model": TiedWeights(1.0)}, **options) as saver:
            saver.save(step)
        assert len(names_of(tmp_path / "d")) == 2
    assert seen == ["model.embed.weight", "model.lm_head.weight"]
    found = asyncckpt.load(tmp_path / "d", 0)["model"]
    assert (float(found["embed.weight"].mean()), float(found["lm_head.weight"].mean())) == (1.0, 2.0)


def test_a_load_filter_finds_them_by_any_name(tmp_path: Path) -> None:
    asyncckpt.save(tmp_path / "d", {"model": TiedWeights(1.0)})
    weight, other = torch.zeros(40, 30), torch.zeros(40, 30)

    def rename(info: Any) -> Any:
        return {"a": {"model.lm_head.weight": []}, "b": {"model.embed.weight": []}}

    asyncckpt.Loader(tmp_path / "d", tensors={"a": weight, "b": other}, filter_func=rename, strict=False).load()
    assert bool(weight.eq(1).all())
    assert bool(other.eq(1).all())


def test_an_object_gets_them_tied(tmp_path: Path) -> None:
    weight = torch.arange(6.0)
    asyncckpt.save(tmp_path / "d", {"it": Stateful({"a": weight, "b": weight.detach(), "c": weight.clone()})})
    holder = Stateful({})
    asyncckpt.Loader(tmp_path / "d", tensors={"it": holder}).load()
    assert holder.state["a"] is holder.state["b"] is not holder.state["c"]
    assert list(differences(holder.state, {name: weight for name in "abc"})) == []


@pytest.mark.parametrize("is_checkpointer", [True, False])
def test_an_object_gets_views_of_one_memory(tmp_path: Path, is_checkpointer: bool) -> None:
    """An optimizer that writes to one of them and reads the other would train otherwise than before."""
    both = torch.full((2, 3), 2.0)
    asyncckpt.save(tmp_path / "d", {"it": Stateful({"both": both, "first": both[0]})})
    holder = Stateful({})
    if is_checkpointer:
        with asyncckpt.Checkpointer(tmp_path / "d", every=1, it=holder) as checkpoints:
            checkpoints.restore()
    else:
        asyncckpt.Loader(tmp_path / "d", tensors={"it": holder}).load()
    holder.state["both"] += 1
    assert holder.state["first"].tolist() == [3.0] * 3


@pytest.mark.parametrize("is_dict", [True, False])
def test_the_state_of_a_fused_optimizer_has_the_strides_of_its_parameters(tmp_path: Path, is_dict: bool) -> None:
    """A fused step takes the memory of both as it lies: it paired other moments with a weight, and said nothing."""
    kept, found = ChannelsLast(0), ChannelsLast(0)
    kept.train(3)
    asyncckpt.save(tmp_path / "d", kept.state)
    if is_dict:
        for name, state in asyncckpt.load(tmp_path / "d").items():
            found.state[name].load_state_dict(state)
    else:
        asyncckpt.Loader(tmp_path / "d", tensors=found.state).load()
    for one in kept, found:
        one.train(2)
    assert list(differences(live(found.state), live(kept.state))) == []


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_dcp_reads_them_under_every_name(tmp_path: Path) -> None:
    asyncckpt.save(tmp_path / "d", {"model": TiedWeights(1.0)})
    found = {"model": {"embed.weight": torch.zeros(40, 30), "lm_head.weight": torch.zeros(40, 30)}}
    dcp.load(found, storage_reader=StorageReader(tmp_path / "d"))
    assert list(differences(found, {"model": live(dict(TiedWeights(1.0).state_dict()))})) == []
    asyncckpt.dcp.export_checkpoint(tmp_path / "d", tmp_path / "out")
    found = {"model": {"embed.weight": torch.zeros(40, 30), "lm_head.weight": torch.zeros(40, 30)}}
    dcp.load(found, storage_reader=dcp.FileSystemReader(tmp_path / "out"))
    assert list(differences(found, {"model": live(dict(TiedWeights(1.0).state_dict()))})) == []


def wide() -> torch.Tensor:
    return torch.arange(24.0).reshape(4, 6)


STATES: dict[str, Callable[[torch.Tensor], dict[str, Any]]] = {
    "the same object": lambda w: {"a": w, "b": [w, {"c": w}]},
    "transposed": lambda w: {"a": w, "b": w.t(), "c": w.t()},
    "flat, and pieces of it": lambda w: {"flat": w.view(-1), "pieces": list(w.view(-1).split(7))},
    "rows that overlap": lambda w: {"a": w[0:3], "b": w[1:4]},
    "columns that take turns": lambda w: {"a": w[:, 0::2], "b": w[:, 1::2]},
    "repeated": lambda w: {"a": w[0], "b": w[0].expand(3, 6), "c": w[0].expand(3, 6)},
    "strided, and tied": lambda w: {"a": w[:, ::2], "b": w[:, ::2], "c": w[0].expand(3, 6)[:0]},
    "repeated alone": lambda w: {"b": w[0].expand(3, 6), "c": w[0].expand(2, 6)},
    "other dtypes": lambda w: {"a": w, "b": w.view(torch.int32), "c": w.view(torch.uint8)[:, 1:5]},
    "arrays": lambda w: {"a": w.numpy(), "b": w, "c": w.numpy()[1:, ::3], "d": w.numpy()},
    "complex numbers": lambda w: {"a": torch.view_as_complex(w.view(4, 3, 2)), "b": w},
    "nothing": lambda w: {"a": w[0:2], "b": w[2:4], "c": w[:0], "d": w[:0]},
}


@pytest.mark.parametrize("name", STATES)
def test_memory_is_shared_as_it_was(tmp_path: Path, name: str) -> None:
    state = STATES[name](wide())
    asyncckpt.save(tmp_path / "d", state)
    found = asyncckpt.load(tmp_path / "d")
    assert list(differences(found, state)) == []
    assert shared_bytes(found) == shared_bytes(state)
    assert (name == "nothing") == (not shared_bytes(state))
    for verify in (False, "before"):
        assert shared_bytes(asyncckpt.load(tmp_path / "d", verify=verify)) == shared_bytes(state)
        assert list(differences(asyncckpt.load(tmp_path / "d", verify=verify), state)) == []


def test_what_is_stored_once_and_what_is_not(tmp_path: Path) -> None:
    sizes = {}
    for name, make in STATES.items():
        asyncckpt.save(tmp_path / name, make(wide()))
        sizes[name] = sum(block.bytes for block in asyncckpt.describe(tmp_path / name).blocks)
    assert sizes["the same object"] == 96
    assert sizes["transposed"] == 192, "a view has its own block"
    assert sizes["arrays"] == 96 + 4 * 6


def test_what_comes_apart(tmp_path: Path) -> None:
    """Views that the memory does not hold as they are, and those that span far more than they have."""
    whole = torch.randn(4, dtype=torch.complex64)
    columns = torch.zeros(3000, 3000)
    state = {
        "conjugated": [whole, whole.conj()],
        "sliding": [wide()[0], wide()[0].unfold(0, 3, 1)],
        "backwards": [(array := np.arange(4)), array[::-1]],
        "far apart": [columns[:, :2], columns[:, 1:3]],
    }
    asyncckpt.save(tmp_path / "d", state)
    found = asyncckpt.load(tmp_path / "d")
    assert list(differences(found, state)) == []
    assert shared_bytes(found) == []


def test_addresses_are_read_once_a_save_while_nothing_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"model": TiedWeights(1.0), **{f"w{n}": torch.zeros(3) for n in range(20)}}
    searches = []
    search = leaf_facts.LeafMemory._overlapping
    monkeypatch.setattr(
        leaf_facts.LeafMemory, "_overlapping", lambda self, begins: searches.append(1) or search(self, begins)
    )
    with asyncckpt.Saver(path=tmp_path / "d", tensors=state) as saver:
        for step in range(3):
            saver.save(step)
    assert len(searches) == 1


def test_what_one_rank_shares_and_another_one_stores_comes_with_the_stored_values(tmp_path: Path) -> None:
    base = torch.arange(8.0)
    states = [{"p": torch.full((4,), 5.0), "q": torch.full((4,), 7.0)}, {"p": base[:4], "q": base[2:6]}]
    writers = {"p": 0, "q": 0}
    root = save_each(tmp_path, states, change=lambda rank, spec: spec if writers[spec.name] == rank else None)
    for rank, count in ((0, 2), (1, 2), (0, 1)):
        loader = asyncckpt.Loader(root, shard_index=rank, shard_num=count)
        assert list(differences(loader.load().tree, states[0])) == []


def test_a_tensor_in_an_order_of_its_own_is_loaded_where_it_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last)
    asyncckpt.save(tmp_path / "d", {"last": last, "tied": last, "turned": torch.arange(6.0).view(2, 3).t()})
    monkeypatch.setattr(whole_state, "_views", lambda own: pytest.fail("it is moved, in as much memory again"))
    found = asyncckpt.load(tmp_path / "d")
    assert found["last"] is found["tied"]
    assert (found["last"].stride(), found["turned"].stride()) == (last.stride(), (1, 3))
    assert torch.equal(found["last"], last)
    assert found["turned"].tolist() == [[0, 3], [1, 4], [2, 5]]


def test_no_memory_for_what_is_shared_is_an_error_that_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = torch.arange(8.0)
    asyncckpt.save(tmp_path / "d", {"one": base[:6], "other": base[2:]})

    def no_memory(*_: Any, **__: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(torch, "zeros", no_memory)
    with pytest.raises(asyncckpt.errors.IOFailedError, match=r"not enough memory for tensors that share .* 32 bytes"):
        asyncckpt.load(tmp_path / "d")
