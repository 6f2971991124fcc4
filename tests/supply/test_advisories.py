"""An audit that can look nothing up says so, and is no pass."""

from __future__ import annotations

import advisories
import pytest


def test_without_a_network_nothing_counts_as_looked_up(capsys: pytest.CaptureFixture[str]) -> None:
    nobody_listens = "http://127.0.0.1:9/pypi/pip/json"

    assert advisories.main(nobody_listens) == 4
    assert "nothing was looked up" in capsys.readouterr().err
