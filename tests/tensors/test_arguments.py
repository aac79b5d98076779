"""Arguments of the wrong kind are errors that say what was meant."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import farpool
from farpool import ArgumentError, FarpoolError, Pool
from farpool.sizes import parse_size
from tests.tensors.bits import assert_same

LAYER = nn.Linear(2, 2)
WRONG: dict[str, tuple[Callable[[Pool], Any], str]] = {
    "swapped": (lambda pool: farpool.offload(pool, LAYER), "is a Pool.*the module comes first"),
    "a tensor": (lambda pool: farpool.offload(torch.ones(3), pool), "is a Tensor.*pool.from_tensor"),
    "a parameter": (lambda pool: farpool.offload(LAYER.weight, pool), "is a Parameter.*pool.from_tensor"),
    "a dict": (lambda pool: farpool.offload(dict(LAYER.state_dict()), pool), "is a dict.*pool.from_tensor"),
    "a state dict": (lambda pool: farpool.offload(LAYER.state_dict(), pool), "is a OrderedDict.*module"),
    "a class": (lambda pool: farpool.offload(nn.Linear, pool), r"the class Linear.*Linear\(\.\.\.\)"),
    "nothing": (lambda pool: farpool.offload(None, pool), "is None.*expected a torch.nn.Module"),
    "a size for the pool": (lambda pool: farpool.offload(LAYER, "8MiB"), r"is a str.*Pool\(fast='8MiB'\)"),
    "no pool": (lambda pool: farpool.offload(LAYER, None), "the pool is None.*farpool.Pool"),
    "two modules": (lambda pool: farpool.offload(LAYER, nn.Linear(2, 2)), "the pool is a Linear"),
    "restore a pool": (lambda pool: farpool.restore(pool), "is a Pool.*materialize=True"),
    "restore a tensor": (lambda pool: farpool.restore(pool.ones(2)), "is a PagedTensor.*pool.materialize"),
    "restore a dict": (lambda pool: farpool.restore({}), "is a dict"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_named(case: str, pool: Pool) -> None:
    call, message = WRONG[case]
    with pytest.raises(ArgumentError, match=message) as raised:
        call(pool)
    assert isinstance(raised.value, TypeError)
    assert isinstance(raised.value, FarpoolError)
    del raised
    assert pool.live == 0
    assert type(LAYER.weight) is nn.Parameter


def test_ones_are_ones(pool: Pool) -> None:
    assert_same(pool.ones(700, 131), torch.ones(700, 131))
    assert_same(pool.ones((2, 3), dtype=torch.bfloat16), torch.ones(2, 3, dtype=torch.bfloat16))
    assert_same(pool.ones(4, dtype=torch.bool), torch.ones(4, dtype=torch.bool))


def refusal(size: str) -> farpool.PoolFullError | None:
    """What a model of 195 KiB meets in a pool with a lower tier of this size."""
    layers = nn.Sequential(*[nn.Linear(64, 64) for _ in range(12)])
    with Pool("64KiB", dram=size) as pool:
        try:
            farpool.offload(layers, pool)
            layers(torch.ones(1, 64))
            farpool.restore(layers)
        except farpool.PoolFullError as error:
            return error
    return None


@pytest.mark.slow
def test_doing_what_the_error_says_makes_room() -> None:
    size = "64KiB"
    for _ in range(20):
        error = refusal(size)
        if error is None:
            break
        assert error.lacking > 0
        found = re.search(r"bytes .*lack; set the size of 'dram' to \"(\w+)\"", str(error))
        assert found is not None, str(error)
        assert parse_size(found[1], "dram") > parse_size(size, "dram")
        size = found[1]
    assert error is None, "following the advice leads nowhere"
    assert 64 << 10 < parse_size(size, "dram") < 200 << 10


def test_a_pool_that_never_had_a_lower_tier_is_told_to_get_one() -> None:
    with Pool("64KiB") as pool, pytest.raises(farpool.PoolFullError, match=r'65536 bytes.*dram="\w+"') as raised:
        pool.ones(32768)
    assert raised.value.lacking == 65536
