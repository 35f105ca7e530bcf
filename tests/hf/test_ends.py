"""Where generated rows end and begin: stop strings, padding behind the end, empty prompts."""

import pytest
import torch
from tests.hf.test_tokenization import MAKERS

from transformer_xl.config.locating import locate
from transformer_xl.data.vocab_files import load_vocab

GREEDY = {"max_new_tokens": 24, "do_sample": False}
MODES = {
    "greedy": {},
    "without a cache": {"use_cache": False},
    "beams": {"num_beams": 3},
    "in chunks": {"prefill_chunk_size": 3},
    "sampled": {"do_sample": True, "top_k": 1},
    "a penalty for the prompt": {"encoder_repetition_penalty": 1.3},
    "no pair of the prompt": {"encoder_no_repeat_ngram_size": 3},
}


@pytest.fixture
def criteria(transformers):
    from transformers.generation.stopping_criteria import StopStringCriteria

    return StopStringCriteria


def _ends(criteria, tokenizer, text):
    return bool(criteria(torch.tensor([tokenizer.vocab.encode(text)]), None))


@pytest.mark.parametrize("kind", ["bytes", "bpe", "brought"])
def test_a_stop_string_is_found_where_a_text_ends_with_it(criteria, kind):
    from transformer_xl.hf import TransformerXLTokenizer

    tokenizer = TransformerXLTokenizer(vocab=MAKERS[kind]())
    for text, stop in (("the cat  saw", "cat  saw"), ("the cat saw\n", "\n")):
        found = criteria(tokenizer, [stop])
        assert _ends(found, tokenizer, text)
        assert not _ends(found, tokenizer, text.rsplit(" ", 1)[0].rstrip())


@pytest.mark.parametrize("kind", ["chars", "words", "integers", "imported", "lines"])
def test_stop_strings_need_a_vocabulary_of_latin_letters(language_model, kind):
    from transformer_xl.hf import TransformerXLTokenizer

    tokenizer = TransformerXLTokenizer(vocab=MAKERS[kind]())
    with pytest.raises(ValueError, match=r"stop_strings: .*lacks: give eos_token_id, or stopping"):
        language_model.generate(**GREEDY, stop_strings=["3"], tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("name", "text", "stops"),
    [
        ("english", "He said \u201cyes\u201d", ["\u201d", "."]),
        ("english", "He said \u201cyes\u201d", ["\u201d"]),
        ("python-code", "x = '\u00e9", ["\u00e9"]),
        ("python-code", "def f():\n    return", ["):\n    return"]),
    ],
)
def test_stop_strings_of_shipped_models(criteria, transformers, name, text, stops):
    tokenizer = transformers.AutoTokenizer.from_pretrained(locate(name).path)
    found = criteria(tokenizer, stops)
    assert _ends(found, tokenizer, text)
    assert not _ends(found, tokenizer, text[:-1])


@pytest.mark.parametrize("mode", MODES)
def test_rows_that_end_are_padded_and_do_not_disturb_the_others(
    language_model, tokenizer, texts, mode
):
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    settings = {**GREEDY, **MODES[mode]}
    for how in (
        {"stopping_criteria": [lambda ids, scores: ids[:, -1] == tokenizer.vocab.encode("d")[0]]},
        {"eos_token_id": tokenizer.vocab.encode("d")[0], "pad_token_id": tokenizer.pad_token_id},
    ):
        written = language_model.generate(**batch, **settings, **how)
        found = tokenizer.decode(written, skip_special_tokens=True)
        for text, whole in zip(texts, found, strict=True):
            one = tokenizer(text, return_tensors="pt")
            alone = tokenizer.decode(language_model.generate(**one, **settings, **how)[0])
            assert whole == alone
            added = whole.removeprefix(text)
            assert "d" not in added[:-1]
        assert len({len(x) - len(y) for x, y in zip(found, texts, strict=True)}) > 1


