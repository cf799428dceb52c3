"""Case 45: deltas whose chain is broken, and manifests that say what a delta cannot be.

A small chain of steps 100 (full), 120, 125, 130 is made sound and then wrong in one place. Whatever is wrong, no target
is touched, and the chain is printed.
"""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from crafted import Crafted, Document, block, picture, with_nonsense

import asyncckpt
from asyncckpt.commit.chain import read_chain
from asyncckpt.commit.root import CheckpointRoot
from tests.chains.model import DIM, layer_of, load, new_table, row
from tests.chains.written import Written, write
from tests.worlds.directories import flip_byte
from tests.worlds.rows import rows_of

CorruptError, IncompatibleError = asyncckpt.CorruptError, asyncckpt.IncompatibleError
STEPS = (100, 120, 125, 130)
SHOWN = "chain 130 -> 125 -> 120 -> 100 (full)"
Chain = dict[int, Written]


def write_delta(root: Path, step: int, parent: Written) -> Written:
    return write(root, step, {"user": layer_of({step: row(step)}, removed=(parent.head.step,))}, parents=parent.chain)


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    root = tmp_path / "root"
    found = {100: write(root, 100, {"user": layer_of({1: row(1), 100: row(100)})})}
    for before, step in itertools.pairwise(STEPS):
        found[step] = write_delta(root, step, found[before])
    return found


def broken(chain: Chain, *parts: str, error: type[asyncckpt.CheckpointError] = CorruptError, step: int = 130) -> str:
    """The message of a load and of verify, after which nothing is changed."""
    root = chain[100].root
    before = picture(root)
    table = new_table()
    table.insert(torch.tensor([999]), torch.full((1, DIM), -77.0))
    untouched = rows_of(table)
    with pytest.raises(asyncckpt.CheckpointError) as caught:
        asyncckpt.Loader(root, {"user": table}, step=step).load()
    message = str(caught.value)
    assert type(caught.value) is error, message
    assert [part for part in parts if part not in message] == [], message
    assert rows_of(table) == untouched
    with pytest.raises(error):
        asyncckpt.verify(root, step)
    assert picture(root) == before
    return message


def edit(written: Written, change: Any) -> None:
    Crafted(root=written.root, step=written.head.step).edit(change)


def test_case_045_the_chain_is_sound(chain: Chain) -> None:
    assert load(chain[100].root) == {1: row(1), 130: row(130)}


# -- what a parent may be ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", STEPS[:-1])
def test_case_045_parent_is_missing(chain: Chain, step: int) -> None:
    chain[step].manifest.unlink()
    broken(chain, f"checkpoint of step 130 (delta) cannot be put together: its parent step {step} is missing; {SHOWN}")
    assert [s for s in STEPS[:-1] if s >= step] == [s for s in STEPS[:-1] if is_broken(chain, s)]


def is_broken(chain: Chain, step: int) -> bool:
    try:
        load(chain[100].root, step)
    except asyncckpt.CheckpointError:
        return True
    return False


@pytest.mark.parametrize("step", STEPS[:-1])
def test_case_045_data_of_a_parent_is_missing(chain: Chain, step: int) -> None:
    shutil.rmtree(chain[step].folder)
    broken(chain, f"r00000-000.safetensors' of rank 0 of step {step} is missing")


@pytest.mark.parametrize("step", STEPS[:-1])
def test_case_045_parent_is_damaged(chain: Chain, step: int) -> None:
    flip_byte(chain[step].manifest, 40)
    broken(chain, f"its parent step {step} is damaged: manifest '{chain[step].manifest.name}'", SHOWN)


@pytest.mark.parametrize("step", STEPS[:-1])
def test_case_045_parent_was_rewritten(chain: Chain, step: int) -> None:
    """The same step, saved again: what the delta was laid over is gone."""
    old = chain[step]
    old.manifest.unlink()
    again = write(old.root, step, {"user": layer_of({7: row(7)})}, parents=old.head.parents)
    said = f"its parent step {step} was rewritten: another checkpoint is there; {SHOWN}"
    broken(chain, said, f"found {again.digest}", f"expected {old.digest}")


