"""Features of saves beside the plain one; engine/open_saver.py makes them, and has their order."""
