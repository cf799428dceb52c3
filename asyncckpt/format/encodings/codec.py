"""Apply the steps of an encoding, and their inverses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from asyncckpt.errors import CorruptError, UnsupportedError
from asyncckpt.format import limits
from asyncckpt.format.dtypes import dtype_by_name, stored_dtype
from asyncckpt.format.encodings.form import Encoding, Form, Malformed, Stage, Unfit, Unknown
from asyncckpt.format.encodings.lossless import SkipZeroRows, Zstd, zstandard
from asyncckpt.format.encodings.numbers import Cast, Quantize
from asyncckpt.model.block import BlockSpec, EncodingStep
from asyncckpt.model.source import as_bytes
from asyncckpt.native import U8

# The maximal size of the array of an encoded block. A few stored bytes can mean any number of zeros, so without a limit
# a damaged manifest could request all memory.
ENCODED_BYTES_MAX = 64 << 20
_BLOW_UP_MAX = 16  # float64 from 4 bits: the highest ratio if every row is stored.

_KINDS: Mapping[str, Encoding] = {
    "cast": Cast(),
    "quantize": Quantize(),
    "skip_zero_rows": SkipZeroRows(),
    "zstd": Zstd(),
}


@dataclass(frozen=True)
class StoredAs:
    """How an array is stored in a shard file: safetensors dtype, bytes per element, shape."""

    dtype: str
    itemsize: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Encoded:
    """Stored bytes, uint8 [n], how they are stored in the file, and the steps that were applied, as recorded."""

    raw: U8
    stored: StoredAs
    steps: tuple[EncodingStep, ...]


def encode(values: torch.Tensor, steps: Sequence[EncodingStep]) -> Encoded:
    """Apply the steps, in their order, to a contiguous CPU tensor of any supported dtype.

    Leaves out a step that would not make the tensor smaller, and, for a tensor larger than ENCODED_BYTES_MAX, steps
    that are not row-wise. If no step is applied, `raw` is the tensor's own memory. Raises Unfit for values or dtypes
    that a step cannot encode, UnsupportedError if a package is missing.
    """
    done: list[EncodingStep] = []
    too_large = values.nbytes > ENCODED_BYTES_MAX
    form = Form.of(values.dtype, tuple(values.shape))
    for step in steps:
        kind = _KINDS[step["kind"]]
        reason = kind.misfit(form, step)
        if reason is not None:
            raise Unfit(reason)
        if too_large and not _is_row_wise(step):
            continue
        encoded = kind.encode(values, form, step)
        if encoded is None:
            continue
        values, recorded = encoded
        form = _form_of(values, kind.stored(form, recorded))
        done.append(recorded)
    return Encoded(raw=as_bytes(values), stored=_stored_as(form), steps=tuple(done))


def decode(raw: U8, spec: BlockSpec) -> torch.Tensor:
    """Return the array of a block: contiguous, on the CPU, of spec.dtype and spec.shape.

    raw: the stored bytes, uint8 [spec.bytes], writable; without an encoding the result shares their memory. Raises
    CorruptError naming the block if anything does not fit, UnsupportedError for kinds of a newer version and for a
    missing package. Needs at most a few times ENCODED_BYTES_MAX of memory, or 16 times the stored bytes if that is
    more.
    """
    forms = _checked_forms(spec)
    try:
        if raw.nbytes != spec.bytes:
            raise Malformed(f"it has {raw.nbytes} bytes, not {spec.bytes}")
        # torch cannot view an empty NumPy array as another dtype.
        stored = torch.from_numpy(raw) if raw.size else torch.empty(0, dtype=torch.uint8, device="cpu")
        values = stored.view(forms[-1].dtype).reshape(forms[-1].shape)
        for form, step in zip(reversed(forms[:-1]), reversed(spec.encoding), strict=True):
            values = _KINDS[step["kind"]].decode(values, form, step)
    except Malformed as error:
        raise _corrupt(spec, error) from error
    return values


def check_encoding(spec: BlockSpec) -> None:
    """Raise what `decode` would raise for a block of a manifest, as far as that does not depend on its bytes."""
    _checked_forms(spec)
    if any(step["kind"] == "zstd" for step in spec.encoding):
        zstandard()


def misfit(dtype: torch.dtype, shape: tuple[int, ...], steps: Sequence[EncodingStep]) -> str | None:
    """Return why the last step cannot be applied to such an array after the others; None if it can.

    Depends only on the step's kind and the array's dtype and row shape, never on the number of rows.
    """
    form = Form.of(dtype, shape)
    for step in steps[:-1]:
        form = _assumed(form, step)
    return _KINDS[steps[-1]["kind"]].misfit(form, steps[-1])


def stored_as(dtype: torch.dtype, shape: tuple[int, ...], steps: Sequence[EncodingStep]) -> StoredAs | None:
    """Return how `encode` will store such an array; None if that depends on its values."""
    if not all(_is_row_wise(step) for step in steps):
        return None
    form = Form.of(dtype, shape)
    for step in steps:
        form = _assumed(form, step)
    return _stored_as(form)


def _is_row_wise(step: EncodingStep) -> bool:
    """Return whether each row is stored separately, in a size known in advance."""
    return step["kind"] in ("cast", "quantize")


def _assumed(form: Form, step: EncodingStep) -> Form:
    """Return the form after a step that is not left out; the number of packed bytes does not matter."""
    kind = step["kind"]
    if kind == "skip_zero_rows":
        return Form(dtype=torch.uint8, shape=(0,), lane=form.lane, stage=Stage.PACKED)
    if kind == "zstd":
        return Form(dtype=torch.uint8, shape=(0,), lane=1, stage=Stage.COMPRESSED)
    return _KINDS[kind].stored(form, step)


def _checked_forms(spec: BlockSpec) -> list[Form]:
    dtype = dtype_by_name(spec.dtype, owner=spec.name).dtype
    if not spec.is_known:
        raise UnsupportedError(f"block {spec.name!r} is stored in a dtype that this version cannot read")
    try:
        return _forms(Form.of(dtype, spec.shape), spec)
    except Malformed as error:
        raise _corrupt(spec, error) from error
    except Unknown as error:
        raise UnsupportedError(
            f"block {spec.name!r} has an encoding that this version cannot read: {error}",
            expected=f"one of {', '.join(sorted(_KINDS))}",
            hint="upgrade asyncckpt to read it",
        ) from error


def _corrupt(spec: BlockSpec, error: Malformed) -> CorruptError:
    return CorruptError(f"block {spec.name!r} cannot be decoded: {error}")


def _forms(form: Form, spec: BlockSpec) -> list[Form]:
    """Return the forms before the first step and after each one, the last as stored. Raises Malformed."""
    if form.bytes > max(ENCODED_BYTES_MAX, _BLOW_UP_MAX * spec.bytes) and spec.encoding:
        raise Malformed(f"{spec.bytes} stored bytes cannot stand for {form.bytes}")
    if len(spec.encoding) > limits.ENCODING_STEPS_MAX:
        raise Malformed(f"it has {len(spec.encoding)} steps, more than {limits.ENCODING_STEPS_MAX}")
    forms = [form]
    for step in spec.encoding:
        kind = _kind_of(step)
        reason = kind.misfit(forms[-1], step)
        if reason is not None:
            raise Malformed(f"step {step['kind']!r} does not fit: {reason}")
        forms.append(kind.stored(forms[-1], step))
    last = forms[-1]
    if last.stage is Stage.COMPRESSED:
        if not 0 < spec.bytes < forms[-2].bytes:
            raise Malformed(f"{spec.bytes} compressed bytes cannot stand for {forms[-2].bytes}")
        last = forms[-1] = Form(dtype=last.dtype, shape=(spec.bytes,), lane=last.lane, stage=last.stage)
    if _stored_as(last) != StoredAs(dtype=spec.stored_dtype, itemsize=spec.stored_itemsize, shape=spec.stored_shape):
        raise Malformed(f"it is stored as {spec.stored_dtype} {list(spec.stored_shape)}, not as its steps require")
    return forms


def _kind_of(step: EncodingStep) -> Encoding:
    if not isinstance(step, Mapping) or type(step.get("kind")) is not str:
        raise Malformed(f"step {step!r} has no kind")
    kind = _KINDS.get(step["kind"])
    if kind is None:
        raise Unknown(f"step of kind {step['kind']!r}")
    if kind.members - step.keys():
        raise Malformed(f"step {step['kind']!r} has no {sorted(kind.members - step.keys())}")
    if step.keys() - kind.members - {"kind"}:
        raise Unknown(f"step {step['kind']!r} with {sorted(step.keys() - kind.members - {'kind'})}")
    return kind


def _form_of(values: torch.Tensor, form: Form) -> Form:
    return Form(dtype=values.dtype, shape=tuple(values.shape), lane=form.lane, stage=form.stage)


def _stored_as(form: Form) -> StoredAs:
    entry = stored_dtype(form.dtype, owner="an encoded block")
    return StoredAs(dtype=entry.stored, itemsize=entry.stored_itemsize, shape=entry.stored_shape(form.shape))
