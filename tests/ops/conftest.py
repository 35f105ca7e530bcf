"""New tensors of all tests of operations start as NaN."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _poison() -> Iterator[None]:
    # So that an element nobody wrote cannot pass for a zero.
    was_on = torch.are_deterministic_algorithms_enabled()
    was_filling = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(was_on)
    torch.utils.deterministic.fill_uninitialized_memory = was_filling
