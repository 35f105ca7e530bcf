"""Chats: messages become a prompt by a template, and a completion becomes a message."""

import asyncio
import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from transformer_xl.data import train_vocab

for _name in ("fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(_name, reason="needs pip install 'transformer-xl[serve]'")
httpx = pytest.importorskip("httpx")
openai = pytest.importorskip("openai")
templates = pytest.importorskip("transformer_xl.apps.serve.chat_template")
errors = pytest.importorskip("transformer_xl.apps.serve.errors")
ChatTemplate, find_template = templates.ChatTemplate, templates.find_template

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
    assert chat(client, again, max_completion_tokens=5, seed=1).choices[
        0
    ].message.content == made.alone(prompt, 5, seed=1)


def test_a_stream_has_the_parts_of_several_messages_as_they_are_drawn(client, made):
    chunks = list(
        chat(
            client, n=2, max_tokens=120, seed=5, stream=True, stream_options={"include_usage": True}
        )
    )
    *parts, last = chunks
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert all(len(part.choices) == 1 for part in parts)
    for index in range(2):
        own = [part.choices[0] for part in parts if part.choices[0].index == index]
        text = "".join(choice.delta.content for choice in own)
        assert text == made.alone("the cat\n", 120, seed=5 + index)
        assert [choice.delta.role for choice in own] == ["assistant"] + [None] * (len(own) - 1)
        assert [choice.finish_reason for choice in own] == [None] * (len(own) - 1) + ["length"]
    # Neither waits for the end of the other.
    order = [part.choices[0].index for part in parts]
    assert order.index(1) < len(order) - 1 - order[::-1].index(0)
    assert (last.choices, last.usage.completion_tokens) == ([], 240)


def test_scores_have_the_bytes_of_tokens(client):
    found = chat(client, max_tokens=4, seed=1, logprobs=True, top_logprobs=2).choices[0]
    scores = found.logprobs.content
    assert "".join(x.token for x in scores) == found.message.content
    assert bytes(b for x in scores for b in x.bytes).decode() == found.message.content
    assert all(x.logprob < 0 and len(x.top_logprobs) == 2 for x in scores)


def test_what_is_wrong_with_a_chat_is_said(server):
    for body, message in [
        ({}, "messages is missing"),
        ({"messages": []}, "must have at least 1 items"),
        ({"messages": [{"role": "boss", "content": "a"}]}, "messages.0.role='boss' must be"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content=5 must be a text"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "half of a surrogate pair"),
        ({"messages": USER, "tools": [{}]}, "tools is not supported"),
        ({"messages": USER, "functions": []}, "functions is not supported"),
        (
            {"messages": USER, "session": "a"},
            "'session' is no field; only /v1/completions has it: leave it out",
        ),
        ({"messages": USER, "top_logprob": 2}, "is no field; did you mean top_logprobs?"),
        (
            {"messages": USER, "response_format": {"type": "text", "x": 1}},
            "response_format is not supported",
        ),
        ({"messages": USER, "max_tokens": 1, "max_completion_tokens": 2}, "give one"),
        ({"messages": USER, "top_logprobs": 2}, "no effect without logprobs"),
        ({"messages": USER, "stream_options": {}}, "no effect without stream"),
    ]:
        answer = httpx.post(
            f"{server.address}/v1/chat/completions",
            content=json.dumps(body),
            headers={"Content-Type": "application/json"},
        )
        assert answer.status_code == 400, body
        assert message in answer.json()["error"]["message"], body


def test_a_chat_takes_no_header_of_a_session(server):
    for header, param in [("X-Session", "session"), ("Idempotency-Key", "Idempotency-Key")]:
        answer = httpx.post(
            f"{server.address}/v1/chat/completions",
            json={"messages": USER},
            headers={header: "tale"},
        )
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), header
        assert f"leave {header} out" in answer.json()["error"]["message"], header


def test_options_of_openai_that_ask_for_nothing_are_accepted(client):
    options = {"include_usage": True, "include_obfuscation": False}
    *_, last = chat(client, max_tokens=2, stream=True, stream_options=options)
    assert last.usage.completion_tokens == 2
    assert chat(client, max_tokens=2, response_format={"type": "text"}).usage.completion_tokens == 2


# Templates.

TURNS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def vocab():
    return train_vocab("bytes", ["a"])


def test_the_template_of_the_folder_is_used_and_a_plain_one_without(tmp_path, vocab):
    assert find_template(tmp_path, vocab).render(USER) == "user: the cat\nassistant:"
    about = {"eos_token": {"content": "e"}, "chat_template": TURNS}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(about))
    found = find_template(tmp_path, vocab)
    assert (found.kind, found.stop) == ("model", ("e",))
    assert found.render(USER) == "<user>the cate<assistant>"
    several = [{"name": "tool", "template": "no"}, {"name": "default", "template": TURNS}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(about | {"chat_template": several}))
    assert find_template(tmp_path, vocab).render(USER) == "<user>the cate<assistant>"
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    assert find_template(tmp_path, vocab).render(USER) == "the cat!"
    (tmp_path / "own").write_text("{{ messages | tojson }}")
    found = find_template(tmp_path, vocab, tmp_path / "own")
    assert (found.kind, json.loads(found.render(USER))) == ("file", USER)


