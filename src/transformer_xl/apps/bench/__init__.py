"""The speed of a model on this machine: training, evaluation and generation, and utilization.

Tokens are drawn at random and the memory is full from the first step on, so no text is needed and
every step costs the same: as much as one at the end of a run, where a recipe changes its lengths on
the way or averages its weights.
"""

from transformer_xl.apps.bench.profiling import profile
from transformer_xl.apps.bench.speed import measure, training, with_vocabulary
from transformer_xl.apps.bench.windows import SLOWDOWNS, evaluation_speed

__all__ = ["SLOWDOWNS", "evaluation_speed", "measure", "profile", "training", "with_vocabulary"]
