"""The losses of ``Trainer`` are those of their definitions."""

import copy

import pytest
import torch
from torch.nn.functional import log_softmax

pytest.importorskip("accelerate", reason="Trainer needs accelerate")

# PEFT asks transformers by an old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

# Rows of very different lengths: a mean of means is not the mean.
LENGTHS = (3, 30, 5, 21, 2, 17, 9, 26)


@pytest.fixture
def rows(vocab, text):
    return [{"input_ids": vocab.encode(text[50 * n : 50 * n + T])} for n, T in enumerate(LENGTHS)]


@pytest.fixture
def ids(vocab, text):
    return torch.tensor(vocab.encode(text)[:200]).view(2, 100)


@pytest.fixture(params=["alone", "adapted"])
def tuned(request, transformers, folder):
    """The model, and the same wrapped by PEFT."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    if request.param == "alone":
        return model
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    settings = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["outer"], r=2)
    wrapped = peft.get_peft_model(model, settings)
    # What adapters compute is tested elsewhere; here something has to be learned.
    return wrapped.requires_grad_(True)


def trainer_of(transformers, tokenizer, model, rows, out, **settings):
    collator = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)
    arguments = transformers.TrainingArguments(
        output_dir=str(out),
        lr_scheduler_type="constant",
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **{"per_device_train_batch_size": len(rows), "max_steps": 1, "save_strategy": "no"}
        | {"optim": "sgd", "learning_rate": 0.5, "max_grad_norm": 0.0}
        | settings,
    )
    return transformers.Trainer(
        model, arguments, train_dataset=rows, eval_dataset=rows, data_collator=collator
    )


@pytest.fixture
def padded_right(tokenizer):
    other = copy.deepcopy(tokenizer)
    other.padding_side = "right"
    return other


def _log_probs(model, row):
    """Return the predictions of a text that is read alone, and what they are to predict."""
    ids = torch.tensor([row["input_ids"]])
    return log_softmax(model(ids).logits[0, :-1].float(), -1), ids[0, 1:]


def _by_hand(model, rows, smoothing, ignored=None):
    losses = []
    for row in rows:
        log_probs, targets = _log_probs(model, row)
        nll = -log_probs.gather(1, targets[:, None])[:, 0]
        losses.append(((1 - smoothing) * nll - smoothing * log_probs.mean(1))[targets != ignored])
    return torch.cat(losses).mean()


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_trainer_minimizes_and_reports_the_mean_of_the_shifted_loss(
    transformers, padded_right, tuned, rows, tmp_path, smoothing
):
    tuned.eval()
    # The symbol of padding is none of the targets.
    ignored = padded_right.pad_token_id
    expected = _by_hand(tuned, rows, smoothing, ignored)
    expected.backward()
    updated = {
        name: (x - 0.5 * x.grad).detach()
        for name, x in tuned.named_parameters()
        if x.requires_grad and x.grad is not None
    }
    tuned.zero_grad()
    trainer = trainer_of(
        transformers, padded_right, tuned, rows, tmp_path, label_smoothing_factor=smoothing
    )
    evaluated = trainer.evaluate()["eval_loss"]
    assert evaluated == pytest.approx(expected.item(), rel=1e-5)
    assert trainer.train().training_loss == pytest.approx(expected.item(), rel=1e-5)
    for name, parameter in tuned.named_parameters():
        if name in updated:
            torch.testing.assert_close(parameter.detach(), updated[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_accumulated_batches_are_one_batch(
    transformers, padded_right, tuned, rows, tmp_path, smoothing
):
    found = []
    for n in (1, 4):
        torch.manual_seed(0)
        trainer = trainer_of(
            transformers,
            padded_right,
            copy.deepcopy(tuned),
            rows,
            tmp_path,
            label_smoothing_factor=smoothing,
            per_device_train_batch_size=8 // n,
            gradient_accumulation_steps=n,
        )
        loss = trainer.train().training_loss
        found.append((loss, [x.detach() for x in trainer.model.parameters()]))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    for one, other in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_a_call_is_honored_or_refused(transformers, folder, ids, refused):
    for kind in ("CausalLM", "SequenceClassification"):
        model = getattr(transformers, f"AutoModelFor{kind}").from_pretrained(folder)
        for name in ("token_type_ids", "position_ids", "head_mask"):
            with pytest.raises(TypeError, match=f"{name} is not an argument.*leave it out"):
                model(ids, **{name: ids})
            assert model(ids, **{name: None}).logits is not None
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with refused(r"labels of shape \(2, 99\) must be \(2, 100\)"):
        model(ids, labels=ids[:, 1:])
