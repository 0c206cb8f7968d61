"""The operators as compiled models call them, against NumPy in double precision."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lorafleet import native
from lorafleet.core.errors import InvalidInput
from lorafleet.core.model import KvLayout
from lorafleet.native.library import as_shape, as_tensor

RNG = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def call(name: str, *arguments: Any) -> Any:
    converted = [as_tensor(a) if isinstance(a, np.ndarray) else a for a in arguments]
    return getattr(native.functions(), name)(*converted)


def linear(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    y = np.full((*x.shape[:-1], w.shape[0]), np.nan, np.float32)
    call("linear", x, w, y)
    return y


@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 33, 100])
@pytest.mark.parametrize("features", [1, 20, 576, 1536])
def test_linear_is_the_product_and_each_row_is_the_same_alone(tokens: int, features: int) -> None:
    x, w = normal(tokens, features), normal(77, features)
    y = linear(x, w)
    exact = x.astype(np.float64) @ w.astype(np.float64).T
    np.testing.assert_allclose(y, exact, atol=3e-6 * (1 + features**0.5))
    for t in range(tokens):
        assert np.array_equal(linear(x[t : t + 1], w)[0], y[t])


def test_linear_takes_leading_dimensions_and_no_tokens() -> None:
    x, w = normal(2, 3, 16), normal(5, 16)
    assert np.array_equal(linear(x, w).reshape(6, 5), linear(x.reshape(6, 16), w))
    assert linear(normal(0, 16), w).shape == (0, 5)


def test_rms_norm_is_that_of_transformers() -> None:
    x, w = normal(19, 72), normal(72)
    y = np.empty_like(x)
    call("rms_norm", x, w, 1e-5, y)
    exact = x.astype(np.float64)
    exact = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-5) * w
    np.testing.assert_allclose(y, exact, rtol=1e-6, atol=1e-6)


def test_silu_mul_gates_the_second_half_by_the_first() -> None:
    gate_up = normal(9, 2 * 44) * 10
    y = np.empty((9, 44), np.float32)
    call("silu_mul", gate_up, y)
    gate, up = np.split(gate_up.astype(np.float64), 2, axis=1)
    np.testing.assert_allclose(y, gate / (1 + np.exp(-gate)) * up, rtol=1e-6, atol=1e-30)


class Lora:
    """A site of parts with random pages, and a batch's plan."""

    pages, rows, features, part_ends = 6, 8, 40, (24, 33)

    def __init__(self) -> None:
        self.a = normal(self.pages, 2, self.rows, self.features)
        self.b = normal(self.pages, self.rows, self.part_ends[-1])
        self.used = RNG.integers(0, self.rows + 1, (self.pages, 2)).astype(np.int32)
        self.segment_starts = np.array([0, 1, 4, 6, 7], np.int32)
        self.page_starts = np.array([0, 2, 2, 5, 6], np.int32)
        self.page_ids = np.array([3, 1, 0, 3, 5, 2], np.int32)
        self.page_scales = normal(6)
        self.x, self.y = normal(7, self.features), normal(7, self.part_ends[-1])

    def run(self, **changed: Any) -> np.ndarray:
        names = ["y", "x", "a", "b", "used", "segment_starts", "page_starts"]
        values = {name: getattr(self, name) for name in [*names, "page_ids", "page_scales"]}
        values["part_ends"] = as_shape(self.part_ends)
        values["y"] = self.y.copy()
        values |= changed
        result = call("lora_add", *values.values())
        assert np.shares_memory(np.from_dlpack(result), values["y"]), "the result is y, in place"
        return values["y"]

    def exact(self) -> np.ndarray:
        y = self.y.astype(np.float64)
        for s in range(len(self.segment_starts) - 1):
            rows = slice(self.segment_starts[s], self.segment_starts[s + 1])
            for i in range(self.page_starts[s], self.page_starts[s + 1]):
                page = self.page_ids[i]
                for q, (start, end) in enumerate(zip((0, 24), self.part_ends, strict=True)):
                    live = self.used[page, q]
                    h = self.x[rows].astype(np.float64) @ self.a[page, q, :live].T
                    y[rows, start:end] += self.page_scales[i] * h @ self.b[page, :live, start:end]
        return y


