"""A step attends to its ring as the reference attends to the same tokens in order."""

import pytest
import torch

from transformer_xl.ops import reference
from transformer_xl.ops import triton as kernels


@pytest.fixture
def device(kernel_device):
    return kernel_device


# Four rows in which each pair of the three stands.
@pytest.mark.parametrize(
    ("is_ahead", "shared_from", "has_bias"),
    [(False, 1, False), (False, 9, True), (True, 1, True), (True, 9, False)],
)
@pytest.mark.parametrize(
    ("capacity", "newest", "seen", "K"),
    [
        (1, 0, (1, 1), 8),
        (70, 3, (70, 1), 16),
        (70, 69, (64, 65), 41),
        # Several blocks, of many slots for few streams and of few for many.
        (600, 100, (600, 257), 16),
        (150, 100, (150, 129) + 48 * (1,), 64),
    ],
)
def test_a_step_reads_its_ring_in_order(
    capacity, newest, seen, K, has_bias, shared_from, is_ahead, device, monkeypatch
):
    for which, blocks in kernels.STEP_BLOCKS.items():
        monkeypatch.setitem(kernels.STEP_BLOCKS, which, blocks._replace(is_ahead=is_ahead))
    monkeypatch.setattr(kernels, "SHARED_FROM", shared_from)
    B, H = len(seen), 3
    draw = lambda *shape: torch.randn(shape, device=device)  # noqa: E731
    q, k, v = draw(B, 1, H, 3 * K).chunk(3, -1)
    keys, values, r = draw(H, B, capacity, K), draw(H, B, capacity, K), draw(H, capacity, K)
    r = r.transpose(0, 1)
    content_bias, position_bias, bias = draw(H, K), draw(H, K), draw(capacity, H)
    bias = bias if has_bias else None
    order = (torch.arange(capacity, device=device) + newest + 1) % capacity
    expected_keys, expected_values = keys.clone(), values.clone()
    expected_keys[:, :, newest], expected_values[:, :, newest] = (
        x[:, 0].transpose(0, 1) for x in (k, v)
    )
    n_seen = torch.tensor(seen, device=device)
    expected = reference.rel_attention(
        q,
        expected_keys[:, :, order].permute(1, 2, 0, 3),
        expected_values[:, :, order].permute(1, 2, 0, 3),
        *(r, content_bias, position_bias),
        distance_bias=bias,
        first_key=capacity - n_seen,
    )
    found = kernels.attend_step(
        *(q, k, v, keys, values, r, content_bias, position_bias),
        distance_bias=bias,
        newest=torch.tensor([newest], device=device),
        n_seen=n_seen,
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(keys, expected_keys)
    assert torch.equal(values, expected_values)
