r"""Tokenization by old vocabularies, as a ``tokenizers`` file.

The authors split at spaces; Hugging Face's TransfoXLTokenizer by a port of Moses, the tools of
statistical machine translation: quotes and spaces are normalized, punctuation is separated, full
stops stay with abbreviations, ``well-known`` becomes ``well @-@ known`` and ``2.5`` becomes
``2 @.@ 5``. Here each step is a regular expression with a constant replacement, so that the file
needs no other program.

A constant cannot repeat the matched text; therefore spaces are inserted by empty matches, and state
between steps is encoded by noncharacters of Unicode, which no text contains. In a regular
expression ``\K`` excludes the text matched before it from the replacement.

Letters are those of the port's tables: no Chinese characters, no Hangul, nothing beyond
U+FFFF. Some 400 letters that were added to Unicode after those tables are letters here and
punctuation there; this is the only known difference.
"""

import re
from collections.abc import Iterable, Sequence
from typing import cast

from tokenizers import AddedToken, Regex, normalizers

from transformer_xl.data import ImportedVocab, Rules


def imported_vocab(
    symbols: Sequence[str],
    rules: Rules,
    *,
    lower_case: bool,
    dropped: str = "",
    added: Sequence[AddedToken] | None = None,
    protected: Sequence[str] = (),
) -> ImportedVocab:
    """Build a vocabulary from the symbols of an old one and the rules of its program.

    Args:
        symbols: The symbols, in the order of their IDs.
        rules: The rules for joining tokens.
        lower_case: Whether text becomes lower case.
        dropped: A regular expression for text that is removed before it is split.
        added: Tokens that are matched first. None: the vocabulary is one of the authors.
        protected: Words that the Moses rules do not split.
    """
    steps: list[normalizers.Normalizer] = []
    if lower_case and added is None:
        # Python has another lower-case sigma at the end of a word; Hugging Face has not.
        steps.append(normalizers.Replace(Regex(r"(?<=\p{L})Σ(?!\p{L})"), "ς"))
    if lower_case:
        steps.append(normalizers.Lowercase())
    if rules.join == "moses":
        steps.append(moses_normalizer(protected))
    elif rules.join == "words":
        steps.append(_replacements(_line_marks(rules)))
    if dropped:
        steps.append(_replacements([(dropped, "")]))
    return ImportedVocab.of(symbols, rules, steps, added or ())


def _line_marks(rules: Rules) -> list[tuple[str, str]]:
    if rules.line_ends == "none":
        return []
    mark = f" {rules.eos} "
    begin = [(r"(?:\A|(?<=\n))(?!\z)", mark)] if rules.line_ends == "around" else []
    return [(r"\r\n?", "\n"), *begin, (r"\n", mark)]


# No rule writes _LINE, a line break across which none matches; files that were converted have it.
_RUN_DOT, _LINE, _MARK, _OPEN, _CLOSE = "\ufdd0", "\ufdd1", "\ufdd2", "\ufdd3", "\ufdd4"
_HELD = "\ufdd0-\ufdd4"

# Viramas and nuktas of Indic scripts count as letters.
_SIGNS = (
    "\u093c\u094d\u09bc\u09cd\u0a3c\u0a4d\u0abc\u0acd\u0afd-\u0aff\u0b3c\u0b4d\u0bcd\u0c4d\u0cbc"
    "\u0ccd\u0d3b\u0d3c\u0d4d\u0dca\u0eba\u1039\u135f\u1714\u1bab\u1c37\ua8c4\ua953\uaaf6"
)
_NO_LETTERS = r"\p{Han}\x{AC00}-\x{D7A3}\x{10000}-\x{10FFFF}"
_ALPHA = rf"[{_SIGNS}{_OPEN}][\p{{Alphabetic}}&&[^{_NO_LETTERS}]]"
_NUMBER = rf"[{_CLOSE}][\p{{N}}&&[^{_NO_LETTERS}]]"
_ALNUM = rf"{_ALPHA}[{_CLOSE}][\p{{Nd}}&&[^\x{{10000}}-\x{{10FFFF}}]]"
_LOWER = r"[\p{Lowercase}&&[^\x{10000}-\x{10FFFF}]]"

# Abbreviations whose full stop does not end a sentence; the second line only before a number.
_ABBREVIATIONS = (
    "[A-Z]|Adj|Adm|Adv|Asst|Bart|Bldg|Brig|Bros|Capt|Cmdr|Col|Comdr|Con|Corp|Cpl|DR|Dr|Drs|Ens|Gen"
    "|Gov|Hon|Hr|Hosp|Insp|Lt|MM|MR|MRS|MS|Maj|Messrs|Mlle|Mme|Mr|Mrs|Ms|Msgr|Op|Ord|Pfc|Ph|Prof"
    "|Pvt|Rep|Reps|Res|Rev|Rt|Sen|Sens|Sfc|Sgt|Sr|St|Supt|Surg|v|vs|rev|Rs|Nos|Nr|Jan|Feb|Mar"
    "|Apr|Jun|Jul|Aug|Sep|Oct|Nov|Dec"
)
_NUMBERED = "No|Art|pp"

_Rule = tuple[str, str]


