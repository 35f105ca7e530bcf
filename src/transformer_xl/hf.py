"""``import transformer_xl.hf``: registers our classes with transformers; they are in interop/hf."""

from transformer_xl.interop.hf import *  # noqa: F403
