"""Sparse, quantized and nested tensors come back as torch.save brings them back, into targets of other sizes too."""

from __future__ import annotations

import io
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt import Checkpointer, CorruptError, DeltaPolicy, IncompatibleError, Loader, Saver
from asyncckpt.dcp import convert
from asyncckpt.formats import hf, recis, torch_file

warnings.filterwarnings("ignore", category=UserWarning, module="torch")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # Torch says of some that they are prototypes.


def coo(count: int, *, dense: int = 0, coalesced: bool = False) -> torch.Tensor:
    """Have some indices twice."""
    indices = torch.randint(0, 4, (2, count))
    made = torch.sparse_coo_tensor(indices, torch.randn(count, *([3] * dense)), (5, 4, *([3] * dense)))
    return made.coalesce() if coalesced else made


def compressed(layout: torch.layout, count: int) -> torch.Tensor:
    dense = torch.zeros(6, 8)
    dense.view(-1)[torch.randperm(48)[:count]] = torch.randn(count)
    blocks = (2, 2) if layout in (torch.sparse_bsr, torch.sparse_bsc) else None
    return dense.to_sparse(layout=layout, blocksize=blocks)


def per_tensor(dtype: torch.dtype, scale: float) -> torch.Tensor:
    return torch.quantize_per_tensor(torch.randn(4, 6), scale, 0 if dtype is torch.qint32 else 3, dtype)


def per_channel(seed: int) -> torch.Tensor:
    scales = torch.rand(4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + 0.01
    return torch.quantize_per_channel(torch.randn(4, 6), scales, torch.randint(0, 3, (4,)), 0, torch.qint8)


def by_floats() -> torch.Tensor:
    return torch.quantize_per_channel(torch.randn(6, 4), torch.rand(4) + 0.1, torch.rand(4), 1, torch.quint8)


def channels_last() -> torch.Tensor:
    image = torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    return torch.quantize_per_tensor(image, 0.05, 1, torch.quint8)


def nested(*rows: int) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.randn(count, 3) for count in rows])


# What is saved, and a target that differs in all that may differ.
KINDS: dict[str, tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor]]] = {
    "coo, indices twice": (lambda: coo(9), lambda: coo(2)),
    "coo, coalesced": (lambda: coo(9, coalesced=True), lambda: coo(9)),
    "coo, then nothing": (lambda: coo(0), lambda: coo(9)),
    "coo, from nothing": (lambda: coo(9), lambda: coo(0)),
    "coo, rows": (lambda: coo(5, dense=1), lambda: coo(7, dense=1)),
    "csr": (lambda: compressed(torch.sparse_csr, 9), lambda: compressed(torch.sparse_csr, 20)),
    "csc": (lambda: compressed(torch.sparse_csc, 9), lambda: compressed(torch.sparse_csc, 9)),
    "bsr": (lambda: compressed(torch.sparse_bsr, 5), lambda: compressed(torch.sparse_bsr, 0)),
    "bsc": (lambda: compressed(torch.sparse_bsc, 5), lambda: compressed(torch.sparse_bsc, 12)),
    "qint8": (lambda: per_tensor(torch.qint8, 0.25), lambda: per_tensor(torch.qint8, 0.5)),
    "quint8": (lambda: per_tensor(torch.quint8, 0.1), lambda: per_tensor(torch.quint8, 0.3)),
    "qint32": (lambda: per_tensor(torch.qint32, 0.001), lambda: per_tensor(torch.qint32, 1.0)),
    "channels": (lambda: per_channel(1), lambda: per_channel(2)),
    "channels by floats": (by_floats, by_floats),
    "channels last": (channels_last, channels_last),
    "nested": (lambda: nested(2, 0, 5), lambda: nested(2, 0, 5)),
}


def facts(tensor: torch.Tensor) -> list[Any]:
    """All that torch says of one, by its own calls."""
    tensor = tensor.detach()
    told: list[Any] = [tensor.dtype, tensor.layout, tensor.is_quantized, tensor.is_nested]
    if tensor.is_nested:
        return [*told, *(part.tolist() for part in tensor.unbind())]
    told.append(tuple(tensor.shape))
    if tensor.is_quantized:
        told += [tensor.qscheme(), tensor.stride(), tensor.int_repr().tolist()]
        if tensor.qscheme() in (torch.per_channel_affine, torch.per_channel_affine_float_qparams):
            points = tensor.q_per_channel_zero_points()
            return [*told, tensor.q_per_channel_axis(), tensor.q_per_channel_scales().tolist(), points.tolist()]
        return [*told, tensor.q_scale(), tensor.q_zero_point()]
    if tensor.layout is torch.sparse_coo:
        return [*told, tensor.is_coalesced(), tensor._indices().tolist(), tensor._values().tolist()]
    by_rows = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
    names = ("crow_indices", "col_indices") if by_rows else ("ccol_indices", "row_indices")
    return [*told, *(getattr(tensor, name)().tolist() for name in (*names, "values"))]


def as_torch_has_it(tensor: torch.Tensor) -> list[Any]:
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return facts(torch.load(file))


