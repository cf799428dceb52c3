"""Take tensors out of a checkpoint: commit it anew without them, then let the old one go.

1. Read the manifest, and open all of its files.
2. Choose what stays, and give it places in new shard files of one rank.
3. Copy those blocks as they are stored, chunk by chunk, each verified on the way, into a new attempt's folder.
4. Publish the manifest of the next number. This is the commit: before it, the checkpoint is the old one in full.
5. Remove the old manifest, then its files. A crash in between leaves them to the next save or removal.

No file that a manifest names is ever changed.
"""

from __future__ import annotations

import asyncio
import os
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from asyncckpt.commit.discover import newest_step, read_manifest
from asyncckpt.commit.publish import abandon_attempt, begin_attempt, publish
from asyncckpt.commit.retention import KnownHeads, keep_latest, sweep
from asyncckpt.commit.root import CheckpointRoot
from asyncckpt.engine.background import workers
from asyncckpt.engine.running_compactions import running_compactions
from asyncckpt.engine.save_steps import as_ours
from asyncckpt.errors import IncompatibleError, IndeterminateError, UsageError
from asyncckpt.format.chain import Chain
from asyncckpt.format.manifest import Manifest, encode_manifest, render_body
from asyncckpt.format.names import LOCK_NAME, Attempt
from asyncckpt.format.strict_json import Json
from asyncckpt.format.tree import VALUE, Node, descend, leaves
from asyncckpt.format.tree import Path as TreePath
from asyncckpt.model.block import BlockSpec
from asyncckpt.model.table import Role
from asyncckpt.native import Progress, core, paged
from asyncckpt.options import CHUNK_BYTES, SaveOptions
from asyncckpt.pipeline.threads import IdleEndingThreads
from asyncckpt.plan.image import plan_image
from asyncckpt.shard.reader import ChainReader
from asyncckpt.shard.stored_rows import stored_source
from asyncckpt.shard.stream import stream_sources
from asyncckpt.storage.owner_lock import OwnerLock
from asyncckpt.strategies.job_ranks import ranks_of
from asyncckpt.strategies.layout import OBJECTS, SHARDED_DIR, TENSORS, reading_root


def remove_tensors(checkpoint_dir: str | os.PathLike[str], key_prefix: str, *, process_group: Any = None) -> None:
    """Remove all tensors whose key begins with key_prefix; a warning says when there is none.

    Rank 0 of the group does it; on other ranks it returns at once. Blocks until the new checkpoint is durable; it needs
    disk space for what stays, for a while. Raises NotFoundError, ConflictError while another process saves to the
    checkpoint, CorruptError, IndeterminateError, IOFailedError, UsageError.
    """
    if not isinstance(key_prefix, str):
        raise UsageError("key_prefix is wrong", found=key_prefix, expected="a string")
    if ranks_of(process_group)[0] != 0:
        return
    # On a worker, where no KeyboardInterrupt cuts the commit in two.
    if not workers.submit(_remove, Path(checkpoint_dir), key_prefix).result():
        what = f"no tensor of {str(checkpoint_dir)!r} has a key that begins with {key_prefix!r}: nothing is removed"
        warnings.warn(what, stacklevel=3)


@dataclass(frozen=True)
class Remaining:
    """What stays: as the part of one rank. `blocks` are (number in the old manifest, spec in the new one)."""

    tree: Node
    values: tuple[Json, ...]
    blocks: tuple[tuple[int, BlockSpec], ...]


