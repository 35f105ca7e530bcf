"""Tensors that depend on sizes alone: computed once, and right in every mode of torch."""

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any

import torch
from torch import Tensor


def cached(maxsize: int) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Return a decorator that caches the tensors of a function of hashable arguments.

    They can be used later in training, also if they were first needed in inference mode, whose
    tensors cannot be saved for gradients. Under a mode that replaces tensors, such as
    ``FakeTensorMode``, they are computed, and not kept for the calls after it.
    """

    def decorate(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*about: Any) -> Tensor:
            with torch.inference_mode(False):
                return make(*about)

        kept = lru_cache(maxsize)(made)

        @wraps(make)
        def constant(*about: Any) -> Tensor:
            return (made if torch._C._len_torch_dispatch_stack() > 0 else kept)(*about)

        setattr(constant, "cache_clear", kept.cache_clear)  # noqa: B010
        return constant

    return decorate
