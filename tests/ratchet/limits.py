"""How much of the package a save or load crosses, and how much of it there is, at most.

LAW: what the ways of `python -m bench path` cross. It only falls: whoever makes one shorter writes the new figure here.
BUDGET: what may be added on purpose. A change that needs more adds a line of its own here: the amount, and what for.
"""

from __future__ import annotations

# {way: (files, functions)}
LAW = {
    "save": (54, 371),
    "delta": (67, 484),
    "ranks": (67, 490),
    "load": (43, 297),
    "chain": (59, 424),
}
MODULES_OF_A_SAVE = 256  # Of the package, loaded by `import asyncckpt.saver` and a save.

# The rest of the package is the core.
DOORS = ("adapters", "cli", "dcp", "embcache", "formats", "integrations", "observe", "strategies", "testing")
FIRST = "when this was first counted"
BUDGET = {
    "lines of the core": {FIRST: 48_265},
    "lines of doors": {FIRST: 19_616},
    "lines of csrc": {FIRST: 15_161},
    "lines of tests": {FIRST: 106_884},
    "public names": {FIRST: 225},
    "parameters of public names": {FIRST: 174},
}
