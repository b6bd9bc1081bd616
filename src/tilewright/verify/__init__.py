"""The conformance engine: one suite for tests, for `tilewright verify` and for checks on first use.

It reads ops and kernels as data and knows none by name.
"""
