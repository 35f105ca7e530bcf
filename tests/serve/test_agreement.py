"""Texts, tokens, places and scores agree in every answer and in every event of a stream."""

import json
import random
import re

import pytest
import torch
from tokenizers import Tokenizer, decoders, models

from transformer_xl.config import ModelConfig
from transformer_xl.data import train_vocab
from transformer_xl.data.vocab_files import BroughtVocab
from transformer_xl.model import build_model

TEXT = "x = '€'\nné 😀 “ab” abab "


def pieces():
    """As SentencePiece: a space is part of a token, and characters may be several tokens."""
    symbols = ["</s>", "▁", "a", "b", "▁ab", "€"]
    symbols += [f"<0x{byte:02X}>" for byte in (*"é漢\n😀".encode(), 0xE2)]
    ids = {symbol: number for number, symbol in enumerate(dict.fromkeys(symbols))}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return BroughtVocab(tokenizer.to_str())


VOCABS = {
    "bytes": lambda: train_vocab("bytes", []),
    "bpe": lambda: train_vocab("bpe", [TEXT * 20], 280).extended(["<pad>"]),
    "chars": lambda: train_vocab("chars", [TEXT]),
    "chars with <unk>": lambda: train_vocab("chars", [TEXT], held_out="ÄÖ"),
    "words": lambda: train_vocab("words", ["the cat — sat\non é mat\n"]),
    "pieces": pieces,
}


class Asker:
    """Asks a server whose model samples the tokens of a script."""

    def __init__(self, client, vocab):
        self.client, self.vocab, self.script = client, vocab, [0, 0]
        is_exact = vocab.kind in ("bytes", "bpe", "chars")
        self.known = vocab.encode(TEXT) if is_exact else range(len(vocab))

    def sample(self, texts):
        return [self.script[len(text.written)] for text in texts]

    def post(self, path="/v1/completions", **body):
        answer = self.client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer

    def events(self, **body):
        """Return the choices of the events of a stream."""
        lines = self.post(stream=True, **body).text.strip().split("\n\n")
        assert lines.pop() == "data: [DONE]"
        return [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]


@pytest.fixture(scope="module", params=VOCABS)
def asker(request, tmp_path_factory):
    for name in ("fastapi", "uvicorn", "prometheus_client", "httpx"):
        pytest.importorskip(name, reason="needs pip install 'transformer-xl[serve]'")
    from fastapi.testclient import TestClient

    from transformer_xl.apps.serve import completions
    from transformer_xl.apps.serve.api import create_app
    from transformer_xl.apps.serve.engine import Engine
    from transformer_xl.apps.serve.serve_settings import ServeSettings
    from transformer_xl.apps.serve.service import Service

    vocab = VOCABS[request.param]()
    torch.manual_seed(0)
    sizes = {"n_layer": 1, "n_head": 1, "d_model": 4, "d_inner": 4, "mem_len": 8, "dropout": 0.0}
    model = build_model(ModelConfig(vocab_size=len(vocab), **sizes)).eval()
    folder = tmp_path_factory.mktemp("scripted")
    model.save_pretrained(folder, vocab)
    service = Service(model, vocab, folder / "model.safetensors", ServeSettings(), "it")
    client = TestClient(create_app(service), base_url="http://127.0.0.1")
    found = Asker(client, vocab)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(completions, "_EVENT_SECONDS", 0.0)
        patch.setattr(Engine, "_sample", lambda self, texts, *_: found.sample(texts))
        with client:
            yield found


def raw_of(tokens):
    """The bytes of tokens as a server writes them."""
    found = b""
    for token in tokens:
        if token.startswith("bytes:"):
            found += bytes(int(x, 16) for x in re.findall(r"\\x(..)", token))
        else:
            found += token.encode()
    return found


def expected_of(vocab, prompt, script, stop):
    """The text up to a stop string, where it begins, how many tokens that took.

    The last one: whether the prompt ends with a character, and not within one.
    """
    decoder = vocab.stream_decoder()
    text = "".join(map(decoder.push, prompt))
    start, is_whole = len(text), not decoder.pending()
    for n, token in enumerate(script, 1):
        text += decoder.push(token)
        if places := [text.index(each, start) for each in stop if each in text[start:]]:
            return text[: min(places)], start, n, is_whole
    return text + decoder.flush(), start, len(script), is_whole


def check(choice, start):
    """Check that a choice, or one event, agrees with itself; ``start``: where its text begins."""
    scores, text = choice["logprobs"], choice["text"]
    if scores is None:
        assert (text, choice["token_ids"]) == ("", [])
        return
    tokens, places = scores["tokens"], scores["text_offset"]
    assert len({len(values) for values in scores.values()}) == 1
    assert places == sorted(places)
    for token, log_prob, top, place in zip(*scores.values(), strict=True):
        assert 0 <= place - start <= len(text)
        if not token.startswith("bytes:"):
            assert text[place - start :].startswith(token)
        assert top[token] == log_prob
    assert raw_of(tokens).decode("utf-8", "replace") == text