def test_a_template_that_is_none_is_refused_at_the_start(tmp_path, vocab):
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(ValueError, match=r"cannot be read: .*--chat_template FILE"):
        find_template(tmp_path, vocab)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer_config.json is damaged"):
        find_template(tmp_path, vocab)


def test_settings_of_a_tokenizer_that_mean_nothing_are_refused(tmp_path, vocab):
    for about in [
        "[]",
        '{"chat_template": 5}',
        '{"eos_token": [1]}',
        '{"chat_template": "\\ud800"}',
    ]:
        (tmp_path / "tokenizer_config.json").write_text(about)
        with pytest.raises(ValueError, match=r"tokenizer_config.json is damaged: .*delete it"):
            find_template(tmp_path, vocab)


def test_a_given_template_that_is_empty_or_none_is_refused(tmp_path, vocab):
    for content in [b"", b" \n", b"\xff", b"{% for %}"]:
        (tmp_path / "own").write_bytes(content)
        with pytest.raises(ValueError, match=r"own: the chat template cannot be read"):
            find_template(tmp_path, vocab, tmp_path / "own")


HOSTILE = [
    "{{ raise_exception('roles must alternate') }}",
    "{{ messages.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''.__class__.__base__ }}",
    "{{ self.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id') }}",
    "{% set _ = messages.append({}) %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ 'a' * 10 ** 12 }}",
    "{{ [0] * 10 ** 12 }}",
    "{% for a in range(9999) %}{{ 'a' * 100000 }}{% endfor %}",
    "{% set ns = namespace(s='a') %}{% for _ in range(60) %}{% set ns.s = ns.s ~ ns.s %}"
    "{% endfor %}{{ ns.s | length }}",
    "{{ ['a' * 4194304] | map('center', 10 ** 11) | list | length }}",
    "{{ '%0*d' | format(10 ** 11, 1) | length }}",
    "{{ '{:>99999999999}'.format(1) | length }}",
    "{{ messages | tojson(indent=10 ** 10) | length }}",
    "{% for a in range(9) %}{{ (range(99999) | list * 999) | join | length }}{% endfor %}",
    "{{ ('a' * 10 ** 7).replace('', 'a' * 10 ** 7) | length }}",
    "{{ messages[5].content }}",
    "{% include '/etc/passwd' %}",
    "{{ 1 / 0 }}",
]
ENDLESS = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 10 ** (10 ** 10) }}",
    "{{ lipsum(n=10 ** 9) | length }}",
]


def is_refused(source):
    try:
        ChatTemplate("model", source).render(USER)
    except ValueError as error:
        return re.match(r"the chat template (failed|refuses these messages)", str(error))
    return False


def test_a_hostile_template_is_refused():
    assert [source for source in HOSTILE if not is_refused(source)] == []


@pytest.mark.slow
@pytest.mark.parametrize("source", ENDLESS)
def test_a_template_that_does_not_end_is_refused_within_seconds(source):
    assert is_refused(source)


