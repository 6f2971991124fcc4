"""One thread a test, as the ranks have, so that results do not depend on the machine's cores."""

import os
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_wish_from_outside(monkeypatch, tmp_path_factory):
    """A developer's MDS_KERNELS and built libraries must not change what the tests prove."""
    for name in [name for name in os.environ if name.startswith("MDS_KERNELS")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MDS_KERNELS_BUILD_DIR", str(tmp_path_factory.getbasetemp() / "no-builds"))


@pytest.fixture(scope="session")
def cases_folder():
    """The folder of cases from public bug reports, where there is one."""
    if given := os.environ.get("MDS_CASES_DIR"):
        return Path(given)
    for parent in Path(__file__).resolve().parents:
        found = parent.parent / "shared" / "cases"
        if found.is_dir():
            return found
    pytest.skip("no folder of cases: set MDS_CASES_DIR")
    return None
