from collections.abc import Callable
from dataclasses import replace

import pytest

from transformer_xl.config import Config, ModelConfig, load_recipe
from transformer_xl.model import build_model
from transformer_xl.studies.ablate import ROWS, apply_row, rows_of


@pytest.fixture
def recipe(toy_recipe: Callable[..., Config]) -> Config:
    return toy_recipe(model={"vocab_size": 20})


def test_a_row_changes_what_its_name_says_and_nothing_else(recipe: Config) -> None:
    for row in ROWS:
        config = apply_row(row, recipe, seed=3)
        build_model(config.model)
        assert config.train.seed == 3, row
        recurrence, encoding, loss = row.name.split("-")
        assert (config.model.mem_len > 0) == (recurrence == "recurrence"), row
        types = {"ours": 0, "shaw": 1, "sinusoids": 2, "learned": 3}
        assert config.model.attn_type == types[encoding], row
        assert config.train.loss == loss, row
        longer = config.train.segment_len / recipe.train.segment_len
        assert longer == (11 / 8 if recurrence == "longer" else 1), row
        if config.model.n_positions:
            assert config.model.n_positions == config.train.segment_len + config.model.mem_len, row
        same = {"attn_type": 0, "n_positions": None, "mem_len": recipe.model.mem_len}
        assert replace(config.model, **same) == recipe.model, row
        same = {"seed": recipe.train.seed, "loss": "full", "segment_len": recipe.train.segment_len}
        assert replace(config.train, **same) == recipe.train, row
        assert (config.data, config.generate) == (recipe.data, recipe.generate), row


def test_the_tables_have_the_papers_rows() -> None:
    assert len(rows_of(6)) == 9
    assert [row.paper[7][1] for row in rows_of(7)] == [25.2, 25.7, 27.1]
    assert [row.paper[10][1] for row in rows_of(10)] == [26.77, 28.33, 27.98, 28.83]
    # In Table 6 each row is worse than the one it is compared with.
    best = {row.name: row.paper[6][1] for row in rows_of(6)}
    assert best["recurrence-ours-full"] == min(best.values())
    assert best["none-learned-half"] == max(best.values())
    assert [row.name for row in rows_of(6, ["none-ours-half"])] == ["none-ours-half"]


def test_rows_keep_their_length_from_the_beginning(recipe: Config) -> None:
    length = recipe.train.segment_len
    staged = replace(recipe.train, stages=((0.0, 1, 1), (0.5, length, recipe.model.mem_len)))
    found = apply_row(ROWS[0], replace(recipe, train=staged), 1)
    assert found == apply_row(ROWS[0], recipe, 1)


def test_a_recipe_with_nothing_to_take_away_is_refused(
    recipe: Config, of_kind: Callable[..., ModelConfig]
) -> None:
    row = ROWS[0]
    with pytest.raises(ValueError, match=r"model\.mem_len=0: the recipe has no recurrence"):
        apply_row(row, replace(recipe, model=replace(recipe.model, mem_len=0)), 1)
    with pytest.raises(ValueError, match=r"model\.kind='lstm'"):
        apply_row(row, replace(recipe, model=of_kind(recipe.model, "lstm")), 1)
    with pytest.raises(ValueError, match="table=8 has no ablations; choose from 6, 7, 10"):
        rows_of(8)
    with pytest.raises(ValueError, match="'nonsense' is no row"):
        rows_of(6, ["nonsense"])


def test_what_a_row_has_no_use_for_is_left_out(recipe: Config) -> None:
    for row in ROWS:
        model = replace(recipe.model, tie_biases=False)
        train = replace(recipe.train, reset_memory=0.2)
        config = apply_row(row, replace(recipe, model=model, train=train), seed=1)
        recurrence, encoding, _ = row.name.split("-")
        assert config.train.reset_memory == (0.2 if recurrence == "recurrence" else 0.0), row
        assert config.model.tie_biases == (encoding in ("sinusoids", "learned")), row
        build_model(config.model)


def test_lengths_by_layer_and_random_lengths_without_a_memory_are_left_out() -> None:
    recipe = load_recipe("modern-xl")
    recipe = replace(recipe, model=replace(recipe.model, layer_attn_lens=(256, 2048)))
    for row in ROWS:
        config = apply_row(row, recipe, seed=1)
        assert not config.model.layer_attn_lens
        assert (config.train.random_mem_len is None) == (not config.model.mem_len), row
