"""Chats: messages become a prompt by a template, and a completion becomes a message."""

import json

import pytest

from transformer_xl.apps.serve.serve_settings import ServeSettings
from transformer_xl.cli import main
from transformer_xl.data import train_vocab

for _name in ("fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(_name, reason="needs pip install 'transformer-xl[serve]'")
httpx = pytest.importorskip("httpx")
openai = pytest.importorskip("openai")
templates = pytest.importorskip("transformer_xl.apps.serve.chat")
schemas = pytest.importorskip("transformer_xl.apps.serve.schemas")

USER = [{"role": "user", "content": "the cat"}]


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0) as found:
        yield found


def chat(client, messages=USER, **settings):
    return client.chat.completions.create(model="tiny", messages=messages, **settings)


def test_a_message_is_what_follows_the_prompt_of_the_template(client, made):
    found = chat(client, max_tokens=9, seed=3)
    # The vocabulary has no colon, so the template is that of contents alone.
    assert found.chat_template == "contents"
    (choice,) = found.choices
    assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
    assert choice.message.content == made.alone("the cat\n", 9, seed=3)
    assert found.usage.prompt_tokens == 8
    # A message can be sent back as it is, and contents can have parts.
    parts = [{"type": "text", "text": "so"}]
    again = [*USER, choice.message, {"role": "user", "content": parts}]
    prompt = f"the cat\n{choice.message.content}\nso\n"
    (choice,) = chat(client, again, max_completion_tokens=5, seed=1).choices
    assert choice.message.content == made.alone(prompt, 5, seed=1)


def test_a_stream_has_the_parts_of_several_messages_as_they_are_drawn(client, made):
    usage = {"include_usage": True}
    chunks = [*chat(client, n=2, max_tokens=120, seed=5, stream=True, stream_options=usage)]
    *parts, last = chunks
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert all(len(part.choices) == 1 for part in parts)
    for index in range(2):
        own = [part.choices[0] for part in parts if part.choices[0].index == index]
        text = "".join(choice.delta.content for choice in own)
        assert text == made.alone("the cat\n", 120, seed=5 + index)
        assert [choice.delta.role for choice in own] == ["assistant"] + [None] * (len(own) - 1)
        assert [choice.finish_reason for choice in own] == [None] * (len(own) - 1) + ["length"]
    assert (last.choices, last.usage.completion_tokens) == ([], 240)


def test_what_is_wrong_with_a_chat_is_said(server):
    for body, message in [
        ({}, "messages is missing"),
        ({"messages": []}, "must be a list of at least 1 items"),
        ({"messages": [{"role": "boss", "content": "a"}]}, "messages.0.role='boss' must be"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content=5 must be a text or"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "half of a surrogate pair"),
        ({"messages": USER, "tools": [{}]}, "'tools' is no field"),
        ({"messages": USER, "top_logprobs": 3}, "top_logprobs requires logprobs=true"),
        ({"messages": USER, "logprobs": False, "top_logprobs": 3}, "requires logprobs=true"),
        ({"messages": USER, "session": "a"}, "'session' is no field: GET /openapi.json lists them"),
    ]:
        content, headers = json.dumps(body), {"Content-Type": "application/json"}
        url = f"{server.address}/v1/chat/completions"
        answer = httpx.post(url, content=content, headers=headers)
        assert answer.status_code == 400, body
        assert message in answer.json()["error"]["message"], body


@pytest.mark.parametrize(
    ("template", "prompt", "stop"),
    [
        (None, "system: a\nuser: {role} %s\nassistant:", ("\nuser:", "\nsystem:")),
        ("<|{role}|>{content}</s>", "<|system|>a</s><|user|>{role} %s</s><|assistant|>", ("</s>",)),
        ("{content}\n", "a\n{role} %s\n", ()),
        ("{{}}{content}{role}", "{{}}asystem{{}}{role} %suser{{}}", ("assistant",)),
    ],
)
def test_messages_take_the_places_of_a_template(tmp_path, template, prompt, stop):
    vocab = train_vocab("bytes", ["a"])
    found = templates.chat_template(tmp_path, vocab, template)
    assert found.kind == ("roles" if template is None else "setting")
    # What a user writes is never a template.
    messages = [("system", "a"), ("user", "{role} %s")]
    messages = [schemas.Message(role=role, content=content) for role, content in messages]
    assert found.prompt(messages, vocab) == prompt
    assert found.stop[: len(stop)] == stop
    assert bool(found.stop) == bool(stop)


@pytest.mark.parametrize("has_jinja", [True, False])
def test_a_template_in_jinja_is_not_run_and_the_setting_is_named(tmp_path, caplog, has_jinja):
    if has_jinja:
        (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    vocab = train_vocab("bytes", ["a"])
    assert templates.chat_template(tmp_path, vocab, None).kind == "roles"
    assert ("not run; the plain template is used: give" in caplog.text) == has_jinja
    caplog.clear()
    assert templates.chat_template(tmp_path, vocab, "{content}").kind == "setting"
    assert not caplog.text


def test_a_template_has_the_content_once_and_the_option_before_is_named(refused, capsys):
    for template in ("", "{role}", "{content}{content}"):
        with refused("must have {content} once, and may have {role}"):
            ServeSettings(template=template)
    assert main(["serve", "english", "--chat_template", "x"]) == 2
    assert "--template TEXT has the text of one message" in capsys.readouterr().err


def test_the_template_of_the_server_is_used_and_no_session(run_server, made):
    with run_server(made, template="so {content}. ") as server:
        url = f"{server.address}/v1/chat/completions"
        body = {"messages": USER, "max_tokens": 9, "seed": 3}
        answer = httpx.post(url, json=body).json()
        error = httpx.post(url, json=body, headers={"X-Session": "tale"}).json()["error"]
        assert error["message"].endswith("leave X-Session out")
        refused = httpx.post(url, json=body, headers={"Idempotency-Key": "tale"})
        assert refused.status_code == 400
        assert "Idempotency-Key is gone: send session_turn" in refused.text
    assert answer["chat_template"] == "setting"
    text, stop, _ = made.alone("so the cat. so", 9, seed=3).partition(".")
    assert answer["choices"][0]["message"]["content"] == text
    assert answer["choices"][0]["finish_reason"] == ("stop" if stop else "length")
