"""Models for transformers without next tokens: features, classes of texts and of tokens."""

# Methods of transformers are overridden with the arguments that they are called with.
# pyright: reportIncompatibleMethodOverride=false

from typing import Any

from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    SequenceClassifierOutputWithPast,
    TokenClassifierOutput,
)

from transformer_xl.errors import InputError
from transformer_xl.interop.hf.base import TransformerXLPreTrainedModel
from transformer_xl.interop.hf.configuration import TransformerXLConfig
from transformer_xl.interop.hf.inputs import IGNORED, read_to_the_end


class TransformerXLModel(TransformerXLPreTrainedModel):
    """The network without its softmax: hidden states, as features of tokens.

    The softmax stays in the folder unchanged, and is not trained.
    """

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__(config)
        self.post_init()
        self._freeze()

    def forward(
        self,
        input_ids: Int[Tensor, "B T"] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Float[Tensor, "B T D"] | None = None,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast | tuple[Any, ...]:
        """Read any number of tokens; return the hidden state of each, after all layers.

        Arguments and errors are those of :class:`TransformerXLForCausalLM`. At padding, hidden
        states are undefined.
        """
        wanted = self._wanted(kwargs)
        inputs, cache = self._inputs(
            input_ids, attention_mask, inputs_embeds, past_key_values, kwargs
        )
        reading = self._read(inputs, cache, wanted)
        out = BaseModelOutputWithPast(
            last_hidden_state=reading.hidden,
            past_key_values=self._cache_after(cache, reading.mems, inputs, use_cache),
            hidden_states=reading.layers,
            attentions=reading.attentions,
        )
        return self._returned(out, return_dict)


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
            return_dict: False: return a tuple. None: as configured.
            kwargs: ``num_items_in_batch``, the number of labels in all batches of a step, by which
                the sum of losses is divided; and ``position_ids``, in which a 0 starts a document.

        Raises:
            InputError: A row is empty, or states of layers are asked for.
        """
        padding = self.config.pad_token_id
        if attention_mask is None and input_ids is not None and padding is not None:
            attention_mask = input_ids != padding
        count = kwargs.pop("num_items_in_batch", None)
        if any(self._wanted(kwargs)):
            raise InputError(
                "output_hidden_states and output_attentions: a document is read in segments from "
                "its end, of which only the last token is classified; AutoModel returns them"
            )
        inputs, cache = self._inputs(
            input_ids, attention_mask, inputs_embeds, past_key_values, kwargs
        )
        hidden, mems = read_to_the_end(
            self.transformer, inputs, self._memory(cache), self._lengths(cache)
        )
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
        return self._returned(out, return_dict)


class TransformerXLForTokenClassification(TransformerXLPreTrainedModel):
    """Classifies each token by its hidden state, and so by the token and what precedes it.

    The softmax of the language model stays in the folder unchanged, and is not trained.
    """

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels or 1
        self.score = nn.Linear(config.d_model, self.num_labels)
        self.post_init()
        self._freeze()

    def forward(
        self,
        input_ids: Int[Tensor, "B T"] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Float[Tensor, "B T D"] | None = None,
        labels: Int[Tensor, "B T"] | None = None,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> TokenClassifierOutput | tuple[Any, ...]:
        """Classify tokens; those of any length, read with the memory.

        Args:
            input_ids: The tokens.
            attention_mask: 0 where a row is padded, on either side. None: no padding.
            past_key_values: The memory before them, as returned by another class of models.
            inputs_embeds: Vectors in place of tokens, read without embedding.
            labels: The class of each token; -100 at tokens that do not count, as at padding.
            use_cache: Must not be true: the memory is not returned.
            return_dict: False: return a tuple. None: as configured.
            kwargs: ``num_items_in_batch``, the number of labels in all batches of a step, by which
                the sum of losses is divided; ``position_ids``, in which a 0 starts a document;
                ``output_hidden_states`` and ``output_attentions``.

        Raises:
            InputError: As in :class:`TransformerXLForCausalLM`; the memory is asked for.
        """
        if use_cache:
            raise InputError(
                "use_cache=True: classes of tokens come without a memory; AutoModel returns one, "
                "which past_key_values takes here, too"
            )
        count = kwargs.pop("num_items_in_batch", None)
        wanted = self._wanted(kwargs)
        inputs, cache = self._inputs(
            input_ids, attention_mask, inputs_embeds, past_key_values, kwargs
        )
        reading = self._read(inputs, cache, wanted)
        logits = self.score(reading.hidden)
        loss = None
        if labels is not None:
            if inputs.is_real is not None:
                labels = labels.masked_fill(~inputs.is_real.to(labels.device), IGNORED)
            loss = self.loss_function(
                logits=logits, labels=labels, config=self.config, num_items_in_batch=count
            )
        out = TokenClassifierOutput(
            loss=loss,
            logits=logits,
            hidden_states=reading.layers,
            attentions=reading.attentions,
        )
        return self._returned(out, return_dict)
