"""The model type ``transformer-xl`` of EleutherAI's lm-evaluation-harness.

The harness's own types read a long document in windows without context between them; this one
carries the memory from the first token to the last. Importing the module registers the type;
``python -m transformer_xl.interop.harness`` is the harness's command line with it. Needs
``pip install 'transformer-xl[eval]'``.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby, takewhile
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

try:
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import chunks, normalize_gen_kwargs
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "transformer_xl.harness needs lm-evaluation-harness: pip install 'transformer-xl[eval]'"
    ) from error

from transformer_xl.config import pick_device
from transformer_xl.data import load_vocab
from transformer_xl.errors import InputError
from transformer_xl.inference.generate import Sampling, generate_batch
from transformer_xl.model import (
    SEGMENT_LEN,
    Lengths,
    Memory,
    Piece,
    load_model,
    read,
    require_token_inputs,
)

# The settings of sampling of tasks that our sampler supports.
_SAMPLING_SETTINGS = ("temperature", "top_k", "top_p")


@register_model("transformer-xl")
class TransformerXLHarness(TemplateLM):
    """A model folder with the interface of the harness.

    Args:
        pretrained: A model folder, a run folder, or the name of a shipped model.
        device: The device. None, or a GPU that is not available: an accelerator if there is one,
            else the CPU.
        batch_size: Batch size.
        max_batch_size: For other types; not used.
        segment_len: Segment length.
        mem_len: Memory length. None: as configured.
        max_gen_toks: Number of generated tokens if a task does not set it.
        prefix: The text of one symbol before every document, which is not scored. None: the symbol
            that ends a line, or a line break.
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
        prefix: str | None = None,
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
        # Everything read enters the memory, so no extended context is read again.
        self.lengths = Lengths.of(
            self.model.config, segment_len=segment_len, mem_len=mem_len, ext_len=0
        )
        self.batch_size, self.mem_len = int(batch_size), mem_len
        self._max_gen_toks, self._seed = max_gen_toks, seed
        self._prefix = self._find_prefix(prefix)
        self._device = self.model.device

    def _find_prefix(self, text: str | None) -> int:
        if text is None:
            start = self.vocab.start_id
            ids = [] if start is None else [start]
        else:
            ids = self.vocab.encode(text)
        if len(ids) != 1:
            raise InputError(
                f"prefix={text!r}: documents begin after one symbol, and the vocabulary tokenizes "
                f"{text or chr(10)!r} to {len(ids)}; give another text as prefix=..."
            )
        return ids[0]

    @property
    def eot_token_id(self) -> int:
        """The symbol after which a document begins."""
        return self._prefix

    @property
    def tokenizer_name(self) -> str:
        """A unique identifier of the vocabulary."""
        return self.vocab.hash

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
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
        pairs = [(x, *self._encode_pair(*x)) for x in texts]
        return self._loglikelihood_tokens(pairs, disable_tqdm=disable_tqdm)

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Return the tokens of a context, and those that are scored: the rest of the whole.

        A token may hold the end of the context and the beginning of the continuation: the tokens of
        the continuation are those of the whole behind the longest common prefix with the tokens of
        the context.
        """
        first, whole = self.tok_encode(context), self.tok_encode(context + continuation)
        same = takewhile(lambda pair: pair[0] == pair[1], zip(first, whole, strict=False))
        n = len(list(same))
        if not whole[n:]:
            # As where blanks between words are no tokens.
            whole, n = first + self.tok_encode(continuation), len(first)
        if not whole[n:]:
            raise InputError(
                f"the continuation {continuation!r} has no token in the {self.vocab.kind} "
                "vocabulary, and so no probability: leave it out of the task"
            )
        return whole[:n], whole[n:]

    @torch.no_grad()
    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-probability of each document, read once from its first token on."""
        totals = []
        for batch in chunks([request.args[0] for request in requests], self.batch_size):
            ids = [self.tok_encode(text) for text in batch]
            first = [self._prefix] * len(batch)
            scores = self._score(self._initial_memory(len(batch)), first, ids)
            for text, (total, _) in zip(batch, scores, strict=True):
                self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
                totals.append(total)
        return totals

    @torch.no_grad()
    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        """Score continuations; a context that several of them share is read once."""
        contexts: dict[tuple[int, ...], list[int]] = {}
        for number, (_, context, _) in enumerate(requests):
            contexts.setdefault(tuple(context) or (self._prefix,), []).append(number)
        scores_of: dict[int, tuple[float, bool]] = {}
        for batch in chunks(sorted(contexts, key=len), self.batch_size):
            mems = self._initial_memory(len(batch))
            for piece in self._read(mems, [context[:-1] for context in batch]):
                mems = piece.mems
            pairs = [(row, n) for row, context in enumerate(batch) for n in contexts[context]]
            for part in chunks(pairs, self.batch_size):
                rows, numbers = zip(*part, strict=True)
                targets = [requests[n][2] for n in numbers]
                last = [batch[row][-1] for row in rows]
                scores = self._score(mems.select(list(rows)), last, targets)
                scores_of.update(zip(numbers, scores, strict=True))
        for number, (texts, _, _) in enumerate(requests):
            self.cache_hook.add_partial("loglikelihood", texts, scores_of[number])
        return [scores_of[number] for number in range(len(requests))]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continue contexts up to one of the stop strings of the task."""
        texts = []
        for settings, group in groupby(requests, key=self._settings):
            until, length, sampling = settings
            for batch in chunks([request.args[0] for request in group], self.batch_size):
                prompts = [self.tok_encode(text) or [self._prefix] for text in batch]
                written = generate_batch(
                    self.model,
                    prompts,
                    sampling,
                    length=length,
                    seed=self._seed,
                    mem_len=self.mem_len,
                )
                texts.extend(written.decode(self.vocab, until))
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def _settings(self, request: Instance) -> tuple[list[str], int, Sampling]:
        """Return the stop strings of a request, its length, and how tokens are drawn."""
        arguments: Any = request.args
        settings: dict[str, Any] = dict(normalize_gen_kwargs(arguments[1], self._max_gen_toks))
        drawing: dict[str, Any] = {"temperature": 0.0}
        if settings.get("do_sample"):
            chosen = {name: settings.get(name) for name in _SAMPLING_SETTINGS}
            drawing |= {name: x for name, x in chosen.items() if x is not None}
        until = [text for text in settings["until"] if text]
        return until, settings["max_gen_toks"], Sampling(**drawing)

    def _initial_memory(self, batch_size: int) -> Memory:
        return self.model.keep(self.model.start_memory(batch_size, self.lengths.mem_len))

    def _read(self, mems: Memory, texts: Sequence[Sequence[int]]) -> Iterator[Piece]:
        """Read texts of any lengths, batched."""
        sizes = torch.tensor([len(text) for text in texts])
        return read(self.model, _padded(texts), self.lengths, mems, sizes=sizes)

    def _score(
        self, mems: Memory, first: Sequence[int], targets: Sequence[Sequence[int]]
    ) -> list[tuple[float, bool]]:
        """Return, for each row, the log-probability of its targets and whether greedy gives them.

        Log-probabilities are summed segment by segment, so those of a text are never all in memory.

        Args:
            mems: The memory of each row.
            first: The token before the targets of each row, not read yet.
            targets: The targets of each row.
        """
        total = torch.zeros(len(targets), dtype=torch.float64)
        is_greedy = torch.ones(len(targets), dtype=torch.bool)
        head, expected_ids = self.model.head, _padded(targets, -1)
        texts = [[x, *row[:-1]] if row else [] for x, row in zip(first, targets, strict=True)]
        for start, hidden, _, _ in self._read(mems, texts):
            expected = expected_ids[:, start : start + hidden.shape[1]]
            is_real = expected >= 0
            if not is_real.any():
                continue
            states, row = hidden[is_real.to(hidden.device)], is_real.nonzero()[:, 0]
            expected = expected[is_real].to(hidden.device)
            nll = head.nll(states, expected).double().cpu()
            total.index_add_(0, row, -nll)
            missed = (head.log_probs(states).argmax(-1) != expected).cpu()
            is_greedy[row[missed]] = False
        return list(zip(total.tolist(), is_greedy.tolist(), strict=True))


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
