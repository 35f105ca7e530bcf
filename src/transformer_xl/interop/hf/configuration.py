"""The settings file of a model folder, as transformers reads and writes it."""

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from transformer_xl.config import (
    FORMAT_VERSION,
    GONE,
    MODEL_TYPE,
    Count,
    ModelConfig,
    create_from_stored,
    fields_of,
    locate_here,
    near,
    validate_settings,
)
from transformer_xl.errors import SettingsError

# Keys that transformers expects at the top level, and that our loader keeps.
_TRANSFORMERS_KEYS = ("architectures", "auto_map", "origin", "eval", "preface")


def path_of(name: str | os.PathLike) -> str | os.PathLike:
    """Return the folder of a shipped model; other names and paths are left to transformers."""
    location = locate_here(os.fspath(name))
    return name if location is None or location.is_path else location.path


@dataclasses.dataclass
class _Calls:
    """Settings of calls, which only transformers has."""

    segment_len: Count = 512
    use_cache: bool = True


_SETTINGS = tuple(fields_of(ModelConfig))
# Of earlier versions: ignored at their defaults, and named where they had an effect.
_GONE = tuple(name.removeprefix("model.") for name in GONE if name.startswith("model."))
_OTHERS = vars(PreTrainedConfig()).keys()
_CALLS = dataclasses.asdict(_Calls())
_DEFAULTS = {**_CALLS, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def _resolve_aliases(settings: Mapping[str, Any], aliases: Mapping[str, str]) -> dict[str, Any]:
    """Return settings with each alias, such as ``hidden_size``, replaced by the name it stands for.

    Raises:
        SettingsError: An alias and its setting have different values.
    """
    resolved = dict(settings)
    for alias, name in aliases.items():
        if alias not in resolved:
            continue
        value = resolved.pop(alias)
        if resolved.setdefault(name, value) != value:
            raise SettingsError(
                f"{alias}={value!r} contradicts {name}={resolved[name]!r}: both are the same "
                "setting; give one of them"
            )
    return resolved


class TransformerXLConfig(PreTrainedConfig):
    """Settings of a model: those of :class:`~transformer_xl.config.ModelConfig` by their names.

    The file is the one that our own loader reads; settings that only transformers has are in its
    section ``transformers``.

    Args:
        preface: Tokens that ``generate`` reads before a text that begins; None: none.
        transformers: Settings of transformers: that section of the file.
        settings: Those of :class:`~transformer_xl.config.ModelConfig`; ``segment_len``: longer
            inputs are read segment by segment, with the memory; ``use_cache``: whether calls return
            the memory; and further ones of transformers (``num_labels``, ``pad_token_id``, ...).
            They take precedence over those in ``transformers``. Names of transformers, such as
            ``hidden_size`` for ``d_model``, are aliases.

    Raises:
        SettingsError: A setting of the model is out of range, does not fit another one or
            contradicts its alias; or a name is misspelt.
    """

    model_type = MODEL_TYPE
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012
    attribute_map = {  # noqa: RUF012
        "hidden_size": "d_model",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
        "tie_word_embeddings": "tie_embeddings",
    }

    def __init__(
        self,
        *,
        preface: list[int] | None = None,
        transformers: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        section = _resolve_aliases(transformers or {}, self.attribute_map)
        keywords = _resolve_aliases(settings, self.attribute_map)
        if "num_labels" in keywords and keywords["num_labels"] != len(section.get("id2label", ())):
            # The stored names belong to another number of labels.
            section.pop("id2label", None)
            section.pop("label2id", None)
        # None of these is not given.
        keywords = {k: x for k, x in keywords.items() if x is not None or k not in _CALLS}
        values = {**_DEFAULTS, **section, **keywords}
        calls = {name: values[name] for name in _CALLS if values[name] is not None}
        for name, value in (_CALLS | validate_settings(_Calls, calls)).items():
            setattr(self, name, value)
        # Validated, and completed with defaults.
        model_values = {name: values[name] for name in (*_SETTINGS, *_GONE) if name in values}
        if values.get("format_version") is None:
            model = ModelConfig(**model_values)
        else:
            model = create_from_stored(ModelConfig, model_values)
        # Also those of other kinds, at their defaults: transformers changes only what is there.
        for name in _SETTINGS:
            setattr(self, name, getattr(model, name))
        self.preface = preface

        set_here = {*_CALLS, *_SETTINGS, *_GONE, "format_version", "model_type"}
        others = {name: value for name, value in values.items() if name not in set_here}
        # Other unknown names are left to transformers, which keeps them, as are those of a file.
        for name in others.keys() - section.keys() - {*dir(PreTrainedConfig), *_OTHERS}:
            if not name.startswith("_") and (nearest := near(name, (*_SETTINGS, *_CALLS))):
                raise SettingsError(f"{name}: no such setting; did you mean {nearest}?")
        super().__init__(**others)

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike, *args: Any, **kwargs: Any
    ) -> "TransformerXLConfig":
        """Read the settings file of a model folder, or of a shipped model by its name."""
        name = path_of(pretrained_model_name_or_path)
        return super().from_pretrained(name, *args, **kwargs)

    def to_model_config(self) -> ModelConfig:
        """Return only the settings of the model.

        Raises:
            SettingsError: One is out of range or does not fit another one.
        """
        return ModelConfig(**{x: getattr(self, x) for x in _SETTINGS if hasattr(self, x)})

    @property
    def has_memory(self) -> bool:
        """Whether there is a memory; without one, a continued text is read again from its start."""
        return self.kind == "lstm" or self.mem_len > 0

    def to_json_string(self, use_diff: bool = True) -> str:
        """Return the text of the settings file, which our own loader reads too."""
        values = self.to_diff_dict() if use_diff else self.to_dict()
        content: dict[str, object] = {"model_type": MODEL_TYPE, "format_version": FORMAT_VERSION}
        content |= dataclasses.asdict(self.to_model_config())
        content |= {
            name: values[name] for name in _TRANSFORMERS_KEYS if values.get(name) is not None
        }
        content["transformers"] = {
            name: value
            for name, value in sorted(values.items())
            if name not in (*content, *_TRANSFORMERS_KEYS)
            and not (name in _DEFAULTS and value == _DEFAULTS[name])
        }
        return json.dumps(content, indent=2) + "\n"
