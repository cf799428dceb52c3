"""The live page is served to this machine alone, follows the directory, and reads a manifest once."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt import checkpoints
from asyncckpt.commit import discover
from asyncckpt.errors import IOFailedError
from asyncckpt.observe import serve


@contextmanager
def served(path: Path) -> Iterator[int]:
    """The port of a server of this directory."""
    with serve.server_of(path, port=0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def ask(port: int, path: str, *, method: str = "GET", host: str | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, headers={} if host is None else {"Host": host})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_data_are_sent_when_they_have_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "LOOK_S", 0.0)
    with served(tmp_path / "run") as port:
        status, raw = ask(port, "/data?seen=")
        assert (status, json.loads(raw)["rows"]) == (200, [])
        seen = json.loads(raw)["seen"]
        assert ask(port, f"/data?seen={seen}") == (204, b"")
        asyncckpt.save(tmp_path / "run", {"a": 1}, step=1)
        status, raw = ask(port, f"/data?seen={seen}")
        assert (status, len(json.loads(raw)["rows"])) == (200, 1)
        asyncckpt.checkpoints.pin(tmp_path / "run", 1)
        assert ask(port, f"/data?seen={json.loads(raw)['seen']}")[0] == 200


def test_only_this_machine_is_answered(tmp_path: Path) -> None:
    with served(tmp_path) as port:
        for host in ("127.0.0.1", "localhost"):
            assert ask(port, "/", host=f"{host}:{port}")[0] == 200
        for host in ("attacker.example", f"attacker.example:{port}", f"127.0.0.1:{port + 1}", ""):
            assert ask(port, "/data", host=host)[0] == 403
        assert ask(port, "/../../etc/passwd")[0] == 404
        assert ask(port, "/", method="POST")[0] == 501


def test_what_is_no_address_is_a_bad_request(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with served(tmp_path) as port:
        with socket.create_connection(("127.0.0.1", port), 60) as client:
            client.sendall(b"GET http://[ HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b" 400 " in client.makefile("rb").read()
        assert ask(port, "/")[0] == 200
    assert capfd.readouterr().err == ""


def test_what_cannot_be_listed_is_shown_on_the_page(tmp_path: Path) -> None:
    (tmp_path / "manifests").write_text("no folder")
    (tmp_path / "data").mkdir()
    with served(tmp_path) as port:
        found: dict[str, Any] = json.loads(ask(port, "/data")[1])
    assert "manifests" in found["problem"]


def test_watch_serves_until_ctrl_c(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "asyncckpt", "watch", str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        said = program.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:(\d+)/ until Ctrl-C$", said)
        assert found is not None, said
        assert ask(int(found[1]), "/")[0] == 200
        program.send_signal(signal.SIGINT)
        assert program.communicate(timeout=60) == ("", "")
    assert program.returncode == 0


def test_a_port_that_is_taken_is_an_error(tmp_path: Path) -> None:
    with served(tmp_path) as port, pytest.raises(IOFailedError, match=f"port {port} cannot be served"):
        serve.server_of(tmp_path, port=port)


def test_a_manifest_is_read_once_and_again_when_it_is_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    plain = checkpoints.read_summary

    def noted(root: Any, step: int, names: Any = ()) -> Any:
        read.append(step)
        return plain(root, step, names)

    monkeypatch.setattr(checkpoints, "read_summary", noted)
    table = asyncckpt.HashTable("user", dim=2)
    with asyncckpt.Saver(
        path=tmp_path, hashtables={"user": table}, deltas=asyncckpt.DeltaPolicy(bytes_share_max=99.0)
    ) as saver:
        for step in (1, 2, 3):
            table.insert(torch.tensor([step]), torch.ones(1, 2))
            saver.save(step)
        known = checkpoints.KnownSummaries(tmp_path)
        first = known.now()
        assert list(first) == read == [1, 2, 3]
        assert known.now() == first
        assert read == [1, 2, 3]
        saver.compact(3).result()
        asyncckpt.checkpoints.pin(tmp_path, 1)
    later = known.now()
    assert sorted(read[3:]) == [1, 3]
    assert [vars(later[step])["compacted"] for step in (1, 2, 3)] == [False, False, True]
    asyncckpt.checkpoints.unpin(tmp_path, 1)
    asyncckpt.checkpoints.remove(tmp_path, [1, 2])
    assert list(known.now()) == [3]
    asyncckpt.save(tmp_path, {"b": 2}, step=4)
    manifest = tmp_path / "manifests/000000000004.json"
    raw = manifest.read_bytes()
    manifest.unlink()
    manifest.write_bytes(raw[:-1])
    damaged = known.now()[4]
    assert isinstance(damaged, asyncckpt.CorruptError)
    manifest.write_bytes(raw)
    assert not isinstance(known.now()[4], asyncckpt.CheckpointError)


def test_a_list_looks_at_each_name_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it says of all names is not asked for again at each step: of 10,000 steps that would take a minute."""
    for step in range(5):
        asyncckpt.save(tmp_path, {"a": step}, step=step)
    asked: list[object] = []
    plain = discover.Listing.compacted.fget
    assert plain is not None

    def noted(listing: discover.Listing) -> Any:
        asked.append(listing)
        return plain(listing)

    monkeypatch.setattr(discover.Listing, "compacted", property(noted))
    assert list(checkpoints.summaries(tmp_path)) == [0, 1, 2, 3, 4]
    assert len(asked) == 1
