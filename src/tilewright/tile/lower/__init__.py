"""From tiles to one thread."""
