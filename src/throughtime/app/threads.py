"""How many threads a small network is worth."""

import os
from collections.abc import Generator
from contextlib import contextmanager

import torch

from throughtime.app.model import Spec

# operations in the products of a step: some 40 microseconds, against some 10 of waiting for each
# other
_WORTH_IT = 2e6


def small(spec: Spec, lanes: int) -> bool:
    """Whether the products of a step are too small to be shared out."""
    return 8 * lanes * spec.hidden**2 < _WORTH_IT


@contextmanager
def one_thread(*, when: bool = True) -> Generator[None]:
    """A single thread, for a net whose every step is tiny; `OMP_NUM_THREADS` says otherwise where
    it is set.

    A second thread brings nothing then, and on a busy machine the two wait for each other at every
    step: with two processes beside it on two cores, an audit of a net of 64 units took 142 s with
    two threads and 2 s with one.
    """
    before = torch.get_num_threads()
    if when and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
