"""A job as it runs at night: DIR STEPS OPTIONS, of which the last are JSON.

fallback, every, keep, upload, sleep, on_error  of the restore, the Checkpointer and between two steps
calm    false: the next step begins while a save is in flight
at      {step: what happens when it begins; "restore", "loading": or then}: see happen
fault   what "fault" does to the disk from then on: [error or milliseconds, kind of operation, ...]

Logs to stderr as a job does. Its tensor holds the number of steps that were made; the end prints it, and the counts of
saves as Prometheus would read them.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

import asyncckpt
from asyncckpt.events import prometheus_events
from tests.faults.shim import Action, DiskFault, OpKind, Shim
from tests.worlds.objects import Stateful

BIG = 1 << 18  # A MiB of floats.
DAY_S = 86400.0
SIGNALS = {"term": signal.SIGTERM, "kill": signal.SIGKILL, "interrupt": signal.SIGINT}


def happen(what: str, folder: Path, fault: list[Any]) -> None:
    if what in SIGNALS:
        os.kill(os.getpid(), SIGNALS[what])
    elif what == "term twice":
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
    elif what == "raise":
        raise RuntimeError("the loss is not finite")
    elif what == "fork":
        if os.fork() == 0:
            sys.exit(0)  # As a worker of a data loader ends.
        os.wait()
    elif what == "orphan":
        if os.fork() == 0:
            wait(folder, what)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    elif what in ("back", "forward"):
        real, seconds_off = time.gmtime, DAY_S if what == "forward" else -DAY_S
        time.gmtime = lambda seconds=None: real((time.time() if seconds is None else seconds) + seconds_off)
    elif what == "hog":
        hog = []
        while True:
            hog.append(bytes(b"x" * (1 << 20)))
    elif what == "files":
        with contextlib.suppress(OSError):
            while True:
                os.dup(0)
    elif what == "fault":
        disturb(folder / "run", *fault)
    else:
        wait(folder, what)


def wait(folder: Path, what: str) -> None:
    """Wait until the test lets it go on."""
    (folder / what).touch()
    while not (folder / f"{what} is over").exists():
        time.sleep(0.01)


def disturb(path: Path, error: str | int, *kinds: str) -> None:
    """Let operations of these kinds fail from now on, kill the process ("KILL"), or take so many milliseconds more."""
    action = {int: Action.DELAY, str: Action.FAIL}[type(error)] if error != "KILL" else Action.KILL_BEFORE
    number = error if isinstance(error, int) else getattr(errno, error, 0)
    Shim().arm(path, DiskFault(action, at=-1, error=number, sticky=frozenset(OpKind[kind] for kind in kinds)))


def main(path: str, steps: int, options: dict[str, Any]) -> None:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stderr)
    registry, more = None, {}
    try:
        import prometheus_client
    except ImportError:
        print("no prometheus_client here: no metrics")
    else:
        registry = prometheus_client.CollectorRegistry()
        more = {"debug": asyncckpt.DebugOptions(on_event=prometheus_events(registry))}
    if "upload" in options:
        more["upload"] = asyncckpt.UploadOptions(
            options["upload"], request_deadline=1.0, deadline=options.get("deadline", 60.0)
        )
    done, at = torch.zeros(BIG), options.get("at", {})

    def at_moment(name: object) -> None:
        if str(name) in at:
            happen(at[str(name)], Path(path).parent, options.get("fault", []))

    try:
        with asyncckpt.Checkpointer(
            path,
            every=options.get("every", 2),
            keep=options.get("keep", 3),
            on_error=options.get("on_error", "raise"),
            options=more,
            done=done,
            part=Stateful({"a": 1}, loading=lambda: at_moment("loading")),
        ) as ckpt:
            at_moment("restore")
            for step in range(ckpt.restore(fallback=options.get("fallback", False)), steps):
                at_moment(step)
                done += 1
                time.sleep(options.get("sleep", 0.02))
                future = ckpt.step(step)
                while options.get("calm", True) and future is not None and not future.done():
                    time.sleep(0.01)
    finally:
        if registry is not None:
            names = [metric for metric in registry.collect() if metric.name == "asyncckpt_saves"]
            samples = [one for metric in names for one in metric.samples if one.name.endswith("_total")]
            counts = {f"{one.labels['what']} {one.labels['outcome']}": int(one.value) for one in samples}
            print("METRICS", json.dumps(counts))
        print("DONE", sorted(set(done.tolist())), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]))
