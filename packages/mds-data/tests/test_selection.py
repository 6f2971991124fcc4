import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_material import random_documents, write_small

from mds_data import open_store
from mds_data.store.erase import erase_documents
from mds_data.store.selection import DocumentRow, document_range


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("r") / "s"
    write_small(path, random_documents(40, longest=60))
    erase_documents(path, [0, 3, 4, 20, 39], reason="asked")
    return open_store(path)


@given(first=st.integers(0, 40), stop=st.integers(0, 40), start=st.integers(0, 3000))
@settings(deadline=None)
def test_a_row_is_its_documents_over_and_over(store, first, stop, start):
    expected = np.concatenate([np.empty(0, int), *store[first:stop]])
    row = DocumentRow(store, first=first, stop=stop)
    assert row.length == len(expected)
    if len(expected):
        positions = np.arange(start, start + 150) % len(expected)
        np.testing.assert_array_equal(row.read(start, start + 150), expected[positions])


def test_parts_follow_the_string_or_the_manifest(tmp_path):
    write_small(tmp_path / "s", random_documents(10), split={"mine": (0.25, 0.55)})
    store = open_store(tmp_path / "s")
    assert document_range(store, None) == (0, 10)
    assert document_range(store, ("80,10,10", "valid")) == (8, 9)
    assert document_range(store, "mine") == (2, 6)
    assert document_range(store, ("1,1,0", "train"), count=100) == (0, 50)
