"""What torch says of the modules of a state dict beside its tensors: `_metadata`, above all versions.

A module that upgrades older state dicts looks at the version that was saved. Of most modules nothing is stored: what
the names of a state dict begin with, up to a dot, are modules of version 1. Facts are what differs from that, as pairs:

    (name, 2)         a module of another version, or one that no name begins with
    (name, None)      no module
    (name, value)     all that was said of it, as an encoded mapping
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from asyncckpt.errors import CorruptError, UsageError
from asyncckpt.format import limits
from asyncckpt.format.strict_json import Fields, Json
from asyncckpt.format.values import decode_value, encode_value

ModuleFacts = tuple[tuple[str, Json], ...]
NOTED_TABLES = "asyncckpt.tables"  # tables/noted_tables.py: what this process alone understands.
# The first is put there by torch when a state dict is loaded.
_NOT_STORED = ("assign_to_params_buffers", NOTED_TABLES)
IMPLIED_MAX = 16
_USUAL = {"version": 1}
_COUNTED = "num_batches_tracked"


def facts_of(metadata: Mapping[str, Any], keys: Iterable[Any], *, owner: str) -> ModuleFacts:
    """Return what `_metadata` says of the modules of a state dict with these keys: all of it that is plain."""
    implied = implied_modules(keys)
    facts: list[tuple[str, Json]] = []
    for name, local in metadata.items():
        if local == _USUAL and type(local["version"]) is int and name in implied:
            continue  # By far the most frequent.
        if not isinstance(local, Mapping) or not isinstance(name, str) or not _is_plain(name):
            continue
        fact = _fact(local, owner)
        if fact != 1 or type(fact) is not int or name not in implied:
            facts.append((str.__str__(name), fact))
    facts += [(name, None) for name in implied if not isinstance(metadata.get(name), Mapping)]
    return tuple(facts)


def metadata_of_facts(facts: ModuleFacts, keys: Iterable[Any], *, owner: str) -> OrderedDict[str, dict[str, Any]]:
    """Return `_metadata` again, the inverse of facts_of except for the order. CorruptError."""
    found: OrderedDict[str, dict[str, Any]] = OrderedDict((name, {"version": 1}) for name in implied_modules(keys))
    for name, fact in facts:
        if fact is None:
            found.pop(name, None)
        elif type(fact) is int:
            found[name] = {"version": fact}
        else:
            found[name] = decode_value(fact, owner=owner)
    return found


def matter_to_readers(facts: ModuleFacts, keys: Iterable[Any]) -> bool:
    """Return whether a reader that drops the facts might load something else.

    Not of a normalization that counts its batches, torch's only frequent module of another version: that is whether its
    state dict has the count.
    """
    counting = {key.rpartition(".")[0] for key in keys if type(key) is str and key.endswith(_COUNTED)}
    return any(fact != 1 and not (fact == 2 and name in counting) for name, fact in facts)


def encode_facts(facts: ModuleFacts) -> Json:
    return dict(facts)


def decode_facts(fields: Fields, key: str) -> ModuleFacts:
    """Decode what encode_facts has made; CorruptError for anything else."""
    found = fields.value(key)
    if type(found) is not dict or len(found) > limits.BLOCKS_MAX:
        raise fields.wrong(key, "an object")
    for name, fact in found.items():
        if fact is not None and type(fact) is not int and not isinstance(decode_value(fact, owner=fields.owner), dict):
            raise CorruptError(f"{fields.owner}: what {fields.where} holds for {name!r} is not a mapping")
    return tuple(found.items())


def module_of(key: Any) -> str:
    """Return the name of the module that an entry of a state dict belongs to."""
    return key.rpartition(".")[0] if type(key) is str else ""


def implied_modules(keys: Iterable[Any]) -> Mapping[str, None]:
    """Return the names of the modules that the keys of a state dict begin with, in their order."""
    return _implied(tuple(keys))


@lru_cache(maxsize=IMPLIED_MAX)  # A state dict is asked about at each save, and has the same keys each time.
def _implied(keys: tuple[Any, ...]) -> Mapping[str, None]:
    found: dict[str, None] = {"": None}
    for key in keys:
        begin = module_of(key)
        if begin not in found:
            found |= dict.fromkeys(_begins(begin))
    return found


def _begins(name: str) -> Iterator[str]:
    end = name.find(".")
    while end >= 0:
        yield name[:end]
        end = name.find(".", end + 1)
    yield name


def _fact(local: Any, owner: str) -> Json:
    said = {key: value for key, value in local.items() if key not in _NOT_STORED}
    if said.keys() == {"version"} and type(said["version"]) is int and abs(said["version"]) < 2**53:
        return said["version"]
    plain = {key: value for key, value in said.items() if _is_plain({key: value})}
    return encode_value(plain, owner=owner)


def _is_plain(value: Any) -> bool:
    try:
        encode_value(value, owner="")
    except UsageError:
        return False
    return True
