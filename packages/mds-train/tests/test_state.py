from __future__ import annotations

from mds_train.state import TrainState


def test_a_step_moves_all_counters() -> None:
    state = TrainState().after_step(samples=8, tokens=128, applied=True)

    assert state == TrainState(
        iteration=1, consumed_samples=8, consumed_tokens=128, applied_updates=1
    )


def test_a_skipped_step_consumes_samples_but_applies_nothing() -> None:
    state = TrainState().after_step(samples=8, tokens=128, applied=False)

    assert (state.iteration, state.consumed_samples, state.applied_updates) == (1, 8, 0)
    assert (state.skipped_steps, state.skipped_in_a_row) == (1, 1)


def test_an_applied_step_ends_a_row_of_skipped_ones() -> None:
    state = TrainState()
    for applied in (False, False, True):
        state = state.after_step(samples=1, tokens=1, applied=applied)

    assert (state.skipped_steps, state.skipped_in_a_row) == (2, 0)


def test_counters_survive_a_manifest_of_a_newer_version() -> None:
    state = TrainState(iteration=4, skipped_steps=1)

    assert TrainState.from_counters(state.counters() | {"consumed_joules": 3}) == state
