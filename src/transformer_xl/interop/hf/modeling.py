"""The language model for transformers."""

# Methods of transformers are overridden with the arguments that they are called with.
# pyright: reportIncompatibleMethodOverride=false, reportAttributeAccessIssue=false

import math
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging
from transformers.utils.generic import can_return_tuple

from transformer_xl.errors import InputError
from transformer_xl.interop.hf.base import TransformerXLPreTrainedModel
from transformer_xl.interop.hf.cache import TransformerXLCache, require_cache
from transformer_xl.interop.hf.configuration import TransformerXLConfig
from transformer_xl.interop.hf.inputs import IGNORED, require_known
from transformer_xl.model import AdaptiveSoftmax, evaluating, read_all

_LOGGER = logging.get_logger(__name__)


class TransformerXLForCausalLM(TransformerXLPreTrainedModel, GenerationMixin):
    """The language model, whose memory is passed as ``past_key_values``."""

    # Positions that have left the memory cannot be taken back, as assisted generation does.
    _is_stateful = True

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__(config)
        self.post_init()

    def _freeze(self) -> None:
        """Freeze nothing: the softmax is used."""

    def get_output_embeddings(self) -> nn.Module | None:
        """Return the linear layer of the logits; None for an adaptive softmax."""
        softmax = self.transformer.softmax
        return None if isinstance(softmax, AdaptiveSoftmax) else softmax

    @can_return_tuple
    def forward(
        self,
        input_ids: Int[Tensor, "B T"] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Float[Tensor, "B T D"] | None = None,
        labels: Int[Tensor, "B T"] | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Read any number of tokens; return log-probabilities of the next tokens as logits.

        Args:
            input_ids: The tokens; with ``past_key_values``, only the new ones.
            attention_mask: 0 where a row is padded, on either side. It may also cover the tokens
                that were read before. None: no padding.
            past_key_values: As returned by the last call.
            inputs_embeds: Vectors in place of tokens, read without embedding.
            labels: The tokens themselves, -100 at ignored positions; each is compared with the
                prediction before it. While training there are then no logits, which over a large
                vocabulary would dominate the memory.
            use_cache: Whether to return the memory. None: as configured.
            logits_to_keep: Number of last tokens of which to return logits, or their indices. 0:
                all.
            kwargs: ``num_items_in_batch``, the number of targets in all batches of a step, by which
                the sum of losses is divided; ``return_dict``, false for a tuple;
                ``output_hidden_states``, the input of the first layer, then the output of each
                layer, of all columns; and ``output_attentions``, of at most ``config.segment_len``
                columns, for which attention is computed by the reference.

        At padding, the logits are those of a uniform distribution and have no gradient.

        Raises:
            TypeError: The cache is of another kind, or an argument is unknown.
            InputError: Shapes do not match each other or the memory; attention weights are wanted
                of more than a segment, or of layers that have none.
        """
        count = kwargs.pop("num_items_in_batch", None)
        inputs, cache, wanted = self._inputs(
            input_ids, attention_mask, past_key_values, inputs_embeds, kwargs
        )
        last = None
        if isinstance(logits_to_keep, int) and labels is None:
            last = logits_to_keep or None
        layers = attentions = None
        tokens = inputs.segment.tokens
        is_step = cache.is_stepped and inputs.is_real is None and not any(wanted)
        if tokens is not None and tokens.shape[1] == 1 and is_step and not self.training:
            mems = cache.decoder(self.transformer, self._lengths())
            hidden = mems(tokens[:, 0])[:, None]
        else:
            hidden, mems, layers, attentions = self._read(inputs, cache, wanted, last)
        loss = None
        if labels is not None:
            loss = self._loss(hidden, *inputs.targets(labels), count)
        logits = None
        if labels is None or not self.training:
            if isinstance(logits_to_keep, int):
                place = slice(-logits_to_keep, None)
            else:
                place = logits_to_keep.to(hidden.device)
            logits = self.transformer.head.log_probs(hidden[:, place])
            if inputs.is_real is not None:
                # A loss that the caller computes gets no gradient from padding.
                known = inputs.is_real[:, -hidden.shape[1] :][:, place, None]
                logits = logits.masked_fill(~known, -math.log(logits.shape[-1]))
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=self._cache_after(cache, mems, inputs, use_cache),
            hidden_states=layers,
            attentions=attentions,
        )

    def _loss(
        self,
        hidden: Float[Tensor, "B T D"],
        targets: Int[Tensor, "B T"],
        has_context: Bool[Tensor, "B T"],
        count: Tensor | int | None,
    ) -> Float[Tensor, ""]:
        nll = self.transformer.head.nll(hidden[has_context], targets[has_context])
        # A count of this batch alone includes targets without a context, which padding precedes.
        counts = torch.as_tensor(nll.numel() if count is None else count, device=nll.device)
        is_alone = count is None or bool((counts == (targets != IGNORED).sum()).all())
        return nll.mean() if is_alone else nll.sum() / counts

    @torch.no_grad()
    def generate(self, inputs: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """Continue texts, as transformers documents it.

        With ``past_key_values``, ``input_ids`` are either the whole texts or only their new tokens;
        this is detected by the last tokens that the memory has read.

        Raises:
            InputError: A prompt is empty, or one of its tokens is neither padding nor in the
                vocabulary.
        """
        cache = require_cache(kwargs.get("past_key_values"))
        tokens = kwargs.pop("input_ids", None) if inputs is None else inputs
        mask = kwargs.get("attention_mask")
        if tokens is not None and tokens.ndim == 2 and kwargs.get("inputs_embeds") is None:
            is_real = torch.ones_like(tokens) if mask is None else mask[:, -tokens.shape[1] :]
            if not bool(is_real.sum(1).all()):
                raise InputError(
                    "a prompt is empty: give at least one token, such as tokenizer.eos_token_id or "
                    "tokenizer.bos_token_id"
                )
            require_known(tokens, is_real.bool(), self.config.vocab_size)
            if not bool(is_real[:, -1].all()):
                # Padded on the right, behind which nothing can be written.
                order = is_real.argsort(dim=1, stable=True)
                tokens, is_real = tokens.gather(1, order), is_real.gather(1, order)
            if cache is not None and not cache.is_beginning_of(tokens):
                # transformers expects a mask that covers the past, too.
                is_real = torch.cat([is_real.new_ones(len(is_real), cache.seen), is_real], 1)
            kwargs["attention_mask"] = is_real
        return super().generate(tokens, *args, **kwargs)

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: object,
        batch_size: int,
        *args: object,
    ) -> None:
        """Begin with the memory of the model's preface, if it has one."""
        super()._prepare_cache_for_generation(
            generation_config, model_kwargs, generation_mode, batch_size, *args
        )
        preface = self.config.preface if self.config.has_memory else None
        if not preface or model_kwargs.get("past_key_values") is not None:
            return
        if generation_config.use_cache is False:
            _LOGGER.warning_once("use_cache=False: texts are generated without the model's preface")
            return
        rows = batch_size * max(
            generation_config.num_beams or 1, generation_config.num_return_sequences or 1
        )
        model = self.transformer
        with torch.no_grad(), evaluating(model):
            mems = read_all(model, torch.tensor([preface]), self._lengths(), model.start_memory(1))
        model_kwargs["past_key_values"] = TransformerXLCache(mems.select([0] * rows))

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
        attention_mask: Tensor | None = None,
        tokenizer: object = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Remove the tokens that were read already, if there is a memory; mask rows that ended.

        The tokenizer is an argument of ``generate``, which transformers hands on.

        Raises:
            InputError: No token is left, or vectors would have to be read again.
        """
        if not self.config.has_memory:
            next_sequence_length = None
            if inputs_embeds is not None:
                raise InputError("mem_len=0: vectors that are not remembered cannot be continued")
        if next_sequence_length is not None and next_sequence_length < 1:
            raise InputError(
                f"the memory has read all of the {input_ids.shape[1]} tokens: give at least one "
                "more, the last one that was generated"
            )
        cache = kwargs.get("past_key_values")
        if isinstance(cache, TransformerXLCache):
            # Not the cache that was given to ``generate``: the caller may use it again.
            cache.is_stepped = not getattr(cache, "_is_user_defined", False)
        is_known = input_ids < self.config.vocab_size
        if attention_mask is not None and not bool(is_known.all()):
            # Padding behind rows that ended may be the number beyond the vocabulary. The mask may
            # also cover what the memory has read.
            n = min(attention_mask.shape[1], input_ids.shape[1])
            attention_mask = attention_mask.clone()
            attention_mask[:, -n:] *= is_known[:, -n:]
        return super().prepare_inputs_for_generation(
            input_ids,
            next_sequence_length=next_sequence_length,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            **kwargs,
        )


# Trainer shifts labels for label smoothing only for these classes; ``register`` does not add ours.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[TransformerXLConfig.model_type] = (
    TransformerXLForCausalLM.__name__
)
