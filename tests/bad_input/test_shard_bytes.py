"""Cases 1 to 25: a shard file whose bytes are not those that were written, or never were a shard file's."""

from __future__ import annotations

import errno
import gzip
import os
import pickle
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from crafted import Crafted, Document, block, flip
from sentinels import IDS, Targets, hooked_targets, refused, small_tensors

import asyncckpt
from asyncckpt.native import core
from asyncckpt.shard import reader

CorruptError, UnsupportedError = asyncckpt.CorruptError, asyncckpt.UnsupportedError
PEAK_BYTES_MAX = 8 << 20


def set_header_length(small: Crafted, length: int) -> None:
    with open(small.shard_path(), "r+b") as file:
        file.write(struct.pack("<Q", length))


def refused_without_allocating(small: Crafted, *parts: str) -> None:
    tracemalloc.start()
    try:
        refused(small, CorruptError, *parts)
        assert tracemalloc.get_traced_memory()[1] < PEAK_BYTES_MAX
    finally:
        tracemalloc.stop()


# -- the file's size ---------------------------------------------------------------------------------------------------


def test_case_001_truncated_by_one_byte(small: Crafted) -> None:
    path = small.shard_path()
    size = path.stat().st_size
    os.truncate(path, size - 1)
    refused(small, CorruptError, path.name, "wrong size", f"found {size - 1}", f"expected {size}")


def test_case_002_longer_than_the_manifest_says(small: Crafted) -> None:
    path = small.shard_path()
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(b"%PDF-1.7 a second meaning")
    refused(small, CorruptError, path.name, "wrong size", f"expected {size}")


def test_case_003_zero_length(small: Crafted) -> None:
    os.truncate(small.shard_path(), 0)
    refused(small, CorruptError, small.shard_path().name, "wrong size", "found 0")


def test_case_003_zero_length_and_listed_so(small: Crafted) -> None:
    os.truncate(small.shard_path(), 0)
    small.edit(lambda document: document["files"][0].update(bytes=0, header_bytes=0))
    refused(small, CorruptError, "files[0].bytes", "got 0")


# -- the header's length -----------------------------------------------------------------------------------------------


def test_case_004_header_longer_than_the_file(small: Crafted) -> None:
    size = small.shard_path().stat().st_size
    set_header_length(small, size - 7)
    refused(small, CorruptError, small.shard_path().name, "header length", f"found {size - 7}", f"at most {size - 8}")


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 2**63 - 1])
def test_case_005_header_length_beyond_all_memory(small: Crafted, length: int) -> None:
    set_header_length(small, length)
    refused_without_allocating(small, "header length", f"found {length}")


def test_case_006_header_of_a_gibibyte_meets_the_cap(small: Crafted) -> None:
    length = 1 << 30
    grown = length + 8 - small.document()["files"][0]["header_bytes"]
    os.truncate(
        small.shard_path(), small.shard_path().stat().st_size + grown
    )  # A sparse file: no byte of it is written.
    set_header_length(small, length)

    def change(document: Document) -> None:
        document["files"][0]["bytes"] += grown
        document["files"][0]["header_bytes"] += grown
        for item in document["blocks"]:
            item["offset"] += grown

    small.edit(change)
    refused_without_allocating(small, "header length", f"found {length}", "at most 100000000")


# -- places of arrays --------------------------------------------------------------------------------------------------


def test_case_007_arrays_overlap_in_the_header(small: Crafted) -> None:
    header, _ = small.shard()
    begin, end = header["user@embedding"]["data_offsets"]
    small.edit_entry("user@embedding", data_offsets=[begin - 8, end - 8])
    refused(small, CorruptError, small.shard_path().name, "overlaps or leaves a hole", "user@embedding")


def test_case_007_blocks_overlap_in_the_manifest(small: Crafted) -> None:
    offset = block(small.document(), "w")["offset"]
    small.edit_block("w", offset=offset - 8)
    refused(small, CorruptError, "000000000007.json", "'w'", "overlaps or leaves a hole", f"expected {offset}")


def test_case_008_hole_between_arrays_in_the_header(small: Crafted) -> None:
    header, data = small.shard()
    begin, end = header["flag"]["data_offsets"]
    header["flag"]["data_offsets"] = [begin + 5, end + 5]
    small.write_shard(header, data + bytes(5))
    small.edit_block("flag", offset=block(small.document(), "flag")["offset"] + 5)
    refused(small, CorruptError, "'flag'", "overlaps or leaves a hole")


