"""Saves of several ranks: which rank writes what, and what this rank does while they agree."""
