"""The operator families: one folder each, with the ops' definitions and their kernels, one file a backend."""
