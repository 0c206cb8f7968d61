"""The engine: one replica's model, usable alone in a process.

with Engine(model_dir) as engine:
    engine.upload_lora("adapters/pirate", name="pirate")
    print(engine.complete("Hello", adapter="pirate").text)
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import EllipsisType

import numpy as np

from lorafleet.adapters import load_adapter
from lorafleet.core.errors import Conflict, Exhausted, InvalidInput, Unsupported
from lorafleet.core.model import BaseModel
from lorafleet.engine import streams
from lorafleet.engine.blocks import BlockTable
from lorafleet.engine.book import AdapterBook, AdapterUse, Source
from lorafleet.engine.intake import Intake
from lorafleet.engine.keeping import Keeper
from lorafleet.engine.loop import StepLoop
from lorafleet.engine.options import EngineOptions
from lorafleet.engine.request import (
    Completion,
    Delta,
    Event,
    Finished,
    Mix,
    Prompt,
    Request,
    SamplingParams,
)
from lorafleet.engine.residency import Residency
from lorafleet.engine.runner import Runner
from lorafleet.engine.scheduler import Limits, Scheduler
from lorafleet.engine.single_step import single_step
from lorafleet.engine.snapshot import ResidencySnapshot, Snapshots, Subscriber, take
from lorafleet.engine.text import TextCodec


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
        self._intake = Intake(self.base, self.codec, self.options.kv_tokens)
        self._book = AdapterBook()
        self._snapshots = Snapshots()
        self._default: AdapterUse = None
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
        Conflict
            It was started before; a stopped engine is not started again.
        """
        if self._loop is not None:
            raise Conflict("the engine was started before; make another one")
        options = self.options
        threads = options.num_threads or len(os.sched_getaffinity(0))
        os.environ.setdefault("TVM_NUM_THREADS", str(threads))
        num_blocks = BlockTable.needed(options.kv_tokens)
        self._runner = runner = Runner(self.model_dir, num_blocks, options.num_adapter_pages)
        if runner.pool is not None:
            self._residency = Residency(
                runner.pool, self._book.find, self._wake, options.max_loads, runner.weights
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
            max_waiting=options.max_waiting,
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

    def set_source(self, source: Source | None) -> None:
        """Say where versions that were not uploaded here come from; called in loader threads."""
        self._book.set_source(source)

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
        self._book.add(adapter, name)
        loop.call(partial(residency.ensure, adapter.version)).result()
        return adapter.version

    def set_lora(self, use: AdapterUse) -> None:
        """Choose what answers requests that name no adapter.

        Raises
        ------
        NotFound
            A name is not known.
        """
        self._resolve(use)
        self._default = use

    def get_lora_delta(self, name: str, site: str) -> np.ndarray:
        """The change of a site's weight by an adapter, (out_features, in_features) float32.

        It is s·B A, or DoRA's W' - W. Biases are no part of it.

        Raises
        ------
        NotFound
            The adapter or the site is not known.
        """
        (version, _), *_ = self._resolve(name)
        self._loaded()
        assert self._runner is not None
        return self._book.find(version).delta(site, self._runner.weights)

    def ensure_resident(self, use: AdapterUse, timeout_s: float = 60.0) -> None:
        """Wait until all versions are in rank pages; a load that fails raises its error.

        Raises
        ------
        Exhausted
            Not within the time.
        """
        loop, residency = self._loaded()
        mix = self._resolve(use)
        deadline_s = time.monotonic() + timeout_s
        try:
            while not all(residency.is_resident(version) for version, _ in mix):
                loads = [loop.call(partial(residency.wait, version)).result() for version, _ in mix]
                for load in loads:
                    load.result(max(0.0, deadline_s - time.monotonic()))
                if time.monotonic() > deadline_s:
                    raise TimeoutError
        except TimeoutError:
            raise Exhausted(f"adapters were not loaded within {timeout_s:g} s") from None

    def prefetch(self, use: AdapterUse) -> None:
        """Begin to load what a later request will want; a load that fails is only logged.

        Raises
        ------
        NotFound
            A name is not known.
        """
        loop, residency = self._loaded()
        for version, _ in self._resolve(use):
            loop.call(partial(residency.ensure, version)).result()

    def keep(self, adapters: Sequence[str]) -> None:
        """Keep adapters in rank pages from now on, and no others, whatever else is asked for.

        The first are the more important: together they hold at most half of the rank pages. They
        give way to a request that has waited past the age limit.

        Raises
        ------
        NotFound
            A name is not known.
        """
        versions = [version for name in adapters for version, _ in self._resolve(name)]
        loop, _ = self._loaded()
        loop.call(lambda: self._keeper().want(versions)).result()

    def unload(self, version: str) -> bool:
        """Drop a version and its names; true if it held rank pages or a load and they are free now.

        A version in use goes when the last request that uses it has ended; no other gets it before.
        """
        loop, residency = self._loaded()
        self._book.forget(version)

        loop.call(lambda: self._keeper().forget(version)).result()
        return loop.call(partial(residency.unload, version)).result()

    # Generation.

    async def generate(
        self,
        prompt: Prompt | str,
        sampling: SamplingParams | None = None,
        *,
        adapter: AdapterUse | EllipsisType = ...,
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
        submit = partial(self._submit, prompt, sampling, adapter)
        async with contextlib.aclosing(streams.listen(submit, self._abort)) as events:
            async for event in events:
                yield event

    def stream(
        self,
        prompt: Prompt | str,
        sampling: SamplingParams | None = None,
        *,
        adapter: AdapterUse | EllipsisType = ...,
    ) -> Iterator[Event]:
        """`generate` for code without an event loop."""
        return streams.wait(partial(self._submit, prompt, sampling, adapter), self._abort)

    def complete(
        self,
        prompt: Prompt | str,
        sampling: SamplingParams | None = None,
        *,
        adapter: AdapterUse | EllipsisType = ...,
    ) -> Completion:
        """The whole answer at once."""
        text = ""
        tokens: list[int] = []
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
        loop, scheduler = self._running()
        assert self._runner is not None
        requests = [
            self._intake.request(Prompt(token_ids=ids), None, mix=self._resolve(use), emit=_ignore)
            for ids, use in batch
        ]
        for _, use in batch:
            if use is not None:
                self.ensure_resident(use)
        step = partial(single_step, requests, scheduler, self._runner)
        return np.asarray(loop.call(step).result())

    # What it holds.

    def residency(self) -> ResidencySnapshot:
        """The newest snapshot."""
        return self._snapshots.newest

    def subscribe(self, callback: Subscriber) -> Callable[[], None]:
        """Call back on the step thread at every change; the result ends it."""
        return self._snapshots.subscribe(callback)

    def check(self) -> None:
        """Prove that no KV block and no rank page is lost; Internal if one is."""
        loop, scheduler = self._running()
        loop.call(scheduler.check).result()

    def tokenize(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; see `Intake.tokenize`."""
        return self._intake.tokenize(prompt)

    # Inside.

    def _submit(
        self,
        prompt: Prompt | str,
        sampling: SamplingParams | None,
        adapter: AdapterUse | EllipsisType,
        emit: Callable[[Event], None],
    ) -> Request:
        loop, _ = self._running()
        if isinstance(prompt, str):
            prompt = Prompt(text=prompt)
        use = self._default if isinstance(adapter, EllipsisType) else adapter
        request = self._intake.request(prompt, sampling, mix=self._resolve(use), emit=emit)
        loop.submit(request)
        return request

    def _resolve(self, use: AdapterUse) -> Mix:
        if use is not None and not self.base.sites:
            raise Unsupported(f"base model {self.base.name!r} was compiled without LoRA")
        return self._book.resolve(use)

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

    def _keeper(self) -> Keeper:
        _, scheduler = self._running()
        assert scheduler.keeper is not None, "it has residency"
        return scheduler.keeper

    def _publish(self) -> None:
        """Take a snapshot and tell subscribers if it is news. Step thread."""
        _, scheduler = self._running()
        self._snapshots.publish(take(scheduler))


def _ignore(event: Event) -> None:
    """For requests that nobody listens to."""
