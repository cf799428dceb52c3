"""Small TorchRec models, their batches, and a copy of all their bits made by TorchRec's own means.

Every model is built from a seed and trained by `step(number)`: two of them that were given the same batches from the
same state are equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.hash_mc_evictions import HashZchEvictionConfig, HashZchEvictionPolicyName
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from torchrec.optim.keyed import KeyedOptimizerWrapper

import asyncckpt
from tests.adapters.test_page import snippets

ROWS = {"t1": 11, "t2": 26}
DIM = 8
BATCH = 4
EVICTION_INTERVAL = 3
RAW_IDS_MAX = 1000
CPU = torch.device("cpu")


class PooledModel(nn.Module):
    """Pooled rows of two features into a dense layer."""

    def __init__(self, sparse: nn.Module, dim: int) -> None:
        super().__init__()
        self.sparse = sparse
        self.over = nn.Sequential(nn.Linear(dim, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        found = self.sparse(features)
        if isinstance(found, tuple):  # A managed collision module gives the remapped features too.
            found = found[0]
        if hasattr(found, "wait"):
            found = found.wait()
        if isinstance(found, dict):
            rows = torch.cat([jagged.values() for jagged in found.values()])
            return self.over(torch.cat([rows, rows], dim=1))
        return self.over(found.values())


class BareTbe(nn.Module):
    """A TBE that stands alone, with its tables on the host."""

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        self.tbe = SplitTableBatchedEmbeddingBagsCodegen(
            [(rows, DIM, EmbeddingLocation.HOST, ComputeDevice.CPU) for rows in ROWS.values()],
            optimizer=EmbOptimType[optimizer],
            learning_rate=0.1,
            eps=1e-6,
            device=CPU,
        )
        self.tbe.init_embedding_weights_uniform(-1.0, 1.0)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.tbe(features.values(), features.offsets())


class ModelTraining:
    """A model with its optimizers."""

    def __init__(
        self, model: nn.Module, *, raw_ids: bool = False, sparse: bool = False, rows: Mapping[str, int] = ROWS
    ) -> None:
        self.model = model
        self._highs = [RAW_IDS_MAX] * len(rows) if raw_ids else list(rows.values())
        named = dict(model.named_parameters())
        fused = set() if sparse else {name for name in named if ".over." not in f".{name}"}
        own = [parameter for name, parameter in named.items() if name not in fused]
        self.optimizer = torch.optim.Adam(own, lr=0.05) if own else None

    def saved_optimizer(self) -> Any:
        """What is saved of the optimizer."""
        return self.optimizer

    def step(self, number: int) -> None:
        """Train on the batch of this number and rank."""
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        self.model(batch(number, self._highs)).square().mean().backward()
        if self.optimizer is not None:
            self.optimizer.step()

    def image(self) -> dict[str, Any]:
        """Every bit of this rank, by TorchRec's state dicts."""
        image = dict(flat_bits("model", self.model.state_dict()))
        if self.optimizer is not None:
            image |= flat_bits("optimizer", self.saved_optimizer().state_dict())
        if isinstance(self.model, DistributedModelParallel):
            image |= flat_bits("fused", self.model.fused_optimizer.state_dict()["state"])
        if isinstance(self.model, BareTbe):
            image |= flat_bits("rows", self.model.tbe.split_embedding_weights())
            image |= flat_bits("states", self.model.tbe.split_optimizer_states())
        return image


class DenseKernels(ModelTraining):
    """Split tables that an optimizer of torch trains, saved as docs/adapters.md says."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, sparse=True)
        named = dict(model.named_parameters())
        self.optimizer = KeyedOptimizerWrapper(named, lambda own: torch.optim.Adam(own, lr=0.05))
        self.optimizer.init_state()

    def saved_optimizer(self) -> Any:
        namespace: dict[str, Any] = {}
        exec(snippets()[1], namespace)
        return namespace["SpreadMoments"](self.model, self.optimizer)


def batch(number: int, highs: list[int]) -> KeyedJaggedTensor:
    """The batch of a step, another one on each rank. highs: of each feature's ids."""
    generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
    lengths = torch.randint(0, 4, (2 * BATCH,), generator=generator)
    counts = lengths.view(2, BATCH).sum(1).tolist()
    # Squared, so that a few ids are frequent.
    parts = [
        (torch.rand(count, generator=generator).square() * high).long()
        for count, high in zip(counts, highs, strict=True)
    ]
    return KeyedJaggedTensor(keys=["f1", "f2"], values=torch.cat(parts), lengths=lengths)


def spread(rows: torch.Tensor) -> torch.Tensor:
    """First values that need no random numbers: those of evicted rows must be the same in every run."""
    with torch.no_grad():
        return rows.copy_(torch.linspace(-1, 1, rows.numel()).view_as(rows))


def bag_collection(
    init: Callable[[torch.Tensor], Any] | None = None, rows: Mapping[str, int] = ROWS
) -> EmbeddingBagCollection:
    configs = [
        EmbeddingBagConfig(
            name=name, num_embeddings=count, embedding_dim=DIM, feature_names=[f"f{number + 1}"], init_fn=init
        )
        for number, (name, count) in enumerate(rows.items())
    ]
    return EmbeddingBagCollection(tables=configs, device=CPU)


def collection() -> EmbeddingCollection:
    configs = [
        EmbeddingConfig(name=name, num_embeddings=rows, embedding_dim=DIM, feature_names=[f"f{number + 1}"])
        for number, (name, rows) in enumerate(ROWS.items())
    ]
    return EmbeddingCollection(tables=configs, device=CPU)


