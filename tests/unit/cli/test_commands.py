"""The command line: what it prints, and the exit codes that its help promises."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import xxhash

import asyncckpt
from asyncckpt.cli.findings import ExitCode
from tests.program import answer_of
from tests.program import invoke as run
from tests.worlds.directories import flip_byte, manifest_path

STEPS = [100, 200, 300]
HOSTILE_NAME = "[bold]evil[/bold]\x1b[31m\nname"


def flip_last_data_byte(path: Path, step: int) -> None:
    (shard,) = (path / "data").glob(f"{step:012d}-*/r00000-000.safetensors")
    flip_byte(shard, -1)


def make_newer(path: Path, step: int) -> None:
    """As a later version would have written it: another version number, and a digest that fits."""
    body, _, _ = manifest_path(path, step).read_bytes().rpartition(b',"digest":"')
    body = body.replace(b'"version":1', b'"version":9')
    digest = xxhash.xxh3_128_hexdigest(body).encode()
    manifest_path(path, step).write_bytes(body + b',"digest":"' + digest + b'"}\n')


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    """Three checkpoints of one table and a few tensors."""
    table = asyncckpt.HashTable("user", 4, optimizer_slots={"sum": torch.float32})
    table.lookup(torch.arange(50))
    table.remove(torch.arange(10))
    tensors = {"model": torch.nn.Linear(4, 3), "epoch": 3, HOSTILE_NAME: torch.ones(2)}
    with asyncckpt.Saver(path=tmp_path / "run", hashtables={"user": table}, tensors=tensors) as saver:
        for step in STEPS:
            saver.save(step, metadata={"loss": 0.5, "worst": float("nan"), "raw": b"ab", "by_id": {1: 2}})
    return tmp_path / "run"


def test_ls_lists_every_checkpoint(checkpoints: Path) -> None:
    result = run("ls", checkpoints)
    assert result.exit_code == ExitCode.OK
    for step in STEPS:
        assert str(step) in result.stdout
    assert "committed" in result.stdout


def test_ls_json_holds_plain_numbers(checkpoints: Path) -> None:
    result = run("ls", checkpoints, "--json")
    assert result.exit_code == ExitCode.OK
    answer = answer_of(result)
    assert [entry["step"] for entry in answer["checkpoints"]] == STEPS
    first = answer["checkpoints"][0]
    assert first["tables"] == {"user": 40}
    assert first["error"] is None
    assert first["bytes"] == sum((checkpoints / file).stat().st_size for file in first["files"])


def test_ls_of_a_directory_without_checkpoints_is_well(tmp_path: Path) -> None:
    asyncckpt.Saver(path=tmp_path / "new").close()
    result = run("ls", tmp_path / "new")
    assert result.exit_code == ExitCode.OK
    assert "no such checkpoints" in result.stdout
    assert answer_of(run("ls", tmp_path / "new", "--json"))["checkpoints"] == []


def test_ls_shows_a_damaged_manifest_beside_the_sound_ones(checkpoints: Path) -> None:
    flip_byte(manifest_path(checkpoints, 200), 100)
    result = run("ls", checkpoints)
    assert result.exit_code == ExitCode.DAMAGED
    assert "step 200: manifest '000000000200.json'" in result.stdout
    assert result.stdout.count("committed") == 2
    entry = answer_of(run("ls", checkpoints, "--json"))["checkpoints"][1]
    assert entry["error"]["kind"] == "CorruptError"
    assert "000000000200.json" in entry["error"]["message"]


def test_a_newer_format_has_a_code_of_its_own(checkpoints: Path) -> None:
    make_newer(checkpoints, 300)
    result = run("ls", checkpoints)
    assert result.exit_code == ExitCode.UNREADABLE
    assert "upgrade asyncckpt" in result.stdout
    assert run("show", checkpoints).exit_code == ExitCode.UNREADABLE
    assert run("verify", checkpoints).exit_code == ExitCode.UNREADABLE


def test_damage_outweighs_a_newer_format(checkpoints: Path) -> None:
    make_newer(checkpoints, 100)
    flip_last_data_byte(checkpoints, 300)
    assert run("verify", checkpoints, "--all").exit_code == ExitCode.DAMAGED


@pytest.mark.parametrize("command", ["ls", "show", "verify", "compact"])
def test_no_such_directory(tmp_path: Path, command: str) -> None:
    result = run(command, tmp_path / "nothing")
    assert result.exit_code == ExitCode.NOT_FOUND
    assert "does not exist" in result.stderr
    result = run(command, tmp_path / "nothing", "--json")
    assert answer_of(result)["error"]["kind"] == "NotFoundError"


@pytest.mark.parametrize("command", ["ls", "show", "verify", "compact", "follow"])
def test_a_file_is_no_directory(tmp_path: Path, command: str) -> None:
    (tmp_path / "file").write_text("")
    assert run(command, tmp_path / "file").exit_code == ExitCode.USAGE


@pytest.mark.parametrize("command", ["show", "verify", "compact"])
def test_no_such_step(checkpoints: Path, command: str) -> None:
    result = run(command, checkpoints, 150)
    assert result.exit_code == ExitCode.NOT_FOUND
    assert "step 150" in result.stdout + result.stderr


@pytest.mark.parametrize("command", ["show", "verify", "compact"])
def test_a_directory_without_checkpoints_has_none_to_look_at(tmp_path: Path, command: str) -> None:
    asyncckpt.Saver(path=tmp_path / "new").close()
    assert run(command, tmp_path / "new").exit_code == ExitCode.NOT_FOUND


def test_show_takes_the_newest_by_default(checkpoints: Path) -> None:
    assert answer_of(run("show", checkpoints, "--json"))["step"] == 300
    assert answer_of(run("show", checkpoints, 100, "--json"))["step"] == 100


def test_show_tells_blocks_tables_and_metadata(checkpoints: Path) -> None:
    result = run("show", checkpoints)
    assert result.exit_code == ExitCode.OK
    for text in ("user@embedding", "model.weight", "r00000-000.safetensors", "'loss': 0.5"):
        assert text in result.stdout
    answer = answer_of(run("show", checkpoints, "--json"))
    assert answer["metadata"] == {"loss": 0.5, "worst": "nan", "raw": "b'ab'", "by_id": {"1": 2}}
    names = [block["name"] for block in answer["blocks"]]
    assert names[:3] == ["user@id", "user@embedding", "user@sum"]
    assert HOSTILE_NAME in names


def test_show_limits_blocks_on_the_screen(checkpoints: Path) -> None:
    result = run("show", checkpoints, "--most", 2)
    assert "user@sum" not in result.stdout
    assert "and 4 more blocks" in result.stdout


def test_names_cannot_speak_to_the_terminal(checkpoints: Path) -> None:
    result = run("show", checkpoints)
    assert "\x1b" not in result.stdout
    assert r"[bold]evil[/bold]\x1b[31m\nname" in result.stdout


def test_verify_reads_every_byte_of_the_newest(checkpoints: Path) -> None:
    result = run("verify", checkpoints, "--json")
    assert result.exit_code == ExitCode.OK
    (entry,) = answer_of(result)["checkpoints"]
    blocks = answer_of(run("show", checkpoints, "--json"))["blocks"]
    assert entry == {
        "step": 300,
        "sound": True,
        "steps": [300],
        "blocks": len(blocks),
        "bytes_read": sum(block["bytes"] for block in blocks),
        "strays": [],
        "error": None,
    }
    assert "sound" in run("verify", checkpoints).stdout


def test_verify_names_the_damaged_block(checkpoints: Path) -> None:
    flip_last_data_byte(checkpoints, 200)
    assert run("verify", checkpoints).exit_code == ExitCode.OK
    result = run("verify", checkpoints, 200)
    assert result.exit_code == ExitCode.DAMAGED
    assert "does not match its digest" in result.stdout


def test_verify_all_goes_on_behind_a_damaged_step(checkpoints: Path) -> None:
    flip_last_data_byte(checkpoints, 100)
    result = run("verify", checkpoints, "--all", "--json")
    assert result.exit_code == ExitCode.DAMAGED
    answer = answer_of(result)
    assert answer["sound"] is False
    assert [entry["sound"] for entry in answer["checkpoints"]] == [False, True, True]


def test_verify_takes_a_step_or_all(checkpoints: Path) -> None:
    result = run("verify", checkpoints, 100, "--all")
    assert result.exit_code == ExitCode.USAGE
    assert "not both" in result.stderr


def test_verify_names_leftovers_of_crashed_saves(checkpoints: Path) -> None:
    stray = f"{300:012d}-{'0' * 32}"
    (checkpoints / "data" / stray).mkdir()
    result = run("verify", checkpoints)
    assert result.exit_code == ExitCode.OK
    assert "1 leftover of saves that did not commit" in result.stdout
    assert stray in result.stdout


def test_only_compact_writes(checkpoints: Path) -> None:
    def state() -> list[tuple[str, int]]:
        return sorted((str(path), path.stat().st_mtime_ns) for path in checkpoints.rglob("*"))

    before = state()
    for command in (["ls"], ["show"], ["verify"], ["follow", "--until", 300]):
        assert run(*command, checkpoints).exit_code == ExitCode.OK
    assert state() == before


@pytest.mark.parametrize("arguments", [(), ("ls",), ("show",), ("verify",), ("compact",), ("follow",)])
def test_help_tells_the_exit_codes(arguments: tuple[str, ...]) -> None:
    result = run(*arguments, "--help")
    assert result.exit_code == 0
    assert "Exit codes" in result.stdout


def test_negative_step_is_wrong_usage(checkpoints: Path) -> None:
    assert run("show", checkpoints, "--", "-1").exit_code == ExitCode.USAGE
