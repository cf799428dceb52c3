"""Names in a directory of RecIS, built and parsed here, nowhere else.

    model-000003-of-000016.safetensors     data; number = shard * files of a shard + file, of all files
    index                                  JSON: block_index {stored name: file number}, file_index {file: number}
    tensorkey.json                         JSON: stored name of a block of a table -> its block name
    torch_rank_weights_embs_table_multi_shard.json    JSON for other tools: every stored array

A block of a table has the block name `table@slot^begin@end@size` and is stored as `table.slot/part_<shard>_<shards>`. A
dense tensor has one name for both: its own, `^` and a space.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from asyncckpt.errors import CorruptError, UnsupportedError
from asyncckpt.model.table_shard import Shard, is_shard, slice_info

INDEX_FILE = "index"
TENSOR_KEYS_FILE = "tensorkey.json"
ARRAYS_FILE = "torch_rank_weights_embs_table_multi_shard.json"
EMBEDDING_SLOT = "embedding"
STEP_FILTER_SLOT = "step_filter"
SLICE_SIZE = 65_536
DENSE_SLICE = " "
_DATA = re.compile(r"model-([0-9]{6,12})-of-([0-9]{6,12})\.safetensors")
_UNFINISHED = re.compile(r"ckpt-[0-9]{7,}(-[0-9]{7,})?\.[a-z.]+|[0-9]+tensorkey\.json|index\.tmp")
_SLICE = re.compile(r"([0-9]{1,18})@([0-9]{1,18})@([0-9]{1,18})")
_PART = re.compile(r"/part_([0-9]{1,9})_([0-9]{1,9})")

# How RecIS calls the slots of its optimizers: what comes before the names that ours have.
OPTIMIZERS = ("sparse_adamw_tf", "sparse_adamw", "sparse_adam")


@dataclass(frozen=True)
class BlockName:
    """What a block is: a slot of a table, for the ids of a slice; or a dense tensor, `slot` and `shard` None.

    part: (shard, shards) as its stored name says; None: it says nothing.
    """

    name: str
    slot: str | None = None
    shard: Shard | None = None
    part: tuple[int, int] | None = None

    @property
    def tensor_name(self) -> str:
        """`table@slot`, or the name of the dense tensor."""
        return self.name if self.slot is None else f"{self.name}@{self.slot}"


def data_file_name(number: int, count: int) -> str:
    return f"model-{number:06d}-of-{count:06d}.safetensors"


def parse_data_file_name(name: str) -> tuple[int, int] | None:
    """Return (number, count) of a data file; None for a foreign name."""
    match = _DATA.fullmatch(name)
    if match is None or data_file_name(int(match[1]), int(match[2])) != name:
        return None
    return int(match[1]), int(match[2])


def is_unfinished(name: str) -> bool:
    """Return whether a file is one that RecIS makes during a save and takes away in the end."""
    return _UNFINISHED.fullmatch(name) is not None


def slice_of(index: int, count: int) -> Shard:
    """Return the buckets of a shard, as RecIS' `gen_slice` gives them out: the first shards have one more."""
    share, rest = divmod(SLICE_SIZE, count)
    begin = index * share + min(index, rest)
    return (begin, begin + share + (index < rest), SLICE_SIZE)


def stored_name(table: str, slot: str, *, part: tuple[int, int]) -> str:
    """Return the stored name of a block of a table."""
    return f"{table}@{slot}".replace("@", ".") + f"/part_{part[0]}_{part[1]}"


def block_name(table: str, slot: str, shard: Shard) -> str:
    return f"{table}@{slot}^{slice_info(shard)}"


def dense_name(name: str) -> str:
    return f"{name}^{DENSE_SLICE}"


def check_name(name: str, *, what: str, reserved: tuple[str, ...]) -> None:
    """Refuse a name that RecIS would misread: UnsupportedError."""
    found = [text for text in reserved if text in name]
    if found or not name:
        raise UnsupportedError(
            f"{what} {name!r} cannot be written for RecIS", found=found, hint="RecIS uses these in names of its own"
        )


def parse_block_name(stored: str, block: str, *, owner: str) -> BlockName:
    """Parse the block name of what is stored under a name. CorruptError naming `owner`, the file it is from."""
    name, *slices = block.split("^")
    if len(slices) != 1 or not name:
        expected = "one '^', and something before it"
        raise CorruptError(f"{owner}: {block!r} is not the name of a block", expected=expected)
    if slices[0] == DENSE_SLICE:
        return BlockName(name=name)
    table, at, slot = name.rpartition("@")
    match = _SLICE.fullmatch(slices[0])
    shard = None if match is None else (int(match[1]), int(match[2]), int(match[3]))
    if not at or not table or not slot or not is_shard(shard):
        expected = "table@slot^begin@end@size, 0 <= begin < end <= size"
        raise CorruptError(f"{owner}: {block!r} is not the name of a block", expected=expected)
    return BlockName(name=table, slot=slot, shard=shard, part=_part_of(stored, name, owner))


def _part_of(stored: str, name: str, owner: str) -> tuple[int, int] | None:
    """Return (shard, shards) of a stored name; None where it is the block name itself."""
    prefix = name.replace("@", ".")
    if "/part_" not in stored:
        return None
    match = _PART.fullmatch(stored.removeprefix(prefix)) if stored.startswith(prefix) else None
    if match is None or int(match[1]) >= int(match[2]):
        expected = f"{prefix}/part_<shard>_<shards>"
        raise CorruptError(
            f"{owner}: a block of {name!r} is stored under a wrong name", found=stored, expected=expected
        )
    return int(match[1]), int(match[2])


def default_columns(slots: list[str], wanted: frozenset[str] | None) -> dict[str, str]:
    """Return the column that each slot of a table becomes: our name for a slot of RecIS' optimizers.

    wanted: the columns of the table to fill; a slot that it has by that very name keeps it. None: there is none yet.
    """
    plain = {slot: _plain(slot) for slot in slots}
    taken = list(plain.values())
    columns = {}
    for slot, name in plain.items():
        is_free = taken.count(name) == 1
        fits = name in wanted and slot not in wanted if wanted is not None else True
        columns[slot] = name if is_free and fits else slot
    return columns


def _plain(slot: str) -> str:
    if slot == STEP_FILTER_SLOT:
        return "last_seen"
    for optimizer in OPTIMIZERS:
        if slot.startswith(f"{optimizer}_"):
            return slot.removeprefix(f"{optimizer}_")
    return slot
