"""Serves a model over HTTP: completions and chat completions as OpenAI's clients ask for them."""

import contextlib
import dataclasses
import os
import sys
from collections.abc import Mapping

from jspec.bench.options import COUNT
from jspec.cli import common
from jspec.cli.processes import PROCESS_GROUP, ProcessOptions, is_first, patient, start_processes
from jspec.core import interrupt, package
from jspec.core.accept import RULES
from jspec.core.options import option, options_of
from jspec.core.sampling import Sampling
from jspec.engine.engine import Engine
from jspec.generation.options import EngineOptions
from jspec.loading.startup import freeze_objects, notify_if_slow
from jspec.runner.request import EngineError
from jspec.text.chat_reader import THINKING
from jspec.text.tool_calls import FORMATS

KEY_VARIABLE = "JSPEC_API_KEY"
_COMPILING = "jspec: loading and compiling (programs are kept, so that the next start is faster)"
_MAX_GRACE = 3600.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(EngineOptions, common.ModelOptions, ProcessOptions):
    """The options of `jspec serve`."""

    model: str = option(
        help="bundled:NAME, a Hugging Face directory, a .gguf file or a hub id", positional=True, metavar="MODEL"
    )
    drafter: str = option("auto", common.DRAFTER_HELP, choices=common.DRAFTERS)
    accept: str | None = option(None, common.ACCEPT_HELP, choices=tuple(RULES))
    data: int | None = option(None, common.GROUPS_HELP.format("serve requests on"), bounds=COUNT)
    max_queue: int = option(1024, "sequences that may wait for a slot; a request beyond them gets status 429", least=0)
    warm_up: str = option(
        "short",
        "programs to compile before the first request: those of a short prompt; usual: of many prompts, greedy and "
        "sampled; all: also with every other option, so that no request waits for one",
        choices=("short", "usual", "all"),
    )
    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 is every one")
    port: int = option(8000, "0: any free one", least=0, most=65535)
    name: str | None = option(None, "the model's name in requests (default: MODEL)")
    lora: tuple[str, ...] = option(
        (),
        "a LoRA adapter that requests choose as their model: its name, and its directory or hub id; can be repeated",
        repeated=True,
        metavar="NAME=DIR",
    )
    api_key: tuple[str, ...] = option(
        (),
        f"a key that requests must have; can be repeated (default: that in the environment variable {KEY_VARIABLE}, "
        "which other users cannot see; without a key everyone who reaches the port is served)",
        repeated=True,
        metavar="KEY",
    )
    guard_all: bool = option(False, "require a key for health, metrics, load and version, too")
    allowed_origin: tuple[str, ...] = option(
        (),
        "an origin whose pages may use the server, such as https://example.com, or * for all; can be repeated",
        repeated=True,
        metavar="ORIGIN",
    )
    ssl_certfile: str | None = option(None, "certificate for HTTPS", metavar="FILE")
    ssl_keyfile: str | None = option(None, "its private key (default: in the same file)", metavar="FILE")
    access_log: bool = option(True, "do not print a line for each request")
    max_prompt: int | None = option(None, "tokens of the longest prompt (default: as the context allows)", bounds=COUNT)
    max_output: int | None = option(None, "largest number of new tokens (default: as the context allows)", bounds=COUNT)
    max_sequences: int = option(256, "sequences of one request: prompts times n", bounds=COUNT)
    max_body: int = option(16 * 2**20, "size of the largest request", metavar="BYTES", least=1)
    tool_format: str | None = option(
        None, "how the model writes calls of tools (default: as its chat template tells)", choices=tuple(FORMATS)
    )
    thinking_format: str | None = option(
        None, "how the model writes its thinking (default: as its chat template tells)", choices=(*THINKING, "none")
    )
    generation_config: bool = option(
        True, "do not sample with the temperature, top_p, top_k, min_p and repetition penalty of generation_config.json"
    )
    ignore_unknown_fields: bool = option(False, "log unknown fields of requests, instead of an answer with an error")
    page: bool = option(True, "do not serve the page at / to chat with the model")
    grace: float = option(
        30.0, "time that running requests have to end after SIGTERM", metavar="SECONDS", least=0.0, most=_MAX_GRACE
    )

    def __post_init__(self):
        super().__post_init__()
        common.ModelOptions.__post_init__(self)
        names = {self.name or self.model}
        for adapter in self.lora:
            name, _, place = adapter.partition("=")
            if not (name and place):
                raise ValueError(f"--lora {adapter!r}: must be a name, = and a directory or hub id")
            if name in names:
                raise ValueError(f"--lora {adapter!r}: must have another name than the model and other adapters")
            names.add(name)


