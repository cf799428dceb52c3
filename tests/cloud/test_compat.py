"""Directories that earlier versions have written to an object store load bit for bit."""

from __future__ import annotations

import uuid

from obstore.store import S3Store

from tests.cloud import seaweed
from tests.cloud.conftest import BUCKET
from tests.compat.test_stored_directories import WRITTEN, check_steps


def test_a_directory_in_a_store_loads(owner: seaweed.Server) -> None:
    store, url = S3Store(BUCKET), f"compat/{uuid.uuid4().hex}"
    for commit in WRITTEN:
        for path in (commit / "store-1").rglob("*"):
            if path.is_file():
                store.put(f"{url}/{commit.name}/{path.relative_to(commit / 'store-1')}", path.read_bytes())
        check_steps(f"s3://{BUCKET}/{url}/{commit.name}", 1, 1)
