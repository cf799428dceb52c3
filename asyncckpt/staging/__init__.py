"""Host memory for snapshots: the two arenas of the process and how large they may grow."""
