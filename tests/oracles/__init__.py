"""The round trips of torch, beside which every door of ours is held: torch.save and torch.load, and DCP."""
