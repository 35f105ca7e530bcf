"""The run folder: settings, metrics, checkpoints, models and reports of a training run.

::

    recipe.toml            the settings
    environment.json       versions, hardware, command and date of its beginning
    metrics.jsonl          what was measured
    checkpoints/step_…/    the state of training (`checkpoints`)
    model/best, model/last model folders
    results.json, sample.json, report.html

All writes are atomic, so that a run can be resumed after being killed at any moment.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jinja2 import Template
from torch import Tensor

from transformer_xl.config import (
    FORMAT_VERSION,
    Config,
    ModelConfig,
    describe_machine,
    load_recipe,
    locked,
    remove_temporary,
    replace_file,
    require_not_shipped,
    require_space,
)
from transformer_xl.data import Vocab, is_vocabulary
from transformer_xl.errors import SettingsError
from transformer_xl.model import ModelFolder
from transformer_xl.train.checkpoint.checkpoints import (
    UNFINISHED,
    About,
    checkpoints_in,
    read_about,
)

RECIPE_FILE = "recipe.toml"
ENVIRONMENT_FILE = "environment.json"
METRICS_FILE = "metrics.jsonl"
RESULTS_FILE = "results.json"
SAMPLE_FILE = "sample.json"
CHECKPOINTS = "checkpoints"
_LOCK_FILE = ".lock"
_CARD = Path(__file__).with_name("model_card.md")
OF_RAW_TEXT = "a run of an earlier version, which normalized no text, goes on with --data.raw True"
"""The remedy where the tokens or the vocabulary of a run are others than those of its text."""

# Settings that may change when a run is resumed, as no weight depends on them. The text, the
# prepared corpus, the vocabulary and the initial model may be moved, and runs of earlier versions
# read raw text, whatever their recipe says; checksums of all but the model are compared.
_MAY_DIFFER = (
    *("eval.", "generate.", "train.log_every", "train.save_every", "train.keep_checkpoints"),
    # How the work is divided: results are the same up to rounding.
    *("train.parallel", "train.accumulate", "train.recompute", "train.compile"),
    *("train.hang_minutes", "train.max_skips"),
    *("train.init_from", "data.tokenizer"),
    *("data.path", "data.valid_path", "data.test_path", "data.cache_dir", "data.workers"),
    *("data.corpus", "data.verify", "data.raw"),
)
# Compared with the prepared corpus, whose checksums are compared with those of the run.
_SAID_BY_CORPUS = (
    *("data.name", "data.json_field", "data.split_by", "data.valid_fraction"),
    *("data.test_fraction", "data.vocab", "data.vocab_size", "data.vocab_from"),
)


class RunFolder:
    """The folder of one training run; :meth:`begin` creates it."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._lock = ExitStack()

    @property
    def holds_run(self) -> bool:
        """Whether the folder holds a run."""
        return (self.path / RECIPE_FILE).is_file()

    @property
    def checkpoints(self) -> list[Path]:
        """The folders of the checkpoints, the newest first."""
        return checkpoints_in(self.path / CHECKPOINTS)

    def last_state(self) -> About:
        """Return ``state.json`` of the newest checkpoint: step, seconds, place in the text.

        Raises:
            IndexError: There is none.
        """
        return read_about(self.checkpoints[0])

    def check(self, config: Config) -> None:
        """Require that a run with these settings can be started or resumed here.

        Raises:
            FileExistsError: The folder holds something else.
            OSError: It cannot be written.
            PermissionError: It is that of a shipped model.
            SettingsError: The folder holds the run of another recipe, or cannot hold this one.
        """
        self.require_writable()
        if not self.holds_run:
            # But for files that a process killed in begin() leaves.
            ours = (_LOCK_FILE, f".{RECIPE_FILE}.")
            if self.path.exists() and not (
                self.path.is_dir() and all(x.name.startswith(ours) for x in self.path.iterdir())
            ):
                raise FileExistsError(
                    f"{self.path} exists and is no run folder: nothing in it was touched; "
                    "give another --out"
                )
            try:
                config.to_toml().encode()
            except UnicodeEncodeError as error:
                raise SettingsError(
                    f"{error.object[max(error.start - 60, 0) : error.end]!r}: the settings must be "
                    f"UTF-8, as {RECIPE_FILE} of the run folder is: rename the file or folder, or "
                    "change the text"
                ) from None
            return
        other = load_recipe(self.path / RECIPE_FILE, is_stored=True)
        if not config.model.vocab_size:
            # It depends on the corpus, which has not been read yet.
            other = replace(other, model=replace(other.model, vocab_size=0))
        # completion_at first, as it needs a reset_at.
        for name in ("completion_at", "reset_at"):
            if getattr(config.data, name) is not None and getattr(config.model, name) is None:
                other = replace(other, model=replace(other.model, **{name: None}))
        free = _MAY_DIFFER if config.data.corpus is None else _MAY_DIFFER + _SAID_BY_CORPUS
        wrong = [line for line in other.differences(config) if not line.startswith(free)]
        if wrong:
            remedy = ""
            if all(x.startswith("model.vocab_size") for x in wrong):
                remedy = f"; {OF_RAW_TEXT}"
            elif (self.path / "model/best").is_dir() and all(x.startswith("train.") for x in wrong):
                remedy = (
                    ". To train on from its weights, with a learning rate that begins anew: txl "
                    f"train {self.path} --out NEW"
                )
            raise SettingsError(
                f"{self.path} holds a run of another recipe (there, here): {'; '.join(wrong)}. "
                f"Give another --out, or the same settings to go on there, or delete the folder"
                f"{remedy}"
            )

    def require_writable(self) -> None:
        """Require that files can be written here, before any work is done."""
        require_not_shipped(self.path)
        path = self.path.absolute()
        place = next(x for x in (path, *path.parents) if x.exists())
        if place.is_dir() and not os.access(place, os.W_OK):
            raise PermissionError(
                f"cannot write to the run folder {self.path}: {place} is read-only, or belongs to "
                "another user; give another --out"
            )

    def begin(self, config: Config, n_parameters: int) -> None:
        """Create the folder of a new run, or clean up an old one after a kill, and lock it.

        The lock is held until :meth:`close` is called or the process ends.

        Raises:
            OSError: The folder cannot be written, or its disk has too little space.
            LockedError: Another process is training in it.
            SettingsError: The folder holds the run of another recipe.
        """
        self.check(config)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.close()
            held = f"another program is training in {self.path}: wait for it, or give another --out"
            self._lock.enter_context(locked(self.path / _LOCK_FILE, held))
        except OSError as error:
            raise OSError(
                f"cannot write to the run folder {self.path}: {error.strerror or error}"
            ) from error
        for left in self.path.glob(f"{CHECKPOINTS}/{UNFINISHED}*"):
            shutil.rmtree(left)
        # Not of reports, which another process may be writing.
        for name in (RECIPE_FILE, ENVIRONMENT_FILE, METRICS_FILE, RESULTS_FILE, SAMPLE_FILE):
            remove_temporary(self.path, name)
        for folder in self.path.glob("model/*/"):
            remove_temporary(folder)
        if not self.holds_run:
            # Two models; for each checkpoint the weights, two optimizer states and the average; one
            # checkpoint more while writing.
            numbers = 3 + (config.train.average != "none")
            copies = 2 + numbers * (config.train.keep_checkpoints + 1)
            require_space(self.path, 4 * n_parameters * copies, "this run")
            # The recipe makes it a run folder, so it comes first.
            replace_file(self.path / RECIPE_FILE, config.to_toml().encode())
        if not (self.path / ENVIRONMENT_FILE).exists():
            # The package need not be installed.
            packages = {"transformer-xl": sys.modules["transformer_xl"].__version__}
            for name in ("torch", "numpy", "safetensors", "tokenizers"):
                packages[name] = version(name)
            about = {"format_version": FORMAT_VERSION, **describe_machine()}
            about |= {"command": shlex.join(sys.argv), "date": date.today().isoformat()}
            about |= {"revision": _revision(), "packages": packages}
            self.write_json(ENVIRONMENT_FILE, about)

    def close(self) -> None:
        """Release the lock."""
        self._lock.close()

    def save_model(
        self, name: str, config: Config, weights: Mapping[str, Tensor], vocab: Vocab | None
    ) -> None:
        """Write the model folder ``model/best`` or ``model/last``, weights last."""
        folder = self.path / "model" / name
        folder.mkdir(parents=True, exist_ok=True)
        # Written last, so that it marks a complete vocabulary.
        if vocab is not None and not is_vocabulary(folder):
            vocab.save(folder)
        n_parameters = sum(x.numel() for x in weights.values())
        self.write_card(name, config.model, vocab, n_parameters)
        ModelFolder(folder).write(config.model, weights, {"eval": asdict(config.eval)})

    def write_card(
        self,
        name: str,
        config: ModelConfig,
        vocab: Vocab | None,
        n_parameters: int,
        measured: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Write the card of the model ``best`` or ``last``.

        Args:
            name: Which of them.
            config: Its settings.
            vocab: Its vocabulary; None without text.
            n_parameters: The number of its weights.
            measured: Rows of evaluations with several memory lengths.
        """
        template = Template(_CARD.read_text(), trim_blocks=True, keep_trailing_newline=True)
        about = {"name": name, "config": config, "vocab": vocab, "n_parameters": n_parameters}
        card = template.render(**about, measured=measured)
        replace_file(self.path / "model" / name / "README.md", card.encode())

    def write_json(self, name: str, values: Mapping[str, object]) -> None:
        """Write a JSON file of the folder."""
        content = json.dumps(values, indent=2, ensure_ascii=False) + "\n"
        replace_file(self.path / name, content.encode("utf-8", "surrogateescape"))


def _revision() -> str | None:
    """Return the commit of the sources, with ``-dirty`` if tracked files were changed.

    None: they are no checkout, or git is not installed.
    """
    sources = Path(__file__).resolve().parents[3]
    if sources.name != "src" or not (sources.parent / ".git").exists():
        return None
    words = ["git", "-C", str(sources.parent), "describe", "--always", "--abbrev=10", "--dirty"]
    # Without locks, git writes nothing there.
    environment = os.environ | {"GIT_OPTIONAL_LOCKS": "0"}
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=60)
        return done.stdout.strip() or None
    return None
