"""Tables of other libraries: found in a module, saved and loaded like asyncckpt's own.

tables = tables_of(model)
saver = asyncckpt.Saver(path="ckpt", hashtables=tables, tensors={"model": dense_state_of(model), "optim": optimizer})
"""

from asyncckpt.adapters.track_lookups import LookupTracking, track_lookups
from asyncckpt.modules.dense_state import DenseState, dense_state_of
from asyncckpt.modules.fixed_table import FixedTable
from asyncckpt.modules.registry import register_adapter
from asyncckpt.modules.walk import tables_of

__all__ = [
    "DenseState",
    "FixedTable",
    "LookupTracking",
    "dense_state_of",
    "register_adapter",
    "tables_of",
    "track_lookups",
]
