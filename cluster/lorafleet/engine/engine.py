"""The engine: one replica's model, usable alone in a process.

    engine = Engine(model_dir)
    engine.start()
    engine.upload_lora("adapters/pirate", name="pirate")
    engine.set_lora("pirate")
    print(engine.complete("Hello").text)
    engine.stop()
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from lorafleet.adapters import LoraAdapter, load_adapter
from lorafleet.core.errors import Exhausted, InvalidInput, NotFound, Unsupported
from lorafleet.core.model import BaseModel
from lorafleet.engine.blocks import BlockTable
from lorafleet.engine.loop import StepLoop
from lorafleet.engine.options import EngineOptions
from lorafleet.engine.plan import Chunk, build_plan
from lorafleet.engine.request import (
    Delta,
    Event,
    Failed,
    Finished,

    Mix,
    Request,
    SamplingParams,
)
from lorafleet.engine.residency import Residency, Source
from lorafleet.engine.runner import Runner
from lorafleet.engine.scheduler import Limits, Scheduler
from lorafleet.engine.text import TextCodec
from lorafleet.native.kv_cache import BLOCK_SIZE

AdapterUse = None | str | Sequence[tuple[str, float]]
"""What answers: None is the base, a name or version id, or several of them with scales."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidencySnapshot:
    """What the engine holds and how busy it is; `sequence` grows with every change."""

    sequence: int = 0
    resident: tuple[str, ...] = ()
    loading: tuple[str, ...] = ()
    free_pages: int = 0
    num_pages: int = 0
    running: int = 0
    waiting: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A whole answer."""

    text: str
    token_ids: tuple[int, ...]
    finished: Finished


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Exactly one of the three: text, token ids, or messages for the chat template."""

    text: str | None = None
    token_ids: Sequence[int] | None = None
    messages: Sequence[Mapping[str, str]] | None = None


