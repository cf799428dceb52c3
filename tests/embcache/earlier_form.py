"""Write the earlier form of a sparse checkpoint: one directory per rank, each with a commit of its own."""

from __future__ import annotations

from pathlib import Path

from asyncckpt.embcache.find_collections import saved_tables
from asyncckpt.embcache.path_rules import make_folders
from asyncckpt.embcache.saver import _ExactModesSaver
from asyncckpt.options import RankOptions
from tests.embcache.models import CachedNet


def rank_folder(*, rank: int, world_size: int) -> str:
    return f"rank{rank:05d}-of-{world_size:05d}"


def save_rank(net: CachedNet, path: Path, *, step: int, save_id: str) -> None:
    """Save what one rank holds, as the rank that its shard says."""
    rank, world_size = net.shard
    saved = saved_tables(net)
    folder = path / rank_folder(rank=rank, world_size=world_size)
    make_folders(folder)
    facts = {"save_id": save_id, "rank": rank, "world_size": world_size, "companions": list(saved.companions)}
    alone = RankOptions(alone=True)
    with _ExactModesSaver(path=folder, hashtables=saved.tables, ranks=alone) as saver:
        saver.save(step, metadata={"embcache": facts})
