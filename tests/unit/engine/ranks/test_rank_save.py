"""What a rank says when the folder of its save goes away under it."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncckpt.commit.discover import check_listed
from asyncckpt.commit.root import CheckpointRoot
from asyncckpt.engine.ranks.rank_save import _attempt_folder
from asyncckpt.errors import CorruptError, NotFoundError
from asyncckpt.format.manifest import FileFacts
from asyncckpt.format.names import Attempt

pytestmark = pytest.mark.any_core


@pytest.mark.parametrize("gone", [True, False])
def test_files_that_rank_0_has_removed_are_not_damaged(tmp_path: Path, gone: bool) -> None:
    """Rank 0 aborts and sweeps while this rank still writes; the outcome may be heard after that."""
    with CheckpointRoot.for_writing(tmp_path, exact_modes=False) as root:
        attempt = Attempt.new(1)
        root.data.make_folder(attempt.directory).close()
        file = FileFacts(f"data/{attempt.directory}/r00001-000.safetensors", 1, 8, bytes(16), 8)
        expected: type[Exception] = NotFoundError if gone else CorruptError

        def check() -> None:
            with _attempt_folder(root, attempt) as folder:
                if gone:
                    root.data.remove_folder(attempt.directory)
                check_listed(folder, [file], step=1)

        with pytest.raises(expected, match="unless rank 0 has aborted" if gone else "is missing"):
            check()
