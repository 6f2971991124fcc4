import pytest
from hypothesis import given
from hypothesis import strategies as st

from mds_data.store.split import split_bounds, split_ranges, split_weights


@pytest.mark.parametrize(
    ("split", "documents", "bounds"),
    [
        ("969,30,1", 79, (0, 77, 79, 79)),
        ("90,5,5", 79, (0, 71, 75, 79)),
        ("98,2,0", 79, (0, 77, 79, 79)),
        ("100", 10, (0, 10, 10, 10)),
        ("1,1", 3, (0, 1, 3, 3)),
        ("1/1/2", 8, (0, 2, 4, 8)),
        ("1,1,1,97", 9, (0, 3, 6, 9)),
    ],
)
def test_borders_are_the_original_s(split, documents, bounds):
    assert split_bounds(split, documents=documents) == bounds


@given(
    shares=st.lists(st.integers(0, 1000), min_size=1, max_size=3).filter(any),
    documents=st.integers(0, 10**6),
)
def test_the_parts_cover_all_documents_in_order(shares, documents):
    bounds = split_bounds(",".join(map(str, shares)), documents=documents)
    assert bounds[0] == 0
    assert bounds[3] == documents
    assert list(bounds) == sorted(bounds)


@pytest.mark.parametrize("split", ["", "a,b", "0,0,0", "-1,2", "nan,1", "inf,1", "1;2"])
def test_what_is_no_split_is_refused(split):
    with pytest.raises(ValueError, match="split"):
        split_weights(split)


def test_kept_ranges_end_at_one():
    assert split_ranges("95,5,0") == {
        "train": (0.0, 0.95),
        "valid": (0.95, 1.0),
        "test": (1.0, 1.0),
    }
    assert split_ranges(None) is None
    assert split_ranges({"mine": (0.25, 0.5)}) == {"mine": (0.25, 0.5)}
    with pytest.raises(ValueError, match="mine"):
        split_ranges({"mine": (0.5, 0.25)})
