"""OpenAI's own client works with the server."""

from __future__ import annotations

import pytest

pytest.importorskip("uvicorn", reason="the extra [serve] is not installed")

from served_model import serving

from mds_train.generate.command import LoadedModel
from mds_train.serve.guard import Protection

openai = pytest.importorskip("openai", reason="openai is installed in nox -s interop only")


def test_the_official_client_is_answered(ready: LoadedModel) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    greedy = {"max_tokens": 8, "temperature": 0}
    with serving(ready, protection=Protection(token="secret")) as server:
        url = f"http://127.0.0.1:{server.port}/v1"
        client = openai.OpenAI(base_url=url, api_key="secret", max_retries=0)
        (model,) = client.models.list()
        whole = client.completions.create(model=model.id, prompt="The ", logprobs=2, **greedy)
        streamed = client.completions.create(model=model.id, prompt="The ", stream=True, **greedy)
        text = "".join(chunk.choices[0].text for chunk in streamed)
        chat = client.chat.completions.create(model=model.id, messages=messages, **greedy)
        parts = client.chat.completions.create(
            model=model.id,
            messages=messages,
            stream=True,
            stream_options={"include_usage": True},
            **greedy,
        )
        chunks = list(parts)
        with pytest.raises(openai.NotFoundError, match="no model 'other'"):
            client.completions.create(model="other", prompt="a")
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=url, api_key="wrong", max_retries=0).models.list()

    assert whole.choices[0].text == text
    assert len(whole.choices[0].logprobs.tokens) == whole.usage.completion_tokens
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert chat.choices[0].message.content == said
    assert chunks[-1].usage.completion_tokens == chat.usage.completion_tokens
