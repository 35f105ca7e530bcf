"""A classifier of documents of any length."""

from typing import Any

from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers.modeling_outputs import SequenceClassifierOutputWithPast

from transformer_xl.interop.hf.configuration import TransformerXLConfig
from transformer_xl.interop.hf.inputs import IGNORED, own_cache, read_to_the_end
from transformer_xl.interop.hf.modeling import TransformerXLPreTrainedModel


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
