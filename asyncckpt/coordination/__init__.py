"""How the ranks of a job agree on one checkpoint: messages, state machines, channels."""
