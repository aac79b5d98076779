"""Implements `TensorLibrary`: functions that a pool calls to make tensors, and to make them plain when it closes."""

from __future__ import annotations

from farpool.tensors.factories import empty, from_tensor, full, materialize, ones, zeros
from farpool.tensors.leaving import live_parameters, materialize_all, take_along

__all__ = [
    "empty",
    "from_tensor",
    "full",
    "live_parameters",
    "materialize",
    "materialize_all",
    "ones",
    "take_along",
    "zeros",
]
