"""Make a checkpoint visible, find it again, and let old ones go."""