def without_tensors(manifest: Manifest, key_prefix: str) -> Remaining | None:
    """Choose what stays of all ranks' parts; None when no tensor has such a key."""
    tensors: dict[str, Node] = {}
    objects: dict[str, Node] = {}
    values: dict[TreePath, Json] = {}
    removed = False
    for part in manifest.parts:
        if part.tree[1] != (TENSORS, OBJECTS):
            raise IncompatibleError(
                f"checkpoint of step {manifest.step} was not saved by a strategy", found=part.tree[1]
            )
        found = iter(part.values)
        values |= {path: next(found) for path, node in leaves(part.tree) if node is VALUE}
        for name, kept in ((TENSORS, tensors), (OBJECTS, objects)):
            node = descend(part.tree, (name,))
            assert node is not None
            for key, child in zip(node[1], node[2], strict=True):
                if name == TENSORS and key.startswith(key_prefix):
                    removed = True
                else:
                    kept.setdefault(key, child)
    if not removed:
        return None
    folders = tuple(("dict", tuple(kept), tuple(kept.values())) for kept in (tensors, objects))
    tree: Node = ("dict", (TENSORS, OBJECTS), folders)
    places = {path: place for place, path in enumerate(path for path, node in leaves(tree) if node is not VALUE)}
    return Remaining(
        tree=tree,
        values=tuple(values[path] for path, node in leaves(tree) if node is VALUE),
        blocks=tuple(_blocks(manifest, places)),
    )


def _blocks(manifest: Manifest, places: dict[TreePath, int]) -> list[tuple[int, BlockSpec]]:
    """The blocks of the leaves that have a place."""
    blocks = []
    number = 0
    for part in manifest.parts:
        paths = [path for path, node in leaves(part.tree) if node is not VALUE]
        for block in part.blocks:
            spec = block.placed.spec
            if spec.role is Role.DENSE and spec.leaf is not None and paths[spec.leaf] in places:
                blocks.append((number, replace(spec, leaf=places[paths[spec.leaf]])))
            number += 1
    return blocks


def _remove(checkpoint_dir: Path, key_prefix: str) -> bool:
    with reading_root(checkpoint_dir, SHARDED_DIR) as root:
        lock = OwnerLock.acquire(root.root, LOCK_NAME)
        try:
            manifest = read_manifest(root, newest_step(root))
            remaining = without_tensors(manifest, key_prefix)
            if remaining is None:
                return False
            attempt = Attempt.new(manifest.step + 1)
            with running_compactions.enter(root, attempt):
                heads = KnownHeads(root)
                sweep(root, heads, keep_attempts=running_compactions.beside(attempt))
                _commit(root, manifest, remaining, attempt)
                keep_latest(root, heads, count=1, protected=())
            return True
        except (OSError, MemoryError) as error:
            raise as_ours(error, None) from error
        finally:
            lock.release()


def _commit(root: CheckpointRoot, manifest: Manifest, remaining: Remaining, attempt: Attempt) -> None:
    """Copy and publish. After an IndeterminateError the files stay, for their manifest may be there."""
    options = SaveOptions()
    chain = Chain(manifests=(manifest,))
    image = plan_image([spec for _, spec in remaining.blocks], parallel=options.parallel, rank=0)
    with ChainReader(root.data, chain, threads=1, verify=False, progress=Progress()) as reader:
        sources = [stored_source(reader, number, None) for number, _ in remaining.blocks]
        size = min(CHUNK_BYTES, max(paged(file.bytes) for file in image.files))
        folder = begin_attempt(root, attempt)
        memory = core.map_memory(2 * size)
        try:
            files, digests = stream_sources(
                image,
                sources,
                buffers=(memory.address, memory.address + size),
                writer=IdleEndingThreads("asyncckpt-removal", 1),
                folder=folder,
                attempt=attempt,
                options=options,
                progress=Progress(),
            )
            head = replace(
                manifest.head,
                step=attempt.step,
                attempt=attempt.id,
                ranks_count=1,
                files=files,
                values=remaining.values,
            )
            raw = encode_manifest(head, render_body([], remaining.tree, image.blocks), digests)
            asyncio.run(publish(root, folder, attempt, raw, durable=True, threads=workers))
        except IndeterminateError:
            raise
        except BaseException:
            abandon_attempt(root, attempt)
            raise
        finally:
            memory.close()
            folder.close()
