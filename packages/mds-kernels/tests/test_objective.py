import pytest

from mds_kernels.objective import Objective, build_objective

PLAIN = {
    "group": None,
    "label_smoothing": 0.0,
    "z_loss": 0.0,
    "ignore_index": -100,
    "chunk_size": None,
}


def test_without_a_vocabulary_size_no_row_is_padding():
    objective = build_objective(rows=7, vocab_start=3, vocab_size=None, **PLAIN)

    assert objective.vocab_size == 10
    assert objective.true_rows(7) == 7


@pytest.mark.parametrize(
    ("vocab_start", "expected"), [(0, 8), (8, 2), (16, 0)], ids=["full", "cut", "padding only"]
)
def test_true_rows_are_those_below_the_vocabulary_size(vocab_start, expected):
    objective = Objective(vocab_start=vocab_start, vocab_size=10, **PLAIN)

    assert objective.true_rows(8) == expected


def test_chunks_cover_every_token_once():
    objective = Objective(vocab_start=0, vocab_size=10, **PLAIN)

    covered = [i for part in objective.chunks(11, default_size=4) for i in range(11)[part]]

    assert covered == list(range(11))


class _Group:
    """Rank 1 of 2, as far as an objective looks."""

    def rank(self):
        return 1

    def size(self):
        return 2


def test_equal_shards_of_a_group_make_the_vocabulary():
    given = {**PLAIN, "group": _Group()}

    assert build_objective(rows=5, vocab_start=5, vocab_size=None, **given).vocab_size == 10


def test_a_forgotten_vocab_start_is_noticed():
    given = {**PLAIN, "group": _Group()}

    with pytest.raises(ValueError, match="equal shards would start at 5"):
        build_objective(rows=5, vocab_start=0, vocab_size=None, **given)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"label_smoothing": 1.0}, "label_smoothing"),
        ({"z_loss": -1.0}, "z_loss"),
        ({"chunk_size": 0}, "chunk_size"),
        ({"vocab_size": 0}, "vocab_size"),
    ],
)
def test_nonsense_is_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        Objective(**{"vocab_start": 0, "vocab_size": 10, **PLAIN, **change})
