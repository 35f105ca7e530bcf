from .beginning import (
    fit_to_corpus,
    new_state,
)
from .checkpoint.checkpoints import (
    checkpoints_in,
    first_damaged,
    read_about,
)
from .checkpoint.run_folder import (
    CHECKPOINTS,
    ENVIRONMENT_FILE,
    METRICS_FILE,
    RunFolder,
)
from .figures import (
    rendered,
)
from .finish import (
    describe,
    held_out,
    memory_line,
)
from .loop import (
    Interrupted,
    train,
)
from .metrics import (
    Progress,
    read_metrics,
    reading,
)
from .optim import (
    Optimizer,
    lr_scale,
)
from .runner import (
    Network,
)
from .state import (
    TrainState,
)
from .step import (
    Diverged,
    train_step,
)

__all__ = [
    "CHECKPOINTS",
    "ENVIRONMENT_FILE",
    "METRICS_FILE",
    "Diverged",
    "Interrupted",
    "Network",
    "Optimizer",
    "Progress",
    "RunFolder",
    "TrainState",
    "checkpoints_in",
    "describe",
    "first_damaged",
    "fit_to_corpus",
    "held_out",
    "lr_scale",
    "memory_line",
    "new_state",
    "read_about",
    "read_metrics",
    "reading",
    "rendered",
    "train",
    "train_step",
]
