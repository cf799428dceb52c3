"""What a writer acknowledges, every reader takes: every limit, from below and from above, through every writer."""
