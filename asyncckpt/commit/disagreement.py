"""What ranks hold of one tensor, and does not make one: told as that, where readers would find a damaged manifest."""

from __future__ import annotations

from collections import defaultdict

from asyncckpt.errors import CheckpointError, ConflictError
from asyncckpt.format.head import open_manifest, rank_fields
from asyncckpt.format.manifest import BlockFacts, Manifest
from asyncckpt.format.read_manifest import check_whole, decode_part
from asyncckpt.format.tree import Path, path_name, tensor_paths
from asyncckpt.model.table import Role
from asyncckpt.plan.contents import paths_by_part, stored_dense

_RANKS_SHOWN_MAX = 8
_HINT = (
    "a DTensor that was made from local tensors of different sizes needs the shape= and stride= of the whole; else "
    "give all ranks the same model and mesh"
)


def disagreement(raw: bytes, name: str) -> ConflictError | None:
    """Return of which tensor of a manifest, that readers refuse, the ranks have contributed what makes no whole.

    None: of none, or nothing can be said.
    """
    held: dict[Path | str, list[tuple[int, BlockFacts]]] = defaultdict(list)
    try:
        fields, sealed = open_manifest(raw, name)
        first_file = 0
        for rank, own in enumerate(rank_fields(fields, sealed.head.ranks_count)):
            files = sealed.head.files_of_ranks[rank]
            part = decode_part(own, sealed.head, rank, files, first_file=first_file)
            first_file += len(files)
            paths = tensor_paths(part.tree)
            for block in part.blocks:
                spec = block.placed.spec
                if spec.table is None and spec.role is not Role.PAD:
                    held[spec.name if spec.leaf is None else paths[spec.leaf]].append((rank, block))
    except (CheckpointError, IndexError):
        return None
    for found, blocks in held.items():
        if (error := _of_tensor(found, blocks, sealed.head.step)) is not None:
            return error
    return None


def check_written(manifest: Manifest) -> None:
    """Raise ConflictError for a tensor that ranks have, and none has written: each holds nothing of it, or says that
    another one writes it."""
    written = {item.path for item in stored_dense(manifest)[0].values()}
    for paths in paths_by_part(manifest.parts):
        for path in paths:
            if path not in written:
                raise ConflictError(
                    f"no rank has written tensor {path_name(path)!r} of step {manifest.step}",
                    hint="one of the ranks that save must hold each part of it, and of a Sharded be its writer",
                )


def _of_tensor(found: Path | str, blocks: list[tuple[int, BlockFacts]], step: int) -> ConflictError | None:
    name = found if isinstance(found, str) else path_name(found)
    wholes: dict[tuple[str, tuple[int, ...]], list[int]] = defaultdict(list)
    for rank, block in blocks:
        spec = block.placed.spec
        ranks = wholes[spec.dtype, spec.whole_shape or spec.shape]
        if rank not in ranks:
            ranks.append(rank)
    if len(wholes) > 1:
        shown = [f"{dtype} {list(shape)} on {_ranks(ranks)}" for (dtype, shape), ranks in wholes.items()]
        return ConflictError(f"tensor {name!r} of step {step} is not the same on all ranks", found=shown, hint=_HINT)
    try:
        check_whole([block.placed.spec for _, block in blocks], name, owner="it")
    except CheckpointError:
        ((_, whole),) = wholes
        pieces = [
            f"{list(spec.shape)} at {list(spec.begin)} on rank {rank}"
            for rank, spec in ((rank, block.placed.spec) for rank, block in blocks[:_RANKS_SHOWN_MAX])
        ]
        return ConflictError(
            f"what ranks hold of tensor {name!r} of step {step} does not make it up, or overlaps",
            found=pieces,
            expected=f"every element of {list(whole)} once",
            hint=_HINT,
        )
    return None


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:_RANKS_SHOWN_MAX]))
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{', ...' if len(ranks) > _RANKS_SHOWN_MAX else ''}"
