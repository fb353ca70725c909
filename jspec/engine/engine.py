"""The engine: any number of requests over a fixed number of slots, with the loop on the device."""

import dataclasses
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Unpack, overload

from tqdm import tqdm

from jspec.core import stopping
from jspec.core.checks import check_flag, check_int, check_number
from jspec.core.sampling import Sampling
from jspec.core.types import Accept, Drafter, Params
from jspec.engine import memory
from jspec.engine.assembly import assemble, make_requests
from jspec.engine.device import DeviceRequest, Landing
from jspec.engine.handle import EngineError, Handle, wake
from jspec.engine.loop import Loop
from jspec.engine.metrics import Counters, Metrics
from jspec.engine.model import Model, refuse_groups, refuse_split
from jspec.engine.options import DEFAULT_PAGE_SIZE, CommonKeywords, GenerateOptions, RequestKeywords, repeat
from jspec.engine.request import QueueFull, Request
from jspec.engine.result import FINISH_REASONS, Generation, Generations, GenerationStats, Piece, drafted_tokens
from jspec.engine.run import Prompt, check_model, encode_prompts
from jspec.engine.score import Scores, check_score, split

DEFAULT_CONTEXT = 8192
"""Tokens of the longest request, prompt included, unless the model's context is shorter."""


class Engine:
    """Generates for any number of requests at once: a slot that becomes free takes the next one (continuous batching).

    The tokens of a request are those of `jspec.generate` with the same options, whatever else the engine does. A thread
    of the engine talks to the device; all methods may be called from any thread.

        with jspec.Engine(model, slots=64) as engine:
            texts = engine.generate(prompts, max_new_tokens=256).text
            for piece in engine.submit("Once upon a time"):
                print(piece.text, end="")

    Args:
      model: from `jspec.load`.
      drafter, accept: as in `jspec.generate`, for all requests. accept None: "coupled" for requests that sample.
      slots: sequences that are generated at the same time.
      context: tokens of the longest request, prompt included. None: the model's context, at most 8192.
      pages: pages of the caches. None: as many as all slots can use, or as `memory_fraction` allows.
      memory_fraction: fraction of the device's memory that may be in use, weights included; it limits `pages` where
        that is None, and snapshots. None: 0.9, or 0.75 on a CPU, whose memory other programs use as well.
      page_size: rows per cache page. Whole pages are what requests share.
      prefill_tokens: tokens of prompts that are read between two bursts while others generate.
      burst_ms: time that the device runs rounds before the host hears of them, in milliseconds.
      prefix_cache: whether requests share the pages of equal beginnings, and snapshots of what is not in pages: one per
        slot, or as many as fit into a tenth of the memory for pages.
      max_queue: requests that may wait for a slot; None: any number.

    Raises:
      ValueError, TypeError: invalid arguments, or a model that does not fit.
    """

    def __init__(
        self,
        model: Model,
        *,
        drafter: str | Drafter | None = "auto",
        accept: str | Accept | None = None,
        slots: int = 64,
        context: int | None = None,
        pages: int | None = None,
        memory_fraction: float | None = None,
        page_size: int = DEFAULT_PAGE_SIZE,
        prefill_tokens: int = 1024,
        burst_ms: float = 25.0,
        prefix_cache: bool = True,
        max_queue: int | None = None,
    ):
        # Check the arguments.
        check_model(model)
        refuse_groups(model, "Engine")
        slots = check_int("slots", slots, least=1)
        page_size = check_int("page_size", page_size, least=1)
        prefill_tokens = check_int("prefill_tokens", prefill_tokens, least=1)
        burst_seconds = check_number("burst_ms", burst_ms, above=0.0) / 1e3
        share = check_flag("prefix_cache", prefix_cache)
        self.max_queue = None if max_queue is None else check_int("max_queue", max_queue, least=0)
        pages = None if pages is None else check_int("pages", pages, least=2)
        fraction = memory.usable_fraction() if memory_fraction is None else memory_fraction
        fraction = check_number("memory_fraction", fraction, above=0.0, most=1.0)
        longest = model.target.max_length
        context = min(longest, DEFAULT_CONTEXT) if context is None else context
        context = check_int("context", context, least=2, most=longest)

        # Make the parts.
        self.model, self.context = model, context
        self.device, self.scheduler = assemble(
            model,
            drafter,
            accept,
            slots=slots,
            context=context,
            pages=pages,
            fraction=fraction,
            page_size=page_size,
            prefill_tokens=prefill_tokens,
            share=share,
        )
        self.stops = self.device.stops
        self._loop = Loop(self.device, self.scheduler, burst_seconds=burst_seconds)
        self._handles: dict[DeviceRequest, Handle] = {}
        self._weights, self._scoring = threading.Lock(), threading.Lock()
        self._counters = Counters(self.scheduler.depth)
        self._waiting = 0

        # Start the thread.
        self._calls: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="jspec engine", daemon=True)
        self._thread.start()

    # What users call, from any thread

    def submit(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 128,
        sampling: Sampling | None = None,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        seed: int = 0,
        logprobs: bool | int = False,
        priority: int = 0,
        salt: str = "",
    ) -> Handle:
        """Puts a request into the queue.

        Args:
          prompt: text or token ids.
          max_new_tokens, sampling, stop, ignore_eos, seed, logprobs: as in `jspec.generate`.
          priority: requests of a higher priority get slots first; among equals the earlier one.
          salt: requests share the pages of equal beginnings only if their salts are equal.

        Raises:
          ValueError, TypeError: invalid arguments, or a request that can never fit.
          QueueFull: `max_queue` requests wait, or the stop strings of those that are there leave no space for these.
          EngineError: the engine has failed or is closed.
        """
        options = GenerateOptions(
            drafter=None,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            stop=stop,
            ignore_eos=ignore_eos,
            seed=seed,
            logprobs=logprobs,
        )
        ids = self._encode_one(prompt)
        (handle,) = self._make([ids], options, [sampling], priority, salt)
        self._enqueue([handle], self.max_queue)
        return handle

    @overload
    def generate(  # pyright: ignore[reportOverlappingOverload]
        self, prompts: str | Sequence[int], *, seed: int = ..., progress: bool = ..., **options: Unpack[RequestKeywords]
    ) -> Generation: ...

    @overload
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        n: int,
        max_new_tokens: int | Sequence[int] = ...,
        sampling: Sampling | Sequence[Sampling | None] | None = ...,
        seed: int | Sequence[int] = ...,
        progress: bool = ...,
        **options: Unpack[CommonKeywords],
    ) -> Generations: ...

    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        max_new_tokens: int | Sequence[int] = ...,
        sampling: Sampling | Sequence[Sampling | None] | None = ...,
        seed: int | Sequence[int] = ...,
        progress: bool = ...,
        **options: Unpack[CommonKeywords],
    ) -> Generations: ...

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        max_new_tokens: int | Sequence[int] = 128,
        sampling: Sampling | Sequence[Sampling | None] | None = None,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        seed: int | Sequence[int] = 0,
        logprobs: bool | int = False,
        priority: int = 0,
        salt: str = "",
        n: int | None = None,
        progress: bool = False,
    ) -> Generation | Generations:
        """Continues any number of prompts and waits for all of them.

        Args:
          prompts: one prompt or a list of prompts, each as text or as token ids.
          max_new_tokens, sampling, stop, ignore_eos, seed, logprobs: as in `jspec.generate`.
          priority, salt: as in `submit`.
          n: samples of each prompt, which share its pages. The result has n items for the first prompt, then n for the
            next, and so on; item i has the seed `seed + i`. None: one sample, and for a single prompt no list.
          progress: whether to display a progress bar.

        Returns:
          A `Generation` for a single prompt without `n`, otherwise `Generations`.

        Raises:
          ValueError, TypeError: invalid arguments, before anything is generated.
          QueueFull: the stop strings of other requests leave no space for these.
          EngineError: the engine has failed or is closed.
        """
        options = GenerateOptions(
            drafter=None,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            stop=stop,
            ignore_eos=ignore_eos,
            seed=seed,
            logprobs=logprobs,
        )
        single, prompt_ids = encode_prompts(self.model, prompts)
        copies = 1 if n is None else check_int("n", n, least=1)
        options = repeat(options, len(prompt_ids), copies)
        repeated = [ids for ids in prompt_ids for _ in range(copies)]
        given = options.sampling
        each = list(given) if isinstance(given, Sequence) else [given] * len(repeated)
        began = time.monotonic()
        handles = self._make(repeated, options, each, priority, salt)
        self._enqueue(handles)
        try:
            with tqdm(total=len(handles), unit="prompt", disable=not progress) as bar:
                for handle in handles:
                    handle.result()
                    bar.update()
        except BaseException:
            for handle in handles:
                handle.cancel()
            raise
        items = [handle.generation() for handle in handles]
        if single and n is None:
            return items[0]
        return Generations(items, GenerationStats.total([x.stats for x in items], time.monotonic() - began))

    async def stream(self, prompt: Prompt, **options: Unpack[RequestKeywords]) -> AsyncIterator[Piece]:
        """The pieces of one request, for `async for`. Leaving the loop cancels the request."""
        handle = self.submit(prompt, **options)
        try:
            async for piece in handle:
                yield piece
        finally:
            handle.cancel()

    def score(self, prompt: Prompt, top_k: int = 0) -> Scores:
        """The log-probabilities of the tokens of one prompt, as `jspec.score` with the engine's weights.

        It takes no slot: the device reads the prompt in chunks, between bursts, with a cache of its own. One prompt is
        scored at a time; further calls wait.

        Raises:
          ValueError, TypeError: invalid arguments, a model that is split over devices, or a cache that does not fit in
            the memory that is left.
          EngineError: the engine has failed or is closed.
        """
        prompts = [self._encode_one(prompt)]
        refuse_split(self.model, "Engine.score")
        top_k, page_size = check_score(self.model, prompts, top_k, DEFAULT_PAGE_SIZE)
        with self._scoring:
            self._check_alive()
            model = dataclasses.replace(self.model, params=self.device.params)
            ((_, batch),) = split(model, prompts, top_k, page_size)
            while True:
                # An update waits meanwhile: whoever replaces weights may delete the old ones.
                with self._weights:
                    self._check_alive()
                    more = batch.read(self.device.params)
                if not more:
                    return batch.scores(model.tokenizer)[0]
                batch.collect()

    def warm_up(self, *, sampling: Sampling | None = None, logprobs: bool | int = False) -> None:
        """Compiles all programs for requests with these options, and runs each as often as it takes to be fast.

        Otherwise each of them is compiled when it is first needed, and requests wait meanwhile. A program depends on
        which sampling options are used, not on their values; stop strings may need others (`docs/engine.md`).

        sampling, logprobs: as in `submit`.

        Raises:
          ValueError, TypeError: invalid arguments.
          EngineError: requests are waiting or running, or the engine has failed or is closed.
        """
        options = GenerateOptions(drafter=None, max_new_tokens=1, sampling=sampling, logprobs=logprobs)
        (handle,) = self._make([[0]], options, [sampling], 0, "")
        done, refused = threading.Event(), threading.Event()

        def run() -> None:
            if self._handles:
                refused.set()
            else:
                # What is in the air of requests that have ended.
                while not self.scheduler.idle:
                    self._turn()
                self.device.warm_up(self.scheduler.shapes, handle.request)
            done.set()

        self._call(run)
        while not done.wait(1.0):
            self._check_alive()
        if refused.is_set():
            raise EngineError("warm_up: requests are waiting or running; call it before them")

    def update(self, params: Params) -> None:
        """Replaces the weights, such as those of a running trainer, between two bursts. Compiles nothing.

        Requests that are running continue with the new weights over the keys and values of the old ones; nothing that
        was cached with the old weights is found by later requests.

        params: weights of target and draft, of the structure, shapes and dtypes of `model.params`, and of its shardings
          if the model is split over devices.

        Raises:
          ValueError: another structure, shape, dtype or sharding, with the path of the leaf.
        """
        self.model.check_replacement(params)
        done = threading.Event()

        def replace() -> None:
            with self._weights:
                self.device.params = params
            self.scheduler.forget()
            done.set()

        self._call(replace)
        while not done.wait(1.0):
            self._check_alive()

    def metrics(self) -> Metrics:
        """Counters since the start, and what is there now."""
        scheduler, counters = self.scheduler, self._counters
        rounds, accepted = counters.rounds, counters.accepted_by_position
        return Metrics(
            running=scheduler.running,
            waiting=self._waiting,
            held=scheduler.held,
            slots=scheduler.slots,
            pages=scheduler.pages.count - 1,
            pages_used=scheduler.pages.count - 1 - scheduler.pages.available,
            snapshots=self.device.num_snapshots,
            snapshots_used=0 if scheduler.pages.snapshots is None else len(scheduler.pages.snapshots),
            prefix_queries=scheduler.pages.queries,
            prefix_hits=scheduler.pages.hits,
            prompt_tokens=counters.prompt_tokens,
            new_tokens=counters.new_tokens,
            requests_finished=dict(counters.finished),
            preemptions=scheduler.preemptions,
            rounds=rounds,
            device_rounds=self._loop.rounds,
            drafted=counters.drafted,
            accepted=sum(accepted),
            accepted_by_position=accepted,
            **counters.histograms(),
        )

    @property
    def alive(self) -> bool:
        """Whether it takes requests: it has neither failed nor been closed."""
        return self._error is None and not self._closing

    def close(self) -> None:
        """Cancels all requests and ends the engine's thread."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        drafter = type(self.device.parts["drafter"]).__name__
        return f"Engine({self.model.name!r}, {drafter}, {self.device.num_slots} slots, context {self.context})"

    def _encode_one(self, prompt: Prompt) -> list[int]:
        """The ids of a single prompt."""
        single, prompts = encode_prompts(self.model, prompt, "prompt")
        if not single:
            raise ValueError(f"prompt: is a list of {len(prompts)} prompts; must be a single one")
        return prompts[0]

    def _make(
        self,
        prompts: Sequence[list[int]],
        options: GenerateOptions,
        samplings: Sequence[Sampling | None],
        priority: int,
        salt: str,
    ) -> list[Handle]:
        """Requests that are not in the queue yet."""
        self._check_alive()
        requests = make_requests(self.device, self.scheduler, prompts, options, samplings, priority, salt)
        return [Handle(x, self.model.tokenizer, self._cancel, self.device.parts["drafter"]) for x in requests]

    def _enqueue(self, handles: Sequence[Handle], most: int | None = None) -> None:
        """Puts requests into the queue, all at once, if at most `most` wait then."""

        def submit() -> None:
            for handle in handles:
                self._handles[handle.request] = handle
                self.scheduler.submit(handle.request)

        with self._wake:
            if most is not None and self._waiting + len(handles) > most:
                for handle in handles:
                    self.device.forget(handle.request)
                raise QueueFull(f"max_queue={most}: as many requests wait already; try again later")
            self._waiting += len(handles)
            self._calls.append(submit)
            self._wake.notify()

    def _cancel(self, handle: Handle) -> None:
        def cancel() -> None:
            if not handle.done:
                self.scheduler.cancel(handle.request)
                self._end(handle)
                wake(handle.end())

        if not handle.done:
            self._call(cancel)

    def _call(self, function: Callable[[], None]) -> None:
        """Lets the engine's thread call a function before its next turn."""
        with self._wake:
            self._calls.append(function)
            self._wake.notify()

    def _check_alive(self) -> None:
        if self._error is not None:
            raise EngineError(f"the engine has failed: {self._error}") from self._error
        if self._closing:
            raise EngineError("the engine is closed")

    # The engine's thread

    def _run(self) -> None:
        try:
            while self._take_calls():
                self._turn()
        except BaseException as error:
            self._error = error
        finally:
            with self._wake:
                self._closing = True
            self._take_calls(wait=False)
            for handle in self._handles.values():
                wake(handle.end(self._error))
            self._handles.clear()

    def _take_calls(self, *, wait: bool = True) -> bool:
        """Does what other threads have asked for; waits for something to do. False: the engine is closing."""
        with self._wake:
            while wait and self.scheduler.idle and not self._calls and not self._closing:
                self._wake.wait()
            calls = list(self._calls)
            self._calls.clear()
        for call in calls:
            call()
        return not self._closing

    def _turn(self) -> None:
        """A turn of the loop; hands out what it brought."""
        admissions, results = self._loop.turn()
        now = time.monotonic()
        for admission in admissions:
            self._count_admission(admission.request, now)
        waiters = []
        for request, landing in results:
            handle = self._handles[request]
            self._count_tokens(handle, landing, now)
            waiters += handle.deliver(landing, now)
            # One turn may bring several reports of a request; `request` is already as the last one has it.
            if landing.finish_code != stopping.RUNNING:
                self._end(handle)
        wake(waiters)

    def _end(self, handle: Handle) -> None:
        """Forgets a request that has ended."""
        del self._handles[handle.request]
        self.device.forget(handle.request)
        self._counters.finished[FINISH_REASONS.get(handle.request.finish_code, "cancelled")] += 1
        self._counters.observe("end_to_end", time.monotonic() - handle.times.submitted)
        if handle.times.admitted is None:
            with self._wake:
                self._waiting -= 1

    def _count_admission(self, request: Request, now: float) -> None:
        assert isinstance(request, DeviceRequest)
        times = self._handles[request].times
        if times.admitted is None:
            times.admitted = now
            self._counters.prompt_tokens += len(request.prompt)
            self._counters.observe("queue_time", now - times.submitted)
            with self._wake:
                self._waiting -= 1

    def _count_tokens(self, handle: Handle, landing: Landing, now: float) -> None:
        counters, times, old = self._counters, handle.times, handle.counted
        counters.new_tokens += len(landing.tokens)
        counters.rounds += landing.rounds - old[0]
        drafted = drafted_tokens(self.device.parts["drafter"], landing.rounds, landing.branch_counts)
        counters.drafted += drafted - old[2]
        for index, count in enumerate(landing.accept_counts):
            counters.accept_counts[index] += count - old[1][index]
        handle.counted = landing.rounds, landing.accept_counts, drafted
        if not landing.tokens:
            return
        if times.last_token is None:
            counters.observe("time_to_first_token", now - times.submitted)
        else:
            counters.observe("inter_token", (now - times.last_token) / len(landing.tokens), len(landing.tokens))
