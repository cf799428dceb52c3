"""What torch.load says of a file that it refuses to read with `weights_only`, in one line."""

from __future__ import annotations

_MARK = "WeightsUnpickler error:"
_SAYS = (_MARK, "GLOBAL", "nsupported")  # In which line the reason is, between lines of advice.
REASON_CHARACTERS_MAX = 200


def why_refused(error: Exception) -> str:
    """Return the reason without the advice, which is to run what the file says."""
    lines = str(error).strip().splitlines()
    line = next((line for says in _SAYS for line in lines if says in line), lines[0] if lines else "")
    reason = line.partition(_MARK)[2] or line
    return reason.strip().partition(". ")[0][:REASON_CHARACTERS_MAX] or type(error).__name__
