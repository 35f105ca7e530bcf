"""Pickled modules: their tensors, as their state dict has them."""

import sys
import types
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from transformer_xl.interop.convert.pickles import Instance, UnreadableFile
from transformer_xl.interop.convert.torch_files import module_tensors, read_torch


def tensors_of(path: Path) -> dict[str, Tensor]:
    module = read_torch(path)
    assert isinstance(module, Instance)
    return module_tensors(module)


def same(got: dict[str, Tensor], expected: object) -> None:
    assert isinstance(expected, dict)
    assert list(got) == list(expected)
    for name, x in expected.items():
        assert torch.equal(got[name], x), name


def test_a_module_has_the_tensors_of_its_state_dict_in_order(shared: Path) -> None:
    for name in ("pt_01_base", "pt_04_adaptive_div2", "pt_14_untied"):
        state = read_torch(shared / "goldens" / name / "state_dict.pt")
        same(tensors_of(shared / "goldens" / name / "model.pt"), state)


def test_modules_of_todays_torch_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            parameters = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(1))]
            self.lists = nn.ParameterList(parameters)
            self.norm = nn.BatchNorm1d(2)
            self.register_buffer("hidden", torch.ones(1), persistent=False)
            self.none = nn.Linear(2, 2, bias=False)

    module = Parts()
    # Pickled as a class of the old code, which is not there any more.
    Parts.__module__, Parts.__qualname__ = "mem_transformer", "Parts"
    old = types.ModuleType("mem_transformer")
    monkeypatch.setattr(old, "Parts", Parts, raising=False)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "mem_transformer", old)
        torch.save(module, tmp_path / "x.pt")
    same(tensors_of(tmp_path / "x.pt"), dict(module.state_dict()))


def record(**state: object) -> Instance:
    made = Instance("mem_transformer.X")
    made.state = state
    return made


@pytest.mark.slow
def test_modules_that_contain_themselves_are_refused() -> None:
    module = record(_modules={})
    assert isinstance(module.state, dict)
    module.state["_modules"]["self"] = module
    with pytest.raises(UnreadableFile, match="contains itself"):
        module_tensors(module)
    doubled = record(_parameters={"x": torch.ones(1)})
    for _ in range(60):
        doubled = record(_modules={"a": doubled, "b": doubled})
    with pytest.raises(UnreadableFile):
        module_tensors(doubled)
    for state in (None, [], {"_modules": 3}, {"_parameters": {"x": 3}}, {"_modules": {1: module}}):
        wrong = Instance("mem_transformer.X")
        wrong.state = state
        with pytest.raises(UnreadableFile):
            module_tensors(wrong)


def test_parameter_lists_of_2019_keep_places_free() -> None:
    x = torch.ones(1)
    projections = record(_parameters={"0": None, "1": x})
    got = module_tensors(record(_modules={"out_projs": projections, "gone": None}))
    assert list(got) == ["out_projs.1"]
