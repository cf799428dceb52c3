"""The first save finds everything imported: its call is no slower, and may come while the interpreter ends.

CPython forgets that Ctrl-C has ended a program when a handler of its exit runs code out of a string, as imports of many
modules do; the program then ends with another status.
"""

from __future__ import annotations

import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from tests.shares import slow_but_for_a_share

PROGRAM = """
import sys
import numpy as np
import torch
import asyncckpt

model = torch.nn.Linear(3, 2)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(3)).sum().backward()
optimizer.step()
table = asyncckpt.HashTable("t", 2)
table.insert(torch.arange(3), torch.ones(3, 2))
others = {"values": [1, 2.5, "text", None, (3, {"four": 4})], "array": np.ones(3), "number": np.float32(2)}
state = {"model": model, "optimizer": optimizer, "others": others}
options = {
    "deltas": {"hashtables": {"t": table}, "deltas": asyncckpt.DeltaPolicy()},
    "plain": {},
    "tables": {"hashtables": {"t": table}},
    "kept": {"keep": 1},
    "filtered": {"filter_func": lambda blocks: blocks},
}
saver = asyncckpt.Saver(path=sys.argv[1], tensors=state, **options[sys.argv[2]])
before, compiled = set(sys.modules), []
sys.addaudithook(lambda event, arguments: event == "compile" and compiled.append(arguments[0]))
for step in range(2):
    table.insert(torch.tensor([step]), torch.zeros(1, 2))
    saver.save(step) if sys.argv[3] == "blocking" else saver.save_async(step).result(60)
saver.close()
print(sorted(set(sys.modules) - before), compiled)
"""


WAYS = product(["deltas", "plain", "tables", "kept", "filtered"], ["staged", "blocking"])


@pytest.mark.parametrize(("saver", "how"), slow_but_for_a_share(WAYS, "first saves", every=3))
def test_the_first_save_imports_and_compiles_nothing(tmp_path: Path, saver: str, how: str) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), saver, how]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == "[] []", ended.stdout
