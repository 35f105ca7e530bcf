"""Cached tensors that depend on sizes alone, such as masks and sinusoids."""

from collections.abc import Callable, Hashable
from functools import lru_cache, wraps

import torch
from torch import Tensor


def cached(maxsize: int) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Return a decorator that caches the tensors of a function of hashable arguments.

    They can be used later in training, also if they were first needed in inference mode, whose
    tensors cannot be saved for gradients. Under a mode that replaces tensors, such as
    ``FakeTensorMode``, they are computed, and not kept for the calls after it.
    """

    def decorate(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def outside_inference_mode(*sizes: Hashable) -> Tensor:
            with torch.inference_mode(False):
                return compute(*sizes)

        memoized = lru_cache(maxsize)(outside_inference_mode)

        @wraps(compute)
        def constant(*sizes: Hashable) -> Tensor:
            is_replaced = torch._C._len_torch_dispatch_stack() > 0
            return (outside_inference_mode if is_replaced else memoized)(*sizes)

        setattr(constant, "cache_clear", memoized.cache_clear)  # noqa: B010
        return constant

    return decorate
