"""Write shard files, and read them."""
