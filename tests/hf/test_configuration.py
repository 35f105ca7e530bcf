"""Settings made by the class of transformers are those of the model, or are refused."""

import json

import pytest

from transformer_xl.interop.hf.configuration import TransformerXLConfig


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_layers": 3}, "n_layers: no such setting; did you mean n_layer"),
        ({"attention_dropout": 0.1}, "attention_dropout: .* did you mean attn_dropout"),
        ({"segment_length": 3}, "segment_length: .* did you mean segment_len"),
        ({"segment_len": 4.5}, "segment_len=4.5 must be an integer"),
        ({"segment_len": 0}, "^segment_len=0 must be above 0"),
        ({"use_cache": "no"}, "^use_cache='no' must be true or false"),
        ({"d_model": 64, "hidden_size": 32}, "hidden_size=32 contradicts d_model=64"),
        ({"format_version": 1, "value_residual": True}, "value_residual=True is gone: .* 47b3a2d"),
    ],
)
def test_what_is_misspelt_or_wrong_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        TransformerXLConfig(**settings)


def test_what_only_transformers_knows_is_kept():
    config = TransformerXLConfig(num_labels=3, problem_type="regression", my_note="x", cutoffs=[5])
    assert (config.num_labels, config.problem_type, config.my_note) == (3, "regression", "x")
    assert config.cutoffs == (5,)


def test_a_note_of_a_file_is_read_again_even_if_it_resembles_a_setting():
    config = TransformerXLConfig()
    config.max_position_embeddings = 512
    again = TransformerXLConfig.from_dict(json.loads(config.to_json_string()))
    assert again.max_position_embeddings == 512


def test_a_setting_that_is_gone_and_had_no_effect_is_left_out():
    assert not hasattr(TransformerXLConfig(value_residual=False, expand=2), "value_residual")


def test_an_alias_may_repeat_its_setting():
    assert TransformerXLConfig(d_model=64, hidden_size=64).d_model == 64


def test_none_is_a_call_setting_that_is_not_given():
    stored = {"segment_len": 9, "use_cache": False}
    for section, expected in ((None, (512, True)), (stored, (9, False))):
        config = TransformerXLConfig(segment_len=None, use_cache=None, transformers=section)
        assert (config.segment_len, config.use_cache) == expected


def test_a_value_given_on_load_wins_over_the_stored_one(tmp_path):
    TransformerXLConfig(d_model=64).save_pretrained(tmp_path)
    assert TransformerXLConfig.from_pretrained(tmp_path, hidden_size=32).d_model == 32
