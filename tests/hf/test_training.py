"""Fine-tuning with ``Trainer`` on ordinary batches."""

import pytest
import torch
from tests.hf.test_losses import trainer_of

from transformer_xl.model import TransformerXL


@pytest.fixture
def rows(vocab, text):
    """Texts of different lengths, which the model has not learned: backwards."""
    backwards = text[::-1]
    return [
        {"input_ids": vocab.encode(backwards[40 * n : 40 * n + 20 + n % 13])} for n in range(16)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_language_model_is_tuned_saved_and_resumed(
    transformers, folder, tokenizer, rows, tmp_path, side
):
    batches = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "seed": 1}
    updates = {"optim": "adamw_torch", "learning_rate": 3e-3, "max_grad_norm": 1.0}
    settings = {**batches, **updates, "save_strategy": "steps", "save_steps": 2}

    def trainer(steps, out):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        tokenizer.padding_side = side
        return trainer_of(transformers, tokenizer, model, rows, out, max_steps=steps, **settings)

    whole = trainer(4, tmp_path / "whole")
    before = whole.evaluate()["eval_loss"]
    whole.train()
    assert whole.evaluate()["eval_loss"] < before - 0.1

    trainer(2, tmp_path / "parts").train()
    resumed = trainer(4, tmp_path / "parts")
    resumed.train(resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-2"))
    for first, second in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        torch.testing.assert_close(first, second)
    tokenizer.padding_side = "left"
    # Our own loader reads what Trainer wrote.
    own = TransformerXL.from_pretrained(tmp_path / "whole" / "checkpoint-4")
    assert torch.equal(own.embedding.weight, whole.model.transformer.embedding.weight)
