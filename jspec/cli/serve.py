"""`jspec serve`: a model over HTTP, with the API of OpenAI."""

import argparse
import contextlib
import os
import sys

from jspec.cli.common import (
    MAX_TOKENS,
    Commands,
    add_accept,
    add_data,
    add_drafter,
    add_shape,
    add_tensor,
    add_weights,
    load_model,
    make_drafter,
)
from jspec.cli.processes import add_processes, is_first, patient, start_processes
from jspec.core import package
from jspec.core.checks import check_number
from jspec.engine.arguments import integer, number
from jspec.engine.engine import Engine
from jspec.engine.handle import EngineError
from jspec.engine.options import DEFAULT_PAGE_SIZE
from jspec.engine.startup import notify_if_slow

KEY_VARIABLE = "JSPEC_API_KEY"
_COMPILING = "jspec: loading and compiling (programs are kept, so that the next start is faster)"
_MAX_GRACE = 3600.0


def add_command(commands: Commands) -> None:
    """Adds the command and its options."""
    parser = commands.add_parser(
        "serve",
        help="serve a model over HTTP, with the API of OpenAI",
        description="Serves a model over HTTP: completions and chat completions as OpenAI's clients ask for them.",
    )
    parser.add_argument("model", metavar="MODEL", help="bundled:NAME, a Hugging Face directory or a hub id")
    add_weights(parser, "MODEL")
    add_tensor(parser)
    add_data(parser, "serve requests on N groups of devices, each with")
    add_drafter(parser)
    add_accept(parser)
    add_shape(parser)
    _add_engine(parser)
    _add_server(parser)
    add_processes(parser)
    parser.set_defaults(run=_run)


def _add_engine(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--slots",
        type=integer(1),
        default=64,
        metavar="N",
        help="sequences that are generated at the same time, by each group of devices (default: %(default)s)",
    )
    group.add_argument(
        "--context",
        type=integer(2),
        metavar="N",
        help="tokens of the longest sequence, prompt included (default: the model's, at most 8192)",
    )
    group.add_argument(
        "--pages", type=integer(2), metavar="N", help="cache pages of each group (default: as many as fit)"
    )
    group.add_argument(
        "--memory-fraction",
        type=number,
        metavar="X",
        help="fraction of the device's memory that may be in use, weights included (default: 0.9; on a CPU 0.75)",
    )
    group.add_argument(
        "--page-size",
        type=integer(1),
        default=DEFAULT_PAGE_SIZE,
        metavar="ROWS",
        help="rows per cache page (default: %(default)s)",
    )
    group.add_argument(
        "--prefill-tokens",
        type=integer(1),
        default=1024,
        metavar="N",
        help="prompt tokens that are read between two bursts of rounds (default: %(default)s)",
    )
    group.add_argument(
        "--burst-ms",
        type=number,
        default=25.0,
        metavar="MS",
        help="time that rounds run before new tokens are sent (default: %(default)s)",
    )
    group.add_argument(
        "--no-prefix-cache",
        dest="prefix_cache",
        action="store_false",
        help="do not share the cache pages of equal beginnings",
    )
    group.add_argument(
        "--max-queue",
        type=integer(0),
        default=1024,
        metavar="N",
        help="sequences that may wait for a slot; a request beyond them gets status 429 (default: %(default)s)",
    )
    group.add_argument(
        "--warm-up",
        action="store_true",
        help="compile all programs before the first request, not when they are first needed",
    )


def _add_server(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 is every one (default: %(default)s)"
    )
    group.add_argument(
        "--port", type=integer(0, 65535), default=8000, metavar="N", help="0: any free one (default: %(default)s)"
    )
    group.add_argument("--name", help="the model's name in requests (default: MODEL)")
    group.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help="a key that requests must have; can be repeated (default: that in the environment variable "
        f"{KEY_VARIABLE}, which other users cannot see; without a key everyone who reaches the port is served)",
    )
    group.add_argument(
        "--max-prompt",
        type=integer(1, MAX_TOKENS),
        metavar="N",
        help="tokens of the longest prompt (default: as the context allows)",
    )
    group.add_argument(
        "--max-output",
        type=integer(1, MAX_TOKENS),
        metavar="N",
        help="largest number of new tokens (default: as the context allows)",
    )
    group.add_argument(
        "--max-sequences",
        type=integer(1, MAX_TOKENS),
        default=256,
        metavar="N",
        help="sequences of one request: prompts times n (default: %(default)s)",
    )
    group.add_argument(
        "--max-body",
        type=integer(1),
        default=16 * 2**20,
        metavar="BYTES",
        help="size of the largest request (default: %(default)s)",
    )
    group.add_argument(
        "--grace",
        type=number,
        default=30.0,
        metavar="SECONDS",
        help="time that running requests have to end after SIGTERM (default: %(default)s)",
    )


def _run(arguments: argparse.Namespace) -> int:
    try:
        from jspec.serve import openai, server  # require the extra "serve"
        from jspec.serve.app import Service
    except ModuleNotFoundError as error:
        raise ValueError(f"jspec serve requires {error.name}: {package.install('serve')}") from None
    environment = os.environ.get(KEY_VARIABLE)
    keys = arguments.api_key or ([] if environment is None else [environment])
    grace = check_number("grace", arguments.grace, least=0.0, most=_MAX_GRACE)
    start_processes(arguments)
    with contextlib.ExitStack() as stack:
        # The address is checked before a model is loaded, which can take minutes.
        bound = stack.enter_context(server.bind(arguments.host, arguments.port)) if is_first(arguments) else None
        with notify_if_slow(_COMPILING):
            model = load_model(arguments.drafter, arguments, option="MODEL")
            engine = Engine(
                model,
                drafter=make_drafter(arguments.drafter, arguments, model),
                accept=arguments.accept,
                slots=arguments.slots,
                context=arguments.context,
                pages=arguments.pages,
                memory_fraction=arguments.memory_fraction,
                page_size=arguments.page_size,
                prefill_tokens=arguments.prefill_tokens,
                burst_ms=arguments.burst_ms,
                prefix_cache=arguments.prefix_cache,
                max_queue=arguments.max_queue,
            )
        if bound is None:
            return _follow(engine)
        with engine:
            limits = openai.Limits(
                engine.context,
                prompt=arguments.max_prompt,
                output=arguments.max_output,
                sequences=arguments.max_sequences,
                body=arguments.max_body,
            )
            name = arguments.name or arguments.model
            service = Service(engine, name=name, limits=limits, api_keys=keys)
            with notify_if_slow(_COMPILING):
                service.warm_up(everything=arguments.warm_up)
            server.make_server(service, bound, grace=grace).run(sockets=[bound])
    return 0


def _follow(engine: Engine) -> int:
    """Waits until process 0 has closed its engine."""
    try:
        with patient():
            engine.close()
    except EngineError as error:
        print(f"jspec: {error}", file=sys.stderr)
        return 1
    return 0
