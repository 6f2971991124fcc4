import json
from itertools import islice

import numpy as np
import pytest

from mds_data import ResumableSampler


def consumed(num_ranks, steps, *, start=None, micro_batch_size=2, shuffle=True):
    """The samples of each step, as all ranks together see them; and a state."""
    ranks = []
    for rank in range(num_ranks):
        sampler = ResumableSampler(
            50,
            global_batch_size=8,
            micro_batch_size=micro_batch_size,
            rank=rank,
            num_ranks=num_ranks,
            shuffle=shuffle,
        )
        if start is not None:
            sampler.load_state_dict(start)
        per_step = 8 // num_ranks // micro_batch_size
        batches = list(islice(sampler, steps * per_step))
        ranks.append(np.array(batches).reshape(steps, per_step * micro_batch_size))
        sampler.advance(steps)
    return [sorted(step) for step in np.concatenate(ranks, axis=1).tolist()], sampler.state_dict()


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("ranks", "micro"), [(1, 8), (1, 1), (2, 2), (4, 1), (8, 1)])
def test_every_number_of_ranks_trains_on_the_same_batches(ranks, micro, shuffle):
    expected, _ = consumed(1, 20, micro_batch_size=8, shuffle=shuffle)
    assert consumed(ranks, 20, micro_batch_size=micro, shuffle=shuffle)[0] == expected


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_run_goes_on_mid_epoch_with_another_number_of_ranks(ranks):
    whole, _ = consumed(1, 30)
    before, state = consumed(2, 11)

    after, _ = consumed(ranks, 19, start=json.loads(json.dumps(state)))

    assert before + after == whole
    assert state == {
        "consumed_samples": 88,
        "epoch": 1,
        "num_samples": 50,
        "seed": 1234,
        "shuffle": True,
    }


def test_another_batch_size_goes_on_in_the_same_order():
    order = ResumableSampler(50, global_batch_size=1, shuffle=True).indices(0, 60).tolist()
    small = ResumableSampler(50, global_batch_size=4, shuffle=True)
    seen = [number for batch in islice(small, 5) for number in batch]
    small.advance(5)
    large = ResumableSampler(50, global_batch_size=20, shuffle=True)
    large.load_state_dict(small.state_dict())
    seen += [number for batch in islice(large, 2) for number in batch]
    assert seen == order


def test_micro_batches_are_stretches_of_the_global_batch():
    samplers = [
        ResumableSampler(100, global_batch_size=8, micro_batch_size=2, rank=rank, num_ranks=2)
        for rank in range(2)
    ]
    assert [sampler.batch(0).tolist() for sampler in samplers] == [
        [[0, 1], [4, 5]],
        [[2, 3], [6, 7]],
    ]
    assert samplers[0].global_batch(1).tolist() == list(range(8, 16))


def test_reading_ahead_does_not_count_as_training():
    sampler = ResumableSampler(100, global_batch_size=4)
    list(islice(sampler, 10))
    assert sampler.state_dict()["consumed_samples"] == 0
    sampler.advance()
    assert next(iter(sampler)) == [4, 5, 6, 7]


def test_each_epoch_holds_every_sample_once():
    sampler = ResumableSampler(37, global_batch_size=5, shuffle=True)
    numbers = sampler.indices(0, 37 * 4).reshape(4, 37)
    assert all(sorted(epoch) == list(range(37)) for epoch in numbers.tolist())
    assert len({tuple(epoch) for epoch in numbers.tolist()}) == 4


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"global_batch_size": 0}, "global_batch_size"),
        ({"global_batch_size": 6, "num_ranks": 4}, r"multiple of num_ranks \(4\)"),
        ({"global_batch_size": 8, "num_ranks": 2, "micro_batch_size": 3}, "micro_batch_size"),
        ({"global_batch_size": 8, "micro_batch_size": 0}, "micro_batch_size"),
        ({"global_batch_size": 8, "rank": 1}, "rank"),
        ({"global_batch_size": 8, "rank": -1}, "rank"),
        ({"global_batch_size": 8, "consumed_samples": -1}, "consumed_samples"),
    ],
)
def test_impossible_settings_are_refused(options, reason):
    with pytest.raises(ValueError, match=reason):
        ResumableSampler(100, **options)


@pytest.mark.parametrize("options", [{"seed": 5}, {"shuffle": True}])
def test_the_state_of_another_order_is_refused(options):
    state = ResumableSampler(100, global_batch_size=4).state_dict()
    with pytest.raises(ValueError, match="another order of samples"):
        ResumableSampler(100, global_batch_size=4, **options).load_state_dict(state)
    with pytest.raises(ValueError, match="num_samples 100, this one 99"):
        ResumableSampler(99, global_batch_size=4).load_state_dict(state)


def test_a_nonsensical_state_is_refused():
    sampler = ResumableSampler(100, global_batch_size=4)
    with pytest.raises(ValueError, match="must be a whole number"):
        sampler.load_state_dict({**sampler.state_dict(), "consumed_samples": -4})
