"""Cases 38 to 49: a manifest in the right form that lists what is not there, twice or of something else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from crafted import Crafted, Document, block
from sentinels import Targets, refused, save_small, small_tensors

import asyncckpt

CorruptError, UnsupportedError = asyncckpt.CorruptError, asyncckpt.UnsupportedError
IncompatibleError = asyncckpt.IncompatibleError
NAME = "000000000007.json"


# -- steps, attempts, ranks --------------------------------------------------------------------------------------------


def test_case_038_step_in_the_name_is_not_the_one_inside(small: Crafted) -> None:
    renamed = small.root / "manifests" / "000000000008.json"
    small.manifest_path.rename(renamed)
    refused(small.root, CorruptError, renamed.name, "another step than its name", "found 7", "expected 8")


def test_case_038_step_inside_and_name_changed_but_not_the_files(small: Crafted) -> None:
    document = small.document()
    small.manifest_path.unlink()
    other = Crafted(root=small.root, step=8)
    other.write({**document, "step": 8})
    refused(other, CorruptError, "mixes files of two saves", f"000000000008-{document['attempt']}")


def test_case_039_shard_of_another_step_in_place(small: Crafted) -> None:
    other = save_small(small.root, step=8)
    shutil.copyfile(other.shard_path(), small.shard_path())
    refused(small, CorruptError, small.shard_path().name, "its header does not match its digest", step=7)


def test_case_039_shard_of_another_step_in_place_and_its_digest_listed(small: Crafted) -> None:
    other = save_small(small.root, step=8)
    shutil.copyfile(other.shard_path(), small.shard_path())
    digest = other.document()["files"][0]["header_digest"]
    small.edit(lambda document: document["files"][0].update(header_digest=digest))
    attempts = (other.document()["attempt"], small.document()["attempt"])
    refused(small, CorruptError, small.shard_path().name, "another save", *attempts, step=7)


def test_case_039_file_of_another_attempt_listed(small: Crafted) -> None:
    other = save_small(small.root, step=8)
    path = other.document()["files"][0]["path"]
    small.edit(lambda document: document["files"][0].update(path=path))
    refused(small, CorruptError, NAME, "mixes files of two saves", path, step=7)


def test_case_040_rank_missing(small: Crafted) -> None:
    small.edit(lambda document: document.update(ranks_count=3))
    refused(small, CorruptError, NAME, "parts of all ranks", "expected 3")


@pytest.mark.parametrize("rank", [1, -1, 2**40])
def test_case_040_rank_that_does_not_exist(small: Crafted, rank: int) -> None:
    small.edit(lambda document: document["files"][0].update(rank=rank))
    refused(small, CorruptError, NAME, "rank")


def test_case_040_file_listed_twice(small: Crafted) -> None:
    small.edit(lambda document: document["files"].append(document["files"][0]))
    refused(small, CorruptError, NAME, "lists a file twice")


def test_case_040_files_of_two_ranks_in_one_part(small: Crafted) -> None:
    def change(document: Document) -> None:
        path = document["files"][0]["path"].replace("r00000", "r00001")
        document["files"].append({**document["files"][0], "path": path, "rank": 1})

    small.edit(change)
    refused(small, CorruptError, NAME, "a file of another rank")


@pytest.mark.parametrize("count", [0, -1, 10**7])
def test_case_040_impossible_number_of_ranks(small: Crafted, count: int) -> None:
    small.edit(lambda document: document.update(ranks_count=count))
    refused(small, CorruptError, NAME, "manifest.ranks_count must be")


# -- which block belongs where -----------------------------------------------------------------------------------------


def drop_array(small: Crafted, name: str) -> None:
    """Take an array out of the shard and out of the manifest, as if it had never been saved."""
    header, data = small.shard()
    begin, end = header.pop(name)["data_offsets"]
    for key, entry in header.items():
        if key != "__metadata__" and entry["data_offsets"][0] >= end:
            entry["data_offsets"] = [offset - (end - begin) for offset in entry["data_offsets"]]
    small.write_shard(header, data[:begin] + data[end:])

    def change(document: Document) -> None:
        gone = block(document, name)
        document["blocks"] = [item for item in document["blocks"] if item is not gone]
        for item in document["blocks"]:
            item["offset"] -= (end - begin) * (item["offset"] > gone["offset"])

    small.edit(change)


def test_case_041_tensor_missing_in_all_shards(small: Crafted) -> None:
    drop_array(small, "w")
    refused(small, IncompatibleError, "only in this state (1): 'w'", "nothing was changed", "strict=False")
    assert Targets().load(small.root, strict=False).missing == ("w",)


def test_case_041_ids_of_a_table_missing_in_all_shards(small: Crafted) -> None:
    drop_array(small, "user@id")
    refused(small, IncompatibleError, "table 'user' needs 'id'")
    refused(small, IncompatibleError, "table 'user' needs 'id'", strict=False)


def test_case_041_column_missing_in_all_shards(small: Crafted) -> None:
    drop_array(small, "user@sum")
    refused(small, IncompatibleError, "columns ['sum'] of table 'user' are missing")


def test_case_041_block_taken_out_of_the_manifest_alone(small: Crafted) -> None:
    small.edit(lambda document: document["blocks"].remove(block(document, "flag")))
    refused(small, CorruptError, "blocks do not fill")


def test_case_041_block_listed_twice(small: Crafted) -> None:
    small.edit(lambda document: document["blocks"].append(block(document, "w")))
    refused(small, CorruptError, "'w'", "overlaps")


def add_array(small: Crafted, key: str, like: str, **fields: Any) -> None:
    """Append a copy of an array to the shard, and of its block to the manifest, under another key."""
    header, data = small.shard()
    begin, end = header[like]["data_offsets"]
    header[key] = {**header[like], "data_offsets": [len(data), len(data) + end - begin]}
    small.write_shard(header, data + data[begin:end])

    def change(document: Document) -> None:
        offset = document["files"][0]["bytes"] - (end - begin)
        document["blocks"].append({**block(document, like), "key": key, "offset": offset, **fields})

    small.edit(change)


def test_case_041_tensor_covered_twice(small: Crafted) -> None:
    add_array(small, "w again", "w")
    refused(small, CorruptError, "'w' is there twice")


def test_case_041_leaf_covered_twice(small: Crafted) -> None:
    add_array(small, "v", "w", name="v")
    refused(small, CorruptError, "'v' names a leaf of 'w'")


def test_case_041_leaf_that_is_not_there(small: Crafted) -> None:
    small.edit_block("w", leaf=3)
    refused(small, CorruptError, "'w' names a leaf that does not exist", "found 3")


def test_case_041_tree_and_values_disagree(small: Crafted) -> None:
    small.edit(lambda document: document["values"].append(1))
    refused(small, CorruptError, "the tree and its values disagree", "found 3")


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ({"row_begin": 0, "whole_shape": [6, 4]}, {"row_begin": 2, "whole_shape": [6, 4]}, "covered twice"),
        ({"row_begin": 0, "whole_shape": [7, 4]}, {"row_begin": 4, "whole_shape": [7, 4]}, "missing or covered"),
        ({"row_begin": 1, "whole_shape": [7, 4]}, {"row_begin": 4, "whole_shape": [7, 4]}, "missing or covered"),
        ({"row_begin": 0, "whole_shape": [9, 4]}, {"row_begin": 3, "whole_shape": [9, 4]}, "missing or covered"),
        ({"row_begin": 0, "whole_shape": [6, 4]}, {"row_begin": 3, "whole_shape": [6, 3]}, "parts disagree"),
        ({"row_begin": 0, "whole_shape": [6, 4]}, {}, "parts disagree"),
        ({"row_begin": 0, "whole_shape": []}, {"row_begin": 3, "whole_shape": []}, "another shape than the whole"),
        ({"row_begin": 0, "whole_shape": [6, 2]}, {"row_begin": 3, "whole_shape": [6, 2]}, "another shape"),
        ({"row_begin": 0, "whole_shape": [6, 4]}, {"row_begin": 3, "whole_shape": [6, 4], "leaf": 1}, "a leaf of 'b'"),
        (
            {"row_begin": 0, "whole_shape": [6, 4]},
            {"row_begin": 3, "whole_shape": [6, 4], "dtype": "int32"},
            "disagree",
        ),
    ],
)
def test_case_041_hole_in_the_rows(small: Crafted, first: Document, second: Document, said: str) -> None:
    small.edit_block("w", **first)
    add_array(small, "w[3:6]", "w", **{"row_begin": None, "whole_shape": None, **second})
    document = small.document()
    for item in document["blocks"]:
        for key in [key for key, value in item.items() if value is None]:
            del item[key]
    small.write(document)
    refused(small, CorruptError, "'w'", said)


def test_case_041_rows_in_two_parts_are_one_tensor(small: Crafted) -> None:
    """The same form when it is right."""
    small.edit_block("w", row_begin=0, whole_shape=[6, 4])
    add_array(small, "w[3:6]", "w", row_begin=3, whole_shape=[6, 4])
    targets = Targets()
    targets.tensors["w"] = torch.zeros(6, 4)
    targets.load(small.root)
    assert torch.equal(targets.tensors["w"], torch.cat([small_tensors()["w"]] * 2))


@pytest.mark.parametrize("state", [{"a": {}, "b": [], "c": ()}, {"model": torch.nn.Identity(), "x": {"y": {}}}])
@pytest.mark.parametrize("staged", [False, True])
def test_case_042_empty_state_makes_the_round_trip(tmp_path: Path, state: dict[str, Any], staged: bool) -> None:
    with asyncckpt.Saver(path=tmp_path, tensors=state) as saver:
        saver.save_async(0).result() if staged else saver.save(0)
    assert asyncckpt.Loader(tmp_path, tensors=state).load().missing == ()
    assert asyncckpt.verify(tmp_path).blocks_count == 0


def test_case_042_fresh_optimizer_makes_the_round_trip(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    with asyncckpt.Saver(path=tmp_path, tensors={"optim": torch.optim.Adam(model.parameters(), lr=0.25)}) as saver:
        saver.save(0)
    other = torch.optim.Adam(model.parameters(), lr=1.0)
    asyncckpt.Loader(tmp_path, tensors={"optim": other}).load()
    assert other.param_groups[0]["lr"] == 0.25


def test_case_043_listed_shard_is_not_there(small: Crafted) -> None:
    path = small.shard_path()
    path.unlink()
    refused(small, CorruptError, path.name, "rank 0", "step 7", "is missing")


def test_case_043_folder_of_the_shard_is_not_there(small: Crafted) -> None:
    shutil.rmtree(small.shard_path().parent)
    refused(small, CorruptError, "r00000-000.safetensors", "rank 0", "step 7", "is missing")


def test_case_043_extra_files_are_ignored_and_reported_by_verify(small: Crafted) -> None:
    folder = small.shard_path().parent
    (folder / "r00000-001.safetensors").write_bytes(b"not listed")
    stray = small.root / "data" / f"000000000007-{'0' * 32}"
    stray.mkdir()
    (small.root / "manifests" / f".m-{'1' * 32}").write_bytes(b"never published")
    targets = Targets()
    targets.load(small.root)
    assert targets.loaded
    strays = asyncckpt.verify(small.root).strays
    assert set(strays) == {f"{folder.name}/r00000-001.safetensors", stray.name, f".m-{'1' * 32}"}


@pytest.mark.parametrize(("field", "value"), [("dtype", "int32"), ("shape", [4, 3])])
def test_case_044_same_name_with_another_dtype_or_shape(small: Crafted, field: str, value: Any) -> None:
    add_array(small, "w again", "w", **{field: value})
    refused(small, CorruptError, "'w' is there twice")


@pytest.mark.parametrize("name", ["user@wide", "w", "embedding", "other@embedding"])
def test_case_044_column_under_another_name(small: Crafted, name: str) -> None:
    """Blocks of a column are filled one behind the other: one with longer rows must not slip in by another name."""
    header, data = small.shard()
    wide = bytes(3 * 1000 * 4)
    header[name + "!"] = {"dtype": "F32", "shape": [3, 1000], "data_offsets": [len(data), len(data) + len(wide)]}
    small.write_shard(header, data + wide)

    def change(document: Document) -> None:
        offset = document["files"][0]["bytes"] - len(wide)
        fields = {"name": name, "key": name + "!", "shape": [3, 1000], "bytes": len(wide), "offset": offset}
        document["blocks"].append({**block(document, "user@embedding"), **fields})

    small.edit(change)
    refused(small, CorruptError, "blocks[7]", "neither a table's nor dense", "'user', 'embedding'")


@pytest.mark.parametrize("rows", [0, 2, 4, 2**40])
def test_case_044_table_of_another_number_of_rows(small: Crafted, rows: int) -> None:
    small.edit(lambda document: document["tables"][0].update(rows=rows))
    refused(small, CorruptError, "'user@id' does not fit its table")


def test_case_044_table_listed_twice_or_not_at_all(small: Crafted) -> None:
    small.edit(lambda document: document["tables"].append(document["tables"][0]))
    refused(small, CorruptError, "lists a table twice")
    small.edit(lambda document: document.update(tables=[]))
    refused(small, CorruptError, "'user@id' does not fit its table")


def test_case_044_same_id_twice_in_a_table(small: Crafted) -> None:
    """Digests are right, so a writer has lied: found when the rows are given out, and the table is left empty."""
    header, data = small.shard()
    begin, _ = header["user@id"]["data_offsets"]
    small.write_shard(header, data[: begin + 8] + data[begin : begin + 8] + data[begin + 16 :])
    targets = Targets()
    with pytest.raises(CorruptError, match="holds the same id twice"):
        targets.load(small.root, verify=False)
    assert len(targets.table) == 0


@pytest.mark.parametrize("kind", ["differential", "Full", ""])
def test_case_045_kinds_of_later_versions(small: Crafted, kind: str) -> None:
    small.edit(lambda document: document.update(kind=kind))
    refused(small, UnsupportedError, NAME, "kind", repr(kind))


@pytest.mark.parametrize("parents", [None, "6", [-1], [6.0], [True], {"6": 1}])
def test_case_045_parents_of_wrong_form(small: Crafted, parents: Any) -> None:
    small.edit(lambda document: document.update(parents=parents))
    refused(small, CorruptError, NAME, "manifest.parents")


# -- what stands in values and keys ------------------------------------------------------------------------------------

DAMAGED_VALUES = [
    {"float": 0.5},
    {"float": "0x1.8p+99999"},
    {"float": "half"},
    {"int": 5},
    {"int": "five"},
    {"bytes": 5},
    {"bytes": "é"},
    {"bytes": "A"},
    {"complex": ["0x0p+0"]},
    {"complex": 1},
    {"tuple": "ab"},
    {"dict": [[1]]},
    {"dict": [[{"dict": []}, 1]]},
    {"dict": [["a", 1], ["a", 2]]},
    {"dict": 1},
    {"bag": []},
    {"float": "0x0p+0", "int": "0x0"},
    {},
    0.5,
]


@pytest.mark.parametrize("value", DAMAGED_VALUES, ids=json.dumps)
@pytest.mark.parametrize("where", ["values", "metadata"])
def test_case_049_damaged_value(small: Crafted, where: str, value: Any) -> None:
    """Values are decoded before a target is touched."""
    if where == "values":
        small.edit(lambda document: document["values"].__setitem__(0, value))
        refused(small, CorruptError, "value 'epoch' of step 7")
    else:
        small.edit(lambda document: document["metadata"].update(note=value))
        refused(small, CorruptError, "metadata['note']")


@pytest.mark.parametrize(
    "key",
    [
        {"int": 1},
        {"int": "one"},
        {"float": "nil"},
        {"bool": "true"},
        {"NoneType": ""},
        {"str": "a"},
        {},
        1,
        None,
        ["a"],
    ],
    ids=json.dumps,
)
def test_case_047_damaged_key(small: Crafted, key: Any) -> None:
    small.edit(lambda document: document["tree"]["d"][0].__setitem__(0, key))
    refused(small, CorruptError, NAME, "key")


def test_case_047_same_key_twice(small: Crafted) -> None:
    small.edit(lambda document: document["tree"]["d"][1].__setitem__(0, "w"))
    refused(small, CorruptError, NAME, "same key twice", "'w'")
