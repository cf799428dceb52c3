"""The background: threads that end when they are idle, and filters on staged blocks."""
