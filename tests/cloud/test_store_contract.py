"""What the protocol asks of a store, shown on a real server, and what a client gives when it is disturbed."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncckpt.engine.follow.table_update import find_update
from asyncckpt.errors import CheckpointError, CorruptError, IOFailedError, NotFoundError, UsageError
from asyncckpt.model.store_url import StoreUrl
from asyncckpt.storage.object_store import ObjectStore, StoreLimits
from asyncckpt.storage.store_folder import RememberedFolder, StoreFolder
from tests.cloud import seaweed
from tests.cloud.fault_proxy import FaultProxy, Mishap, Request
from tests.program import invoke

PART_BYTES = 5 << 20
LIMITS = StoreLimits(request_s=2.0, retry_s=4.0, retries_max=2)


def open_store(url: str, limits: StoreLimits = LIMITS) -> ObjectStore:
    return ObjectStore(StoreUrl.of(url), limits)


@pytest.fixture
def store(owner: seaweed.Server, url: str) -> ObjectStore:
    return open_store(url)


def once(kind: str, fault: Mishap) -> Faults:
    return Faults({kind: [fault]})


class Faults:
    """Disturb the first requests of each kind, one after the other."""

    def __init__(self, left: dict[str, list[Mishap]]) -> None:
        self.left = left

    def __call__(self, request: Request) -> Mishap | None:
        waiting = self.left.get(request.kind)
        return waiting.pop(0) if waiting else None


def random_bytes(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)


def test_a_key_is_made_once(store: ObjectStore) -> None:
    assert store.put_new("manifests/1", b"first")
    assert not store.put_new("manifests/1", b"second")
    assert store.read_whole("manifests/1", bytes_max=99) == b"first"


@pytest.mark.parametrize("there", [None, b"other", b"more than that"])
def test_what_was_not_kept_is_noticed(store: ObjectStore, there: bytes | None) -> None:
    if there is not None:
        store.put_new("manifests/1", there)
    with pytest.raises(IOFailedError, match="was made, and is not there, or another one is"):
        store.check_kept("manifests/1", b"first")
    store.remove("manifests/1")
    store.put_new("manifests/1", b"first")
    store.check_kept("manifests/1", b"first")


def test_what_is_noted_during_a_look_is_remembered(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compaction looks when it begins, and a save beside it publishes behind what that lists."""
    folder, names = RememberedFolder(store, "manifests"), StoreFolder.names

    def noted_behind(self: StoreFolder) -> list[str]:
        listed = names(self)
        folder.note("2")
        return listed

    store.put_new("manifests/1", b"")
    folder.note("gone")
    monkeypatch.setattr(StoreFolder, "names", noted_behind)
    folder.look()
    assert folder.names() == ["1", "2"]


def test_parts_become_one_object(store: ObjectStore) -> None:
    raw = random_bytes(2 * PART_BYTES + 77)
    store.put(
        "data/x",
        (raw[at : at + PART_BYTES] for at in range(0, len(raw), PART_BYTES)),
        part_bytes=PART_BYTES,
        parallel=2,
    )
    found = store.find("data/x")
    assert found is not None
    assert found.bytes == len(raw)
    middle, size = store.read("data/x", begin=PART_BYTES - 3, bytes=9)
    assert (bytes(middle), size) == (raw[PART_BYTES - 3 : PART_BYTES + 6].tobytes(), len(raw))
    assert store.read_whole("data/x", bytes_max=len(raw)) == raw.tobytes()


def test_parts_that_fail_leave_no_object_and_their_own_error(store: ObjectStore) -> None:
    def parts() -> Iterator[np.ndarray]:
        yield random_bytes(PART_BYTES)
        yield random_bytes(PART_BYTES)
        raise CorruptError("the third one is corrupt")

    with pytest.raises(CorruptError, match="third one"):
        store.put("data/x", parts(), part_bytes=PART_BYTES, parallel=2)
    assert store.find("data/x") is None


def test_listings_show_names_below_a_prefix_alone(store: ObjectStore) -> None:
    for key in ("a/1", "a/2", "a/deep/3", "ab/4"):
        assert store.put_new(key, b"1")
    assert sorted(store.names("a")) == ["1", "2", "deep"]
    assert sorted(found.key for found in store.below("a")) == ["a/1", "a/2", "a/deep/3"]
    assert store.below("nothing") == []
    store.remove("a/1")
    store.remove("a/1")
    assert sorted(store.names("a")) == ["2", "deep"]


