"""Programs that nobody here wrote give the same bits with a quarter of their bytes in the fast tier."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from tests.ecosystem.program import Program, run_in_pool, run_plain
from tests.ecosystem.programs import PROGRAMS
from tests.tensors.bits import assert_same

pytestmark = [
    # What other libraries warn of is theirs; what farpool warns of is not.
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.filterwarnings("error::farpool.FarpoolWarning"),
    pytest.mark.filterwarnings("ignore:the pool was left with:farpool.FarpoolWarning"),  # hooks hold tensors
]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    gc.collect()


def _id(program: Program) -> str:
    return program.name


@pytest.mark.slow
@pytest.mark.parametrize("program", [program for program in PROGRAMS if program.refused is None], ids=_id)
def test_a_program_is_bit_equal_in_a_pool(program: Program) -> None:
    expected, nbytes = run_plain(program)
    results, fast, evictions = run_in_pool(program, nbytes)
    assert_same(results, expected, program.name)
    assert fast < nbytes
    assert evictions > 50


@pytest.mark.slow
@pytest.mark.parametrize("program", [program for program in PROGRAMS if program.refused is not None], ids=_id)
def test_a_program_that_is_not_supported_says_what_to_do(program: Program) -> None:
    assert program.refused is not None
    _, nbytes = run_plain(program)
    with pytest.raises(program.refused.error, match=program.refused.remedy):
        run_in_pool(program, nbytes)


def test_the_matrix_is_large_and_its_names_are_distinct() -> None:
    names = [program.name for program in PROGRAMS]
    assert len(names) >= 60
    assert len(set(names)) == len(names)
