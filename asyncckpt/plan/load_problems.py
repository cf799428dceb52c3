"""What a load is refused with: all that does not fit, and what would make it fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn, Protocol

from asyncckpt.errors import IncompatibleError, UnsupportedError
from asyncckpt.format.tree import Path, path_name
from asyncckpt.plan.load_offer import wrapped_hint

PROBLEMS_SHOWN_MAX = 20
_NOT_STRICT = "strict=False loads of it what names of parameters tell, or leaves it as it is"


class Problems(Protocol):
    """See _Match of load_plan.py."""

    problems: list[str]
    of_objects: list[str]
    named: dict[str, Sequence[str]]
    passing: list[str]
    could_be_cast: bool
    could_be_resized: bool


def raise_problems(found: Problems, step: int, missing: list[str], more: list[str], others: list[str]) -> NoReturn:
    """Raise IncompatibleError. others: entries of the checkpoint that the state lacks; what is missing may be one."""
    passing = [*(_counted(what, names) for what, names in found.named.items()), *found.passing]
    lacks = ", ".join(map(repr, others[:PROBLEMS_SHOWN_MAX])) if missing and passing else ""
    problems = [*found.problems, *found.of_objects, *passing]
    shown = "; ".join(problems[:PROBLEMS_SHOWN_MAX])
    rest = f"; and {len(problems) - PROBLEMS_SHOWN_MAX} more" if len(problems) > PROBLEMS_SHOWN_MAX else ""
    hints = (
        wrapped_hint(missing, more),
        "strict=False loads what matches, rename={old: new} what has another name" if passing else "",
        f"the checkpoint has {lacks}, which this state lacks" if lacks else "",
        "resize=[names] loads what both shapes have" if found.could_be_resized else "",
        "cast=True converts dtypes" if found.could_be_cast else "",
        f"make such an object as the one that was saved; {_NOT_STRICT}" if found.of_objects else "",
    )
    what = f"step {step} does not match this state, and nothing was changed: {shown}{rest}"
    raise IncompatibleError(what, hint="; ".join(filter(None, hints)))


def not_loaded(not_taken: Sequence[str], left_out: Sequence[str], empty: Sequence[Path]) -> Iterator[str]:
    """Yield what would not be loaded: tables of modules, while the checkpoint has some that nothing takes; tensors, for
    which the target has an empty container.
    """
    why = f"not in hashtables, and the checkpoint has tables that nothing takes: {not_taken[:PROBLEMS_SHOWN_MAX]}"
    yield from (f"{place} would not be loaded: {why}" for place in left_out)
    why = "is empty, the checkpoint has tensors there (asyncckpt.load returns them)"
    yield from (f"{path_name(path)!r} {why}" for path in empty)


def _counted(what: str, names: Sequence[str]) -> str:
    """Return a problem of names: how many, and the first of them."""
    more = f", {len(names) - PROBLEMS_SHOWN_MAX} more" if len(names) > PROBLEMS_SHOWN_MAX else ""
    return f"{what} ({len(names)}): {', '.join(map(repr, names[:PROBLEMS_SHOWN_MAX]))}{more}"


def raise_unreadable(names: Mapping[str, str], step: int) -> NoReturn:
    """Raise UnsupportedError for the first of these tensors, which have a dtype that this version does not know."""
    name, dtype = next(iter(names.items()))
    raise UnsupportedError(
        f"tensor {name!r} of step {step} has a dtype that this version cannot read",
        found=dtype,
        expected="one of asyncckpt.checkpoints.supported_dtypes()",
        hint="strict=False loads the other ones",
    )
