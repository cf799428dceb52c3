"""What tree and blocks ask of a reader beyond the plain format, as `requires` of the manifest names it."""

from __future__ import annotations

from collections.abc import Collection

from asyncckpt.format.body_members import must_be_known
from asyncckpt.format.tree import Node, holds_typed_mappings
from asyncckpt.model.block import PlacedBlock
from asyncckpt.model.sharing import Sharing
from asyncckpt.model.table import Role

ENCODING = "encoding"
PAD = "pad"
BOXES = "boxes"
TIED = "tied"
MODULES = "modules"
MAPPINGS = "mappings"
BODY_FEATURES = frozenset({ENCODING, PAD, BOXES, TIED, MODULES, MAPPINGS})


def features_of(blocks: Collection[PlacedBlock]) -> frozenset[str]:
    """Return what blocks ask of a reader."""
    uses = {
        ENCODING: any(placed.spec.encoding for placed in blocks),
        PAD: any(placed.spec.role is Role.PAD for placed in blocks),
        BOXES: any(placed.spec.is_box for placed in blocks),
    }
    return frozenset(name for name, used in uses.items() if used)


def features_of_sharing(sharing: Sharing) -> frozenset[str]:
    """Return the same of shared leaves. To a reader that does not know of it, a tied leaf is one that was left out."""
    return frozenset({TIED} if sharing.tied else ())


def features_of_tree(tree: Node) -> frozenset[str]:
    """Return the same of a tree. To a reader that does not know of versions, each module is older than all of them."""
    uses = {MODULES: must_be_known(tree), MAPPINGS: holds_typed_mappings(tree)}
    return frozenset(name for name, used in uses.items() if used)
