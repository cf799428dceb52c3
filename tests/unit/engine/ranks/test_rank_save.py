"""What a rank says when the folder of its save goes away under it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncckpt.commit.discover import check_listed
from asyncckpt.commit.root import CheckpointRoot
from asyncckpt.coordination.driver import run_call
from asyncckpt.coordination.messages import AttemptMessage, Begin, Limits, Outcome, encode
from asyncckpt.engine.process.background import talkers
from asyncckpt.engine.ranks.rank_save import RankSave, _attempt_folder
from asyncckpt.errors import CorruptError, IOFailedError, NotFoundError, PeerError
from asyncckpt.format.head import FileFacts
from asyncckpt.format.names import Attempt

pytestmark = pytest.mark.any_core


def use_folder(
    path: Path, use: Callable[[Any, Attempt], object], *, gone: bool, other: type[Exception], said: str
) -> None:
    """Use the folder of an attempt, which rank 0 has removed meanwhile or has not."""
    with CheckpointRoot.for_writing(path, exact_modes=False) as root:
        attempt = Attempt.new(1)
        root.data.make_folder(attempt.directory).close()

        def run() -> None:
            with _attempt_folder(root, attempt) as folder:
                if gone:
                    root.data.remove_folder(attempt.directory)
                use(folder, attempt)

        error: type[Exception] = NotFoundError if gone else other
        with pytest.raises(error, match="unless rank 0 has aborted" if gone else said):
            run()


@pytest.mark.parametrize("gone", [True, False])
def test_files_that_rank_0_has_removed_are_not_damaged(tmp_path: Path, gone: bool) -> None:
    """Rank 0 aborts and sweeps while this rank still writes; the outcome may be heard after that."""

    def check(folder: Any, attempt: Attempt) -> None:
        file = FileFacts(f"data/{attempt.directory}/r00001-000.safetensors", 1, 8, bytes(16), 8)
        check_listed(folder, [file], step=1)

    use_folder(tmp_path, check, gone=gone, other=CorruptError, said="is missing")


class LateOutcome:
    """The channel of rank 1, on which the word of rank 0 comes when its folder is gone already."""

    rank, ranks_count = 1, 2

    def __init__(self, attempt: Attempt) -> None:
        outcome = Outcome("aborted", attempt=attempt, rank=0, cause="SaveCancelledError: by rank 0")
        self._left = [AttemptMessage(attempt, notes={"replicas": "share", "agreement": ""}), None, None, outcome]

    def receive(self, call: int, timeout_s: float) -> list[tuple[int, bytes]]:
        time.sleep(timeout_s if len(self._left) < 4 else 0)
        message = self._left.pop(0) if self._left else None
        return [] if message is None else [(0, encode(message))]

    def send(self, call: int, to: int | None, message: bytes) -> None: ...

    def forget(self, call: int) -> None: ...


def test_a_rank_whose_folder_is_gone_hears_why(tmp_path: Path) -> None:
    limits = Limits(begin_s=30, silence_s=20)
    with CheckpointRoot.for_writing(tmp_path, exact_modes=False) as root:
        future = SimpleNamespace(native_progress=SimpleNamespace(cancel=lambda: None))
        job: Any = SimpleNamespace(step=1, target=SimpleNamespace(root=root), future=future)
        share: Any = SimpleNamespace(ranks=SimpleNamespace(limits=limits, replicas=None))
        channel: Any = LateOutcome(Attempt.new(1))
        call = run_call(channel, 1, Begin(step=1), RankSave(job, share), limits, threads=talkers)
        with pytest.raises(PeerError, match=r"because of rank 0.*SaveCancelledError"):
            asyncio.run(call)


@pytest.mark.parametrize("gone", [True, False])
def test_a_file_cannot_be_made_in_a_folder_that_rank_0_has_removed(tmp_path: Path, gone: bool) -> None:
    def create(folder: Any, _: Attempt) -> None:
        for _ in range(1 if gone else 2):
            folder.create_file("name")

    use_folder(tmp_path, create, gone=gone, other=IOFailedError, said="exists")
