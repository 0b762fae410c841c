"""Objects come back identical, types included; hostile bytes are CorruptError and nothing else."""

from __future__ import annotations

import contextlib
import json
import math
import random
import struct
from collections import Counter, OrderedDict
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from ftckpt.errors import CorruptError, UnsupportedError
from ftckpt.host_memory import host_memory
from ftckpt.model.objects import MAGIC, decode, encode
from tests.support.errors import raises

NUMPY_DTYPES = [*"?bBhHiIqQefdgFDG", ">i4", ">f8", ">c16"]
TORCH_DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn,
    torch.float8_e5m2,
]  # fmt: skip
SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (7,), (0, 3), (2, 0, 4), (2, 3, 5)]


def identical(a: Any, b: Any) -> bool:
    """Equality that distinguishes types, NaN payloads, signs of zero and the order of keys."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return identical(list(a.items()), list(b.items()))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(identical, a, b))
    if isinstance(a, float) and not isinstance(a, np.generic):
        return (math.isnan(a) and math.isnan(b)) or struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, torch.Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape
        return same and bool(torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)))
    return bool(a == b)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype, shape = draw(st.sampled_from(TORCH_DTYPES)), draw(st.sampled_from(SHAPES))
    size = math.prod(shape) * dtype.itemsize
    data = bytearray(draw(st.binary(min_size=size, max_size=size)))
    if dtype == torch.bool:
        data = bytearray(byte & 1 for byte in data)
    return torch.frombuffer(data, dtype=dtype).reshape(shape) if data else torch.empty(shape, dtype=dtype)


ARRAYS = st.sampled_from(NUMPY_DTYPES).flatmap(lambda d: npst.arrays(np.dtype(d), st.sampled_from(SHAPES)))
SCALARS = st.sampled_from([np.float32(0.1), np.float64("nan"), np.int64(-1), np.bool_(True), np.uint8(255)])
PLAIN = st.none() | st.booleans() | st.integers(-(1 << 80), 1 << 80) | st.floats() | st.text(max_size=8)
KEYS = PLAIN | st.sampled_from(["$", "kind", "begin"]) | st.binary(max_size=4) | st.tuples(PLAIN, PLAIN)
LEAVES = PLAIN | st.binary(max_size=16) | st.binary(max_size=4).map(bytearray) | ARRAYS | SCALARS | tensors()


def nests(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    mappings = st.dictionaries(KEYS, inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4)
    lists = st.lists(inner, max_size=4)
    return lists | lists.map(tuple) | mappings | mappings.map(OrderedDict) | mappings.map(Counter)


VALUES = st.recursive(LEAVES, nests, max_leaves=12)


@given(VALUES)
@example({"$": {"$": "tuple", "items": []}})
@example([-0.0, 0.0, math.nan, math.inf, -math.inf, 5e-324, {math.nan: 1, -0.0: 2}])
@example({1: "a", "1": "b", None: 1, (1, (2, b"x")): [()], False: 3})
@example("\ud800 \0 é")
def test_any_nest_comes_back_identical(value: Any) -> None:
    back = decode(encode(value))
    assert identical(value, back), (value, back)


def test_views_are_saved_as_their_elements() -> None:
    base = torch.arange(24.0).reshape(4, 6)
    negative = torch.tensor([1 + 2j]).conj().imag
    empty = torch.from_numpy(np.empty(0, np.float32))
    for view in (base.t(), base[:, 1::2], base[1], base[0, 0].expand(3), base[:1, 2], base[0, ::6], empty, negative):
        assert identical(decode(encode(view)), view.resolve_neg().clone(memory_format=torch.contiguous_format))


def test_random_generators_go_on_where_they_were() -> None:
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    fresh = np.random.default_rng(4)
    for kind in ("MT19937", "Philox", "SFC64"):
        bits = getattr(np.random, kind)(5)
        bits.state = decode(encode(bits.state))
    saved = encode((random.getstate(), np.random.get_state(), torch.get_rng_state(), fresh.bit_generator.state))

    def draw() -> list[Any]:
        return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(3).tolist(),
                fresh.random()]  # fmt: skip

    expected = draw()
    draw()
    states = decode(saved)
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    fresh.bit_generator.state = states[3]
    assert draw() == expected


class Level(IntEnum):
    LOW = 1


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [1, {"b": object()}]}, "objects.a builtins.object"),
        ([lambda: 0], "builtins.function"),
        ({"level": Level.LOW}, "objects.level"),
        ({"p": torch.nn.Parameter(torch.zeros(1))}, "objects.p torch.nn"),
        ({"s": torch.zeros(2).to_sparse()}, "objects.s"),
        ({"o": np.array([object()])}, "objects.o numpy.ndarray"),
        ({"m": np.ma.array([1, 2], mask=[0, 1])}, "objects.m numpy.ma MaskedArray"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_saved_is_named_with_its_place(value: Any, message: str) -> None:
    with raises(UnsupportedError, *message.split()):
        encode(value)


def attempt(data: bytes) -> None:
    """Decoding gives a value or CorruptError; any other exception fails the test."""
    with contextlib.suppress(CorruptError):
        decode(data)


@given(VALUES, st.data())
def test_flipped_bits_and_cuts_never_crash(value: Any, data: st.DataObject) -> None:
    encoded = bytearray(encode(value))
    for _ in range(data.draw(st.integers(0, 4))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    attempt(bytes(encoded[: data.draw(st.integers(0, len(encoded)))]))
    attempt(bytes(encoded))


def image(value: Any, raw: bytes = bytes(16)) -> bytes:
    text = json.dumps(value).encode()
    return MAGIC + len(text).to_bytes(8, "little") + text + raw


JSON_VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6) | st.just(10**400)
WORDS = st.sampled_from(
    ["float", "tuple", "dict", "ordered", "counter", "bytes", "bytearray", "tensor", "array", "scalar", "<i4", "|O",
     "<f3", "V8", "i4,(", "float32", "qint8", "complex64", "bits8", "nn", "nan", "__doc__"]
)  # fmt: skip
HOSTILE = st.recursive(
    JSON_VALUES | WORDS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["$", "begin", "end", "dtype", "shape", "items", "pairs", "value"]), inner, max_size=6
        )
    ),
    max_leaves=8,
)
BLOBS = st.fixed_dictionaries(
    {"$": WORDS, "begin": JSON_VALUES | st.just(0), "end": JSON_VALUES | st.just(8), "dtype": WORDS | JSON_VALUES,
     "shape": HOSTILE | st.lists(st.integers(-2, 9) | JSON_VALUES, max_size=3)}
)  # fmt: skip
BLOB = {"begin": 0, "end": 8, "shape": [2]}


@given(HOSTILE | BLOBS)
@example({"$": "tensor", **BLOB, "dtype": "float32", "shape": [3]})
@example({"$": "tensor", **BLOB, "dtype": "qint8", "shape": [8]})
@example({"$": "array", **BLOB, "dtype": "i4,("})
@example({"$": "bytes", **BLOB, "begin": math.inf})
@example({"$": "float", "value": 10**400})
@example({"$": "dict", "pairs": [[[], 1]]})
def test_any_json_is_a_value_or_corrupt(value: Any) -> None:
    attempt(image(value))


def test_bytes_lie_on_the_host_whatever_the_default_device_is() -> None:
    """A script that makes all its tensors on a device."""
    empty = torch.empty(0, dtype=torch.float64)
    with torch.device("meta"):
        made = [host_memory(3), decode(encode({"x": empty}))["x"]]
    assert [one.device.type for one in made] == ["cpu", "cpu"]


@pytest.mark.parametrize("dtype", ["|O", "O", "V8", "<M8", "<U2", "i4,i4", ["<i4"], None])
def test_an_array_of_objects_cannot_be_smuggled_in(dtype: Any) -> None:
    with pytest.raises(CorruptError):
        decode(image({"$": "array", "dtype": dtype, "shape": [1], "begin": 0, "end": 8}))
