from .checkpoint.checkpoints import (
    first_damaged,
)
from .checkpoint.run_folder import (
    RunFolder,
)
from .figures import (
    rendered,
)
from .loop import (
    Interrupted,
    train,
)
from .metrics import (
    Progress,
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
from .stepping import (
    stepper,
)

__all__ = [
    "Diverged",
    "Interrupted",
    "Network",
    "Optimizer",
    "Progress",
    "RunFolder",
    "TrainState",
    "first_damaged",
    "lr_scale",
    "rendered",
    "stepper",
    "train",
    "train_step",
]
