"""Well-known chat formats by name, for tokenizers that bring no template of their own."""

from __future__ import annotations

from pathlib import Path

from mds_data.chat.template import ChatTemplate, load_chat_template
from mds_data.chat.values import TemplateError

__all__ = ["FORMATS", "chat_template"]

FORMATS: dict[str, str] = {
    "chatml": (
        "{% for message in messages %}"
        "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    "llama-3": (
        "{{ '<|begin_of_text|>' }}"
        "{% for message in messages %}"
        "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}"
        "{{ message['content'] | trim }}{{ '<|eot_id|>' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}"
        "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
    ),
    "zephyr": (
        "{% for message in messages %}"
        "{{ '<|' + message['role'] + '|>\\n' + message['content'] + '</s>\\n' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
    ),
    "alpaca": (
        "{% for message in messages %}"
        "{% if message['role'] == 'system' %}{{ message['content'] + '\\n\\n' }}"
        "{% elif message['role'] == 'user' %}"
        "{{ '### Instruction:\\n' + message['content'] + '\\n\\n### Response:\\n' }}"
        "{% else %}{{ message['content'] + eos_token + '\\n\\n' }}{% endif %}"
        "{% endfor %}"
    ),
    "plain": (
        "{% for message in messages %}{{ message['content'] }}"
        "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    ),
}
"""chatml (Qwen, SmolLM, ...), llama-3, zephyr, alpaca (as Stanford's), plain (no marks)."""


def chat_template(name: str, *, eos_token: str = "") -> ChatTemplate:
    """A format by its name, or the template in a file or folder.

    Raises:
        TemplateError: It is neither.
    """
    if name in FORMATS:
        return ChatTemplate(FORMATS[name], variables={"eos_token": eos_token}, name=name)
    if not Path(name).exists():
        raise TemplateError(
            f"{name!r} is no chat format ({', '.join(FORMATS)}) and no file; give the name of one, "
            f"a .jinja file, or a tokenizer_config.json"
        )
    return load_chat_template(Path(name))
