"""C++ promises the ten-thousandth number of each generator (standard, [rand.predef])."""

import numpy as np

from mds_data.sampling.mersenne import numbers32, numbers64


def nth(blocks, number):
    row = np.empty(0, np.uint64)
    while len(row) < number:
        row = np.concatenate([row, next(blocks)])
    return int(row[number - 1])


def test_the_ten_thousandth_numbers_are_those_of_the_standard():
    assert nth(numbers32(5489), 10_000) == 4123659995
    assert nth(numbers64(5489), 10_000) == 9981545732273789042
