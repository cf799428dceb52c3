"""Capture the live state into host memory, and restore it from there."""