_ENGINE = tuple(options_of(EngineOptions))
_SERVER = (
    *("host", "port", "name", "api_key", "guard_all", "allowed_origin", "ssl_certfile", "ssl_keyfile", "access_log"),
    *("lora", "max_prompt", "max_output", "max_sequences", "max_body"),
    *("tool_format", "thinking_format", "generation_config", "ignore_unknown_fields", "page", "grace"),
)


GROUPS = {**common.SHAPE_GROUP, "engine": (*_ENGINE, "warm_up"), "server": _SERVER, **PROCESS_GROUP}


def run(options: Options) -> int:
    """Runs the command; returns its exit status."""
    _require_extra()
    from jspec.serve import access, openai, server
    from jspec.serve.app import Service

    # Everything about clients is checked before a model is loaded, which can take minutes.
    files = options.ssl_certfile, options.ssl_keyfile
    surface = server.Surface(options.allowed_origin, *files, access_log=options.access_log)
    keys = api_keys(options, os.environ)
    access.check_keys(keys)
    start_processes(options, split=options.tensor is not None or options.data is not None)
    with contextlib.ExitStack() as stack:
        bound = stack.enter_context(server.bind(options.host, options.port)) if is_first(options) else None
        with notify_if_slow(_COMPILING):
            model = common.load_model(options.drafter, options, option="MODEL")
            engine = Engine(
                model,
                drafter=common.make_drafter(options.drafter, options, model),
                accept=options.accept,
                adapters=dict(adapter.split("=", 1) for adapter in options.lora),
                **{name: getattr(options, name) for name in _ENGINE},
            )
        # Other processes follow the first one, which has the address.
        if bound is None:
            return _follow(engine)
        with engine:
            # Serve until a signal.
            limits = openai.Limits(
                engine.context,
                prompt=options.max_prompt,
                output=options.max_output,
                sequences=options.max_sequences,
                body=options.max_body,
                defaults=options.generation_config and model.sampling or Sampling(),
                ignore_unknown=options.ignore_unknown_fields,
            )
            service = Service(
                engine,
                name=options.name or options.model,
                limits=limits,
                api_keys=keys,
                guard_all=options.guard_all,
                tool_format=options.tool_format,
                thinking_format=options.thinking_format,
                has_page=options.page,
            )
            with notify_if_slow(_COMPILING):
                service.warm_up(options.warm_up)
            freeze_objects()
            running = server.make_server(service, bound, grace=options.grace, surface=surface)
            with interrupt.first_to(running.handle_exit):
                running.run(sockets=[bound])
    return interrupt.STATUS if running.interrupted else 0


def _require_extra() -> None:
    """Checks that the packages of the extra "serve" are installed."""
    try:
        import jspec.serve.app  # noqa: F401
    except ModuleNotFoundError as error:
        raise ValueError(f"jspec serve requires {error.name}: {package.install('serve')}") from None


def api_keys(options: Options, environment: Mapping[str, str]) -> tuple[str, ...]:
    """The keys of the options, or that of the environment, which is invisible to other users; empty is none."""
    key = environment.get(KEY_VARIABLE)
    return options.api_key or ((key,) if key else ())


def _follow(engine: Engine) -> int:
    """Waits until process 0 has closed its engine."""
    try:
        with patient():
            engine.close()
    except EngineError as error:
        print(f"jspec: {error}", file=sys.stderr)
        return 1
    return 0
