"""Adapters for torch.nn.Embedding and nn.EmbeddingBag, and for asyncckpt's own modules.

The table of an nn.Embedding holds the weight. Its optimizer states belong to a torch optimizer, which is saved as one:
`tensors={"optim": optimizer}`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from asyncckpt.errors import UnsupportedError
from asyncckpt.model.table import Table
from asyncckpt.modules.fixed_table import FixedTable
from asyncckpt.modules.registry import register_adapter
from asyncckpt.modules.walk import joined
from asyncckpt.tables.emb_cache_modules import EmbCacheCollection
from asyncckpt.tables.embedding import HashEmbedding
from asyncckpt.tables.slots import EMBEDDING_COLUMN

WEIGHT = "weight"
ROOT_NAME = "embedding"  # Of a root module.


def embedding_tables(module: torch.nn.Module, name: str) -> Mapping[str, Table]:
    """Make one table, of the weight; none if the weight is computed from other parameters (parametrizations)."""
    if not has_own_weight(module):
        return {}
    name = name or ROOT_NAME
    return {name: weight_table(name, module)}


def embedding_rest(module: torch.nn.Module) -> Mapping[str, torch.Tensor]:
    """Return what a subclass of nn.Embedding adds."""
    return rest_besides(module, [own_weight(module)] if has_own_weight(module) else [])


def hash_embedding_tables(module: HashEmbedding, name: str) -> Mapping[str, Table]:
    """Return the table of a HashEmbedding; modules that share a table each return it."""
    table = module.table
    if not isinstance(table, Table):
        what = f"table {table.name!r} of module {name!r} cannot be saved"
        raise UnsupportedError(what, found=type(table), expected="an object with the Table protocol")
    return {name or table.name: table}


def collection_tables(module: EmbCacheCollection, name: str) -> Mapping[str, Table]:
    """Return the tables of a collection by their own names."""
    return {joined(name, table_name): table for table_name, table in module.tables().items()}


def no_tensors_held(module: torch.nn.Module) -> Mapping[str, torch.Tensor]:
    """Return all tensors of a module of this package: its tables are not parameters."""
    return rest_besides(module, [])


def weight_table(name: str, module: torch.nn.Module) -> FixedTable:
    """Return the table of a module's own weight."""
    return FixedTable(name, lambda: {EMBEDDING_COLUMN: own_weight(module)})


def has_own_weight(module: torch.nn.Module) -> bool:
    """Return whether the weight is a parameter of the module, not computed at every use."""
    return module._parameters.get(WEIGHT) is not None


def own_weight(module: torch.nn.Module) -> torch.Tensor:
    """Return the current weight: torch may replace the tensor, for example when a module moves."""
    weight = module._parameters[WEIGHT]
    assert weight is not None
    return weight


def rest_besides(module: torch.nn.Module, held: Collection[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of a module's state dict that no table holds. Raises UnsupportedError for other values."""
    held_ids = {id(tensor) for tensor in held}
    rest: dict[str, torch.Tensor] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            what = f"state {name!r} of a {type(module).__name__} is not a tensor"
            hint = "register an adapter for this class, or one that returns no tables"
            raise UnsupportedError(what, found=type(value), hint=hint)
        if id(value) not in held_ids:
            rest[name] = value
    return rest


register_adapter(torch.nn.Embedding, embedding_tables, rest=embedding_rest)
register_adapter(torch.nn.EmbeddingBag, embedding_tables, rest=embedding_rest)
register_adapter(HashEmbedding, hash_embedding_tables, rest=no_tensors_held)
register_adapter(EmbCacheCollection, collection_tables, rest=no_tensors_held)