def moses_normalizer(protected: Iterable[str] = ()) -> normalizers.Normalizer:
    """Build the normalizer that separates tokens by spaces, by the Moses rules for English.

    Args:
        protected: Words in angle brackets that are not split, in any case, such as ``<unk>``.
    """
    rules: list[_Rule] = [(f"[{_HELD}]", "\N{REPLACEMENT CHARACTER}")]
    rules += [
        _strip(f"[{ImportedVocab.SPACE}]"),
        *_PUNCTUATION,
        _strip(f"[{ImportedVocab.SPACE}]"),
        *_SPACES,
    ]
    names = "|".join(re.escape(x[1:-1]) for x in protected if re.fullmatch(r"<\w+>", x))
    if names:
        rules += [(f"<(?=(?i:{names})>)", _OPEN), (rf"{_OPEN}(?i:{names})\K>", _CLOSE)]
    rules += [_strip(" "), *_TOKENS, *_NUMBERS, (_OPEN, "<"), (_CLOSE, ">")]
    return _replacements(rules)


def _replacements(rules: Sequence[_Rule]) -> normalizers.Normalizer:
    """Build a normalizer that applies replacements of regular expressions in order."""
    steps = [cast(normalizers.Normalizer, normalizers.Replace(Regex(a), b)) for a, b in rules]
    return cast(normalizers.Normalizer, normalizers.Sequence(steps))


def _strip(space: str) -> _Rule:
    return rf"(?:\A|(?<={_LINE})){space}+|(?<!{space}){space}++(?={_LINE}|\z)", ""


def _between(left: str, middle: str, right: str, replacement: str) -> list[_Rule]:
    """Replace ``middle``; a match of ``right`` is not reused as ``left`` of the next one."""
    return [
        (rf"{left}{middle}{right}\K", _MARK),
        (rf"{middle}(?={right}{_MARK})", replacement),
        (_MARK, ""),
    ]


_PUNCTUATION: list[_Rule] = [
    (r"\r", ""),
    (r"\(", " ("),
    (r"\)", ") "),
    (" +", " "),
    (r"(?<=\)) (?=[.!:?;,])", ""),
    (r"(?<=\() ", ""),
    (r" (?=\))", ""),
    (r"(?<=\d) (?=%)", ""),
    (" (?=:)", ""),
    (" (?=;)", ""),
    ("`", "'"),
    ("''", ' " '),
    ("[„“”]", '"'),
    ("\N{EN DASH}", "-"),
    ("\N{EM DASH}", " - "),
    (" +", " "),
    ("[\xb4\u2018\u201a\u2019]", "'"),
    ("''", '"'),
    ("…", "..."),
    ("\xa0«\xa0|«\xa0?", '"'),
    ("\xa0»\xa0|\xa0?»", '"'),
    ("\xa0(?=[%:?!;])", ""),
    # A quote is moved after the punctuation that follows it.
    ('"(?=[,.])', _MARK),
    (rf"{_MARK}[,.]+\K", '"'),
    (_MARK, ""),
    *_between(r"\d", "\xa0", r"\d", "."),
]

_SPACES: list[_Rule] = [(f"[{ImportedVocab.SPACE}]+", " "), (r"[\x00-\x1f]", "")]

_MARKS = rf"[^{_ALNUM}\s.'`,\-{_HELD}]"
_END = rf" *(?:{_LINE}|\z)"
_WORD = rf"[^ {_LINE}]"

_TOKENS: list[_Rule] = [
    (rf"(?={_MARKS})|(?<={_MARKS})", " "),
    (rf"[{_ALNUM}]\K-(?=[{_ALNUM}])", " @-@ "),
    (r"\.(?=\.)|(?<=\.)\.", _RUN_DOT),
    (rf"(?<!{_RUN_DOT})(?={_RUN_DOT})|(?<={_RUN_DOT})(?!{_RUN_DOT})", " "),
    (rf"[^{_NUMBER}{_LINE}]\K,", " , "),
    (rf",(?=[^{_NUMBER}{_LINE}])", " , "),
    (rf"(?<=[{_NUMBER}]),(?={_LINE}|\z)", " , "),
    *_between(rf"[^{_ALPHA}{_LINE}{_MARK}]", "'", rf"[^{_ALPHA}{_LINE}{_MARK}]", " ' "),
    (rf"[^{_ALPHA}{_NUMBER}{_LINE}]\K'(?=[{_ALPHA}])", " ' "),
    (rf"(?<=[{_ALPHA}])'(?=[^{_ALPHA}{_LINE}])", " ' "),
    *_between(f"[{_ALPHA}]", "'", f"[{_ALPHA}]", " '"),
    (rf"(?<=[{_NUMBER}])'(?=s)", " '"),
    # A full stop at the end of a word is separated, except after an abbreviation, in a word of
    # letters with another full stop, or before a lower-case letter.
    (
        rf"(?<!{_WORD})(?={_WORD}++(?<=\.))"
        rf"(?!(?=[^ .{_LINE}]*+\.{_WORD})[^ {_LINE}{_ALPHA}]*+[{_ALPHA}])"
        rf"(?!(?:{_ABBREVIATIONS})\.(?!{_WORD}))(?!(?:{_NUMBERED})\. +[0-9])"
        rf"{_WORD}+(?=\.(?:{_END}| +[^ {_LINE}{_LOWER}]))\K",
        " ",
    ),
    (rf"\.'(?={_END})", " . ' "),
]

_NUMBERS: list[_Rule] = [
    (r"(?<=\d),(?=\d)", " @,@ "),
    (r"(?<=\d)\.(?=\d)", " @.@ "),
    (_RUN_DOT, "."),
]
