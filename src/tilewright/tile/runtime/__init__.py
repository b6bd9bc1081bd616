"""Compiling, loading and calling what was rendered."""
