"""The pool of rank pages, as Python sees it; the rules are in `adapter_pool.h`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lorafleet.core.model import Site
from lorafleet.native.library import as_shape, as_tensor, functions


class AdapterPool:
    """Rank pages for every site of a model. Thread-safe.

    A version is absent, loading (`reserve` .. `commit` or `abort`) or resident. Only unpinned
    residents are evicted, least recently pinned first.

    Parameters
    ----------
    sites : sequence of Site
        The model's sites, in the order of the compiled model's arguments.
    num_pages : int
        Pages of the pool; memory is taken as they are first written.
    page_rows : int
        Rank rows of a page.
    """

    def __init__(self, sites: Sequence[Site], num_pages: int, page_rows: int) -> None:
        self._functions = functions()
        self.num_pages = num_pages
        self.page_rows = page_rows
        shapes = [(site.in_features, *(part.out_end for part in site.parts)) for site in sites]
        self._handle: Any = self._functions.pool_create(
            [as_shape(shape) for shape in shapes], num_pages, page_rows
        )
        self.bytes_per_page = (
            4
            * page_rows
            * sum(len(site.parts) * site.in_features + site.out_features for site in sites)
        )

    def tensors(self) -> list[Any]:
        """The page tensors as TVM tensors: for each site a, b and used."""
        return list(self._functions.pool_tensors(self._handle))

    def reserve(self, version: str, num_pages: int) -> list[str]:
        """Give pages to a version that is about to be loaded; return the versions evicted for it.

        Raises
        ------
        Exhausted
            Too many pages are pinned or loading, or the pool is too small; nothing is evicted.
        Conflict
            The version is loading or resident already.
        """
        return [
            str(name) for name in self._functions.pool_reserve(self._handle, version, num_pages)
        ]

    def write(self, version: str, site: int, part: int, a: np.ndarray, b_t: np.ndarray) -> None:
        """Copy the rank rows of one part: a is (r, in) and b_t is (r, part width), float32."""
        self._functions.pool_write(self._handle, version, site, part, as_tensor(a), as_tensor(b_t))

    def write_affine(
        self, version: str, site: int, part: int, gain: np.ndarray, shift: np.ndarray
    ) -> None:
        """Copy what one part adds besides rank rows: y += gain * y + shift, each (part width,).

        It takes the version's last page, which must hold no rank rows of that part.
        """
        self._functions.pool_write_affine(
            self._handle, version, site, part, as_tensor(gain), as_tensor(shift)
        )

    def commit(self, version: str) -> None:
        """Make a loading version resident."""
        self._functions.pool_commit(self._handle, version)

    def abort(self, version: str) -> None:
        """Give a loading version's pages back."""
        self._functions.pool_abort(self._handle, version)

    def pin(self, version: str) -> list[int] | None:
        """Keep a resident version from eviction and return its page ids; None if not resident."""
        pages = self._functions.pool_pin(self._handle, version)
        return None if pages is None else [int(page) for page in pages]

    def unpin(self, version: str) -> None:
        """Undo one `pin`."""
        self._functions.pool_unpin(self._handle, version)

    def evict(self, version: str) -> bool:
        """Drop a resident version now; False when it is pinned, loading or absent."""
        return bool(self._functions.pool_evict(self._handle, version))

    def residents(self) -> list[str]:
        """Resident versions, least recently pinned first."""
        return [str(name) for name in self._functions.pool_residents(self._handle)]

    def loading(self) -> list[str]:
        """Versions between `reserve` and `commit`."""
        return [str(name) for name in self._functions.pool_loading(self._handle)]

    def free_pages(self) -> int:
        """Pages that hold nothing."""
        return int(self._functions.pool_free_pages(self._handle))

    def check(self) -> None:
        """Prove that every page has exactly one owner; Internal if not."""
        self._functions.pool_check(self._handle)