def test_case_045_parent_was_edited(chain: Chain) -> None:
    """The same attempt, with its own digest made right."""
    edit(chain[120], lambda document: document.update(writer="somebody else"))
    broken(chain, "its parent step 120 was rewritten", SHOWN, f"expected {chain[120].digest}")


def test_case_045_parent_of_another_attempt(chain: Chain) -> None:
    edit(chain[130], lambda document: document["parents"][0].update(attempt="0" * 32))
    broken(chain, "its parent step 125 was rewritten", SHOWN)


def test_case_045_parents_that_pin_different_ones(chain: Chain) -> None:
    edit(chain[130], lambda document: document["parents"][1].update(digest="0" * 32))
    said = f"its parent step 125 is based on another checkpoint of step 120; {SHOWN}"
    broken(chain, said, f"found {chain[120].digest}, expected {'0' * 32}")
    edit(chain[130], lambda document: document["parents"][1].update(digest=chain[120].digest, attempt="0" * 32))
    broken(chain, said, f"found {chain[120].head.attempt}, expected {'0' * 32}")


def test_case_045_gap(chain: Chain) -> None:
    """Step 130 forgets 120, which 125 builds upon."""
    edit(chain[130], lambda document: document["parents"].pop(1))
    broken(
        chain,
        "it has a gap, its parent step 125 has other bases; chain 130 -> 125 -> 100 (full)",
        "found 120 -> 100, expected 100",
    )


def test_case_045_more_parents_than_there_are(chain: Chain) -> None:
    """Something is said to lie below a full checkpoint."""
    older = write(chain[100].root, 90, {"user": layer_of({1: row(1)})})
    pin = {"step": 90, "attempt": older.head.attempt, "digest": older.digest}
    edit(chain[130], lambda document: document["parents"].append(pin))
    broken(chain, "it has a gap, its parent step 125 has other bases", "found 120 -> 100, expected 120 -> 100 -> 90")


def test_case_045_chain_that_ends_with_a_delta(chain: Chain) -> None:
    edit(chain[130], lambda document: document["parents"].pop())
    broken(chain, "it ends with a delta, not with a full checkpoint; chain 130 -> 125 -> 120 (full)")


def test_case_045_long_chains_are_shown_short(chain: Chain) -> None:
    top = chain[130]
    for step in range(131, 161):
        top = write_delta(top.root, step, top)
    chain[100].manifest.unlink()
    message = broken(chain, "chain 160 -> 159 -> 158 -> ", "... 17 more ...", "-> 100 (full)", step=160)
    assert len(message.replace(str(chain[100].root), "")) < 300


def test_case_045_fallback_passes_over_what_is_broken(chain: Chain) -> None:
    chain[120].manifest.unlink()
    table = new_table()
    report = asyncckpt.Loader(chain[100].root, {"user": table}, fallback=True).load()
    assert (report.step, report.fallback_from) == (100, (130, 125))
    assert rows_of(table) == {1: row(1), 100: row(100)}


def test_case_045_parent_of_a_newer_version_is_not_passed_over(chain: Chain) -> None:
    edit(chain[120], lambda document: document.update(version=9, writer="asyncckpt 9"))
    broken(chain, "written by asyncckpt 9", error=IncompatibleError)
    with pytest.raises(IncompatibleError):
        asyncckpt.Loader(chain[100].root, {"user": new_table()}, fallback=True).load()


# -- compacted ---------------------------------------------------------------------------------------------------------


def compact(chain: Chain, step: int, *, replaces: str | None = None) -> Written:
    """A full checkpoint with other contents than the chain's, so that it shows whether it is used."""
    rows = {1000 + step: row(step)}
    digest = chain[step].digest if replaces is None else replaces
    return write(chain[100].root, step, {"user": layer_of(rows)}, replaces=digest)


