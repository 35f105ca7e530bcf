"""Where generated rows end and begin: stop strings, padding behind the end, empty prompts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.hf.test_tokenization import LINES, MAKERS

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
def criteria(transformers: Any) -> Any:
    from transformers.generation.stopping_criteria import StopStringCriteria

    return StopStringCriteria


def _ends(criteria: Any, tokenizer: Any, text: str) -> bool:
    return bool(criteria(torch.tensor([tokenizer.vocab.encode(text)]), None))


@pytest.mark.parametrize("kind", MAKERS)
def test_a_stop_string_is_found_where_a_text_ends_with_it(criteria: Any, kind: str) -> None:
    from transformer_xl.hf import TransformerXLTokenizer

    tokenizer = TransformerXLTokenizer(vocab=MAKERS[kind]())
    text, stop = ("2 3 4", "3 4") if kind == "integers" else ("the cat  saw", "cat  saw")
    if kind in ("words", "imported", "lines"):
        # Which write one blank between words.
        text, stop = text.replace("  ", " "), "cat saw"
    found = criteria(tokenizer, [stop])
    assert _ends(found, tokenizer, text)
    assert not _ends(found, tokenizer, text.rsplit(" ", 1)[0].rstrip())
    if (name := tokenizer.eos_token) is not None and kind not in ("imported", "brought"):
        # A line end has a text and a name.
        for each in (name, "\n", f"{stop}\n"):
            assert _ends(criteria(tokenizer, [each]), tokenizer, f"{text}\n")
            assert not _ends(criteria(tokenizer, [each]), tokenizer, text)


@pytest.mark.parametrize(
    ("name", "text", "stops"),
    [
        ("tang-poems", "\u6625\u7720\u4e0d\u89ba\u66c9\u3002", ["\u3002"]),
        ("chorales", "65 60 57\n", ["<eos>"]),
        ("english", "He said \u201cyes\u201d", ["\u201d", "."]),
        ("english", "He said \u201cyes\u201d", ["\u201d"]),
        ("python-code", "x = '\u00e9", ["\u00e9"]),
        ("python-code", "def f():\n    return", ["):\n    return"]),
    ],
)
def test_stop_strings_of_shipped_models(
    criteria: Any, transformers: Any, name: str, text: str, stops: list[str]
) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(locate(name).path)
    found = criteria(tokenizer, stops)
    assert _ends(found, tokenizer, text)
    assert not _ends(found, tokenizer, text[:-1])


@pytest.mark.parametrize("mode", MODES)
def test_rows_that_end_are_padded_and_do_not_disturb_the_others(
    language_model: Any, tokenizer: Any, texts: list[str], mode: str
) -> None:
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    settings = {**GREEDY, **MODES[mode]}
    for how in (
        {"stop_strings": ["d"], "tokenizer": tokenizer},
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


def test_guidance_reads_no_padding(language_model: Any, tokenizer: Any, texts: list[str]) -> None:
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    ends = {"eos_token_id": tokenizer.vocab.encode("d")[0], "pad_token_id": tokenizer.pad_token_id}
    guided = language_model.generate(**batch, **GREEDY, **ends, guidance_scale=1.5)
    assert (guided == tokenizer.pad_token_id).any(1)[1:].any()


def test_rows_padded_on_the_right_go_on_behind_their_text(
    language_model: Any, tokenizer: Any, texts: list[str]
) -> None:
    expected = language_model.generate(
        **tokenizer(texts, padding=True, return_tensors="pt"), **GREEDY
    )
    right = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
    assert torch.equal(language_model.generate(**right, **GREEDY), expected)


def test_a_stop_string_cuts_what_is_written_without_it(
    language_model: Any, tokenizer: Any, texts: list[str]
) -> None:
    prompt = tokenizer(texts[0], return_tensors="pt")
    whole = tokenizer.decode(language_model.generate(**prompt, **GREEDY)[0])
    stop = whole[len(texts[0]) + 5 :][:3]
    cut = language_model.generate(**prompt, **GREEDY, stop_strings=[stop], tokenizer=tokenizer)
    end = whole.index(stop, len(texts[0]) - 2) + 3
    assert tokenizer.decode(cut[0]) == whole[:end]


def test_a_pipeline_pads_with_a_number_beyond_the_vocabulary(
    transformers: Any, language_model: Any, tokenizer: Any, texts: list[str]
) -> None:
    write = transformers.pipeline("text-generation", model=language_model, tokenizer=tokenizer)
    how = {**GREEDY, "eos_token_id": tokenizer.convert_tokens_to_ids("d")}
    found = write(texts, batch_size=4, **how)
    assert found == [write(text, **how) for text in texts]


def test_padding_needs_a_mask(
    language_model: Any, tokenizer: Any, texts: list[str], any_folder: Any, transformers: Any
) -> None:
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
    language_model: Any, tokenizer: Any, texts: list[str], folder: Path
) -> None:
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


def test_a_token_is_healed_to_one_that_begins_with_it(
    transformers: Any, language_model: Any, tokenizer: Any, texts: list[str]
) -> None:
    # Characters begin no others, and line breaks stay what they are.
    prompt = tokenizer(f"dog\n{texts[0]}", return_tensors="pt")
    healed = language_model.generate(**prompt, **GREEDY, token_healing=True, tokenizer=tokenizer)
    assert torch.equal(healed, language_model.generate(**prompt, **GREEDY))
    with pytest.raises(ValueError, match="token_healing=True needs tokenizer="):
        language_model.generate(**prompt, token_healing=True)
    path = locate("python-code").path
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    code = transformers.AutoTokenizer.from_pretrained(path)
    prompts = ["import os\nimport s", "import o"]
    batch = code(prompts, padding=True, return_tensors="pt")
    how = {"max_new_tokens": 2, "do_sample": False, "token_healing": True, "tokenizer": code}
    found = code.decode(model.generate(**batch, **how), skip_special_tokens=True)
    for prompt, text in zip(prompts, found, strict=True):
        assert text.startswith(prompt)
        alone = model.generate(**code(prompt, return_tensors="pt"), **how)
        assert text == code.decode(alone[0])


def test_an_assistant_with_another_tokenizer(
    transformers: Any, language_model: Any, tokenizer: Any, any_folder: Any, tmp_path: Path
) -> None:
    vocab = MAKERS["bytes"]()
    other = transformers.AutoModelForCausalLM.from_pretrained(any_folder(vocab_size=256)[1])
    reader = type(tokenizer)(vocab=vocab)
    # What it writes are characters that the model does not have: they are no candidates.
    prompt = tokenizer(LINES[:12], return_tensors="pt")
    how = {"assistant_model": other, "tokenizer": tokenizer, "assistant_tokenizer": reader}
    expected = language_model.generate(**prompt, **GREEDY)
    assert torch.equal(language_model.generate(**prompt, **GREEDY, **how), expected)
    with pytest.raises(NotImplementedError, match="give do_sample=False, or an assistant of the"):
        language_model.generate(**prompt, **{**GREEDY, "do_sample": True}, **how)


def test_padding_beyond_the_vocabulary_is_saved_without_a_warning(
    transformers: Any, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
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
