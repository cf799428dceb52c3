"""Wires one save and one load; owns what there is once per process: save lock, background thread, open errors."""
