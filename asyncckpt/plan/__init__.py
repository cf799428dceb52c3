"""What a save will write: the user's state taken apart, and every block's place in the shard files."""
