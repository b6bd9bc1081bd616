"""From one thread's program to source text."""