@pytest.mark.parametrize("seed", range(6))
def test_whatever_is_asked_text_tokens_places_and_scores_agree(asker, seed):
    rng, vocab = random.Random(seed), asker.vocab

    def drawn(n):
        begin = rng.randrange(len(asker.known))
        run = [*asker.known, *asker.known][begin : begin + n]
        return [x if rng.random() < 0.9 else rng.randrange(len(vocab)) for x in run]

    prompt, script = drawn(rng.randrange(1, 9)), drawn(rng.randrange(1, 16))
    whole = vocab.decode(script)
    stops = [whole[rng.randrange(9) :][: rng.choice((1, 2, 5))] for _ in range(rng.randrange(3))]
    stop = [each for each in stops if each]
    text, start, n_read, is_whole = expected_of(vocab, prompt, script, stop)
    asker.script = script
    body = {"prompt": prompt, "max_tokens": len(script), "stop": stop, "logprobs": rng.randrange(4)}
    answer = asker.post(**body, n=2).json()
    choice = answer["choices"][0]
    assert {**answer["choices"][1], "index": 0} == choice
    assert answer["usage"]["completion_tokens"] == 2 * n_read
    assert choice["text"] == text[start:]
    ids = choice["token_ids"]
    assert ids == script[: len(ids)]
    assert len(choice["logprobs"]["tokens"]) == len(ids)
    if choice["finish_reason"] == "length":
        assert ids == script
    events, place = asker.events(**body), start
    # A character that begins in the prompt has not all its bytes here.
    if is_whole:
        check(choice, start)
    for number, event in enumerate(events):
        if is_whole or number:
            check(event, place)
        place += len(event["text"])
    assert "".join(event["text"] for event in events) == choice["text"]
    assert [x for event in events for x in event["token_ids"]] == ids
    for name, values in choice["logprobs"].items():
        sent = [x for e in events for x in (e["logprobs"] or {name: []})[name]]
        # Two computations of one sum need not agree in their last bits.
        assert all(x == pytest.approx(y) for x, y in zip(sent, values, strict=True))


@pytest.mark.parametrize("seed", range(2))
def test_the_texts_of_a_session_are_those_of_all_its_tokens(asker, seed):
    rng, vocab = random.Random(seed), asker.vocab
    ids = [*asker.known][:24]
    name = f"{vocab.kind}{len(vocab)}-{seed}"
    decoder = vocab.stream_decoder()
    while ids:
        n_read, n_drawn = rng.randrange(1, 4), rng.randrange(3)
        read, asker.script, ids = ids[:n_read], ids[n_read:][:n_drawn], ids[n_read + n_drawn :]
        body = {"prompt": read, "max_tokens": len(asker.script), "stop": [], "session": name}
        (choice,) = asker.post(**body).json()["choices"]
        assert choice["token_ids"] == asker.script
        for token in read:
            decoder.push(token)
        assert choice["text"] == "".join(map(decoder.push, asker.script))
    about = asker.client.get(f"/v1/sessions/{name}").json()
    decoder = vocab.stream_decoder()
    remembered = "".join(map(decoder.push, about["tokens"]))
    assert raw_of(about["texts"]).decode("utf-8", "replace").startswith(remembered)


def test_the_bytes_of_the_tokens_of_a_message_are_those_of_its_text(asker):
    asker.script = script = [*asker.known][:14]
    whole = asker.vocab.decode(script)
    body = {
        "messages": [{"role": "user", "content": asker.vocab.decode(script[:2])}],
        "max_tokens": len(script),
        "stop": [whole[5:7]],
        "logprobs": True,
        "top_logprobs": 2,
    }
    path = "/v1/chat/completions"
    (choice,) = asker.post(path, **body).json()["choices"]
    content = choice["message"]["content"]
    assert whole.startswith(content)
    assert choice["finish_reason"] == "stop"
    text, tokens = "", []
    for event in asker.events(path=path, **body):
        scores = (event["logprobs"] or {"content": []})["content"]
        said = b"".join(bytes(each["bytes"]) for each in scores)
        assert said.decode("utf-8", "replace") == event["delta"]["content"]
        assert raw_of(each["token"] for each in scores) == said
        assert all(len(each["top_logprobs"]) == 2 for each in scores)
        text, tokens = text + event["delta"]["content"], tokens + scores
    assert (text, tokens) == (content, choice["logprobs"]["content"])
