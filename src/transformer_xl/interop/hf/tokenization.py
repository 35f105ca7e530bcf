"""Our vocabularies as tokenizers for transformers."""

# Methods of transformers are overridden with the arguments that they are called with.
# pyright: reportIncompatibleMethodOverride=false

import os
import re
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizer

from transformer_xl.data.vocab import Vocab
from transformer_xl.data.vocab_files import load_vocab
from transformer_xl.interop.hf.configuration import path_of

_PAD = "<pad>"
# A line break as a character, and as a byte in the alphabet of byte-level tokenizers.
_LINE_ENDS = ("\n", "\u010a")
_PADS = ("<pad>", "[PAD]", "<|pad|>", "<|padding|>")


class TransformerXLTokenizer(PreTrainedTokenizer):
    """Encodes and decodes text with the vocabulary of the folder.

    Of any kind: bytes, characters, words, byte-pair units, tokenizers and vocabularies of other
    programs. ``eos_token`` is the symbol that ends a line, if there is one. Most vocabularies have
    no symbol for padding, and a word of the text must not be one: it would be left out of losses
    and texts. ``pad_token`` is then ``<pad>`` with the first number beyond the vocabulary, which
    the model reads nowhere: the attention mask marks padding. ``bos_token`` is the line break where
    nothing ends a line.

    Args:
        vocab_file: The ``vocab.json`` of a folder.
        definition_file: The ``tokenizer.json`` in the same folder.
        vocab: A vocabulary, instead of these.
        added_symbols: Symbols that were added to it, as ``add_tokens`` does.
        plain_symbols: Those of them that are no special tokens: ``skip_special_tokens`` keeps them.
        kwargs: Settings of transformers.

    Raises:
        ValueError: There is no vocabulary, or a named token is not one of its symbols.
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
        plain_symbols: Sequence[str] = (),
        **kwargs: Any,
    ) -> None:
        if vocab is None:
            if vocab_file is None or definition_file is None:
                raise ValueError(
                    "the folder holds no vocabulary (vocab.json and tokenizer.json): give one that "
                    "does; `txl convert OLD NEW --vocab FILE` writes a converted model with its own"
                )
            vocab = load_vocab(Path(vocab_file).parent)
        self._added, self._plain = list(added_symbols), list(plain_symbols)
        missing = [x for x in self._added if x not in vocab.symbols]
        self._take(vocab.extended(missing) if missing else vocab)
        vocab = self._vocab
        roles = {"eos_token": vocab.eos_id, "unk_token": vocab.unk_id}
        given = {name: None if n is None else vocab.symbols[n] for name, n in roles.items()}
        if vocab.eos_id is None:
            # What a text without a beginning is written or scored after.
            given["bos_token"] = next((x for x in _LINE_ENDS if x in self._ids), None)
        given["pad_token"] = next((symbol for symbol in _PADS if symbol in self._ids), _PAD)
        for name, token in given.items():
            if kwargs.get(name) is None:
                kwargs[name] = token
        for name, token in kwargs.items():
            is_known = not isinstance(token, str) or token in self._ids
            if name.endswith("_token") and not is_known and (name, token) != ("pad_token", _PAD):
                raise ValueError(
                    f"{name}={token!r} is not one of the {len(vocab)} symbols of the vocabulary: "
                    f"choose one of them, or add it by add_special_tokens({{{name!r}: {token!r}}})"
                )
        if self._added:
            kwargs["added_symbols"] = list(self._added)
        if self._plain:
            kwargs["plain_symbols"] = list(self._plain)
        super().__init__(**kwargs)

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike, *args: Any, **kwargs: Any
    ) -> Any:
        """Read the vocabulary of a model folder, or of a shipped model by its name."""
        name = path_of(pretrained_model_name_or_path)
        return super().from_pretrained(name, *args, **kwargs)

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

    def _add_tokens(self, new_tokens: Any, special_tokens: bool = False) -> int:
        """Add symbols that no text is encoded as, unless it has them in full.

        The model needs a row for each: ``model.resize_token_embeddings(len(tokenizer))``.
        """
        given = {str(x): special_tokens or getattr(x, "special", False) for x in new_tokens or ()}
        new = [name for name in given if name not in self._ids and name != _PAD]
        if new:
            # Before anything is changed, as a name may be refused.
            vocab = self._vocab.extended(new)
            self._added += new
            self._plain += [name for name in new if not given[name]]
            self._take(vocab)
            self.init_kwargs["added_symbols"] = list(self._added)
        # One that is added again as a special token is one.
        self._plain = [name for name in self._plain if not given.get(name)]
        self.init_kwargs["plain_symbols"] = list(self._plain)
        return len(new)

    def _take(self, vocab: Vocab) -> None:
        self._vocab = vocab
        self._ids = {symbol: number for number, symbol in enumerate(vocab.symbols)}
        self._beyond = None if _PAD in self._ids else len(vocab)
        # A vocabulary of bytes writes added symbols as nothing; of words, with spaces around them.
        added = (self._ids[name] for name in self._added)
        self._unwritten = {self._beyond, *(n for n in added if not vocab.decode([n]))}

    def tokenize(self, text: str, **kwargs: Any) -> list[str]:
        """Split a text into symbols.

        Raises:
            ValueError: A part of it has no symbol in the vocabulary.
        """
        symbols, found = self._vocab.symbols, list[str]()
        # The longest first, where one begins with another.
        added = sorted(self._added, key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, added))})", text) if added else [text]
        for n, part in enumerate(parts):
            if n % 2:
                found.append(part)
            elif part or len(parts) == 1:
                found += [symbols[number] for number in self._vocab.encode(part)]
        return found

    def _convert_token_to_id(self, token: str) -> int | None:
        is_beyond = token == _PAD and self._beyond is not None
        return self._beyond if is_beyond else self._ids.get(token, self._vocab.unk_id)

    def _convert_id_to_token(self, index: int) -> str:
        if index == self._beyond:
            return _PAD
        if not 0 <= index < len(self._vocab):
            # Which is refused in words; a list would count from its end.
            self._vocab.decode([index])
        return self._vocab.symbols[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """Join symbols to text."""
        known = self._ids if self._beyond is None else {**self._ids, _PAD: self._beyond}
        return self._decode([known[token] for token in tokens])

    def _decode(
        self, token_ids: int | list[int] | None, skip_special_tokens: bool = False, **kwargs: Any
    ) -> str:
        if token_ids is None:
            raise ValueError(
                "token_ids=None: programs that decode eos_token_id need one, and this vocabulary "
                "has no symbol that ends a text; name one of its symbols, as by AutoTokenizer."
                "from_pretrained(folder, eos_token='\\n').save_pretrained(folder)"
            )
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        if skip_special_tokens:
            # Line ends are text. Padding is not; it is only at the start and at the end.
            real = [place for place, number in enumerate(ids) if number != self.pad_token_id]
            ids = ids[real[0] : real[-1] + 1] if real else []
            plain = {*self._plain} - {*self.all_special_tokens}
            special = {self._beyond, *(self._ids[name] for name in {*self._added} - plain)}
            ids = [number for number in ids if number not in special]
        parts = groupby(ids, self._unwritten.__contains__)
        return "".join(
            "".join(map(self._convert_id_to_token, x)) if is_symbol else self._vocab.decode(x)
            for is_symbol, x in parts
        )

    def save_vocabulary(
        self, save_directory: str, filename_prefix: str | None = None
    ) -> tuple[str, ...]:
        """Write ``vocab.json`` and ``tokenizer.json``, which our own loader also reads."""
        folder = Path(save_directory)
        self._vocab.save(folder)
        return tuple(str(folder / name) for name in self.vocab_files_names.values())
