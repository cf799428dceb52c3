"""Saves of several ranks: who writes what, and what this rank does while they agree."""