def sharded(
    seed: int, *, optimizer: str, sharding: str, bags: bool = True, rows: Mapping[str, int] = ROWS
) -> ModelTraining:
    """A collection under DistributedModelParallel, both tables in the same way."""
    torch.manual_seed(seed)
    sparse = bag_collection(rows=rows) if bags else collection()
    fused = {"optimizer": EmbOptimType[optimizer], "learning_rate": 0.1, "eps": 1e-6}
    sharder = EmbeddingBagCollectionSharder(fused_params=fused) if bags else EmbeddingCollectionSharder(fused)
    per_table = {name: shard_of(sharding, number) for number, name in enumerate(rows)}
    # Replicated tables have no fused optimizer.
    return ModelTraining(
        distributed(PooledModel(sparse, 2 * DIM), sharder, per_table), sparse=sharding == "data_parallel", rows=rows
    )


def dense_kernels(seed: int, *, sharding: str) -> ModelTraining:
    torch.manual_seed(seed)
    per_table = {name: shard_of(sharding, number, "dense") for number, name in enumerate(ROWS)}
    return DenseKernels(distributed(PooledModel(bag_collection(), 2 * DIM), EmbeddingBagCollectionSharder(), per_table))


def shard_of(sharding: str, number: int, kernel: str = "fused") -> Any:
    world = dist.get_world_size()
    return {
        "table_wise": lambda: table_wise(rank=number % world, compute_kernel=kernel),
        "row_wise": lambda: row_wise(compute_kernel=kernel),
        "column_wise": lambda: column_wise(ranks=[0, world - 1], compute_kernel=kernel),
        "data_parallel": data_parallel,
    }[sharding]()


def distributed(model: PooledModel, sharder: Any, per_table: Mapping[str, Any]) -> DistributedModelParallel:
    world = dist.get_world_size()
    module_plan = construct_module_sharding_plan(
        model.sparse,
        per_param_sharding=dict(per_table),
        sharder=sharder,
        local_size=world,
        world_size=world,
        device_type="cpu",
    )
    return DistributedModelParallel(
        module=model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=CPU,
        plan=ShardingPlan(plan={"sparse": module_plan}),
        sharders=[sharder],
    )


def plain(seed: int, *, bags: bool = True) -> ModelTraining:
    """A collection that is not sharded, trained by the ordinary optimizer."""
    torch.manual_seed(seed)
    return ModelTraining(PooledModel(bag_collection() if bags else collection(), 2 * DIM), sparse=True)


def bare_tbe(seed: int, *, optimizer: str) -> ModelTraining:
    """A TBE without TorchRec around it."""
    torch.manual_seed(seed)
    return ModelTraining(BareTbe(optimizer))


def managed_collision(policy: str) -> ManagedCollisionEmbeddingBagCollection:
    policies = {"lfu": LFU_EvictionPolicy, "lru": LRU_EvictionPolicy, "distance_lfu": DistanceLFU_EvictionPolicy}
    bags = bag_collection(spread)
    modules = {
        name: MCHManagedCollisionModule(
            zch_size=rows,
            device=CPU,
            eviction_policy=policies[policy](),
            eviction_interval=EVICTION_INTERVAL,
            input_hash_size=RAW_IDS_MAX,
        )
        for name, rows in ROWS.items()
    }
    return ManagedCollisionEmbeddingBagCollection(
        bags, ManagedCollisionCollection(modules, bags.embedding_bag_configs())
    )


def plain_zch(seed: int, *, policy: str) -> ModelTraining:
    torch.manual_seed(seed)
    return ModelTraining(PooledModel(managed_collision(policy), 2 * DIM), raw_ids=True, sparse=True)


def sharded_zch(seed: int, *, policy: str) -> ModelTraining:
    """With the optimizer whose states FBGEMM does not reset on eviction: there is no kernel for that on the CPU."""
    torch.manual_seed(seed)
    fused = {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.1, "eps": 1e-6}
    sharder = ManagedCollisionEmbeddingBagCollectionSharder(EmbeddingBagCollectionSharder(fused_params=fused))
    per_table = {name: row_wise(compute_kernel="fused") for name in ROWS}
    model = PooledModel(managed_collision(policy), 2 * DIM)
    return ModelTraining(distributed(model, sharder, per_table), raw_ids=True)


class HashZch(nn.Module):
    """Managed collision by hash. FBGEMM fills it on a GPU only, so `Training.step` is told to write to its tensors."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        policy = HashZchEvictionPolicyName.SINGLE_TTL_EVICTION
        self.zch = HashZchManagedCollisionModule(
            zch_size=rows,
            device=CPU,
            total_num_buckets=2,
            eviction_policy_name=policy,
            eviction_config=HashZchEvictionConfig(features=["f1"], single_ttl=10),
            track_id_freq=True,
        )

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        names = ("_hash_zch_identities", "_hash_zch_metadata", "_hash_zch_runtime_meta")
        with torch.no_grad():
            for name in names:
                getattr(self.zch, name).view(-1)[features.lengths()] += features.values().sum()
        return torch.zeros(1, requires_grad=True)


def hash_zch(seed: int) -> ModelTraining:
    del seed  # Every one starts empty.
    return ModelTraining(HashZch(10))


def flat_bits(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """(path, (dtype, shape, bytes)) of every tensor of this rank, and values as they are."""
    if isinstance(value, ShardedTensor):
        for shard in value.local_shards():
            yield from flat_bits(f"{name}@{list(shard.metadata.shard_offsets)}", shard.tensor)
    elif isinstance(value, asyncckpt.Sharded):
        for piece in value.pieces:
            yield from flat_bits(f"{name}@{list(piece.begin)}", piece.tensor)
    elif isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        yield name, (str(value.dtype), tuple(value.shape), flat.numpy().tobytes())
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from flat_bits(f"{name}.{key}", item)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from flat_bits(f"{name}.{index}", item)
    else:
        yield name, value
