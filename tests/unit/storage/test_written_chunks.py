"""Notes of what is written already (asyncckpt/storage/written_chunks.py)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from asyncckpt.storage.directory import Directory
from asyncckpt.storage.written_chunks import WRITTEN_NAME, WrittenChunks


def test_what_was_left_before_its_first_chunk_keeps_its_notes(tmp_path: Path) -> None:
    chunk = np.arange(8, dtype=np.uint8)
    with Directory.open(tmp_path) as folder:
        WrittenChunks.open(folder, "identity").close()
        (tmp_path / "left").touch()
        again = WrittenChunks.go_on(folder, "identity")
        assert again is not None
        assert sorted(path.name for path in tmp_path.iterdir()) == [WRITTEN_NAME]
        (tmp_path / "file").write_bytes(chunk.tobytes())
        again.note(folder, "file", chunk.ctypes.data, offset=0, bytes=chunk.nbytes)
        again.close()
        last = WrittenChunks.go_on(folder, "identity")
        assert last is not None
        assert last.sound_bytes(folder, "file") == chunk.nbytes
        last.end()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
