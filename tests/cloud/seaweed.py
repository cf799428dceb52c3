"""A real S3 server for the tests: SeaweedFS, all of it in one process on loopback, with a folder of its own."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import obstore
from obstore.store import S3Store

START_S_MAX = 60.0
STARTS_MAX = 4
WEED = Path(sys.executable).parent / "weed"
HOST = "127.0.0.1"
REGION = "us-east-1"


@dataclass(frozen=True)
class User:
    """Who may do what: `actions` in SeaweedFS' words, "Read:bucket" and the like."""

    key: str
    secret: str
    actions: tuple[str, ...]


OWNER = User("owner-key", "owner-secret-3f9c", ("Admin", "Read", "Write", "List", "Tagging"))
READER = User("reader-key", "reader-secret-77aa", ("Read", "List"))


@dataclass(frozen=True)
class Server:
    port: int
    pid: int

    @property
    def endpoint(self) -> str:
        return f"http://{HOST}:{self.port}"


def environment(endpoint: str, user: User = OWNER) -> dict[str, str]:
    """Return the usual variables with which programs find a store."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": REGION,
        "AWS_ACCESS_KEY_ID": user.key,
        "AWS_SECRET_ACCESS_KEY": user.secret,
    }


@contextlib.contextmanager
def running(folder: Path, *, buckets: tuple[str, ...], cores: Collection[int] = ()) -> Iterator[Server]:
    """Run a server with these buckets until the block ends. cores: on which it runs; none: on all."""
    with contextlib.ExitStack() as started:
        for left in reversed(range(STARTS_MAX)):
            try:
                made = started.enter_context(_running(folder / f"start{left}", _free_ports(8), cores))
                break
            except RuntimeError:  # A port that was free is another one's by now.
                if not left:
                    raise
        _make_buckets(made, buckets)
        yield made


@contextlib.contextmanager
def _running(folder: Path, ports: list[int], cores: Collection[int]) -> Iterator[Server]:
    master, volume, filer, s3 = ports[:4]
    folder.mkdir()
    config = folder / "s3.json"
    users = [
        {"name": u.key, "credentials": [{"accessKey": u.key, "secretKey": u.secret}], "actions": [*u.actions]}
        for u in (OWNER, READER)
    ]
    config.write_text(json.dumps({"identities": users}))
    (folder / "data").mkdir()
    command = [
        str(WEED), "-logtostderr=true", "server", f"-dir={folder / 'data'}", f"-ip={HOST}", f"-ip.bind={HOST}", "-s3",
        f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}", f"-s3.port={s3}",
        f"-master.port.grpc={ports[4]}", f"-volume.port.grpc={ports[5]}",
        f"-filer.port.grpc={ports[6]}", f"-s3.port.grpc={ports[7]}",
        f"-s3.config={config}", "-s3.iam=false", "-volume.max=64", "-master.volumeSizeLimitMB=256",
        "-master.telemetry=false", "-s3.port.iceberg=0", "-s3.port.lance=0",
        "-s3.autoCreateBucket=false",
    ]  # fmt: skip
    pinned = partial(os.sched_setaffinity, 0, cores)
    log = folder / "server.log"
    with log.open("wb") as output:
        server = subprocess.Popen(
            command, stdout=output, stderr=output, cwd=folder, preexec_fn=pinned if cores else None
        )
        try:
            _wait_until_ready(server, s3, log)
            yield Server(s3, server.pid)
        finally:
            server.kill()  # What it holds goes with its folder; its own end takes half a minute.
            server.wait()
            for left in itertools.chain(*(Path("/tmp").glob(f"seaweedfs-*-{port}.sock") for port in ports)):
                left.unlink(missing_ok=True)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as opened:
        sockets = [opened.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((HOST, 0))
        return [one.getsockname()[1] for one in sockets]


def _wait_until_ready(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    """Wait until it answers, be it with a refusal."""
    until = time.monotonic() + START_S_MAX
    while server.poll() is None and time.monotonic() < until:
        try:
            with urllib.request.urlopen(f"http://{HOST}:{port}/healthz", timeout=1):
                return
        except urllib.error.HTTPError:
            return
        except OSError:
            time.sleep(0.05)
    raise RuntimeError(f"the server did not start: {log.read_text()[-2000:]}")


def _make_buckets(server: Server, buckets: tuple[str, ...]) -> None:
    """Make buckets, and wait until they take objects: who has just started has no volumes yet."""
    for bucket in buckets:
        store = S3Store(bucket, endpoint=server.endpoint, client_options={"allow_http": True}, region=REGION,
                        access_key_id=OWNER.key, secret_access_key=OWNER.secret)  # fmt: skip
        request = urllib.request.Request(obstore.sign(store, "PUT", "", timedelta(minutes=1)), method="PUT")
        with urllib.request.urlopen(request, timeout=START_S_MAX):
            pass
        obstore.put(store, "begun", b"1")
        obstore.delete(store, "begun")