@pytest.mark.parametrize("step", STEPS[1:])
def test_case_045_compacted_parent_ends_the_chain(chain: Chain, step: int) -> None:
    compacted = compact(chain, step)
    for older in (s for s in STEPS if s < step):
        shutil.rmtree(chain[older].folder)
        chain[older].manifest.unlink()
    newer = {s: row(s) for s in STEPS[-1:] if s > step}
    assert load(compacted.root) == {1000 + step: row(step)} | newer
    assert asyncckpt.verify(compacted.root).steps == tuple(s for s in reversed(STEPS) if s >= step)
    chain[step].manifest.unlink()
    shutil.rmtree(chain[step].folder)
    assert load(compacted.root) == {1000 + step: row(step)} | newer
    assert asyncckpt.list_steps(compacted.root) == [s for s in STEPS if s >= step]


def test_case_045_compacted_parent_of_another_manifest(chain: Chain) -> None:
    """Its own manifest counts, as long as it is there."""
    compact(chain, 120, replaces="0" * 32)
    assert load(chain[100].root) == {1: row(1), 130: row(130)}
    chain[120].manifest.unlink()
    broken(chain, "its parent step 120 was rewritten", SHOWN, f"found {'0' * 32}, expected {chain[120].digest}")


def test_case_045_shorter_chain_upon_a_compacted_parent(chain: Chain) -> None:
    """A delta saved after the compaction may end its chain there. Without the compacted checkpoint, that is a delta."""
    compacted = compact(chain, 120)
    parents = (chain[125].fact, chain[120].fact)
    write(compacted.root, 140, {"user": layer_of({140: row(140)})}, parents=parents)
    assert load(compacted.root, 140) == {1120: row(120), 125: row(125), 140: row(140)}
    compacted.manifest.unlink()
    broken(chain, "it ends with a delta", step=140)


def test_case_045_compacted_manifest_under_the_wrong_name(chain: Chain) -> None:
    compacted = compact(chain, 130)
    compacted.manifest.rename(chain[130].manifest)
    broken(chain, "000000000130.json", "replaces another manifest, but its name does not")
    chain[125].manifest.rename(compacted.manifest)
    broken(chain, "000000000130.full.json", "holds another step than its name")
    chain[130].manifest.unlink()
    compacted.manifest.rename(compacted.manifest.with_name("000000000125.full.json"))
    broken(chain, "000000000125.full.json", "names no manifest that it replaces", step=125)


# -- what a manifest may say -------------------------------------------------------------------------------------------


def parents_of(chain: Chain, *steps: int) -> list[Document]:
    return [{"step": s, "attempt": chain[s].head.attempt, "digest": chain[s].digest} for s in steps]


@pytest.mark.parametrize("step", [130, 131, 10**12 - 1])
def test_case_045_parent_is_not_older(chain: Chain, step: int) -> None:
    """So no chain has a cycle, however manifests pin each other."""
    edit(chain[130], lambda document: document["parents"][0].update(step=step))
    broken(chain, "000000000130.json", "steps of parents do not descend", f"found [{step}, 120, 100]", "below 130")


def test_case_045_two_that_build_upon_each_other(chain: Chain) -> None:
    edit(chain[120], lambda document: document.update(parents=parents_of(chain, 130)))
    broken(chain, "its parent step 120 is damaged", "steps of parents do not descend, found [130]", SHOWN)


def test_case_045_parents_in_disorder_or_twice(chain: Chain) -> None:
    edit(chain[130], lambda document: document.update(parents=parents_of(chain, 120, 125, 100)))
    broken(chain, "steps of parents do not descend")
    edit(chain[130], lambda document: document.update(parents=parents_of(chain, 125, 125, 100)))
    broken(chain, "steps of parents do not descend")
    twice = [*parents_of(chain, 125), {**parents_of(chain, 125)[0], "step": 120}, *parents_of(chain, 100)]
    edit(chain[130], lambda document: document.update(parents=twice))
    broken(chain, "names a parent twice")


