"""Barriers and shared memory: what threads of one instance need to meet in memory."""
