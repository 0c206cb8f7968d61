"""The LoRA operator in NumPy, in TVMScript and in C++: one definition, three times the same."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from lorafleet_kernels import (
    AFFINE,
    PoolShape,
    column_parts,
    lora_add,
    plan_segments,
    reference_lora_add,
)

SHAPES = [
    PoolShape(in_features=64, part_ends=(64, 96, 128), page_rows=8),
    PoolShape(in_features=37, part_ends=(19,), page_rows=8),
    PoolShape(in_features=16, part_ends=(5, 40), page_rows=4),
]

# Adapters of each segment; None is the base. A segment may be empty, or mix several.
BATCHES: dict[str, list[tuple[int, list[str]]]] = {
    "distinct": [(1, ["a"]), (1, ["b"]), (1, ["c"])],
    "identical": [(8, ["a"])],
    "skewed": [(30, ["b"]), (1, ["a"]), (2, ["c"])],
    "base only": [(5, [])],
    "base between": [(1, []), (3, ["a"]), (2, []), (1, ["c"])],
    "empty segment": [(0, ["a"]), (2, ["b"]), (0, [])],
    "mixed adapters": [(2, ["a", "b"]), (3, ["c", "a", "b"])],
    "affine": [(1, ["a"]), (2, ["d"]), (9, ["d"]), (1, [])],
    "mixed affine": [(2, ["a", "d", "e"]), (3, ["d", "e", "b"]), (1, ["e"])],
}
RANKS = {"a": 3, "b": 8, "c": 21, "d": 5, "e": 0}
AFFINE_ADAPTERS = ("d", "e")
SCALES = {"a": 1.0, "b": -0.5, "c": 2.0, "d": 1.0, "e": 0.25}


@dataclass
class Case:
    y: np.ndarray
    x: np.ndarray
    a: np.ndarray
    b: np.ndarray
    used: np.ndarray
    segment_starts: np.ndarray
    page_starts: np.ndarray
    page_ids: np.ndarray
    page_scales: np.ndarray


def make(shape: PoolShape, batch: list[tuple[int, list[str]]]) -> Case:
    rng = np.random.default_rng(0)
    rows = shape.page_rows
    pages: dict[str, list[int]] = {}
    used = np.zeros((16, shape.num_parts), np.int32)
    for name, rank in RANKS.items():
        count = -(-rank // rows) + (name in AFFINE_ADAPTERS)
        pages[name] = [sum(map(len, pages.values())) + i for i in range(count)]
        for i, page in enumerate(pages[name]):
            # Parts have ranks of their own: the last is adapted by half as many rows.
            for part in range(shape.num_parts):
                own = rank if part + 1 < shape.num_parts else (rank + 1) // 2
                used[page, part] = min(rows, max(0, own - i * rows))
        if name in AFFINE_ADAPTERS:
            used[pages[name][-1], : max(1, shape.num_parts - 1)] = AFFINE
    draw = lambda *dims: rng.standard_normal(dims).astype(np.float32)  # noqa: E731
    tokens = sum(count for count, _ in batch)
    ids = [page for _, names in batch for name in names for page in pages[name]]
    scales = [SCALES[name] for _, names in batch for name in names for _ in pages[name]]
    counts = [sum(len(pages[name]) for name in names) for _, names in batch]
    bounds = lambda values: np.array([0, *np.cumsum(values)], np.int32)  # noqa: E731
    return Case(
        y=draw(tokens, shape.out_features),
        x=draw(tokens, shape.in_features),
        a=draw(16, shape.num_parts, rows, shape.in_features),
        b=draw(16, rows, shape.out_features),
        used=used,
        segment_starts=bounds([count for count, _ in batch]),
        page_starts=bounds(counts),
        # One reference beyond the last segment's: padding, as for a batch of base rows alone.
        page_ids=np.array([*ids, 0], np.int32),
        page_scales=np.array([*scales, 1.0], np.float32),
    )


def truth(shape: PoolShape, case: Case) -> np.ndarray:
    wide = {name: getattr(case, name).astype(np.float64) for name in ("y", "x", "a", "b")}
    return reference_lora_add(
        **wide,
        used=case.used,
        segment_starts=case.segment_starts,
        page_starts=case.page_starts,
        page_ids=case.page_ids,
        page_scales=case.page_scales,
        part_ends=shape.part_ends,
    )


def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, atol=2e-5 * (1 + np.abs(expected).max()))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s.in_features}x{s.out_features}")
@pytest.mark.parametrize("batch", BATCHES)
def test_the_native_operator_is_the_reference(shape: PoolShape, batch: str) -> None:
    import tvm_ffi

    from lorafleet.native import functions

    case = make(shape, BATCHES[batch])
    expected = truth(shape, case)
    arrays = [tvm_ffi.from_dlpack(getattr(case, name)) for name in Case.__annotations__]
    functions().lora_add(*arrays, tvm_ffi.Shape(shape.part_ends))
    assert_close(case.y, expected)


@pytest.fixture(scope="module")
def built() -> dict[PoolShape, object]:
    import tvm

    return {
        shape: tvm.compile(tvm.IRModule({"lora_add": lora_add(shape)}), target="llvm")["lora_add"]
        for shape in SHAPES
    }


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s.in_features}x{s.out_features}")
@pytest.mark.parametrize("batch", BATCHES)
def test_the_tvmscript_operator_is_the_reference(
    built: dict[PoolShape, object], shape: PoolShape, batch: str
) -> None:
    import tvm_ffi

    case = make(shape, BATCHES[batch])
    expected = truth(shape, case)
    arrays = [case.y, case.x, case.a, case.b, case.used, plan_segments(case.segment_starts)]
    arrays += [case.page_starts, case.page_ids, case.page_scales, column_parts(shape)]
    built[shape](*map(tvm_ffi.from_dlpack, arrays))  # type: ignore[operator]
    assert_close(case.y, expected)


def test_rows_without_pages_are_not_touched() -> None:
    shape = SHAPES[0]
    case = make(shape, BATCHES["base between"])
    before = case.y.copy()
    found = truth(shape, case)
    assert (found[[0, 4, 5]] == before[[0, 4, 5]]).all()
    assert (found[1:4] != before[1:4]).any()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("page_ids", np.array([99, 0, 1, 2, 3, 0], np.int32), "page_ids"),
        ("segment_starts", np.array([0, 1, 2, 9], np.int32), "segment_starts"),
        ("page_starts", np.array([0, 3, 1, 5], np.int32), "page_starts"),
        ("x", np.zeros((3, 65), np.float32), "dimension"),
        ("used", np.zeros((16, 2), np.int32), "dimension"),
        ("page_scales", np.zeros(6, np.float64), "float32"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_before_memory_is_touched(
    field: str, value: np.ndarray, message: str
) -> None:
    import tvm_ffi

    from lorafleet.core.errors import InvalidInput
    from lorafleet.native import functions

    case = make(SHAPES[0], BATCHES["distinct"])
    setattr(case, field, value)
    arrays = [tvm_ffi.from_dlpack(getattr(case, name)) for name in Case.__annotations__]
    with pytest.raises(InvalidInput, match=message):
        functions().lora_add(*arrays, tvm_ffi.Shape(SHAPES[0].part_ends))
