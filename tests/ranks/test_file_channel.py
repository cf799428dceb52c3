"""Ranks that meet in the checkpoint directory: they find those of today, whatever lies there."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

import asyncckpt
from asyncckpt.coordination import file_channel, rendezvous
from asyncckpt.coordination.file_channel import FileChannel
from asyncckpt.coordination.session_files import (
    RANKS_DIR,
    ROSTER,
    Hello,
    MessageName,
    hello_of,
    inbox_dir,
    is_session,
    message_of,
    put_name,
    write_whole,
)
from asyncckpt.errors import CheckpointError, ConflictError, CorruptError, PeerError
from asyncckpt.storage.directory import Directory
from tests.ranks.channels import DEADLINE_S, at_once, channels, file_channels, gather, open_at

pytestmark = pytest.mark.any_core


def leave_session(folder: Path, roster: dict[int, str], ranks_count: int = 2) -> Path:
    """What a killed job leaves."""
    session = folder / RANKS_DIR / f"s-{os.urandom(16).hex()}"
    for name in ("put", "gone", *map(inbox_dir, range(ranks_count))):
        (session / name).mkdir(parents=True)
    text = ", ".join(f'"{rank}": "{token}"' for rank, token in roster.items())
    with Directory.open(session) as opened, opened.child(inbox_dir(1)) as inbox:
        write_whole(opened, ROSTER, f"{{{text}}}".encode())
        write_whole(inbox, MessageName(1, 0, 0).name, b"of yesterday")
    return session


def leave_hello(folder: Path, rank: int, ranks_count: int = 2) -> Path:
    (folder / RANKS_DIR).mkdir(exist_ok=True)
    path = folder / RANKS_DIR / Hello(rank, ranks_count, os.urandom(16).hex()).name
    path.touch()
    return path


def talk(made: list[FileChannel]) -> None:
    made[1].send(1, 0, b"hello")
    made[0].send(1, None, b"answer")
    assert gather(made[0], 1, 1) == [(1, b"hello")]
    assert gather(made[1], 1, 1) == [(0, b"answer")]


def test_what_a_killed_job_left_is_swept_and_never_joined(tmp_path: Path) -> None:
    old = [leave_session(tmp_path, {1: os.urandom(16).hex()}) for _ in range(3)]
    hellos = [leave_hello(tmp_path, rank) for rank in (1, 1, 0)]
    made = file_channels(2, tmp_path)
    talk(made)
    assert not any(path.exists() for path in old + hellos)
    for channel in reversed(made):
        channel.close()
    assert list((tmp_path / RANKS_DIR).iterdir()) == []


def test_a_rank_that_comes_before_rank_0_leaves_its_hello_again(tmp_path: Path) -> None:
    is_there = threading.Event()

    def watch_and_open_rank_0() -> FileChannel:
        while not any(hello_of(path.name) for path in tmp_path.rglob("hello-*")):
            assert not is_there.wait(0.001)
        with Directory.open(tmp_path) as root:
            return open_at(root, rank=0, ranks_count=2)

    def open_rank_1() -> FileChannel:
        with Directory.open(tmp_path) as root:
            return open_at(root, rank=1, ranks_count=2)

    made = at_once(iter((watch_and_open_rank_0, open_rank_1)))
    talk(made)
    for channel in reversed(made):
        channel.close()


def test_a_hello_of_a_process_that_died_meanwhile_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes between the sweep and the gathering, beside that of the rank that lives."""
    names = Directory.names
    left: list[Path] = []

    def names_after_a_death(folder: Directory) -> list[str]:
        found = names(folder)
        if not left and folder.path.name == RANKS_DIR and any(hello_of(name) for name in found):
            left.append(leave_hello(tmp_path, 1))
            found = names(folder)
        return found

    monkeypatch.setattr(Directory, "names", names_after_a_death)
    made = file_channels(2, tmp_path)
    talk(made)
    assert left
    assert not left[0].exists()
    for channel in reversed(made):
        channel.close()


def test_one_of_two_processes_that_claim_to_be_one_rank_stays_outside(tmp_path: Path) -> None:
    def claim(root: Directory, rank: int) -> FileChannel | CheckpointError:
        try:
            return open_at(root, rank=rank, ranks_count=3, deadline_s=1.0)
        except CheckpointError as error:
            return error

    with Directory.open(tmp_path) as root:
        found = at_once(partial(claim, root, rank) for rank in (0, 1, 1, 2))
    inside = [one for one in found if isinstance(one, FileChannel)]
    outside = [one for one in found if isinstance(one, PeerError)]
    # Rank 0 took either, or saw both until the end.
    assert [len(inside), len(outside)] == [3, 1] or isinstance(found[0], ConflictError)
    for channel in reversed(inside):
        channel.close()
    assert list((tmp_path / RANKS_DIR).iterdir()) == []


