"""One text for one seed and the same settings, whoever is asked: Python, the server, `txl`."""

import json
from contextlib import contextmanager
from dataclasses import replace

import pytest

from transformer_xl.apps.serve.serve_settings import ServeSettings
from transformer_xl.cli import main
from transformer_xl.config import GenerateConfig
from transformer_xl.config.recipes import load_recipe
from transformer_xl.inference.generate import Sampling, Session, generate_batch

OWN = {"temperature": 0.6, "top_k": None, "top_p": 0.8}
PROMPT, LENGTH = "the cat", 24


@pytest.fixture(scope="module")
def run(make_model, toy_recipe, tmp_path_factory):
    """A run folder whose recipe says how to draw."""
    made = make_model()
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    made.model.save_pretrained(folder / "model" / "best", made.vocab)
    recipe = toy_recipe(generate={**OWN, "length": LENGTH, "prompt": PROMPT})
    (folder / "recipe.toml").write_text(recipe.to_toml())
    made.folder = folder
    return made


@contextmanager
def served(run):
    """Asks a server of the run, as `txl serve` starts it."""
    for name in ("fastapi", "uvicorn", "prometheus_client", "httpx"):
        pytest.importorskip(name, reason="needs pip install 'transformer-xl[serve]'")
    from fastapi.testclient import TestClient

    from transformer_xl.apps import serve
    from transformer_xl.apps.serve.api import create_app
    from transformer_xl.apps.serve.service import Service

    with pytest.MonkeyPatch.context() as patch:
        given = []
        patch.setattr(serve, "serve", lambda *each: given.append(each))
        assert main(["serve", str(run.folder), "--port", "0"]) == 0
    _, vocab, weights, _, name, generation = given[0]
    service = Service(run.model, vocab, weights, ServeSettings(), name, generation)
    with TestClient(create_app(service), base_url="http://127.0.0.1") as client:

        def ask(**body):
            given = {"prompt": PROMPT, "max_tokens": LENGTH, **body}
            return client.post("/v1/completions", json=given)

        ask.service = service
        yield ask


@pytest.fixture(scope="module")
def asked(run):
    with served(run) as found:
        yield found


@pytest.fixture
def txl(run, capsys):
    def write(*words):
        assert main(["generate", str(run.folder), "--json", *map(str, words)]) == 0
        out, err = capsys.readouterr()
        return json.loads(out), err

    return write


PENALTIES = {
    "repetition_penalty": 1.2,
    "dry_multiplier": 0.8,
    "dry_allowed_length": 1,
}


@pytest.mark.parametrize(
    "given",
    [
        {}, {"temperature": 1.0}, {"top_p": 1, "top_k": 10**6}, {"top_k": 5}, {"temperature": 0.0},
        {"min_p": 0.5}, {"repetition_penalty": 1.4}, PENALTIES,
        {**PENALTIES, "min_p": 0.02, "top_k": 9},
    ],
    ids=str,
)  # fmt: skip
def test_the_same_settings_and_seed_write_the_same_text(run, asked, txl, given):
    seed = 7 - len(given)
    # What cuts nothing is off.
    off = {name: None for name, x in given.items() if "top" in name and x in (1, 10**6)}
    used = OWN | given | off
    expected = run.alone(PROMPT, LENGTH, seed=seed, **used)
    assert expected != run.alone(PROMPT, LENGTH, seed=seed, **OWN) or used == OWN
    ids = run.vocab.encode(PROMPT)
    batch = generate_batch(run.model, [ids], Sampling(**used), length=LENGTH, seed=seed)
    assert batch.decode(run.vocab) == [expected]

    session = Session.open(run.folder, seed=seed)
    session.write(PROMPT)
    assert "".join(session.generate(LENGTH, Sampling(**used))) == expected

    answer = asked(seed=seed, **given).json()
    assert answer["choices"][0]["text"] == expected
    assert answer["settings"].items() >= {**used, "seed": seed, "max_tokens": LENGTH}.items()

    words = [[f"--{name}", *(x if isinstance(x, list) else [x])] for name, x in given.items()]
    found, err = txl("--seed", seed, *(word for group in words for word in group))
    assert found["text"] == expected
    about = {"mem_len": 12, "weights": "float32", "preface": 0, "length": LENGTH}
    assert found["settings"].items() >= {**used, "seed": seed, **about}.items()
    assert err.startswith("sampling with ")
    assert err.endswith(f"seed {seed}\n")