def test_case_045_chain_over_the_cap(chain: Chain) -> None:
    parents = [{"step": 20_000 - n, "attempt": f"{n:032x}", "digest": f"{n:032x}"} for n in range(10_001)]
    edit(chain[130], lambda document: document.update(parents=parents))
    broken(chain, "manifest.parents is too long", "found 10001", "expected 10000")


@pytest.mark.parametrize(
    ("step", "changes", "said"),
    [
        (130, {"parents": []}, "a full checkpoint has no parents, a delta has, found ('delta', 0)"),
        (130, {"kind": "full"}, "a full checkpoint has no parents, a delta has, found ('full', 3)"),
        (130, {"requires": []}, "uses features that it does not require, found ['delta']"),
        (130, {"replaces": "0" * 32}, "is compacted but not full"),
        (130, {"replaces": "0" * 31}, "manifest.replaces must be"),
        (130, {"parents": ["125"]}, "manifest.parents[0] is not an object"),
        (100, {"replaces": "0" * 32}, "replaces another manifest, but its name does not"),
    ],
)
def test_case_045_head_that_cannot_be(chain: Chain, step: int, changes: Document, said: str) -> None:
    edit(chain[step], lambda document: document.update(changes))
    broken(chain, f"{step:012d}.json", said, step=step)


@pytest.mark.parametrize("field", ["step", "attempt", "digest"])
@pytest.mark.parametrize("value", [None, "", "0" * 31, "X" * 32, -1, 1.5, True, [], 10**12])
def test_case_045_parent_of_wrong_form(chain: Chain, field: str, value: Any) -> None:
    edit(chain[130], lambda document: document["parents"][0].update({field: value}))
    broken(chain, f"manifest.parents[0].{field}")


@pytest.mark.parametrize(
    ("step", "changes", "said"),
    [
        (100, {"whole": False}, "is a change to a table where there is nothing to change"),
        (100, {"removed": 1}, "is a change to a table where there is nothing to change"),
        (130, {"whole": True}, "is a change to a table where there is nothing to change"),
        (130, {"whole": 0}, "manifest.tables[0].whole must be"),
        (130, {"removed": 2}, "block 'user@#removed' does not fit its table, found (1,)"),
        (130, {"removed": -1}, "manifest.tables[0].removed must be"),
        (130, {"rows": 2}, "block 'user@id' does not fit its table"),
        (130, {"filters": {}}, "manifest.tables[0].filters must be"),
        (130, {"filters": [1]}, "manifest.tables[0].filters[0] is not an object"),
    ],
)
def test_case_045_table_of_a_delta_that_cannot_be(chain: Chain, step: int, changes: Document, said: str) -> None:
    edit(chain[step], lambda document: document["tables"][0].update(changes))
    broken(chain, f"{step:012d}.json", said, step=step)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"name": "user@gone"}, "is neither a table's nor dense"),
        ({"name": "user@gone", "column": "gone"}, "block 'user@gone' has not the form of its role"),
        ({"dtype": "float64"}, "block 'user@#removed' has not the form of its role"),
        ({"shape": [1, 1]}, "block 'user@#removed' has not the form of its role"),
        ({"role": "metadata"}, "removed ids of table 'user' are missing"),
        ({"role": "pad"}, "is neither a table's nor dense"),
        ({"leaf": 0}, "names a leaf that does not exist"),
    ],
)
def test_case_045_removed_ids_of_wrong_form(chain: Chain, changes: Document, said: str) -> None:
    edit(chain[130], lambda document: block(document, "user@#removed").update(changes))
    broken(chain, "000000000130.json", said)


# -- pads and encodings ------------------------------------------------------------------------------------------------


