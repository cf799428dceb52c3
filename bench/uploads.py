"""`python -m bench uploads`: what it takes to bring a checkpoint to a store, beside obstore's own PUT of as many bytes.

    put     obstore puts one buffer, in parts of 16 MiB, 4 at once
    upload  a checkpoint is read from the disk by direct reads, compared with its digests, put, and published
    save    `asyncckpt.save` to the store: the tensors are copied, digests taken, all of it put, and published
    get     obstore gets that buffer
    load    the checkpoint is loaded by ranges, and compared with its digests

All of a round against one server, that of the tests (SeaweedFS on loopback), which has room for no more. Ways are
interleaved in each round, and ratios taken inside it. What is loaded is compared bit for bit with what was saved.

Expected, before measuring: the server takes most of the time and of the processor, so `upload` takes as long as `put`;
its own CPU is that of `put`, where obstore hashes every byte for its signature, and a tenth for reads and digests.
Measured: the first is so; of the processor it takes half a second more per GiB than `put`, of which reads and digests
are 0.14 s, into fresh memory or into used. Three quarters of the CPU of `put` are for the signature: `--unsigned`
leaves the bodies out of it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import torch
from obstore.store import S3Store
from rich.console import Console

import asyncckpt
from asyncckpt.checkpoints import describe
from asyncckpt.engine.upload.upload_attempt import upload_attempt
from asyncckpt.format.names import Attempt, parse
from asyncckpt.model.store_url import StoreUrl
from asyncckpt.storage.object_store import PART_BYTES_MIN, ObjectStore
from bench.figures import median_of
from bench.report import machine, make_console, number, print_table, write_json
from bench.rounds import scratch_folder
from bench.state import GIB
from bench.targets import Target, print_targets
from tests.cloud import seaweed

WAYS = ("put", "upload", "save", "get", "load")
Call = Callable[[], Any]
BUCKET = "bench"
TENSORS_COUNT = 16
SPEED_SHARE_MIN = 0.9


def run_uploads(
    *,
    gib: float = 1.0,
    rounds: int = 5,
    directory: Path | None = None,
    out: Path,
    unsigned: bool = False,
    smoke: bool = False,
) -> dict[str, Any]:
    """Run it, print the tables, write `out`.json and .txt; return the figures."""
    state_bytes, rounds = (48 << 20, 1) if smoke else (int(gib * GIB), rounds)
    console = make_console()
    sign_bodies(not unsigned, console)
    with scratch_folder(directory) as folder:
        answers = _rounds(folder, state_bytes, rounds)
    content = {"machine": machine(), "unsigned": unsigned, "state_bytes": state_bytes, "rounds": answers}
    title = f"{state_bytes / GIB:.2f} GiB to and from a store on loopback, medians of {rounds} rounds"
    rows = [[way, *(number(_median(answers, way, name, state_bytes)) for name in ("seconds", "cpu"))] for way in WAYS]
    print_table(console, title, ["way", "seconds per GiB", "own CPU seconds per GiB"], rows)
    print_targets(
        console,
        [
            Target(f"speed of {what} / obstore's put", _ratio(answers, "put", way), SPEED_SHARE_MIN, True)
            for way, what in (("upload", "an upload"), ("save", "a save"))
        ],
    )
    write_json(Path(f"{out}.json"), content)
    console.save_text(f"{out}.txt")
    return content


def sign_bodies(wanted: bool, console: Console) -> None:
    """Let obstore sign requests with or without their bodies, in this process and those that it starts."""
    os.environ["AWS_UNSIGNED_PAYLOAD"] = "false" if wanted else "true"
    if not wanted:
        console.print("requests are signed without their bodies: AWS_UNSIGNED_PAYLOAD=true")


def _rounds(folder: Path, state_bytes: int, rounds: int) -> list[dict[str, Any]]:
    drawn = np.random.default_rng(0).integers(0, 256, state_bytes, dtype=np.uint8)
    pieces = np.array_split(drawn, TENSORS_COUNT)
    state = {f"t{i}": torch.from_numpy(piece) for i, piece in enumerate(pieces)}
    asyncckpt.save(folder / "ckpt", state)
    [name, *_] = {Path(file).parent.name for file in describe(folder / "ckpt").files}
    found = parse(name)
    assert found is not None
    attempt = Attempt(found.step, found.attempt)
    answers = []
    for index in range(rounds):
        with scratch_folder(folder) as own, seaweed.running(own, buckets=(BUCKET,)) as server:
            os.environ.update(seaweed.environment(server.endpoint))
            url = f"s3://{BUCKET}/round"
            calls = _calls(folder / "ckpt", url, drawn, attempt)
            calls["save"] = partial(asyncckpt.save, f"{url}-direct", state)
            order = WAYS if index % 2 == 0 else ("save", "upload", "put", "load", "get")
            for way in order:
                begun, cpu = time.perf_counter(), time.process_time()
                found = calls[way]()
                seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
                answers.append({"round": index, "way": way, "seconds": seconds, "cpu": cpu})
                if way == "load":
                    for tensors in (found, asyncckpt.load(f"{url}-direct")):
                        assert all(np.array_equal(tensors[f"t{i}"].numpy(), piece) for i, piece in enumerate(pieces))
    return answers


def _calls(path: Path, url: str, drawn: np.ndarray[Any, np.dtype[np.uint8]], attempt: Attempt) -> dict[str, Call]:
    store, options = ObjectStore(StoreUrl.of(url)), asyncckpt.UploadOptions(url)
    key = f"{url.rpartition('/')[2]}/buffer"
    own = S3Store(BUCKET, client_options={"allow_http": True})

    def put() -> None:
        obstore.put(own, key, drawn, chunk_size=PART_BYTES_MIN, max_concurrency=options.parallel)

    return {
        "put": put,
        "upload": lambda: upload_attempt(path, store, attempt, options),
        "get": lambda: obstore.get(own, key).bytes(),
        "load": lambda: asyncckpt.load(url),
    }


def _median(answers: list[dict[str, Any]], way: str, name: str, state_bytes: int) -> float:
    return median_of(one[name] * GIB / state_bytes for one in answers if one["way"] == way)


def _ratio(answers: list[dict[str, Any]], way: str, base: str) -> float:
    """Median over rounds of the seconds of one way / another in the same round."""
    seconds = {(one["round"], one["way"]): float(one["seconds"]) for one in answers}
    return median_of(seconds[index, way] / seconds[index, base] for index in {index for index, _ in seconds})