def test_a_session_in_parts_is_penalized_as_one_text(run, asked):
    for seed in [7, -3]:
        expected = run.alone(PROMPT, LENGTH, seed=seed, **OWN | PENALTIES)
        given = {**PENALTIES, "session": f"parts{seed}"}
        parts = [asked(seed=seed, max_tokens=9, **given)]
        parts += [asked(prompt="", max_tokens=n, **given) for n in (1, LENGTH - 10)]
        assert "".join(part.json()["choices"][0]["text"] for part in parts) == expected, seed


def test_the_stop_strings_of_a_recipe_end_a_text(run, asked, txl, monkeypatch):
    whole = run.alone(PROMPT, LENGTH, seed=5, **OWN)
    stop = whole[6:9]
    recipe, written = run.folder / "recipe.toml", whole[: whole.index(stop)]
    own = {**OWN, "length": LENGTH, "prompt": PROMPT, "stop": (stop,)}
    generation = GenerateConfig(**own)
    before = recipe.read_text()
    try:
        recipe.write_text(replace(load_recipe(recipe), generate=generation).to_toml())
        assert txl("--seed", 5)[0]["text"] == written
        assert txl("--seed", 5, "--stop")[0]["text"] == whole
    finally:
        recipe.write_text(before)
    monkeypatch.setattr(asked.service, "generation", generation)
    assert asked(seed=5).json()["choices"][0]["text"] == written
    assert asked(seed=5, stop=[]).json()["choices"][0]["text"] == whole


def test_several_texts_have_the_same_seeds_wherever_they_are_drawn(run, asked, txl):
    expected = [run.alone(PROMPT, LENGTH, seed=5 + n, **OWN) for n in range(3)]
    prompts = [run.vocab.encode(PROMPT)] * 3
    batch = generate_batch(run.model, prompts, Sampling(**OWN), length=LENGTH, seed=5)
    assert batch.decode(run.vocab) == expected
    assert [each["text"] for each in asked(seed=5, n=3).json()["choices"]] == expected
    texts = txl("--seed", 5, "--samples", 3)[0]["texts"]
    assert [each["text"] for each in texts] == expected
    assert [each["seed"] for each in texts] == [5, 6, 7]


def test_texts_begin_after_the_preface_of_the_model(run, asked, monkeypatch):
    body = {"prompt": "ab", "seed": 5}
    plain = asked(**body).json()
    monkeypatch.setattr(run.model, "preface", tuple(run.vocab.encode("once upon a time, ")))
    with served(run) as ask:
        answer = ask(n=3, **body).json()
        first = ask(max_tokens=9, session="tale", **body).json()
        second = ask(prompt="", max_tokens=LENGTH - 9, session="tale").json()
    for n, choice in enumerate(answer["choices"]):
        assert choice["text"] == run.alone("ab", LENGTH, seed=5 + n, **OWN)
    assert answer["choices"][0]["text"] != plain["choices"][0]["text"]
    assert (answer["settings"]["preface"], "preface" in plain["settings"]) == (18, False)
    text = "".join(each["choices"][0]["text"] for each in (first, second))
    assert text == answer["choices"][0]["text"]
    assert ("preface" in first["settings"], "preface" in second["settings"]) == (True, False)


def test_a_server_without_the_preface_is_asked_for_by_an_option(run, monkeypatch):
    from transformer_xl.apps import serve
    from transformer_xl.cli import models

    given = []
    monkeypatch.setattr(serve, "serve", lambda *each: given.append(each[0].preface))
    monkeypatch.setattr(run.model, "preface", (1, 2))
    monkeypatch.setattr(models, "load", lambda *each: (run.model, run.vocab))
    for words in ([], ["--no_preface"]):
        assert main(["serve", str(run.folder), "--port", "0", *words]) == 0
    assert given == [(1, 2), ()]


def test_an_answer_says_once_how_it_is_drawn(asked):
    first, other = asked().json(), asked().json()
    seed = first["settings"]["seed"]
    assert seed != other["settings"]["seed"]
    assert asked(seed=seed).json()["choices"] == first["choices"]
    *events, done = asked(seed=1, stream=True).text.strip().split("\n\n")
    assert done == "data: [DONE]"
    first, *others = [json.loads(event.removeprefix("data: ")) for event in events]
    assert first["settings"] == {**OWN, "seed": 1, "max_tokens": LENGTH}
    assert not any("settings" in event for event in others)
