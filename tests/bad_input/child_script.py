"""Runs a piece of Python in a process of its own, for what ends or forks the process."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

DEADLINE_S = 120

HEAD = """
import asyncio, gc, json, os, signal, subprocess, sys, threading
import torch
import asyncckpt

root = sys.argv[1]
STATE = {"x": torch.arange(5.0)}

def is_locked():
    # Asked by another process, which need not load torch for it.
    code = (
        "import fcntl, os, struct, sys\\n"
        "fd = os.open(sys.argv[1] + '/LOCK', os.O_RDWR)\\n"
        "try: fcntl.fcntl(fd, 37, struct.pack('hhqqi4x', fcntl.F_WRLCK, 0, 0, 0, 0))\\n"
        "except OSError: print('locked')\\n"
    )
    return "locked" in subprocess.run([sys.executable, "-c", code, root], capture_output=True, text=True).stdout
"""


def run_script(body: str, root: Path) -> subprocess.CompletedProcess[str]:
    """Run HEAD and body with `root`; the result has returncode, stdout and stderr."""
    script = HEAD + textwrap.dedent(body)
    command = [sys.executable, "-c", script, str(root)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=DEADLINE_S)
