import numpy as np
from store_material import golden_datasets, random_documents, write_small

from mds_data.store.erase import erase_documents
from mds_data.store.inspection import inspect_store
from mds_data.store.merge import merge_stores


def test_counts_and_statistics_are_those_of_the_documents(tmp_path):
    documents = random_documents(50)
    write_small(tmp_path / "s", documents)
    filled = [len(document) for document in documents if len(document)]
    counts = np.bincount(np.concatenate(documents), minlength=1000)

    found = inspect_store(tmp_path / "s", top=5, samples=2, sample_tokens=4)

    assert (found.documents, found.tokens) == (50, sum(filled))
    assert found.empty_documents == 50 - len(filled)
    assert (found.shortest, found.longest) == (min(filled), max(filled))
    assert found.median == np.median(filled)
    assert sum(item.documents for item in found.lengths) == len(filled)
    assert all(item.low * 2 - 1 == item.high for item in found.lengths)
    assert [item.count for item in found.top_tokens] == np.sort(counts)[::-1][:5].tolist()
    assert all(counts[item.token] == item.count for item in found.top_tokens)
    assert found.counted_tokens == sum(filled)
    assert found.samples[0].tokens == tuple(documents[found.samples[0].number][:4].tolist())


def test_gaps_are_counted_apart(tmp_path):
    documents = random_documents(20)
    write_small(tmp_path / "s", documents)
    erase_documents(tmp_path / "s", [3], reason="asked")
    merge_stores([tmp_path / "s"], tmp_path / "m")
    for name in ("s", "m"):
        assert inspect_store(tmp_path / name).gap_tokens == len(documents[3])


def test_an_empty_store_can_be_inspected(tmp_path):
    write_small(tmp_path / "s", [[], []])
    found = inspect_store(tmp_path / "s")
    assert (found.documents, found.tokens, found.samples, found.top_tokens) == (2, 0, (), ())


def test_a_large_store_is_sampled(tmp_path):
    document = np.arange(2**20) % 7
    write_small(tmp_path / "s", [document] * 6, chunk_tokens=2**16, chunks_per_shard=512)
    found = inspect_store(tmp_path / "s", count_at_most=2 * 2**20)
    assert found.counted_tokens == 2 * 2**20
    assert found.distinct_tokens == 7


def test_a_pair_can_be_inspected():
    found = inspect_store(golden_datasets() / "pydocss_text_sentence")
    assert (found.documents, found.manifest.counts.sentences) == (79, 4501)
