"""transformers' own tests of models, run against ours: do we keep what every model promises?

    git clone --depth 1 --branch v5.23.0 https://github.com/huggingface/transformers CHECKOUT
    pip install parameterized
    python benchmarks/transformers_suite.py CHECKOUT [arguments of pytest]

CHECKOUT is a clone of transformers in the version that is installed: its common tests of models,
of generation and of configurations are imported from there. Nothing is downloaded. Of what we
refuse, a test is expected to fail, with the reason in the table below; such a test that passes
counts as a failure.
"""

import os
import sys
import unittest
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

_CHECKOUT = "TRANSFORMERS_CHECKOUT"
_NEEDED = ("test_modeling_common.py", "test_configuration_common.py", "generation/test_utils.py")

EXPECTED_FAILURES = {
    "test_model_get_set_embeddings": (
        "puts an embedding of 10 symbols in the place of the model's, which is refused: the "
        "softmax shares its weights; resize_token_embeddings changes their number"
    ),
    "test_model_weights_reload_no_missing_tied_weights": (
        "loads a file without a single weight of the model and expects random ones: refused"
    ),
}

if _CHECKOUT in os.environ:
    sys.path.insert(0, os.environ[_CHECKOUT])
    import torch
    from tests import test_modeling_common
    from tests.generation.test_utils import GenerationTesterMixin
    from tests.test_configuration_common import ConfigTester
    from tests.test_modeling_common import ModelTesterMixin, ids_tensor

    from transformer_xl.hf import (
        TransformerXLConfig,
        TransformerXLForCausalLM,
        TransformerXLModel,
    )
    from transformer_xl.model.layer import DecoderLayer

    # Tests of activation checkpointing look for the layers that are recomputed.
    setattr(test_modeling_common, "GradientCheckpointingLayer", DecoderLayer)  # noqa: B010

    class _Small:
        """A model of two layers and what it reads, as the tests ask for them."""

        base_model_class = TransformerXLModel
        causal_lm_class = TransformerXLForCausalLM
        batch_size, seq_length, vocab_size = 3, 7, 99
        num_hidden_layers, num_attention_heads, hidden_size = 2, 2, 32
        is_training = True

        def get_config(self) -> TransformerXLConfig:
            return TransformerXLConfig(
                vocab_size=self.vocab_size,
                n_layer=self.num_hidden_layers,
                n_head=self.num_attention_heads,
                d_model=self.hidden_size,
                d_inner=64,
                mem_len=64,
                dropout=0.0,
                bos_token_id=1,
                eos_token_id=2,
                pad_token_id=0,
            )

        def prepare_config_and_inputs_for_common(self) -> tuple[TransformerXLConfig, dict]:
            tokens = ids_tensor([self.batch_size, self.seq_length], self.vocab_size)
            inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
            return self.get_config(), inputs

    class TestCausalLM(ModelTesterMixin, GenerationTesterMixin, unittest.TestCase):
        """The language model."""

        all_model_classes = (TransformerXLForCausalLM,)

        def setUp(self) -> None:
            """Begin a test."""
            self.model_tester = _Small()
            self.config_tester = ConfigTester(
                self, config_class=TransformerXLConfig, d_model=32, n_head=2
            )

        def test_config(self) -> None:
            """Test the configuration."""
            self.config_tester.run_common_tests()

        def _check_caches_are_equal(self, one: Any, other: Any) -> None:
            # Theirs compares keys and values layer by layer; our cache holds one memory.
            assert one.seen == other.seen
            mine, theirs = one.mems.state_dict(), other.mems.state_dict()
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)

        def check_training_gradient_checkpointing(
            self, gradient_checkpointing_kwargs: dict[str, Any] | None = None
        ) -> None:
            """Compare gradients: theirs replaces a function of their own class of layers."""
            config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
            model = TransformerXLForCausalLM(config)
            if (gradient_checkpointing_kwargs or {}).get("use_reentrant"):
                with pytest.raises(ValueError, match="use_reentrant=True loses gradients"):
                    model.activation_checkpointing_enable(gradient_checkpointing_kwargs)
                return
            found = []
            for is_enabled in (False, True):
                if is_enabled:
                    model.activation_checkpointing_enable(gradient_checkpointing_kwargs)
                model.zero_grad()
                model(**inputs, labels=inputs["input_ids"]).loss.backward()
                found.append([x.grad for x in model.parameters()])
            torch.testing.assert_close(*found)


class _Expecting:
    """Marks the tests of the table, as a plugin of pytest."""

    def pytest_configure(self, config: pytest.Config) -> None:
        for marker in ("generate", "torch_compile_test", "accelerate_tests"):
            config.addinivalue_line("markers", marker)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        names = {item.name for item in items}
        for item in items:
            if reason := EXPECTED_FAILURES.get(item.name):
                item.add_marker(pytest.mark.xfail(reason=reason, strict=True))
        for name in sorted(EXPECTED_FAILURES.keys() - names):
            print(f"{name} is expected to fail, and is no test of those that run", file=sys.stderr)


def main(arguments: list[str]) -> int:
    """Run the tests of a checkout; return pytest's exit status."""
    if not arguments:
        print(__doc__, file=sys.stderr)
        return 2
    checkout, others = Path(arguments[0]).resolve(), arguments[1:]
    for name in _NEEDED:
        if not (checkout / "tests" / name).is_file():
            tag = f"v{version('transformers')}"
            print(
                f"{checkout}/tests/{name} is missing: give the folder of a clone of transformers, "
                f"of the tag {tag}",
                file=sys.stderr,
            )
            return 2
    os.environ[_CHECKOUT] = str(checkout)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # Settings are those of neither project.
    own = ["-c", os.devnull, "-p", "no:cacheprovider", "--rootdir", str(Path(__file__).parent)]
    return pytest.main([__file__, *own, "-W", "ignore", "-q", *others], plugins=[_Expecting()])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
