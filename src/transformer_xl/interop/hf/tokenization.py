"""Our vocabularies as tokenizers for transformers."""

# Methods of transformers are overridden with the arguments that they are called with.
# pyright: reportIncompatibleMethodOverride=false

import copy
import os
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from transformers import BatchEncoding, PreTrainedTokenizerFast

from transformer_xl.data import Vocab, load_vocab
from transformer_xl.errors import InputError
from transformer_xl.interop.hf.configuration import path_of

_PAD = "<pad>"
# A line break as a character, and as a byte in the alphabet of byte-level tokenizers.
_LINE_ENDS = ("\n", "\u010a")
_PADS = ("<pad>", "[PAD]", "<|pad|>", "<|padding|>")


class TransformerXLTokenizer(PreTrainedTokenizerFast):
    """Encodes and decodes text with the vocabulary of the folder.

    The backend is the ``tokenizers`` file of the vocabulary, so that offsets, word IDs, padding and
    truncation are those of transformers. ``eos_token`` is the symbol that ends a line, if there is
    one. Most vocabularies have no symbol for padding, and a word of the text must not be one: it
    would be left out of losses and texts. ``pad_token`` is then ``<pad>`` with the first number
    beyond the vocabulary, which the model reads nowhere: the attention mask marks padding.
    ``bos_token`` is the line break where nothing ends a line.

    Args:
        vocab_file: The ``vocab.json`` of a folder.
        definition_file: The ``tokenizer.json`` in the same folder.
        vocab: A vocabulary, instead of these.
        added_symbols: Symbols that were added to it, as ``add_tokens`` does; of these
            ``skip_special_tokens`` leaves out the special tokens.
        kwargs: Settings of transformers.

    Raises:
        InputError: There is no vocabulary, it encodes each line as a text of its own, or a named
            token is not one of its symbols.
    """

    vocab_files_names = {  # noqa: RUF012
        "vocab_file": "vocab.json",
        "definition_file": "tokenizer.json",
    }
    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012
    padding_side = "left"

    def __init__(
        self,
        vocab_file: str | None = None,
        definition_file: str | None = None,
        *,
        vocab: Vocab | None = None,
        added_symbols: Sequence[str] = (),
        **kwargs: Any,
    ) -> None:
        if vocab is None:
            if vocab_file is None or definition_file is None:
                raise InputError(
                    "the folder holds no vocabulary (vocab.json and tokenizer.json): give one that "
                    "does; `txl convert OLD NEW --vocab FILE` writes a converted model with its own"
                )
            vocab = load_vocab(Path(vocab_file).parent)
        if getattr(vocab, "encodes_lines", False):
            raise InputError(
                "the vocabulary encodes each line as a text of its own, as by SentencePiece, which "
                "transformers cannot: use transformer_xl.load_vocab(folder)"
            )
        self._added = list(added_symbols)
        missing = [x for x in self._added if x not in vocab.symbols]
        self._use(vocab.extended(missing) if missing else vocab)
        vocab = self._vocab
        self._tokenizer = copy.deepcopy(vocab.tokenizer)
        if vocab.kind == "brought":
            # Nothing is added to a text, as by the vocabulary.
            self._tokenizer.post_processor = None
        roles = {"eos_token": vocab.eos_id, "unk_token": vocab.unk_id}
        defaults = {name: None if n is None else vocab.symbols[n] for name, n in roles.items()}
        if vocab.eos_id is None:
            # What a text without a beginning is written or scored after.
            defaults["bos_token"] = next((x for x in _LINE_ENDS if x in self._ids), None)
        defaults["pad_token"] = next((symbol for symbol in _PADS if symbol in self._ids), _PAD)
        kwargs |= {name: x for name, x in defaults.items() if kwargs.get(name) is None}
        for name, token in kwargs.items():
            if not (name.endswith("_token") and isinstance(token, str)) or token in self._ids:
                continue
            if (number := self._number(token)) is None:
                raise InputError(
                    f"{name}={token!r} is not one of the {len(vocab)} symbols of the vocabulary: "
                    f"choose one of them, or add it by add_special_tokens({{{name!r}: {token!r}}})"
                )
            kwargs[name] = self._convert_id_to_token(number)
        if self._added:
            kwargs["added_symbols"] = list(self._added)
        # The vocabulary has them. Older folders say which are no special tokens.
        for name in ("added_tokens_decoder", "plain_symbols"):
            kwargs.pop(name, None)
        super().__init__(**kwargs)

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike, *args: Any, **kwargs: Any
    ) -> "TransformerXLTokenizer":
        """Read the vocabulary of a model folder, or of a shipped model by its name."""
        name = path_of(pretrained_model_name_or_path)
        return super().from_pretrained(name, *args, **kwargs)

    @classmethod
    def convert_to_native_format(cls, **kwargs: object) -> dict[str, object]:
        """Leave the files to ``__init__``, which reads them with our own loader."""
        kwargs.pop("tokenizer_file", None)
        return kwargs

    @property
    def vocab(self) -> Vocab:
        """The vocabulary."""
        return self._vocab

    @property
    def vocab_size(self) -> int:
        """Number of symbols."""
        return len(self._vocab)

    def __len__(self) -> int:
        return len(self._vocab)

    def get_vocab(self) -> dict[str, int]:
        """Return the symbols with their indices."""
        return dict(self._ids)

    def _add_tokens(self, new_tokens: Iterable[object] | None, special_tokens: bool = False) -> int:
        """Add symbols that no text is encoded as, unless it has them in full.

        The model needs a row for each: ``model.resize_token_embeddings(len(tokenizer))``.
        """
        names = dict.fromkeys(map(str, new_tokens or ()))
        new = [name for name in names if name not in self._ids and name != _PAD]
        if new:
            # Before anything is changed, as a name may be refused.
            vocab = self._vocab.extended(new)
            self._added += new
            self._use(vocab)
            super()._add_tokens([AddedToken(x, special=True, normalized=False) for x in new])
            self.init_kwargs["added_symbols"] = list(self._added)
        return len(new)

    def _use(self, vocab: Vocab) -> None:
        self._vocab = vocab
        self._ids = {symbol: number for number, symbol in enumerate(vocab.symbols)}
        self._beyond = None if _PAD in self._ids else len(vocab)
        # A vocabulary of bytes writes added symbols as nothing; of words, with spaces around them.
        added = (self._ids[name] for name in self._added)
        self._unwritten = {self._beyond, *(n for n in added if not vocab.decode([n]))}

    def _encode_plus(self, text: Any, text_pair: Any = None, **kwargs: Any) -> BatchEncoding:
        try:
            return super()._encode_plus(text, text_pair, **kwargs)
        except Exception:
            # The backend does not say what it lacks.
            for part in _strings((text, text_pair)):
                self._vocab.require_unicode(part)
                self._vocab.encode(part)
            raise

    def _number(self, token: str) -> int | None:
        """Return the ID of a token, given as listed or as a text that is encoded as it."""
        if token == _PAD and self._beyond is not None:
            return self._beyond
        try:
            return self._vocab.number_of(token)
        except ValueError:
            return None

    def _convert_token_to_id_with_added_voc(self, token: str) -> int | None:
        number = self._number(token)
        return self._vocab.unk_id if number is None else number

    def _convert_id_to_token(self, index: int) -> str:
        if index == self._beyond:
            return _PAD
        if not 0 <= index < len(self._vocab):
            # Which is refused in words; a list would count from its end.
            self._vocab.decode([index])
        return self._vocab.symbols[index]

    def convert_ids_to_tokens(
        self, ids: int | Iterable[int], skip_special_tokens: bool = False
    ) -> str | list[str]:
        """Return the symbol of an ID, or of each ID of a list.

        Raises:
            InputError: An ID is not in the vocabulary.
        """
        if isinstance(ids, int):
            return self._convert_id_to_token(ids)
        numbers = list(map(int, ids))
        shown = self._without_special(numbers) if skip_special_tokens else numbers
        return [self._convert_id_to_token(number) for number in shown]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """Join symbols to text; strings that are none stay what they are."""
        numbers = [self._beyond if x == _PAD else self._ids.get(x) for x in tokens]
        if None in numbers:
            return super().convert_tokens_to_string(tokens)
        return self._decode([n for n in numbers if n is not None])

    def _without_special(self, ids: list[int]) -> list[int]:
        """Remove padding and special tokens that were added. Line ends are text."""
        # Padding is only at the start and at the end.
        real = [place for place, number in enumerate(ids) if number != self.pad_token_id]
        ids = ids[real[0] : real[-1] + 1] if real else []
        special = {self._ids[x] for x in {*self._added} & {*self.all_special_tokens}}
        return [number for number in ids if number not in special | {self._beyond}]

    def _decode(
        self, token_ids: int | list[int] | None, skip_special_tokens: bool = False, **kwargs: object
    ) -> str:
        if token_ids is None:
            raise InputError(
                "token_ids=None: programs that decode eos_token_id need one, and this vocabulary "
                "has no symbol that ends a text; name one of its symbols, as by AutoTokenizer."
                "from_pretrained(folder, eos_token='\\n').save_pretrained(folder)"
            )
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        if skip_special_tokens:
            ids = self._without_special(ids)
        parts = groupby(ids, self._unwritten.__contains__)
        return "".join(
            "".join(map(self._convert_id_to_token, x)) if is_symbol else self._vocab.decode(x)
            for is_symbol, x in parts
        )

    def _save_pretrained(
        self, save_directory: str | os.PathLike, file_names: tuple[str, ...], **kwargs: object
    ) -> tuple[str, ...]:
        """Write ``vocab.json`` and ``tokenizer.json``, which our own loader also reads."""
        self._vocab.save(Path(save_directory))
        files = (str(Path(save_directory, name)) for name in self.vocab_files_names.values())
        return *file_names, *files


def _strings(texts: object) -> list[str]:
    """Return all texts of nested lists."""
    if isinstance(texts, list | tuple):
        return [x for part in texts for x in _strings(part)]
    return [texts] if isinstance(texts, str) else []
