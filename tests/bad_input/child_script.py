"""Runs a piece of Python in a process of its own, for what ends or forks the process."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

DEADLINE_S = 120

HEAD = """
import asyncio, gc, os, signal, sys, threading
import torch
import asyncckpt

root = sys.argv[1]
STATE = {"x": torch.arange(5.0)}
"""


def run_script(body: str, root: Path) -> subprocess.CompletedProcess[str]:
    """Run HEAD and body with `root`; the result has returncode, stdout and stderr."""
    script = HEAD + textwrap.dedent(body)
    command = [sys.executable, "-c", script, str(root)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=DEADLINE_S)
