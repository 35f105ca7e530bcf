"""Hugging Face's code and ours give the same numbers."""

import json

import pytest
import torch
from safetensors.torch import load_file

from transformer_xl import convert

NAMES = ["hf_div1", "hf_div2"]
FILES = ["model.safetensors", "pytorch_model.bin"]


@pytest.mark.parametrize(
    ("name", "file", "dtype"),
    [
        (name, file, (torch.float64, torch.float32)[(row + column) % 2])
        for row, name in enumerate(NAMES)
        for column, file in enumerate(FILES)
    ],
    ids=str,
)
def test_every_number_of_hugging_faces_code_is_ours(golden, name, file, dtype):
    case = golden(f"{name}/{file}", dtype)
    numbers, mems = case.numbers, None
    for s in range(3):
        tokens = numbers[f"input_ids.{s}"]
        log_probs = case.model(tokens, mems).log_probs
        case.check(log_probs, f"prediction_scores.{s}")
        # Their labels are the tokens themselves, so that the last one is not scored.
        out = case.model(tokens, mems, torch.cat([tokens[:, 1:], tokens[:, :1]], 1))
        case.check(out.nll[:, :-1], f"nll_ordered.{s}")
        case.check(out.hidden, f"last_hidden_state.{s}")
        for n, state in enumerate(out.mems.states):
            case.check(state.transpose(0, 1), f"mems.{s}.{n}")
        mems = out.mems
    out.nll[:, :-1].mean().backward()
    gradients = {k.removeprefix("transformer."): x for k, x in case.beginning("grad.").items()}
    case.check_gradients(gradients, "natural")


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("name", NAMES)
def test_a_folder_converted_there_and_back_is_the_same_bit_for_bit(
    shared, converted, tmp_path, name, file
):
    folder, own = shared / "goldens" / name, converted(f"{name}/{file}")
    convert(own, tmp_path / "theirs", to="huggingface")
    before = torch.load(folder / "pytorch_model.bin", weights_only=True)
    after = torch.load(tmp_path / "theirs/pytorch_model.bin", weights_only=True)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], before[key]) for key in before)
    settings = json.loads((tmp_path / "theirs/config.json").read_text())
    expected = json.loads((folder / "config.json").read_text())
    assert {key: settings[key] for key in expected} == expected
    convert(tmp_path / "theirs", tmp_path / "again")
    first, again = (load_file(x / "model.safetensors") for x in (own, tmp_path / "again"))
    assert first.keys() == again.keys()
    assert all(torch.equal(first[key], again[key]) for key in first)
