"""The page to try a model, in a real browser; the example of the documentation."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest

pytest.importorskip("uvicorn", reason="the extra [serve] is not installed")

from chromium import browsing, find_chromium
from served_model import Served, serving

from mds_train.generate.command import LoadedModel
from mds_train.serve.guard import Protection

DOCUMENTATION = Path(__file__).parents[2] / "docs" / "howto" / "serve.md"
PROGRAM = find_chromium()
FORM = """
for (const [name, value] of Object.entries(%s)) document.getElementById(name).value = value;
document.getElementById("chat").checked = %s;
document.getElementById("send").click();
"""


def fill(browser, *, chat: bool = False, **values: object) -> None:
    browser.evaluate(FORM % (json.dumps(values), json.dumps(chat)))
    browser.wait_for(
        "/^(Done|The |There)|token is/.test(document.getElementById('status').textContent)"
    )


@pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium on this machine")
def test_the_page_shows_what_the_model_says_and_runs_none_of_it(
    ready: LoadedModel, tmp_path: Path
) -> None:
    hostile = "<img src=x onerror='document.title=`taken`'><script>document.title='taken'</script>"
    with (
        serving(ready, protection=Protection(token="secret")) as server,
        browsing(PROGRAM, tmp_path) as browser,
    ):
        browser.open(f"http://127.0.0.1:{server.port}/")

        fill(browser, prompt=hostile, max_tokens=6, temperature=0)
        refused = browser.evaluate("document.getElementById('status').textContent")
        fill(browser, prompt=hostile, max_tokens=6, temperature=0, token="secret")
        answer = browser.evaluate("document.getElementById('answer').textContent")
        elements = browser.evaluate(
            "[...document.querySelectorAll('#answer *')].map(each => each.tagName).join()"
        )
        fill(browser, chat=True, prompt="Hello", max_tokens=5, token="secret")
        said = browser.evaluate("document.getElementById('answer').textContent")
        title = browser.evaluate("document.title")
        asked = {"prompt": hostile, "max_tokens": 6, "temperature": 0}
        _, expected = server.ask(
            "/v1/completions", asked, headers={"Authorization": "Bearer secret"}
        )

    assert "token is missing or wrong" in refused
    assert answer == hostile + expected["choices"][0]["text"]
    assert set(elements.split(",")) == {"SPAN"}
    assert title == "Try the model"
    assert said
    assert not [each for each in browser.complaints if "401" not in each]


def test_the_example_of_the_documentation_runs(
    server: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", DOCUMENTATION.read_text(), flags=re.DOTALL)
    (tmp_path / "example.py").write_text(
        script.replace("127.0.0.1:8000", f"127.0.0.1:{server.port}")
    )

    runpy.run_path(str(tmp_path / "example.py"))

    assert capsys.readouterr().out == server.greedy("The quick brown", 8) + "\n"