@pytest.mark.parametrize("kind", ["put", "part", "begin upload", "complete upload", "get", "list"])
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(Mishap(answer=(503, "SlowDown")), id="slow down"),
        pytest.param(Mishap(answer_after=(500, "InternalError")), id="500 after success"),
        pytest.param(Mishap(cut_up=0), id="cut"),
    ],
)
def test_a_disturbed_request_is_tried_again(proxy: FaultProxy, url: str, kind: str, fault: Mishap) -> None:
    store, raw = open_store(url), random_bytes(2 * PART_BYTES)
    proxy.fault = faults = once(kind, fault)
    is_forgotten = (kind, fault.answer_after) == ("complete upload", (500, "InternalError"))
    # Of an upload that is completed a store may know nothing any more.
    with suppress(CheckpointError) if is_forgotten else nullcontext():
        store.put("data/x", [raw[:PART_BYTES], raw[PART_BYTES:]], part_bytes=PART_BYTES, parallel=1)
    store.put_new("manifests/1", b"1")
    assert store.read_whole("data/x", bytes_max=len(raw)) == raw.tobytes()
    assert store.names("data") == ["x"]
    assert store.read_whole("manifests/1", bytes_max=9) == b"1"
    assert faults.left[kind] == []


def test_a_body_that_breaks_off_is_read_on(proxy: FaultProxy, url: str) -> None:
    store, raw = open_store(url), random_bytes(1 << 20)
    store.put("data/x", [raw], part_bytes=PART_BYTES, parallel=1)
    proxy.fault = faults = once("get", Mishap(cut_down=1000))
    assert store.read_whole("data/x", bytes_max=len(raw)) == raw.tobytes()
    assert faults.left == {"get": []}


@pytest.mark.parametrize("where", ["names", "below"])
def test_a_listing_that_breaks_off_is_asked_for_again(proxy: FaultProxy, url: str, where: str) -> None:
    store = open_store(url)
    for number in range(3):
        store.put_new(f"data/{number}", b"1")
    proxy.fault = faults = once("list", Mishap(cut_down=100))
    found = store.names("data") if where == "names" else [item.key[5:] for item in store.below("data")]
    assert sorted(found) == ["0", "1", "2"]
    assert faults.left == {"list": []}


@pytest.mark.parametrize("is_done", [False, True])
def test_a_silent_store_ends_a_request_within_its_deadline(proxy: FaultProxy, url: str, is_done: bool) -> None:
    store = open_store(url, StoreLimits(request_s=0.5, retry_s=1.0, retries_max=1))
    proxy.fault = lambda request: Mishap(silent=not is_done, silent_after=is_done)
    for call in (lambda: store.put_new("manifests/1", b"1"), lambda: store.find("x"), lambda: store.names("x")):
        with pytest.raises(IOFailedError, match="did not answer in time") as failed:
            call()
        assert failed.value.errno == errno.ETIMEDOUT


@pytest.mark.parametrize("code", ["OperationAborted", "SlowDown"])
def test_a_store_that_stays_busy_is_one_error(proxy: FaultProxy, url: str, code: str) -> None:
    store = open_store(url, StoreLimits(request_s=0.5, retry_s=1.0, retries_max=1))
    proxy.fault = lambda request: Mishap(answer=(409 if code == "OperationAborted" else 503, code))
    with pytest.raises(IOFailedError, match=code) as failed:
        store.put("data/x", [b"1"], part_bytes=PART_BYTES, parallel=1)
    assert failed.value.errno == errno.ETIMEDOUT


@pytest.mark.parametrize(
    ("status", "code", "hint"),
    [
        (403, "RequestTimeTooSkewed", "clock"),
        (400, "ExpiredToken", "have expired"),
        (403, "AccessDenied", "permission"),
        (301, "PermanentRedirect", "region"),
    ],
)
def test_a_refusal_says_what_to_do(proxy: FaultProxy, url: str, status: int, code: str, hint: str) -> None:
    proxy.fault = lambda request: Mishap(answer=(status, code))
    with pytest.raises(CheckpointError, match=hint) as failed:
        open_store(url).put_new("manifests/1", b"1")
    assert code in str(failed.value)
    assert failed.value.__context__ is None


def test_a_bucket_that_is_not_there_is_named(owner: seaweed.Server) -> None:
    with pytest.raises(NotFoundError, match="NoSuchBucket"):
        open_store("s3://no-such-bucket/run").put_new("manifests/1", b"1")


def test_nobody_waits_for_a_bucket_that_is_not_there(owner: seaweed.Server, tmp_path: Path) -> None:
    torch.save({"x": torch.ones(1)}, tmp_path / "x.pt")
    for more in ([], ["--dry-run"]):
        done = invoke("import", "torch", tmp_path / "x.pt", "s3://nowhere/run", *more)
        assert done.exit_code == 3
        assert "NoSuchBucket" in done.stderr
    with pytest.raises(NotFoundError, match="NoSuchBucket"):
        find_update(StoreUrl.of("s3://nowhere/run"), None)


