"""What there is once per process: save lock, background, futures."""
