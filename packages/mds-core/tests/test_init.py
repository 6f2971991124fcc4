from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mds_core.init import normal, scaled_std
from mds_core.philox import key_of, philox, splitmix, standard_normal


def word(value: int) -> torch.Tensor:
    return torch.tensor([value])


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, (0, 0), [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (
            [0xFFFFFFFF] * 4,
            (0xFFFFFFFF, 0xFFFFFFFF),
            [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
        ),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            (0xA4093822, 0x299F31D0),
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_authors_known_answers(counter, key, expected) -> None:
    words = philox(key, tuple(word(value) for value in counter))

    assert [int(value) for value in words] == expected


def test_splitmix_gives_the_numbers_of_its_reference() -> None:
    """The first numbers from the seed 1234567, as published with the algorithm."""
    numbers = splitmix(word(1234567), torch.arange(3))

    assert [int(number) % 2**64 for number in numbers] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


def test_keys_depend_on_every_part_and_its_type() -> None:
    keys = [key_of("a", 1), key_of("a", 2), key_of("b", 1), key_of("a", "1"), key_of("a1")]

    assert len(set(keys)) == len(keys)
    assert key_of("init", 1234, "w") == key_of("init", 1234, "w")


def test_normals_are_those_of_box_and_muller() -> None:
    generator = torch.Generator().manual_seed(0)
    edges = torch.tensor([0, 1, 2**29 - 1, 2**29, 2**30, 2**31, 3 * 2**30, 2**32 - 1])
    first = torch.cat([edges, torch.randint(0, 2**32, (4000,), generator=generator)])
    second = torch.cat([edges.flip(0), torch.randint(0, 2**32, (4000,), generator=generator)])

    x, y = standard_normal(first, second)

    radius = torch.sqrt(-2 * torch.log((first.double() + 0.5) / 2**32))
    angle = 2 * math.pi * (second.double() + 0.5) / 2**32
    torch.testing.assert_close(x, radius * angle.cos(), rtol=1e-13, atol=5e-15)
    torch.testing.assert_close(y, radius * angle.sin(), rtol=1e-13, atol=5e-15)


def test_values_are_normally_distributed_and_independent() -> None:
    values = normal(1, "w", global_shape=(500, 1000), std=1.0, dtype=torch.float64)

    count = values.numel()
    assert abs(values.mean()) < 4 / math.sqrt(count)
    assert values.var() == pytest.approx(1.0, abs=4 * math.sqrt(2 / count))
    assert (values**4).mean() == pytest.approx(3.0, abs=4 * math.sqrt(96 / count))
    for shift in (1, 2, 3, 4, 1000):
        flat = values.flatten()
        assert abs((flat[shift:] * flat[:-shift]).mean()) < 4 / math.sqrt(count)
    inside = [(values.abs() < z).double().mean().item() for z in (0.5, 1.0, 2.0, 3.0)]
    assert inside == pytest.approx([math.erf(z / math.sqrt(2)) for z in (0.5, 1, 2, 3)], abs=3e-3)


@st.composite
def shapes_and_boxes(draw):
    shape = tuple(draw(st.lists(st.integers(1, 13), min_size=1, max_size=3)))
    box = []
    for extent in shape:
        low = draw(st.integers(0, extent))
        box.append((low, draw(st.integers(low, extent))))
    return shape, tuple(box)


@given(shapes_and_boxes())
@settings(deadline=None, max_examples=100)
def test_a_box_of_the_values_is_the_values_of_the_box(case) -> None:
    shape, box = case

    whole = normal(3, "w", global_shape=shape, std=0.5)
    part = normal(3, "w", global_shape=shape, box=box, std=0.5)

    assert torch.equal(part, whole[tuple(slice(low, high) for low, high in box)])


def test_large_slices_agree_across_the_chunks_they_are_computed_in() -> None:
    shape = (1030, 517)
    whole = normal(3, "w", global_shape=shape, std=1.0)

    assert torch.equal(
        normal(3, "w", global_shape=shape, box=((517, 1030), (0, 517)), std=1.0), whole[517:]
    )
    assert torch.equal(
        normal(3, "w", global_shape=shape, box=((0, 1030), (259, 517)), std=1.0), whole[:, 259:]
    )


def test_every_dtype_starts_from_the_same_numbers() -> None:
    double = normal(3, "w", global_shape=(64,), std=0.02, dtype=torch.float64)

    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.equal(
            normal(3, "w", global_shape=(64,), std=0.02, dtype=dtype), double.to(dtype)
        )


def test_seed_and_name_select_the_values() -> None:
    def values(seed, name):
        return normal(seed, name, global_shape=(8,), std=1.0)

    assert not torch.equal(values(1, "w"), values(2, "w"))
    assert not torch.equal(values(1, "w"), values(1, "v"))
    assert torch.equal(values(1, "w"), values(1, "w"))


def test_recorded_values_stay() -> None:
    """A changed stream would start every run elsewhere without an error."""
    values = normal(1234, "embedding.word_embeddings.weight", global_shape=(2, 3), std=1.0)

    recorded = [
        0.6627524495124817,
        -1.0529333353042603,
        1.978761911392212,
        -0.09891778230667114,
        -0.15701787173748016,
        1.2392220497131348,
    ]
    assert values.flatten().tolist() == recorded


def test_projections_into_the_residual_stream_start_smaller() -> None:
    assert scaled_std(0.02, num_layers=8) == pytest.approx(0.005)


def test_a_scalar_has_one_value() -> None:
    assert normal(1, "w", global_shape=(), std=1.0).shape == ()
