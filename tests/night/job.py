"""A job as it runs at night: DIR STEPS OPTIONS, of which the last are JSON.

fallback, every, keep, upload, sleep  of the restore, the Checkpointer and between two steps
at                                    {step: what happens then}: term, kill, fork, back (the clock), wait (for a file)

Logs to stderr as a job does. Its tensor holds the number of steps that were made; the end prints it, and the counts of
saves as Prometheus would read them.
"""

from __future__ import annotations

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

BIG = 1 << 18  # A MiB of floats.


def happen(what: str, folder: Path) -> None:
    if what == "term":
        os.kill(os.getpid(), signal.SIGTERM)
    elif what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "fork":
        if os.fork() == 0:
            sys.exit(0)  # As a worker of a data loader ends.
        os.wait()
    elif what == "back":
        real = time.gmtime
        time.gmtime = lambda seconds=None: real((time.time() if seconds is None else seconds) - 86400.0)
    else:
        (folder / "waits").touch()
        while not (folder / "goes on").exists():
            time.sleep(0.01)


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
    done = torch.zeros(BIG)
    at = {int(step): what for step, what in options.get("at", {}).items()}
    try:
        with asyncckpt.Checkpointer(
            path, every=options.get("every", 2), keep=options.get("keep", 3), options=more, done=done
        ) as ckpt:
            for step in range(ckpt.restore(fallback=options.get("fallback", False)), steps):
                done += 1
                time.sleep(options.get("sleep", 0.02))
                if step in at:
                    happen(at[step], Path(path).parent)
                ckpt.step(step)
    finally:
        if registry is not None:
            names = [metric for metric in registry.collect() if metric.name == "asyncckpt_saves"]
            samples = [one for metric in names for one in metric.samples if one.name.endswith("_total")]
            counts = {f"{one.labels['what']} {one.labels['outcome']}": int(one.value) for one in samples}
            print("METRICS", json.dumps(counts))
        print("DONE", sorted(set(done.tolist())), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]))
