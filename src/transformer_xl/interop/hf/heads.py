"""Models for transformers without next tokens: features, classes of texts and of tokens.

The softmax of the language model stays in their folders unchanged, and is not trained.
"""

# Methods of transformers are overridden with the arguments that they are called with.
# pyright: reportIncompatibleMethodOverride=false

from typing import Any

from torch import Tensor, nn
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    SequenceClassifierOutputWithPast,
    TokenClassifierOutput,
)
from transformers.utils.generic import can_return_tuple

from transformer_xl.errors import InputError
from transformer_xl.interop.hf.base import TransformerXLPreTrainedModel
from transformer_xl.interop.hf.configuration import TransformerXLConfig
from transformer_xl.interop.hf.inputs import IGNORED, read_to_the_end


class TransformerXLModel(TransformerXLPreTrainedModel):
    """The network without its softmax: hidden states, as features of tokens."""

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__(config)
        self.post_init()
        self._freeze()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Read any number of tokens; return the hidden state of each, after all layers.

        Arguments and errors are those of :class:`TransformerXLForCausalLM`. At padding, hidden
        states are undefined.
        """
        inputs, cache, wanted = self._inputs(
            input_ids, attention_mask, past_key_values, inputs_embeds, kwargs
        )
        reading = self._read(inputs, cache, wanted)
        return BaseModelOutputWithPast(
            last_hidden_state=reading.hidden,
            past_key_values=self._cache_after(cache, reading.mems, inputs, use_cache),
            hidden_states=reading.layers,
            attentions=reading.attentions,
        )


class _Classifier(TransformerXLPreTrainedModel):
    has_bias = True

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels or 1
        self.score = nn.Linear(config.d_model, self.num_labels, bias=self.has_bias)
        self.post_init()
        self._freeze()


class TransformerXLForSequenceClassification(_Classifier):
    """Reads a document with the memory and classifies it by the hidden state of its last token.

    Nothing is truncated: a document is read in segments of ``config.segment_len`` tokens, counted
    from its end. The gradient passes only through the last segment; those before it are memory, as
    in training.
    """

    has_bias = False

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutputWithPast:
        """Classify documents; without a mask, the tokens ``config.pad_token_id`` are padding.

        ``labels`` are the classes; numbers if there is one label; a 0 or 1 for each of several.

        Raises:
            InputError: A row is empty, or states of layers are asked for.
        """
        padding = self.config.pad_token_id
        if attention_mask is None and input_ids is not None and padding is not None:
            attention_mask = input_ids != padding
        count = kwargs.pop("num_items_in_batch", None)
        inputs, cache, wanted = self._inputs(
            input_ids, attention_mask, past_key_values, inputs_embeds, kwargs
        )
        if any(wanted):
            raise InputError(
                "output_hidden_states and output_attentions: a document is read in segments from "
                "its end, of which only the last token is classified; AutoModel returns them"
            )
        hidden, mems = read_to_the_end(
            self.transformer, inputs, self._memory(cache), self._lengths()
        )
        logits, loss = self.score(hidden), None
        if labels is not None:
            loss = self.loss_function(
                labels=labels, pooled_logits=logits, config=self.config, logits=logits
            )
            if count is not None:
                # Trainer counts the labels other than -100 in all batches of a step.
                loss = loss * ((labels != IGNORED).sum().to(loss.device) / count)
        after = self._cache_after(cache, mems, inputs, use_cache)
        return SequenceClassifierOutputWithPast(loss=loss, logits=logits, past_key_values=after)


class TransformerXLForTokenClassification(_Classifier):
    """Classifies each token by its hidden state, and so by the token and what precedes it."""

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> TokenClassifierOutput:
        """Classify tokens; labels of -100, and those of padding, do not count."""
        count = kwargs.pop("num_items_in_batch", None)
        inputs, cache, wanted = self._inputs(
            input_ids, attention_mask, past_key_values, inputs_embeds, kwargs
        )
        hidden, _, layers, attentions = self._read(inputs, cache, wanted)
        logits, loss = self.score(hidden), None
        if labels is not None:
            if inputs.is_real is not None:
                labels = labels.masked_fill(~inputs.is_real.to(labels.device), IGNORED)
            loss = self.loss_function(
                logits=logits, labels=labels, config=self.config, num_items_in_batch=count
            )
        return TokenClassifierOutput(loss, logits, layers, attentions)
