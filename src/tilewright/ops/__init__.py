"""The operator families: one folder each, with the ops' definitions and their kernels, one file a backend."""

FAMILIES = (
    "norm", "activation", "residual", "linear", "loss", "embedding", "attention", "rotary", "sampling", "hstu",
)  # fmt: skip
"""In the order in which they are looked through for a name: none is imported before it is asked for."""
