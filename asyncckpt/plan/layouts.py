"""Tensors of torch's own whose values are in other tensors: sparse, quantized and nested ones, as composites.

kind          inner tensors                                      context
sparse_coo    indices, values                                    whether it is coalesced
sparse_csr    crow_indices, col_indices, values; so sparse_bsr   None
sparse_csc    ccol_indices, row_indices, values; so sparse_bsc   None
quantized     int_repr                                           (scale, zero point)
quantized     int_repr, scales, zero_points                      the axis of channels
nested        values, one after the other                        the sizes of its parts; a target has the same ones

The inner tensors are over the memory of the outer one. A load gives it new ones, for how many there are may differ.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from asyncckpt.errors import CorruptError, UnsupportedError
from asyncckpt.format.composite import Composite, context_value
from asyncckpt.format.tree import Node, Path, composites, path_name
from asyncckpt.model.enough_memory import raise_lack_of_memory

_COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}
_LAYOUTS = {layout: str(layout).removeprefix("torch.") for layout in (torch.sparse_coo, *_COMPRESSED)}
_WHOLE_NUMBERS = {torch.qint8: torch.int8, torch.quint8: torch.uint8, torch.qint32: torch.int32}
_PLAIN = torch.Tensor.__torch_dispatch__


def kind_of(tensor: torch.Tensor) -> str:
    """Return of which of these kinds a tensor is; "": of none."""
    if type(tensor).__torch_dispatch__ is not _PLAIN:
        return ""
    if tensor.is_nested:
        return "nested" if tensor.is_contiguous() and tensor.size(0) else ""
    if tensor.is_quantized:
        return "quantized" if tensor.dtype in _WHOLE_NUMBERS else ""
    return "" if tensor.layout is torch.strided else _LAYOUTS.get(tensor.layout, "")


def parts_of(tensor: torch.Tensor, kind: str) -> tuple[dict[str, torch.Tensor], Any]:
    """Return the inner tensors of one of these by their names, and its context."""
    tensor = tensor.detach()
    if kind == "nested":
        return {"values": tensor.values()}, tensor._nested_tensor_size().tolist()
    if kind == "quantized":
        numbers = torch.empty(0, dtype=_WHOLE_NUMBERS[tensor.dtype], device=tensor.device)
        numbers.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
        if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            return {"int_repr": numbers}, (tensor.q_scale(), tensor.q_zero_point())
        scales, zero_points = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
        return {"int_repr": numbers, "scales": scales, "zero_points": zero_points}, tensor.q_per_channel_axis()
    if kind == "sparse_coo":
        return {"indices": tensor._indices(), "values": tensor._values()}, tensor.is_coalesced()
    return {name: getattr(tensor, name)() for name in _COMPRESSED[tensor.layout]}, None


def makes(facts: Composite) -> bool:
    """Return whether these are facts of such a tensor."""
    return facts.module == "torch" and (facts.is_renewed or facts.kind == "nested")


def check_without(tree: Node, file: str, *, kinds: Collection[str] | None = None) -> None:
    """Raise UnsupportedError for one of these in a state that goes into a file that has none. kinds: None: all."""
    for path, node in composites(tree):
        facts = Composite.of(node[3])
        if makes(facts) and (kinds is None or facts.kind in kinds):
            what = f"{path_name(path)!r} is a {facts.class_name}, which {file} cannot hold"
            raise UnsupportedError(what, hint="make a dense tensor of it before it is saved")


def made_of(facts: Composite, inner: Mapping[str, Any], path: Path, *, inference: bool = False) -> torch.Tensor:
    """Make one of these, in inference mode or not. CorruptError for what makes none of these facts."""
    try:
        arguments = facts.kind, inner, context_value(facts.context), facts.shape or ()
        with torch.inference_mode(inference):
            try:
                made = _made_of(*arguments)
            except Warning:  # Torch says once that such tensors are in a prototype stage, and warnings may be errors.
                made = _made_of(*arguments)
        if str(made.dtype) != f"torch.{facts.dtype}" or (facts.shape is not None and facts.shape != tuple(made.shape)):
            raise TypeError(f"one of {made.dtype}")
    except Exception as error:  # A file says what it likes.
        raise_lack_of_memory(error, f"tensor {path_name(path)!r}")
        what = f"{path_name(path)!r} cannot be made of what was stored: its inner tensors make no {facts.class_name}"
        raise CorruptError(f"{what}: {error}", hint="other tensors may be filled already") from error
    return made


def composed(text: str, inner: dict[str, Any], path: Path) -> Any:
    """Return what is made of stored facts and inner tensors: these themselves, if it is of another kind."""
    facts = Composite.of(text)
    return made_of(facts, inner, path) if makes(facts) else inner


def has_hooks(own: torch.Tensor) -> bool:
    """Return whether a tensor would lose what is called for its gradients, when it is renewed."""
    return own.layout in _COMPRESSED and any((own.grad_fn, own._backward_hooks, own._post_accumulate_grad_hooks))


def renew(tensor: torch.Tensor, made: torch.Tensor, *, in_place: bool) -> None:
    """Give a tensor the inner tensors of another one of its kind. in_place: they have one form."""
    if in_place:
        for own, new in zip(*(parts_of(each, kind_of(each))[0].values() for each in (tensor, made)), strict=True):
            own.copy_(new)
    elif made.layout in _COMPRESSED:  # It takes none by `data`, without a word, and copies into memory of others, too.
        made.requires_grad_(tensor.requires_grad)
        made.grad = tensor.grad
        torch._C._swap_tensor_impl(tensor, made)
    else:
        tensor.data = made


def _made_of(kind: str, inner: Mapping[str, torch.Tensor], context: Any, shape: tuple[int, ...]) -> torch.Tensor:
    if kind == "nested":
        return _nested(inner["values"], context)
    if kind == "quantized":
        numbers = inner["int_repr"]
        if len(inner) == 1:
            return torch._make_per_tensor_quantized_tensor(numbers, *context)
        counts = {numbers.shape[context] if context >= 0 else None, *map(len, (inner["scales"], inner["zero_points"]))}
        if len(counts) > 1:
            raise ValueError("not one scale and zero point for each channel")
        return torch._make_per_channel_quantized_tensor(numbers, inner["scales"], inner["zero_points"], context)
    if kind == "sparse_coo":
        own, checked = inner["values"], {"is_coalesced": context, "check_invariants": True}
        return torch.sparse_coo_tensor(inner["indices"], own, shape, dtype=own.dtype, device=own.device, **checked)
    layout, names = next((layout, names) for layout, names in _COMPRESSED.items() if _LAYOUTS[layout] == kind)
    outer, plain, own = (inner[name] for name in names)
    checked = {"layout": layout, "check_invariants": True}
    return torch.sparse_compressed_tensor(outer, plain, own, shape, dtype=own.dtype, device=own.device, **checked)


def _nested(values: torch.Tensor, sizes: list[list[int]]) -> torch.Tensor:
    shapes = [torch.Size(size) for size in sizes]
    parts = torch.split(values, [shape.numel() for shape in shapes])
    whole = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
    return torch.nested.as_nested_tensor(whole, dtype=values.dtype, device=values.device)
