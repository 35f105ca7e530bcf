"""What all models for transformers share: the network, its folder, inputs and the cache."""

# Methods of transformers are overridden with the arguments that they are called with.
# pyright: reportIncompatibleMethodOverride=false, reportAttributeAccessIssue=false

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.utils import logging

from transformer_xl.errors import CheckpointError, InputError, SettingsError
from transformer_xl.interop.hf.cache import TransformerXLCache, require_cache
from transformer_xl.interop.hf.configuration import TransformerXLConfig, path_of
from transformer_xl.interop.hf.inputs import Inputs, Reading, Wanted, read
from transformer_xl.interop.hf.resizing import resize_vocabulary
from transformer_xl.model import (
    Decoder,
    Lengths,
    Memory,
    ModelFolder,
    WeightsFiles,
    build_model,
    require_loading,
    require_token_inputs,
)

_LOGGER = logging.get_logger(__name__)


class TransformerXLPreTrainedModel(PreTrainedModel):
    """The base of both models: the network, its names in files, unsupported features."""

    config_class = TransformerXLConfig
    config: TransformerXLConfig
    base_model_prefix = "transformer"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DecoderLayer"]  # noqa: RUF012

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__(config)
        settings = config.to_model_config()
        require_token_inputs(settings)
        self.transformer = build_model(settings)
        self._tied_weights_keys = _second_names(self)
        self.register_load_state_dict_pre_hook(_with_names_of_files)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Return the second names of tied weights, and the first ones."""
        return dict(self._tied_weights_keys or {})

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialize the classification head; the network initializes itself."""
        if isinstance(module, nn.Linear) and module is getattr(self, "score", None):
            nn.init.normal_(module.weight, 0.0, self.config.init_std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)

    def _freeze(self) -> None:
        """Freeze what only the softmax uses, unless it is used.

        Called again after loading, which creates new parameters.
        """
        # A tied weight has only its first name here, which is not that of the softmax.
        for name, parameter in self.named_parameters():
            if name.startswith("transformer.softmax."):
                parameter.requires_grad_(False)

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        return self.config.vocab_size

    def get_input_embeddings(self) -> nn.Module:
        """Return the word embeddings, whose output can be given as ``inputs_embeds``."""
        return self.transformer.embedding

    def resize_token_embeddings(
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> nn.Module:
        """Add tokens at the end of the vocabulary, or remove them from there.

        An adaptive softmax takes them into its last cluster. A preface that has one of the removed
        tokens is removed, too, with a warning.

        Args:
            new_num_tokens: The new size. None: as it is, up to the multiple.
            pad_to_multiple_of: The size is rounded up to a multiple of it.
            mean_resizing: Whether weights of new tokens are the mean of the others; False: drawn.

        Raises:
            ValueError: The size does not fit other settings; the embedding or the softmax has an
                adapter.
        """
        size = self.config.vocab_size if new_num_tokens is None else new_num_tokens
        if pad_to_multiple_of is not None:
            size = -(-size // pad_to_multiple_of) * pad_to_multiple_of
        if size != self.config.vocab_size:
            # Validates the size.
            size = replace(self.transformer.config, vocab_size=size).vocab_size
            resize_vocabulary(self.transformer, size, draws=not mean_resizing)
            self.config.vocab_size = size
            if not self.transformer.is_preface(self.config.preface or (), size):
                self.config.preface = None
                _LOGGER.warning(
                    f"config.preface has tokens beyond the new vocabulary of {size}: it is None "
                    "now, and texts are generated without one"
                )
            self._freeze()
        return self.transformer.embedding

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> "TransformerXLPreTrainedModel | tuple[TransformerXLPreTrainedModel, dict[str, Any]]":
        """Read a model folder, as transformers documents it, or a shipped model by its name.

        The files of a local folder are verified first, and what loading them takes is limited;
        transformers verifies its own downloads.

        Raises:
            CheckpointError: A file is damaged, or lacks weights of the network.
            InputError: Loading would take more memory than the machine has, or too much time.
        """
        name = pretrained_model_name_or_path
        if name is not None:
            name = path_of(name)
            folder = Path(name, kwargs.get("subfolder") or "")
            weights = ModelFolder(folder, kwargs.get("variant")).weights
            if (path := weights.path).is_file():
                config, n_tensors = kwargs.get("config"), weights.verify()
                if not isinstance(config, TransformerXLConfig):
                    config = TransformerXLConfig.from_pretrained(folder)
                try:
                    # In half precision, as transformers may load it.
                    require_loading(config.to_model_config(), n_tensors, path, number_bytes=2)
                except OverflowError as error:
                    raise CheckpointError(f"{path} does not fit its config.json: {error}") from None
        wants_info = kwargs.pop("output_loading_info", False)
        loaded: Any = super().from_pretrained(name, *args, output_loading_info=True, **kwargs)
        model, info = loaded
        lacking = {x for x in info["missing_keys"] if x.startswith(f"{cls.base_model_prefix}.")}
        if not getattr(model, "hf_device_map", None):
            # transformers neither reports nor initializes a missing weight that two modules share.
            lacking |= {name for name, x in model.named_parameters() if x.is_meta}
        if lacking:
            raise CheckpointError(
                f"the weights of this folder are not those of its config.json: {min(lacking)} and "
                f"{len(lacking) - 1} others are missing"
            )
        model._freeze()
        return (model, info) if wants_info else model

    def save_pretrained(
        self,
        save_directory: str | os.PathLike,
        is_main_process: bool = True,
        state_dict: Mapping[str, Tensor] | None = None,
        **kwargs: Any,
    ) -> None:
        """Write a model folder for transformers and for our own loader.

        If the model has adapters (``add_adapter``), only these are written, as transformers
        documents it.

        Raises:
            ValueError: The weights could not be loaded again, modules are wrapped in another
                way, or settings of the model were changed; nothing is written.
        """
        if getattr(self, "_hf_peft_config_loaded", False):
            state = None if state_dict is None else dict(state_dict)
            super().save_pretrained(save_directory, is_main_process, state, **kwargs)
            return
        if asdict(self.transformer.config) != asdict(self.config.to_model_config()):
            raise SettingsError(
                "settings of model.config were changed after the model was built: change them "
                "back, or load the folder with from_pretrained(folder, NAME=VALUE)"
            )
        if not self.transformer.is_preface(self.config.preface or (), self.vocab_size):
            raise SettingsError(
                f"config.preface={self.config.preface!r} could not be loaded again: give a list of "
                f"tokens below {self.vocab_size}, or None"
            )
        self.transformer.require_own_weights()
        state = self.state_dict() if state_dict is None else state_dict
        prefix, second = f"{self.base_model_prefix}.", self._tied_weights_keys or {}
        stored = {name.removeprefix(prefix): x for name, x in state.items() if name not in second}
        if not is_main_process:
            super().save_pretrained(save_directory, is_main_process, stored, **kwargs)
            return
        WeightsFiles.require_storable(stored)
        super().save_pretrained(save_directory, is_main_process, stored, **kwargs)
        folder = ModelFolder(Path(save_directory), kwargs.get("variant"))
        weights = folder.weights.path
        for index in weights.parent.glob("*.safetensors.index*.json"):
            if weights != index and weights.stat().st_mtime_ns < index.stat().st_mtime_ns:
                # Sharded weights were written; loaders would prefer the old single file.
                weights.unlink()
        folder.weights.add_checksums()

    def _lengths(self) -> Lengths:
        # Everything read enters the memory, so no extended context is read again.
        return Lengths.of(self.transformer.config, segment_len=self.config.segment_len, ext_len=0)

    def _inputs(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        past_key_values: Any,
        inputs_embeds: Tensor | None,
        others: dict[str, Any],
    ) -> tuple[Inputs, TransformerXLCache, Wanted]:
        """Return the validated inputs of a call, the cache before them, and what else is wanted.

        Raises:
            TypeError: The cache is of another kind, or an argument is unknown.
            InputError: Shapes do not match, or attention weights are wanted while activations are
                recomputed.
        """
        flags = []
        for name in ("output_hidden_states", "output_attentions"):
            value = others.pop(name, None)
            flags.append(bool(getattr(self.config, name, False) if value is None else value))
        wanted = Wanted(*flags)
        if wanted.attentions and self.transformer.recompute and torch.is_grad_enabled():
            raise InputError(
                "output_attentions=True: attention weights are not recomputed in the backward "
                "pass; call the model under torch.no_grad(), or activation_checkpointing_disable()"
            )
        # transformers passes None for unused arguments.
        if unknown := sorted(name for name, value in others.items() if value is not None):
            raise TypeError(
                f"{unknown[0]} is not an argument of {type(self).__name__} and would be ignored: "
                "leave it out"
            )
        if inputs_embeds is not None:
            inputs_embeds = self.transformer.widened(inputs_embeds)
        inputs = Inputs.of(input_ids, inputs_embeds, attention_mask, self.config.vocab_size)
        cache = require_cache(past_key_values)
        if cache is None:
            cache = TransformerXLCache(self.transformer.start_memory(inputs.segment.shape[0]))
        return inputs, cache, wanted

    def _memory(self, cache: TransformerXLCache) -> Memory:
        """Return the memory of a cache; with keys and values if the weights are fixed."""
        is_fixed = not torch.is_grad_enabled() and not self.training
        # Buffers with spare capacity are no values of a compiled program.
        is_fixed = is_fixed and not torch.compiler.is_compiling()
        return self.transformer.keep(cache.mems) if is_fixed else cache.mems

    def _read(
        self, inputs: Inputs, cache: TransformerXLCache, wanted: Wanted, last: int | None = None
    ) -> Reading:
        """Read inputs of any length after a cache."""
        return read(self.transformer, inputs, self._memory(cache), self._lengths(), last, wanted)

    def _cache_after(
        self,
        cache: TransformerXLCache,
        mems: Memory | Decoder,
        inputs: Inputs,
        use_cache: bool | None,
    ) -> TransformerXLCache | None:
        use_cache = self.config.use_cache if use_cache is None else use_cache
        if not (use_cache and self.config.has_memory):
            return None
        return cache.after(mems, inputs.segment.tokens, inputs.segment.shape[1])

    @property
    def gradient_checkpointing(self) -> bool:
        """Whether activations are recomputed in the backward pass; transformers reads it."""
        return bool(self.transformer.recompute)

    def _set_gradient_checkpointing(
        self,
        enable: bool = True,
        gradient_checkpointing_func: Callable[..., object] = checkpoint,
        every_n_layers: int = 1,
    ) -> None:
        """Have layers recompute their activations in the backward pass, or no longer.

        Raises:
            InputError: The layers cannot, or in the reentrant way, which loses gradients of what
                all layers share.
        """
        model = self.transformer
        if not enable:
            model.recompute = False
            return
        if not model.recomputes:
            raise InputError(
                f"activation checkpointing: layers of kind={self.config.kind!r} keep what they "
                "computed; to save memory, load the model with a smaller segment_len"
            )
        if getattr(gradient_checkpointing_func, "keywords", {}).get("use_reentrant"):
            raise InputError(
                "activation checkpointing with use_reentrant=True loses gradients of what all "
                "layers share: leave it out, or give use_reentrant=False"
            )
        model.recompute = partial(gradient_checkpointing_func, use_reentrant=False)
        model.recompute_every = every_n_layers


def _second_names(model: nn.Module) -> dict[str, str]:
    """Map the second names of tied weights to the first."""
    first: dict[int, str] = {}
    second = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            second[name] = first[id(parameter)]
    return second


def _with_names_of_files(
    model: nn.Module, state: dict[str, Tensor], prefix: str, *others: object
) -> None:
    """Rename weights of a file, which has our names, one for each, for ``load_state_dict``."""
    assert isinstance(model, TransformerXLPreTrainedModel)
    inner = f"{prefix}{model.base_model_prefix}."
    for name, _ in model.transformer.named_parameters():
        if prefix + name in state:
            state[inner + name] = state.pop(prefix + name)
    for second, first in (model._tied_weights_keys or {}).items():
        if prefix + second not in state and prefix + first in state:
            state[prefix + second] = state[prefix + first]
