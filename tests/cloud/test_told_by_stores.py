"""Each kind of request of each call meets each fault: the error, or the line of the log, names the object, what was
wanted, why there is none and what to do next; and never a key, a token or a signature.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import asyncckpt
from asyncckpt import checkpoints
from asyncckpt.commit import store_root
from asyncckpt.engine.process import log
from asyncckpt.shard import sent
from asyncckpt.storage.object_store import ObjectStore, StoreLimits
from tests.cloud import seaweed
from tests.cloud.fault_proxy import REPEATED, FaultProxy, Mishap, Request, running
from tests.cloud.small_parts import small_parts, state
from tests.cloud.test_uploads import open_saver, options
from tests.shares import slow_but_for_a_share
from tests.worlds.gates import nothing
from tests.worlds.told import check_told

__all__ = ["small_parts"]

REQUEST_S, RETRY_S = 1.0, 0.5
QUICK = StoreLimits(request_s=REQUEST_S, retry_s=RETRY_S, retries_max=2)
HIDDEN = (seaweed.OWNER.key, seaweed.OWNER.secret, "Signature", "AWS4", *REPEATED.values())
WAIT_S_MAX = 60.0


@dataclass(frozen=True)
class StoreFault:
    """says: what is told of it; of an answer to a HEAD, which has no body, the status alone."""

    mishap: Mishap
    says: str


DOWN = "did not answer in time|the connection failed"
STORE_FAULTS = {
    "ExpiredToken": StoreFault(Mishap(answer=(403, "ExpiredToken")), "403 ExpiredToken"),
    "InvalidAccessKeyId": StoreFault(Mishap(answer=(403, "InvalidAccessKeyId")), "403 InvalidAccessKeyId"),
    "AccessDenied": StoreFault(Mishap(answer=(403, "AccessDenied")), "403 AccessDenied"),
    "NoSuchBucket": StoreFault(Mishap(answer=(404, "NoSuchBucket")), "404 NoSuchBucket"),
    "SlowDown": StoreFault(Mishap(answer=(503, "SlowDown")), "503 SlowDown"),
    "InternalError": StoreFault(Mishap(answer=(500, "InternalError")), "500 InternalError"),
    "refused": StoreFault(Mishap(refused=True), DOWN),
    "cut in the body": StoreFault(Mishap(cut_up=100), DOWN),
    "cut in the answer": StoreFault(Mishap(cut_down=10), DOWN),
}


def save_and_upload(url: str, folder: Path) -> Iterator[None]:
    saver, tensors = open_saver(folder / "ckpt", options(url, deadline=0.0, request_deadline=REQUEST_S))
    with saver:
        saver.save(0)
        saver.wait_idle()
        yield
        tensors["bias"].fill_(2)
        saver.save_async(1).wait_uploaded(WAIT_S_MAX)


def open_an_upload(url: str, folder: Path) -> Iterator[None]:
    yield
    saver, _ = open_saver(folder / "ckpt", options(url, request_deadline=REQUEST_S))
    saver.close()


def save_in_the_store(url: str, _: Path) -> Iterator[None]:
    with asyncckpt.Saver(path=url, tensors=state(), parallel=2) as saver:
        saver.save(0)
        yield
        saver.save_async(1).result(WAIT_S_MAX)


def save_and_keep_one(url: str, _: Path) -> Iterator[None]:
    with asyncckpt.Saver(path=url, tensors={"bias": state()["bias"]}, keep=1) as saver:
        saver.save(0)
        yield
        saver.save(1)
        saver.wait_idle()


def behind_two_steps(call: Callable[[str], Any]) -> Callable[[str, Path], Iterator[None]]:
    def run(url: str, _: Path) -> Iterator[None]:
        for step in range(2):
            asyncckpt.save(url, {"bias": state()["bias"]}, step=step)
        yield
        call(url)

    return run


def prune_and_tell(url: str) -> None:
    """What is not read is told in the report."""
    for why in checkpoints.prune(url, asyncckpt.KeepPolicy(latest=1)).damaged.values():
        logging.getLogger("asyncckpt").warning("%s", why)


CALLS: dict[str, Callable[[str, Path], Iterator[None]]] = {
    "open": open_an_upload,
    "upload": save_and_upload,
    "save": save_in_the_store,
    "keep": save_and_keep_one,
    "load": behind_two_steps(asyncckpt.load),
    "list": behind_two_steps(asyncckpt.list_steps),
    "describe": behind_two_steps(asyncckpt.describe),
    "verify": behind_two_steps(asyncckpt.verify),
    "prune": behind_two_steps(prune_and_tell),
    "remove": behind_two_steps(lambda url: checkpoints.remove(url, 0)),
}
KINDS = {"put", "begin upload", "part", "complete upload", "get", "head", "list", "delete"}
_kinds_of: dict[str, list[str]] = {}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, small_parts: None) -> None:
    """Stores are given up soon, and a line that comes once in ten minutes comes each time."""
    monkeypatch.setattr(store_root, "STORE_LIMITS", QUICK)
    monkeypatch.setattr(store_root, "REFUSED_S_MAX", 0.5)
    monkeypatch.setattr(sent, "TRY_S_MAX", 0.5)
    monkeypatch.setattr(ObjectStore.__init__, "__defaults__", (QUICK,))
    monkeypatch.setattr(log, "OFTEN_S", 0.0)


@contextmanager
def told_beside() -> Iterator[list[str]]:
    """Collect what is logged as a warning, and what is warned of."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("asyncckpt")
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield lines
        lines += [str(one.message) for one in caught]
    finally:
        logger.removeHandler(handler)


