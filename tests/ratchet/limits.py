"""How much of the package a save or load crosses, and how much of it there is, at most.

LAW: what the ways of `python -m bench path` cross. It only falls: whoever makes one shorter writes the new figure here.
BUDGET: what may be added on purpose. A change that needs more adds a line of its own here: the amount, and what for.
"""

from __future__ import annotations

# {way: (files, functions)}
LAW = {
    "save": (33, 264),
    "delta": (45, 393),
    "ranks": (48, 395),
    "load": (32, 256),
    "chain": (44, 381),
}
MODULES_OF_A_SAVE = 147  # Of the package, loaded by `import asyncckpt.saver` and a save.

# The rest of the package is the core.
DOORS = ("adapters", "cli", "dcp", "embcache", "formats", "integrations", "observe", "strategies", "testing")
FIRST = "when features had left the way of a save"
ATTACKED = "mends of what attacks on the plain path and the slow suites found"
MODULES = "what modules hold has moved from adapters/ to modules/, for the core imports no door"
FILTERS = "filters that join tables, or that no load takes, are refused"
LOWBIT = "tensors of classes of their own are saved by their inner tensors"
CHANGED = "a restore goes into a model that has changed: names, sizes, tables, parameters, optimizers"
ROWS = "rows that tables cannot do without are not filtered, and FilterError is exported"
WHICH = "state of a changed model goes with values: names, ties, filters and schedules that an attack has found"
TRAINERS = (
    "loggers, searches, adapters of PEFT, several callbacks, counters and small tables of TorchRec; keyed hashes of ids"
)
LAYOUTS = "sparse, quantized and nested tensors are saved by what they consist of"
SPREAD = "DTensors over tensors of classes of their own are saved, and loaded by other numbers of ranks"
STAGES = "which parameter is which is told by stored names after one beginning; parts of a TrainerState stand alone"
HEARD = "ranks skip a save that reports an earlier error, no error is lost, every message is held to the language"
WALKS = "one walk over the nodes of a tree in place of five, and one over a state in place of three"
NIGHT = "a full disk, a job that commits nothing and a store that is away are told by errors, metrics, alerts, the log"
WORLDS = "scaffolds that tests share are in tests/worlds/, and one test holds the language"
BUDGET = {
    "lines of the core": {
        FIRST: 48_054,
        ATTACKED: 49,
        MODULES: 1_076,
        FILTERS: 7,
        LOWBIT: 759,
        CHANGED: 610,
        ROWS: 18,
        WHICH: 268,
        TRAINERS: 69,
        LAYOUTS: 241,
        SPREAD: 375,
        STAGES: 220,
        HEARD: 51,
        WALKS: -60,
        NIGHT: 922,
    },
    "lines of doors": {
        FIRST: 19_402,
        ATTACKED: 18,
        MODULES: -1_059,
        LOWBIT: 1,
        CHANGED: 14,
        TRAINERS: 224,
        LAYOUTS: 3,
        NIGHT: 96,
    },
    "lines of csrc": {FIRST: 14_508, TRAINERS: 38, NIGHT: 7},
    "lines of tests": {
        FIRST: 107_253,
        ATTACKED: 181,
        MODULES: 42,
        WORLDS: -354,
        LOWBIT: 1143,
        CHANGED: 835,
        ROWS: 11,
        WHICH: 374,
        TRAINERS: 380,
        LAYOUTS: 561,
        SPREAD: 552,
        STAGES: 1681,
        HEARD: 320,
        NIGHT: 3475,
    },
    "public names": {FIRST: 225, ROWS: 1},
    "parameters of public names": {FIRST: 174, CHANGED: 2, NIGHT: 3},
}
