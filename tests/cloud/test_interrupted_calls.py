"""A signal is heard at every request of a call, however long the store is silent, and the next call finds all free."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt.checkpoints import pin, pinned_steps, unpin
from asyncckpt.inspection import compare
from asyncckpt.shard import store_files
from tests.cloud import fault_proxy, seaweed
from tests.cloud.fault_proxy import FaultProxy, Mishap, Request
from tests.worlds.saves import save_one

STATE = {"x": torch.arange(3.0)}


class Rang(Exception):
    pass


@pytest.fixture(autouse=True)
def raising() -> Iterator[None]:
    def ring(*_: object) -> None:
        raise Rang

    before = signal.signal(signal.SIGUSR1, ring)
    yield
    signal.signal(signal.SIGUSR1, before)


class Silence:
    """From one request on nothing is answered; it rings when that one has come."""

    def __init__(self, begin: int) -> None:
        self.begin, self.count = begin, 0
        self.unanswered: list[Request] = []

    def __call__(self, request: Request) -> Mishap | None:
        self.count += 1
        if self.count <= self.begin:
            return None
        self.unanswered.append(request)
        if len(self.unanswered) == 1:
            # Behind a moment in which the call comes to wait; too early is no fault either.
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        return Mishap(silent=True)


def use_saver(url: str, tmp_path: Path) -> None:
    with asyncckpt.Saver(path=url, tensors=STATE):
        pass


def restore(url: str, tmp_path: Path) -> None:
    x = torch.zeros(3)
    with asyncckpt.Checkpointer(url, every=10, x=x) as ckpt:
        assert ckpt.restore() == 3
    assert x.tolist() == [0.0, 1.0, 2.0]


def restore_from_uploads(url: str, tmp_path: Path) -> None:
    with asyncckpt.Checkpointer(tmp_path / "new", every=10, options={"upload": url}, x=torch.zeros(3)) as ckpt:
        assert ckpt.restore() == 3


def step_beside_uploads(url: str, tmp_path: Path) -> None:
    ckpt = asyncckpt.Checkpointer(tmp_path / "new", every=10, options={"upload": url}, x=torch.zeros(3))
    with ckpt, pytest.raises(asyncckpt.UsageError, match="step 1 is not above"):
        ckpt.step(1)


def pin_and_unpin(url: str, tmp_path: Path) -> None:
    pin(url, 2)
    assert pinned_steps(url) == [2]
    assert unpin(url, 2)


CALLS: dict[str, Callable[[str, Path], object]] = {
    "list": lambda url, _: asyncckpt.list_steps(url),
    "describe": lambda url, _: asyncckpt.describe(url),
    "load": lambda url, _: asyncckpt.load(url),
    "verify": lambda url, _: asyncckpt.verify(url),
    "diff": lambda url, _: compare(url, 1, 2),
    "saver": use_saver,
    "restore": restore,
    "restore from uploads": restore_from_uploads,
    "step beside uploads": step_beside_uploads,
    "pin": pin_and_unpin,
}


@pytest.mark.parametrize("name", CALLS)
def test_every_request(
    name: str, owner: seaweed.Server, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, begin, is_whole = CALLS[name], 0, False
    with asyncckpt.Saver(path=url, tensors=STATE) as saver:
        saver.save(1)
        saver.save(2)
    while not is_whole:
        # A proxy each, so that none hears of what was given up before.
        with fault_proxy.running(owner.port) as proxy:
            monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
            proxy.fault = silence = Silence(begin)
            try:
                call(url, tmp_path / f"at{begin}")
                is_whole = True
            except Rang:
                pass
            assert is_whole == (not silence.unanswered)
            asked = [(request.method, request.path, str(request.query)) for request in silence.unanswered]
            assert len(asked) == len(set(asked)), "it has waited until the store was asked once more"
            proxy.fault = lambda request: None
            call(url, tmp_path / f"at{begin}")
        begin += 1
    assert begin > 1


def test_a_command_ends(proxy: FaultProxy, url: str, tmp_path: Path) -> None:
    """The process does not wait either for what nobody waits for."""
    save_one(url, tensors=STATE)
    came = threading.Event()

    def silent(request: Request) -> Mishap:
        came.set()
        return Mishap(silent=True)

    proxy.fault, before = silent, len(proxy.requests)
    command = subprocess.Popen([sys.executable, "-m", "asyncckpt", "ls", url])
    assert came.wait(60)
    command.send_signal(signal.SIGINT)
    assert command.wait(60) == 130
    assert len(proxy.requests) == before + 1


def test_a_load_that_is_interrupted_while_it_begins_waits_for_no_answer(
    proxy: FaultProxy, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_one(url, tensors=STATE)
    asked: list[Request] = []
    came = threading.Event()

    def silent(request: Request) -> Mishap | None:
        if not request.path.endswith(".safetensors"):
            return None
        asked.append(request)
        came.set()
        return Mishap(silent=True)

    class Ringing(ThreadPoolExecutor):
        def submit(self, *arguments: Any, **more: Any) -> Any:
            super().submit(*arguments, **more)
            assert came.wait(60)
            raise Rang

    monkeypatch.setattr(store_files, "ThreadPoolExecutor", Ringing)
    proxy.fault = silent
    with pytest.raises(Rang):
        asyncckpt.load(url)
    assert len(asked) == 1, "it has waited until the store was asked once more"
