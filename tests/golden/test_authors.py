"""The authors' PyTorch code and ours give the same numbers, with every attention backend.

The files are described in ``goldens/README.md`` of the shared folder.
"""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from transformer_xl.model import TransformerXL
from transformer_xl.ops import use_backend

# Each pair of a file, a backend and a precision; the fast way in float64 for every file, as some
# configurations have no weights at the start of a training.
PAIRS = [
    ("golden.safetensors", "skew", torch.float64),
    ("golden.safetensors", "reference", torch.float64),
    ("golden.safetensors", "skew", torch.float32),
    ("golden_init.safetensors", "skew", torch.float64),
    ("golden_init.safetensors", "reference", torch.float32),
]
CONFIGS = [
    "pt_01_base",
    "pt_02_pre_lnorm",
    "pt_03_adaptive_div1",
    "pt_04_adaptive_div2",
    "pt_05_embed16",
    "pt_06_same_length",
    "pt_07_clamp5",
    "pt_08_ext_len4",
    "pt_09_mem20_tgt5",
    "pt_10_mem0",
    "pt_11_attn1",
    "pt_12_attn2_mem0",
    "pt_12b_attn2_mem9",
    "pt_13_attn3",
    "pt_14_untied",
]
# What else the folders hold: other containers and older layouts of the same modules.
FILES = [
    "pt_01_base/model_legacy.pt",
    "pt_01_base/state_dict.pt",
    "pt_01_base/state_dict_legacy.pt",
    "pt_03_adaptive_div1/model_oldstyle_synthetic.pt",
    "pt_03_adaptive_div1/state_dict.pt",
    "pt_04_adaptive_div2/model_legacy.pt",
    "pt_04_adaptive_div2/state_dict_legacy.pt",
    "pt_13_attn3/state_dict.pt",
]


@pytest.mark.parametrize(("file", "backend", "dtype"), PAIRS, ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_number_of_the_authors_code_is_ours(golden, shared, name, file, backend, dtype):
    if not (shared / "goldens" / name / file).exists():
        pytest.skip(f"{name} comes without {file}")
    case = golden(f"{name}/model.pt", dtype, file)
    model, numbers = case.model, case.numbers
    model.load_state_dict(case.translated(case.beginning("param.")), strict=False)
    mems = None
    with use_backend(backend):
        for s in range(sum(key.startswith("target.") for key in numbers)):
            tokens, targets = numbers[f"input.{s}"].T, numbers[f"target.{s}"].T
            out = model(tokens, mems, targets)
            case.check(out.nll.T, f"nll_ordered.{s}")
            case.check(out.loss, f"loss.{s}")
            case.check(out.hidden.transpose(0, 1), f"hidden.{s}")
            if model.config.mem_len:
                for n, state in enumerate(out.mems.states):
                    case.check(state.transpose(0, 1), f"mems.{s}.{n}")
            if f"logprob.{s}" in numbers:
                log_probs = model(tokens, mems).log_probs[:, -targets.shape[1] :]
                case.check(log_probs.transpose(0, 1), f"logprob.{s}")
            mems = out.mems
        out.loss.backward()
    case.check_gradients(case.beginning("grad."))


@pytest.mark.parametrize("name", [f"{name}/model.pt" for name in CONFIGS] + FILES)
def test_the_converted_weights_are_those_of_the_file_bit_for_bit(golden, name):
    case = golden(name, torch.float32)
    weights = case.model.state_dict()
    for ours, theirs in case.translated(case.beginning("param.")).items():
        assert torch.equal(weights[ours], theirs), ours


@pytest.mark.parametrize("backend", ["reference", "skew"])
def test_training_follows_the_authors_trajectory(golden, shared, backend):
    folder = shared / "goldens/pt_train_01_base"
    case = golden("pt_01_base/model.pt")
    # The same model, trained from other weights and without dropout.
    case.numbers = numbers = load_file(folder / "golden.safetensors")
    case.model = model = TransformerXL(replace(case.model.config, dropout=0.0, attn_dropout=0.0))
    model.double().load_state_dict(case.translated(case.beginning("param0.")), strict=False)
    hyper = json.loads((folder / "config.json").read_text())["hyper"]
    # The order of the parameters decides in which order the clipping norm is summed.
    optimizer = torch.optim.Adam(model.parameters(), betas=hyper["betas"], eps=hyper["eps"])
    mems = None
    with use_backend(backend):
        for step, lr in enumerate(numbers["lr_used"].tolist()):
            optimizer.param_groups[0]["lr"] = lr
            tokens = numbers["tokens"][step * 7 : step * 7 + 8].T
            out = model(tokens[:, :-1], mems, tokens[:, 1:])
            mems = out.mems
            optimizer.zero_grad()
            out.loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), hyper["clip"])
            case.check(out.loss, numbers["loss"][step])
            case.check(norm, numbers["grad_norm_before_clip"][step])
            optimizer.step()
    final = model.state_dict()
    for name, expected in case.translated(case.beginning("param_final.")).items():
        case.check(final[name], expected, name)
