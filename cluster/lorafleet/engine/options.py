"""What an engine is started with."""

from __future__ import annotations

from dataclasses import dataclass

from lorafleet.core.errors import InvalidInput


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Sizes and limits of one engine.

    Parameters
    ----------
    kv_tokens : int
        Tokens whose keys and values fit into the KV cache; memory is taken as they are used.
    num_adapter_pages : int
        Rank pages; an adapter of rank r takes ceil(r / page_rows) of them.
    max_batch : int
        Sequences of a step.
    max_step_tokens : int
        Tokens of a step; long prompts are prefilled in chunks of this size.
    max_waiting : int
        Requests that may be submitted and not yet admitted; more are refused.
    age_limit_s : float
        How long a request waits for rank pages before those of others are drained for it.
    max_loads : int
        Adapters read at the same time, and as many written to pages.
    num_threads : int, optional
        Threads of the kernels; all cores if None. Takes effect only before TVM starts its pool.
    """

    kv_tokens: int = 32768
    num_adapter_pages: int = 256
    max_batch: int = 32
    max_step_tokens: int = 256
    max_waiting: int = 1024
    age_limit_s: float = 2.0
    max_loads: int = 4
    num_threads: int | None = None

    def __post_init__(self) -> None:
        counts = (
            "kv_tokens",
            "num_adapter_pages",
            "max_batch",
            "max_step_tokens",
            "max_waiting",
            "max_loads",
        )
        for name in (*counts, *(["num_threads"] if self.num_threads is not None else [])):
            if getattr(self, name) < 1:
                raise InvalidInput(
                    f"{name}: expected at least 1, got {getattr(self, name)}", field=name
                )
        if not self.age_limit_s >= 0:
            raise InvalidInput(
                f"age_limit_s: expected at least 0, got {self.age_limit_s}", field="age_limit_s"
            )
        if self.max_step_tokens < self.max_batch:
            raise InvalidInput(
                f"max_step_tokens ({self.max_step_tokens}) must not be below max_batch "
                f"({self.max_batch}): a step has one token for every sequence",
                field="max_step_tokens",
            )
