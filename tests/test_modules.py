"""The corpus of recurrent modules: every oracle is right for a stream, every fault is real."""

from collections.abc import Iterator

import pytest
import torch

from modules import CASES
from modules.case import Case
from modules.check import build, faults

every_case = pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in CASES])


@pytest.fixture(autouse=True)
def in_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_no_name_is_used_twice() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


@every_case
def test_a_case_is_what_it_claims(case: Case) -> None:
    assert faults(case) == []


@pytest.mark.slow  # 400 more modules and streams: 8 s
@pytest.mark.parametrize("seed", [10, 20])
@every_case
def test_a_case_is_what_it_claims_with_other_weights(case: Case, seed: int) -> None:
    assert faults(case, seed) == []


@every_case
def test_an_oracle_runs_in_float32(case: Case) -> None:
    torch.set_default_dtype(torch.float32)
    module, x = build(case)
    assert x.dtype == torch.float32 or not x.is_floating_point()
    assert case.oracle(module, x, [len(x)]).isfinite().all()
