"""estimate, as a user types it."""

import json

import pytest

PAPER = ("estimate", "paper-wt103-large", "--gpus")


def test_estimate_says_what_a_recipe_takes(txl):
    ended = txl(*PAPER, 64)
    assert ended.code == 0
    assert "vocab_size=267735 is that of the recipe's corpus" in ended.err
    first, *lines = ended.out.splitlines()
    assert first.startswith("an estimate, not a measurement: 285,170,506 weights on 64 x NVIDIA H")
    assert first.endswith(", ddp, bfloat16")
    assert lines[0] == "128 streams, 2 on each GPU in 1 part; 384 tokens and 384 remembered"
    (total,) = (line for line in lines if line.startswith("total "))
    (most,) = (line for line in lines if line.startswith("most: "))
    largest = max(int(x.replace(",", "")) for x in total.split()[1:])
    assert float(most.split()[1]) == pytest.approx(largest / 1e3, abs=0.006)
    assert most.endswith("fits into 72 GB")


def test_estimate_gives_programs_all_of_it(txl):
    found = txl(*PAPER, 8, "--json").json
    assert found["is_estimate"] is True
    assert (found["gpus"], found["parameters"]) == (8, 285_170_506)
    assert found["memory"]["most"] == max(x["total"] for x in found["memory"]["moments"].values())
    assert found["seconds"]["hidden"] <= found["seconds"]["open"]
    assert found["sent"] == {"gradients": 2 * (4 * 285_170_506 * 7 // 8)}
    sharded = txl(*PAPER, 8, "--train.parallel", "fsdp", "--json").json
    assert sharded["parallel"] == "fsdp"
    assert sharded["memory"]["most"] < found["memory"]["most"]


def test_estimate_takes_the_settings_of_the_recipe_and_of_the_line(txl):
    words = ("--gpus", 2, "--json", "--train.precision", "float32", "--train.batch_size", 6)
    found = txl("estimate", "demo", *words, "--assume.products", 0.5, "--gpu", "a100").json
    assert (found["precision"], found["batch_size"]) == ("float32", 6)
    assert found["assumed"]["products"] == 0.5
    assert "A100" in found["hardware"]["name"]
    assert found["flops"]["Muon"] > 0


def test_estimate_explains_what_it_cannot_count(txl):
    for words, message in [
        (
            ("demo", "--gpus", 3),
            "batch_size=16 streams cannot be divided evenly over gpus=3 with train.accumulate=1: "
            "give a multiple of 3 as --train.batch_size, or another --gpus",
        ),
        (("demo", "--gpus", 0), "gpus=0 must be at least 1"),
        (("jsb-chorales",), "give the number with --model.vocab_size"),
        (("demo", "--data.tokenizer", "my.json"), "give the number with --model.vocab_size"),
        (("ptb-char-lstm-cpu",), "only a model of kind 'transformer_xl' can be estimated"),
        (("demo", "--assume.room", 0), "the share room=0.0 must be above 0 and at most 1"),
        (
            ("demo", "--model.d_model", 10**12),
            "the model is too large for 64-bit sizes: lower its widths",
        ),
        (("nothing",), "no recipe and no file is called 'nothing'"),
    ]:
        ended = txl("estimate", *words)
        assert (ended.code, ended.out) == (2, ""), words
        assert message in ended.err, words


def test_what_does_not_fit_is_said(txl):
    ended = txl("estimate", "paper-wt103-large", "--train.batch_size", 1024)
    assert "does not fit into 72 GB" in ended.out


def test_a_compiled_recipe_is_estimated_with_a_warning(txl):
    ended = txl("estimate", "demo", "--train.compile", "True")
    assert "the compiler decides what is kept" in ended.err


@pytest.mark.slow
def test_every_recipe_with_a_known_vocabulary_is_estimated():
    from transformer_xl.apps.estimate import HARDWARE, Assumed, Plan, summary, with_known_vocabulary
    from transformer_xl.config.recipes import load_recipe, recipe_names

    unknown = set()
    for name in recipe_names():
        config = load_recipe(name)
        if config.model.kind != "transformer_xl":
            continue
        try:
            config = with_known_vocabulary(config)
        except ValueError:
            unknown.add(config.data.name)
            continue
        found = summary(Plan(config=config), HARDWARE["h100"], Assumed())
        assert found["memory"]["most"] > found["memory"]["moments"]["update"]["weights"] > 0
    # Integers that occur in a text; that of the recipe `chorales` has no name.
    assert unknown == {"jsb-chorales", ""}


def test_known_vocabularies_are_those_of_the_catalogue_and_the_published_models():
    from transformer_xl.config.presets import PRESETS
    from transformer_xl.data.catalogue import KNOWN_CORPORA

    sizes = {name: n for name, x in KNOWN_CORPORA.items() for n in x.symbols.values()}
    assert sizes.keys() <= KNOWN_CORPORA.keys()
    for name, corpus in KNOWN_CORPORA.items():
        if " symbols" in corpus.summary and name in sizes:
            assert f"{sizes[name]:,} symbols" in corpus.summary
    for preset, name in (
        ("enwik8-base", "enwik8"),
        ("text8-base", "text8"),
        ("wt103-base", "wikitext-103"),
        ("lm1b-base", "lm1b"),
    ):
        assert sizes[name] in PRESETS[preset].vocab_sizes


def test_a_billion_layers_are_counted_like_two(txl):
    few = json.loads(txl("estimate", "demo", "--model.n_layer", 2, "--json").out)
    many = json.loads(txl("estimate", "demo", "--model.n_layer", 10**9, "--json").out)
    assert many["parameters"] > 10**8 * few["parameters"]
    assert not many["fits"]
