"""Where a resumed run does not come to what the whole one does.

It then comes to what the library's own saving comes to, or is refused by name before its first step.
The one list of them, by the class of the callback; the matrices of callbacks refuse every difference that is not in it,
and print those that they have met.
"""

from __future__ import annotations

_TRIALS = "ours puts back what trials have drawn; in a resumed fit they would begin it anew, so it is refused"
_AVERAGES = (
    "Lightning puts averages in the place of the weights when training ends, and not when one that has ended is resumed"
)
REMAINING: dict[str, str] = {
    "BackboneFinetuning": "Lightning unfreezes a backbone when its epoch begins, and leaves that out in a resumed fit",
    "BatchSizeFinder": _TRIALS,
    "EMAWeightAveraging": _AVERAGES,
    "EarlyStoppingCallback": "transformers does not keep that a run was to stop, so a resumed one trains on",
    "GradientAccumulationScheduler": "Lightning sets it when an epoch begins, and leaves that out in the middle of one",
    "LearningRateFinder": _TRIALS,
    "ModelPruning": "Lightning stores pruned weights without their masks, so a resumed fit trains these weights again",
    "OnExceptionCheckpoint": "what it saves at an error may be the newest, and Lightning keeps no random numbers in it",
    "SpikeDetection": "Lightning cannot load what it has stored of it: AttributeError before the first step",
    "StochasticWeightAveraging": "Lightning begins its rates anew in a resumed fit, and averages when training ends",
    "WeightAveraging": _AVERAGES,
}
# These do something when an epoch begins or ends. Lightning's own saving has no place between that and the next batch,
# and ours has: it goes on there, so that the resumed run does that as often as the whole one.
NEITHER = frozenset({"BackboneFinetuning", "ModelPruning", "StochasticWeightAveraging"})
MET: dict[str, set[str]] = {}


def differing(kind: str, facts: set[str], *, is_as_own: bool = True) -> bool:
    """Return whether a class may differ in these facts from the whole run; note it if so."""
    if kind in REMAINING:
        MET.setdefault(kind, set()).update(facts)
    return kind in REMAINING and (is_as_own or kind in NEITHER)