@pytest.mark.parametrize("wrong", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_no_error_shows_a_key(owner: seaweed.Server, url: str, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(wrong, "secret-that-nobody-sees")
    with pytest.raises(IOFailedError) as failed:
        open_store(url).put_new("manifests/1", b"1")
    assert failed.value.errno == errno.EACCES
    shown: BaseException | None = failed.value
    while shown is not None:
        assert not any(key in f"{shown!r} {shown}" for key in ("secret-that", seaweed.OWNER.key, seaweed.OWNER.secret))
        shown = shown.__cause__ or shown.__context__


@pytest.mark.parametrize("endpoint", ["", "127.0.0.1:9000", "http://127.0.0.1:99999999", "ftp://host"])
def test_an_endpoint_that_is_none_is_refused(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises(UsageError, match="AWS_ENDPOINT_URL is not an endpoint"):
        open_store("s3://bucket/run")


@pytest.mark.parametrize("name", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION"])
def test_a_credential_with_a_line_break_is_refused_at_once(
    owner: seaweed.Server, url: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one has that was read from a file: obstore would make a panic, or send it."""
    monkeypatch.setenv(name, "hidden\n")
    with pytest.raises(UsageError, match=f"{name} holds a line break") as failed:
        open_store(url).find("key")
    assert "hidden" not in str(failed.value)


@pytest.mark.parametrize(
    ("scheme", "name", "value"),
    [
        ("az", "AZURE_STORAGE_ACCOUNT_KEY", "hidden"),  # Without AZURE_STORAGE_ACCOUNT_NAME.
        ("gs", "GOOGLE_APPLICATION_CREDENTIALS", "/hidden"),
        ("gs", "GOOGLE_SERVICE_ACCOUNT_KEY", '{"private_key": "hidden"}'),
        ("s3", "AWS_UNSIGNED_PAYLOAD", "hidden"),
    ],
)
def test_settings_that_are_missing_or_wrong_are_no_network_that_is_down(
    scheme: str, name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=f"{name.partition('_')[0]}_") as failed:
        open_store(f"{scheme}://bucket/run")
    assert "hidden" not in str(failed.value)


def test_a_refusal_that_says_no_code_may_be_one_of_credentials(proxy: FaultProxy, url: str) -> None:
    """The answer to a HEAD has no body, and that to an expired token is a 400."""
    proxy.fault = lambda request: Mishap(answer=(400, "ExpiredToken"))
    with pytest.raises(IOFailedError, match="expired") as failed:
        open_store(url).find("key")
    assert failed.value.errno == errno.EACCES


def test_a_range_behind_the_end_of_an_object_is_empty(store: ObjectStore) -> None:
    for number, raw in enumerate((b"", b"abc")):
        store.put_new(f"{number}", raw)
        found, size = store.read(f"{number}", begin=3, bytes=4)
        assert (bytes(found), size) == (b"", len(raw))
    with pytest.raises(NotFoundError):
        store.read("none", begin=3, bytes=4)


def test_a_key_that_an_unanswered_request_may_make_is_in_doubt(proxy: FaultProxy, url: str) -> None:
    """The first request is under way somewhere; that the second one is refused says nothing of it."""
    left = [Mishap(answer=(403, "AccessDenied")), Mishap(silent=True)]
    proxy.fault = lambda request: left.pop() if request.kind == "put" and left else None
    store = ObjectStore(StoreUrl.of(url), StoreLimits(request_s=1.0, retry_s=5.0))
    with pytest.raises(IOFailedError, match="AccessDenied") as raised:
        store.put_new("key", b"x")
    assert raised.value.errno == errno.ETIMEDOUT
    left += [Mishap(answer=(403, "AccessDenied"))]
    with pytest.raises(IOFailedError, match="AccessDenied") as raised:
        store.put_new("key", b"x")
    assert raised.value.errno == errno.EACCES


def test_a_key_that_an_unanswered_request_has_made_is_found(proxy: FaultProxy, url: str) -> None:
    left = [Mishap(silent_after=True)]
    proxy.fault = lambda request: left.pop() if request.kind == "put" and left else None
    store = ObjectStore(StoreUrl.of(url), StoreLimits(request_s=1.0, retry_s=5.0))
    assert not store.put_new("key", b"x")
    assert store.read_whole("key", bytes_max=10) == b"x"
