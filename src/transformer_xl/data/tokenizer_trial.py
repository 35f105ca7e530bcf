"""Tokenizers of other programs, tried in a child process before they are used.

A ``tokenizer.json`` can ask for a padding of 10^12 tokens, for rules that make a text grow without
bound, or for patterns that backtrack for ever. The library that executes it then panics, aborts
the process or hangs, none of which a caller can catch. So such a file is checked for its size and
number of rules, and tokenizes sample texts in a process with limits on memory and time.
"""

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from transformer_xl.config.child_limits import command_of, environment, limit_this_process

LARGEST = 128 << 20
"""Largest file in bytes."""
_SECONDS = 3
_WAITING = 10
"""Times as long as it may compute, as other processes may have the processor."""
_BYTES = 512 << 20
_MOST_RULES = 256
_MOST_ADDED = 100_000
_LONGEST = 10_000
_MOST_GROWTH = 100
_SAFE: dict[str, str] = {}
_SWITCHED_ON = re.compile(r'"(?:padding|truncation)"\s*:\s*[^\sn]')
COMMAND = command_of(
    "from transformer_xl.data.tokenizer_trial import try_standard_input as run; run()"
)
"""The child process."""


def without_padding(definition: str) -> str:
    """Return a ``tokenizer.json`` that neither pads nor truncates."""
    if not _SWITCHED_ON.search(definition):
        return definition
    values = json.loads(definition)
    off = {"padding": None, "truncation": None}
    is_off = not isinstance(values, dict) or all(values.get(x) is None for x in off)
    return definition if is_off else json.dumps(values | off)


def tried(data: bytes) -> str:
    """Return the text of a ``tokenizer.json``, or of a SentencePiece model as one, that is safe.

    The result of a trial is remembered by the SHA-256 of the file.

    Raises:
        ValueError: It is too large, has too many rules, or failed the trial: it raised an error,
            or exceeded the limit on time or memory.
    """
    if len(data) > LARGEST:
        raise ValueError(f"it has {len(data):,} bytes, above the limit of {LARGEST:,}")
    checksum = hashlib.sha256(data).hexdigest()
    if checksum not in _SAFE:
        # Of a SentencePiece model, the child process has written a tokenizer.json.
        _SAFE[checksum] = _try_elsewhere(data) or data.decode()
    return _SAFE[checksum]


def _try_elsewhere(data: bytes) -> str:
    """Return what the child process writes."""
    seconds = _seconds(len(data))
    single = environment(TOKENIZERS_PARALLELISM="false", RAYON_NUM_THREADS="1")
    try:
        ended = subprocess.run(
            COMMAND, input=data, env=single, capture_output=True, timeout=_WAITING * seconds
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"tokenizing sample texts took more than {_WAITING * seconds} s") from None
    if ended.returncode:
        # The last line is the exception; a process that was killed has written none.
        lines = ended.stderr.decode(errors="replace").strip().splitlines() or [""]
        reason = lines[-1].removeprefix("ValueError: ")
        if ended.returncode < 0 or "memory allocation" in reason:
            reason = f"it exceeded {seconds} s or {_limit(len(data)) >> 20:,} MB of memory"
        raise ValueError(f"its trial failed: {reason}")
    return ended.stdout.decode()


def try_standard_input() -> None:
    """Load a tokenizer from the standard input and use it, as the child process of `tried`."""
    data = sys.stdin.buffer.read()
    limit_this_process(_limit(len(data)), _seconds(len(data)))
    if is_json := data.lstrip()[:1] == b"{":
        try:
            _check_rules(json.loads(data))
        except RecursionError:
            raise ValueError("its rules are nested too deeply") from None
        definition = without_padding(data.decode())
    else:
        from transformer_xl.data.sentencepiece_models import from_sentencepiece

        definition = from_sentencepiece(data)
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(definition)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    for text in _samples(definition):
        for has_special in (False, True):
            # An error, as of a text without a token, can be caught later, too.
            with suppress(Exception):
                tokenizer.decode(tokenizer.encode(text, add_special_tokens=has_special).ids)
    if not is_json:
        sys.stdout.buffer.write(definition.encode())


def _limit(size: int) -> int:
    return _BYTES + 64 * size


def _seconds(size: int) -> int:
    return _SECONDS + size // 1_000_000


def _samples(definition: str) -> Iterator[str]:
    """Yield texts: prose, all kinds of characters, long runs, and what the rules look for."""
    yield "The cat, 3.14; don't\r\n\tsay\u00a0\u3000 \u4e2d\u6587 \u05d0 \u0301\U0001f600 \x00 </s>"
    yield "".join(map(chr, [*range(0x250), *range(0x2000, 0x2070), 0xFB01, 0xFDFA, 0x1D400]))
    for character in "a 1.\n\t!\u4e2d\u0301":
        yield character * 40 + "\x01"
        yield (character + "b") * 2_000
    values = json.loads(definition)
    rules = [x for node in _rules(values) for x in (_pattern(node), node.get("content"))]
    added = [x.get("content") for x in values.get("added_tokens") or () if isinstance(x, dict)]
    for text in [x for x in rules if isinstance(x, str) and x]:
        # Long, as what a rule replaces once may be what the next one replaces many times.
        yield f"a {text} {text * (2_000 // len(text) + 2)}"
    for text in [x for x in added if isinstance(x, str)][:1_000]:
        yield f"a {text}{text} {text}"


def _rules(values: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield every normalizer, pre-tokenizer, post-processor and decoder."""
    kinds = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
    waiting = [values.get(kind) for kind in kinds]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            if "type" in node:
                yield node
            for value in node.values():
                waiting += value if isinstance(value, list) else [value]


def _pattern(node: dict[str, Any]) -> str | None:
    pattern = node.get("pattern")
    return pattern.get("String") if isinstance(pattern, dict) else None


def _check_rules(values: dict[str, Any]) -> None:
    """Check the number of rules, and how much they make a text grow.

    Raises:
        ValueError: A number is above its limit.
    """
    rules = list(_rules(values))
    if len(rules) > _MOST_RULES:
        raise ValueError(f"it has {len(rules):,} rules, above the limit of {_MOST_RULES}")
    added = values.get("added_tokens") or []
    if len(added) > _MOST_ADDED:
        raise ValueError(f"it has {len(added):,} added tokens, above the limit of {_MOST_ADDED:,}")
    lengths = [len(x["content"]) for x in added if isinstance(x, dict) and "content" in x]
    if max(lengths, default=0) > _LONGEST:
        raise ValueError(f"an added token has {max(lengths):,} characters, above {_LONGEST:,}")
    growth = 1.0
    for node in rules:
        content, pattern = node.get("content"), _pattern(node)
        if node.get("type") == "Replace" and isinstance(content, str) and pattern:
            growth *= max(1, content.count(pattern))
    if growth > _MOST_GROWTH:
        raise ValueError(
            f"its Replace rules make a text up to {growth:.3g} times as long, above the limit of "
            f"{_MOST_GROWTH:,}"
        )
