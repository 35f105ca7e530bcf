"""The ``tokenizers`` backend of a vocabulary, which transformers needs for offsets and padding.

It is built in memory: the files of a folder stay what our own loader reads.
"""

import re

from tokenizers import Regex, Tokenizer, decoders, models

from transformer_xl.data import EOS, UNK, ImportedVocab, Vocab, read_tokenizer

# Words hold no blank, so that none begins with this mark of the rest of a word.
_NO_PREFIX = " "


def encodes_lines(vocab: Vocab) -> bool:
    """Whether each line is encoded as a text of its own, which no backend expresses."""
    return bool(getattr(vocab, "encodes_lines", False))


def backend_of(vocab: Vocab) -> Tokenizer:
    """Return a backend with the token IDs of ``vocab.encode`` and the text of ``vocab.decode``.

    For a vocabulary that encodes lines it takes texts as lists of tokens. It decodes to another
    text where the rules for joining tokens are those of an old program, and added tokens.
    """
    if encodes_lines(vocab):
        ids = {symbol: number for number, symbol in enumerate(vocab.symbols)}
        return Tokenizer(models.WordLevel(ids, unk_token=""))
    tokenizer = read_tokenizer(vocab.definition)
    if vocab.kind == "brought":
        # Nothing is added to a text, as by the vocabulary.
        tokenizer.post_processor = None
    if tokenizer.decoder is None or vocab.kind == "chars":
        decoder = _decoder(vocab)
        if decoder is not None:
            tokenizer.decoder = decoder
    return tokenizer


def _decoder(vocab: Vocab) -> decoders.Decoder | None:
    if vocab.kind == "chars":
        unknown = decoders.Replace(Regex(rf"\A{re.escape(UNK)}\z"), "\ufffd")
        return decoders.Sequence([unknown, decoders.Fuse()])
    eos: str | None = EOS
    if isinstance(vocab, ImportedVocab):
        rules = vocab.rules
        if rules.join != "words" or rules.line_ends == "around":
            return None
        eos = rules.line_end
    elif vocab.kind not in ("words", "integers"):
        return None
    steps = [decoders.WordPiece(prefix=_NO_PREFIX, cleanup=False), decoders.Fuse()]
    if eos is not None:
        line_end = Regex(rf" ?(?<![^ ]){re.escape(eos)}(?: |\z)")
        steps.append(decoders.Replace(line_end, "\n"))
    return decoders.Sequence(steps)
