"""The language model for transformers."""

# Methods of transformers are overridden with the arguments that they are called with.
# pyright: reportIncompatibleMethodOverride=false, reportAttributeAccessIssue=false

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.stopping_criteria import EosTokenCriteria
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from transformer_xl.data import Vocab, is_vocabulary, load_vocab
from transformer_xl.errors import InputError
from transformer_xl.interop.hf.base import TransformerXLPreTrainedModel
from transformer_xl.interop.hf.cache import TransformerXLCache, own_cache
from transformer_xl.interop.hf.configuration import TransformerXLConfig
from transformer_xl.interop.hf.inputs import IGNORED, require_known
from transformer_xl.model import AdaptiveSoftmax, Lengths, Memory, evaluating, read_all

_LOGGER = logging.get_logger(__name__)
_LETTERS = "abcdef"
_PADDED_BEFORE = (
    "num_items_in_batch counts the first token of each row that is padded on the left, which "
    "nothing predicts, so that a loss over several batches is off by their share: for training set "
    "tokenizer.padding_side = 'right'"
)


class TransformerXLForCausalLM(TransformerXLPreTrainedModel, GenerationMixin):
    """The language model, whose memory is passed as ``past_key_values``."""

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__(config)
        # Calls of ``generate`` that have not returned: they nest where a model assists itself.
        self._n_generating = 0
        self.post_init()

    def _freeze(self) -> None:
        """Freeze nothing: the softmax is used."""

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
            return_dict: False: return a tuple. None: as configured.
            kwargs: ``shift_labels``, targets that are aligned with the predictions already, in
                place of ``labels``; ``num_items_in_batch``, the number of targets in all batches of
                a step, by which the sum of losses is divided; ``position_ids``, in which a 0 starts
                another document of a packed row; ``output_hidden_states``, the input of the first
                layer, then the output of each layer, of all columns; and ``output_attentions``,
                of at most ``config.segment_len`` columns, for which attention is computed by the
                reference.

        At padding, the logits are those of a uniform distribution and have no gradient.

        Raises:
            NotImplementedError: ``head_mask`` is given.
            TypeError: The cache is of another kind, or an argument is unknown.
            InputError: Shapes do not match each other or the memory; attention weights are wanted
                of more than a segment, or of layers that have none.
        """
        # Not in the signature: Trainer requires every argument whose name has "label".
        shift_labels = kwargs.pop("shift_labels", None)
        count = kwargs.pop("num_items_in_batch", None)
        wanted = self._wanted(kwargs)
        if self._n_generating and input_ids is not None:
            attention_mask = self._without_ended(input_ids, attention_mask)
        inputs, cache = self._inputs(
            input_ids, attention_mask, inputs_embeds, past_key_values, kwargs
        )
        targets = inputs.targets(labels, shift_labels)
        if targets is None and count is not None and inputs.has_padding_before():
            _LOGGER.warning_once(_PADDED_BEFORE)
        last = None
        if isinstance(logits_to_keep, int):
            if logits_to_keep < 0:
                raise InputError(
                    f"logits_to_keep={logits_to_keep} must be 0, for all, or a number of tokens"
                )
            last = None if targets is not None else logits_to_keep or None
        tokens = inputs.segment.tokens
        is_step = inputs.is_token and not self.training and not any(wanted)
        layers = attentions = None
        if cache.is_stepped and tokens is not None and is_step:
            mems = cache.decoder(self.transformer)
            hidden = mems(tokens[:, 0])[:, None]
        else:
            hidden, mems, layers, attentions = self._read(inputs, cache, wanted, last)
            if last is not None:
                # All columns, if those of each layer are wanted.
                hidden = hidden[:, -last:]
        loss = None if targets is None else self._loss(hidden, *targets, count)
        logits = None
        if skip_logits is None:
            skip_logits = labels is not None and self.training
        if not skip_logits:
            place: Any = logits_to_keep
            place = slice(-place, None) if isinstance(place, int) else place.to(hidden.device)
            logits = self.transformer.head.log_probs(hidden[:, place])
            if inputs.is_real is not None:
                # A loss that the caller computes gets no gradient from padding.
                known = inputs.is_real[:, -hidden.shape[1] :][:, place, None]
                logits = logits.masked_fill(~known, -math.log(logits.shape[-1]))
        after = self._cache_after(cache, mems, inputs, use_cache)
        out = CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=after,
            hidden_states=layers,
            attentions=attentions,
        )
        return self._returned(out, return_dict)

    def _loss(
        self,
        hidden: Float[Tensor, "B T D"],
        targets: Int[Tensor, "B T"],
        has_context: Bool[Tensor, "B T"],
        count: Tensor | int | None,
    ) -> Float[Tensor, ""]:
        place = has_context.to(hidden.device)
        if torch.compiler.is_compiling():
            # In fixed shapes; the other way computes what counts alone.
            counted = targets.to(hidden.device).masked_fill(~place, IGNORED)
            total = self.transformer.head.nll(hidden, counted).sum()
            return total / (place.sum() if count is None else count)
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
        if kwargs.get("assistant_tokenizer") is not None:
            raise NotImplementedError(
                "assistant_tokenizer: an assistant of another vocabulary writes texts that this "
                "one may not have; give an assistant of the same vocabulary, without a tokenizer"
            )
        cache = own_cache(kwargs.get("past_key_values"))
        tokens = kwargs.get("input_ids") if inputs is None else inputs
        if cache is not None and tokens is not None:
            mask = kwargs.get("attention_mask")
            mask = torch.ones_like(tokens) if mask is None else mask
            if mask.shape == tokens.shape and not cache.is_beginning_of(tokens):
                # transformers expects a mask that covers the past, too.
                mask = torch.cat([mask.new_ones(len(mask), cache.seen), mask], 1)
            kwargs["attention_mask"] = mask
        elif tokens is not None and tokens.ndim == 2 and kwargs.get("inputs_embeds") is None:
            tokens, mask = self._with_beginnings(tokens, kwargs.get("attention_mask"))
            if mask is not None and mask.shape == tokens.shape and not bool(mask[:, -1].all()):
                # Padded on the right, behind which nothing can be written.
                order = mask.argsort(dim=1, stable=True)
                tokens, mask = tokens.gather(1, order), mask.gather(1, order)
            inputs, kwargs["attention_mask"] = tokens, mask
            kwargs.pop("input_ids", None)
        self._n_generating += 1
        try:
            out = super().generate(inputs, *args, **kwargs)
        finally:
            self._n_generating -= 1
        settings = kwargs.get("generation_config")
        written = getattr(out, "past_key_values", None)
        if isinstance(written, TransformerXLCache) and not getattr(settings, "is_assistant", None):
            written.stop_recording()
        return out

    def _prepare_cache_for_generation(
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        *args: Any,
    ) -> None:
        """Begin a cache where transformers needs one before the first call.

        Raises:
            InputError: A kind of cache is asked for, or one that the model does not have.
        """
        super()._prepare_cache_for_generation(
            generation_config, model_kwargs, generation_mode, batch_size, *args
        )
        is_assisted = generation_mode == GenerationMode.ASSISTED_GENERATION
        is_recording = is_assisted or bool(generation_config.is_assistant)
        needs_one = is_recording or generation_config.prefill_chunk_size is not None
        begins = model_kwargs.get("past_key_values") is None and self.config.has_memory
        preface = self.config.preface if begins else None
        if preface and not needs_one and generation_config.use_cache is False:
            _LOGGER.warning_once("use_cache=False: texts are generated without the model's preface")
            return
        if not (needs_one or preface):
            return
        model, what = self.transformer, "assisted generation" if is_recording else "a chunk size"
        if not self.config.has_memory or generation_config.use_cache is False:
            raise InputError(
                f"{what} needs a cache: use_cache=True, and a model with a memory (mem_len=0 has "
                "none)"
            )
        if is_recording and (not model.remembers_positions or self.config.reset_at is not None):
            raise InputError(
                "assisted generation takes back tokens, which a memory of a single state (kind="
                f"{self.config.kind!r}) or of documents (reset_at={self.config.reset_at}) does not "
                "allow: generate without assistant_model and prompt_lookup_num_tokens"
            )
        cache = model_kwargs.get("past_key_values")
        if cache is None:
            rows = batch_size * max(
                generation_config.num_beams or 1, generation_config.num_return_sequences or 1
            )
            beginning = self._read_preface(preface) if preface else None
            cache = TransformerXLCache.start(model, rows, beginning)
            model_kwargs["past_key_values"] = cache
        if is_recording:
            # Not that of the caller, who may use it again.
            cache = model_kwargs["past_key_values"] = cache.repeated(1)
            cache.activate_past_recording()

    @torch.no_grad()
    def _read_preface(self, tokens: Sequence[int]) -> Memory:
        """Return the memory of one text after the preface."""
        model = self.transformer
        lengths = Lengths.of(model.config, segment_len=self.config.segment_len, ext_len=0)
        with evaluating(model):
            return read_all(model, torch.tensor([[*tokens]]), lengths, model.start_memory(1))

    def _expand_inputs_for_generation(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Repeat each text and its memory for beam search.

        Raises:
            InputError: A token of the prompt is neither padding nor in the vocabulary.
        """
        # Before texts grow: what is written behind the end of a row is padding.
        tokens, mask = kwargs.get("input_ids"), kwargs.get("attention_mask")
        if tokens is not None and tokens.numel():
            is_real = None if mask is None else mask[:, -tokens.shape[1] :].bool()
            require_known(tokens, is_real, self.config.vocab_size)
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
        tokenizer: Any = None,
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
        cache = own_cache(kwargs.get("past_key_values"))
        if cache is not None:
            # Not the cache that was given to ``generate``: the caller may use it again.
            cache.is_stepped = not getattr(cache, "_is_user_defined", False)
        return super().prepare_inputs_for_generation(
            input_ids,
            next_sequence_length=next_sequence_length,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            **kwargs,
        )

    def _maybe_initialize_input_ids_for_generation(
        self,
        inputs: Tensor | None = None,
        bos_token_id: Tensor | None = None,
        model_kwargs: dict[str, Any] | None = None,
    ) -> Tensor:
        """Begin a text without a prompt after the token that an empty prompt stands for."""
        if inputs is None and bos_token_id is None and (start := self._start_id()) is not None:
            bos_token_id = torch.tensor(start)
        return super()._maybe_initialize_input_ids_for_generation(
            inputs, bos_token_id, model_kwargs
        )

    def _start_id(self) -> int | None:
        """Return the token that an empty prompt stands for, by the vocabulary of the folder."""
        if (number := self.generation_config.bos_token_id) is not None:
            return number
        folder = self.config.name_or_path
        return load_vocab(folder).start_id if folder and is_vocabulary(Path(folder)) else None

    def _with_beginnings(self, tokens: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return prompts and their mask; the empty ones begin as a text without a prompt does.

        Raises:
            InputError: There is no token to begin with.
        """
        is_empty = mask.sum(1) == 0 if mask is not None else torch.zeros(len(tokens)).bool()
        if tokens.shape[1] and not bool(is_empty.any()):
            return tokens, mask
        if (start := self._start_id()) is None:
            raise InputError(
                "an empty prompt needs a token to begin after: give bos_token_id=..., or a prompt"
            )
        if not tokens.shape[1]:
            tokens = tokens.new_full((len(tokens), 1), start, dtype=torch.int64)
            return tokens, None if mask is None else torch.ones_like(tokens)
        assert mask is not None
        tokens, mask = tokens.clone(), mask.clone()
        tokens[is_empty, -1], mask[is_empty, -1] = start, 1
        return tokens, mask

    def _get_logits_processor(
        self,
        generation_config: Any,
        input_ids_seq_length: int | None = None,
        encoder_input_ids: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Hand the prompts on without padding beyond the vocabulary, which would be an index."""
        if encoder_input_ids is not None and encoder_input_ids.numel():
            is_real = encoder_input_ids < self.config.vocab_size
            # Of the same row, so that nothing more counts as read.
            first = encoder_input_ids.gather(1, is_real.int().argmax(1, keepdim=True))
            encoder_input_ids = torch.where(is_real, encoder_input_ids, first)
        return super()._get_logits_processor(
            generation_config, input_ids_seq_length, encoder_input_ids, *args, **kwargs
        )

    def _get_stopping_criteria(
        self, generation_config: Any, stopping_criteria: Any, tokenizer: Any = None, **kwargs: Any
    ) -> Any:
        """Have rows padded that end in another way than by a token, as by a stop string.

        transformers pads rows only if a token ends them; the number beyond the vocabulary is none.

        Raises:
            InputError: Stop strings are given, and the vocabulary lacks the letters behind which
                transformers writes each token to find them.
        """
        vocab = getattr(tokenizer, "vocab", None)
        if generation_config.stop_strings is not None and isinstance(vocab, Vocab):
            is_written = not vocab.unknown(_LETTERS)
            if not is_written or vocab.decode(vocab.encode(_LETTERS)) != _LETTERS:
                raise InputError(
                    f"stop_strings: transformers finds them by writing the letters {_LETTERS!r}, "
                    "which this vocabulary lacks: give eos_token_id, or stopping_criteria"
                )
        criteria = super()._get_stopping_criteria(
            generation_config, stopping_criteria, tokenizer, **kwargs
        )
        if generation_config._eos_token_tensor is None:
            beyond = torch.tensor(self.config.vocab_size)
            generation_config._eos_token_tensor = beyond[None]
            if generation_config._pad_token_tensor is None:
                generation_config._pad_token_tensor = beyond
            criteria.append(EosTokenCriteria(beyond[None]))
        return criteria

    def heal_tokens(self, input_ids: Tensor, tokenizer: Any = None) -> Tensor:
        """Raise an error: transformers strips the texts, and a line break is a token here."""
        raise NotImplementedError(
            "token_healing=True: a line break at the end of a prompt would be lost; leave it out, "
            "and end prompts with whole words"
        )

    def _without_ended(self, tokens: Tensor, mask: Tensor | None) -> Tensor | None:
        """Return the mask without the padding that follows rows that ended."""
        is_known = tokens < self.config.vocab_size
        if bool(is_known.all()):
            return mask
        if mask is None:
            return is_known.long()
        # It may also cover what the memory has read, or not the newest tokens of a traced loop.
        n = min(mask.shape[1], tokens.shape[1])
        return torch.cat([mask[:, :-n], mask[:, -n:] * is_known[:, -n:]], 1)


# Trainer shifts labels for label smoothing only for these classes; ``register`` does not add ours.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[TransformerXLConfig.model_type] = (
    TransformerXLForCausalLM.__name__
)
