"""Saves of states on simulated devices, through the public interface."""
