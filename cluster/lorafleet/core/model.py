"""What the rest of the system knows of a compiled base model: its digest and its LoRA sites.

A *site* is one linear layer of the compiled model that can carry LoRA. After fusion it may stand
for several linears of the original checkpoint, its *parts*: `qkv_proj` has q, k and v, each with
its own range of output rows. Written by the compiler into `lorafleet.json`, read by everyone else;
it needs neither TVM nor numpy.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lorafleet.core.errors import InvalidInput

DESCRIPTION_FILE = "lorafleet.json"
"""Written last into a model directory: its presence means that the directory is complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SitePart:
    """One original linear inside a site; `source` is its module path in the checkpoint."""

    source: str
    out_start: int
    out_end: int

    @property
    def out_features(self) -> int:
        return self.out_end - self.out_start


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One LoRA-carrying linear, y[out_features] = W x[in_features] + b; parts tile the output.

    `has_bias` says whether there is a b.
    """

    name: str
    in_features: int
    out_features: int
    parts: tuple[SitePart, ...]
    has_bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """What a paged KV cache of this model needs; `rope_inv_freq` has head_dim / 2 entries."""

    num_layers: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    rope_inv_freq: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseModel:
    """A compiled base model.

    `digest` is `sha256:...` over the architecture and the weights, not over the library: the same
    weights compiled twice are the same base. `page_rows` is P, the rank rows of a rank page.
    `sites` is empty for a model compiled without LoRA. `library` is relative to the directory.
    """

    name: str
    digest: str
    library: str
    target: str
    vocab_size: int
    context_window: int
    max_batch_tokens: int
    page_rows: int
    kv: KvLayout
    sites: tuple[Site, ...]
    extra: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """The text of `lorafleet.json`."""
        return json.dumps({"format": 1, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> BaseModel:
        """Parse `lorafleet.json`; InvalidInput when it is of another format."""
        data = json.loads(text)
        if data.pop("format", None) != 1:
            raise InvalidInput(f"{DESCRIPTION_FILE}: expected format 1; compile the model again")
        data["kv"]["rope_inv_freq"] = tuple(data["kv"]["rope_inv_freq"])
        kv = KvLayout(**data.pop("kv"))
        sites = tuple(
            Site(**{**site, "parts": tuple(SitePart(**part) for part in site["parts"])})
            for site in data.pop("sites")
        )
        return cls(kv=kv, sites=sites, **data)

    @classmethod
    def read(cls, model_dir: Path) -> BaseModel:
        """Read a model directory's description; InvalidInput when it is absent (incomplete)."""
        path = Path(model_dir) / DESCRIPTION_FILE
        if not path.is_file():
            raise InvalidInput(
                f"{model_dir} is no compiled model: {DESCRIPTION_FILE} is missing; "
                "make one with `lorafleet compile`",
                file=path,
            )
        return cls.from_json(path.read_text())
