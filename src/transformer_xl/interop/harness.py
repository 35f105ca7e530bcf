"""The model type ``transformer-xl`` of EleutherAI's lm-evaluation-harness.

The harness's own types read a long document in windows without context between them; this one
carries the memory from the first token to the last. Importing the module registers the type;
``python -m transformer_xl.interop.harness`` is the harness's command line with it. Needs
``pip install 'transformer-xl[eval]'``.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from jaxtyping import Int
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import chunks, normalize_gen_kwargs
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from transformer_xl.config import pick_device
from transformer_xl.data import load_vocab
from transformer_xl.errors import InputError
from transformer_xl.inference.generate import Sampling, generate_batch
from transformer_xl.model import (
    SEGMENT_LEN,
    Lengths,
    load_model,
    read,
    require_token_inputs,
)


@register_model("transformer-xl")
class TransformerXLHarness(TemplateLM):
    """A model folder with the interface of the harness.

    A document begins after the symbol that ends a line, or a line break, which is not scored.

    Args:
        pretrained: A model folder, a run folder, or the name of a shipped model.
        device: The device. None, or a GPU that is not available: an accelerator if there is one,
            else the CPU.
        batch_size: Batch size.
        max_batch_size: For other types; not used.
        segment_len: Segment length.
        mem_len: Memory length. None: as configured.
        max_gen_toks: Number of generated tokens if a task does not set it.
        seed: Seed of the first text of a batch; the next texts have the following numbers.

    Raises:
        FileNotFoundError: There is no model, or no vocabulary in its folder.
        InputError: A setting is out of range, or the vocabulary has no symbol to begin with.
    """

    def __init__(
        self,
        pretrained: str,
        device: str | None = None,
        batch_size: int | str = 1,
        max_batch_size: int | str | None = None,
        segment_len: int = SEGMENT_LEN,
        mem_len: int | None = None,
        max_gen_toks: int = 256,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if not str(batch_size).isdigit() or int(batch_size) < 1:
            raise InputError(f"batch_size={batch_size!r} must be a number of at least 1")
        # cuda:0 is the default of the harness's command line.
        is_missing = str(device).startswith("cuda") and not torch.cuda.is_available()
        self.model = load_model(pretrained)
        require_token_inputs(self.model.config)
        self.model.to(pick_device() if device is None or is_missing else device)
        self.vocab = load_vocab(pretrained)
        if self.vocab.start_id is None:
            raise InputError("the vocabulary has no symbol of a line end, after which texts begin")
        # Everything read enters the memory, so no extended context is read again.
        self.lengths = Lengths.of(
            self.model.config, segment_len=segment_len, mem_len=mem_len, ext_len=0
        )
        self.batch_size, self.mem_len = int(batch_size), mem_len
        self._max_gen_toks, self._seed = max_gen_toks, seed
        self._prefix, self._device = self.vocab.start_id, self.model.device

    @property
    def eot_token_id(self) -> int:
        """The symbol after which a document begins."""
        return self._prefix

    @property
    def tokenizer_name(self) -> str:
        """A unique identifier of the vocabulary."""
        return self.vocab.hash

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: object
    ) -> list[int]:
        """Tokenize a text."""
        return self.vocab.encode(string)

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Return the log-probability of each continuation of a context, and whether it is greedy.

        Raises:
            InputError: A continuation has no token: it is empty, or a blank between words.
        """
        texts: list[Any] = [request.args for request in requests]
        return self._loglikelihood_tokens([(x, *self._encode_pair(*x)) for x in texts])

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Return the tokens of a context, and those that are scored: the rest of the whole.

        A token may hold the end of the context and the beginning of the continuation: the tokens of
        the continuation are those of the whole behind the longest common prefix with the tokens of
        the context.
        """
        first, whole = self.tok_encode(context), self.tok_encode(context + continuation)
        n = next((n for n, x in enumerate(first) if [x] != whole[n : n + 1]), len(first))
        if not whole[n:]:
            # As where blanks between words are no tokens.
            whole, n = first + self.tok_encode(continuation), len(first)
        if not whole[n:]:
            raise InputError(
                f"the continuation {continuation!r} has no token in the {self.vocab.kind} "
                "vocabulary, and so no probability: leave it out of the task"
            )
        return whole[:n] or [self._prefix], whole[n:]

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-probability of each document, read once from its first token on."""
        texts: list[str] = [request.args[0] for request in requests]
        pairs = [((text,), [self._prefix], self.tok_encode(text)) for text in texts]
        return [total for total, _ in self._loglikelihood_tokens(pairs)]

    @torch.no_grad()
    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, ...], list[int], list[int]]],
        **kwargs: object,
    ) -> list[tuple[float, bool]]:
        """Score continuations; those of one length of text are read side by side."""
        order = sorted(range(len(requests)), key=lambda n: len(requests[n][1] + requests[n][2]))
        scores: dict[int, tuple[float, bool]] = {}
        for numbers in chunks(order, self.batch_size):
            found = self._score([requests[n][1:] for n in numbers])
            scores |= zip(numbers, found, strict=True)
        return [scores[n] for n in range(len(requests))]

    def _score(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """Return the log-probability of each continuation and whether greedy generation gives it.

        Log-probabilities are summed segment by segment, so those of a text are never all in memory.
        """
        total = torch.zeros(len(pairs), dtype=torch.float64)
        is_greedy = torch.ones(len(pairs), dtype=torch.bool)
        inputs = [[*context, *rest][:-1] for context, rest in pairs]
        targets = _padded([[-1] * (len(context) - 1) + rest for context, rest in pairs], -1)
        sizes = torch.tensor([*map(len, inputs)])
        mems = self.model.keep(self.model.start_memory(len(pairs), self.lengths.mem_len))
        for start, hidden, *_ in read(self.model, _padded(inputs), self.lengths, mems, sizes=sizes):
            expected = targets[:, start : start + hidden.shape[1]]
            row, place = (expected >= 0).nonzero(as_tuple=True)
            if not len(row):
                continue
            states, expected = hidden[row, place], expected[row, place].to(hidden.device)
            total.index_add_(0, row, -self.model.head.nll(states, expected).double().cpu())
            missed = (self.model.head.log_probs(states).argmax(-1) != expected).cpu()
            is_greedy[row[missed]] = False
        return list(zip(total.tolist(), is_greedy.tolist(), strict=True))

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continue contexts up to one of the stop strings of the task."""
        texts: list[str] = []
        for settings, group in groupby(requests, key=self._settings):
            until, length, sampling = settings
            for batch in chunks([request.args[0] for request in group], self.batch_size):
                prompts = [self.tok_encode(text) or [self._prefix] for text in batch]
                how = {"length": length, "seed": self._seed, "mem_len": self.mem_len}
                written = generate_batch(self.model, prompts, sampling, **how)
                texts.extend(written.decode(self.vocab, until))
        return texts

    def _settings(self, request: Instance) -> tuple[list[str], int, Sampling]:
        """Return the stop strings of a request, its length, and how tokens are drawn."""
        arguments: Any = request.args
        settings: dict[str, Any] = dict(normalize_gen_kwargs(arguments[1], self._max_gen_toks))
        names = ("temperature", "top_k", "top_p") if settings.get("do_sample") else ()
        drawing: dict[str, Any] = {"temperature": 0.0}
        drawing |= {x: settings[x] for x in names if settings.get(x) is not None}
        until = [text for text in settings["until"] if text]
        return until, settings["max_gen_toks"], Sampling(**drawing)


def _padded(texts: Sequence[Sequence[int]], padding: int = 0) -> Int[Tensor, "B T"]:
    """Return texts as rows, padded on the right."""
    rows = [torch.tensor(text, dtype=torch.int64) for text in texts]
    return pad_sequence(rows, batch_first=True, padding_value=padding)


def run() -> None:
    """Run the command line of lm-evaluation-harness with the model type registered.

    Its own type ``hf`` reads our folders, too.
    """
    from lm_eval.__main__ import cli_evaluate

    # Registers the classes for transformers, which the harness depends on.
    import transformer_xl.interop.hf as _  # noqa: F401

    cli_evaluate()
