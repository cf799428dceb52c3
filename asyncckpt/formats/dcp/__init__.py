"""Checkpoints of torch.distributed.checkpoint, for the command line; see asyncckpt.dcp for programs."""
