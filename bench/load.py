"""`python -m bench load`: cold loads into preallocated tensors, checksums verified, beside a raw O_DIRECT read.

1. One process writes the same state once with every peer.
2. Each round is a fresh process (a load is what a process does once, after a crash): it makes and touches the target,
   then every peer loads in turn, each from a cold cache, the order rotated; the floor reads its bytes, as many threads.
3. Every load of the first round is compared bit for bit.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench.clocks import cached_share, drop_page_cache
from bench.figures import median_of
from bench.peers import FLOOR, OURS, open_peer
from bench.peers.raw_floor import RawFloor
from bench.report import machine, make_console, number, print_table, times, write_json
from bench.rounds import available_peers, run_child, scratch_folder
from bench.state import GIB, State, differences, recommender_state
from bench.targets import Target, print_targets

LOAD_PEERS = (FLOOR, OURS, "dcp_thread", "safetensors", "torch_save")
STEP = 1
VERDICTS = {True: "yes", False: "NO", None: "-"}


@dataclass(frozen=True)
class LoadSpec:
    """What one process shall do: write with all peers, or load with all peers once."""

    directory: str
    figures_path: str
    peers: tuple[str, ...]
    state_bytes: int
    threads_count: int
    write: bool = False
    compare: bool = False


@dataclass(frozen=True)
class LoadFigures:
    """One load of one peer."""

    peer: str
    round_index: int
    seconds: float
    cached_share: float
    exact: bool | None


def write_all(spec: LoadSpec) -> None:
    state = recommender_state(spec.state_bytes, hashtables=False)
    for name in spec.peers:
        folder = Path(spec.directory, name)
        folder.mkdir()
        peer = open_peer(name, state, folder)
        peer.prepare()
        peer.save_async(STEP).wait_durable()
        peer.close()


def load_all(spec: LoadSpec) -> list[dict[str, Any]]:
    target = recommender_state(spec.state_bytes, hashtables=False, filled=False)
    expected = recommender_state(spec.state_bytes, hashtables=False).copy() if spec.compare else {}
    figures = []
    for name in spec.peers:
        target.clear()
        folder = Path(spec.directory, name)
        drop_page_cache(folder)
        cached = cached_share(folder)
        seconds = load_seconds(name, target, folder, spec.threads_count)
        exact = not differences(target.copy(), expected) if spec.compare and name != FLOOR else None
        figures.append({"peer": name, "seconds": seconds, "cached_share": cached, "exact": exact})
    return figures


def load_seconds(name: str, target: State, folder: Path, threads_count: int) -> float:
    """Time one load. The floor only reads, into memory of its own that was touched before."""
    if name == FLOOR:
        floor = RawFloor(target, folder)
        floor.prepare()
        begin = time.perf_counter()
        floor.read(STEP, threads=threads_count)
        return time.perf_counter() - begin
    if name == OURS:
        import asyncckpt

        begin = time.perf_counter()
        asyncckpt.Loader(str(folder), tensors=target.plain_tensors(), parallel=threads_count, step=STEP).load()
        return time.perf_counter() - begin
    peer = open_peer(name, target, folder)
    begin = time.perf_counter()
    peer.load(STEP, target)
    seconds = time.perf_counter() - begin
    peer.close()
    return seconds


def run_load(
    *,
    gib: float = 2.0,
    rounds: int = 5,
    threads: int = 4,
    peers: Sequence[str] = LOAD_PEERS,
    directory: Path | None = None,
    out: Path,
    smoke: bool = False,
) -> list[LoadFigures]:
    """Run it, print the table, write `out`.json and .txt; return the loads."""
    console = make_console()
    names = available_peers(peers, console)
    if smoke:
        gib, rounds = 0.01, 1
    figures: list[LoadFigures] = []
    with scratch_folder(directory) as folder:
        spec = LoadSpec(str(folder), str(folder / "figures.json"), tuple(names), int(gib * GIB), threads)
        run_child("bench.load", asdict(replace(spec, write=True)))
        for index in range(rounds):
            shift = index % len(names)
            order = (*names[shift:], *names[:shift])
            answer, _ = run_child("bench.load", asdict(replace(spec, peers=order, compare=index == 0)))
            figures += [LoadFigures(round_index=index, **one) for one in answer]
            loads = ", ".join(f"{one['peer']} {one['seconds']:.3f}" for one in answer)
            console.print(f"round {index + 1}/{rounds}: {loads}", highlight=False)

    def seconds(peer: str) -> float:
        return median_of(one.seconds for one in figures if one.peer == peer)

    floors = {one.round_index: one.seconds for one in figures if one.peer == FLOOR}

    def ratio(peer: str) -> float:
        rows = [one for one in figures if one.peer == peer and one.round_index in floors]
        return median_of(one.seconds / floors[one.round_index] for one in rows)

    exact = {one.peer: one.exact for one in figures if one.exact is not None}
    rows = [
        [
            peer,
            number(seconds(peer)),
            number(gib / seconds(peer), 2),
            times(ratio(peer)),
            number(max(one.cached_share for one in figures if one.peer == peer), 2),
            VERDICTS[exact.get(peer)],
        ]
        for peer in names
    ]
    title = f"cold load of {gib:g} GiB into preallocated tensors, {threads} threads, medians of {rounds} rounds"
    print_table(console, title, ["peer", "s", "GiB/s", "/ read floor", "cached before", "exact"], rows)
    print_targets(console, [Target("cold load / O_DIRECT read floor", ratio(OURS), 1.15)])
    write_json(Path(f"{out}.json"), {"machine": machine(), "loads": [asdict(one) for one in figures]})
    console.save_text(f"{out}.txt")
    return figures


def main(argument: str) -> None:
    fields = json.loads(argument)
    spec = LoadSpec(**{**fields, "peers": tuple(fields["peers"])})
    answer: list[dict[str, Any]] = []
    if spec.write:
        write_all(spec)
    else:
        answer = load_all(spec)
    Path(spec.figures_path).write_text(json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1])
