"""The application: routes, authentication, and requests on their way through the engine."""

import asyncio
import contextlib
import dataclasses
import functools
import hashlib
import hmac
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import jax
import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from jspec.core import package
from jspec.core.sampling import Sampling
from jspec.engine.engine import Engine
from jspec.engine.handle import Handle
from jspec.generation.options import MAX_SEED, MAX_TOP_LOGPROBS, RequestOptions
from jspec.generation.result import GenerationStats
from jspec.generation.score import Scores
from jspec.serve import metrics, openai, page, prompts
from jspec.serve.access import POLLED, check_keys
from jspec.serve.answer import Answer, TokenNames, stops_of
from jspec.serve.anthropic import Messages
from jspec.serve.errors import CLIENT_LEFT, answer_error, engine_errors, json_answer, queue_is_full, shutting_down
from jspec.serve.fields import ApiError
from jspec.serve.openai import Call, Limits
from jspec.serve.responses import Responses
from jspec.serve.stream import EventStream, merge, read_body, while_connected
from jspec.serve.tools import Dialect
from jspec.serve.translation import Api, Translation, naming_fields_of
from jspec.serve.work import Result, Work
from jspec.text.grammar import Grammar
from jspec.text.tokenizer import Tokenizer

Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]
BODY_SECONDS = 60.0
"""How long the body of a request may take to arrive."""
_MOST_BODIES = 4
"""Bodies of the greatest size that are received or read at once; more of smaller ones. Others wait."""
_ROOM_SECONDS = 20.0
"""How long they wait."""
_MOST_OBJECTS = 2**20
"""Objects and lists of a body. Decoding is one call, and nothing else runs meanwhile."""