@pytest.fixture
def rich(tmp_path: Path) -> Crafted:
    """A delta with everything that a manifest can say."""
    root = tmp_path / "root"
    full = write(root, 1, {"user": layer_of({id: row(0) for id in range(900)})})
    encoding = {"user@sum": ({"kind": "zstd", "level": 1},), "w": ({"kind": "cast", "dtype": "bfloat16"},)}
    write(
        root,
        2,
        {"user": layer_of({id: row(1) for id in range(500)}, removed=(600, 601))},
        dense={"w": torch.ones(40, 4)},
        parents=full.chain,
        encoding=encoding,
        pads=(7,),
        part_rows=400,
    )
    assert len(load(root)) == 898
    return Crafted(root=root, step=2)


def refused(rich: Crafted, said: str, error: type[asyncckpt.CheckpointError] = CorruptError) -> None:
    with pytest.raises(error) as caught:
        load(rich.root)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"shape": [7, 1]}, "has not the form of its role"),
        ({"dtype": "int8"}, "has not the form of its role"),
        ({"leaf": 1}, "has not the form of its role"),
        ({"name": "pad"}, "has not the form of its role"),
        ({"table": "user", "column": "x"}, "is neither a table's nor dense"),
        ({"row_begin": 0, "whole_shape": [7]}, "has not the form of its role"),
    ],
)
def test_case_045_pad_of_wrong_form(rich: Crafted, changes: Document, said: str) -> None:
    rich.edit(lambda document: block(document, "#pad.0").update(changes))
    refused(rich, said)


def test_case_045_pad_of_a_page(tmp_path: Path) -> None:
    write(tmp_path, 1, {"user": layer_of({1: row(1)})}, pads=(4096,))
    with pytest.raises(CorruptError, match=r"block '#pad.0' has not the form of its role"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"encoding": []}, ".encoding must be"),
        ({"encoding": {}}, ".encoding must be"),
        ({"encoding": [{}]}, "has no 'kind'"),
        ({"encoding": [{"kind": ""}]}, ".encoding must be"),
        ({"encoding": [{"kind": "zstd"}] * 17}, ".encoding is too long"),
        ({"stored": None}, ".stored is not an object"),
        ({"stored": {"dtype": "U8"}}, "has no 'shape'"),
        ({"stored": {"dtype": "U8", "shape": [2**62, 4]}}, ".stored is of impossible size"),
        ({"stored": {"dtype": "U8", "shape": [3]}}, "does not fit its shape or its file"),
        ({"shape": [399]}, "elements of tensor 'user@sum' are missing"),
    ],
)
def test_case_045_encoded_block_of_wrong_form(rich: Crafted, changes: Document, said: str) -> None:
    rich.edit(lambda document: block(document, "user@sum").update(changes))
    refused(rich, said)


@pytest.mark.parametrize("feature", ["delta", "encoding", "pad"])
def test_case_045_feature_that_is_not_required(rich: Crafted, feature: str) -> None:
    rich.edit(lambda document: document["requires"].remove(feature))
    refused(rich, f"uses features that it does not require, found ['{feature}']")


def test_case_045_feature_that_is_not_known(rich: Crafted) -> None:
    rich.edit(lambda document: document["requires"].append("holograms"))
    refused(rich, "'holograms'", IncompatibleError)


# What the manifests alone cannot prove wrong: names of leaves and keys (the files can), steps of an encoding and the
# shape they give (whoever decodes can), and what is for people.
FREE = {
    "created",
    "writer",
    "metadata",
    "slice",
    "leaf",
    "d",
    "name",
    "key",
    "dtype",
    "shape",
    "kind",
    "level",
    "shuffle",
}


def test_case_045_every_field_replaced_by_every_wrong_type(rich: Crafted) -> None:
    """Some 2,500 manifests of a delta. Each one is refused by name, or was right after all."""
    sound = rich.document()
    accepted = set()
    with CheckpointRoot.for_reading(rich.root) as root:
        for path, document in with_nonsense(sound):
            rich.write(document)
            try:
                read_chain(root, rich.step)
            except asyncckpt.CheckpointError:
                continue
            accepted.add(next(key for key in reversed(path) if isinstance(key, str)))
    assert accepted == FREE
