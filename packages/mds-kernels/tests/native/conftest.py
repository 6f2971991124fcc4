"""Compiled by g++ and nvcc, which takes a minute, so it runs on request: nox -s cuda."""

import os

import pytest


def pytest_collection_modifyitems(items):
    if os.environ.get("MDS_NATIVE_TESTS") == "1":
        return
    skip = pytest.mark.skip(reason="set MDS_NATIVE_TESTS=1: nox -s cuda does, with the compilers")
    for item in items:
        if item.path.parent.name == "native":
            item.add_marker(skip)
