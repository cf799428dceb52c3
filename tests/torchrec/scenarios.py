"""What is run, by name: a function of models.py and its arguments. No imports of TorchRec, which take long."""

from __future__ import annotations

OPTIMIZERS = ("EXACT_ROWWISE_ADAGRAD", "EXACT_ADAGRAD", "EXACT_SGD")
SHARDINGS = ("table_wise", "column_wise", "row_wise")
SPLIT = ("column_wise", "row_wise")
POLICIES = ("lfu", "lru", "distance_lfu")

Scenario = tuple[str, dict[str, object]]

# On every rank of every world.
SHARDED: dict[str, Scenario] = {
    **{
        f"{sharding} {optimizer}": ("sharded", {"sharding": sharding, "optimizer": optimizer})
        for sharding in SHARDINGS
        for optimizer in OPTIMIZERS
    },
    **{
        f"embedding collection {sharding}": (
            "sharded",
            {"sharding": sharding, "optimizer": "EXACT_ROWWISE_ADAGRAD", "bags": False},
        )
        for sharding in SHARDINGS
    },
    "data parallel": ("sharded", {"sharding": "data_parallel", "optimizer": "EXACT_SGD"}),
    **{f"sharded zch {policy}": ("sharded_zch", {"policy": policy}) for policy in POLICIES},
    **{f"{sharding} dense kernels": ("dense_kernels", {"sharding": sharding}) for sharding in SPLIT},
    # Of two ranks one has all of the first table, and the other one none of it.
    "of one row": ("sharded", {"sharding": "row_wise", "optimizer": "EXACT_ADAGRAD", "rows": {"t1": 1, "t2": 26}}),
}

# Lookups that are tracked, on every rank of every world, and models without any that could be.
TRACKED: dict[str, Scenario] = {
    f"tracked {name}": scenario
    for name, scenario in SHARDED.items()
    if "zch" not in name and "parallel" not in name and "dense" not in name
}
UNTRACKED: dict[str, Scenario] = {
    f"not {name}": SHARDED[name]
    for name in (
        "data parallel",
        *(f"{sharding} dense kernels" for sharding in SPLIT),
        *(f"sharded zch {policy}" for policy in POLICIES),
    )
}

# On one rank, from what two have saved.
RESHARDED: dict[str, Scenario] = {
    f"resharded {name}": scenario
    for name, scenario in SHARDED.items()
    if name.startswith(("table_wise", "row_wise", "embedding")) and "column_wise" not in name
}

# On one rank.
PLAIN: dict[str, Scenario] = {
    "plain bags": ("plain", {}),
    "plain embeddings": ("plain", {"bags": False}),
    **{f"plain zch {policy}": ("plain_zch", {"policy": policy}) for policy in POLICIES},
    "hash zch": ("hash_zch", {}),
    **{f"tbe {optimizer}": ("bare_tbe", {"optimizer": optimizer}) for optimizer in OPTIMIZERS},
}
PLAIN_TRACKED: dict[str, Scenario] = {
    f"tracked tbe {optimizer}": ("bare_tbe", {"optimizer": optimizer}) for optimizer in OPTIMIZERS
}
