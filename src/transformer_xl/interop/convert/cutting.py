"""How old vocabularies cut text, as a ``tokenizers`` file."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, normalizers

from transformer_xl.data.imported import ImportedVocab, LineEnds, Rules, cutter
from transformer_xl.interop.convert.moses import moses_normalizer, replacements


class Wishes(NamedTuple):
    """What the caller of `read_vocab` asked for."""

    size: int | None = None
    dataset: str | None = None
    line_ends: bool | None = None
    unknown: str | None = None
    moses: bool | None = None


class Added(NamedTuple):
    """A token that Hugging Face's tokenizer finds before it cuts the text."""

    content: str
    number: int
    options: dict[str, bool]


def imported_vocab(
    symbols: Sequence[str],
    rules: Rules,
    where: object,
    wishes: Wishes,
    *,
    lower_case: bool,
    dropped: str = "",
    added: Sequence[Added] | None = None,
    protected: Sequence[str] = (),
) -> ImportedVocab:
    """Make a vocabulary of the symbols and rules of an old one.

    Args:
        symbols: The symbols, in the order of their numbers.
        rules: How its program joined them; ``line_ends`` as that program had it.
        where: The file, for errors.
        wishes: What the caller wants otherwise.
        lower_case: Whether text becomes lower case.
        dropped: A regular expression for what is left out of bytes and characters.
        added: Tokens of Hugging Face's tokenizer; None: this is a vocabulary of the authors.
        protected: Words that the Moses rules keep whole.

    Raises:
        ValueError: A wish cannot be granted.
    """
    rules = _grant(rules, {*symbols, *(x.content for x in added or ())}, where, wishes)
    steps = _lower_case(is_huggingface=added is not None) if lower_case else []
    if rules.join == "moses":
        line_end = None if rules.line_ends == "none" else rules.eos
        steps.append(moses_normalizer(protected, line_end))
    elif rules.join == "words":
        steps.append(replacements(_line_marks(rules)))
    if dropped:
        steps.append(replacements([(dropped, "")]))
    tokenizer = cutter(symbols, rules, steps)
    for token in added or ():
        tokenizer.add_tokens([AddedToken(token.content, normalized=False, **token.options)])
    return ImportedVocab(tokenizer.to_str(pretty=True), rules)


def _grant(rules: Rules, known: set[str], where: object, wishes: Wishes) -> Rules:
    line_ends: LineEnds = rules.line_ends
    if wishes.line_ends is False:
        line_ends = "none"
    elif wishes.line_ends and line_ends == "none":
        line_ends = "after"
        if rules.join in ("bytes", "chars"):
            raise ValueError(f"{where}: line_ends: a vocabulary of {rules.join} has no line ends")
        if rules.eos is None:
            raise ValueError(f"{where}: line_ends needs <eos> in the vocabulary; it is not there")
    unk = rules.unk if rules.unk is not None else wishes.unknown
    if unk is not None and unk not in known:
        raise ValueError(f"unknown={unk!r} is not in the vocabulary of {where}")
    return dataclasses.replace(rules, line_ends=line_ends, unk=unk)


def _lower_case(*, is_huggingface: bool) -> list[Any]:
    lower: list[Any] = [normalizers.Lowercase()]
    if is_huggingface:
        return lower  # Letter by letter.
    # Python writes the last sigma of a word in its own way.
    return [normalizers.Replace(Regex(r"(?<=\p{L})Σ(?!\p{L})"), "ς"), *lower]


def _line_marks(rules: Rules) -> list[tuple[str, str]]:
    if rules.line_ends == "none":
        return []
    mark = f" {rules.eos} "
    begin = [(r"(?:\A|(?<=\n))(?!\z)", mark)] if rules.line_ends == "around" else []
    return [(r"\r\n?", "\n"), *begin, (r"\n", mark)]