def test_guidance_reads_no_padding(language_model, tokenizer, texts):
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    ends = {"eos_token_id": tokenizer.vocab.encode("d")[0], "pad_token_id": tokenizer.pad_token_id}
    guided = language_model.generate(**batch, **GREEDY, **ends, guidance_scale=1.5)
    assert (guided == tokenizer.pad_token_id).any(1)[1:].any()


def test_rows_padded_on_the_right_go_on_behind_their_text(language_model, tokenizer, texts):
    expected = language_model.generate(
        **tokenizer(texts, padding=True, return_tensors="pt"), **GREEDY
    )
    right = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
    assert torch.equal(language_model.generate(**right, **GREEDY), expected)


def test_a_pipeline_pads_with_a_number_beyond_the_vocabulary(
    transformers, language_model, tokenizer, texts
):
    write = transformers.pipeline("text-generation", model=language_model, tokenizer=tokenizer)
    how = {**GREEDY, "eos_token_id": tokenizer.convert_tokens_to_ids("d")}
    found = write(texts, batch_size=4, **how)
    assert found == [write(text, **how) for text in texts]


def test_padding_needs_a_mask(language_model, tokenizer, texts, any_folder, transformers):
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    ids = batch["input_ids"]
    message = r"input_ids hold 15, and the model has 15 tokens, 0 to 14: if .* attention_mask"
    for call in (language_model, language_model.generate):
        with pytest.raises(ValueError, match=message):
            call(ids)
    with pytest.raises(ValueError, match="input_ids hold -100"):
        language_model(torch.tensor([[-100]]))
    with pytest.raises(ValueError, match=message):
        language_model.generate(ids, attention_mask=torch.ones_like(ids))
    # transformers finds the mask itself if it knows the number.
    written = language_model.generate(ids, **GREEDY, pad_token_id=tokenizer.pad_token_id)
    assert torch.equal(written, language_model.generate(**batch, **GREEDY))
    # A model without a memory reads the whole text for each token.
    other = transformers.AutoModelForCausalLM.from_pretrained(any_folder(mem_len=0)[1])
    how = {**GREEDY, "eos_token_id": 3, "pad_token_id": tokenizer.pad_token_id}
    written = other.generate(**batch, **how)
    for row, text in zip(written, texts, strict=True):
        alone = other.generate(**tokenizer(text, return_tensors="pt"), **how)[0]
        assert tokenizer.decode(row, skip_special_tokens=True) == tokenizer.decode(
            alone, skip_special_tokens=True
        )


def test_an_empty_prompt_begins_after_the_token_that_it_stands_for(
    language_model, tokenizer, texts, folder
):
    start = load_vocab(folder).start_id
    assert start is not None
    expected = language_model.generate(torch.tensor([[start]]), **GREEDY)
    empty = tokenizer("", return_tensors="pt")
    assert torch.equal(language_model.generate(**GREEDY), expected)
    assert torch.equal(language_model.generate(**empty, **GREEDY), expected)
    batch = tokenizer([texts[0], ""], padding=True, return_tensors="pt")
    written = language_model.generate(**batch, **GREEDY)
    assert torch.equal(written[1, -25:], expected[0])
    assert torch.equal(batch["attention_mask"][1], torch.zeros_like(written[1, :-24]))


def test_padding_beyond_the_vocabulary_is_saved_without_a_warning(
    transformers, folder, tmp_path, caplog
):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    # As Trainer does.
    model.config.pad_token_id = model.generation_config.pad_token_id = tokenizer.pad_token_id
    caplog.clear()
    for each in (model, tokenizer):
        each.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config.pad_token_id == again.config.vocab_size
    write = transformers.pipeline("text-generation", model=again, tokenizer=tokenizer)
    write(["dog", "the cat"], batch_size=2, max_new_tokens=3)
    assert not [x for x in caplog.records if x.levelname == "WARNING"]
    # Another number that is none of a token is one of a mistake.
    model.config.pad_token_id = 99
    model.config.save_pretrained(tmp_path)
    assert "pad_token_id" in caplog.text
