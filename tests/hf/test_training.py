"""Fine-tuning with ``Trainer`` on ordinary batches."""

import pytest
import torch

from transformer_xl.model import TransformerXL

accelerate = pytest.importorskip("accelerate", reason="Trainer needs accelerate")


def _arguments(transformers, folder, **settings):
    return transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        save_strategy="steps",
        save_steps=2,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_num_workers=0,
        **settings,
    )


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
    def trainer(steps, out):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        tokenizer.padding_side = side
        collator = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)
        arguments = _arguments(
            transformers, out, max_steps=steps, gradient_accumulation_steps=2, seed=1
        )
        return transformers.Trainer(
            model, arguments, train_dataset=rows, eval_dataset=rows, data_collator=collator
        )

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


@pytest.mark.slow
def test_a_classifier_learns(transformers, folder, tokenizer, vocab, text, tmp_path):
    """Whether a text ends with one word or another."""
    rows = [
        {
            "input_ids": vocab.encode(f"{text[n : n + 20 + n % 7]} {word}"),
            "labels": int(word == "sea"),
        }
        for n in range(0, 160, 10)
        for word in ("dog", "sea")
    ]
    torch.manual_seed(0)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, segment_len=16)
    arguments = _arguments(transformers, tmp_path, max_steps=25)
    trainer = transformers.Trainer(
        model,
        arguments,
        train_dataset=rows,
        eval_dataset=rows,
        data_collator=transformers.DataCollatorWithPadding(tokenizer),
        compute_metrics=lambda given: {
            "accuracy": (given.predictions.argmax(-1) == given.label_ids).mean()
        },
    )
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    assert after["eval_loss"] < before["eval_loss"]
    assert after["eval_accuracy"] > before["eval_accuracy"]


def test_the_beginning_that_trainer_copies_into_a_model_changes_nothing_after_a_prompt(
    transformers, folder, tokenizer, rows, tmp_path
):
    """The line break, as ``bos_token``: it is added to no text, and used in no loss."""
    assert tokenizer.bos_token == "\n"
    assert tokenizer("the cat").input_ids == tokenizer.vocab.encode("the cat")
    load = transformers.AutoModelForCausalLM.from_pretrained
    model, before = load(folder), load(folder)
    collator = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)
    arguments = _arguments(transformers, tmp_path, max_steps=1)
    arguments.learning_rate = 0.0
    trainer = transformers.Trainer(model, arguments, collator, rows, processing_class=tokenizer)
    trainer.train()
    assert model.config.bos_token_id == tokenizer.bos_token_id
    assert before.config.bos_token_id is None
    trainer.save_model(str(tmp_path / "tuned"))
    after = load(tmp_path / "tuned")
    ids = tokenizer("the cat", return_tensors="pt").input_ids
    settings = {"max_new_tokens": 8, "do_sample": False}
    assert torch.equal(after(ids, labels=ids).loss, before(ids, labels=ids).loss)
    assert torch.equal(after.generate(ids, **settings), before.generate(ids, **settings))
    # Where nothing is given, a text begins as after a line break.
    begun = tokenizer("\n", return_tensors="pt").input_ids
    assert torch.equal(after.generate(**settings), before.generate(begun, **settings))
