"""Directories as RecIS writes them, made by hand from its rules: json and numpy alone, nothing of ours.

`Handmade` keeps everything that is going to be written, so that a test can spoil any of it before or after `write`.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tests.worlds.bits import raw_of

CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "bool",
}
SIZE = 65_536


def slice_of(shard: int, shards: int) -> tuple[int, int]:
    """gen_slice: the first shards have one bucket more."""
    counts = [SIZE // shards + (number < SIZE % shards) for number in range(shards)]
    return sum(counts[:shard]), sum(counts[: shard + 1])


@dataclass
class Handmade:
    """A checkpoint of RecIS: `files` by name, each a list of (stored name, code, shape, bytes)."""

    shards: int = 1
    parallel: int = 2
    files: dict[str, list[tuple[str, str, list[int], bytes]]] = field(default_factory=dict)
    block_index: dict[str, int] = field(default_factory=dict)
    file_index: dict[str, int] = field(default_factory=dict)
    tensor_keys: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def of(
        tables: Mapping[str, Mapping[str, torch.Tensor]],
        dense: Mapping[str, torch.Tensor],
        *,
        shards: int = 1,
        parallel: int = 2,
    ) -> Handmade:
        """tables: by name, slots by name, `id` among them. Blocks go round in the order of the files."""
        made = Handmade(shards=shards, parallel=parallel)
        for shard in range(shards):
            begin, end = slice_of(shard, shards)
            blocks: list[tuple[str, str, torch.Tensor]] = []
            for name, slots in tables.items():
                rest = slots["id"].numpy().view(np.uint64) % SIZE
                mine = torch.from_numpy((rest >= begin) & (rest < end))
                for slot, values in slots.items():
                    stored = f"{name}.{slot}/part_{shard}_{shards}"
                    made.tensor_keys[stored] = f"{name}@{slot}^{begin:05d}@{end:05d}@{SIZE}"
                    blocks.append((stored, CODES[values.dtype], values[mine]))
            if shard == 0:
                blocks += [(f"{name}^ ", CODES[value.dtype], value) for name, value in dense.items()]
            for number, (stored, code, values) in enumerate(blocks):
                file = made.file(shard, number % parallel)
                made.files[file].append((stored, code, list(values.shape), raw_of(values)))
                made.block_index[stored] = made.file_index[file]
        return made

    def file(self, shard: int, number: int) -> str:
        name = f"model-{shard * self.parallel + number:06d}-of-{self.shards * self.parallel:06d}.safetensors"
        self.files.setdefault(name, [])
        self.file_index.setdefault(name, len(self.file_index))
        return name

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True)
        for name, arrays in self.files.items():
            (folder / name).write_bytes(data_file(arrays))
        index = {"block_index": self.block_index, "file_index": self.file_index}
        (folder / "index").write_text(json.dumps(index))
        (folder / "tensorkey.json").write_text(json.dumps(self.tensor_keys, indent=4))
        (folder / "torch_rank_weights_embs_table_multi_shard.json").write_text("{}")
        return folder


def data_file(arrays: Sequence[tuple[str, str, list[int], bytes]]) -> bytes:
    header: dict[str, Any] = {}
    end = 0
    for stored, code, shape, raw in arrays:
        header[stored] = {"dtype": code, "shape": shape, "data_offsets": [end, end + len(raw)]}
        end += len(raw)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (8 - len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(raw for *_, raw in arrays)


def user_rows(count: int = 3000, *, dim: int = 4, seed: int = 0) -> dict[str, torch.Tensor]:
    """Rows of one table, their ids all over int64 and in no order."""
    drawn = np.random.default_rng(seed)
    ids: NDArray[np.int64] = np.unique(drawn.integers(-(2**63), 2**63 - 1, count, dtype=np.int64, endpoint=True))
    drawn.shuffle(ids)
    generator = torch.Generator().manual_seed(seed)
    rows = {slot: torch.randn(len(ids), dim, generator=generator) for slot in ("embedding", "exp_avg", "exp_avg_sq")}
    return {
        "id": torch.from_numpy(ids),
        "embedding": rows["embedding"],
        "sparse_adam_exp_avg": rows["exp_avg"],
        "sparse_adam_exp_avg_sq": rows["exp_avg_sq"],
        "step_filter": torch.arange(len(ids)).reshape(-1, 1),
    }


def dense_values() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {
        "dense.weight": torch.randn(5, 3, generator=generator),
        "dense.bias": torch.randn(3, generator=generator).bfloat16(),
        "sparse_adam_step": torch.tensor(17),
        "flags": torch.tensor([True, False, True]),
        "empty": torch.empty(0, 4, dtype=torch.float16),
    }
