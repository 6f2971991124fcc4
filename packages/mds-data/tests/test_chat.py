"""Chat templates: what the interpreter can, and all that it refuses."""

import json

import pytest

from mds_data.chat.template import ChatTemplate, load_chat_template
from mds_data.chat.values import TemplateError

MESSAGES = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "world"}]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ messages[0].content }}", "hello"),
        ("{{ messages[-1]['content'][1:3] ~ 3 * 1 }}", "or3"),
        ("{% for m in messages %}{{ loop.index }}{{ m.role[0] }} {% endfor %}", "1u 2a "),
        ("{{ 'a' if messages | length > 2 else 'b' }}", "b"),
        ("{{ missing is defined }}{{ missing }}{{ not missing }}", "FalseTrue"),
        ("{% set x = 1 %}{% for m in messages %}{% set x = 2 %}{% endfor %}{{ x }}", "1"),
        ("a{# remark #}b", "ab"),
        ("{{ {'k': [1, 'x']}['k'] | tojson }}", '[1, "x"]'),
        ("{{ 'A\\n' + \"b\" | upper }}", "A\nB"),
        ("{{ messages[0].get('none', 'other') }}", "other"),
        (
            "{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}",
            "role=user;content=hello;",
        ),
    ],
)
def test_expressions_and_blocks(source, expected):
    assert ChatTemplate(source).render(MESSAGES) == expected


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ messages.__class__ }}x{{ messages.__class__() }}", "is not supported"),
        ("{{ ''.__class__.__mro__ }}", "undefined"),
        ("{{ 'x'.format(1) }}", r"calls \.format\(\) of a str"),
        ("{{ cycler('a') }}", r"calls cycler\(\), which is not supported"),
        ("{{ 'a' * 1000000000 }}", "multiplies what are not numbers"),
        ("{{ '%099999999d' % 1 }}", r"formats a text by %"),
        ("{{ 1 | attr('x') }}", "filter 'attr' is not supported"),
        ("{% include 'x' %}", "block 'include' is not supported"),
        ("{% for m in messages %}", "block 'for' has no end"),
        ("{% if true %}", "block 'if' has no end"),
        ("{% endfor %}", "has no beginning"),
        ("{{ 1 + }}", "is not expected"),
        ("{{ " + "(" * 100 + "1" + ")" * 100 + " }}", "nested too deeply"),
        ("{{ raise_exception('no tools') }}", "refuses the conversation: no tools"),
        ("{% set messages.x = 1 %}", "no namespace"),
        ("{{ 1 + 'a' }}", "adds a text and something else"),
        ("{{ 1 // 0 }}", "can't be rendered"),
    ],
)
def test_what_is_not_supported_is_refused(source, reason):
    with pytest.raises(TemplateError, match=reason):
        ChatTemplate(source).render(MESSAGES)


def test_a_template_can_neither_loop_nor_grow_without_end():
    loop = "{% for a in range(9999999999) %}{% for b in range(1000) %}x{% endfor %}{% endfor %}"
    with pytest.raises(TemplateError, match="loops without end"):
        ChatTemplate(loop).render(MESSAGES)
    double = "{% set ns = namespace(x='aa') %}{% for i in range(40) %}{% set ns.x = ns.x + ns.x %}"
    with pytest.raises(TemplateError, match="makes a text of 33554432 characters"):
        ChatTemplate(double + "{% endfor %}").render(MESSAGES)


_GROW = "{{% set ns = namespace(l=['x']) %}}{{% for i in range(60) %}}{}{{% endfor %}}{}"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (_GROW.format("{% set ns.l = [ns.l, ns.l] %}", "{{ ns.l }}"), "list without end"),
        (_GROW.format("{% set ns.l = [ns.l, ns.l] %}", "{{ ns.l | tojson }}"), "list without end"),
        (_GROW.format("{% set ns.l = ns.l + ns.l %}", ""), "makes a text of"),
        (_GROW.format("{% set ns.l = 'ab'.replace('', 'a' ~ ns.l) %}", ""), "makes a text of"),
        ("{% if 1 %}" * 3000 + "{% endif %}" * 3000, "nested too deeply"),
        ("{{ " + "not " * 9000 + "1 }}", "nested too deeply"),
    ],
)
def test_bombs_do_not_go_off(source, reason):
    with pytest.raises(TemplateError, match=reason):
        ChatTemplate(source).render(MESSAGES)


def test_the_template_of_a_model_s_folder_is_found(tmp_path):
    config = {
        "chat_template": "{{ bos_token }}{{ messages[0].content }}",
        "bos_token": {"content": "<s>"},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_chat_template(tmp_path).render(MESSAGES) == "<s>hello"

    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}file")
    assert load_chat_template(tmp_path).render(MESSAGES) == "<s>file"

    (tmp_path / "empty.json").write_text("{}")
    with pytest.raises(TemplateError, match="holds no chat_template"):
        load_chat_template(tmp_path / "empty.json")
