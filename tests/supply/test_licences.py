"""The policy on licences accepts what it should, and nothing vague."""

from __future__ import annotations

import pytest

pytest.importorskip("license_expression", reason="runs in nox -s audit")

from licences import EXTRAS_ONLY, PERMISSIVE, WEAK_COPYLEFT, fits


@pytest.mark.parametrize(
    "expression",
    [
        "MIT",
        "MPL-2.0 AND MIT",
        "GPL-3.0-only OR BSD-3-Clause",
        "Apache-2.0 WITH LLVM-exception",
    ],
)
def test_what_can_be_used_under_permissive_terms_fits(expression: str) -> None:
    assert fits(expression, allowed=PERMISSIVE | WEAK_COPYLEFT)


@pytest.mark.parametrize(
    "expression",
    ["GPL-3.0-only", "MIT AND AGPL-3.0-only", "unknown", "", "CC-BY-NC-4.0", "a licence"],
)
def test_what_can_not_does_not_fit(expression: str) -> None:
    assert not fits(expression, allowed=PERMISSIVE | WEAK_COPYLEFT)


def test_weak_copyleft_of_libraries_fits_an_extra_only() -> None:
    assert not fits("LGPL-2.1-or-later", allowed=PERMISSIVE | WEAK_COPYLEFT)
    assert fits("LGPL-2.1-or-later", allowed=PERMISSIVE | WEAK_COPYLEFT | EXTRAS_ONLY)
