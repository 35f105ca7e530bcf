"""Hugging Face's code and ours give the same numbers."""

import pytest
import torch

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