def test_processes_that_both_stay_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = Directory.names

    def names_with_two_claims(folder: Directory) -> list[str]:
        found = names(folder)
        return [*found, *(leave_hello(tmp_path, 1).name for _ in range(2 if folder.path.name == RANKS_DIR else 0))]

    monkeypatch.setattr(Directory, "names", names_with_two_claims)
    with Directory.open(tmp_path) as root:
        assert "several processes claim to be rank 1" in str(fails_with(ConflictError, root, rank=0, ranks_count=2))


def test_missing_ranks_are_named(tmp_path: Path) -> None:
    with Directory.open(tmp_path) as root:
        errors = at_once(
            partial(fails_with, PeerError, root, rank=rank, ranks_count=count)
            for rank, count in ((0, 4), (2, 4), (1, 7))
        )
    assert isinstance(errors[0], PeerError)
    assert errors[0].rank == 1
    assert "ranks [1, 3] of 4 did not come" in errors[0].cause
    assert "others came that count [7] ranks" in str(errors[0].hint)


def fails_with(kind: type[CheckpointError], root: Directory, *, rank: int, ranks_count: int) -> CheckpointError:
    with pytest.raises(kind) as caught:
        open_at(root, rank=rank, ranks_count=ranks_count, deadline_s=0.5)
    return caught.value


def test_several_channels_of_one_directory_do_not_disturb_each_other(tmp_path: Path) -> None:
    first = file_channels(2, tmp_path)
    second = file_channels(2, tmp_path)
    first[1].send(1, 0, b"first")
    second[1].send(1, 0, b"second")
    assert gather(first[0], 1, 1) == [(1, b"first")]
    assert gather(second[0], 1, 1) == [(1, b"second")]
    for channel in (*reversed(first), *reversed(second)):
        channel.close()


