from datetime import datetime
from typing import Any

import pytest

from engine.errors import InvalidRequestError, TokenizerError
from serve_app.text import chat
from serve_app.text.chat import ChatTemplate

USER = [{"role": "user", "content": "Hi"}]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SHOW = "{{ messages[0]['content'] }}"


def template(source: str, **options: Any) -> ChatTemplate:
    return ChatTemplate(source, "<s>", "</s>", **options)


@pytest.mark.parametrize(("add_generation_prompt", "end"), [(True, "<|im_start|>assistant\n"), (False, "")])
def test_messages_are_rendered_in_order(add_generation_prompt: bool, end: str) -> None:
    messages = [{"role": "system", "content": "Be kind."}, *USER]
    rendered = template(CHATML).render(messages, add_generation_prompt=add_generation_prompt)
    assert rendered == "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n" + end


def test_bos_and_eos_are_the_tokenizers() -> None:
    assert template("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}").render(USER) == "<s>Hi</s>"


def test_blocks_are_trimmed_as_hugging_face_does() -> None:
    assert template("  {% if true %}\n{{ messages[0].content }}\n  {% endif %}\nx").render(USER) == "Hi\nx"


def test_text_is_not_escaped() -> None:
    content = [{"role": "user", "content": "<b> & 'é'"}]
    assert template(SHOW).render(content) == "<b> & 'é'"
    assert template("{{ messages[0].content | tojson }}").render(content) == "\"<b> & 'é'\""


def test_tojson_takes_the_arguments_that_templates_give() -> None:
    tools = [{"b": 1, "a": "é"}]
    assert template("{{ tools | tojson(indent=1) }}").render(USER, tools=tools) == '[\n {\n  "b": 1,\n  "a": "é"\n }\n]'
    source = "{{ tools[0] | tojson(ensure_ascii=true, separators=(',', ':'), sort_keys=true) }}"
    assert template(source).render(USER, tools=tools) == '{"a":"\\u00e9","b":1}'


def test_strftime_now_reads_the_clock() -> None:
    source = "{{ strftime_now('%d %b %Y') }}"
    assert template(source, now=lambda: datetime(2024, 7, 26)).render(USER) == "26 Jul 2024"


def test_loop_controls_and_generation_blocks_are_known() -> None:
    source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"
    assert template(source).render([*USER, *USER]) == "Hi"


def test_text_parts_are_joined_by_newlines() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert template(SHOW).render([{"role": "user", "content": parts}]) == "one\ntwo"


def test_the_callers_messages_are_left_as_they_are() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "one"}]}]
    template(SHOW).render(messages)
    assert messages == [{"role": "user", "content": [{"type": "text", "text": "one"}]}]


def test_a_field_that_is_null_is_not_defined() -> None:
    message = {"role": "user", "content": "Hi", "tool_calls": None}
    assert (
        template("{{ messages[0].tool_calls is defined }} {{ 'name' in messages[0] }}").render([message])
        == "False False"
    )


def test_content_may_be_null_beside_tool_calls() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [{"id": "x"}]}
    assert template("{{ messages[0].content is none }}").render([message]) == "True"


@pytest.mark.parametrize(
    ("message", "names"),
    [
        ({"content": "Hi"}, r"messages\[0\]\.role is None"),
        ({"role": "user"}, r"messages\[0\]\.content is null"),
        ({"role": "user", "content": 3}, r"messages\[0\]\.content is a int"),
        ({"role": "user", "content": ["Hi"]}, r"messages\[0\]\.content\[0\] is a str"),
        ({"role": "user", "content": [{"type": "image_url"}]}, r"messages\[0\]\.content\[0\]\.type is 'image_url'"),
        ({"role": "user", "content": [{"type": "text"}]}, r"messages\[0\]\.content\[0\]\.text is None"),
    ],
)
def test_a_malformed_message_is_refused_by_name(message: dict[str, Any], names: str) -> None:
    with pytest.raises(InvalidRequestError, match=names) as raised:
        template(SHOW).render([message])
    assert raised.value.param == "messages"


def test_what_the_template_raises_is_the_clients_error() -> None:
    with pytest.raises(InvalidRequestError, match="roles must alternate") as raised:
        template("{{ raise_exception('roles must alternate') }}").render(USER)
    assert raised.value.param == "messages"


def test_a_template_that_cannot_render_the_messages_says_why() -> None:
    with pytest.raises(InvalidRequestError, match=r"UndefinedError.*no attribute 'name'"):
        template("{{ messages[0].name.first }}").render(USER)


def test_a_template_that_is_no_jinja_is_refused_when_loaded() -> None:
    with pytest.raises(TokenizerError, match="no valid Jinja template"):
        template("{% for %}")


def test_tools_that_the_template_never_reads_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="does not read tools") as raised:
        template(SHOW).render(USER, tools=[{"type": "function"}])
    assert raised.value.param == "tools"


def test_template_kwargs_reach_the_template() -> None:
    source = "{{ 'think' if enable_thinking else 'answer' }}"
    assert template(source).render(USER, template_kwargs={"enable_thinking": True}) == "think"
    assert template(source).render(USER) == "answer"


@pytest.mark.parametrize("name", ["enable_thinkign", "messages", "bos_token"])
def test_template_kwargs_that_are_unknown_or_reserved_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequestError, match=name) as raised:
        template("{{ enable_thinking }}").render(USER, template_kwargs={name: True})
    assert raised.value.param == "chat_template_kwargs"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__['__builtins__'] }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ messages | map(attribute='__class__') | list }}",
        "{{ messages | attr('__class__') }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{% for i in range(10000000) %}x{% endfor %}",
        "{{ 'x' * 10000000000 }}",
        "{{ 10000000000 * [0] }}",
        "{{ 9 ** 9 ** 9 }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    with pytest.raises(TokenizerError, match="the sandbox forbids"):
        template(source).render(USER)


def test_small_products_are_allowed() -> None:
    assert template("{{ '-' * 3 }}{{ 3 * 4 }}{{ 2 ** 5 }}").render(USER) == "---1232"


def test_the_output_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "MAX_PROMPT_CHARS", 10)
    source = "{% for i in range(4) %}{{ 'abc' }}{% endfor %}"
    with pytest.raises(InvalidRequestError, match="longer than 10 characters"):
        template(source).render(USER)
