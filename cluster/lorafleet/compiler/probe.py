"""Learning a model's LoRA sites from its own weight mapping.

Each source weight is replaced by an array that carries its own coordinates; what the mapping makes
of them says which source, row and column every output row came from. No table per model: whatever
a mapping does to real weights, the probe sees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from lorafleet.compiler.weights import Origin, WeightMap
from lorafleet.core.errors import Unsupported
from lorafleet.core.model import Site, SitePart


def find_site(
    name: str, shape: tuple[int, int], origin: Origin, source_shape: Callable[[str], Sequence[int]]
) -> Site:
    """The site of one linear layer.

    Parameters
    ----------
    name : str
        Module path of the layer in the compiled model.
    shape : (out_features, in_features)
        Of its weight.
    origin : Origin
        How the weight is made.
    source_shape : callable
        Shape of a source tensor by name.

    Raises
    ------
    Unsupported
        The mapping permutes, transposes or mixes its sources; named with the site.
    """
    marked = []
    for index, source in enumerate(origin.sources):
        rows, columns = source_shape(source)
        row, column = np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij")
        # float64 holds the three coordinates exactly.
        marked.append((index * 2**40 + row * 2**20 + column).astype(np.float64))
    made = origin.make(*marked)
    if made.shape != shape:
        raise Unsupported(
            f"site {name}: the weight mapping gives shape {made.shape}, the layer has {shape}",
            site=name,
        )
    codes = made.astype(np.int64)
    origins, row, column = codes >> 40, codes >> 20 & 0xFFFFF, codes & 0xFFFFF
    rows_kept = (origins == origins[:, :1]).all() and (row == row[:, :1]).all()
    if not rows_kept or not (column == np.arange(shape[1])).all():
        raise Unsupported(
            f"site {name}: the weight mapping transposes or permutes columns, which LoRA here does "
            "not follow; exclude the site",
            site=name,
        )
    parts = []
    for i, source in enumerate(origin.sources):
        places = np.flatnonzero(origins[:, 0] == i)
        start, end = int(places[0]), int(places[-1]) + 1
        if end - start != len(places) or not (row[start:end, 0] == np.arange(end - start)).all():
            raise Unsupported(
                f"site {name}: the weight mapping reorders the rows of {source}, which LoRA here "
                "does not follow; exclude the site",
                site=name,
            )
        parts.append(SitePart(source=source.removesuffix(".weight"), out_start=start, out_end=end))
    parts.sort(key=lambda part: part.out_start)
    return Site(name=name, in_features=shape[1], out_features=shape[0], parts=tuple(parts))


def find_sites(
    linears: dict[str, tuple[int, int]],
    weights: WeightMap,
    source_shape: Callable[[str], Sequence[int]],
) -> list[Site]:
    """The sites of all linear layers, given as {module path: weight shape}, in their order."""
    return [
        find_site(name, shape, weights.origins[f"{name}.weight"], source_shape)
        for name, shape in linears.items()
    ]
