"""The engine: any number of requests over a fixed number of slots, with the loop on the device."""

import contextlib
import dataclasses
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import wait
from functools import partial
from pathlib import Path
from typing import TypeVar, Unpack, overload

from jspec.core.checks import check_int
from jspec.core.processes import agreement
from jspec.core.sampling import Sampling
from jspec.core.types import Params
from jspec.engine.adapters import Adapters, Adapting
from jspec.engine.assembly import assemble, make_requests
from jspec.engine.batch import run
from jspec.engine.group import Group, choose_group
from jspec.engine.handle import Handle
from jspec.engine.keywords import KeywordsOfOne, KeywordsOfSeveral, StreamKeywords
from jspec.engine.metrics import Metrics
from jspec.engine.versions import Versions
from jspec.generation.options import (
    DEFAULT_PAGE_SIZE,
    BatchKeywords,
    EngineKeywords,
    EngineOptions,
    RequestKeywords,
    RequestOptions,
    repeat,
    takes,
)
from jspec.generation.result import Generation, Generations, Piece
from jspec.generation.run import Prompt, check_model, encode_prompts
from jspec.generation.score import Chunk, Scores, TokenScores, check_score, split
from jspec.loading.model import Model
from jspec.runner import lockstep
from jspec.runner.device import Device, OneShape
from jspec.runner.request import EngineError, QueueFull, Request

T = TypeVar("T")

_STUCK_SECONDS = 5.0
"""How long `Engine.close` waits for a thread when another process may be gone."""


