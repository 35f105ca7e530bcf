"""The models for transformers: a language model, a classifier, and their folder."""

# Methods of transformers are overridden with the arguments that they are called with.
# pyright: reportIncompatibleMethodOverride=false, reportAttributeAccessIssue=false

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import (
    CausalLMOutputWithPast,
    SequenceClassifierOutputWithPast,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from transformer_xl.interop.hf.configuration import TransformerXLConfig, path_of
from transformer_xl.interop.hf.inputs import (
    IGNORED,
    Inputs,
    TransformerXLCache,
    own_cache,
    read,
    read_to_the_end,
)
from transformer_xl.model import AdaptiveSoftmax, Memory, Stepper, build_model
from transformer_xl.model.arguments import require_token_inputs
from transformer_xl.model.language_model import require_own_weights
from transformer_xl.model.pretrained import (
    add_checksums,
    require_storable,
    verify_weights,
    weights_path,
)
from transformer_xl.model.wrapping import unwrapped

_LOGGER = logging.get_logger(__name__)
_PADDED_BEFORE = (
    "num_items_in_batch counts the first token of each row that is padded on the left, which "
    "nothing predicts, so that a loss over several batches is off by their share: for training set "
    "tokenizer.padding_side = 'right'"
)


class TransformerXLPreTrainedModel(PreTrainedModel):
    """The base of both models: the network, its names in files, unsupported features."""

    config_class = TransformerXLConfig
    config: TransformerXLConfig
    base_model_prefix = "transformer"
    supports_gradient_checkpointing = False
    _no_split_modules = ["DecoderLayer"]  # noqa: RUF012
    # Excludes assisted generation: the memory cannot be rolled back after rejected tokens.
    _is_stateful = True

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__(config)
        own = config.to_model_config()
        require_token_inputs(own)
        self.transformer = build_model(own)
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

    def _freeze(self) -> None:
        """Freeze unused parameters; called again after loading, which creates new parameters."""

    def get_input_embeddings(self) -> nn.Module:
        """Return the word embeddings, whose output can be given as ``inputs_embeds``."""
        return self.transformer.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Refuse: the softmax shares them."""
        raise NotImplementedError(
            "the embeddings cannot be replaced, as the softmax may share their weights: copy other "
            "numbers into the weights of get_input_embeddings(), or hand vectors in as "
            "inputs_embeds"
        )

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, *args: Any, **kwargs: Any
    ) -> nn.Module:
        """Return the embeddings; refuse another number of tokens."""
        if new_num_tokens not in (None, self.config.vocab_size):
            raise NotImplementedError(
                f"the vocabulary has {self.config.vocab_size} tokens and cannot grow or shrink to "
                f"{new_num_tokens}: padding needs no token of its own, an attention_mask marks it"
            )
        return self.transformer.embedding

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Read a model folder, as transformers documents it, or a shipped model by its name.

        The files of a local folder are verified first; transformers verifies its own downloads.

        Raises:
            RuntimeError: A file is damaged, or lacks weights of the network.
        """
        name = pretrained_model_name_or_path
        if name is not None:
            name = path_of(name)
            folder = Path(name, kwargs.get("subfolder") or "")
            if (path := weights_path(folder, kwargs.get("variant"))).is_file():
                verify_weights(path)
        wants_info = kwargs.pop("output_loading_info", False)
        loaded: Any = super().from_pretrained(name, *args, output_loading_info=True, **kwargs)
        model, info = loaded
        own = f"{cls.base_model_prefix}."
        lacking = {name for name in info["missing_keys"] if name.startswith(own)}
        if not getattr(model, "hf_device_map", None):
            # transformers neither reports nor initializes a missing weight that two modules share.
            lacking |= {name for name, x in model.named_parameters() if x.is_meta}
        if lacking:
            raise RuntimeError(
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

        The arguments are those of transformers. If the model has adapters (``add_adapter``), only
        these are written, as transformers documents it.

        Raises:
            ValueError: The weights could not be loaded again, or modules are wrapped in another
                way; nothing is written.
        """
        if getattr(self, "_hf_peft_config_loaded", False):
            given = None if state_dict is None else dict(state_dict)
            super().save_pretrained(save_directory, is_main_process, given, **kwargs)
            return
        own_names = (name for name, _ in self.transformer.named_parameters())
        require_own_weights(own_names, self.config.to_model_config())
        given = self.state_dict() if state_dict is None else state_dict
        prefix, second = f"{self.base_model_prefix}.", self._tied_weights_keys or {}
        own = {name.removeprefix(prefix): x for name, x in given.items() if name not in second}
        folder, variant = Path(save_directory), kwargs.get("variant")
        weights = weights_path(folder, variant)
        before = _version(weights)
        if is_main_process:
            require_storable(own)
        super().save_pretrained(save_directory, is_main_process, own, **kwargs)
        if not is_main_process:
            return
        if weights.suffix != ".json" and before is not None and _version(weights) == before:
            # Sharded weights were written; loaders would prefer the old single file.
            weights.unlink()
        add_checksums(weights_path(folder, variant))

    def _inputs(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        inputs_embeds: Tensor | None,
        others: dict[str, Any],
    ) -> Inputs:
        """Validate the inputs of a call; refuse arguments without effect."""
        for name in ("output_attentions", "output_hidden_states"):
            if others.pop(name, None) or getattr(self.config, name, None):
                raise NotImplementedError(
                    f"{name}=True: layers do not return intermediate results; "
                    "TransformerXL.attention_weights returns attention for a segment"
                )
        if others.pop("head_mask", None) is not None:
            raise NotImplementedError(
                "head_mask: heads cannot be masked in a call; leave it out, or silence head h of "
                "layer n for good by zeros in the columns h * d_head to (h + 1) * d_head of "
                "model.transformer.layers[n].attention.o_proj.weight"
            )
        position_ids = others.pop("position_ids", None)
        for name, value in sorted(others.items()):
            # transformers passes None for unused arguments.
            if value is not None:
                raise TypeError(
                    f"{name} is not an argument of {type(self).__name__} and would be ignored: "
                    "leave it out"
                )
        if inputs_embeds is not None:
            embedding = unwrapped(self.transformer.embedding, "widened")
            if inputs_embeds.shape[-1] == getattr(embedding, "embedding_dim", None):
                inputs_embeds = embedding.widened(inputs_embeds)
        return Inputs.of(input_ids, inputs_embeds, attention_mask, position_ids)

    def _memory_before(self, cache: TransformerXLCache | None, inputs: Inputs) -> Memory:
        """Return the memory before the inputs; with keys and values if the weights are fixed."""
        model = self.transformer
        mems = model.start_memory(inputs.segment.shape[0]) if cache is None else cache.mems
        is_fixed = not torch.is_grad_enabled() and not model.training
        return model.keep(mems) if is_fixed else mems

    def _cache_after(
        self,
        cache: TransformerXLCache | None,
        mems: Memory | Stepper,
        inputs: Inputs,
        use_cache: bool | None,
    ) -> TransformerXLCache | None:
        use_cache = self.config.use_cache if use_cache is None else use_cache
        if not (use_cache and self.config.has_memory):
            return None
        # An empty cache: its memory is replaced.
        before = TransformerXLCache(mems) if cache is None else cache
        return before.after(mems, inputs.segment)


class TransformerXLForCausalLM(TransformerXLPreTrainedModel, GenerationMixin):
    """The language model, whose memory is passed as ``past_key_values``."""

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__(config)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module | None:
        """Return the linear layer of the logits; None for an adaptive softmax."""
        softmax = self.transformer.softmax
        return None if isinstance(softmax, AdaptiveSoftmax) else softmax

    def forward(
        self,
        input_ids: Int[Tensor, "B T"] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Float[Tensor, "B T D"] | None = None,
        labels: Int[Tensor, "B T"] | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        skip_logits: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Read any number of tokens; return log-probabilities of the next tokens as logits.

        Args:
            input_ids: The tokens; with ``past_key_values``, only the new ones.
            attention_mask: 0 where a row is padded, on either side. It may also cover the tokens
                that were read before. None: no padding.
            past_key_values: As returned by the last call.
            inputs_embeds: Vectors in place of tokens, read without embedding.
            labels: The tokens themselves, -100 at ignored positions; each is compared with the
                prediction before it.
            use_cache: Whether to return the memory. None: as configured.
            logits_to_keep: Number of last tokens of which to return logits, or their indices. 0:
                all.
            skip_logits: Return only the loss. None: while training with labels, because logits
                over a large vocabulary would dominate the memory.
            return_dict: False: return a tuple.
            kwargs: ``shift_labels``, targets that are aligned with the predictions already, in
                place of ``labels``; ``num_items_in_batch``, the number of targets in all batches of
                a step, by which the sum of losses is divided; and ``position_ids``, in which a 0
                starts another document of a packed row.

        At padding, the logits are those of a uniform distribution and have no gradient.

        Raises:
            NotImplementedError: Attentions or hidden states are requested.
            TypeError: The cache is of another kind, or an argument is unknown.
            ValueError: Shapes do not match each other or the memory.
        """
        cache = own_cache(past_key_values)
        # Not in the signature: Trainer requires every argument whose name has "label".
        shift_labels = kwargs.pop("shift_labels", None)
        count = kwargs.pop("num_items_in_batch", None)
        inputs = self._inputs(input_ids, attention_mask, inputs_embeds, kwargs)
        targets = inputs.targets(labels, shift_labels)
        if targets is None and count is not None and inputs.has_padding_before():
            _LOGGER.warning_once(_PADDED_BEFORE)
        last = None
        if targets is None and isinstance(logits_to_keep, int) and logits_to_keep:
            last = logits_to_keep
        tokens = inputs.segment.tokens
        is_step = inputs.is_token and not self.training
        if cache is not None and cache.is_stepped and tokens is not None and is_step:
            mems = cache.stepper(self.transformer)
            hidden = mems(tokens[:, 0])[:, None]
        else:
            mems = self._memory_before(cache, inputs)
            hidden, mems = read(self.transformer, inputs, mems, self.config.segment_len, last)
        loss = None if targets is None else self._loss(hidden, *targets, count)
        logits = None
        if skip_logits is None:
            skip_logits = labels is not None and self.training
        if not skip_logits:
            kept: Any = logits_to_keep
            kept = slice(-kept, None) if isinstance(kept, int) else kept.to(hidden.device)
            logits = self.transformer.head.log_probs(hidden[:, kept])
            if inputs.is_real is not None:
                # A loss that the caller computes gets no gradient from padding.
                known = inputs.is_real[:, -hidden.shape[1] :][:, kept, None]
                logits = logits.masked_fill(~known, -math.log(logits.shape[-1]))
        after = self._cache_after(cache, mems, inputs, use_cache)
        out = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=after)
        return out if return_dict is not False else out.to_tuple()

    def _loss(
        self,
        hidden: Float[Tensor, "B T D"],
        targets: Int[Tensor, "B T"],
        has_context: Bool[Tensor, "B T"],
        count: Tensor | int | None,
    ) -> Float[Tensor, ""]:
        place = has_context.to(hidden.device)
        nll = self.transformer.head.nll(hidden[place], targets.to(hidden.device)[place])
        if count is None:
            return nll.mean()
        n_asked = int((targets != IGNORED).sum())
        if n_asked > nll.numel():
            # Targets without a context are excluded only from a count of this batch.
            if bool((torch.as_tensor(count) == n_asked).all()):
                return nll.mean()
            _LOGGER.warning_once(_PADDED_BEFORE)
        return nll.sum() / (count.to(nll.device) if isinstance(count, Tensor) else count)

    @torch.no_grad()
    def generate(self, inputs: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """Continue texts, as transformers documents it.

        With ``past_key_values``, ``input_ids`` are either the whole texts or only their new tokens;
        this is detected by the last tokens that the memory has read.
        """
        cache = own_cache(kwargs.get("past_key_values"))
        tokens = kwargs.get("input_ids") if inputs is None else inputs
        if cache is not None and tokens is not None:
            mask = kwargs.get("attention_mask")
            mask = torch.ones_like(tokens) if mask is None else mask
            if mask.shape == tokens.shape and not cache.is_beginning_of(tokens):
                # transformers expects a mask that covers the past, too.
                mask = torch.cat([mask.new_ones(len(mask), cache.seen), mask], 1)
            kwargs["attention_mask"] = mask
        return super().generate(inputs, *args, **kwargs)

    def _expand_inputs_for_generation(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Repeat each text and its memory for beam search."""
        tokens, kwargs = super()._expand_inputs_for_generation(**kwargs)
        cache = kwargs.get("past_key_values")
        if cache is not None and tokens is not None:
            times = len(tokens) // max(cache.batch_size, 1)
            kwargs["past_key_values"] = cache.repeated(times) if times > 1 else cache
        return tokens, kwargs

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Remove the tokens that were read already, if there is a memory.

        Raises:
            ValueError: No token is left, or vectors would have to be read again.
        """
        if not self.config.has_memory:
            next_sequence_length = None
            if inputs_embeds is not None:
                raise ValueError("mem_len=0: vectors that are not remembered cannot be continued")
        if next_sequence_length is not None and next_sequence_length < 1:
            raise ValueError(
                f"the memory has read all of the {input_ids.shape[1]} tokens: give at least one "
                "more, the last one that was generated"
            )
        cache = own_cache(kwargs.get("past_key_values"))
        if cache is not None:
            # Not the cache that was given to ``generate``: the caller may use it again.
            cache.is_stepped = not getattr(cache, "_is_user_defined", False)
        return super().prepare_inputs_for_generation(
            input_ids,
            next_sequence_length=next_sequence_length,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )


# Trainer shifts labels for label smoothing only for these classes; ``register`` does not add ours.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[TransformerXLConfig.model_type] = (
    TransformerXLForCausalLM.__name__
)


class TransformerXLForSequenceClassification(TransformerXLPreTrainedModel):
    """Reads a document with the memory and classifies it by the hidden state of its last token.

    Nothing is truncated: a document is read in segments of ``config.segment_len`` tokens, counted
    from its end. The gradient passes only through the last segment; those before it are memory, as
    in training. The softmax of the language model stays in the folder unchanged, and is not
    trained.
    """

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels or 1
        self.score = nn.Linear(config.d_model, self.num_labels, bias=False)
        self.post_init()
        self._freeze()

    def _freeze(self) -> None:
        """Freeze parameters that only the softmax uses: the classes do not depend on them."""
        # A tied weight has only its first name here, which is not that of the softmax.
        for name, parameter in self.named_parameters():
            if name.startswith("transformer.softmax."):
                parameter.requires_grad_(False)

    def forward(
        self,
        input_ids: Int[Tensor, "B T"] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Float[Tensor, "B T D"] | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutputWithPast | tuple[Any, ...]:
        """Classify documents.

        Args:
            input_ids: The documents, or their continuations.
            attention_mask: 0 where a row is padded, on either side. None: the tokens that are
                ``config.pad_token_id`` are padding, if there is one.
            past_key_values: As returned by the last call.
            inputs_embeds: Vectors in place of tokens, read without embedding.
            labels: The classes; numbers if there is one label; a 0 or 1 for each of several.
            use_cache: Whether to return the memory. None: as configured.
            return_dict: False: return a tuple.
            kwargs: ``num_items_in_batch``, the number of labels in all batches of a step, by which
                the sum of losses is divided; and ``position_ids``, in which a 0 starts a document.

        Raises:
            ValueError: A row is empty.
        """
        cache, padding = own_cache(past_key_values), self.config.pad_token_id
        if attention_mask is None and input_ids is not None and padding is not None:
            attention_mask = input_ids != padding
        count = kwargs.pop("num_items_in_batch", None)
        inputs = self._inputs(input_ids, attention_mask, inputs_embeds, kwargs)
        mems = self._memory_before(cache, inputs)
        hidden, mems = read_to_the_end(self.transformer, inputs, mems, self.config.segment_len)
        logits = self.score(hidden)
        loss = None
        if labels is not None:
            loss = self.loss_function(
                labels=labels, pooled_logits=logits, config=self.config, logits=logits
            )
            if count is not None:
                # Trainer counts the labels other than -100 in all batches of a step.
                loss = loss * ((labels != IGNORED).sum().to(loss.device) / count)
        after = self._cache_after(cache, mems, inputs, use_cache)
        out = SequenceClassifierOutputWithPast(loss=loss, logits=logits, past_key_values=after)
        return out if return_dict is not False else out.to_tuple()


def _second_names(model: nn.Module) -> dict[str, str]:
    """Map the second names of tied weights to the first."""
    first: dict[int, str] = {}
    found = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            found[name] = first[id(parameter)]
    return found


def _with_names_of_files(
    model: nn.Module, state: dict[str, Any], prefix: str, *others: Any
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


def _version(path: Path) -> tuple[int, int, int] | None:
    """Return what changes when a file is written; None if there is none."""
    if not path.is_file():
        return None
    now = path.stat()
    return now.st_ino, now.st_mtime_ns, now.st_size