def run(call: str, url: str, folder: Path, proxy: FaultProxy, fault: Callable[[Request], Mishap | None]) -> None:
    """Make a call, of whose requests behind its preparation some are disturbed."""
    steps = CALLS[call](url, folder)
    next(steps)
    proxy.requests, proxy.fault = [], fault
    try:
        next(steps, None)
    finally:
        proxy.fault = nothing
        steps.close()


def kinds_of(call: str, proxy: FaultProxy, url: str, folder: Path) -> list[str]:
    if call not in _kinds_of:
        run(call, f"{url}/sound/{call}", folder / "sound", proxy, nothing)
        _kinds_of[call] = sorted({request.kind for request in proxy.requests})
    return _kinds_of[call]


# A bucket that answers its lists, and these so, is like one in which the object is not.
UNKNOWN = {("head", "NoSuchBucket")}
UNLIKE_ANY = {("prune", "get", "NoSuchBucket"), ("keep", "get", "NoSuchBucket")}
# Nothing is missing in answers that have no body.
WITHOUT_A_BODY = {("head", "cut in the answer"), ("part", "cut in the answer"), ("put", "cut in the answer")}
WITHOUT_A_BODY |= {("delete", "cut in the answer")}
CASES = [(call, name) for call in CALLS for name in STORE_FAULTS]


@pytest.mark.parametrize(("call", "name"), slow_but_for_a_share(CASES, "what stores tell", every=9))
def test_what_a_store_refuses_is_told(
    owner: seaweed.Server, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, name: str
) -> None:
    fault = STORE_FAULTS[name]
    with a_proxy(owner, monkeypatch) as proxy:
        kinds = kinds_of(call, proxy, url, tmp_path)
    for kind in kinds:
        own, folder = f"{url}/{kind.replace(' ', '-')}", tmp_path / kind
        disturb = partial(disturbed, fault.mishap, kind)
        with a_proxy(owner, monkeypatch) as proxy, told_beside() as lines:
            raised = error_of(partial(run, call, own, folder, proxy, disturb))
        assert lines or raised or (kind, name) in UNKNOWN | WITHOUT_A_BODY, f"nobody is told of {name} at {kind}"
        reason = re.compile(fault.says[:3] if kind == "head" and fault.mishap.answer else fault.says)
        says = (re.compile(rf"'{re.escape(own)}/(manifests|data)"), reason)
        if (kind, name) in UNKNOWN or (call, kind, name) in UNLIKE_ANY:
            says = (re.compile(re.escape(own)), re.compile("listed|looks|NoSuchBucket"))
        for told in (*lines, raised):
            if told is not None:
                shown = {own: "URL", url: "URL", str(tmp_path): "DIR"}
                is_mended = isinstance(told, str) and "it is tried again" in told
                check_told(told, "store", *says, is_mended=is_mended, hidden=HIDDEN, shown=shown)


@contextmanager
def a_proxy(owner: seaweed.Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    with running(owner.port) as proxy, monkeypatch.context() as names:
        names.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        yield proxy


def disturbed(mishap: Mishap, kind: str, request: Request) -> Mishap | None:
    return mishap if request.kind == kind else None


def error_of(call: Callable[[], None]) -> asyncckpt.CheckpointError | None:
    try:
        call()
    except asyncckpt.CheckpointError as error:
        return error
    return None


def test_all_kinds_of_requests_are_walked_over(proxy: FaultProxy, url: str, tmp_path: Path) -> None:
    assert {kind for call in CALLS for kind in kinds_of(call, proxy, url, tmp_path / call)} == KINDS
