"""The door of the benchmark.

python -m bench state | many-tensors | load | multi-level | touched | optimizers | dcp | idmap | gpu | host-part |
    path | compaction | endurance | parallel | recis | trainers | all
"""

from __future__ import annotations

import datetime
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from bench.compaction import run_compaction_bench
from bench.dcp import run_dcp
from bench.endurance import run_endurance
from bench.gpu import run_gpu
from bench.gpu_device import NoDevice
from bench.load import LOAD_PEERS, run_load
from bench.many_tensors import MANY_PEERS, run_many_tensors
from bench.multi_level import run_multi_level
from bench.optimizers import run_optimizers
from bench.parallel import run_parallel
from bench.path import run_path
from bench.peers import PEERS, STEP_PEERS
from bench.recis import run_recis
from bench.rounds import REPOSITORY
from bench.start import run_start
from bench.state_bench import run_state
from bench.stepped_tables import run_stepped_tables
from bench.steps_bench import run_steps
from bench.touched import run_touched
from bench.trainers import run_trainers

RESULTS_FOLDER = REPOSITORY / "bench" / "results"
IDMAP_SECONDS_MAX = 1800
STATE_PEERS_TEXT, MANY_PEERS_TEXT, LOAD_PEERS_TEXT = map(",".join, (PEERS, MANY_PEERS, LOAD_PEERS))

application = typer.Typer(
    help="asyncckpt, its peers and the raw floor, side by side.", no_args_is_help=False, pretty_exceptions_enable=False
)

Rounds = Annotated[int, typer.Option(min=1, help="interleaved rounds; the medians are reported")]
Directory = Annotated[Path | None, typer.Option("--dir", help="where to put checkpoints; default: below the cwd")]
Out = Annotated[Path | None, typer.Option(help="name of the results without suffix; default: bench/results/<command>")]
Smoke = Annotated[bool, typer.Option("--smoke", help="tiny sizes, one round, a few seconds; figures mean nothing")]
Peers = Annotated[str, typer.Option(help="comma-separated")]
Gib = Annotated[float, typer.Option(help="size of the state")]


def _out(out: Path | None, name: str, smoke: bool) -> Path:
    # A smoke run shall not overwrite real results.
    return out or RESULTS_FOLDER / (f"smoke-{name}" if smoke else name)


@application.command()
def state(
    gib: Gib = 2.0,
    rounds: Rounds = 5,
    saves: Annotated[int, typer.Option(min=1, help="saves of each round; the first is reported apart")] = 3,
    peers: Peers = STATE_PEERS_TEXT,
    trainer_threads: Annotated[str, typer.Option(help="1, all, or both: 1,all")] = "1,all",
    directory: Directory = None,
    out: Out = None,
    smoke: Smoke = False,
    steps: Annotated[bool, typer.Option("--steps", help="a state that only optimizers change, own peers")] = False,
) -> None:
    """Tables and dense tensors, mutated by every training step: stall, time lost, durable, memory, CPU, load, image."""
    if steps:
        run_steps(
            gib=gib,
            rounds=rounds,
            saves=saves,
            peers=STEP_PEERS if peers == STATE_PEERS_TEXT else peers.split(","),
            trainer_threads=trainer_threads.split(","),
            directory=directory,
            out=_out(out, "steps", smoke),
            smoke=smoke,
        )
        return
    run_state(
        gib=gib,
        rounds=rounds,
        saves=saves,
        peers=peers.split(","),
        trainer_threads=trainer_threads.split(","),
        directory=directory,
        out=_out(out, "state", smoke),
        smoke=smoke,
    )


@application.command()
def many_tensors(
    count: Annotated[int, typer.Option(min=1, help="tensors of 64 KiB")] = 8000,
    rounds: Rounds = 5,
    saves: Annotated[int, typer.Option(min=1)] = 3,
    peers: Peers = MANY_PEERS_TEXT,
    directory: Directory = None,
    out: Out = None,
    smoke: Smoke = False,
) -> None:
    """8,000 small tensors: time of the call, time to durable, speed of Python while writing."""
    run_many_tensors(
        count=count,
        rounds=rounds,
        saves=saves,
        peers=peers.split(","),
        directory=directory,
        out=_out(out, "many-tensors", smoke),
        smoke=smoke,
    )


