"""Lossy chunks of small checkpoints: near what they were made of, the same bits wherever they are restored."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.lossy import restore_chunk, shrink_chunk
from ftckpt.errors import CorruptError
from ftckpt.persist.compression import ElementRun
from tests.support.errors import raises

COUNT = 1 << 14
ROLES = ("weight", "exp_avg", "exp_avg_sq")


def adam_state(seed: int = 1) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """A state as of Adam, by role, and the weights of its reference."""
    rng = np.random.default_rng(seed)
    scale = np.exp(0.75 * rng.standard_normal(COUNT)) * 1e-4
    before = 0.02 * rng.standard_normal(COUNT)
    state = {
        "weight": before + 1e-3 * rng.standard_normal(COUNT),
        "exp_avg": 0.3 * scale * rng.standard_normal(COUNT),
        "exp_avg_sq": np.square(scale),
    }
    return {role: values.astype(np.float32) for role, values in state.items()}, before.astype(np.float32)


def bf16(values: np.ndarray) -> np.ndarray:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def floats(data: bytes | np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "F32":
        return np.frombuffer(data, np.float32)
    return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_a_small_checkpoint_is_near_and_a_tenth(dtype: str) -> None:
    state, weights = adam_state()
    item_bytes, as_bytes = (4, lambda one: one.tobytes()) if dtype == "F32" else (2, lambda one: bf16(one).tobytes())
    runs = [ElementRun(item_bytes * COUNT, item_bytes, dtype, role) for role in ROLES]
    data = b"".join(as_bytes(state[role]) for role in ROLES)
    reference = as_bytes(weights) + bytes(2 * item_bytes * COUNT)
    frame = shrink_chunk(data, reference, runs)
    assert len(frame) < len(data) / (9 if dtype == "F32" else 4.5)
    restored = restore_chunk(frame, reference, runs)
    assert restored == restore_chunk(frame, reference, runs) and len(restored) == len(data)
    found = dict(zip(ROLES, np.split(floats(restored, dtype), 3), strict=True))
    was = dict(zip(ROLES, np.split(floats(data, dtype), 3), strict=True))
    coarse = 0.0 if dtype == "F32" else 1e-3
    assert np.abs(found["weight"] - was["weight"]).max() <= 0.26e-3 + coarse
    assert np.sqrt(np.square(found["weight"] - was["weight"]).mean()) < 0.16e-3 + coarse
    ratio = found["exp_avg_sq"] / was["exp_avg_sq"]
    assert 0.77 < ratio.min() <= ratio.max() < 1.3, "no second moment is lost"
    kept = found["exp_avg"] != 0
    assert 0.1 < kept.mean() < 0.9, "small first moments are pruned"
    ratio = found["exp_avg"][kept] / was["exp_avg"][kept]
    assert 0.69 < ratio.min() <= ratio.max() < 1.45, "the others have their sign"


def test_a_small_checkpoint_has_all_else_exactly() -> None:
    odd = np.full(100, np.nan, np.float32).tobytes()
    zeros = bytes(400)
    parts = [
        (b"counters" * 50, ElementRun(400, 8, "I64", "buffer")), (odd, ElementRun(400, 4, "F32", "weight")),
        (np.full(100, -1.0, np.float32).tobytes(), ElementRun(400, 4, "F32", "exp_avg_sq")),
        (zeros, ElementRun(400, 4, "F32", "exp_avg")), (zeros, ElementRun(400, 4, "F32", "exp_avg_sq")),
        (np.arange(100, dtype=np.float32).tobytes(), ElementRun(400, 4, "F32", "master")), (b"gap", ElementRun(3, 1)),
        (b"", ElementRun(0, 4, "F32", "weight")),
    ]  # fmt: skip
    data, runs = b"".join(part for part, _ in parts), [run for _, run in parts]
    assert restore_chunk(shrink_chunk(data, data, runs), data, runs) == data, "also weights that have not changed"


@given(st.data())
def test_a_small_checkpoint_of_any_values_is_restored(given_data: st.DataObject) -> None:
    """Also of infinities, the largest, the smallest: with the size that it had, and no error."""
    count = given_data.draw(st.integers(1, 50))
    values = st.lists(st.floats(width=32), min_size=count, max_size=count)
    runs = [ElementRun(4 * count, 4, "F32", role) for role in ROLES]
    data, reference = (np.array([given_data.draw(values) for _ in ROLES], np.float32).tobytes() for _ in range(2))
    restored = floats(restore_chunk(shrink_chunk(data, reference, runs), reference, runs), "F32")
    was = floats(data, "F32")
    finite = np.isfinite(was)
    assert np.array_equal(np.isfinite(restored[count:]), finite[count:])
    second = slice(2 * count, None)
    if finite[second].all() and (was[second] >= 0).all():
        normal = was[second] > 1e-30
        assert (restored[second][normal] > 0).all()


@pytest.mark.parametrize("cut", [0, 3, 40, -1])
def test_a_small_checkpoint_that_is_damaged_is_refused_or_seen_by_its_checksum(cut: int) -> None:
    state, weights = adam_state()
    runs = [ElementRun(4 * COUNT, 4, "F32", role) for role in ROLES]
    data = b"".join(state[role].tobytes() for role in ROLES)
    reference = weights.tobytes() + bytes(8 * COUNT)
    frame = shrink_chunk(data, reference, runs)
    with raises(CorruptError):
        restore_chunk(frame[:cut], reference, runs)
    other = [ElementRun(4 * COUNT + 4, 4, "F32", role) for role in ROLES]
    with raises(CorruptError):
        restore_chunk(frame, reference + bytes(12), other)
    rng = np.random.default_rng(cut + 1)
    for at in rng.integers(0, len(frame), 30).tolist():
        bad = frame[:at] + bytes([frame[at] ^ 1 << int(rng.integers(8))]) + frame[at + 1 :]
        try:
            assert len(restore_chunk(bad, reference, runs)) == len(data)
        except CorruptError:
            continue


def test_a_small_checkpoint_against_another_reference_is_another() -> None:
    state, weights = adam_state()
    run = [ElementRun(4 * COUNT, 4, "F32", "weight")]
    frame = shrink_chunk(state["weight"].tobytes(), weights.tobytes(), run)
    assert restore_chunk(frame, weights.tobytes(), run) != restore_chunk(frame, weights[::-1].tobytes(), run)
