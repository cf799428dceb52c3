"""Sparse, quantized and nested tensors that share memory, are held by others, or cannot be made of what is stored."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed._tensor import DTensor, Replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import asyncckpt
from asyncckpt import Checkpointer, CorruptError, IncompatibleError, Loader, Saver, UnsupportedError
from asyncckpt.cli.print_tree import tree_lines
from asyncckpt.formats import torch_file
from asyncckpt.inspection import compare, outline
from asyncckpt.plan import layouts
from asyncckpt.plan.composite_tensors import Composite, on_device
from asyncckpt.trainer_state import DataPosition
from tests.end_to_end import test_layouts as kinds
from tests.end_to_end.test_layouts import KINDS, Graph, as_torch_has_it, coo, facts, per_tensor
from tests.worlds.composites import int8_rows

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # Torch says of some that they are prototypes.
SOME = pytest.mark.parametrize("kind", ["coo, rows", "csr", "qint8", "channels", "nested"])
Make = Callable[[], torch.Tensor]


def csr(count: int) -> torch.Tensor:
    return kinds.compressed(torch.sparse_csr, count)


def over(pattern: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the indices of another one, in memory of NumPy that does not grow, and values of its own."""
    make, inner = torch.sparse_csr_tensor, ("crow_indices", "col_indices")
    if pattern.layout is torch.sparse_coo:
        make, inner = torch.sparse_coo_tensor, ("_indices",)  # type: ignore[assignment]
    shared = (torch.from_numpy(getattr(pattern, name)().numpy()) for name in inner)
    return make(*shared, torch.rand(pattern._nnz()), pattern.shape)  # type: ignore[arg-type]