@application.command()
def load(
    gib: Gib = 2.0,
    rounds: Rounds = 5,
    threads: Annotated[int, typer.Option(min=1, help="reading threads, of the floor and of asyncckpt")] = 4,
    peers: Peers = LOAD_PEERS_TEXT,
    directory: Directory = None,
    out: Out = None,
    smoke: Smoke = False,
) -> None:
    """Load with a cold cache into preallocated tensors."""
    run_load(
        gib=gib,
        rounds=rounds,
        threads=threads,
        peers=peers.split(","),
        directory=directory,
        out=_out(out, "load", smoke),
        smoke=smoke,
    )


@application.command()
def multi_level(
    sizes: Annotated[str, typer.Option(help="GiB of each table, comma-separated")] = "1,2,4",
    rounds: Rounds = 3,
    saves: Annotated[int, typer.Option(min=2)] = 3,
    directory: Directory = None,
    out: Out = None,
    smoke: Smoke = False,
) -> None:
    """A table with a 5 % cache level: both levels copied in the call, or the host level exported behind the fence."""
    run_multi_level(
        sizes_gib=[float(size) for size in sizes.split(",")],
        rounds=rounds,
        saves=saves,
        directory=directory,
        out=_out(out, "multi-level", smoke),
        smoke=smoke,
    )


@application.command()
def touched(
    gib: Gib = 2.0,
    rounds: Rounds = 5,
    saves: Annotated[int, typer.Option(min=1, help="reported saves of each share and round")] = 1,
    zipf: Annotated[bool, typer.Option("--zipf", help="also 20 saves of Zipf training: bytes of deltas")] = False,
    directory: Directory = None,
    out: Out = None,
    smoke: Smoke = False,
) -> None:
    """Repeated saves with 0.1 to 20 % of the rows written in between: refreshed, copied, deltas; what marks cost."""
    run_touched(
        gib=gib,
        rounds=rounds,
        saves=saves,
        zipf=zipf,
        directory=directory,
        out=_out(out, "touched", smoke),
        smoke=smoke,
    )


@application.command()
def optimizers(
    rounds: Rounds = 5,
    threads: Annotated[int, typer.Option(min=1, help="threads of every contestant")] = 1,
    dims: Annotated[str, typer.Option(help="widths of a row, comma-separated")] = "16,64",
    directory: Directory = None,
    out: Out = None,
    smoke: Smoke = False,
) -> None:
    """Rows a second of optimizers of tables, beside torch's sparse ones and FBGEMM's operator. Not part of `all`."""
    widths = [int(dim) for dim in dims.split(",")]
    path = _out(out, "optimizers", smoke)
    run_optimizers(rounds=1 if smoke else rounds, threads=threads, dims=widths, out=path, smoke=smoke)


@application.command(name="dcp")
def distributed_checkpoint(
    count: Annotated[int, typer.Option(min=1, help="tensors")] = 8000,
    rounds: Rounds = 5,
    short: Annotated[bool, typer.Option(help="only what the targets need")] = False,
    world: Annotated[int, typer.Option(min=0, max=2, help="ranks; 0: both, 1 and then 2")] = 0,
    directory: Directory = None,
    out: Out = None,
    smoke: Smoke = False,
) -> None:
    """torch.distributed.checkpoint with its own writer and with ours: 1 process, 2 ranks, large and small tensors."""
    path = _out(out, "dcp", smoke)
    worlds = [world] if world else [1, 2]
    run_dcp(count=count, rounds=rounds, short=short, worlds=worlds, directory=directory, out=path, smoke=smoke)