def test_case_008_hole_between_blocks_in_the_manifest_alone(small: Crafted) -> None:
    header, data = small.shard()
    small.write_shard(header, data + bytes(3))
    refused(small, CorruptError, "blocks do not fill")


@pytest.mark.parametrize("offsets", [[2**64 - 8, 2**64], [2**63, 2**63 + 48], [-48, 0], [48, 0], [0], [0, 24, 48]])
def test_case_009_data_offsets_out_of_range(small: Crafted, offsets: list[int]) -> None:
    small.edit_entry("w", data_offsets=offsets)
    refused(small, CorruptError, small.shard_path().name, "'w'", "data_offsets")


@pytest.mark.parametrize("offset", [2**63 - 1, 2**64 - 8, -8, 0])
def test_case_009_block_offset_out_of_range(small: Crafted, offset: int) -> None:
    small.edit_block("w", offset=offset)
    refused(small, CorruptError, "000000000007.json")


def test_case_010_unaligned_arrays_are_read_right(small: Crafted) -> None:
    """A foreign writer may order arrays as it likes: three bytes first leave every other array unaligned."""
    header, data = small.shard()
    names = ["flag", *(name for name in header if name not in ("flag", "__metadata__"))]
    pieces = [data[slice(*header[name]["data_offsets"])] for name in names]
    moved = {"__metadata__": header["__metadata__"]}
    end = 0
    for name, piece in zip(names, pieces, strict=True):
        moved[name] = {**header[name], "data_offsets": [end, end + len(piece)]}
        end += len(piece)
    small.write_shard(moved, b"".join(pieces))

    def change(document: Document) -> None:
        for item in document["blocks"]:
            item["offset"] = document["files"][0]["header_bytes"] + moved[item["name"]]["data_offsets"][0]

    small.edit(change)
    assert any(item["offset"] % 4 for item in small.document()["blocks"] if item["dtype"] == "float32")
    targets = Targets()
    targets.load(small.root)
    assert targets.loaded


# -- shapes and dtypes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [[2**62, 2**62], [2**62, 2**62, 0], [2**63 - 1], [2**40] * 64])
def test_case_011_shape_product_overflows(small: Crafted, shape: list[int]) -> None:
    small.edit_block("w", shape=shape)
    refused(small, CorruptError, "000000000007.json", "'w'")


def test_case_011_shape_product_overflows_in_the_header(small: Crafted) -> None:
    small.edit_entry("w", shape=[2**62, 2**62])
    refused(small, CorruptError, small.shard_path().name, "'w'", "data_offsets")


@pytest.mark.parametrize("where", ["header", "manifest"])
def test_case_012_negative_dimension(small: Crafted, where: str) -> None:
    if where == "header":
        small.edit_entry("w", shape=[-3, -4])
    else:
        small.edit_block("w", shape=[-3, -4])
    refused(small, CorruptError, "shape", "non-negative integers")


@pytest.mark.parametrize("where", ["header", "manifest"])
def test_case_013_a_million_dimensions(small: Crafted, where: str) -> None:
    if where == "header":
        small.edit_entry("w", shape=[1] * 10**6)
    else:
        small.edit_block("w", shape=[1] * 10**6)
    refused(small, CorruptError, "shape is too long", "found 1000000", "expected 64")


@pytest.mark.parametrize("shape", [[4, 4], [3, 3], [], [0, 4]])
def test_case_014_shape_does_not_give_the_bytes(small: Crafted, shape: list[int]) -> None:
    small.edit_block("w", shape=shape)
    refused(small, CorruptError, "'w'", "does not fit its shape", "48 bytes")


def test_case_014_shape_does_not_give_the_bytes_in_the_header(small: Crafted) -> None:
    small.edit_entry("w", shape=[4, 4])
    refused(small, CorruptError, "'w'", "data_offsets", "64 bytes")


def test_case_014_shape_of_the_same_bytes_but_not_the_header_s(small: Crafted) -> None:
    small.edit_block("w", shape=[4, 3])
    targets = Targets()
    targets.tensors["w"] = torch.full((4, 3), -77.0)
    with pytest.raises(CorruptError, match=r"r00000-000.safetensors.* disagree on blocks, found .'w'."):
        targets.load(small.root)
    assert targets.untouched


