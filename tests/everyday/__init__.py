"""Training loops as people have them, drawn at random, beside plain images of their state."""
