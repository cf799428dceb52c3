"""Import safetensors files of Hugging Face as a checkpoint of ours, block by block."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from asyncckpt.format.manifest import Chain, RankPart
from asyncckpt.format.tree import TENSOR
from asyncckpt.formats.commit_import import Importable, blocks_of, run_import
from asyncckpt.formats.conversion import Conversion
from asyncckpt.formats.foreign_chain import ForeignReader, chain_of, dense_blocks
from asyncckpt.formats.hf.directory import HfFiles
from asyncckpt.model.result import SaveResult
from asyncckpt.native import Progress
from asyncckpt.options import Durability
from asyncckpt.shard.reader import READ_THREADS


def import_checkpoint(
    hf_path: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    step: int | None = None,
    durability: Durability = "fsync",
    parallel: int = 8,
    verify: bool = True,
) -> SaveResult:
    """Import tensors as a step of an asyncckpt directory, and return when it is durable; `load` gives them by name.

    hf_path   a safetensors file, its index, or a folder with `model.safetensors` or `model.safetensors.index.json`
    path      made with its parents when missing
    step      None: one more than the newest
    parallel  shard files, at most
    verify    read the checkpoint once more in the end, and compare it with the digests of what was copied

    The strings in the headers (`__metadata__`) are not taken. Nothing is committed when an error is raised:
    NotFoundError, CorruptError, UnsupportedError, UsageError, ConflictError for a step that exists or a directory that
    another process writes to, IndeterminateError, IOFailedError. Waits while a save or load of this process is in
    flight. Takes 300 MiB, whatever the size.
    """
    asked = Conversion.of(hf_path, path, step, durability=durability, parallel=parallel, verify=verify)
    return run_import(asked, open_import(asked))[0]


@contextmanager
def open_import(asked: Conversion) -> Iterator[Importable]:
    """Open what is to be imported. NotFoundError, CorruptError, UnsupportedError, UsageError, IOFailedError."""
    with HfFiles.open(asked.foreign) as found:
        chain = _chain(found)
        facts = {"tensors": len(found.arrays), "shards": len(found.files.names), "bytes": found.bytes}
        with ForeignReader(found.files, found.folder, chain, threads=READ_THREADS, progress=Progress()) as reader:
            files = tuple(found.path.parent / name for name in found.files.names)
            yield Importable(chain.newest.parts, blocks_of(reader), facts, asked.step, files=files)


def _chain(found: HfFiles) -> Chain:
    names = tuple(found.arrays)
    blocks = [
        block for leaf, (name, array) in enumerate(found.arrays.items()) for block in dense_blocks(name, array, leaf)
    ]
    tree = ("dict", names, (TENSOR,) * len(names))
    part = RankPart(rank=0, tables=(), tree=tree, values=(), blocks=tuple(blocks))
    return chain_of([part], found.files, step=0, writer="safetensors")
