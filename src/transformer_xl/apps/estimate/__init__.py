"""What a training run will take on some number of GPUs, counted and not measured.

Nothing here runs a model. Memory, operations and bytes sent are formulas of the settings
(docs/scale.md); seconds are those, divided by what a data sheet promises and by shares of it that
are assumptions.
"""

from transformer_xl.apps.estimate.plan import Parallel, Plan, Weights, count_weights
from transformer_xl.apps.estimate.scaling import (
    HARDWARE,
    Assumed,
    Hardware,
    Times,
    sent_bytes,
    summary,
    times,
    with_known_vocabulary,
)
from transformer_xl.apps.estimate.training_memory import Moment, checkpoint_bytes, moments, peak

__all__ = [
    "HARDWARE",
    "Assumed",
    "Hardware",
    "Moment",
    "Parallel",
    "Plan",
    "Times",
    "Weights",
    "checkpoint_bytes",
    "count_weights",
    "moments",
    "peak",
    "sent_bytes",
    "summary",
    "times",
    "with_known_vocabulary",
]
