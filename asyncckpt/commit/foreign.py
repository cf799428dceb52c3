"""Recognize what another library has saved, by the names of files, where somebody looks for checkpoints of ours.

A directory without any of ours may hold logs and configurations of a trainer, and is as good as an empty one then. One
with a checkpoint of another library is not: who restores from it would begin anew without a word.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from contextlib import suppress
from typing import Any, NamedTuple

from asyncckpt.errors import CheckpointError, NotFoundError, warn
from asyncckpt.format.names import DATA_DIR, LOCK_NAME, MANIFESTS_DIR
from asyncckpt.storage.folder import ReadFolder

SHOWN_MAX = 8
FOLDERS_LOOKED_AT_MAX = 3  # The newest steps, by the numbers in their names.
_STEP = re.compile(r"(?:.*[^0-9])?([0-9]{1,15})")
_TIME = re.compile(r"[0-9]{14}")
_RANK = re.compile(r"rank[0-9]{1,5}")
_TORCH_FILE = re.compile(r".*\.(pt|pth|ckpt)|pytorch_model.*\.bin")
# What stands beside checkpoints and is none: of ours, of file systems, of trainers and what they log.
_BESIDE = re.compile(
    rf"{MANIFESTS_DIR}|{DATA_DIR}|{LOCK_NAME}|ranks|\..*|lost\+found|events\..*|logs?|runs|tensorboard|wandb|mlruns|"
    r"lightning_logs|.*\.(log|txt|md|ya?ml|json|toml|out|err|csv|py|sh)"
)


class Foreign(NamedTuple):
    """A checkpoint of another library: whose it is, and what takes it over."""

    what: str
    how: str


def what_is_there(folder: ReadFolder) -> dict[str, Any]:
    """Return what a NotFoundError says of a folder without checkpoints of ours, if it holds those of others."""
    found = _foreign_in(folder)
    return {} if found is None else {"found": found.what, "hint": f"{found.how} takes it over"}


def check_may_begin(folder: ReadFolder) -> None:
    """Raise NotFoundError where a folder without checkpoints of ours holds those of another library.

    Warn of what else it holds, unless it is what stands beside checkpoints everywhere.
    """
    there = what_is_there(folder)
    if there:
        there["hint"] += "; to begin anew, give a directory of its own"
        raise NotFoundError(f"there is no checkpoint of asyncckpt in {str(folder.path)!r} to restore", **there)
    others = sorted(name for name in folder.names() if not _BESIDE.fullmatch(name))
    if others:
        more = f" and {len(others) - SHOWN_MAX} more" if len(others) > SHOWN_MAX else ""
        warn(
            f"asyncckpt: there is no checkpoint in {str(folder.path)!r} to restore, so training begins anew; it holds "
            f"{', '.join(map(repr, others[:SHOWN_MAX]))}{more}"
        )


def _foreign_in(folder: ReadFolder) -> Foreign | None:
    """Return what a folder holds, or one of the newest steps in it."""
    names = folder.names()
    found = _recognized(folder, names)
    steps = sorted(((int(match[1]), name) for name in names if (match := _STEP.fullmatch(name))), reverse=True)
    for _, name in steps[:FOLDERS_LOOKED_AT_MAX]:
        if found is None:
            with suppress(CheckpointError), folder.child(name) as below:  # It may be a file.
                found = _recognized(below, below.names())
    return found


def _recognized(folder: ReadFolder, names: Collection[str]) -> Foreign | None:
    path, there = folder.path, set(names)
    if {"index", "tensorkey.json"} <= there:
        return _imported("a checkpoint of RecIS", "recis", path)
    if "latest_checkpointed_iteration.txt" in there or {"metadata.json", "common.pt"} <= there:
        return Foreign("a checkpoint of Megatron-Core", "loading it once by Megatron's own strategies")
    if ".metadata" in there:
        return _imported("a checkpoint of torch.distributed.checkpoint", "dcp", path)
    if there & {"model.safetensors", "model.safetensors.index.json"}:
        return _imported("safetensors files of Hugging Face", "hf", path)
    if "meta.ini" in there or any(_TIME.fullmatch(name) and _holds_ranks(folder, name) for name in there):
        return _imported("tables of RecSDK", "recsdk", path)
    files = sorted(name for name in there if _TORCH_FILE.fullmatch(name))
    return _imported("a file of torch.save", "torch", path / files[0]) if files else None


def _imported(what: str, form: str, path: Any) -> Foreign:
    return Foreign(f"{what}: {str(path)!r}", f"`asyncckpt import {form} {path} NEW_DIRECTORY`")


def _holds_ranks(folder: ReadFolder, name: str) -> bool:
    """Return whether a folder of RecSDK's holds tables: folders of ranks in folders of tables."""
    with suppress(CheckpointError), folder.child(name) as tables:
        for table in tables.names()[:FOLDERS_LOOKED_AT_MAX]:
            with suppress(CheckpointError), tables.child(table) as ranks:
                if any(map(_RANK.fullmatch, ranks.names())):
                    return True
    return False
