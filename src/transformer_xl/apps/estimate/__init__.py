"""Estimates of the memory, compute and communication of a training run on any number of GPUs.

Nothing here runs a model. Memory, FLOPs and bytes sent are formulas of the settings
(docs/scale.md); seconds follow from the peak rates of a data sheet and assumed utilizations.
"""

from transformer_xl.apps.estimate.plan import Plan, count_weights
from transformer_xl.apps.estimate.scaling import (
    HARDWARE,
    Assumed,
    sent_bytes,
    summary,
    times,
    with_known_vocabulary,
)
from transformer_xl.apps.estimate.training_memory import checkpoint_bytes, moments, peak

__all__ = [
    "HARDWARE",
    "Assumed",
    "Plan",
    "checkpoint_bytes",
    "count_weights",
    "moments",
    "peak",
    "sent_bytes",
    "summary",
    "times",
    "with_known_vocabulary",
]
