"""Settings of a model, its data, its training and its evaluation, as frozen dataclasses.

A recipe file is one :class:`Config`; the command line overrides single fields as
``--section.key value``. The line below a field is its help text.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace

from transformer_xl.config.checks import (
    ContradictionError,
    Unused,
    check,
    fields_of,
    refuse_unused,
    require,
)
from transformer_xl.config.data import DataConfig
from transformer_xl.config.evaluation import EvalConfig, GenerateConfig
from transformer_xl.config.model import ModelConfig, TransformerXLConfig
from transformer_xl.config.training import TrainConfig

FORMAT_VERSION = 1
"""Version of the model folder, the run folder and the corpus folder; older ones keep loading."""
MODEL_TYPE = "transformer-xl"
"""The type of our models in the settings file of a model folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Everything a run needs: one recipe.

    Example:
        >>> recipe = Config(model=ModelConfig(mem_len=64), data=DataConfig(path="mine.txt"))
        >>> recipe.model.mem_len, recipe.train.seed
        (64, 1)
    """

    model: ModelConfig
    data: DataConfig
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    generate: GenerateConfig = field(default_factory=GenerateConfig)

    def __post_init__(self) -> None:
        check(self)
        for settings, unused in self._unused():
            refuse_unused(settings, (unused,))
        stages = self.train.stages
        require(
            not stages or stages[-1][2] == self.model.mem_len,
            f"train.stages={[list(x) for x in stages]} must end with the lengths of the model, "
            f"model.mem_len={self.model.mem_len}. For one length from the beginning: "
            "--train.stages with nothing behind it",
            self.train,
            stages=stages and self.train.fitted_stages(self.train.segment_len, self.model.mem_len),
        )
        require(
            self.train.compile != "layers"
            or (isinstance(self.model, TransformerXLConfig) and not self.model.layer_attn_lens),
            "train.compile='layers' needs layers that are alike: those of kind='transformer_xl' "
            f"with layer_attn_lens=[]. model.kind={self.model.kind!r}, model.layer_attn_lens="
            f"{list(self.model.layer_attn_lens)}: set train.compile=true",
            self.train,
            compile=True,
        )
        for name, off in (("reset_memory", 0.0), ("random_mem_len", None)):
            value = getattr(self.train, name)
            require(
                not value or (self.model.start_memory == "empty" and not self.model.ext_len),
                f"train.{name}={value} needs model.start_memory='empty' and model.ext_len=0: "
                "otherwise a shortened memory differs from that of a text that begins later",
                self.train,
                **{name: off},
            )
        has_features = self.data.vocab == "features"
        require(
            has_features == (self.model.n_features > 0),
            f"data.vocab={self.data.vocab!r} with model.n_features={self.model.n_features}: a "
            "model with n_features reads the arrays of data.vocab='features', and no text",
        )

    def _unused(self) -> Iterator[tuple[object, Unused]]:
        """Yield the settings without effect, each with those that it belongs to."""
        if not self.model.has_attention:
            about = f"model.kind={self.model.kind!r}: its layers"
            yield self.train, Unused("recompute", f"{about} keep what they computed")
            yield self.train, Unused("compile", f"{about} run as their library wrote them")
            yield self.train, Unused("random_mem_len", f"{about} have a state, not positions")
        elif not self.model.mem_len:
            for name in ("reset_memory", "random_mem_len"):
                yield self.train, Unused(name, "model.mem_len=0: no memory")
        elif len(self.train.mem_lens(self.model.mem_len)) == 1:
            about = f"model.mem_len={self.model.mem_len}: it must be at least twice as long"
            yield self.train, Unused("random_mem_len", about)
        if self.data.completion_at is None and self.model.completion_at is None:
            about = "data.completion_at=None: no token is outside of a completion"
            yield self.train, Unused("prompt_loss_weight", about)
        if self.data.vocab == "features":
            about = "data.vocab='features': there is no text"
            of_text = ("window", "dynamic", "ngram_cache")
            yield from ((self.eval, Unused(name, about)) for name in of_text)
            yield from ((self.generate, Unused(x.name, about)) for x in fields(self.generate))
        lengths = ("attn_len", "clamp_len", "ext_len")
        yield from ((self.eval, x) for x in self.model.unused() if x.name in lengths)

    def to_toml(self) -> str:
        """Return the recipe as a file, without what is None, which TOML cannot express."""
        import tomli_w

        values = {
            section: {name: value for name, value in settings.items() if value is not None}
            for section, settings in asdict(self).items()
        }
        return tomli_w.dumps(values)

    def differences(self, other: "Config") -> list[str]:
        """List the differences to another recipe, as ``section.key: this, other``."""
        lines = []
        for section in fields(self):
            left, right = getattr(self, section.name), getattr(other, section.name)
            # A setting that one kind of model does not have is at its default there.
            for name in {**fields_of(type(left)), **fields_of(type(right))}:
                a, b = getattr(left, name), getattr(right, name)
                if a != b:
                    lines.append(f"{section.name}.{name}: {a!r}, {b!r}")
        return lines

    def changed(
        self, changes: Mapping[str, Mapping[str, object]], say: Callable[[str], None]
    ) -> "Config":
        """Return the recipe with other settings in place of its own.

        Where settings of the recipe contradict the new ones, or have no effect beside them, they
        give way, which ``say`` is told. New ones never do.

        Args:
            changes: New settings by section and name.
            say: Takes a line on each setting that gave way, and why.

        Raises:
            SettingsError: A new setting is invalid, or contradicts another one.
        """
        sections = {x.name: dict(changes.get(x.name, {})) for x in fields(self)}
        why: dict[str, str] = {}
        while True:
            try:
                config = replace(
                    self,
                    **{x: replace(getattr(self, x), **new) for x, new in sections.items()},
                )
                break
            except ContradictionError as error:
                kind = error.settings if isinstance(error.settings, type) else type(error.settings)
                section = next(_SECTIONS[x] for x in kind.__mro__ if x in _SECTIONS)
                is_new = error.name in changes.get(section, {})
                if is_new or (error.name, error.value) in sections[section].items():
                    raise
                sections[section][error.name] = error.value
                # Without the remedy.
                why.setdefault(f"{section}.{error.name}", re.split(r"[:;]|\. ", str(error))[0])
        for name, reason in why.items():
            section, _, key = name.partition(".")
            # Lists, as in a recipe.
            value = json.loads(json.dumps(getattr(getattr(config, section), key)))
            say(f"note: {reason}; {name}={value!r} is taken")
        return config


_SECTIONS = {x.type: x.name for x in fields(Config)}
