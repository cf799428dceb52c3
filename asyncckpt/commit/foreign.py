"""Recognize what another library has saved, by the names of files, where somebody looks for checkpoints of ours.

A directory without any of ours may hold logs and configurations of a trainer, and is as good as an empty one then. One
with a checkpoint of another library is not: a restore from it would silently start over. One further down may be of
another run, so it is only warned of.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

from asyncckpt.errors import CheckpointError, NotFoundError, warn
from asyncckpt.format.names import DATA_DIR, LOCK_NAME, MANIFESTS_DIR
from asyncckpt.storage.folder import ReadFolder

SHOWN_MAX = 8
FOLDERS_LOOKED_AT_MAX = 3  # The newest steps, by the numbers in their names.
FOLDERS_BELOW_MAX = 32  # As far as somebody looks who is not sure that there is anything.
DEPTH_MAX = 3  # lightning_logs/version_0/checkpoints
FILES_OF_NO_CHECKPOINT_MAX = 3  # Beside a job lie a few, such as args.pt. A folder full of them is a series.
_NUMBER = re.compile(r"[0-9]{1,15}")
_STEP = re.compile(r"(?:.*[^0-9])?([0-9]{1,15})")
_TIME = re.compile(r"[0-9]{14}")
_RANK = re.compile(r"rank[0-9]{1,5}")
_FILE = re.compile(r".*\.(pt|pth|ckpt|safetensors)(\.tar)?|(pytorch|adapter)_model.*\.bin")
_LIKELY = re.compile(r"(?i).*(model|checkpoint|ckpt|(epoch|step|iter)[^a-z0-9]*[0-9]).*|[0-9]+\..*")
_NO_MODEL = re.compile(r"(optim|sched|scaler|rng|random_state).*|(.*_)?(args|config|vocab)\..*")
_ONE_OF_SEVERAL = re.compile(r".*([0-9]-of-[0-9]|rank_?[0-9]).*")
# What stands beside checkpoints and is none: of ours and of file systems; of trainers and what they log.
_OURS = rf"{MANIFESTS_DIR}|{DATA_DIR}|{LOCK_NAME}|damaged|ranks|\..*|lost\+found"
_TEXT = r"events\..*|.*\.(log|txt|md|ya?ml|json|toml|out|err|csv|py|sh)"
_BESIDE = re.compile(rf"{_OURS}|{_TEXT}|logs?|runs|tensorboard|wandb|mlruns|lightning_logs")
_NOT_BELOW = re.compile(rf"{_OURS}|{_TEXT}|{_FILE.pattern}")


class Foreign(NamedTuple):
    """A checkpoint of another library: whose it is, and what takes it over, "" where that is not sure."""

    what: str
    how: str


def what_is_there(folder: ReadFolder) -> dict[str, Any]:
    """Return what a NotFoundError says of a folder without checkpoints of ours, if it holds those of others."""
    found = _foreign_in(folder)
    return {} if found is None else {"found": found.what, "hint": found.how}


def check_may_begin(folder: ReadFolder) -> None:
    """Raise NotFoundError where a folder without checkpoints of ours holds those of another library.

    Warn of what else it holds, unless it is what stands beside checkpoints everywhere, and of those further down.
    """
    there = what_is_there(folder)
    if there:
        new = "to start a new run, use a directory of its own, or call begin_anew() instead of restore()"
        there["hint"] = "; ".join(filter(None, (there["hint"], new)))
        raise NotFoundError(f"there is no checkpoint of asyncckpt in {str(folder.path)!r} to restore", **there)
    others = sorted(name for name in folder.names() if not _BESIDE.fullmatch(name))
    below = _foreign_below(folder)
    said = [f"it holds {_listed(others)}"] if others else []
    said += [f"further down is {below.what}{f' ({below.how})' if below.how else ''}"] if below is not None else []
    if said:
        warn(
            f"asyncckpt: there is no checkpoint in {str(folder.path)!r} to restore, so training starts from step 0; "
            f"{'; '.join(said)}"
        )


def _foreign_in(folder: ReadFolder) -> Foreign | None:
    """Return what a folder holds, or one of the newest steps in it."""
    names = folder.names()
    found = _recognized(folder, names)
    steps = sorted(((int(match[1]), name) for name in names if (match := _STEP.fullmatch(name))), reverse=True)
    for _, name in steps[:FOLDERS_LOOKED_AT_MAX]:
        if found is None:
            with suppress(CheckpointError), folder.child(name) as below:  # It may be a file.
                found = _recognized(below, below.names(), is_step=True)
    return found


def _foreign_below(folder: ReadFolder) -> Foreign | None:
    """Return what is in the folders of a folder, and in theirs, the newest first by the numbers in their names."""
    left: deque[tuple[tuple[str, ...], list[str]]] = deque([((), folder.names())])
    looked_at = 0
    while left:
        path, names = left.popleft()
        for name in sorted(names, key=_numbers, reverse=True):
            if looked_at < FOLDERS_BELOW_MAX and not _NOT_BELOW.fullmatch(name):
                looked_at += 1
                with suppress(CheckpointError), ExitStack() as opened:  # It may be a file.
                    below = folder
                    for part in (*path, name):
                        below = opened.enter_context(below.child(part))
                    found = _recognized(below, below.names())
                    if found is not None:
                        return found
                    if len(path) + 1 < DEPTH_MAX:
                        left.append(((*path, name), below.names()))
    return None


def _recognized(folder: ReadFolder, names: Collection[str], *, is_step: bool = False) -> Foreign | None:
    """Return what a folder holds. is_step: its name says that it is a checkpoint, so its files are of one."""
    path, there = folder.path, set(names)
    if {"index", "tensorkey.json"} <= there:
        return _imported("a checkpoint of RecIS", "recis", path)
    if "latest_checkpointed_iteration.txt" in there or {"metadata.json", "common.pt"} <= there:
        return Foreign("a checkpoint of Megatron-Core", "loading it once by Megatron's own strategies takes it over")
    if ".metadata" in there:
        return _imported("a checkpoint of torch.distributed.checkpoint", "dcp", path)
    if there & {"model.safetensors", "model.safetensors.index.json"}:
        return _imported("safetensors files of Hugging Face", "hf", path)
    if "meta.ini" in there or any(_TIME.fullmatch(name) and _holds_ranks(folder, name) for name in there):
        return _imported("tables of RecSDK", "recsdk", path)
    files = sorted(name for name in there if _FILE.fullmatch(name) and not _NO_MODEL.fullmatch(name))
    if not is_step and len(files) <= FILES_OF_NO_CHECKPOINT_MAX:
        files = [name for name in files if _LIKELY.fullmatch(name)]
    if not files:
        return None
    if len({_NUMBER.sub("0", name) for name in files}) > 1 or _ONE_OF_SEVERAL.fullmatch(files[0]):
        return Foreign(f"what may be a checkpoint in {str(path)!r}: {_listed(files)}", "")
    newest = max(files, key=_numbers)
    if newest.endswith(".safetensors"):
        return _imported("a safetensors file", "hf", path / newest)
    return _imported("a file of torch.save", "torch", path / newest)


def _numbers(name: str) -> list[int]:
    return [int(number) for number in _NUMBER.findall(name)]


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN_MAX} more" if len(names) > SHOWN_MAX else ""
    return f"{', '.join(map(repr, names[:SHOWN_MAX]))}{more}"


def _imported(what: str, form: str, path: Any) -> Foreign:
    return Foreign(f"{what}: {str(path)!r}", f"`asyncckpt import {form} {path} NEW_DIRECTORY` takes it over")


def _holds_ranks(folder: ReadFolder, name: str) -> bool:
    """Return whether a folder of RecSDK's holds tables: folders of ranks in folders of tables."""
    with suppress(CheckpointError), folder.child(name) as tables:
        for table in tables.names()[:FOLDERS_LOOKED_AT_MAX]:
            with suppress(CheckpointError), tables.child(table) as ranks:
                if any(map(_RANK.fullmatch, ranks.names())):
                    return True
    return False
