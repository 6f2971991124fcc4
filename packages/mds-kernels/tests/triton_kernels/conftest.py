"""The kernels are interpreted here, on a CPU, which Triton must be told before it is imported."""

import os

import pytest


def pytest_collection_modifyitems(items):
    skip = pytest.mark.skip(reason="set TRITON_INTERPRET=1 before Python starts: nox -s triton")
    for item in items:
        ahead = item.path.name == "test_ahead_of_time.py"
        if item.path.parent.name == "triton_kernels" and not ahead and not interpreted():
            item.add_marker(skip)


def interpreted():
    return os.environ.get("TRITON_INTERPRET") == "1"
