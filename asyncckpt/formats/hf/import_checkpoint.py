"""Import safetensors files of Hugging Face as a checkpoint of ours, block by block."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

from asyncckpt.arguments import check_choice, check_int, check_type
from asyncckpt.format.limits import check_step
from asyncckpt.format.manifest import Chain, RankPart
from asyncckpt.format.tree import TENSOR
from asyncckpt.formats.commit_import import commit_import, verify_import
from asyncckpt.formats.foreign_chain import ForeignReader, chain_of, dense_blocks
from asyncckpt.formats.hf.directory import HfFiles
from asyncckpt.model.result import SaveResult
from asyncckpt.native import Progress
from asyncckpt.options import DURABILITIES, PARALLEL_MAX, Durability, SaveOptions
from asyncckpt.shard.reader import READ_THREADS
from asyncckpt.signals import uninterrupted
from asyncckpt.storage.directory import check_path


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
    check_choice("durability", durability, DURABILITIES)
    check_int("parallel", parallel, at_least=1, at_most=PARALLEL_MAX)
    check_type("verify", verify, bool)
    options = SaveOptions(durability=durability, parallel=parallel)
    return run_import(check_path(hf_path), check_path(path), check_step(step), options, Progress(), verify=verify)


@uninterrupted
def run_import(
    source: Path, path: Path, step: int | None, options: SaveOptions, progress: Progress, *, verify: bool
) -> SaveResult:
    """Do the same, with arguments that are checked, and say how far it is."""
    begun = time.perf_counter()
    with HfFiles.open(source) as found:
        chain = _chain(found)
        with ForeignReader(found.files, found.folder, chain, threads=READ_THREADS, progress=Progress()) as reader:
            result = commit_import(path, step, chain, reader, options, progress)
    if verify:
        verify_import(path, result.step, progress)
    return replace(result, seconds=time.perf_counter() - begun)


def _chain(found: HfFiles) -> Chain:
    names = tuple(found.arrays)
    blocks = [
        block for leaf, (name, array) in enumerate(found.arrays.items()) for block in dense_blocks(name, array, leaf)
    ]
    tree = ("dict", names, (TENSOR,) * len(names))
    part = RankPart(rank=0, tables=(), tree=tree, values=(), blocks=tuple(blocks))
    return chain_of([part], found.files, step=0, writer="safetensors")
