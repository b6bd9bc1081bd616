"""Instruction records: what a target does in one instruction, as data."""
