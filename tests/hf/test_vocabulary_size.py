"""Vocabularies that grow and shrink: embedding, softmax, clusters, ties, tokenizer."""

from typing import Any

import pytest
import torch
from tests.hf.test_tokenization import LINES, MAKERS, opened

from transformer_xl.data.vocab_files import load_vocab
from transformer_xl.model import TransformerXL

KINDS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"tie_embeddings": False},
    "narrow": {"d_embed": 8, "tie_projections": True},
    "clusters of one table": {"cutoffs": (5, 10)},
    "clusters": {"cutoffs": (5, 10), "div_val": 2, "d_embed": 8, "tie_projections": True},
    "untied clusters": {"cutoffs": (5, 10), "div_val": 2, "tie_embeddings": False},
    "LSTM": {"kind": "lstm", "n_head": 8, "d_inner": 2048},
}
V, IDS = 15, torch.arange(2 * 9).view(2, 9) % 15


def _ties(model):
    names: dict[int, list[str]] = {}
    for name, x in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(x), []).append(name)
    return {frozenset(x) for x in names.values() if len(x) > 1}


@pytest.mark.parametrize("mean_resizing", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_new_tokens_leave_the_others_as_they_were(
    transformers, any_folder, tmp_path, kind, mean_resizing
):
    _, folder = any_folder(**KINDS[kind])
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    before, ties = model(IDS).logits, _ties(model)
    embedding = model.resize_token_embeddings(V + 3, mean_resizing=mean_resizing)
    assert embedding is model.get_input_embeddings()
    assert model.config.vocab_size == model.transformer.config.vocab_size == V + 3
    assert _ties(model) == ties
    found = model(IDS).logits
    assert found.shape[-1] == V + 3
    torch.testing.assert_close(found.exp().sum(-1), torch.ones(2, 9))
    # Between the old tokens of a distribution, odds are what they were.
    first = 5 if "cutoffs" in KINDS[kind] else V
    odds = [x[..., :first] - x[..., :1] for x in (found, before)]
    torch.testing.assert_close(*odds)
    if first < V:
        # New tokens are in the last cluster, whose share of the head does not change.
        torch.testing.assert_close(found[..., :10], before[..., :10])
        whole = before[..., 10:].logsumexp(-1)
        torch.testing.assert_close(found[..., 10:].logsumexp(-1), whole)
    # They are read and learned.
    new = torch.tensor([[V, 1, V + 2, 2]])
    model(new, labels=new).loss.backward()
    model.save_pretrained(tmp_path)
    again = TransformerXL.from_pretrained(tmp_path)
    torch.testing.assert_close(again(IDS).log_probs, found)
    model.resize_token_embeddings(V)
    torch.testing.assert_close(model(IDS).logits, before)
    assert _ties(model) == ties


def test_sizes_are_rounded_up_or_refused(transformers, any_folder, folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert len(model.resize_token_embeddings(pad_to_multiple_of=8).weight) == 16
    assert len(model.resize_token_embeddings(17, pad_to_multiple_of=8).weight) == 24
    for size, message in ((0, "vocab_size=0 must be at least 1"), (2.5, "must be an integer")):
        with pytest.raises(ValueError, match=message):
            model.resize_token_embeddings(size)
    _, other = any_folder(cutoffs=(5, 10))
    clusters = transformers.AutoModelForCausalLM.from_pretrained(other)
    with pytest.raises(ValueError, match="cutoffs"):
        clusters.resize_token_embeddings(9)
    assert clusters.config.vocab_size == V


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_an_adapter_on_the_embedding_is_not_lost(transformers, folder):
    peft = pytest.importorskip("peft")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["embedding"]))
    with pytest.raises(ValueError, match=r"embedding: .*resize the vocabulary first"):
        model.resize_token_embeddings(V + 1)


@pytest.mark.parametrize("kind", MAKERS)
def test_added_tokens_are_symbols_of_the_folder(transformers, tmp_path, kind):
    text = "3 1\n" if kind == "integers" else LINES
    tokenizer = opened(transformers, vocab := MAKERS[kind](), tmp_path)
    ids, n = tokenizer(text)["input_ids"], len(vocab)
    assert tokenizer.add_special_tokens({"extra_special_tokens": ["<|sep|>", "<|sep|>2"]}) == 2
    assert tokenizer.add_tokens(["<|sep|>"]) == 0
    assert len(tokenizer) == n + 2
    tokenizer.save_pretrained(tmp_path)
    again = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for each in (tokenizer, again):
        assert len(each) == n + 2
        assert each(text)["input_ids"] == ids
        marked = each(f"{text}<|sep|>2{text}<|sep|>")["input_ids"]
        assert marked == [*ids, n + 1, *ids, n]
        assert "<|sep|>2" in each.decode(marked)
        assert "<|sep|>" not in each.decode(marked, skip_special_tokens=True)
        assert each.convert_tokens_to_ids("<|sep|>") == n
        if each.pad_token == "<pad>":
            assert each.pad_token_id == n + 2
    # One that is no special token is text.
    again.add_tokens(["covid"])
    again.save_pretrained(tmp_path / "plain")
    marked = f"{text[:-1]} covid <|sep|>2 {text[:-1]}"
    for each in (again, transformers.AutoTokenizer.from_pretrained(tmp_path / "plain")):
        found = each.decode(each(marked)["input_ids"], skip_special_tokens=True)
        assert "covid" in found
        assert "<|sep|>" not in found
        if kind in ("words", "integers"):
            assert found.split() == marked.replace("<|sep|>2", "").split()
    # It is one as soon as it is given a role.
    for role in ({"extra_special_tokens": ["covid"]}, {"sep_token": "covid"}):
        each = transformers.AutoTokenizer.from_pretrained(tmp_path / "plain")
        each.add_special_tokens(role)
        assert "covid" not in each.decode(each(marked)["input_ids"], skip_special_tokens=True)
    # Our own programs read them, and write them as nothing.
    own = load_vocab(tmp_path)
    assert len(own) == n + 2
    assert own.encode(text) == ids
    assert own.symbols[n:] == ["<|sep|>", "<|sep|>2"]


def test_added_tokens_are_written_with_a_model_that_grew(transformers, folder, tmp_path):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"eos_token": "<|end|>"})
    model.resize_token_embeddings(len(tokenizer))
    ids = tokenizer("the cat<|end|>", return_tensors="pt")
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(60):
        loss = model(**ids, labels=ids["input_ids"]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    prompt = tokenizer("the cat", return_tensors="pt")
    written = model.eval().generate(
        **prompt, max_new_tokens=9, do_sample=False, eos_token_id=tokenizer.eos_token_id
    )
    assert tokenizer.decode(written[0]) == "the cat<|end|>"
    assert tokenizer.decode(written[0], skip_special_tokens=True) == "the cat"
    for each in (model, tokenizer):
        each.save_pretrained(tmp_path)
    assert len(load_vocab(tmp_path)) == TransformerXL.from_pretrained(tmp_path).config.vocab_size
