"""Chat templates of models are rendered as transformers does, by Jinja itself."""

from __future__ import annotations

import pytest

from mds_data.chat.formats import FORMATS
from mds_data.chat.template import ChatTemplate
from mds_data.chat.values import TemplateError

sandbox = pytest.importorskip("jinja2.sandbox", reason="it renders the same templates")

# Written as the models' own templates are, with each way to loop, test and cut that they use.
TEMPLATES = {
    **FORMATS,
    "inst": (
        "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:]"
        " %}{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = "
        "messages %}{% set system_message = false %}{% endif %}{% for message in loop_messages %}"
        "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles "
        "must alternate') }}{% endif %}{% if loop.index0 == 0 and system_message != false %}"
        "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] "
        "%}{% else %}{% set content = message['content'] %}{% endif %}{% if message['role'] == "
        "'user' %}{{ '[INST] ' + content.strip() + ' [/INST]' }}{% elif message['role'] == "
        "'assistant' %}{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
    ),
    "turns": (
        "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'assistant') %}"
        "{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}"
        "{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}"
    ),
    "namespace and white space": """
{%- set ns = namespace(found=false, n=0) -%}
{%- for message in messages %}
    {%- if message.role == 'system' and not ns.found %}
        {%- set ns.found = true %}
    {%- endif %}
    {%- set ns.n = ns.n + 1 %}
{%- endfor %}
{{- 'system ' ~ ns.found ~ ' of ' ~ ns.n }}
{% for message in messages if message.role != 'system' %}
  {% if loop.first %}
first:
  {% endif %}
  {# a remark #}
  {{ message.role | upper }}: {{ message.content | trim }}{{ ',' if not loop.last else '.' }}
{% endfor %}
{% if add_generation_prompt %}
ASSISTANT:
{%- endif %}
""",
    "last turn backwards": (
        "{%- for message in messages[::-1] %}{%- set i = (messages|length - 1) - loop.index0 %}"
        "{{ i }}{{ messages[i].content == message.content }}{%- if tools is defined and tools %}"
        "{{ tools | tojson }}{%- elif message.role is string and 'o' in message.content and "
        "'<x>' not in message.content %}{{ message.content.split('o')[-1].lstrip('\\n') }}"
        "{%- endif %}{%- if loop.last or (not loop.last and messages[-1].role == 'user') -%}"
        "|{{ message['missing'] | default('none') }}|{{ message.get('role')[:2] }}{%- endif %}"
        "{%- endfor %}"
    ),
    "system by default": (
        "{%- if messages[0]['role'] == 'system' %}\n    {{- '<|im_start|>system\\n' + "
        "messages[0]['content'] + '<|im_end|>\\n' }}\n{%- else %}\n    {{- '<|im_start|>system\\n"
        "You are helpful.<|im_end|>\\n' }}\n{%- endif %}\n{%- for message in messages %}\n    "
        '{%- if (message.role == "user") or (message.role == "system" and not loop.first) or '
        '(message.role == "assistant" and not message.tool_calls) %}\n        '
        "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}\n"
        "    {%- endif %}\n{%- endfor %}\n{%- if add_generation_prompt %}\n    "
        "{{- '<|im_start|>assistant\\n' }}\n{%- endif %}\n"
    ),
}
CONVERSATIONS = [
    [
        {"role": "user", "content": " Who wrote it? "},
        {"role": "assistant", "content": "Nobody knows.\n"},
    ],
    [
        {"role": "system", "content": "Be\nshort."},
        {"role": "user", "content": "One + one?"},
        {"role": "assistant", "content": "Two, 'of' \"course\" <b>"},
        {"role": "user", "content": "Ünd <x> mehr?"},
    ],
]


@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("messages", CONVERSATIONS, ids=["two turns", "with a system"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_text_is_jinjas(name: str, messages: list[dict[str, str]], prompt: bool) -> None:
    variables = {"bos_token": "<s>", "eos_token": "</s>"}
    environment = sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment.globals["raise_exception"] = refuse
    expected = environment.from_string(TEMPLATES[name]).render(
        messages=messages, add_generation_prompt=prompt, **variables
    )

    template = ChatTemplate(TEMPLATES[name], variables=variables)

    assert template.render(messages, add_generation_prompt=prompt) == expected
