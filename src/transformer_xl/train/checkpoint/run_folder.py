"""The run folder: where a training run keeps what it needs to go on, and what it made.

::

    recipe.toml            the settings
    environment.json       versions and hardware
    metrics.jsonl          what was measured
    checkpoints/step_…/    what training goes on from (`checkpoints`)
    model/best, model/last model folders
    results.json, sample.json, report.html

Whatever is written is there as a whole or not at all, so that a kill at any moment leaves a run
that goes on.
"""

import fcntl
import json
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import Tensor

from transformer_xl.config import FORMAT_VERSION, Config, ModelConfig
from transformer_xl.config.device import describe_machine
from transformer_xl.config.files import TEMPORARY, UNFINISHED, replace_file, require_space
from transformer_xl.config.recipes import differences, dump_recipe, load_recipe
from transformer_xl.data import Vocab
from transformer_xl.data.vocab import VOCAB_FILE
from transformer_xl.model.pretrained import write_model

RECIPE_FILE = "recipe.toml"
ENVIRONMENT_FILE = "environment.json"
METRICS_FILE = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
_LOCK_FILE = ".lock"

# Settings that may change between the parts of a run: no weight depends on them. The text, the
# prepared corpus, the vocabulary and the model that the run began with may move; of all but the
# last, checksums are compared.
_MAY_DIFFER = (
    *("eval.", "generate.", "train.log_every", "train.save_every", "train.keep_checkpoints"),
    # How the work is divided: it moves nothing but the last digits.
    *("train.parallel", "train.accumulate", "train.recompute", "train.compile"),
    *("train.hang_minutes", "train.max_skips", "train.spike"),
    *("train.init_from", "data.tokenizer"),
    *("data.path", "data.valid_path", "data.test_path", "data.cache_dir", "data.workers"),
    *("data.corpus", "data.verify"),
)
_SAID_BY_CORPUS = (
    *("name", "json_field", "split_by", "valid_fraction", "test_fraction"),
    *("vocab", "vocab_size", "vocab_from"),
)


class RunFolder:
    """The folder of one training run.

    Args:
        path: Where it lies; made by :meth:`begin`.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._locked: int | None = None

    @property
    def holds_run(self) -> bool:
        """Whether a run was begun here."""
        return (self.path / RECIPE_FILE).is_file()

    def check(self, config: Config) -> None:
        """Check that a run with these settings may begin or go on here.

        Raises:
            FileExistsError: The folder holds something else.
            ValueError: The folder holds the run of another recipe.
        """
        if not self.holds_run:
            if self.path.exists() and (not self.path.is_dir() or self._holds_something()):
                raise FileExistsError(
                    f"{self.path} exists and is no run folder: nothing in it was touched; "
                    "give another --out"
                )
            return
        other = load_recipe(self.path / RECIPE_FILE, is_stored=True)
        if not config.model.vocab_size:
            # The corpus that decides it has not been read yet.
            other = replace(other, model=replace(other.model, vocab_size=0))
        if config.data.reset_at is not None and config.model.reset_at is None:
            other = replace(other, model=replace(other.model, reset_at=None))
        free = _MAY_DIFFER
        if config.data.corpus is not None:
            # It is compared with what they say, and its checksums with those of the run.
            free += tuple(f"data.{name}" for name in _SAID_BY_CORPUS)
        wrong = [line for line in differences(other, config) if not line.startswith(free)]
        if wrong:
            raise ValueError(
                f"{self.path} holds a run of another recipe (there, here): {'; '.join(wrong)}. "
                "Give another --out, or the same settings to go on there, or delete the folder"
            )

    def begin(self, config: Config, n_parameters: int) -> None:
        """Make the folder of a new run; remove from an old one what a killed program left.

        Until the program ends or :meth:`close` is called, nobody else can train in it.

        Raises:
            OSError: The folder cannot be written, or its disk has too little room.
            RuntimeError: Another program is training in it.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock()
        except OSError as error:
            raise OSError(
                f"cannot write to the run folder {self.path}: {error.strerror}"
            ) from error
        for left in self.path.glob(f"{CHECKPOINTS}/{UNFINISHED}*"):
            shutil.rmtree(left)
        for left in self.path.glob(f"model/*/{TEMPORARY}"):
            left.unlink()
        if not self.holds_run:
            # Weights, for a checkpoint two more numbers for each, three with an average, and one
            # more while writing.
            numbers = 3 + (config.train.average != "none")
            copies = 2 + numbers * (config.train.keep_checkpoints + 1)
            require_space(self.path, 4 * n_parameters * copies, "this run")
            # The recipe makes it a run folder, so it comes first.
            replace_file(self.path / RECIPE_FILE, dump_recipe(config).encode())
        if not (self.path / ENVIRONMENT_FILE).exists():
            self.write_json(ENVIRONMENT_FILE, _environment())

    def close(self) -> None:
        """Let others train in the folder."""
        if self._locked is not None:
            os.close(self._locked)
            self._locked = None

    def _lock(self) -> None:
        self.close()
        self._locked = os.open(self.path / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise RuntimeError(
                f"another program is training in {self.path}: wait for it, or give another --out"
            ) from None
        except OSError:
            # Some network disks have no locks.
            self.close()

    def _holds_something(self) -> bool:
        # What a kill in `begin` leaves is ours.
        ours = (_LOCK_FILE, f".{RECIPE_FILE}.")
        return any(not path.name.startswith(ours) for path in self.path.iterdir())

    def save_model(
        self, name: str, config: ModelConfig, weights: Mapping[str, Tensor], vocab: Vocab
    ) -> None:
        """Write the model folder ``model/best`` or ``model/last``, weights last."""
        folder = self.path / "model" / name
        folder.mkdir(parents=True, exist_ok=True)
        # Its last file; where it is, the vocabulary is whole.
        if not (folder / VOCAB_FILE).exists():
            vocab.save(folder)
        replace_file(folder / "README.md", _model_card(config, weights, vocab, name).encode())
        write_model(config, weights, folder)

    def write_json(self, name: str, values: dict[str, Any]) -> None:
        """Write a JSON file of the folder."""
        content = json.dumps(values, indent=2, ensure_ascii=False) + "\n"
        replace_file(self.path / name, content.encode("utf-8", "surrogateescape"))


def _environment() -> dict[str, Any]:
    packages = ("torch", "numpy", "safetensors", "tokenizers")
    return {
        "format_version": FORMAT_VERSION,
        **describe_machine(),
        "command": " ".join(sys.argv),
        "packages": {
            # What runs, which need not be installed. The package stands above this room, so it is
            # not imported.
            "transformer-xl": sys.modules["transformer_xl"].__version__,
            **{name: version(name) for name in packages},
        },
    }


def _model_card(config: ModelConfig, weights: Mapping[str, Tensor], vocab: Vocab, name: str) -> str:
    n_parameters = sum(x.numel() for x in weights.values())
    return f"""---
library_name: transformer-xl
pipeline_tag: text-generation
---

# Transformer-XL, the {name} model of a run

{n_parameters:,} parameters: {config.n_layer} layers, d_model {config.d_model},
{config.n_head} heads of {config.head_width}, d_inner {config.d_inner}, memory {config.mem_len}.
Vocabulary: {len(vocab):,} {vocab.kind}.

```
txl eval FOLDER
txl generate FOLDER --prompt "..."
```

```python
import transformer_xl as txl
model = txl.TransformerXL.from_pretrained("FOLDER")
vocab = txl.load_vocab("FOLDER")
```
"""