def test_a_token_counts_for_one_session_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow rank may leave its hello once more when its session is made already."""
    tokens: list[str] = []
    make_folder = Directory.make_folder

    def note_tokens(folder: Directory, name: str) -> Directory:
        tokens.extend(hello.token for path in tmp_path.rglob("hello-*") if (hello := hello_of(path.name)) is not None)
        return make_folder(folder, name)

    monkeypatch.setattr(Directory, "make_folder", note_tokens)
    for channel in reversed(file_channels(2, tmp_path)):
        channel.close()
    sweep = rendezvous.sweep_sessions

    def sweep_and_leave(root: Directory) -> None:
        sweep(root)
        (root.path / RANKS_DIR / Hello(1, 2, tokens[0]).name).touch()

    monkeypatch.setattr(rendezvous, "sweep_sessions", sweep_and_leave)
    with Directory.open(tmp_path) as root:
        error = fails_with(PeerError, root, rank=0, ranks_count=2)
    assert isinstance(error, PeerError)
    assert error.rank == 1


def test_a_swept_session_is_told_as_the_end_of_rank_0(tmp_path: Path) -> None:
    with channels("file", 3, tmp_path) as made:
        for folder in (tmp_path / RANKS_DIR).glob("s-*/*"):
            folder.rename(tmp_path / folder.name) if folder.is_dir() else folder.unlink()
        for use in (lambda: made[1].send(1, 0, b""), lambda: made[1].receive(1, 1.0), lambda: made[1].forget(1)):
            with pytest.raises(PeerError, match="ended its session") as caught:
                use()
            assert caught.value.rank == 0


def test_garbage_of_a_directory_has_sessions_of_killed_jobs_but_those_of_live_ones(tmp_path: Path) -> None:
    asyncckpt.save(tmp_path, {"x": 1}, 0)
    with channels("file", 2, tmp_path):
        (live,) = (tmp_path / RANKS_DIR).iterdir()
        killed = tmp_path / RANKS_DIR / f"s-{uuid.uuid4().hex}"
        (killed / "put").mkdir(parents=True)
        (killed / "put" / f"{0:012d}-{0:032x}").write_bytes(bytes(1000))
        assert asyncckpt.checkpoints.collect_garbage(tmp_path).sessions_count == 1
        assert list((tmp_path / RANKS_DIR).iterdir()) == [live]
    assert asyncckpt.checkpoints.collect_garbage(tmp_path).sessions_count == 0
    (tmp_path / RANKS_DIR).rmdir()
    (tmp_path / RANKS_DIR).write_text("somebody's")
    assert asyncckpt.checkpoints.collect_garbage(tmp_path).sessions_count == 0


# What others may have put there.


def symlink(path: Path) -> None:
    secret = path.parents[-2] / "tmp" / "no such secret"
    path.symlink_to(secret)


def garbage(path: Path) -> None:
    path.write_bytes(os.urandom(50))


def empty(path: Path) -> None:
    path.touch()


def fifo(path: Path) -> None:
    os.mkfifo(path)


HOSTILE: list[Callable[[Path], None]] = [symlink, garbage, empty, fifo, Path.mkdir]


@pytest.mark.parametrize("make", HOSTILE)
def test_a_hostile_message_is_an_error(tmp_path: Path, make: Callable[[Path], None]) -> None:
    with channels("file", 2, tmp_path) as (first, second):
        inbox = next(tmp_path.glob(f"{RANKS_DIR}/s-*/{inbox_dir(0)}"))
        second.send(1, 0, b"before")
        make(inbox / MessageName(1, 1, 1).name)
        make(inbox / "not a message")
        with pytest.raises(CheckpointError) as caught:
            gather(first, 1, 2)
        assert isinstance(caught.value, CorruptError) or make is Path.mkdir
        assert first.receive(2, 0.01) == []
        put = inbox.parent / "put" / put_name(1, "part")
        make(put)
        with pytest.raises(CheckpointError):
            first.get(1, "part", DEADLINE_S)


@pytest.mark.parametrize("cut_bytes", [1, 4, 10, 15, 19])
def test_a_truncated_or_changed_message_is_an_error(tmp_path: Path, cut_bytes: int) -> None:
    with channels("file", 2, tmp_path) as (first, second):
        for number, change in enumerate((lambda raw: raw[:-cut_bytes], lambda raw: raw + b"\0")):
            second.send(1 + number, 0, b"what was sent")
            path = next(path for path in tmp_path.glob(f"{RANKS_DIR}/s-*/{inbox_dir(0)}/*") if message_of(path.name))
            path.write_bytes(change(path.read_bytes()))
            with pytest.raises(CorruptError, match="not what was written"):
                first.receive(1 + number, DEADLINE_S)
            path.unlink()


@pytest.mark.parametrize("make", HOSTILE)
def test_hostile_names_beside_the_sessions_are_passed_by(tmp_path: Path, make: Callable[[Path], None]) -> None:
    ranks = tmp_path / RANKS_DIR
    ranks.mkdir()
    make(ranks / "not ours")
    make(ranks / f"s-{os.urandom(16).hex()}")
    session = ranks / f"s-{os.urandom(16).hex()}"
    session.mkdir()
    make(session / ROSTER)
    make(session / inbox_dir(0))
    made = file_channels(2, tmp_path)
    talk(made)
    for channel in reversed(made):
        channel.close()
    assert (ranks / "not ours").is_symlink() or (ranks / "not ours").exists()


def test_ranks_that_is_a_symbolic_link_is_refused(tmp_path: Path) -> None:
    elsewhere, root_path = tmp_path / "elsewhere", tmp_path / "checkpoints"
    elsewhere.mkdir()
    root_path.mkdir()
    (root_path / RANKS_DIR).symlink_to(elsewhere)
    with Directory.open(root_path) as root:
        for rank in (0, 1):
            fails_with(CorruptError, root, rank=rank, ranks_count=2)
    assert list(elsewhere.iterdir()) == []


def test_readers_and_retention_ignore_ranks(tmp_path: Path) -> None:
    path = tmp_path / "checkpoints"
    tensors = {"w": torch.arange(4)}
    with asyncckpt.Saver(path=path, tensors=tensors, keep=1) as saver:
        saver.save(1)
        left = leave_session(path, {1: "x"})
        leave_hello(path, 1)
        saver.save(2)
    assert asyncckpt.list_steps(path) == [2]
    assert asyncckpt.verify(path).strays == ()
    assert asyncckpt.Loader(path, tensors=tensors).load().step == 2
    assert left.exists()


def test_names_of_files_are_read_back() -> None:
    assert hello_of(Hello(7, 64, "0" * 32).name) == Hello(7, 64, "0" * 32)
    assert message_of(MessageName(3, 12, 400).name) == MessageName(3, 12, 400)
    for name in ("", "hello-00001", "hello-00001-of-00002-XYZ", "s-", "000000000001-00001", "../x"):
        assert hello_of(name) is None
        assert message_of(name) is None
        assert not is_session(name)


def test_closing_waits_no_longer_than_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_channel, "CLOSE_S_MAX", 0.02)
    made = file_channels(3, tmp_path)
    made[1].close()
    made[0].close()  # Rank 2 never does.
    assert list((tmp_path / RANKS_DIR).iterdir()) == []
    with pytest.raises(PeerError):
        made[2].receive(1, 0.1)
    made[2].close()