def test_templates_go_on_after_one_that_exceeds_its_limits_and_many_share_a_process(tmp_path):
    bad, good = ChatTemplate("model", "{{ 'a' * 10 ** 12 }}"), ChatTemplate("file", TURNS)
    for _ in range(2):
        with pytest.raises(ValueError, match="exceeded"):
            bad.render(USER)
        with ThreadPoolExecutor(4) as threads:
            assert {*threads.map(good.render, [USER] * 40)} == {"<user>the cat<assistant>"}


def test_chats_that_wait_for_the_template_are_bounded_in_number_and_time(monkeypatch):
    may_end, calls = threading.Event(), []

    class Slow(ChatTemplate):
        def render(self, messages):
            calls.append(messages[0]["content"])
            may_end.wait(10)
            return calls[-1]

    async def used():
        slow = templates.Rendering(Slow("model", ""), 2)

        def rendering(content):
            return slow([{"content": content}])

        first = [asyncio.create_task(rendering(n)) for n in "abc"]
        await asyncio.sleep(0)
        with pytest.raises(errors.QueueFullError):
            await rendering("d")
        # The threads of other work are free.
        assert await asyncio.wait_for(asyncio.to_thread(str, 5), 5) == "5"
        may_end.set()
        assert await asyncio.gather(*first) == ["a", "b", "c"]
        # Each place is free again, and nothing is rendered for those who are not waiting any more.
        may_end.clear()
        monkeypatch.setattr(templates, "_MOST_SECONDS", 0.05)
        late = await asyncio.gather(*map(rendering, "efg"), return_exceptions=True)
        assert {type(each) for each in late} == {errors.QueueFullError}
        may_end.set()
        monkeypatch.setattr(templates, "_MOST_SECONDS", 10)
        assert await rendering("h") == "h"
        assert calls == [*"abceh"]
        slow.close()
        with pytest.raises(errors.StoppingError):
            await rendering("i")

    asyncio.run(used())


def test_a_chat_that_finds_no_place_gets_429_and_other_requests_are_answered(made, run_server):
    with run_server(made) as server:
        places = server.service.render_chat._places
        n = 0
        while places.acquire(blocking=False):
            n += 1
        assert n == server.service.settings.max_queue + 1
        url = f"{server.address}/v1"
        answer = httpx.post(f"{url}/chat/completions", json={"messages": USER})
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        assert answer.json()["error"]["code"] == "queue_full"
        assert httpx.post(f"{url}/completions", json={"prompt": "the"}).status_code == 200
        places.release(n)
        answer = httpx.post(f"{url}/chat/completions", json={"messages": USER, "max_tokens": 2})
        assert answer.status_code == 200


def test_loops_may_have_conditions():
    source = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    again = [*USER, {"role": "assistant", "content": "no"}]
    assert ChatTemplate("model", source).render(again) == "the cat"


def test_half_of_a_surrogate_pair_in_a_template_is_no_failure_of_the_server(run_server, made):
    """A template can write what no text has."""
    (made.folder / "chat_template.jinja").write_text(r"the {{ '\ud800' }}")
    try:
        with run_server(made) as server:
            url = f"{server.address}/v1/chat/completions"
            answer = httpx.post(url, json={"messages": USER})
    finally:
        (made.folder / "chat_template.jinja").unlink()
    assert answer.status_code == 400
    assert "half of a surrogate pair" in answer.json()["error"]["message"]


def test_a_template_sees_nothing_of_the_program():
    for source in ["{{ raise_exception.__globals__ }}", "{{ '{0.__class__}'.format(messages) }}"]:
        assert ChatTemplate("model", source).render(USER) == "", source


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_litellm_is_served(server, made, monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    pytest.importorskip("litellm")
    import litellm

    known = {"api_base": f"{server.address}/v1", "api_key": "none", "max_tokens": 8, "seed": 2}
    expected = made.alone("the cat\n", 8, seed=2)
    found = litellm.completion(model="openai/tiny", messages=USER, **known)
    assert found.choices[0].message.content == expected
    parts = litellm.completion(model="openai/tiny", messages=USER, stream=True, **known)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == expected
    with pytest.raises(litellm.BadRequestError, match="temperature=-3 must be at least 0"):
        litellm.completion(model="openai/tiny", messages=USER, temperature=-3, **known)
    text = litellm.text_completion(model="text-completion-openai/tiny", prompt="so", **known)
    assert text.choices[0].text == made.alone("so", 8, seed=2)
