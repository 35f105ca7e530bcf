from .catalogue import (
    KNOWN_CORPORA,
    common_settings,
)
from .completions import (
    in_completion,
)
from .corpus import (
    Corpus,
    raw_split,
    write_corpus,
)
from .finding import (
    list_texts,
)
from .imported import (
    SPACE,
    ImportedVocab,
    Rules,
    cutter,
)
from .making_vocab import (
    train_vocab,
)
from .normalizing import (
    Normalizer,
    describe_changes,
    normalized,
    normalized_prompt,
)
from .preparing import (
    cache_folder,
    prepare,
)
from .recordings import (
    UNCOUNTED,
    FeatureCorpus,
    Recordings,
    open_corpus,
    open_features,
    read_recordings,
    write_recordings,
)
from .segments import (
    FeatureSegments,
    Segments,
)
from .text import (
    split_point,
)
from .unpacking import (
    RAW_REMEDY,
    opened,
    optional_package,
)
from .vocab import (
    EOS,
    HALF,
    UNK,
    VOCAB_FILE,
    StreamDecoder,
    Vocab,
    byte_characters,
    count_by_treatment,
    describe_unknown,
    read_tokenizer,
    surrogate_error,
    unknown_warning,
)
from .vocab_files import (
    is_vocabulary,
    load_vocab,
)

__all__ = [
    "EOS",
    "HALF",
    "KNOWN_CORPORA",
    "RAW_REMEDY",
    "SPACE",
    "UNCOUNTED",
    "UNK",
    "VOCAB_FILE",
    "Corpus",
    "FeatureCorpus",
    "FeatureSegments",
    "ImportedVocab",
    "Normalizer",
    "Recordings",
    "Rules",
    "Segments",
    "StreamDecoder",
    "Vocab",
    "byte_characters",
    "cache_folder",
    "common_settings",
    "count_by_treatment",
    "cutter",
    "describe_changes",
    "describe_unknown",
    "in_completion",
    "is_vocabulary",
    "list_texts",
    "load_vocab",
    "normalized",
    "normalized_prompt",
    "open_corpus",
    "open_features",
    "opened",
    "optional_package",
    "prepare",
    "raw_split",
    "read_recordings",
    "read_tokenizer",
    "split_point",
    "surrogate_error",
    "train_vocab",
    "unknown_warning",
    "write_corpus",
    "write_recordings",
]
