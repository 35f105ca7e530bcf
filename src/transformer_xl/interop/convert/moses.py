r"""The Moses rules for English words, as a normalizer of a ``tokenizers`` file.

Hugging Face's TransfoXLTokenizer cut text by a port of Moses, the tools of statistical machine
translation: quotes and spaces are put in one form, marks are set apart, full stops stay with
abbreviations, ``well-known`` becomes ``well @-@ known`` and ``2.5`` becomes ``2 @.@ 5``. Here each
step is a regular expression and a constant in its place, so that the file needs no other program.

A constant cannot repeat what stood there, therefore spaces are put in where nothing is taken
away, and what a step must remember is held by noncharacters of Unicode, which no text contains.
In a regular expression ``\K`` keeps what was matched before it out of what is replaced.

Letters are those of the port's tables: no Chinese characters, no Hangul, nothing beyond
U+FFFF. Some 400 letters that Unicode received since those tables were made are letters here and
marks there; this is the only known difference.
"""

import re
from collections.abc import Iterable, Sequence
from typing import cast

from tokenizers import Regex, normalizers

from transformer_xl.data.imported import SPACE

LINE_BREAK = r"\r\n?|\n"

_RUN_DOT, _LINE, _MARK, _OPEN, _CLOSE = "\ufdd0", "\ufdd1", "\ufdd2", "\ufdd3", "\ufdd4"
_HELD = "\ufdd0-\ufdd4"

# Signs that silence a vowel or alter a consonant in Indian scripts count as letters.
_SIGNS = (
    "\u093c\u094d\u09bc\u09cd\u0a3c\u0a4d\u0abc\u0acd\u0afd-\u0aff\u0b3c\u0b4d\u0bcd\u0c4d\u0cbc"
    "\u0ccd\u0d3b\u0d3c\u0d4d\u0dca\u0eba\u1039\u135f\u1714\u1bab\u1c37\ua8c4\ua953\uaaf6"
)
_NO_LETTERS = r"\p{Han}\x{AC00}-\x{D7A3}\x{10000}-\x{10FFFF}"
_ALPHA = rf"[{_SIGNS}{_OPEN}][\p{{Alphabetic}}&&[^{_NO_LETTERS}]]"
_NUMBER = rf"[{_CLOSE}][\p{{N}}&&[^{_NO_LETTERS}]]"
_ALNUM = rf"{_ALPHA}[{_CLOSE}][\p{{Nd}}&&[^\x{{10000}}-\x{{10FFFF}}]]"
_LOWER = r"[\p{Lowercase}&&[^\x{10000}-\x{10FFFF}]]"

# Words whose full stop does not end a sentence; the second line only before a number.
_ABBREVIATIONS = (
    "[A-Z]|Adj|Adm|Adv|Asst|Bart|Bldg|Brig|Bros|Capt|Cmdr|Col|Comdr|Con|Corp|Cpl|DR|Dr|Drs|Ens|Gen"
    "|Gov|Hon|Hr|Hosp|Insp|Lt|MM|MR|MRS|MS|Maj|Messrs|Mlle|Mme|Mr|Mrs|Ms|Msgr|Op|Ord|Pfc|Ph|Prof"
    "|Pvt|Rep|Reps|Res|Rev|Rt|Sen|Sens|Sfc|Sgt|Sr|St|Supt|Surg|v|vs|rev|Rs|Nos|Nr|Jan|Feb|Mar"
    "|Apr|Jun|Jul|Aug|Sep|Oct|Nov|Dec"
)
_NUMBERED = "No|Art|pp"

_Rule = tuple[str, str]


def moses_normalizer(
    protected: Iterable[str] = (), line_end: str | None = None
) -> normalizers.Normalizer:
    """Make the normalizer that sets tokens apart by spaces.

    Args:
        protected: Words in angle brackets that stay whole in any case of letters, as ``<unk>``.
        line_end: The symbol of a line break, which then ends the reach of every rule. None: a
            line break is a space.
    """
    rules: list[_Rule] = [(f"[{_HELD}]", "\N{REPLACEMENT CHARACTER}")]
    if line_end is not None:
        rules.append((LINE_BREAK, _LINE))
    rules += [_strip(f"[{SPACE}]"), *_PUNCTUATION, _strip(f"[{SPACE}]"), *_SPACES]
    names = "|".join(re.escape(x[1:-1]) for x in protected if re.fullmatch(r"<\w+>", x))
    if names:
        rules += [(f"<(?=(?i:{names})>)", _OPEN), (rf"{_OPEN}(?i:{names})\K>", _CLOSE)]
    rules += [_strip(" "), *_TOKENS, *_NUMBERS, (_OPEN, "<"), (_CLOSE, ">")]
    if line_end is not None:
        rules.append((_LINE, f" {line_end} "))
    return replacements(rules)


def replacements(rules: Sequence[_Rule]) -> normalizers.Normalizer:
    """Make a normalizer that carries out regular expressions and constants one by one."""
    steps = [cast(normalizers.Normalizer, normalizers.Replace(Regex(a), b)) for a, b in rules]
    return cast(normalizers.Normalizer, normalizers.Sequence(steps))


def _strip(space: str) -> _Rule:
    return rf"(?:\A|(?<={_LINE})){space}+|(?<!{space}){space}++(?={_LINE}|\z)", ""


def _between(left: str, middle: str, right: str, replacement: str) -> list[_Rule]:
    """Replace ``middle``; what stood to its right cannot be the left of the next."""
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
    # A quote goes behind the marks that follow it.
    ('"(?=[,.])', _MARK),
    (rf"{_MARK}[,.]+\K", '"'),
    (_MARK, ""),
    *_between(r"\d", "\xa0", r"\d", "."),
]

_SPACES: list[_Rule] = [(f"[{SPACE}]+", " "), (r"[\x00-\x1f]", "")]

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
    # The full stop at the end of a word stands alone, but not behind an abbreviation, in a word
    # of letters with another full stop, or before a small letter.
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
