"""Committing to a disk loads nothing of stores, deltas, removals, retention and imports."""

from __future__ import annotations

import subprocess
import sys

LOADED_BY_COMMITS = """
import sys, asyncckpt.commit.transaction, asyncckpt.shard.files
print(*(name.removeprefix("asyncckpt.") for name in sys.modules if name.startswith("asyncckpt.")))
"""
ONLY_WHERE_USED = {
    *("commit.chain", "commit.disagreement", "commit.foreign", "commit.import_source"),
    *("commit.judge", "commit.keep", "commit.new_entry", "commit.removal", "commit.retention"),
    *("commit.store_removal", "commit.store_root", "shard.sent", "shard.store_files"),
    *("storage.disk_probe", "storage.object_store", "storage.store_answers", "storage.store_folder"),
    "storage.written_chunks",
}


def test_commits_on_a_disk_load_only_what_they_cross() -> None:
    done = subprocess.run([sys.executable, "-c", LOADED_BY_COMMITS], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "commit.doubt" in loaded, "an error of the rename must not need to open a file, for none may be left"
    assert loaded & ONLY_WHERE_USED == set()
