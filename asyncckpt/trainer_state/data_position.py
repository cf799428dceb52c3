"""Where training stands in its data: the epoch, and how many samples of it were handed to the training loop.

Counted is what the loop got, not what the sampler gave out: workers are some batches ahead, and these come again after
a resume. What making an iterator of a DataLoader draws from torch's generator (a base seed for workers) does not count
as drawn: an interrupted run makes one iterator more than the other, and would draw other numbers ever after.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader

from asyncckpt.errors import IncompatibleError, UsageError
from asyncckpt.trainer_state.plain import from_plain, to_plain
from asyncckpt.trainer_state.sampler import ResumableSampler, epoch_seed

_FIELDS = ("epoch", "samples_consumed", "samples_count", "seed", "shuffle")


class DataPosition:
    """Iterates over the batches of a loader, from the position on to the end of the epoch, and knows the position.

    loader   a torch.utils.data.DataLoader with a ResumableSampler (as its sampler, or that of its batch sampler); or a
             loader with state_dict() and load_state_dict() (torchdata's StatefulDataLoader), which knows itself

        for epoch in range(data.epoch, epochs_count):
            for batch in data:
                train(batch)
                saver.save_async(step.advance())  # This batch counts as consumed.

    All ranks must have consumed the same number of batches when they save. One thread; one iteration at a time.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        # None: the loader keeps its position itself.
        self._sampler, batch_size = _sampler_of(loader)
        self._samples_per_batch = 0 if self._sampler is None else batch_size * self._sampler.ranks_count
        self._epoch = 0
        self._samples_consumed = 0
        self._is_resumed = False
        self._loads_count = 0

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration belongs to, from 0."""
        return self._epoch

    @property
    def samples_consumed(self) -> int:
        """How many samples of this epoch all ranks together have consumed. 0 for a loader that keeps its position."""
        return self._samples_consumed

    @property
    def is_at_end(self) -> bool:
        """Whether all samples of this epoch are consumed; never of a loader that keeps its position."""
        return self._sampler is not None and self._samples_consumed >= self._sampler.samples_count

    def __iter__(self) -> Iterator[Any]:
        loads_count = self._loads_count
        for batch in self._new_iterator():
            if self._sampler is not None:
                consumed = self._samples_consumed + self._samples_per_batch
                self._samples_consumed = min(consumed, self._sampler.samples_count)
            yield batch
            if self._loads_count != loads_count:
                raise UsageError("a position was loaded during an iteration", hint="begin a new iteration after a load")
        self._epoch += 1
        self._samples_consumed = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the position as plain values; the same on all ranks, except for a loader that keeps its own."""
        if self._sampler is None:
            with _undrawn(torch.default_generator):  # It may make its iterator now.
                return {"epoch": self._epoch, "loader": to_plain(self._loader.state_dict())}
        return {
            "epoch": self._epoch,
            "samples_consumed": self._samples_consumed,
            "samples_count": self._sampler.samples_count,
            "seed": self._sampler.seed,
            "shuffle": self._sampler.shuffle,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a saved position, with the seed it was saved with, on any number of ranks.

        IncompatibleError, with nothing changed, when the data set has another number of samples.
        """
        self._check_saved(state)
        if self._sampler is None:
            self._loader.load_state_dict(from_plain(state["loader"]))
            self._is_resumed = True
        else:
            self._sampler.seed = state["seed"]
            self._samples_consumed = state["samples_consumed"]
        self._epoch = int(state["epoch"])
        self._loads_count += 1

    def _check_saved(self, state: Any) -> None:
        expected = ["epoch", "loader"] if self._sampler is None else sorted(_FIELDS)
        found = set(map(str, state)) if isinstance(state, Mapping) else set()
        if not found >= {*expected} or (self._sampler is not None and "loader" in found):
            raise IncompatibleError(
                "the saved position is that of another kind of loader", found=sorted(found), expected=expected
            )
        if self._sampler is None:
            from_plain(state["loader"])
            return
        if any(type(state[name]) is not int for name in _FIELDS[:4]) or type(state["shuffle"]) is not bool:
            raise IncompatibleError("a saved position holds something else than numbers", found=dict(state))
        for name in ("samples_count", "shuffle"):
            if state[name] != getattr(self._sampler, name):
                raise IncompatibleError(
                    f"the saved position is that of another order of samples: {name}",
                    found=state[name],
                    expected=getattr(self._sampler, name),
                )

    def _new_iterator(self) -> Iterator[Any]:
        if self._sampler is None:
            if not self._is_resumed:
                return iter(self._loader)
            self._is_resumed = False
            with _undrawn(torch.default_generator):  # The run that was saved had made this iterator before.
                return iter(self._loader)
        self._sampler.set_position(epoch=self._epoch, samples_consumed=self._samples_consumed)
        generator = self._loader.generator or torch.default_generator
        with _undrawn(generator):
            generator.manual_seed(epoch_seed(seed=self._sampler.seed, epoch=self._epoch))
            return iter(self._loader)


@contextmanager
def _undrawn(generator: torch.Generator) -> Iterator[None]:
    """Have a generator go on as if nothing was drawn from it inside."""
    before = generator.get_state()
    try:
        yield
    finally:
        generator.set_state(before)


def _sampler_of(loader: Any) -> tuple[ResumableSampler | None, int]:
    """Return the sampler behind a loader, and how many samples a batch has; (None, 0) if it keeps its position."""
    if all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict")):
        return None, 0
    if isinstance(loader, DataLoader):
        batches = loader.batch_sampler
        if isinstance(loader.sampler, ResumableSampler):
            return loader.sampler, loader.batch_size or 1
        inner = getattr(batches, "sampler", None)
        size = getattr(batches, "batch_size", None)
        if isinstance(inner, ResumableSampler) and type(size) is int:
            return inner, size
    raise UsageError(
        "the position of this loader cannot be saved",
        found=type(loader),
        expected="a DataLoader with a ResumableSampler, or a loader with state_dict() and load_state_dict()",
    )
