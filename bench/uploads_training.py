"""`python -m bench uploads --training`: what training loses while a save is on its way to a store.

    asyncckpt               to the disk: what a local save costs
    store_socket            one copy in the call, then the bytes through a socket, to be dropped: what the kernel takes
    store_put               the floor: one copy in the call, then obstore's put of it in a thread
    store_asyncckpt         `Saver(path="s3://...")`
    store_asyncckpt_upload  `Saver(upload="s3://...")`: until it is in the store too
    store_dcp_fsspec        torch's DCP with its writer for fsspec and s3fs, in a thread
    store_torch_save        clone, then torch.save and obstore's put in a thread

All of a round against one server, that of the tests (SeaweedFS on loopback), in processes of their own. It shares the
cores with the trainer, which a real store does not; so its own CPU is counted, and told beside. With the trainer on one
core, the server keeps to another one. With the trainer on all cores, each second of the server is one that the trainer
or the sender lacks on a core.

Expected, before measuring: on one core, a little more than a local save loses, for each second that the sender takes
beside the server; on all cores, the CPU of server and sender divided by the cores, whoever sends. Measured: the server
takes seven to ten seconds of a core per GiB, ten times what our senders take: without a core of its own, that is all
that is seen.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from bench.clocks import process_seconds
from bench.figures import VALUES, RoundFigures, median_of, peer_median, ratio_median
from bench.peers import OURS, STORE_FLOOR, STORE_PEERS
from bench.peers.protocol import BUCKET
from bench.report import machine, make_console, number, peers_in, print_table, times, write_json
from bench.round import RoundSpec
from bench.rounds import available_peers, calibrated_matmuls, run_rounds, scratch_folder
from bench.state import GIB
from bench.targets import Target, print_targets
from bench.uploads import sign_bodies
from tests.cloud import seaweed

SMOKE_GIB = 0.01
LOST_SHARE_MAX = 1.2
OURS_IN_STORE = ("store_asyncckpt", "store_asyncckpt_upload")
ServerSeconds = dict[str, list[float]]  # By peer, one for each round.


def run_uploads_training(
    *, gib: float, rounds: int, directory: Path | None, out: Path, unsigned: bool = False, smoke: bool = False
) -> dict[str, list[RoundFigures]]:
    """Run it, print the tables, write `out`.json and .txt; return the rounds by number of trainer threads."""
    console = make_console()
    sign_bodies(not unsigned, console)
    names = available_peers(STORE_PEERS, console)
    threads_of, rounds, gib = (("1",), 1, SMOKE_GIB) if smoke else (("1", "all"), rounds, gib)
    groups: dict[str, list[RoundFigures]] = {}
    servers: dict[str, ServerSeconds] = {}
    with scratch_folder(directory) as folder:
        for threads in threads_of:
            spec = RoundSpec(
                peer="",
                directory=str(folder),
                figures_path=str(folder / "figures.json"),
                trainer_threads=threads,
                state_bytes=int(gib * GIB),
                matmuls=1 if smoke else calibrated_matmuls(folder, threads),
                saves_count=1,  # What a store holds is not given back at once: more than that fills the server.
                idle_steps_count=5 if smoke else 100,
                warmup_steps_count=2 if smoke else 20,
                load=False,
                verify=smoke,
            )
            console.print(f"trainer threads: {threads}, {spec.matmuls} products in a step")
            groups[threads], servers[threads] = _rounds(names, rounds, spec, folder, console)
    for threads, group in groups.items():
        title = f"{group[0].state_bytes / GIB:.2f} GiB, trainer threads {threads}, medians of {rounds} rounds"
        _print(console, title, group, servers[threads])
    print_targets(console, [target for threads, group in groups.items() for target in _targets(group, threads)])
    content = {
        "machine": machine(),
        "unsigned": unsigned,
        "rounds": {threads: [one.to_json() for one in group] for threads, group in groups.items()},
        "server_cpu_seconds": servers,
    }
    write_json(Path(f"{out}.json"), content)
    console.save_text(f"{out}.txt")
    return groups


def _rounds(
    names: Sequence[str], count: int, spec: RoundSpec, folder: Path, console: Console
) -> tuple[list[RoundFigures], ServerSeconds]:
    """Run all peers in every round, each round in another order and with a new server."""
    figures: list[RoundFigures] = []
    servers: ServerSeconds = {name: [] for name in names}
    for index in range(count):
        shift = index % len(names)
        apart = [] if spec.trainer_threads == "all" else [max(os.sched_getaffinity(0))]
        with scratch_folder(folder) as room, seaweed.running(room, buckets=(BUCKET,), cores=apart) as server:
            os.environ.update(seaweed.environment(server.endpoint))
            own = replace(spec, round_index=index)
            for name in (*names[shift:], *names[:shift]):
                begun = process_seconds(server.pid)
                figures += run_rounds([name], 1, lambda peer, _, own=own: replace(own, peer=peer), console)
                servers[name].append(process_seconds(server.pid) - begun)
    return figures, servers


def _print(console: Console, title: str, group: list[RoundFigures], servers: ServerSeconds) -> None:
    columns = ["peer", "stall s", "time lost s", "/ local save's", "/ floor's", "durable s", "step while writing"]
    rows = []
    for peer in peers_in(group):
        of = {name: peer_median(group, peer, value) for name, value in VALUES.items()}
        against = [times(ratio_median(group, peer, other, VALUES["lost"])) for other in (OURS, STORE_FLOOR)]
        ends = [number(of["durable"]), times(of["step slowdown"]), number(of["cpu per gib"])]
        gib = group[0].state_bytes / GIB
        ends += [number(of["extra memory"] / GIB, 2), number(median_of(servers[peer]) / gib)]
        rows.append([peer, number(of["stall"]), number(of["lost"]), *against, *ends])
    columns += ["background CPU s/GiB", "extra memory GiB", "server's CPU s/GiB"]
    print_table(console, title, columns, rows)


def _targets(group: list[RoundFigures], threads: str) -> list[Target]:
    case = "trainer on all cores" if threads == "all" else f"trainer on {threads} core"
    lost = VALUES["lost"]
    return [
        Target(f"{case}: time lost, {peer} / local save's", ratio_median(group, peer, OURS, lost), LOST_SHARE_MAX)
        for peer in OURS_IN_STORE
    ]
