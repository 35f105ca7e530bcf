"""A compiled model is the model."""

import copy
from dataclasses import replace

import pytest
import torch

from transformer_xl.model import TransformerXL

pytestmark = [pytest.mark.compile, pytest.mark.slow]

OPTIONS = {
    "norm_first": True,
    "final_norm": True,
    "norm": "rms",
    "activation": "swiglu",
    "qk_norm": True,
    "enhanced_recurrence": True,
}


@pytest.mark.parametrize("settings", [{}, OPTIONS], ids=["paper", "options"])
def test_a_compiled_model_gives_the_same_losses_memories_and_gradients(
    tiny_config, settings, request
):
    if settings:
        request.getfixturevalue("quick_compiler")
    # One layer and two lengths of memory: each graph takes many seconds to compile.
    config = replace(tiny_config, n_layer=1, mem_len=4, **settings)
    model = TransformerXL(config)
    other = copy.deepcopy(model)
    compiled = torch.compile(other, dynamic=False, fullgraph=True)
    tokens = torch.randint(config.vocab_size, (2, 2 * 4 + 1))
    mems = compiled_mems = None
    for start in (0, 4):
        segment, targets = tokens[:, start : start + 4], tokens[:, start + 1 : start + 5]
        out = model(segment, mems, targets)
        compiled_out = compiled(segment, compiled_mems, targets)
        mems, compiled_mems = out.mems, compiled_out.mems
        torch.testing.assert_close(compiled_out.nll, out.nll)
        for state, compiled_state in zip(mems.states, compiled_mems.states, strict=True):
            torch.testing.assert_close(compiled_state, state)
        out.nll.mean().backward()
        compiled_out.nll.mean().backward()
    for parameter, compiled_parameter in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(compiled_parameter.grad, parameter.grad)


# What torch says where it goes on behind a graph from a tensor that was computed.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("div_val", [1, 2])
def test_clusters_leave_the_layers_one_graph_whatever_the_tokens(tiny_config, div_val):
    config = replace(tiny_config, n_layer=1, mem_len=4, cutoffs=(5, 12), div_val=div_val)
    model = TransformerXL(config)
    other, graphs = copy.deepcopy(model), []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(other, dynamic=False, backend=count)
    mems = model.start_memory(2, 4).extend([torch.randn(2, 4, config.d_model)], 4)
    # As many targets of each cluster in no two segments.
    for start in (0, 3, 8, 20):
        tokens = torch.randint(start, min(start + 15, config.vocab_size), (2, 5))
        out, compiled_out = (x(tokens[:, :4], mems, tokens[:, 1:]) for x in (model, compiled))
        torch.testing.assert_close(compiled_out.nll, out.nll)
        for x in (out, compiled_out):
            x.nll.mean().backward()
    assert len(graphs) == 1
    for parameter, compiled_parameter in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(compiled_parameter.grad, parameter.grad)