class Graph(torch.nn.Module):
    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Linear(3, 3)
        self.register_buffer("adjacency", tensor)


class AskedGraph(Graph):
    """A module whose state has to be asked for, which gives copies."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)


class OfOneTensor:
    def __init__(self, tensor: torch.Tensor | None) -> None:
        self.tensor = tensor

    def state_dict(self) -> dict[str, Any]:
        return {} if self.tensor is None else {"tensor": self.tensor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensor = state["tensor"]


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(7)
    stored, target = KINDS[request.param]
    return stored(), target()


def test_in_a_dict(tmp_path: Path, pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    stored, target = pair
    expected = as_torch_has_it(stored)
    asyncckpt.save(tmp_path, {"a": {"x": stored}, "other": torch.ones(2)})
    report = Loader(tmp_path, tensors={"a": {"x": target}, "other": torch.zeros(2)}).load()
    assert facts(target) == expected
    assert not report.missing
    assert facts(asyncckpt.load(tmp_path)["a"]["x"]) == expected


def test_of_a_fresh_object(tmp_path: Path, pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    stored, target = pair
    asyncckpt.save(tmp_path, {"fresh": OfOneTensor(stored), "used": OfOneTensor(stored)})
    fresh, used = OfOneTensor(None), OfOneTensor(target)
    Loader(tmp_path, tensors={"fresh": fresh, "used": used}).load()
    assert fresh.tensor is not None
    assert used.tensor is not None
    assert facts(fresh.tensor) == facts(used.tensor) == as_torch_has_it(stored)


def test_of_a_module(tmp_path: Path, pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    stored, target = pair
    model, other = Graph(stored), Graph(target)
    asyncckpt.save(tmp_path, {"model": model})
    Loader(tmp_path, tensors={"model": other}).load()
    assert facts(other.adjacency) == as_torch_has_it(stored)
    assert other.adjacency is target
    assert torch.equal(other.weight.weight, model.weight.weight)


@pytest.mark.parametrize("kind", ["coo, indices twice", "csc", "csr", "channels", "qint8", "nested"])
def test_of_a_module_that_is_asked_for_its_state(tmp_path: Path, kind: str) -> None:
    stored, target = (make() for make in KINDS[kind])
    asyncckpt.save(tmp_path, {"model": AskedGraph(stored)})
    other = AskedGraph(target)
    Loader(tmp_path, tensors={"model": other}).load()
    assert facts(other.adjacency) == as_torch_has_it(stored)


class InExtraState(torch.nn.Module):
    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.weight, self.tensor = torch.nn.Parameter(torch.zeros(2)), tensor

    def get_extra_state(self) -> Any:
        return {"tensor": self.tensor}

    def set_extra_state(self, state: Any) -> None:
        self.tensor = state["tensor"]


@pytest.mark.parametrize("is_same", [False, True])
def test_of_an_extra_state(tmp_path: Path, pair: tuple[torch.Tensor, torch.Tensor], is_same: bool) -> None:
    """Of another size, and of the same one with other values."""
    stored, target = pair
    if is_same and not stored.is_nested and not stored.is_quantized:  # Those are of the same size.
        target = stored * 0
    asyncckpt.save(tmp_path, {"model": InExtraState(stored)})
    other = InExtraState(target)
    Loader(tmp_path, tensors={"model": other}).load()
    assert facts(other.tensor) == as_torch_has_it(stored)


def test_each_save_has_what_is_there_then(tmp_path: Path, pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    first, second = pair
    state = {"x": first, "y": torch.zeros(3)}
    with Saver(path=tmp_path, tensors=state, deltas=DeltaPolicy(deltas_max=4)) as saver:
        expected = [as_torch_has_it(first)]
        saver.save(0)
        for step, tensor in enumerate((second, first, first), 1):
            state["x"] = tensor
            expected.append(as_torch_has_it(tensor))
            future = saver.save_async(step)
            state["x"] = torch.zeros(1)
            future.result()
    assert [facts(asyncckpt.load(tmp_path, step=step)["x"]) for step in range(4)] == expected


def test_what_is_changed_after_the_call_is_not_saved(tmp_path: Path) -> None:
    graph = coo(9, coalesced=True)
    expected = facts(graph)
    with Saver(path=tmp_path, tensors={"graph": graph}) as saver:
        future = saver.save_async(0)
        graph._values().zero_()
        future.result()
    assert facts(asyncckpt.load(tmp_path)["graph"]) == expected


def test_a_checkpointer_goes_on_with_a_sparse_parameter(tmp_path: Path) -> None:
    def job(folder: Path, first: int, last: int) -> list[float]:
        torch.manual_seed(3)
        graph, weight = Graph(coo(9)), torch.nn.Parameter(torch.randn(4, 2))
        adam = torch.optim.Adam([weight], lr=0.1)
        losses = []
        checkpoints = Checkpointer(folder, every=2, graph=graph, weight=weight, adam=adam)
        assert checkpoints.restore() == first
        for step in range(first, last):
            graph.adjacency = (graph.adjacency * 1.1).detach() if step % 3 else coo(step)
            loss = torch.sparse.mm(graph.adjacency, weight).square().sum()
            adam.zero_grad()
            loss.backward()
            adam.step()
            losses.append(loss.item())
            checkpoints.step(step)
        checkpoints.close()
        return losses

    torch.manual_seed(5)
    whole = job(tmp_path / "whole", 0, 12)
    assert whole[:7] == job(tmp_path / "parts", 0, 7)
    assert whole[7:] != job(tmp_path / "parts", 7, 12)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "nested"])
def test_a_file_of_torch_is_imported(tmp_path: Path, kind: str) -> None:
    stored, _ = (make() for make in KINDS[kind])
    torch.save({"model": {"x": stored}}, tmp_path / "file.pt")
    torch_file.import_checkpoint(tmp_path / "file.pt", tmp_path / "run")
    assert facts(asyncckpt.load(tmp_path / "run")["model"]["x"]) == as_torch_has_it(stored)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "nested"])
def test_a_file_of_torch_is_exported(tmp_path: Path, kind: str) -> None:
    stored, _ = (make() for make in KINDS[kind])
    asyncckpt.save(tmp_path / "run", {"model": {"x": stored, "y": torch.ones(2)}})
    torch_file.export_checkpoint(tmp_path / "run", tmp_path / "file.pt")
    assert facts(torch.load(tmp_path / "file.pt")["model"]["x"]) == as_torch_has_it(stored)


@pytest.mark.parametrize(
    ("kind", "export"),
    [
        ("nested", torch_file.export_checkpoint),
        ("qint8", hf.export_checkpoint),
        ("csr", hf.export_checkpoint),
        ("channels", convert.export_checkpoint),
        ("nested", recis.export_checkpoint),
    ],
)
def test_what_a_file_cannot_hold_is_refused(tmp_path: Path, kind: str, export: Callable[[Path, Path], object]) -> None:
    asyncckpt.save(tmp_path / "run", {"x": KINDS[kind][0]()})
    with pytest.raises(asyncckpt.UnsupportedError, match=r"'x' is a torch\..*, which .* cannot hold"):
        export(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["coo, rows", "csr", "qint8"])
def test_one_tensor_does_not_get_the_values_of_two(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(1)
    stored, target = KINDS[kind]
    first, own = stored(), target()
    before = facts(own)
    asyncckpt.save(tmp_path / "other", {"a": first, "b": stored()})
    with pytest.raises(IncompatibleError, match="the checkpoint has different values"):
        Loader(tmp_path / "other", tensors={"a": own, "b": own}).load()
    assert facts(own) == before
    asyncckpt.save(tmp_path / "same", {"a": first, "b": first})
    Loader(tmp_path / "same", tensors={"a": own, "b": own}).load()
    assert facts(own) == as_torch_has_it(first)


def test_none_is_changed_if_one_cannot_be_made(tmp_path: Path) -> None:
    odd = torch.sparse_coo_tensor(torch.tensor([[0], [9]]), torch.ones(1), (5, 4), check_invariants=False)
    target = coo(3)
    before = facts(target)
    asyncckpt.save(tmp_path, {"a": coo(2), "x": odd})
    with pytest.raises(CorruptError, match=r"'x' cannot be made .*other tensors may be filled"):
        Loader(tmp_path, tensors={"a": target, "x": coo(3)}).load()
    assert facts(target) == before


WITH_ERRORS = """
import sys, warnings
warnings.simplefilter("error")
import asyncckpt
asyncckpt.load(sys.argv[1])
"""


@pytest.mark.parametrize("kind", ["coo, rows", "csr", "qint8", "nested"])
def test_what_torch_warns_of_once_is_no_error(tmp_path: Path, kind: str) -> None:
    asyncckpt.save(tmp_path, {"x": KINDS[kind][0]()})
    subprocess.run([sys.executable, "-c", WITH_ERRORS, str(tmp_path)], check=True, timeout=120)


def test_a_nested_tensor_without_parts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(asyncckpt.UnsupportedError, match="'x' has a layout"):
        asyncckpt.save(tmp_path, {"x": torch.nested.nested_tensor([])})


def test_nested_tensors_keep_the_sizes_of_their_parts(tmp_path: Path) -> None:
    target = nested(3, 4)
    before = facts(target)
    asyncckpt.save(tmp_path, {"x": nested(4, 3)})
    with pytest.raises(IncompatibleError, match=r"'x' is another tensor than in the checkpoint.*context"):
        Loader(tmp_path, tensors={"x": target}).load()
    assert facts(target) == before


@pytest.mark.parametrize("kind", ["coo, rows", "csr", "channels", "nested"])
@pytest.mark.parametrize("other", ["qint8", "bsr", "dense"])
def test_another_kind_is_refused(tmp_path: Path, kind: str, other: str) -> None:
    stored, target = KINDS[kind][0](), torch.zeros(5) if other == "dense" else KINDS[other][0]()
    before = facts(target) if other != "dense" else target.clone()
    asyncckpt.save(tmp_path, {"x": stored})
    with pytest.raises(IncompatibleError, match="'x' is a"):
        Loader(tmp_path, tensors={"x": target}).load()
    assert facts(target) == before if other != "dense" else torch.equal(target, before)