class Engine:
    """Generates for any number of requests at once: a free slot takes the next one (continuous batching).

    The tokens of a request are those of `jspec.generate` with the same options, whatever else the engine does. A thread
    of the engine talks to the device; all methods may be called from any thread.

    Over several groups of devices, `jspec.load(..., data=N)`, each group has slots, pages and a thread of its own. A
    request goes to the group with most of its prompt in the cache, unless the group is busier than another
    (docs/several-gpus.md).

        with jspec.Engine(model, slots=64) as engine:
            texts = engine.generate(prompts, max_new_tokens=256).text
            for piece in engine.submit("Once upon a time"):
                print(piece.text, end="")

    Where the devices belong to several processes, each of them makes the engine with the same arguments. Process 0 has
    the requests; in the others only `update` and `close` may be called, and `close` waits until process 0 has
    closed the engine. So the end of the `with` block waits as well, unless an error has ended it
    (docs/several-gpus.md).

        with jspec.Engine(model) as engine:
            if engine.leads:
                print(engine.generate(prompts).text)

    Args:
      model: from `jspec.load`.
      drafter, accept: as in `jspec.generate`, for all requests. accept None: "coupled" for sampling requests.
      slots: concurrent sequences of each group of devices.
      context: tokens of the longest request, prompt included. None: the model's context, at most 8192.
      pages: pages of the caches of each group. None: as many as all slots can use, or as `memory_fraction` allows.
      memory_fraction: fraction of the device's memory to use, weights included; it limits `pages` (if None)
        and snapshots. None: 0.9, or 0.75 on a CPU, whose memory other programs use as well.
      page_size: rows per cache page. Whole pages are what requests share.
      prefill_tokens: prompt tokens a group reads between two bursts while others generate.
      burst_ms: milliseconds of rounds between two reports to the host. None: 25, or 100 on a CPU.
      prefix_cache: whether requests share the pages of equal beginnings, and snapshots of what is not in pages: one per
        slot, or as many as fit into a tenth of the memory for pages.
      max_queue: largest number of waiting requests, of all groups together; None: any number.
      adapters: name -> directory or hub id of a LoRA adapter of peft, kept beside the weights.
      learn: how the draft learns from what the target verifies, `jspec.train.online.Learn`; None: it does not.
      shape: of all programs, for requests known in advance; None: programs for requests of any kind.

    Attributes:
      leads: whether requests may be submitted in this process.
      groups: one for each group of devices; none in a process other than the leader.
      params: the weights, of all groups together; those of the last `update`.
      adapters: those beside the weights.
      learning: what `learn` has begun, a `jspec.train.online.Learning`; None: the draft does not learn.

    Raises:
      ValueError, TypeError: invalid arguments, a model too large for the memory, or differences between processes.
      EngineError: another process cannot be reached.
    """

    @takes(EngineOptions)
    def __init__(
        self,
        model: Model,
        *,
        adapters: Mapping[str, str | Path] | None = None,
        shape: OneShape | None = None,
        **keywords: Unpack[EngineKeywords],
    ):
        placement = model.placement if isinstance(model, Model) else None
        with agreement(placement, lockstep.COMPARED) as compare:
            check_model(model)
            options = EngineOptions(**keywords).for_model(model)
            compare({**vars(options), "target": model.target, "draft": model.draft})
        assert options.context is not None and options.burst_ms is not None
        self.model, self.context, self._params = model, options.context, model.params
        if options.learn is not None and adapters:
            raise ValueError(f"learn={options.learn}: must be None with adapters")
        self.adapters = Adapters(model, adapters or {})
        self.learning = None if options.learn is None else options.learn.begin(model)
        self.max_queue = options.max_queue
        self._choosing, self._weights, self._scoring = threading.Lock(), threading.Lock(), threading.Lock()
        self._closing = False
        self._error: BaseException | None = None

        # Make the parts, of all groups for equal shares of the free memory.
        free = lockstep.least_free(placement)
        self._leader, self._follower = lockstep.join(placement)
        models = dataclasses.replace(model, params=self.adapters.over(model.params)).by_group()
        try:
            parts = [assemble(group_model, options, free=free, only=shape) for group_model in models]
        except BaseException as error:
            self._desert(error)
            raise
        self.groups: list[Group] = []
        if self._follower is None:
            make = partial(Group, burst_seconds=options.burst_ms / 1e3, versions=Versions(), fail=self._fail)
            self.groups = [make(group_model, *part) for group_model, part in zip(models, parts, strict=True)]
        self._start([device for device, _ in parts])

    def _start(self, devices: Sequence[Device]) -> None:
        """Starts the threads: of the groups, and of what connects several processes."""
        if self._follower is not None:
            runners = (device.runner for device in devices)
            self._follower.start({index: runner for index, runner in enumerate(runners) if runner.here})
        if self._leader is not None:
            for index, group in enumerate(self.groups):
                assert group.model.placement is not None
                group.device.runner.relay = partial(self._leader.call, index, group.model.placement)
            self._leader.start(self._fail)
        for group in self.groups:
            group.start(self.learning)

    # What users call, from any thread

    @takes(RequestOptions)
    def submit(
        self,
        prompt: Prompt,
        *,
        priority: int = 0,
        salt: str = "",
        adapter: str | None = None,
        **keywords: Unpack[RequestKeywords],
    ) -> Handle:
        """Puts a request into the queue.

        Args:
          prompt: text or token ids.
          max_new_tokens, sampling, stop, ignore_eos, seed, logprobs, support, speculation: as in `jspec.generate`.
          priority: requests of a lower priority get slots first, as in vLLM; among equals the earlier one.
          salt: requests share the pages of equal beginnings only if their salts are equal.
          adapter: the name of one of the engine's adapters; None: the weights alone.

        Raises:
          ValueError, TypeError: invalid arguments, or a request too large for the engine.
          QueueFull: `max_queue` requests wait, or the stop strings of others leave no space for these.
          EngineError: the engine has failed or is closed.
        """
        options = RequestOptions(**keywords)
        ids = self._encode_one(prompt, embeds=True)
        (handle,) = self.enqueue(self.make([ids], options, priority, salt, adapter), self.max_queue)
        return handle

    @overload
    def generate(  # pyright: ignore[reportOverlappingOverload]
        self, prompts: str | Sequence[int], **keywords: Unpack[KeywordsOfOne]
    ) -> Generation: ...

    @overload
    def generate(
        self, prompts: Prompt | Sequence[Prompt], *, n: int, **keywords: Unpack[KeywordsOfSeveral]
    ) -> Generations: ...

    @overload
    def generate(self, prompts: Sequence[Prompt], **keywords: Unpack[KeywordsOfSeveral]) -> Generations: ...

    @takes(RequestOptions)
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        n: int | None = None,
        priority: int = 0,
        salt: str = "",
        adapter: str | None = None,
        progress: bool = False,
        **keywords: Unpack[BatchKeywords],
    ) -> Generation | Generations:
        """Continues any number of prompts and waits for all of them. Those with the most new tokens start first.

        Args:
          prompts: one prompt or a list of prompts, each as text or as token ids.
          max_new_tokens, sampling, stop, ignore_eos, seed, logprobs, support, speculation: as in `jspec.generate`.
          priority, salt, adapter: as in `submit`.
          n: samples of each prompt, on shared pages. The result has n items for the first prompt, then n for the
            next, and so on; item i has the seed `(seed, i)`. None: one sample, and for a single prompt no list.
          progress: whether to display a progress bar.

        Returns:
          A `Generation` for a single prompt without `n`, otherwise `Generations`.

        Raises:
          ValueError, TypeError: invalid arguments, before anything is generated.
          QueueFull: the stop strings of other requests leave no space for these.
          EngineError: the engine has failed or is closed.
        """
        options = RequestOptions(**keywords)
        single, prompt_ids = encode_prompts(self.model, prompts, embeds=True)
        copies = 1 if n is None else check_int("n", n, least=1)
        options = repeat(options, len(prompt_ids), copies)
        repeated = [ids for ids in prompt_ids for _ in range(copies)]
        requests = self.make(repeated, options, priority, salt, adapter)
        generations = run(self.groups, self.enqueue, requests, progress=progress)
        return generations[0] if single and n is None else generations

    @takes(RequestOptions)
    async def stream(
        self, prompt: Prompt, *, priority: int = 0, salt: str = "", **keywords: Unpack[StreamKeywords]
    ) -> AsyncIterator[Piece]:
        """Streams the pieces of one request, for `async for`. Leaving the loop cancels the request.

        The arguments are those of `submit`.
        """
        handle = self.submit(prompt, priority=priority, salt=salt, **keywords)
        try:
            async for piece in handle:
                yield piece
        finally:
            handle.cancel()

    def score(self, prompt: Prompt, top_k: int = 0) -> Scores:
        """The log-probabilities of the tokens of one prompt, as `jspec.score` with the weights, without adapters.

        It takes no slot: the devices of one group read the prompt in chunks, between bursts, with a cache of its own.
        One prompt is scored at a time; further calls wait.

        Raises:
          ValueError, TypeError: invalid arguments, or a cache too large for the free memory.
          EngineError: the engine has failed or is closed.
        """
        self._check_leads()
        prompts = [self._encode_one(prompt)]
        top_k, page_size = check_score(self.model, prompts, top_k, DEFAULT_PAGE_SIZE)
        with self._scoring:
            self._check_alive()
            # Any group with a local device: its results need not be sent.
            group = next(group for group in self.groups if group.device.runner.here)
            model = dataclasses.replace(group.model, params=group.device.runner.params)
            ((_, batch),) = split(model, prompts, top_k, page_size)
            for chunk in batch.chunks():
                batch.collect(self._score(group, chunk))
            return batch.scores(self.model.tokenizer)[0]

    def warm_up(self, *, sampling: Sampling | None = None, logprobs: bool | int = False, support: int = 0) -> None:
        """Compiles all programs for requests with these options, and runs each as often as it takes to be fast.

        Otherwise each of them is compiled when it is first needed, and the request that needs it waits. A program
        depends on the set of sampling options in use, not on their values (`docs/engine.md`).

        sampling, logprobs, support: as in `submit`.

        Raises:
          ValueError, TypeError: invalid arguments.
          EngineError: requests are waiting or running, or the engine has failed or is closed.
        """
        options = RequestOptions(max_new_tokens=1, sampling=sampling, logprobs=logprobs, support=support)
        calls = []
        with contextlib.ExitStack() as after:
            for group, request in zip(self.groups, self.make([[0]] * len(self.groups), options), strict=True):
                group.device.hold(request)
                after.callback(group.device.forget, request)
                calls.append(partial(group.warm_up, request))
            warm = self._on_all(calls)
        if not all(warm):
            raise EngineError("warm_up: requests are waiting or running; call it before them")

    def update(self, params: Params) -> None:
        """Replaces the weights, such as those of a running trainer, between two bursts. Compiles nothing.

        Running requests continue with the new weights over the keys and values of the old ones; later requests find
        nothing cached with the old weights. Each group of devices takes the weights between two
        bursts of its own, and this waits for all of them. If there are several processes, each of them must call this.

        params: weights of target and draft, of the structure, shapes and dtypes of `model.params`, and of its shardings
          if the model is split over devices.

        Raises:
          ValueError: another structure, shape, dtype or sharding, with the path of the leaf.
          EngineError: the engine has failed or is closed.
        """
        self.model.check_replacement(params)
        with self._weights:  # A score waits meanwhile: whoever replaces weights may delete the old ones.
            self._replace(params)

    def update_adapter(self, name: str, source: Adapting) -> None:
        """Replaces an adapter as `update` does the weights. Compiles nothing.

        source: a directory, or the tensors of a running trainer by their names in the file of the adapter, whose
          options hold for them. The changed matrices must be among those of the engine's first adapters.

        Raises:
          CheckpointError, ValueError: an unknown name, other matrices or a larger rank than those, or as `Engine`.
          EngineError: the engine has failed or is closed.
        """
        with self._weights:
            self.adapters.replace(name, source)
            self._replace(self._params)

    def _replace(self, params: Params) -> None:
        """Replaces the weights, with the adapters beside them."""
        models = dataclasses.replace(self.model, params=self.adapters.over(params)).by_group()
        if self._follower is not None:
            self._follower.replace({index: group_model.params for index, group_model in enumerate(models)})
        else:
            calls = zip(self.groups, models, strict=True)
            self._on_all([partial(group.replace, group_model.params) for group, group_model in calls])
        self._params = params

    @property
    def params(self) -> Params:
        """The weights, of all groups together: those of the last `update`, with those of a draft that learns."""
        return self._params if self.learning is None else self.groups[0].device.runner.params

    def metrics(self) -> Metrics:
        """Counters since the start, and what is there now, of all groups of devices together.

        Raises:
          EngineError: this process does not lead.
        """
        self._check_leads()
        return Metrics.total_of([group.metrics() for group in self.groups])

    @property
    def leads(self) -> bool:
        """Whether requests may be submitted in this process: process 0 of several, or the only one."""
        return self._follower is None

    @property
    def alive(self) -> bool:
        """Whether it takes requests, or makes the calls of process 0: it has neither failed nor been closed."""
        if self._follower is not None:
            return not self._follower.over
        return self._error is None and not self._closing

    def close(self) -> None:
        """Cancels all requests and ends the engine's threads. In a process other than the leader: waits until process 0
        has closed the engine.

        Raises:
          EngineError: the engine has failed, in a process other than the leader.
        """
        if self._follower is not None:
            self._follower.wait()
            return
        self._closing = True
        for group in self.groups:
            group.stop()
        stuck = self._leader is not None and self._error is not None
        for group in self.groups:
            group.join(_STUCK_SECONDS if stuck else None)
        if self._leader is not None:
            self._leader.close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._follower is not None and error is not None:
            self._desert(error)
        else:
            self.close()

    def __repr__(self) -> str:
        if not self.groups:
            return f"Engine({self.model.name!r}, makes the calls of process 0)"
        device, count = self.groups[0].device, len(self.groups)
        drafter = type(device.method.drafter).__name__
        slots = f"{device.sizes.slots} slots" if count == 1 else f"{count} groups of {device.sizes.slots} slots"
        return f"Engine({self.model.name!r}, {drafter}, {slots}, context {self.context})"

    def _encode_one(self, prompt: Prompt, *, embeds: bool = False) -> Sequence[int]:
        """The ids of a single prompt. embeds: whether it may hold embeddings."""
        single, prompts = encode_prompts(self.model, prompt, "prompt", embeds=embeds)
        if not single:
            raise ValueError(f"prompt: is a list of {len(prompts)} prompts; must be a single one")
        return prompts[0]

    def make(
        self,
        prompts: Sequence[Sequence[int]],
        options: RequestOptions,
        priority: int = 0,
        salt: str = "",
        adapter: str | None = None,
    ) -> list[Request]:
        """Makes requests for any group."""
        self._check_alive()
        any_group = self.groups[0]
        requests = make_requests(any_group.device, any_group.scheduler, prompts, options, priority, salt)
        self.adapters.assign(requests, adapter)
        return requests

    def enqueue(self, requests: Sequence[Request], most: int | None = None) -> list[Handle]:
        """Puts requests of `make` into the queues of groups, all or none, if at most `most` wait then.

        Raises:
          ValueError, QueueFull: more would wait, or as `Device.hold`; no request is in a queue then.
        """
        with contextlib.ExitStack() as undo:
            with self._choosing:
                if most is not None and sum(group.waiting for group in self.groups) + len(requests) > most:
                    raise QueueFull(f"max_queue={most}: as many requests wait already; try again later")
                groups = [choose_group(self.groups, request) for request in requests]
            for group in groups:
                undo.callback(group.withdraw)
            for group, request in zip(groups, requests, strict=True):
                group.device.hold(request)
                undo.callback(group.device.forget, request)
            undo.pop_all()
        handles: dict[Request, Handle] = {}
        for group in self.groups:
            if accepted := [request for other, request in zip(groups, requests, strict=True) if other is group]:
                handles.update(zip(accepted, group.submit(accepted), strict=True))
        return [handles[request] for request in requests]

    def _on_all(self, calls: Sequence[Callable[[], T]], reader: Group | None = None) -> list[T]:
        """The result of a call in the thread of each group (or of `reader`, without effects), between two bursts.

        Raises:
          EngineError: the engine has failed or is closed.
        """
        self._check_alive()
        groups = zip(self.groups if reader is None else [reader], calls, strict=True)
        futures = [group.ask(call, reader is None) for group, call in groups]
        while wait(futures, timeout=1.0).not_done:
            self._check_alive()
        return [future.result() for future in futures]

    def _score(self, group: Group, chunk: Chunk) -> TokenScores:
        """Dispatches a chunk of a score, after the running burst. An error concerns the caller alone."""
        call = partial(group.device.score, chunk)
        if self.model.placement is not None:
            # Several devices must get all programs in one order, so from one thread.
            return self._on_all([call], reader=group)[0]
        with self._weights:  # An update waits meanwhile.
            self._check_alive()
            return call()

    def _fail(self, error: BaseException) -> None:
        """Ends the engine, and all its requests with an error of one group or of another process."""
        with self._choosing:
            self._error = self._error or error
        if self._leader is not None:
            self._leader.abort(self._error)
        for group in self.groups:
            group.stop(self._error)

    def _desert(self, error: BaseException) -> None:
        """Ends the engine in all processes because of an error in this one."""
        if self._leader is not None:
            self._leader.abort(error)
        if self._follower is not None:
            self._follower.leave(error)

    def _check_leads(self) -> None:
        if self._follower is not None:
            raise EngineError(
                f"process {self._follower.index} makes the calls of process 0, which has the requests: call this "
                "there, where engine.leads is True"
            )

    def _check_alive(self) -> None:
        self._check_leads()
        if self._error is not None:
            raise EngineError(f"the engine has failed: {self._error}") from self._error
        if self._closing:
            raise EngineError("the engine is closed")
