"""Fewest bytes and operations of a call, from facts: each distinct byte that the contract must read or write, once."""

from __future__ import annotations

from tilewright.core.call import Call, TensorFacts


def bytes_of(call: Call, *names: str) -> int:
    """Bytes of the named tensors that the call has; an expanded one counts its distinct elements."""
    return sum(_distinct(facts) for name in names if (facts := call.tensors.get(name)) is not None)


def per_element(call: Call, operations: int) -> int:
    """`operations` for each element of the call's widest tensor."""
    return operations * max(facts.numel for facts in call.tensors.values() if facts is not None)


def _distinct(facts: TensorFacts) -> int:
    count = 1
    for size, stride in zip(facts.shape, facts.stride, strict=True):
        count *= 1 if stride == 0 else size
    return count * facts.dtype.itemsize
