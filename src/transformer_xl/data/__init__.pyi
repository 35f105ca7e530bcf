from .catalogue import (
    KNOWN_CORPORA,
)
from .completions import (
    in_completion,
)
from .corpus import (
    Corpus,
    write_corpus,
)
from .decoding import (
    StreamDecoder,
)
from .finding import (
    list_texts,
)
from .imported import (
    ImportedVocab,
    Rules,
)
from .making_vocab import (
    train_vocab,
)
from .normalizing import (
    Normalizer,
)
from .preparing import (
    prepare,
)
from .recordings import (
    FeatureCorpus,
    Recordings,
    open_corpus,
    write_recordings,
)
from .segments import (
    Segments,
    SegmentsState,
)
from .text import (
    split_point,
)
from .unpacking import (
    opened,
    optional_package,
)
from .vocab import (
    Vocab,
)
from .vocab_files import (
    is_vocabulary,
    load_vocab,
)

__all__ = [
    "KNOWN_CORPORA",
    "Corpus",
    "FeatureCorpus",
    "ImportedVocab",
    "Normalizer",
    "Recordings",
    "Rules",
    "Segments",
    "SegmentsState",
    "StreamDecoder",
    "Vocab",
    "in_completion",
    "is_vocabulary",
    "list_texts",
    "load_vocab",
    "open_corpus",
    "opened",
    "optional_package",
    "prepare",
    "split_point",
    "train_vocab",
    "write_corpus",
    "write_recordings",
]
