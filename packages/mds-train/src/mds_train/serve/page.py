"""The page to try a model in a browser, with a policy that lets it do nothing but that."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

__all__ = ["load_page"]


def load_page() -> tuple[str, dict[str, str]]:
    """The page, and the headers it is sent with.

    Its script and its style are allowed by their hashes, and nothing else is: no other script can
    run in it, and it can ask no other server.
    """
    page = files("mds_train.serve").joinpath("page.html").read_text(encoding="utf-8")
    script, style = (_source(page, tag) for tag in ("script", "style"))
    policy = (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return page, {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }


def _source(page: str, tag: str) -> str:
    (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, flags=re.DOTALL)
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