def test_lora_add_is_the_sum_over_pages_and_leaves_base_rows_alone() -> None:
    lora = Lora()
    y = lora.run()
    np.testing.assert_allclose(y, lora.exact(), rtol=1e-5, atol=1e-4)
    assert np.array_equal(y[1:4], lora.y[1:4])


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("page_ids", np.array([3, 1, 0, 6, 5, 2], np.int32), r"page_ids: 6 is outside \[0, 6\)"),
        ("page_ids", np.array([3, 1, -1, 3, 5, 2], np.int32), r"page_ids: -1 is outside"),
        ("page_ids", np.array([3, 1], np.int32), "page_scales: dimension 0 is 6, expected 2"),
        ("page_ids", np.zeros(6, np.int64), "page_ids: expected int32"),
        ("page_starts", np.array([0, 2, 1, 5, 6], np.int32), "page_starts: expected ascending"),
        ("page_starts", np.array([0, 2, 2, 5, 7], np.int32), "page_starts: ends outside page_ids"),
        ("page_starts", np.array([1, 2, 2, 5, 6], np.int32), "page_starts: expected to run from 0"),
        ("page_starts", np.array([0, 6], np.int32), "page_starts: dimension 0 is 2, expected 5"),
        ("segment_starts", np.array([0, 1, 4, 6, 8], np.int32), "expected to run from 0 to 7"),
        ("segment_starts", np.array([0, 4, 1, 6, 7], np.int32), "segment_starts: expected ascend"),
        ("used", np.full((6, 2), 9, np.int32), r"used: 9 is outside \[-1, 8\]"),
        ("used", np.full((6, 2), -2, np.int32), r"used: -2 is outside"),
        ("x", np.zeros((7, 41), np.float32), "a: dimension 3 is 40, expected 41"),
        ("x", np.zeros((6, 40), np.float32), "x: dimension 0 is 6, expected 7"),
        ("b", np.zeros((6, 8, 33), np.float16), "b: expected float32"),
        ("part_ends", as_shape((24, 34)), "part_ends: expected to end at 33"),
        ("part_ends", as_shape((34, 33)), "part_ends: expected ascending"),
        ("part_ends", as_shape((33,)), "part_ends: expected one a part"),
    ],
)
def test_lora_add_checks_every_argument(argument: str, value: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        Lora().run(**{argument: value})


LAYOUT = KvLayout(
    num_layers=2,
    num_qo_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rope_inv_freq=tuple(float(x) for x in 100.0 ** (-np.arange(0, 16, 2) / 16)),
)


def rotate(x: np.ndarray) -> np.ndarray:
    """HF's rotate-half rotary embedding; x is (tokens, heads, 16), token i at position i."""
    inv_freq = np.array(LAYOUT.rope_inv_freq, np.float32)
    angle = np.arange(len(x), dtype=np.float32)[:, None] * inv_freq
    cos, sin = (f(np.concatenate([angle, angle], -1))[:, None] for f in (np.cos, np.sin))
    first, second = np.split(x, 2, axis=-1)
    return x * cos + np.concatenate([-second, first], -1) * sin


def attend(cache: native.PagedKVCache, qkv: np.ndarray, layer: int = 0) -> np.ndarray:
    out = np.full((1, len(qkv), 4 * 16), np.nan, np.float32)
    call("attention_with_fused_qkv", cache.handle, layer, 0.25, qkv[None], out)
    return out[0]


def begin(cache: native.PagedKVCache, counts: list[int], contexts: list[int], table: Any) -> None:
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    cache.begin_forward(starts, np.array(contexts, np.int32), np.array(table, np.int32))


def test_attention_is_causal_grouped_and_rotated() -> None:
    cache = native.PagedKVCache(LAYOUT, num_blocks=8)
    qkv = normal(37, 8 * 16)
    begin(cache, [37], [0], [[5, 0, 3]])
    out = attend(cache, qkv, layer=1)
    heads = qkv.astype(np.float64).reshape(37, 8, 16)
    q, k = rotate(heads[:, :4]), rotate(heads[:, 4:6])
    for h in range(4):
        scores = 0.25 * q[:, h] @ k[:, h // 2].T
        scores[np.triu_indices(37, 1)] = -np.inf
        p = np.exp(scores)
        exact = p / p.sum(-1, keepdims=True) @ heads[:, 6 + h // 2]
        np.testing.assert_allclose(out[:, h * 16 : (h + 1) * 16], exact, atol=1e-5)


def test_attention_does_not_depend_on_chunks_nor_neighbours() -> None:
    qkv, other = normal(40, 8 * 16), normal(9, 8 * 16)
    whole = native.PagedKVCache(LAYOUT, num_blocks=8)
    begin(whole, [40], [0], [[0, 1, 2]])
    expected = attend(whole, qkv)
    cache = native.PagedKVCache(LAYOUT, num_blocks=8)
    begin(cache, [8, 19], [0, 0], [[3, -1, -1], [7, 6, 4]])
    first = attend(cache, np.concatenate([other[:8], qkv[:19]]))[8:]
    begin(cache, [21, 1], [19, 8], [[7, 6, 4], [3, -1, -1]])
    second = attend(cache, np.concatenate([qkv[19:], other[8:]]))[:-1]
    assert np.array_equal(np.concatenate([first, second]), expected)


def test_the_cache_refuses_what_does_not_fit() -> None:
    cache = native.PagedKVCache(LAYOUT, num_blocks=4)
    assert cache.num_bytes == 2 * 4 * 2 * 2 * 16 * 16 * 4
    with pytest.raises(InvalidInput, match=r"block id 4 is outside \[0, 4\)"):
        begin(cache, [1], [0], [[4]])
    with pytest.raises(InvalidInput, match="needs 2 blocks, its table has 1"):
        begin(cache, [1], [16], [[0]])
    begin(cache, [2], [0], [[0]])
    with pytest.raises(InvalidInput, match="qkv: expected 2 x 128 elements, got 384"):
        attend(cache, normal(3, 8 * 16))
    with pytest.raises(InvalidInput, match=r"layer 2 is outside \[0, 2\)"):
        attend(cache, normal(2, 8 * 16), layer=2)
    with pytest.raises(TypeError):
        native.functions().kv_cache_bytes(None)
