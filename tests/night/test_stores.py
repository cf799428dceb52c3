"""Stores that are wrong from the start, and stores that help at night; those that go away are in test_incidents.py."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

import asyncckpt
from tests.night.nights import COMMITTED, OPENED, Night
from tests.program import invoke

pytestmark = [pytest.mark.slow, pytest.mark.any_core]


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        (
            {"AWS_ACCESS_KEY_ID": "another-key"},
            "IOFailedError",
            ["InvalidAccessKeyId", "does not know this access"],
        ),
        ({"AWS_SECRET_ACCESS_KEY": "another"}, "IOFailedError", ["SignatureDoesNotMatch", "the secret key is not"]),
        ({"url": "s3://no-such-bucket/run"}, "NoBucketError", ["NoSuchBucket", "make the bucket, or correct the URL"]),
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "IOFailedError", ["the connection failed", "and the network up?"]),
    ],
    ids=["key", "secret", "bucket", "endpoint"],
)
def test_the_store_is_wrong_from_the_start(
    night: Night, store: tuple[Any, str], wrong: dict[str, str], error: str, words: list[str]
) -> None:
    """The job ends before it has trained in vain, `doctor` says the same, and no secret is in the log."""
    _, url = store
    url_of_job = wrong.get("url", url)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in wrong.items():
            patch.setenv(name, value)
        ended = night.job(upload=url_of_job)
        night.says_of_error(ended, error, url_of_job, *words)
        assert not [line for line in ended.log if " is committed" in line or "secret-3f9c" in line]
        told = invoke("doctor", url_of_job)
        assert told.exit_code in (3, 5), told.output
        assert words[0] in told.output
    night.says(night.is_queued_again(upload=url).log, OPENED, COMMITTED.format(8))
    assert asyncckpt.list_steps(url)[-1] == 8


def test_the_disk_is_lost(night: Night, store: tuple[Any, str]) -> None:
    """The job that is queued again, as on another machine, goes on from the newest step of the store."""
    _, url = store
    assert night.job(steps=7, upload=url).code == 0
    shutil.rmtree(night.run)
    again = night.is_queued_again(upload=url)
    night.says(again.log, OPENED, "INFO step 6 of s3://night/run is restored: ", COMMITTED.format(8))
    assert asyncckpt.list_steps(url) == [2, 4, 6, 8]
    night.check([8])


def test_the_newest_is_damaged_and_uploaded(night: Night, store: tuple[Any, str]) -> None:
    """Fallback takes the same step from the store, and nothing is trained twice."""
    _, url = store
    assert night.job(steps=7, upload=url).code == 0
    night.damage(6)
    again = night.is_queued_again(upload=url, fallback=True)
    night.says(again.log, OPENED, "INFO step 6 of s3://night/run is restored: ", COMMITTED.format(8))
    assert asyncckpt.list_steps(url)[-1] == 8
    assert asyncckpt.list_steps(night.run)[-1] == 8
