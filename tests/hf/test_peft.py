"""PEFT on the class of transformers: trained, saved, loaded, switched."""

import pytest
import torch
from torch import nn

peft = pytest.importorskip("peft")

# What PEFT asks transformers in an old way, which PEFT knows itself.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")

TARGETS = ["qkv_proj", "o_proj", "inner", "outer", "softmax"]


@pytest.fixture
def base(transformers, folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


def adapted(base, seed=1, targets=TARGETS):
    torch.manual_seed(seed)
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, target_modules=targets, init_lora_weights=False
    )
    return peft.get_peft_model(base, config).eval()


@pytest.fixture
def tokens(vocab, text):
    return torch.tensor([vocab.encode(text[:40]), vocab.encode(text[300:340])])


def test_embeddings_are_what_the_field_expects(base, any_folder, tokens):
    for settings in ({}, {"d_embed": 8}, {"tie_embeddings": False}):
        _, folder = any_folder(**settings)
        model = type(base).from_pretrained(folder)
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        assert isinstance(embedding, nn.Embedding)
        assert isinstance(head, nn.Linear)
        width = model.config.d_embed or model.config.d_model
        shape = (model.config.vocab_size, width)
        assert embedding.weight.shape == head.weight.shape == shape
        assert (embedding.weight is head.weight) == model.config.tie_word_embeddings
        vectors = embedding(tokens)
        assert vectors.shape == (*tokens.shape, width)
        found = model(inputs_embeds=vectors).logits
        torch.testing.assert_close(found, model(tokens).logits)
    _, folder = any_folder(cutoffs=(5, 12), div_val=2)
    assert type(base).from_pretrained(folder).get_output_embeddings() is None


def test_all_linear_maps_are_those_of_the_layers(base):
    model = adapted(base, targets="all-linear")
    found = set(model.targeted_module_names)
    assert found == {
        f"transformer.layers.{n}.{part}"
        for n in range(base.config.n_layer)
        for part in (
            *(f"attention.{x}_proj" for x in ("qkv", "r", "o")),
            *(f"feed_forward.{x}" for x in ("inner", "outer")),
        )
    }


def test_what_is_generated_is_that_of_the_merged_model(base, tokens):
    settings = {"max_new_tokens": 12, "do_sample": False}
    plain = base.generate(tokens, **settings)
    model = adapted(base)
    found = model.generate(input_ids=tokens, **settings)
    without_cache = model.generate(input_ids=tokens, use_cache=False, **settings)
    with model.disable_adapter():
        assert torch.equal(model.generate(input_ids=tokens, **settings), plain)
    assert not torch.equal(found, plain)
    assert torch.equal(without_cache, found)
    # Merged in the tied table, the adapter of the head would act on the embedding, too.
    own = model.get_base_model().transformer
    own.softmax.base_layer.weight = nn.Parameter(own.softmax.base_layer.weight.detach().clone())
    assert torch.equal(model.merge_and_unload().generate(tokens, **settings), found)


def test_an_adapter_comes_back_bit_for_bit(transformers, base, folder, tokens, tmp_path):
    model = adapted(base)
    expected = model(tokens).logits
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert not torch.equal(again(tokens).logits, expected)
    again = peft.PeftModel.from_pretrained(again, tmp_path)
    assert torch.equal(again(tokens).logits, expected)


def test_adapters_that_transformers_adds_are_saved_alone(
    transformers, base, folder, tokens, tmp_path
):
    torch.manual_seed(1)
    base.add_adapter(
        peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=TARGETS, init_lora_weights=False)
    )
    expected = base.eval()(tokens).logits
    base.save_pretrained(tmp_path)
    assert not (tmp_path / "model.safetensors").exists()
    again = transformers.AutoModelForCausalLM.from_pretrained(folder)
    again.load_adapter(str(tmp_path))
    assert torch.equal(again.eval()(tokens).logits, expected)


def test_trainer_trains_adapters_alone(transformers, base, folder, tokenizer, tmp_path):
    pytest.importorskip("accelerate", reason="Trainer needs accelerate")
    rows = [
        {"input_ids": tokenizer("a dog ran to the cat"[n % 3 :])["input_ids"]} for n in range(8)
    ]
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=TARGETS)
    model = peft.get_peft_model(base, config)
    before = {name: x.detach().clone() for name, x in model.named_parameters()}
    trainer = transformers.Trainer(
        model,
        transformers.TrainingArguments(
            str(tmp_path), max_steps=6, learning_rate=1e-2, save_steps=6, report_to=[],
            use_cpu=True, disable_tqdm=True, per_device_train_batch_size=4,
        ),
        train_dataset=rows,
        eval_dataset=rows,
        data_collator=transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )  # fmt: skip
    loss = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < loss - 0.05
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) == ("lora_" not in name), name
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder)
    again = peft.PeftModel.from_pretrained(plain, tmp_path / "checkpoint-6")
    read = torch.tensor([rows[0]["input_ids"]])
    assert torch.equal(again(read).logits, model.eval()(read).logits)


def test_a_classifier_learns_through_adapters(transformers, folder, tokens):
    auto = transformers.AutoModelForSequenceClassification
    config = peft.LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["qkv_proj", "outer"])
    model = peft.get_peft_model(auto.from_pretrained(folder, num_labels=2), config)
    model(tokens, labels=torch.tensor([0, 1])).loss.backward()
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "modules_to_save" in name:
            assert bool(parameter.grad.any()), name
