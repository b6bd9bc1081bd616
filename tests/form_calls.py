"""Inputs and calls of in-place forms, for tests that go over every form. Not a test module."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from op_calls import listed
from tilewright.core import registry
from tilewright.core.in_place import InPlace
from tilewright.verify.cases import make_inputs

C = 24
FORMS = registry.forms()
every_form = pytest.mark.parametrize("form", [f for f in FORMS if not f.anywhere], ids=lambda f: f.name)
"""Every form that overwrites one tensor of rows. Those that take theirs anywhere are tested with their family."""


def ways(form: Any) -> list[tuple[dict[str, Any], tuple[str, ...]]]:
    return [
        ({**form.usual, **options}, absent)
        for options, absent in itertools.product(form.probes.options, form.probes.absent)
    ]


def made(form: Any, dtype: torch.dtype = torch.float32, lead: tuple[int, ...] = (5,), **how: Any) -> dict[str, Any]:
    return make_inputs(form, (*lead, C), dtype, **how)


def run(form: Any, inputs: dict[str, Any], options: dict[str, Any] | None = None, **how: Any) -> Any:
    return form(*inputs.values(), **(form.usual if options is None else options), **how)


def check_against_the_op(form: InPlace[Any], inputs: dict[str, Any], options: dict[str, Any], **how: Any) -> None:
    """Call both; results are equal in their bits and lie where they should, and nothing else has changed."""
    wanted = listed(run(form.functional, inputs, options, **how))
    before = {n: None if t is None else t.clone() for n, t in inputs.items()}
    into = form.targets(inputs)
    found = listed(run(form, inputs, options, **how))
    for output, got, want in zip(form.out, found, wanted, strict=True):
        assert torch.equal(got, want), output
        assert (got is inputs[into[output]]) if output in into else not shares(got, inputs)
    for name, tensor in inputs.items():
        assert tensor is None or name in into.values() or torch.equal(tensor, before[name]), name


def shares(tensor: Tensor, inputs: dict[str, Any]) -> bool:
    places = {t.untyped_storage().data_ptr() for t in inputs.values() if t is not None}
    return tensor.untyped_storage().data_ptr() in places


def target(form: Any, inputs: dict[str, Any]) -> str:
    (name,) = form.targets(inputs).values()
    return str(name)
