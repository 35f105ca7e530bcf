"""What earlier versions had: commands, options, settings and recipes, with what replaces them."""

from collections.abc import Mapping

from transformer_xl.errors import SettingsError

_NAMES = {
    "txl doctor says how fast a model is on this machine, and benchmarks/evaluation_speed.py "
    "measures the paper's Table 9": "bench",
    "runs are made one after the other, each with all threads": "compare.jobs",
    "an untrained model always begins with the same weights": "compress.seed",
    "old formats are not written any more; a model folder is written without it, and transformers "
    "5 reads one after import transformer_xl.hf": "convert.to",
    "docs/scale.md has the formulas, and the figures of the paper's recipes": "estimate",
    "txl eval --eval.mem_lens says what a longer memory is worth": "eval.by_position",
    "txl convert writes the lengths with which a model was published into its folder, and the "
    "recipes paper-* have them, for --mem_len, --attn_len and so on; a text that is split into "
    "words, as wiki.test.tokens is, needs --prepared": "eval.preset",
    "revision 47b3a2d of transformer_xl has kNN-LM, and docs/longer-memories.md its figures": (
        "eval.knn.k eval.knn.share eval.knn.temperature eval.knn.window generate.knn.k "
        "generate.knn.share generate.knn.temperature generate.knn.window"
    ),
    "model.generate(..., num_beams=4) of transformers searches with beams": (
        "generate.beam_size generate.length_penalty"
    ),
    "repetition_penalty or dry_multiplier is for repetitions": "generate.presence_penalty "
    "generate.frequency_penalty",
    "top_p or min_p limits the tokens": "generate.typical_p",
    "penalties consider the last 1,024 tokens": "generate.penalty_window",
    "the factor of DRY is 1.75": "generate.dry_base",
    "repetitions of DRY go beyond line breaks": "generate.dry_sequence_breakers",
    "a loop repeats at most 256 tokens, at least 4 times": "generate.loop_max_period "
    "generate.loop_min_count",
    "revision 47b3a2d of transformer_xl has it": "model.state_size model.expand model.conv_width "
    "model.weight_dropout model.value_residual",
    "it was in revision 47b3a2d of transformer_xl; `txl recipes` lists the recipes": (
        "recipe.compare-mamba2 recipe.compare-rwkv recipe.compare-xlnet recipe.compare-xlstm "
        "recipe.compare-lstm-awd recipe.compare-gpt-cache recipe.digits-raw recipe.poems "
        "recipe.polarity recipe.sentiment recipe.sentiment-language recipe.sentiment-tuned "
        "recipe.translation-de-en recipe.translation-en-fr"
    ),
    "--json has the gains, from which any program draws the curve": "recl.plot",
    "the shortest context is a step long; --recl.step sets both": "recl.first",
    "a longer context counts from a gain of 0.01, as in the paper": "recl.threshold",
    "a batch has about 16,384 tokens": "recl.batch_tokens",
    "a model without memory reads as much as in its training": "recl.window",
    "the test text is read, or valid without one; --file gives another": "recl.split",
    "txl recipes paper-wt103-base --copy FILE copies a training of the paper, and "
    "docs/migration.md has the settings that take the place of the authors' options": (
        "recipes.from_authors"
    ),
    "a report is written when a training ends; the same command txl train writes it again": (
        "report"
    ),
    "transformer_xl.inference.losses(model, texts, lengths) reads each text by itself": (
        "score.separate_lines"
    ),
    "TXL_API_KEY has several keys, one a line": "serve.api_keys",
    "a request has at most --max_queue texts": "serve.max_texts",
    "let the proxy remove the path that it adds": "serve.root_path",
    "sessions of a folder are read when they are used": "serve.sessions_in_memory",
    "each answer is saved before it ends": "serve.save",
    "--template TEXT has the text of one message with {role} and {content}; templates in Jinja are "
    "programs, which the server does not run": "serve.chat_template",
    "sessions are no longer in Redis: each server has a folder of its own, and a proxy sends a "
    "session to its server by the header X-Session, as docs/serving.md shows": (
        "serve.session_lease serve.session_snapshot"
    ),
    "the scale of the loss in float16 is found by itself": "train.loss_scale",
    "the schedule plateau is gone; constant_cooldown ends a training in its time": (
        "train.patience train.decay_rate"
    ),
    "updates are skipped where the gradient is not finite, and no others": (
        "train.skip_norm train.spike"
    ),
}
"""What replaces them; of an option the name of its command comes first, of a setting that of its
section, of a recipe ``recipe``."""
GONE = {name: why for why, names in _NAMES.items() for name in names.split()}
"""What replaces each."""
_WITHOUT_EFFECT: dict[str, dict[str, object]] = {
    "model": {
        "state_size": 128,
        "expand": 2,
        "conv_width": 4,
        "weight_dropout": 0.0,
        "value_residual": False,
    },
    "train": {"loss_scale": None, "skip_norm": 0, "decay_rate": ..., "patience": ..., "spike": ...},
    "generate": {
        "beam_size": None,
        "dry_base": 1.75,
        "dry_sequence_breakers": (["\n"], []),
        "frequency_penalty": 0,
        "length_penalty": 1.0,
        "loop_max_period": 256,
        "loop_min_count": 4,
        "penalty_window": 1_024,
        "presence_penalty": 0,
        "typical_p": 1,
    },
}
"""Stored values that are ignored: those that changed no result, or were the default (``...``: any;
a tuple: each of them)."""


def without_gone(values: Mapping[str, object], section: str) -> dict[str, object]:
    """Return the values of a section without those of settings of earlier versions.

    Raises:
        SettingsError: Such a setting had an effect.
    """
    harmless = _WITHOUT_EFFECT.get(section, {})
    for name in values.keys() & harmless.keys():
        ignored = harmless[name]
        ignored = ignored if isinstance(ignored, tuple) else (ignored,)
        if ... not in ignored and values[name] not in ignored:
            path = f"{section}.{name}"
            raise SettingsError(f"{path}={values[name]!r} is gone: {GONE[path]}; leave it out")
    return {name: value for name, value in values.items() if name not in harmless}