@pytest.mark.parametrize("dtype", ["float7", "float6_e3m2fn", "qint8", "", "object", "torch.float32"])
def test_case_015_unknown_dtype(small: Crafted, dtype: str) -> None:
    small.edit_block("w", dtype=dtype)
    refused(small, UnsupportedError, "'w'", repr(dtype), "strict=False")


def test_case_015_unknown_dtype_leaves_the_other_tensors_loadable(small: Crafted) -> None:
    """A newer torch may write what an older one has no name for, in the manifest and in the shard."""
    small.edit_block("w", dtype="float7")
    small.edit_entry("w", dtype="F7")
    refused(small, UnsupportedError, "'w'", "'float7'")
    targets = Targets()
    report = targets.load(small.root, strict=False)
    assert report.missing == ("w",)
    assert report.unexpected == ("w",)
    assert bool(targets.tensors["w"].eq(-77).all())
    targets.tensors["w"].copy_(small_tensors()["w"])
    assert targets.loaded


def test_case_015_unknown_dtype_of_a_table_s_column(small: Crafted) -> None:
    small.edit_block("user@sum", dtype="float7")
    refused(small, UnsupportedError, "'user@sum'", "'float7'")
    targets = Targets()
    assert targets.load(small.root, strict=False).unexpected == ("user@sum",)
    assert targets.loaded


@pytest.mark.parametrize("dtype", ["Float32", "FLOAT32", "float32 ", "F32", "float", "f4"])
def test_case_016_alias_of_a_dtype(small: Crafted, dtype: str) -> None:
    small.edit_block("w", dtype=dtype)
    refused(small, UnsupportedError, "'w'", repr(dtype))


@pytest.mark.parametrize("dtype", ["f32", "float32", "I32"])
def test_case_016_alias_of_a_dtype_in_the_header(small: Crafted, dtype: str) -> None:
    small.edit_entry("w", dtype=dtype)
    refused(small, CorruptError, small.shard_path().name, "disagree", "'w'")


# -- not a shard at all ------------------------------------------------------------------------------------------------

FOREIGN = {
    "gzip": (gzip.compress(b"data"), "looks like a gzip file"),
    "html": (b"<!DOCTYPE html><title>404</title>", "looks like an HTML page"),
    "html-indented": (b"\n  <HTML>", "looks like an HTML page"),
    "xml": (b"<?xml version='1.0'?><Error><Code>NoSuchKey</Code></Error>", "looks like an XML document"),
    "git-lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "looks like a git-lfs pointer"),
    "torch-save": (b"PK\x03\x04\x00\x00", "looks like a zip archive"),
    "pickle": (pickle.dumps({"w": [1.0]}), "looks like a pickle"),
    "pickle-2": (pickle.dumps({"w": [1.0]}, protocol=2), "looks like a pickle"),
    "magic": (b"\x93NUMPY\x01\x00v\x00", "header length"),
}


@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize("same_size", [False, True])
def test_case_018_another_file_in_the_place_of_a_shard(small: Crafted, kind: str, same_size: bool) -> None:
    content, said = FOREIGN[kind]
    path = small.shard_path()
    path.write_bytes(content.ljust(path.stat().st_size if same_size else 0, b"\n"))
    refused(small, CorruptError, path.name, said if same_size or kind != "magic" else "wrong size")


@pytest.mark.parametrize("kind", FOREIGN)
def test_case_018_another_file_in_the_place_of_a_manifest(small: Crafted, kind: str) -> None:
    content, said = FOREIGN[kind]
    small.write_raw(content)
    refused(small, CorruptError, "000000000007.json", said if kind != "magic" else "does not end as a manifest")


def test_case_019_other_byte_order(small: Crafted) -> None:
    small.edit(lambda document: document.update(byteorder="big"))
    refused(small, UnsupportedError, "000000000007.json", "byte order", "'big'")


def test_case_020_unknown_digest_algorithm(small: Crafted) -> None:
    small.edit(lambda document: document.update(digest_algorithm="md5"))
    refused(small, UnsupportedError, "000000000007.json", "digest", "'md5'", "xxh3-128/4MiB")


# -- digests -----------------------------------------------------------------------------------------------------------


def test_case_021_digest_of_a_block_is_missing(small: Crafted) -> None:
    small.edit_block("w", digest=None)
    refused(small, CorruptError, "blocks[4]", "no 'digest'")
    refused(small, CorruptError, "no 'digest'", verify=False)


