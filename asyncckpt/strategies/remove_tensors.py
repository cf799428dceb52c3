"""Take tensors out of a checkpoint: commit it again without them, then let the old one go.

1. Read the manifest, and open all of its files.
2. Choose what stays, and give it places in new shard files of one rank.
3. Copy those blocks as they are stored, chunk by chunk, each verified on the way, into a new attempt's folder.
4. Commit the manifest of the next number. Before that, the checkpoint is the old one in full.
5. Remove the old manifest, then its files. A crash in between leaves them to the next save or removal.

No file that a manifest names is ever changed.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

from asyncckpt.commit.attempt import Draft, claims
from asyncckpt.commit.discover import look_again, newest_step, read_manifest
from asyncckpt.commit.root import ReadRoot
from asyncckpt.commit.transaction import Transaction
from asyncckpt.engine.compact.copy_blocks import BlockCopy, copy_blocks
from asyncckpt.engine.process.background import background, check_may_wait, result_or_end, rewriters, senders
from asyncckpt.engine.process.future import as_checkpoint_error
from asyncckpt.engine.process.held_directory import held_directory
from asyncckpt.errors import IncompatibleError, must_be, warn
from asyncckpt.format.dtypes import dtype_by_name
from asyncckpt.format.manifest import Chain, Manifest
from asyncckpt.format.strict_json import Json
from asyncckpt.format.tree import VALUE, Node, leaves, tensor_paths
from asyncckpt.format.tree import Path as TreePath
from asyncckpt.format.write_manifest import render_body
from asyncckpt.model.own_rank import own_rank
from asyncckpt.native import Progress
from asyncckpt.options import SAVE_DEADLINE_S, KeepPolicy, SaveOptions
from asyncckpt.plan.contents import stored_dense
from asyncckpt.shard.files import ShardTarget
from asyncckpt.shard.reader import ChainReader
from asyncckpt.signals import uninterrupted
from asyncckpt.strategies.backend import OBJECTS, SHARDED_DIR, TENSORS, reading_root
from asyncckpt.strategies.stored_state import children, values_of


@uninterrupted
def remove_tensors(checkpoint_dir: str | os.PathLike[str], key_prefix: str, *, process_group: Any = None) -> None:
    """Remove all tensors whose key begins with key_prefix; a warning says when there is none.

    Rank 0 of the group does it; on other ranks it returns at once. Blocks until the new checkpoint is durable; it needs
    disk space for what stays, for a while. Raises NotFoundError, ConflictError while others save to the checkpoint or
    remove from it, CorruptError, IndeterminateError, IOFailedError, UsageError.
    """
    if not isinstance(key_prefix, str):
        raise must_be("key_prefix", "a string", key_prefix)
    if own_rank(None, None, process_group)[0] != 0:
        return
    check_may_wait("a removal")
    progress = Progress()
    removing = rewriters.submit(_remove, checkpoint_dir, key_prefix, progress)
    if not result_or_end(removing, "a removal", SAVE_DEADLINE_S, progress.cancel):
        warn(f"no tensor of {str(checkpoint_dir)!r} has a key that begins with {key_prefix!r}: nothing is removed")


@dataclass(frozen=True)
class Remaining:
    """What stays, as the part of one rank."""

    tree: Node
    values: tuple[Json, ...]
    blocks: tuple[BlockCopy, ...]


def without_tensors(manifest: Manifest, key_prefix: str) -> Remaining | None:
    """Choose what stays of all ranks' parts; None when no tensor has such a key."""
    tensors: dict[str, Node] = {}
    objects: dict[str, Node] = {}
    values: dict[TreePath, Json] = {}
    removed = False
    for part in manifest.parts:
        if part.tree[1] != (TENSORS, OBJECTS):
            raise IncompatibleError(f"step {manifest.step} was not saved by a strategy", found=part.tree[1])
        values = values_of(part) | values  # Where ranks differ, the lower one's, as of the objects that they are in.
        for name, kept in ((TENSORS, tensors), (OBJECTS, objects)):
            for key, child in children(part.tree, name):
                if name == TENSORS and key.startswith(key_prefix):
                    removed = True
                else:
                    kept.setdefault(key, child)
    if not removed:
        return None
    folders = tuple(("dict", tuple(kept), tuple(kept.values())) for kept in (tensors, objects))
    tree: Node = ("dict", (TENSORS, OBJECTS), folders)
    places = {path: place for place, path in enumerate(tensor_paths(tree))}
    return Remaining(
        tree=tree,
        values=tuple(values[path] for path, node in leaves(tree) if node is VALUE),
        blocks=tuple(_blocks(manifest, places)),
    )


def _blocks(manifest: Manifest, places: dict[TreePath, int]) -> list[BlockCopy]:
    """Return the blocks of the leaves that have a place; a leaf that was tied to another one gets blocks of its own.

    UnsupportedError for a dtype that this version does not know.
    """
    blocks = []
    dense, unreadable = stored_dense(manifest)
    for name, dtype in unreadable.items():
        dtype_by_name(dtype, owner=name)
    for item in dense.values():
        if item.path in places:
            for number in item.blocks:
                spec = replace(manifest.blocks[number].placed.spec, name=item.name, leaf=places[item.path])
                blocks.append(BlockCopy(number, None, spec))
    return sorted(blocks, key=lambda block: block.number)


def _remove(checkpoint_dir: str | os.PathLike[str], key_prefix: str, progress: Progress) -> bool:
    options = SaveOptions()
    try:
        with (
            reading_root(checkpoint_dir, SHARDED_DIR) as root,
            held_directory(root, options.durability) as commits,
        ):
            manifest, reader = look_again(root, lambda: _open_newest(root, progress))
            with reader:
                remaining = without_tensors(manifest, key_prefix)
                if remaining is None:
                    return False
                with claims.save(root, manifest.step + 1) as claim, Transaction.begin(commits, claim) as transaction:
                    draft = _write(manifest, remaining, reader, transaction, options, progress)
                    background.run(lambda: transaction.commit(draft), "a removal")
            commits.retain(KeepPolicy(latest=1), protected=frozenset)
            return True
    except (OSError, MemoryError) as error:
        raise as_checkpoint_error(error, None) from error


def _open_newest(root: ReadRoot, progress: Progress) -> tuple[Manifest, ChainReader]:
    manifest = read_manifest(root, newest_step(root))
    return manifest, ChainReader(root.data, Chain((manifest,)), threads=1, verify=False, progress=progress)


def _write(
    manifest: Manifest,
    remaining: Remaining,
    reader: ChainReader,
    transaction: Transaction,
    options: SaveOptions,
    progress: Progress,
) -> Draft:
    """Copy what stays into new shard files; returns what the manifest is made of."""
    target = ShardTarget(transaction.place, transaction.attempt, options, progress, sender=senders)
    own = copy_blocks(remaining.blocks, reader, target, rank=0)
    was = manifest.head
    head = transaction.head(created=was.created, files=own.files, values=remaining.values, metadata=was.metadata)
    return Draft(head, render_body([], remaining.tree, own.blocks), own.digests)
