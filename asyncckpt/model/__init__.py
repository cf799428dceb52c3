"""The words that cross rooms: frozen dataclasses and Protocols, no work."""
