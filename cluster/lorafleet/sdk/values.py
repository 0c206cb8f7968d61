"""What a client sends and receives, as frozen values."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from lorafleet.core.record import AdapterRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are chosen; the meaning and the defaults are those of `inference.proto`."""

    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """Who serves the request; `version` is empty for the base model."""

    request_id: str
    version: str
    replica: str
    resident: bool
    prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """New tokens and their text."""

    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The end; `reason` is `stop` or `length`, times in seconds as the replica measured them."""

    reason: str
    completion_tokens: int
    queue_s: float
    ttft_s: float
    decode_s: float


Event = Started | Delta | Finished


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A whole answer; `ttft_s` and `tokens_per_s` as the client measured them.

    `tokens_per_s` counts the tokens after the first; 0 for an answer of one token.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    version: str
    replica: str
    resident: bool
    ttft_s: float
    tokens_per_s: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A name that requests may use."""

    name: str
    base: bool
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStatus:
    """A replica as the gateway sees it; counts are 0 before its first report."""

    replica: str
    address: str
    connected: bool
    epoch: int
    resident: tuple[str, ...]
    loading: tuple[str, ...]
    free_pages: int
    num_pages: int
    running: int
    waiting: int
    draining: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetStatus:
    """The fleet as one gateway sees it."""

    base_model: str
    base_digest: str
    num_adapters: int
    registry_connected: bool
    replicas: tuple[ReplicaStatus, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of the registry: an adapter as it is now, or the name of one that is gone.

    `restart` says that everything follows: forget what you know. A later watch goes on from
    `cursor`; it repeats what came since the cursor before.
    """

    adapter: AdapterRecord | None = None
    deleted: str = ""
    restart: bool = False
    cursor: str = ""
