from .checks import (
    Count,
    Length,
    UnusedError,
    check,
    create_from_stored,
    fields_of,
    near,
    read_settings,
    require,
    rule_of,
    validate_settings,
)
from .config import (
    FORMAT_VERSION,
    MODEL_TYPE,
    Config,
)
from .data import (
    DataConfig,
)
from .device import (
    Precision,
    describe_machine,
    pick_device,
    prepare_process,
    total_memory,
)
from .distributed import (
    Stalled,
    World,
)
from .evaluation import (
    EvalConfig,
    GenerateConfig,
)
from .files import (
    NotRegularError,
    checksum,
    is_disk_full,
    new_folder,
    open_regular,
    read_small_file,
    remove_temporary,
    replace_file,
    require_new,
    require_new_file,
    require_not_shipped,
    require_space,
    same_file,
    sync,
    write_atomically,
)
from .gone import (
    GONE,
)
from .locating import (
    locate,
    locate_here,
)
from .locking import (
    Say,
    locked,
)
from .model import (
    AuthorsConfig,
    GPTConfig,
    LSTMConfig,
    ModelConfig,
    TransformerXLConfig,
)
from .music import (
    MusicConfig,
)
from .recipes import (
    generation_of,
    load_recipe,
    recipe_names,
    recipe_of,
    recipe_text,
)
from .shipped import (
    ShippedModel,
    shipped_path,
)
from .training import (
    TrainConfig,
)

__all__ = [
    "FORMAT_VERSION",
    "GONE",
    "MODEL_TYPE",
    "AuthorsConfig",
    "Config",
    "Count",
    "DataConfig",
    "EvalConfig",
    "GPTConfig",
    "GenerateConfig",
    "LSTMConfig",
    "Length",
    "ModelConfig",
    "MusicConfig",
    "NotRegularError",
    "Precision",
    "Say",
    "ShippedModel",
    "Stalled",
    "TrainConfig",
    "TransformerXLConfig",
    "UnusedError",
    "World",
    "check",
    "checksum",
    "create_from_stored",
    "describe_machine",
    "fields_of",
    "generation_of",
    "is_disk_full",
    "load_recipe",
    "locate",
    "locate_here",
    "locked",
    "near",
    "new_folder",
    "open_regular",
    "pick_device",
    "prepare_process",
    "read_settings",
    "read_small_file",
    "recipe_names",
    "recipe_of",
    "recipe_text",
    "remove_temporary",
    "replace_file",
    "require",
    "require_new",
    "require_new_file",
    "require_not_shipped",
    "require_space",
    "rule_of",
    "same_file",
    "shipped_path",
    "sync",
    "total_memory",
    "validate_settings",
    "write_atomically",
]
