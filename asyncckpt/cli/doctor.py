"""The command that tries out what saves to a directory need, and says what to expect of them there.

It leaves nothing behind: if the directory does not exist, it tries the folder in which it would be made.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import signal
import sys
import threading
import time
import uuid
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from asyncckpt.checkpoints import CheckpointSummary, list_steps, summaries
from asyncckpt.cli import as_json
from asyncckpt.cli.answers import Commands, add_json, asked, natural, said
from asyncckpt.cli.findings import ExitCode
from asyncckpt.cli.text import count_of, print_facts, size
from asyncckpt.commit.root import CheckpointRoot
from asyncckpt.errors import CheckpointError, NotFoundError, UsageError
from asyncckpt.format.names import LOCK_NAME
from asyncckpt.model.store_url import Place, StoreUrl
from asyncckpt.storage.folder import check_place
from asyncckpt.storage.object_store import PART_BYTES_MIN, ObjectStore
from asyncckpt.version import __version__

_GIB = 1 << 30
_COPIED_BYTES = 64 << 20


@dataclass
class Diagnosis:
    """facts: for people, by name. answer: as numbers. problems: why saves fail here. advice: what to expect."""

    facts: list[tuple[str, str]] = field(default_factory=list)
    answer: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)


def add_commands(commands: Commands) -> None:
    made = commands.add(
        "doctor",
        doctor,
        "check that saves to DIR will work, and estimate how long they take",
        "Checks the disk or the store, memory, the compiled core and CUDA. DIR need not exist. Writes up to --mib and "
        "removes it again. Exits with 5 if saves would fail.",
    )
    made.add_argument("--mib", type=natural, default=256, metavar="N", help="write N MiB to measure the disk (256)")
    add_json(made)


def doctor(wanted: Namespace) -> ExitCode:
    path = asked(lambda: _place(wanted.path), json=wanted.json)
    found = Diagnosis()
    with said("trying out"), _ended_by_sigterm():
        if isinstance(path, StoreUrl):
            _try_store(asked(lambda: ObjectStore(path), json=wanted.json), wanted.mib << 20, found)
        else:
            _look_at_directory(path, found)
            _try_disk(path, wanted.mib << 20, found)
        _look_at_core(found)
        _look_at_memory(found)
        _look_at_devices(found)
    if wanted.json:
        as_json.print_answer({"path": str(path), **found.answer, "problems": found.problems, "expect": found.advice})
    else:
        print_facts(found.facts)
        for heading, lines in (("what to expect", found.advice), ("problems", found.problems)):
            print(
                "\n".join(["", heading, *(f"  {line}" for line in lines)]) if lines else "", end="\n" if lines else ""
            )
    return ExitCode.FAILED if found.problems else ExitCode.OK


def _place(path: str | os.PathLike[str]) -> Place:
    checked = check_place(path)
    if isinstance(checked, StoreUrl):
        return checked
    if os.path.lexists(checked) and not checked.is_dir():
        raise UsageError("path is not a folder", found=str(checked))
    return checked


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end the program as Ctrl-C does: what was made is removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _look_at_directory(path: Path, found: Diagnosis) -> None:
    from asyncckpt.storage.disk_probe import holder_of

    steps: list[int] = []
    if not os.path.lexists(path):
        state = "does not exist: the first save makes it"
    else:
        try:
            steps = list_steps(path)
            state = f"holds {count_of(len(steps), 'checkpoint')}"
        except CheckpointError:
            is_empty = not os.access(path, os.R_OK) or not os.listdir(path)
            state = "is empty" if is_empty else "holds other things, and no checkpoints: a folder of its own is better"
    found.facts.append(("directory", f"{path} {state}"))
    holder = holder_of(path, LOCK_NAME)
    if holder is not None:
        found.facts.append(("held by", holder))
        found.problems.append(f"another process saves there ({holder}): a second Saver is refused until it ends")
    refused = _why_refused(path)
    if refused is not None:
        found.problems.append(f"saves fail: {refused}")
    found.answer["directory"] = {"state": state, "checkpoints_count": len(steps), "held_by": holder}


def _why_refused(path: Path) -> str | None:
    """Return why a Saver cannot open a checkpoint directory that is there."""
    try:
        with CheckpointRoot.for_reading(path) as root:
            for folder in (root.manifests, root.data):
                folder.check_writable()
            os.close(root.root.open_file(LOCK_NAME, writable=True))
    except NotFoundError:  # The first save makes it.
        return None
    except CheckpointError as error:
        return str(error)
    return None


def _try_disk(path: Path, bytes: int, found: Diagnosis) -> None:
    from asyncckpt.storage.disk_probe import CHUNK_BYTES, probe_disk

    folder = next(place for place in (path, *path.parents) if place.is_dir())
    try:
        free = shutil.disk_usage(folder).free
        facts = probe_disk(folder, bytes=bytes)
    except (CheckpointError, OSError) as error:
        found.facts.append(("disk", str(error)))
        found.problems.append(f"saves fail: {error}")
        return
    found.answer["disk"] = {"folder": str(folder), "free_bytes": free, **asdict(facts)}
    wanted = _newest_full_bytes(path)
    if free < wanted:
        found.problems.append(f"full saves fail: {size(free)} free, the newest full checkpoint has {size(wanted)}")
    speed = "" if facts.bytes_per_s is None else f", writes {size(int(facts.bytes_per_s))}/s"
    direct = "direct writes" if facts.direct else "no direct writes"
    told = f"{size(free)} free, {direct}{speed}, a small file is durable after {_rounded(1000 * facts.sync_s)} ms"
    found.facts.append(("disk", told))
    if not facts.renames:
        found.problems.append("the file system replaces a file that exists when another one gets its name")
    if facts.bytes_per_s is None:
        least = f"that takes --mib {CHUNK_BYTES >> 20} or more"
        reason = least if bytes < CHUNK_BYTES else "the disk is nearly full, or file sizes are limited (ulimit -f)"
        found.advice.append(f"No speed was measured: {reason}.")
    else:
        seconds = _GIB / facts.bytes_per_s
        found.advice.append(
            f"1 GiB is durable about {_rounded(seconds)} s after the save began; training continues meanwhile."
        )
    if not facts.direct:
        found.advice.append("Writes go through the page cache here: saves take more time of the processor.")
    if not facts.locks:
        found.advice.append(
            "Locks do not hold here: two trainers that save to this directory do not notice each other."
        )


def _newest_full_bytes(path: Path) -> int:
    """Return the size of the newest full checkpoint that can be read: the next one needs about as much."""
    with contextlib.suppress(CheckpointError):
        for found in reversed(summaries(path).values()):
            if isinstance(found, CheckpointSummary) and found.kind == "full":
                return found.bytes
    return 0


def _try_store(store: ObjectStore, bytes: int, found: Diagnosis) -> None:
    """Do what saves and retention do there, with one object that is removed again."""
    key, took = f".doctor-{uuid.uuid4().hex}", {}
    part = os.urandom(min(PART_BYTES_MIN, bytes))
    parts = [part[: bytes - begin] for begin in range(0, bytes, PART_BYTES_MIN)]
    try:
        with contextlib.suppress(NotFoundError):
            found.answer["checkpoints_count"] = len(list_steps(str(store.url)))
        if store.put_new(key, b"") and store.put_new(key, b""):
            found.problems.append(
                "the store replaces objects in spite of If-None-Match: two writers are not kept apart"
            )
        for name, call in (
            ("put", lambda: store.put(key, parts, part_bytes=PART_BYTES_MIN, parallel=4)),
            ("get", lambda: store.read_whole(key, bytes_max=bytes)),
            ("remove", lambda: store.remove(key)),
        ):
            begun = time.perf_counter()
            call()
            took[name] = time.perf_counter() - begun
    except CheckpointError as error:
        found.facts.append(("store", str(error)))
        found.problems.append(f"saves fail, or old checkpoints stay: {error}")
        return
    finally:
        if "remove" not in took:
            with contextlib.suppress(CheckpointError):
                store.remove(key)
    found.answer["store"] = {"seconds": took, "bytes": bytes}
    speeds = ", ".join(f"{name} {size(int(bytes / took[name]))}/s" for name in ("put", "get"))
    found.facts.append(
        ("store", f"{store.url} holds {count_of(found.answer.get('checkpoints_count', 0), 'checkpoint')}; {speeds}")
    )


def _look_at_core(found: Diagnosis) -> None:
    import numpy as np

    from asyncckpt.native import UnusableLibrary, core
    from asyncckpt.native.library import NativeCore

    name = f"{core.implementation} ({core.cpu_variant}), {count_of(core.cores_count, 'core')} of the processor"
    if core.implementation == "twin":
        try:
            NativeCore()
            why = "ASYNCCKPT_NATIVE=0 asks for the twin"
        except UnusableLibrary as error:
            why = str(error)
        name += f": {why}"
        found.advice.append("The portable twin runs instead of the compiled core: saves are right, and slower.")
    source, target = np.ones(_COPIED_BYTES, dtype=np.uint8), np.ones(_COPIED_BYTES, dtype=np.uint8)
    segments = np.array([[source.ctypes.data, target.ctypes.data, _COPIED_BYTES]], dtype=np.uint64)
    seconds = []
    for _ in range(3):
        begun = time.perf_counter()
        core.copy(segments)
        seconds.append(time.perf_counter() - begun)
    speed = _COPIED_BYTES / max(min(seconds), 1e-9)
    found.facts += [("core", name), ("copies", f"{size(int(speed))}/s within memory")]
    found.answer["core"] = {
        "implementation": core.implementation,
        "cpu_variant": core.cpu_variant,
        "cores_count": core.cores_count,
        "copy_bytes_per_s": speed,
    }
    found.advice.append(
        f"save_async holds training up for about {_rounded(1000 * _GIB / speed)} ms for each GiB of state."
    )


def _look_at_memory(found: Diagnosis) -> None:
    import psutil

    from asyncckpt.staging.limits import cgroup_free_bytes, default_limit_bytes

    memory, group = psutil.virtual_memory(), cgroup_free_bytes()
    staging = default_limit_bytes(0)
    if group is not None and group >= memory.total:
        group = None
    limit = "" if group is None else f"; the limits of this container or job leave {size(group)}"
    found.facts.append(("memory", f"{size(memory.available)} of {size(memory.total)} available{limit}"))
    found.answer["memory"] = {
        "total_bytes": memory.total,
        "available_bytes": memory.available,
        "cgroup_free_bytes": group,
        "staging_bytes": staging,
    }
    found.advice.append(
        f"Up to {size(staging)} are staged in memory now; a save of more than that blocks training until it is written."
    )


def _look_at_devices(found: Diagnosis) -> None:
    import torch

    from asyncckpt.native import UnusableLibrary
    from asyncckpt.native.cuda import load_cuda_library

    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    try:
        load_cuda_library()
        kernels = "kernels of asyncckpt"
    except UnusableLibrary:
        kernels = "torch's operations instead of the kernels of asyncckpt"
    shown = f"{', '.join(names)}; {kernels}" if names else "no devices"
    versions = f"asyncckpt {__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    found.facts += [("CUDA", shown), ("versions", f"{versions}, {platform.system()} {platform.release()}")]
    found.answer["cuda"] = {"devices": names, "kernels": kernels.startswith("kernels")}
    found.answer["versions"] = {
        "asyncckpt": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def _rounded(number: float) -> str:
    """Return two digits of a number, without an exponent."""
    return f"{float(f'{number:.2g}'):g}"