class Service:
    """An engine for OpenAI's clients.

    Args:
      name: the model's, as clients name it.
      limits: what one request may ask for.
      api_keys: a request must have one of them. Empty: no authentication.
      guard_all: also a request for health, metrics, load and version.
      tool_format, thinking_format: names of formats, see `jspec.text.tool_calls` and `jspec.text.chat_reader`. None:
        those that the chat template is known by.
      has_page: whether `/` is a page to chat with the model.

    Raises:
      ValueError: the model has no tokenizer, a key is empty, or a format is unknown.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        name: str,
        limits: Limits,
        api_keys: Sequence[str] = (),
        guard_all: bool = False,
        tool_format: str | None = None,
        thinking_format: str | None = None,
        has_page: bool = True,
    ):
        # A server needs a tokenizer, and keys without spaces.
        if engine.model.tokenizer is None:
            raise ValueError(f"model={engine.model.name!r}: has no tokenizer, which a server requires")
        self.tokenizer: Tokenizer = engine.model.tokenizer
        self._engine, self.name, self._limits = engine, name, limits
        if name in engine.adapters.names:
            raise ValueError(f"name={name!r}: is that of an adapter; must be another one")
        check_keys(api_keys)
        self._keys = [key.encode() for key in api_keys]
        self.has_keys, self._guards_all, self.has_page = bool(api_keys), guard_all, has_page
        self._dialect = Dialect.of(self.tokenizer, tool_format, thinking_format)
        # What answers say about tokens and the model.
        self._names, self._created = TokenNames(self.tokenizer), int(time.time())
        identity = f"{package.VERSION} {jax.__version__} {engine!r}"
        self._fingerprint = f"fp_{hashlib.blake2b(identity.encode(), digest_size=5).hexdigest()}"
        self._vocab_size = engine.model.target.vocab_size
        # Requests in flight; `stop` cancels them.
        self._live: set[Handle] = set()
        # Threads before a request reaches the engine, and one for scores, which wait there.
        self._work = Work(_MOST_BODIES * limits.body, _ROOM_SECONDS)
        self._scorer, self._scored = ThreadPoolExecutor(1, "jspec score"), 0
        self._stopped = False

    def app(self) -> Starlette:
        """The ASGI application."""
        # Endpoints: of values, of pages of text, and of bodies.
        values: dict[str, Callable[[Request], object]] = {
            **dict.fromkeys(("/health", "/ping"), self._health),
            "/load": lambda request: {"server_load": self.running},
            "/version": lambda request: {"version": package.VERSION},
            "/v1/models": lambda request: {"object": "list", "data": list(map(self._card, self._served))},
            "/v1/models/{name:path}": lambda request: self._card(request.path_params["name"]),
            "/tokenizer_info": self._tokenizer_info,
        }
        gets: dict[str, Endpoint] = {path: functools.partial(_give, value) for path, value in values.items()}
        gets["/metrics"] = self._metrics
        posts: dict[str, Endpoint] = {
            "/v1/completions": functools.partial(self._complete, openai.read_completion, None),
            "/v1/chat/completions": functools.partial(self._complete, openai.read_chat, None),
            "/v1/responses": functools.partial(self._complete, openai.read_chat, Responses),
            "/v1/messages": functools.partial(self._complete, openai.read_chat, Messages),
            "/v1/messages/count_tokens": functools.partial(self._convert, self._count_tokens),
            "/tokenize": functools.partial(self._convert, self._tokenize),
            "/detokenize": functools.partial(self._convert, self._detokenize),
        }
        unguarded = () if self._guards_all else POLLED
        if self.has_page:
            gets["/"], unguarded = page.endpoint(), ("/", *unguarded)
        # Routes, and errors in OpenAI's format.
        app = Starlette(
            routes=[
                Route(path, endpoint if path in unguarded else self._guarded(endpoint), methods=[method])
                for method, endpoints in (("GET", gets), ("POST", posts))
                for path, endpoint in endpoints.items()
            ],
            exception_handlers=dict.fromkeys((ApiError, HTTPException, ClientDisconnect, Exception), answer_error),
        )
        app.router.redirect_slashes = False  # A redirected POST would be sent again to what the client calls us.
        return app

    def warm_up(self, programs: str = "short") -> None:
        """Compiles programs, and runs each as often as it takes to be fast.

        programs: "short": greedy decoding and sampling of a short prompt; "usual": of many prompts of all lengths, with
          a temperature, top_p, top_k and min_p; "all": also those with every other option.
        """
        # Reserve the ignore_eos stop set now, so its first request does not recompile.
        groups, count = self._engine.groups, min(16, self._engine.context - 1)
        for group in groups:
            group.device.stops.insert(((), True))
        if programs == "all":
            # These programs run every request, so none waits for its own.
            sampling = Sampling(presence_penalty=1.0, logit_bias={0: 1.0}, grammar=Grammar.regex("a?"))
            self._engine.warm_up(sampling=sampling, logprobs=MAX_TOP_LOGPROBS)
        for sampling in (None, Sampling()):
            if programs != "short":
                self._engine.warm_up(sampling=sampling)
            # No group knows the prompt, so each of them gets one.
            self._engine.generate([[0]] * len(groups), max_new_tokens=count, sampling=sampling)

    @property
    def running(self) -> int:
        """Sequences of requests that have no whole answer."""
        return len(self._live)

    def stop(self) -> None:
        """Cancels what is running and refuses what comes; answers end with an error."""
        self._stopped = True
        for handle in list(self._live):
            handle.cancel()

    def _guarded(self, endpoint: Endpoint) -> Endpoint:
        """`endpoint` for requests with a valid key."""

        async def guarded(request: Request) -> Response:
            # The key, as OpenAI's clients send it.
            kind, _, key = request.headers.get("authorization", "").partition(" ")
            key = key if kind.lower() == "bearer" else request.headers.get("x-api-key", "")  # Anthropic's
            token = key.strip().encode("latin-1", "replace")
            # All keys are compared, each in constant time.
            if self._keys and not any([hmac.compare_digest(token, known) for known in self._keys]):
                raise ApiError(
                    "authorization: must be Bearer and a valid API key (or x-api-key: the key)",
                    status=401,
                    code="invalid_api_key",
                    headers={"www-authenticate": "Bearer"},
                )
            return await endpoint(request)

        return guarded

    def _health(self, request: Request) -> object:
        # A balancer then sends requests elsewhere.
        if not self._engine.alive:
            raise ApiError("the engine has failed; restart the server", status=503, code="engine_error")
        if self._stopped:
            raise shutting_down()
        return {"status": "ok"}

    async def _metrics(self, request: Request) -> Response:
        text = metrics.render(self._engine.metrics(), self.name)
        return Response(text, media_type=metrics.MEDIA_TYPE)

    @property
    def _served(self) -> tuple[str, ...]:
        """The names of the model and of its adapters."""
        return self.name, *self._engine.adapters.names

    def _card(self, name: str) -> dict[str, object]:
        self._check_model(name)
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "jspec",
            "max_model_len": self._limits.context,
            "draft_depth": len(self._engine.metrics().accepted_by_position),
            **({} if name == self.name else {"parent": self.name}),
        }

    def _check_model(self, name: object) -> None:
        if name is not None and name not in self._served:
            names = ", ".join(map(repr, self._served))
            message = f"model={str(name)[:80]!r}: not served here; must be {names}"
            raise ApiError(message, param="model", status=404, code="model_not_found")

    async def _read(self, request: Request, function: Callable[[dict[str, Any]], Result]) -> Result:
        """The result of a function of the JSON object of a request, in a thread: large ones take a while."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            # Also keeps pages of other sites from posting: a browser asks first before it sends JSON.
            message = f"content-type={kind[:80]!r}: must be application/json"
            raise ApiError(message, param="content-type", status=415)
        # The body, bounded in size and time.
        with self._work.receiving() as take:
            raw = await read_body(request, self._limits.body, BODY_SECONDS, take)
            return await self._work.read(len(raw), lambda: function(self._parse(raw)))

    def _parse(self, raw: bytearray) -> dict[str, Any]:
        """The JSON object of a body, for the served model; bounded in depth and in the number of objects."""
        # Refuse before the call that decodes.
        if raw.count(b"[") + raw.count(b"{") > _MOST_OBJECTS:
            raise ApiError(f"body: must have at most {_MOST_OBJECTS} objects and lists", code="invalid_json")
        try:
            body = msgspec.json.decode(raw.removeprefix(b"\xef\xbb\xbf"))  # Windows writes this mark.
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ApiError(f"body: must be valid JSON ({error})", code="invalid_json") from None
        except RecursionError:
            raise ApiError("body: nested too deeply", code="invalid_json") from None
        if not isinstance(body, dict):
            raise ApiError("body: must be a JSON object", code="invalid_json")
        self._check_model(body.get("model"))
        return body

    async def _convert(self, function: Callable[[dict[str, Any]], object], request: Request) -> Response:
        """The answer with what a function makes of a body."""
        return json_answer(await self._read(request, function))

    def _count_tokens(self, body: dict[str, Any]) -> object:
        _, (ids,), _ = self._prompts(openai.read_chat, functools.partial(Messages, counts=True), body)
        return {"input_tokens": len(ids)}

    def _tokenize(self, body: dict[str, Any]) -> object:
        fields = openai.read_tokenize(body, vocab_size=self._vocab_size, limits=self._limits)
        most = self._limits.context
        # A text or a chat.
        if (messages := fields["messages"]) is None:
            prompts.check_length("prompt", self.tokenizer, fields["prompt"], most)
            ids = self.tokenizer.encode(fields["prompt"], special=fields["add_special_tokens"])
        else:
            template, messages = openai.make_template(fields), self._dialect.spelled(messages)
            ids = prompts.chat_ids(self.tokenizer, messages, template, most)
        # The ids, and how they are written.
        strings = [self._names.text(i) for i in ids] if fields["return_token_strs"] else None
        return {"count": len(ids), "max_model_len": most, "tokens": ids, "token_strs": strings}

    def _detokenize(self, body: dict[str, Any]) -> object:
        ids = openai.read_detokenize(body, vocab_size=self._vocab_size, limits=self._limits)
        return {"prompt": self.tokenizer.decode(ids)}

    def _tokenizer_info(self, request: Request) -> object:
        # Roles that the tokenizer has not are null.
        roles = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token")) | dict(self.tokenizer.special_roles)
        return {**roles, "chat_template": self.tokenizer.templates.get("default")}

    async def _complete(self, read: Callable[..., Call], api: Api | None, request: Request) -> Response:
        call, ids, translation = await self._read(request, functools.partial(self._prompts, read, api))
        scored = [call.logprobs if call.echo else None, call.prompt_logprobs]
        most = [count for count in scored if count is not None]
        with contextlib.ExitStack() as stack:
            # Refuse a score before any sequence is submitted.
            stack.enter_context(self._scoring(len(ids) if most else 0))
            # The sequences run from here on; leaving the context cancels them.
            with naming_fields_of(translation):
                handles = await self._submit(call, ids)
            stack.enter_context(self._running(handles))
            # The text before the new tokens of each choice.
            texts = ["" for _ in ids]
            if call.echo:
                texts = [text if isinstance(text, str) else self.tokenizer.decode(list(text)) for text in call.prompts]
            score = functools.partial(self._score, top_k=max(most)) if most else None
            request.scope["jspec.tokens"] = lambda: (sum(map(len, ids)), answer.new_tokens)
            name = call.adapter or self.name
            answer = Answer(call, name, self._names, ids, texts, self._dialect, score, self._fingerprint)

            def results() -> list[tuple[GenerationStats, int]]:
                return [(handle.result(timeout=10).stats, handle.cached_tokens) for handle in handles]

            # Chunks, or the whole answer unless the client leaves.
            if translation is not None:
                chunks = answer.chunks(merge(handles), results)
                if translation.stream:
                    return EventStream(translation.events(chunks), stack.pop_all(), named=True)
                whole = await while_connected(request.receive, translation.whole(chunks))
            elif call.stream:
                return EventStream(answer.chunks(merge(handles), results), stack.pop_all())
            else:
                whole = await while_connected(request.receive, answer.whole(merge(handles), results))
        return Response(status_code=CLIENT_LEFT) if whole is None else json_answer(whole)

    def _prompts(
        self, read: Callable[..., Call], api: Api | None, body: dict[str, Any]
    ) -> tuple[Call, Sequence[Sequence[int]], Translation | None]:
        """A checked request, the ids of its prompts, and the translation of another API."""
        translation = None if api is None else api(body)
        with naming_fields_of(translation):
            chat = body if translation is None else translation.chat
            call = read(chat, vocab_size=self._vocab_size, limits=self._limits)
            if (name := body.get("model")) in self._engine.adapters.names:
                call = dataclasses.replace(call, adapter=name)
                if call.echo and call.logprobs is not None or call.prompt_logprobs is not None:
                    message = f"model={name!r}: prompts have no log-probabilities with an adapter yet; omit them"
                    raise ApiError(message, param="model")
            if call.tools is not None:
                self._dialect.check(call.tools)
            if call.messages is not None:
                call = dataclasses.replace(call, messages=self._dialect.spelled(call.messages))
            return call, prompts.encode(self.tokenizer, call, self._limits), translation

    async def _submit(self, call: Call, ids: Sequence[Sequence[int]]) -> list[Handle]:
        """A handle for each sequence. Runs in a thread, as a grammar may take seconds."""
        if self._stopped:
            raise shutting_down()
        pool = "grammar" if call.is_constrained else "short"
        work = asyncio.ensure_future(self._work.run(pool, functools.partial(self._submit_all, call, ids)))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            work.add_done_callback(lambda done: done.exception() or _cancel(done.result()))
            raise

    def _submit_all(self, call: Call, ids: Sequence[Sequence[int]]) -> list[Handle]:
        # Validate everything before the first sequence is submitted.
        limits = [prompts.max_new_tokens(call, self._limits, len(prompt)) for prompt in ids]
        if not any(limits):
            return []
        seed = secrets.randbelow(MAX_SEED + 1) if call.seed is None else call.seed
        end = "" if call.messages is None else self._dialect.prompt_end(self.tokenizer, ids[0])
        sampling = openai.constrained(call, self._dialect, end)
        # Submit all samples or none.
        with engine_errors():
            options = RequestOptions(
                max_new_tokens=[limit for limit in limits for _ in range(call.n)],
                sampling=sampling,
                stop=stops_of(call, self._dialect),
                ignore_eos=call.ignore_eos,
                seed=seed,
                logprobs=False if call.logprobs is None else call.logprobs or True,
                speculation=call.speculation,
            )
            repeated = [prompt for prompt in ids for _ in range(call.n)]
            requests = self._engine.make(repeated, options, call.priority, call.cache_salt, call.adapter)
            return self._engine.enqueue(requests, self._engine.max_queue)

    async def _score(self, prompt: Sequence[int], top_k: int) -> Scores:
        """The log-probabilities of a prompt, in order of arrival."""

        # Runs in the scoring thread.
        def score() -> Scores:
            if self._stopped:
                raise shutting_down()
            with engine_errors():
                return self._engine.score(prompt, top_k)

        return await asyncio.get_running_loop().run_in_executor(self._scorer, score)

    @contextlib.contextmanager
    def _scoring(self, count: int) -> Iterator[None]:
        """Counts prompts while they are scored; refuses them where too many wait."""
        most = self._engine.max_queue
        if count and most is not None and self._scored + count > most:
            raise queue_is_full(f"max_queue={most}: as many prompts wait already; try again later")
        self._scored += count
        try:
            yield
        finally:
            self._scored -= count

    @contextlib.contextmanager
    def _running(self, handles: Sequence[Handle]) -> Iterator[None]:
        """Cancels the unfinished sequences when the answer ends."""
        self._live.update(handles)
        try:
            if self._stopped:
                self.stop()
            yield
        finally:
            _cancel(handles)
            self._live.difference_update(handles)


async def _give(value: Callable[[Request], object], request: Request) -> Response:
    return json_answer(value(request))


def _cancel(handles: Sequence[Handle]) -> None:
    for handle in handles:
        handle.cancel()
