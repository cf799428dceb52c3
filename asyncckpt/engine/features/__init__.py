"""Features of saves beside the plain one; order.py says which there are, and in which order they are called."""
