"""Which rank of how many this process is, and the ranks' way to agree. torch.distributed is looked at late."""

from __future__ import annotations

from typing import Any

import torch

from asyncckpt.model.own_rank import own_rank
from asyncckpt.strategies.agreement import Agreement

CALLS_PEER_DEADLINE_S = 600.0  # A rank may train for long before it asks for what another one waits.


class GroupAgreement:
    """The agreement between the ranks of a process group, opened when it is first asked for.

    process_group  None: the default group, as long as there is one
    deadline       seconds that another rank may be silent when it is needed
    """

    def __init__(self, process_group: Any = None, *, deadline: float | None = None) -> None:
        self._process_group = process_group
        self._deadline_s = CALLS_PEER_DEADLINE_S if deadline is None else float(deadline)
        self._agreement: Agreement | None = None
        self._opened_for: Any = None

    def get(self) -> Agreement | None:
        """It, or None for a single rank. Every rank asks alike; PeerError when they do not find each other.

        Where torch.distributed was initialised anew, so is the agreement.
        """
        if own_rank(None, None, self._process_group)[1] == 1:
            return None
        from asyncckpt.coordination.store_channel import open_store_channel

        group = torch.distributed.group.WORLD if self._process_group is None else self._process_group
        if self._agreement is None or self._opened_for is not group:
            self.close()
            channel = open_store_channel(self._process_group, deadline_s=self._deadline_s)
            self._agreement, self._opened_for = Agreement(channel, deadline_s=self._deadline_s), group
        return self._agreement

    def close(self) -> None:
        """End the channel; the next `get` opens another one."""
        if self._agreement is not None:
            self._agreement.close()
            self._agreement = None