class Engine:
    """Continuous batching over one compiled model, with per-request adapters in one batch.

    All methods may be called from any thread after `start`.

    Parameters
    ----------
    model_dir : Path
        A directory made by `lorafleet compile`.
    options : EngineOptions, optional
        Sizes and limits.
    """

    def __init__(self, model_dir: Path, *, options: EngineOptions | None = None) -> None:
        self.model_dir = Path(model_dir)
        self.options = options or EngineOptions()
        self.base = BaseModel.read(self.model_dir)
        self.codec = TextCodec(self.model_dir)
        self._lock = threading.Lock()  # guards what follows
        self._names: dict[str, str] = {}
        self._uploaded: dict[str, LoraAdapter] = {}
        self._default: AdapterUse = None
        self._snapshot = ResidencySnapshot()
        self._subscribers: list[Callable[[ResidencySnapshot], None]] = []
        self._source: Source | None = None
        self._loop: StepLoop | None = None
        self._residency: Residency | None = None
        self._runner: Runner | None = None
        self._scheduler: Scheduler | None = None

    # Life.

    def start(self) -> None:
        """Load the model and begin to serve.

        Raises
        ------
        InvalidInput
            The model directory is broken.
        """
        options = self.options
        threads = options.num_threads or len(os.sched_getaffinity(0))
        os.environ.setdefault("TVM_NUM_THREADS", str(threads))
        num_blocks = BlockTable.needed(options.kv_tokens)
        self._runner = runner = Runner(self.model_dir, num_blocks, options.num_adapter_pages)
        if runner.pool is not None:
            self._residency = Residency(
                runner.pool, self._find_version, self._wake, options.max_loads
            )
        self._scheduler = Scheduler(
            BlockTable(num_blocks),
            self._residency,
            Limits(
                max_batch=options.max_batch,
                max_step_tokens=options.max_step_tokens,
                age_limit_s=options.age_limit_s,
            ),
        )
        self._loop = StepLoop(
            self._scheduler,
            runner,
            self.codec,
            eos_ids=frozenset(self.base.extra.get("eos_token_ids", ())),
            on_change=self._publish,
        )
        self._loop.start()
        self._loop.call(self._publish).result()

    def stop(self) -> None:
        """End; requests in progress fail with Unavailable. A second call does nothing."""
        if self._loop is not None:
            self._loop.stop()
        if self._residency is not None:
            self._residency.stop()

    def __enter__(self) -> Engine:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def is_alive(self) -> bool:
        """Whether the step thread is running and moving."""
        return self._loop is not None and self._loop.is_alive

    # Adapters.

    def set_source(self, source: Source) -> None:
        """Say where versions that were not uploaded here come from; called in loader threads."""
        self._source = source

    def upload_lora(self, path: Path | str, name: str | None = None) -> str:
        """Read and check a PEFT directory and begin to load it; return its version id.

        Under a `name` that is in use, later requests get the new version; running ones finish on
        theirs.

        Raises
        ------
        InvalidAdapter, Unsupported
            The adapter is broken or asks for what is not honoured; the engine is unchanged.
        InvalidInput
            It needs more rank pages than the engine has.
        """
        adapter = load_adapter(Path(path), self.base)
        loop, residency = self._loaded()
        pages = adapter.num_pages(self.base.page_rows)
        if pages > self.options.num_adapter_pages:
            raise InvalidInput(
                f"{path}: rank {adapter.max_rank} needs {pages} rank pages; the engine has "
                f"{self.options.num_adapter_pages}: raise num_adapter_pages"
            )
        with self._lock:
            self._uploaded[adapter.version] = adapter
            if name is not None:
                self._names[name] = adapter.version
        loop.call(lambda: residency.ensure(adapter.version, time.monotonic())).result()
        return adapter.version

    def set_lora(self, use: AdapterUse) -> None:
        """Choose what answers requests that name no adapter.

        Raises
        ------
        NotFound
            A name is not known.
        """
        self._resolve(use)
        with self._lock:
            self._default = use

    def get_lora_delta(self, name: str, site: str) -> np.ndarray:
        """s·B A of an uploaded adapter at a site, (out_features, in_features) float32.

        Raises
        ------
        NotFound
            The adapter or the site is not known.
        """
        (version, _), *_ = self._resolve(name)
        with self._lock:
            adapter = self._uploaded.get(version)
        return (adapter or self._find_version(version)).delta(site)

    def ensure_resident(self, use: AdapterUse, timeout_s: float = 60.0) -> None:
        """Wait until all versions are in rank pages.

        Raises
        ------
        Exhausted
            Not within the time.
        """
        loop, residency = self._loaded()
        mix = self._resolve(use)
        deadline_s = time.monotonic() + timeout_s
        while not all(residency.is_resident(version) for version, _ in mix):
            if time.monotonic() > deadline_s:
                raise Exhausted(f"adapters were not loaded within {timeout_s:g} s")
            for version, _ in mix:
                loop.call(lambda v=version: residency.ensure(v, time.monotonic())).result()
            time.sleep(0.005)

    def unload(self, version: str) -> bool:
        """Drop a version from rank pages now; False when it is in use or not there."""
        loop, residency = self._loaded()
        with self._lock:
            self._uploaded.pop(version, None)
        return bool(loop.call(lambda: residency.pool.evict(version)).result())

    # Generation.

    async def generate(
        self,
        prompt: Prompt | str,
        sampling: SamplingParams | None = None,
        *,
        adapter: AdapterUse = ...,  # type: ignore[assignment]
    ) -> AsyncIterator[Event]:
        """Stream Started, Deltas and Finished; leaving the iterator aborts the request.

        Raises
        ------
        NotFound
            An adapter is not known.
        InvalidInput
            The prompt is empty, too long, or holds ids outside the vocabulary.
        Exhausted
            Too many requests are waiting.
        """
        events: asyncio.Queue[Event] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def emit(event: Event) -> None:
            # The client's loop may be gone; then nobody listens.
            if not loop.is_closed():
                loop.call_soon_threadsafe(events.put_nowait, event)

        request = self._submit(prompt, sampling, adapter, emit)
        try:
            while True:
                event = await events.get()
                if isinstance(event, Failed):
                    raise event.error
                yield event
                if isinstance(event, Finished):
                    return
        finally:
            self._abort(request)

    def stream(
        self,
        prompt: Prompt | str,
        sampling: SamplingParams | None = None,
        *,
        adapter: AdapterUse = ...,  # type: ignore[assignment]
    ) -> Iterator[Event]:
        """`generate` for code without an event loop."""
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        request = self._submit(prompt, sampling, adapter, events.put)
        try:
            while True:
                event = events.get()
                if isinstance(event, Failed):
                    raise event.error
                yield event
                if isinstance(event, Finished):
                    return
        finally:
            self._abort(request)

    def complete(
        self,
        prompt: Prompt | str,
        sampling: SamplingParams | None = None,
        *,
        adapter: AdapterUse = ...,  # type: ignore[assignment]
    ) -> Completion:
        """The whole answer at once."""
        text, tokens = "", []
        for event in self.stream(prompt, sampling, adapter=adapter):
            if isinstance(event, Delta):
                text += event.text
                tokens += event.token_ids
            elif isinstance(event, Finished):
                return Completion(text=text, token_ids=tuple(tokens), finished=event)
        raise AssertionError("a stream ends with Finished or an error")

    def logits(self, batch: Sequence[tuple[Sequence[int], AdapterUse]]) -> np.ndarray:
        """Logits (S, V) float32 of the token after each prompt, all prompts in one mixed step.

        Raises
        ------
        Exhausted
            The batch does not fit into the free KV blocks.
        """
        loop, _ = self._running()
        requests = [self._request(Prompt(token_ids=ids), None, use, _ignore) for ids, use in batch]
        for _, use in batch:
            if use is not None:
                self.ensure_resident(use)
        return np.asarray(loop.call(lambda: self._one_step(requests)).result())

    # What it holds.

    def residency(self) -> ResidencySnapshot:
        """The newest snapshot."""
        return self._snapshot

    def subscribe(self, callback: Callable[[ResidencySnapshot], None]) -> Callable[[], None]:
        """Call back on the step thread at every change; the result ends it."""
        with self._lock:
            self._subscribers.append(callback)

        def unsubscribe() -> None:
            with self._lock:
                self._subscribers.remove(callback)

        return unsubscribe

    def check(self) -> None:
        """Prove that no KV block and no rank page is lost; Internal if one is."""
        loop, scheduler = self._running()
        loop.call(scheduler.check).result()

    def tokenize(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt.

        Raises
        ------
        InvalidInput
            It is empty, or has ids outside the vocabulary.
        """
        if prompt.messages is not None:
            ids = self.codec.encode(self.codec.chat(prompt.messages))
        elif prompt.token_ids is not None:
            ids = list(prompt.token_ids)
        else:
            ids = self.codec.encode(prompt.text or "")
        if not ids:
            raise InvalidInput("prompt: expected at least one token", field="prompt")
        if min(ids) < 0 or max(ids) >= self.base.vocab_size:
            raise InvalidInput(
                f"prompt: token ids must be in [0, {self.base.vocab_size})", field="token_ids"
            )
        return ids

    # Inside.

    def _submit(
        self,
        prompt: Prompt | str,
        sampling: SamplingParams | None,
        adapter: AdapterUse,
        emit: Callable[[Event], None],
    ) -> Request:
        loop, _ = self._running()
        if self._snapshot.waiting >= self.options.max_waiting:
            raise Exhausted(f"{self._snapshot.waiting} requests are waiting; try again later")
        if isinstance(prompt, str):
            prompt = Prompt(text=prompt)
        use = self._default if adapter is ... else adapter
        request = self._request(prompt, sampling, use, emit)
        loop.submit(request)
        return request

    def _request(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None,
        use: AdapterUse,
        emit: Callable[[Event], None],
    ) -> Request:
        sampling = sampling or SamplingParams()
        ids = self.tokenize(prompt)
        room = min(self.base.context_window, self.options.kv_tokens) - len(ids)
        if room < 1:
            raise InvalidInput(
                f"prompt: {len(ids)} tokens do not fit into a context of {len(ids) + room} and "
                "leave room for an answer",
                field="prompt",
            )
        if sampling.max_tokens > room:
            sampling = replace(sampling, max_tokens=room)
        return Request(
            prompt_length=len(ids),
            tokens=ids,
            mix=self._resolve(use),
            sampling=sampling,
            emit=emit,
            arrived_s=time.monotonic(),
        )

    def _resolve(self, use: AdapterUse) -> Mix:
        if use is None:
            return ()
        if not self.base.sites:
            raise Unsupported(f"base model {self.base.name!r} was compiled without LoRA")
        uses = [(use, 1.0)] if isinstance(use, str) else use
        with self._lock:
            return tuple((self._version(name), float(scale)) for name, scale in uses)

    def _version(self, name: str) -> str:
        version = self._names.get(name, name)
        if version not in self._uploaded and self._source is None:
            raise NotFound(f"adapter {name!r} is not known", adapter=name)
        return version

    def _find_version(self, version: str) -> LoraAdapter:
        with self._lock:
            adapter, source = self._uploaded.get(version), self._source
        if adapter is not None:
            return adapter
        if source is None:
            raise NotFound(f"adapter {version!r} is not known", adapter=version)
        return source(version)

    def _one_step(self, requests: list[Request]) -> np.ndarray:
        _, scheduler = self._running()
        assert self._runner is not None
        blocks = scheduler.blocks
        taken: list[Request] = []
        try:
            for request in requests:
                needed = blocks.needed(request.prompt_length)
                references = (
                    self._residency.pin(request.mix) if self._residency is not None else ()
                )
                if not blocks.can_allocate(needed) or references is None:
                    raise Exhausted("the batch does not fit into the engine's free memory")
                request.blocks, request.page_refs = blocks.allocate(needed), references
                taken.append(request)
            plan = build_plan(
                [Chunk(request=request, num_tokens=request.num_pending) for request in requests]
            )
            logits = self._runner.step(plan)
            rows = {id(request): row for row, request in enumerate(plan.sampled)}
            return logits[[rows[id(request)] for request in requests]].copy()
        finally:
            for request in taken:
                blocks.release(request.blocks)
                if self._residency is not None:
                    self._residency.unpin(request.mix)

    def _abort(self, request: Request) -> None:
        request.cancelled.set()
        self._wake()

    def _wake(self) -> None:
        if self._loop is not None:
            self._loop.wake()

    def _running(self) -> tuple[StepLoop, Scheduler]:
        if self._loop is None or self._scheduler is None:
            raise InvalidInput("the engine has not been started")
        return self._loop, self._scheduler

    def _loaded(self) -> tuple[StepLoop, Residency]:
        loop, _ = self._running()
        if self._residency is None:
            raise Unsupported(f"base model {self.base.name!r} was compiled without LoRA")
        return loop, self._residency

    def _publish(self) -> None:
        """Take a snapshot and tell subscribers if it is news. Step thread."""
        assert self._scheduler is not None
        pool = self._residency.pool if self._residency is not None else None
        snapshot = ResidencySnapshot(
            sequence=self._snapshot.sequence,
            resident=tuple(pool.residents()) if pool else (),
            loading=self._residency.loading() if self._residency is not None else (),
            free_pages=pool.free_pages() if pool else 0,
            num_pages=pool.num_pages if pool else 0,
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
        )
        if snapshot == self._snapshot:
            return
        self._snapshot = replace(snapshot, sequence=snapshot.sequence + 1)
        with self._lock:
            subscribers = list(self._subscribers)
        for subscriber in subscribers:
            subscriber(self._snapshot)


def _ignore(event: Event) -> None:
    """For requests that nobody listens to."""
