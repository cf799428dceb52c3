"""Which identifiers lie nearest to one another, so that people can see that the model learned something."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from demo.log import Log
from demo.model import ITEMS, Recommender

# Rare identifiers were met too few times in a minute to lie anywhere in particular.
FREQUENT_NAMES_MAX = 3000


def nearest(rows: torch.Tensor, index: int, *, count: int) -> list[int]:
    """Return the indices of the `count` rows (of `[n, dim]`) nearest to row `index` by cosine, nearest first."""
    unit = torch.nn.functional.normalize(rows, dim=1)
    scores = unit @ unit[index]
    scores[index] = -torch.inf
    return scores.argsort(descending=True, stable=True)[:count].tolist()


def neighbour_names(recommender: Recommender, log: Log, queries: Sequence[str], *, count: int) -> dict[str, list[str]]:
    """Return the nearest frequent identifiers of every query that is one itself."""
    table, ids = recommender.tables[ITEMS], log.item_ids[:FREQUENT_NAMES_MAX]
    known = np.flatnonzero(np.isin(ids, table.ids().numpy())).tolist()
    places = {log.names[index]: place for place, index in enumerate(known)}
    rows = table.read(torch.from_numpy(ids[known]), only="embedding")["embedding"]
    return {
        query: [log.names[known[place]] for place in nearest(rows, places[query], count=count)]
        for query in queries
        if query in places
    }