class Two(torch.nn.Module):
    def __init__(self, first: torch.Tensor, second: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("a", first)
        self.register_buffer("b", second)

    def facts(self) -> list[Any]:
        return [facts(self.a), facts(self.b)]


class Exchanged(Two):
    """Is asked for its state. Its older versions called each of its tensors by the other's name."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        state[prefix + "a"], state[prefix + "b"] = state[prefix + "b"], state[prefix + "a"]
        super()._load_from_state_dict(state, prefix, *rest)


class InContainers(torch.nn.Module):
    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.held = {"both": (tensor, torch.zeros(1)), "more": {"deep": tensor}}

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "held"] = self.held

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        self.held = state.pop(prefix + "held")


@pytest.mark.parametrize("count", [9, 30])
@pytest.mark.parametrize("make", [csr, coo])
def test_tensors_over_one_pattern_get_patterns_of_their_own(tmp_path: Path, make: Any, count: int) -> None:
    stored, pattern = Two(make(count), make(12)), make(9)
    before, targets = facts(pattern), Two(over(pattern), over(pattern))
    asyncckpt.save(tmp_path, {"x": stored})
    Loader(tmp_path, tensors={"x": targets}).load()
    assert targets.facts() == stored.facts()
    assert facts(pattern) == before


@pytest.mark.parametrize("make", [csr, coo])
def test_a_parameter_stays_what_others_hold(tmp_path: Path, make: Any) -> None:
    stored, model = (torch.nn.ParameterDict({"w": make(count)}) for count in (20, 5))
    own: Any = model["w"]
    own.note, own.grad, seen = "mine", make(5), weakref.ref(own)
    state = {"model": model, "optimizer": torch.optim.SGD([own], lr=0.5)}
    asyncckpt.save(tmp_path, {"model": stored, "optimizer": torch.optim.SGD(stored.parameters(), lr=0.25)})
    Loader(tmp_path, tensors=state).load()
    assert model["w"] is own is seen() is state["optimizer"].param_groups[0]["params"][0]
    assert (type(own), own.requires_grad, own.is_leaf, own.note) == (torch.nn.Parameter, True, True, "mine")
    assert facts(own) == as_torch_has_it(stored["w"])
    own.grad = None
    torch.sparse.mm(own, torch.ones(own.shape[1], 2)).sum().backward()
    assert own.grad is not None


@pytest.mark.parametrize("held", ["register_hook", "register_post_accumulate_grad_hook"])
def test_one_whose_hooks_would_be_lost_is_refused_before_anything_is_filled(tmp_path: Path, held: str) -> None:
    target = Two(torch.zeros(2), csr(5).requires_grad_())
    getattr(target.b, held)(lambda grad: None)
    before = facts(target.b)
    asyncckpt.save(tmp_path, {"x": Two(torch.ones(2), csr(9))})
    with pytest.raises(IncompatibleError, match=r"'x\.b' has hooks, or a history, which would be lost: remove them"):
        Loader(tmp_path, tensors={"x": target}).load()
    assert facts(target.b) == before
    assert not target.a.any()


@SOME
def test_one_in_a_container_of_a_modules_state(tmp_path: Path, kind: str) -> None:
    stored, target = (make() for make in KINDS[kind])
    other, rows = InContainers(target), InContainers(int8_rows(2))
    asyncckpt.save(tmp_path, {"x": torch.nn.Sequential(InContainers(stored), InContainers(int8_rows(1)))})
    Loader(tmp_path, tensors={"x": torch.nn.Sequential(other, rows)}).load()
    assert facts(other.held["both"][0]) == facts(other.held["more"]["deep"]) == as_torch_has_it(stored)
    assert torch.equal(rows.held["both"][0].codes, int8_rows(1).codes)


def test_quantized_modules_of_torch_go_on(tmp_path: Path) -> None:
    def model() -> Any:
        layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        return torch.ao.quantization.quantize_dynamic(layers, {torch.nn.Linear})

    stored, other = model(), model()
    asyncckpt.save(tmp_path, {"x": stored})
    Loader(tmp_path, tensors={"x": other}).load()
    assert torch.equal(other(torch.ones(3, 4)), stored(torch.ones(3, 4)))


@pytest.mark.parametrize("make", [lambda: coo(6), lambda: csr(6), lambda: per_tensor(torch.qint8, 0.1)])
def test_a_module_that_exchanges_two_gets_both(tmp_path: Path, make: Make) -> None:
    stored, other, expected = (Exchanged(make(), make()) for _ in range(3))
    asyncckpt.save(tmp_path, {"x": stored})
    Loader(tmp_path, tensors={"x": other}).load()
    expected.load_state_dict({name: tensor.clone() for name, tensor in stored.state_dict().items()})
    assert other.facts() == expected.facts()


def test_one_tensor_under_two_names_is_told_by_its_memory(tmp_path: Path) -> None:
    tensor, empty = coo(3), Exchanged(coo(0), coo(0))
    before = facts(tensor)
    asyncckpt.save(tmp_path, {"x": Exchanged(coo(2), coo(3))})
    with pytest.raises(IncompatibleError, match="has different values"):
        Loader(tmp_path, tensors={"x": Exchanged(tensor, tensor)}).load()
    assert facts(tensor) == before
    Loader(tmp_path, tensors={"x": empty}).load()
    assert [each._nnz() for each in empty.buffers()] == [3, 2]


# {kind: (what is saved, a target of the same form, one of another form)}
FORMS: dict[str, tuple[Make, Make, Make]] = {
    "coo": (lambda: coo(6), lambda: coo(6), lambda: coo(7)),
    "coalesced": (torch.eye(3).to_sparse, torch.eye(3).to_sparse, lambda: over(torch.eye(3).to_sparse())),
    "csr": (lambda: csr(6), lambda: csr(6), lambda: csr(5)),
    "quantized": (*[lambda: per_tensor(torch.qint8, 0.1)] * 2, lambda: per_tensor(torch.qint8, 0.2)),  # type: ignore[dict-item]
    "channels": (lambda: kinds.per_channel(1), lambda: kinds.per_channel(2), lambda: per_tensor(torch.qint8, 0.1)),
}


@pytest.mark.parametrize("kind", FORMS)
def test_a_state_dict_fills_the_model_that_it_is_of_or_is_refused(tmp_path: Path, kind: str) -> None:
    stored, model, other = (Graph(make()) for make in FORMS[kind])
    asyncckpt.save(tmp_path, {"model": stored.state_dict()})
    Loader(tmp_path, tensors={"model": model.state_dict()}).load()
    assert facts(model.adjacency) == as_torch_has_it(stored.adjacency)
    before = facts(other.adjacency), other.weight.weight.clone()
    with pytest.raises(IncompatibleError, match="give the module itself"):
        Checkpointer(tmp_path, every=1, model=other.state_dict()).restore()
    assert facts(other.adjacency) == before[0]
    assert torch.equal(other.weight.weight, before[1])


@pytest.mark.parametrize("is_shared", [True, False])
def test_a_state_dict_of_tensors_over_one_pattern(tmp_path: Path, is_shared: bool) -> None:
    pattern, stored = csr(6), csr(6)
    saved, other = Two(stored, over(stored) if is_shared else csr(6)), Two(pattern, over(pattern))
    expected = (saved if is_shared else other).facts()
    asyncckpt.save(tmp_path, {"x": saved.state_dict()})
    with nullcontext() if is_shared else pytest.raises(IncompatibleError, match="has different values"):
        Loader(tmp_path, tensors={"x": other.state_dict()}).load()
    assert other.facts() == expected


@pytest.mark.parametrize("is_inference", [False, True])
@SOME
def test_a_load_in_inference_mode_gives_tensors_that_train(tmp_path: Path, kind: str, is_inference: bool) -> None:
    make, other = KINDS[kind]
    stored, graph = make(), Graph(other())
    with torch.inference_mode(is_inference):
        target = other()
    asyncckpt.save(tmp_path, {"x": stored, "graph": Graph(stored)})
    with torch.inference_mode():
        Loader(tmp_path, tensors={"x": target, "graph": graph}).load()
        found = asyncckpt.load(tmp_path)["x"]
    assert facts(target) == facts(found) == facts(graph.adjacency) == as_torch_has_it(stored)
    assert [each.is_inference() for each in (target, found, graph.adjacency)] == [is_inference, False, False]


@pytest.mark.parametrize("holder", [lambda tensor: {"tensor": tensor}, kinds.OfOneTensor, kinds.InExtraState])
def test_what_cannot_be_made_is_told_by_its_path_and_leaves_its_target(tmp_path: Path, holder: Any) -> None:
    outside = torch.sparse_coo_tensor(torch.tensor([[0, 9], [0, 1]]), torch.ones(2), (5, 4), check_invariants=False)
    target = torch.sparse_coo_tensor([[0, 1], [0, 1]], [1.0, 2.0], (5, 4))  # As many as are stored.
    state, before = {"x": holder(coo(3))}, facts(target)
    with Saver(path=tmp_path, tensors=state) as saver:
        saver.save(1)
        state["x"] = holder(outside)
        saver.save(2)
    loader = Loader(tmp_path, tensors={"x": holder(target)})
    for load in (loader.load, partial(asyncckpt.load, tmp_path), partial(torch_file.export_checkpoint, tmp_path, "x")):
        with pytest.raises(CorruptError, match=r"'x\..*tensor' cannot be made .*other tensors may be filled"):
            load()
    assert facts(target) == before
    assert Loader(tmp_path, tensors={"x": holder(coo(3))}, fallback=True).load().step == 1


@pytest.mark.parametrize(
    ("kind", "context", "inner"),
    [
        ("qint8", (1.0, 2**70), {}),
        ("channels", 2**70, {}),
        ("coo, rows", object(), {}),
        ("nested", [[2**63, 2], [2, 3], [1, 3]], {}),
        ("coo, rows", True, {"values": int8_rows(1)}),
        ("csr", None, {"crow_indices": torch.tensor(0)}),
    ],
)
def test_a_forged_one_is_corrupt(tmp_path: Path, monkeypatch: Any, kind: str, context: Any, inner: Any) -> None:
    taken = layouts.parts_of
    monkeypatch.setattr(layouts, "parts_of", lambda *args: (taken(*args)[0] | inner, context))
    asyncckpt.save(tmp_path, {"x": KINDS[kind][0]()})
    monkeypatch.undo()
    with pytest.raises(CorruptError, match="'x' cannot be made of what was stored"):
        asyncckpt.load(tmp_path)


def test_what_no_reader_would_take_is_refused_in_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many = torch.sparse_coo_tensor(torch.zeros(65, 1, dtype=torch.long), torch.ones(1), (1,) * 65)
    for tensor in (many, torch.nested.nested_tensor([torch.ones(3, 4)] * 12_000)):
        with pytest.raises(UnsupportedError, match=r"'deep\.x' cannot be taken apart: .*too l"):
            Saver(path=tmp_path, tensors={"deep": {"x": tensor}}).save_async(1)
    text = Composite.text
    monkeypatch.setattr(Composite, "text", lambda self: text(replace(self, rows=("indices", "values"))))
    with pytest.raises(UnsupportedError, match="names no inner tensors that are cut"):
        asyncckpt.save(tmp_path, {"x": coo(2)})


@pytest.mark.parametrize("make", [lambda: coo(3), lambda: per_tensor(torch.qint8, 0.1)])
def test_a_buffer_may_differ_from_rank_to_rank(tmp_path: Path, make: Make) -> None:
    models = [Two(make(), torch.ones(1)) for _ in range(2)]
    for rank, model in enumerate(models):
        ranks = asyncckpt.RankOptions(in_turn=True)
        with Saver(shard_index=rank, shard_num=2, path=tmp_path, tensors={"x": model}, ranks=ranks) as saver:
            saver.save(1)
    assert facts(asyncckpt.load(tmp_path)["x"]["a"]) == facts(models[0].a)


def test_a_dtensor_over_one_is_refused_by_name(tmp_path: Path) -> None:
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        mesh, local = DeviceMesh("cpu", [0]), per_tensor(torch.qint8, 0.1)
        tensor = DTensor.from_local(local, mesh, [Replicate()], run_check=False)
        with pytest.raises(UnsupportedError, match="'x' has a layout that cannot be saved"):
            asyncckpt.save(tmp_path, {"x": tensor})
    finally:
        torch.distributed.destroy_process_group()


def test_a_position_holds_none(tmp_path: Path) -> None:
    for tensor in (coo(3), per_tensor(torch.qint8, 0.1)):
        with pytest.raises(UnsupportedError, match="layout that cannot be saved"):
            asyncckpt.save(tmp_path, {"data": DataPosition(kinds.OfOneTensor(tensor))})
    state = DataPosition(kinds.OfOneTensor(torch.ones(4, dtype=torch.int8))).state_dict()
    _, shape, data = state["loader"]["dict"]["tensor"]["tensor"]
    state["loader"]["dict"]["tensor"]["tensor"] = ("qint8", shape, data)
    with pytest.raises(IncompatibleError, match="qint8"):
        DataPosition(kinds.OfOneTensor(None)).load_state_dict(state)


def test_what_they_are_is_compared_and_shown(tmp_path: Path) -> None:
    numbers = torch.ones(3, dtype=torch.int8)
    quantized = [torch._make_per_tensor_quantized_tensor(numbers, scale, 0) for scale in (0.1, 0.4)]
    sparse = [torch.sparse_coo_tensor([[0, 1]], [1.0, 2.0], (size,)) for size in (4, 9)]
    steps = [tmp_path / str(step) for step in range(6)]
    for step, x in zip(steps, (*quantized, {"int_repr": numbers}, *sparse, torch.ones(2)), strict=True):
        asyncckpt.save(step, {"x": x})
    told = [compare(first, None, None, other_path=second).tensors["x"] for first, second in pairwise(steps)]
    assert [each.kind for each in told] == ["changed", "removed", "added", "changed", "changed"]
    assert (told[0].before, told[4].after) == ("torch.quantized qint8 [3], (0.1, 0)", "float32 [2]")
    assert list(tree_lines(outline(steps[3])))[1] == "  x: torch.sparse_coo float32 [4] of 2"


@SOME
def test_it_moves_to_another_device(kind: str) -> None:
    tensor = KINDS[kind][0]()
    assert facts(on_device(tensor, torch.device("cpu", 0))) == facts(tensor)  # The same one, but torch copies.
