"""The peers: one small file each, all behind the Protocol of `protocol.py`.

`open_peer(name, ...)` imports only the file it needs, so a process pays, in time and memory, for its own peer alone.
"""

from __future__ import annotations

import importlib
from pathlib import Path

from bench.peers.protocol import Peer, PeerFactory
from bench.state import State

FLOOR = "raw_floor"
OURS = "asyncckpt"
STEPS = "asyncckpt_steps"
STEP_PEERS = (
    FLOOR,
    STEPS,
    "asyncckpt_no_digests",
    "asyncckpt_dense",
    "dcp_thread_cached",
    "torch_save_thread_clone",
)
STORE_FLOOR = "store_put"
STORE_PEERS = (
    OURS,
    "store_socket",
    STORE_FLOOR,
    "store_asyncckpt",
    "store_asyncckpt_upload",
    "store_dcp_fsspec",
    "store_torch_save",
)
STEP_CONTROL = "asyncckpt_no_wait"
PEERS = (
    FLOOR,
    OURS,
    "dcp_process",
    "dcp_thread_cached",
    "dcp_thread",
    "torch_save_thread_buffers",
    "torch_save_thread_clone",
    "torch_save",
    "safetensors",
)


def peer_factory(name: str) -> PeerFactory:
    """Import the file of a peer and return its class; an ImportError says that the peer is not installed here."""
    if name not in {*PEERS, *STEP_PEERS, *STORE_PEERS, STEP_CONTROL}:
        raise ValueError(f"no peer is called {name!r}, expected one of {', '.join(PEERS)}")
    factory: PeerFactory = importlib.import_module(f"bench.peers.{name}").PEER
    return factory


def open_peer(name: str, state: State, directory: Path) -> Peer:
    """Make the peer `name` for this state; it writes below `directory`."""
    return peer_factory(name)(state, directory)