@application.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, add_help_option=False)
def idmap(context: typer.Context) -> None:
    """Inserts and lookups of the id map; all options go to `python -m bench.idmap`."""
    _idmap(context.args)


def _idmap(arguments: list[str]) -> None:
    if importlib.util.find_spec("bench.idmap") is None:
        typer.echo("bench/idmap.py is not there")
        return
    # A process of its own: 10 M ids in a dict leave a large heap behind.
    command = [sys.executable, "-m", "bench.idmap", *arguments]
    subprocess.run(command, cwd=REPOSITORY, check=True, timeout=IDMAP_SECONDS_MAX)


@application.command()
def gpu(
    gib: Annotated[float, typer.Option(help="size of the large states")] = 8.0,
    rounds: Rounds = 5,
    directory: Directory = None,
    out: Out = None,
    smoke: Smoke = False,
    peers: Annotated[bool, typer.Option(help="also measure other ways to save")] = True,
    device: Annotated[str, typer.Option(help="cuda, or cpu: to test the bench itself")] = "cuda",
) -> None:
    """Saves and loads of tensors on a CUDA device, beside plain copies and other ways to save. Not part of `all`."""
    path = _out(out, f"{datetime.date.today().isoformat()}-gpu", smoke)
    try:
        run_gpu(gib=gib, rounds=rounds, directory=directory, out=path, peers=peers, smoke=smoke, device=device)
    except NoDevice as error:
        typer.echo(f"there is no device to measure: {error}", err=True)
        raise typer.Exit(1) from error


@application.command()
def host_part(rounds: Rounds = 5, directory: Directory = None, out: Out = None, smoke: Smoke = False) -> None:
    """How long save_async keeps the thread for a state that has not changed. Not part of `all`."""
    from bench.host_part import run_host_part  # It needs what the tests need.

    run_host_part(rounds=rounds, directory=directory, out=_out(out, "host-part", smoke), smoke=smoke)


@application.command()
def path(
    names: Annotated[bool, typer.Option("--list", help="also the names of the files")] = False,
    directory: Directory = None,
    out: Out = None,
    smoke: Smoke = False,
) -> None:
    """Files and functions that saves and loads cross. Not part of `all`."""
    run_path(directory=directory, out=_out(out, "path", smoke), names=names, smoke=smoke)


@application.command()
def compaction(
    gib: Gib = 1.0, rounds: Rounds = 5, directory: Directory = None, out: Out = None, smoke: Smoke = False
) -> None:
    """A save beside four compactions of the same process, and one alone. Not part of `all`."""
    out = _out(out, "compaction", smoke)
    run_compaction_bench(gib=gib, rounds=rounds, directory=directory, out=out, smoke=smoke)


@application.command()
def uploads(
    gib: Gib = 1.0,
    rounds: Rounds = 5,
    training: Annotated[bool, typer.Option("--training", help="what training loses meanwhile, beside others")] = False,
    unsigned: Annotated[bool, typer.Option("--unsigned", help="sign requests without their bodies")] = False,
    directory: Directory = None,
    out: Out = None,
    smoke: Smoke = False,
) -> None:
    """Uploads to an object store and loads from it, beside obstore's own. Not part of `all`."""
    from bench.uploads import run_uploads  # With a server, which is not everywhere.
    from bench.uploads_training import run_uploads_training

    run, name = (run_uploads_training, "uploads-training") if training else (run_uploads, "uploads")
    name += "-unsigned" if unsigned else ""
    run(gib=gib, rounds=rounds, directory=directory, out=_out(out, name, smoke), unsigned=unsigned, smoke=smoke)


@application.command()
def endurance(
    saves: Annotated[int, typer.Option(min=1)] = 10_000,
    directory: Directory = None,
    out: Out = None,
    smoke: Smoke = False,
) -> None:
    """What a process holds after thousands of saves: descriptors, threads, memory. Not part of `all`."""
    run_endurance(saves=60 if smoke else saves, directory=directory, out=_out(out, "endurance", smoke))


