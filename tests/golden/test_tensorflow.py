"""The authors' TensorFlow code, a third party's checkpoint in its format, and ours agree."""

import numpy as np
import pytest
import torch

from transformer_xl.interop.convert.old_checkpoints import from_tensorflow
from transformer_xl.model import Memory

TF = "tf_wt103_like"
KERAS = "keras_tf/test_checkpoint_div_2"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_every_number_of_the_tensorflow_code_is_ours(golden, dtype):
    case = golden(TF, dtype)
    numbers, mems = case.numbers, None
    for s in range(3):
        out = case.model(numbers[f"input.{s}"].T, mems, numbers[f"target.{s}"].T)
        case.check(out.nll.T, f"nll.{s}")
        for n, state in enumerate(out.mems.states):
            case.check(state.transpose(0, 1), f"mems.{s}.{n}")
        mems = out.mems
    out.loss.backward()
    gradients, _ = from_tensorflow(case.beginning("grad."))
    case.check_gradients(gradients, "natural")


@pytest.mark.parametrize("name", [TF, f"{TF}/model.ckpt-0", f"{TF}/model.ckpt-0.index"])
def test_the_converted_weights_are_those_of_the_file_bit_for_bit(golden, name):
    case = golden(name, torch.float32)
    theirs, _ = from_tensorflow(case.beginning("param."))
    weights = case.model.state_dict()
    for ours, expected in case.translated(theirs, "natural").items():
        assert torch.equal(weights[ours], expected), ours


def test_a_checkpoint_of_keras_gives_its_distribution(golden, shared):
    case = golden(KERAS, torch.float32)
    numbers = {
        path.stem: torch.from_numpy(np.load(path))
        for path in (shared / "goldens" / KERAS).glob("*.npy")
    }
    mems = Memory([numbers["memory_0"].float(), numbers["memory_1"].float()])
    out = case.model(numbers["tokens"].long(), mems)
    case.check(out.log_probs.exp(), numbers["softmax"], "softmax")
    for n, state in enumerate(out.mems.states):
        # Theirs is not cut to the length of the memory.
        case.check(state, numbers[f"new_memory_{n}"][:, -len(out.mems) :], f"memory {n}")