def test_case_021_digest_of_a_header_is_missing(small: Crafted) -> None:
    small.edit(lambda document: document["files"][0].pop("header_digest"))
    refused(small, CorruptError, "files[0]", "no 'header_digest'")


def test_case_021_digest_of_the_manifest_is_missing(small: Crafted) -> None:
    small.write_raw(small.raw()[:-46] + b"}\n")
    refused(small, CorruptError, "000000000007.json", "does not end as a manifest ends")


@pytest.mark.parametrize("digest", ["", "0" * 31, "0" * 33, "A" * 32, "g" * 32, " " * 32])
def test_case_021_digest_of_wrong_form(small: Crafted, digest: str) -> None:
    small.edit_block("w", digest=digest)
    refused(small, CorruptError, "digest must be", "32 lower-case hexadecimal digits")


def test_case_021_only_verify_false_loads_unverified(small: Crafted) -> None:
    flip(small.shard_path(), block(small.document(), "w")["offset"], 0)
    refused(small, CorruptError, "'w'", "does not match its digest", untouched=False)
    refused(small, CorruptError, "'w'", "does not match its digest", verify="before")
    targets = Targets()
    targets.load(small.root, verify=False)
    assert not targets.loaded
    targets.tensors["w"].copy_(small_tensors()["w"])
    assert targets.loaded


@pytest.mark.parametrize("index", ["0x1f2e", "other"])
def test_case_021_digest_of_another_block(small: Crafted, index: str) -> None:
    digests = {"0x1f2e": "0" * 28 + "1f2e", "other": block(small.document(), "b")["digest"]}
    small.edit_block("w", digest=digests[index])
    error = refused(small, CorruptError, "'w'", digests[index], "load another step", untouched=False)
    assert error.expected == digests[index]


# -- while it is read --------------------------------------------------------------------------------------------------


def test_case_022_file_replaced_between_open_and_read(small: Crafted, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(bytes(small.shard_path().stat().st_size))
    targets = hooked_targets(lambda: os.replace(other, small.shard_path()))
    targets.load(small.root)
    assert targets.loaded, "what was opened and checked is what was read"


def test_case_022_file_rewritten_between_open_and_read(small: Crafted) -> None:
    targets = hooked_targets(lambda: flip(small.shard_path(), block(small.document(), "w")["offset"], 3))
    with pytest.raises(CorruptError, match=r"'w' in .*does not match its digest.*load another step"):
        targets.load(small.root)
    assert len(targets.table) == 0


@pytest.mark.parametrize("size", [0, 4096, 4100])
def test_case_023_truncated_while_read(small: Crafted, size: int) -> None:
    """Reading goes by descriptor: a file that shrinks ends the load and not the process."""
    targets = hooked_targets(lambda: os.truncate(small.shard_path(), size))
    with pytest.raises(CorruptError, match="ended while it was read"):
        targets.load(small.root)
    assert len(targets.table) == 0


def test_case_024_input_error_in_the_middle(small: Crafted, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    real = core.read

    def failing(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*arguments, **options)

    monkeypatch.setattr(reader.core, "read", failing)
    error = refused(small, asyncckpt.IOFailedError, "step 7", "cannot be read", "Input/output error", untouched=False)
    assert isinstance(error, asyncckpt.IOFailedError)
    assert error.errno == errno.EIO
    targets = Targets()
    targets.load(small.root)  # A second try may succeed.
    assert targets.loaded


@pytest.mark.parametrize("keep_header", [False, True])
def test_case_025_sparse_file_of_the_right_size(small: Crafted, keep_header: bool) -> None:
    path = small.shard_path()
    size, header_bytes = path.stat().st_size, small.document()["files"][0]["header_bytes"]
    os.truncate(path, header_bytes if keep_header else 0)
    os.truncate(path, size)
    if keep_header:
        refused(small, CorruptError, path.name, "'user@id'", "does not match its digest")
    else:
        refused(small, CorruptError, path.name, "header")


def test_small_checkpoint_itself_is_sound(small: Crafted) -> None:
    targets = Targets()
    report = targets.load(small.root)
    assert targets.loaded
    assert sorted(targets.table.ids().tolist()) == sorted(IDS)
    assert torch.equal(targets.table.slot("seen")[targets.table.used_rows()], torch.tensor([7, 8, 9]))
    assert (report.step, report.values, report.metadata) == (7, {"epoch": 3, "lr": 0.1}, {"note": "sound"})