@application.command()
def trainers(
    width: Annotated[int, typer.Option(min=1, help="of the six layers")] = 2048,
    rounds: Rounds = 3,
    directory: Directory = None,
    out: Out = None,
    smoke: Smoke = False,
) -> None:
    """What Hugging Face's Trainer and Lightning lose per checkpoint, with their own saving and with ours."""
    sizes = {"width": 16, "steps": 6, "every": 2} if smoke else {"width": width, "steps": 31, "every": 10}
    run_trainers(**sizes, rounds=1 if smoke else rounds, directory=directory, out=_out(out, "trainers", smoke))


@application.command()
def start(rounds: Rounds = 9, directory: Directory = None, out: Out = None, smoke: Smoke = False) -> None:
    """How long the command line takes, beside Python itself. Not part of `all`."""
    steps_count, rounds = (20, 1) if smoke else (5000, rounds)
    run_start(steps_count=steps_count, rounds=rounds, directory=directory, out=_out(out, "start", smoke))


@application.command()
def parallel(rounds: Rounds = 5, directory: Directory = None, out: Out = None, smoke: Smoke = False) -> None:
    """What `parallel` of a Saver and a Loader does, by the size of the state. Not part of `all`."""
    sizes, rounds = ((1,), 1) if smoke else ((16, 80, 512, 2048), rounds)
    run_parallel(sizes=sizes, rounds=rounds, directory=directory, out=_out(out, "parallel", smoke))


@application.command(name="stepped-tables")
def stepped_tables(
    gib: Gib = 1.0,
    rounds: Rounds = 3,
    saves: Annotated[int, typer.Option(min=1, help="of each way and share in a round")] = 6,
    directory: Directory = None,
    out: Out = None,
    smoke: Smoke = False,
) -> None:
    """What a save of a table keeps training waiting that only an optimizer changes. Not part of `all`."""
    gib, rounds, saves = (0.01, 1, 1) if smoke else (gib, rounds, saves)
    name = _out(out, "stepped-tables", smoke)
    run_stepped_tables(gib=gib, rounds=rounds, saves=saves, directory=directory, out=name)


@application.command()
def recis(
    rows: Annotated[int, typer.Option(min=1, help="rows of the table, of 200 bytes")] = 10_000_000,
    rounds: Rounds = 3,
    directory: Directory = None,
    out: Out = None,
    smoke: Smoke = False,
) -> None:
    """Conversion from RecIS and back, beside a plain copy of its files. Not part of `all`."""
    rows, rounds = (20_000, 1) if smoke else (rows, rounds)
    run_recis(rows=rows, rounds=rounds, directory=directory, out=_out(out, "recis", smoke))


@application.command(name="all")
def everything(
    gib: Gib = 2.0,
    rounds: Rounds = 5,
    directory: Directory = None,
    smoke: Smoke = False,
) -> None:
    """All of them, into bench/results."""
    run_state(gib=gib, rounds=rounds, directory=directory, out=_out(None, "state", smoke), smoke=smoke)
    run_many_tensors(rounds=rounds, directory=directory, out=_out(None, "many-tensors", smoke), smoke=smoke)
    run_load(gib=gib, rounds=rounds, directory=directory, out=_out(None, "load", smoke), smoke=smoke)
    run_multi_level(directory=directory, out=_out(None, "multi-level", smoke), smoke=smoke)
    run_touched(gib=gib, rounds=rounds, zipf=True, directory=directory, out=_out(None, "touched", smoke), smoke=smoke)
    run_dcp(rounds=rounds, directory=directory, out=_out(None, "dcp", smoke), smoke=smoke)
    json_path = _out(None, "idmap", smoke).with_suffix(".json")
    _idmap(["--json", str(json_path), *(["--ids", "100000"] if smoke else [])])


@application.callback(invoke_without_command=True)
def without_command(context: typer.Context) -> None:
    """`python -m bench` alone runs everything."""
    if context.invoked_subcommand is None:
        everything()


if __name__ == "__main__":
    application()
