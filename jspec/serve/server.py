"""The server process: bind a socket, run uvicorn, and shut down gracefully."""

import asyncio
import dataclasses
import ipaddress
import math
import signal
import socket
import ssl
import sys
from collections.abc import Sequence
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from jspec.serve.access import Access, allow_origins, check_origins
from jspec.serve.app import Service
from jspec.serve.connection import Connection

_AFTER_GRACE_SECONDS = 5.0
"""How long answers with an error may take after requests have been cancelled."""
CLIENT_SECONDS = 60.0
"""Time until a client who takes nothing of its answer is disconnected, where the system can do so (Linux)."""


def bind(host: str, port: int) -> socket.socket:
    """A socket for `serve`, bound before a model is loaded; ValueError if the address is unknown or in use."""
    # Resolve the host.
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise ValueError(f"host={host!r}: must be an address or a name of this machine ({error})") from None
    # Listen; time out on vanished clients.
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # inherited by the connections
            bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * CLIENT_SECONDS))
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise ValueError(f"port={port}: cannot listen on {host} ({error.strerror})") from None
    return bound


@dataclasses.dataclass(frozen=True)
class Surface:
    """How a server meets its clients; ValueError for an invalid origin, or a file that cannot be read.

    origins: of pages of other sites with access, "*": of all.
    certfile, keyfile: TLS, as PEM files; None: no TLS, or the key is beside the certificate.
    access_log: whether to print a line for each request.
    """

    origins: Sequence[str] = ()
    certfile: str | None = None
    keyfile: str | None = None
    access_log: bool = False

    def __post_init__(self):
        # Checked here, because uvicorn reads the files only after a model is loaded.
        check_origins(self.origins)
        if self.keyfile is not None and self.certfile is None:
            raise ValueError(f"ssl_keyfile={self.keyfile!r}: requires ssl_certfile")
        if self.certfile is not None:
            try:
                ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(self.certfile, self.keyfile)
            except OSError as error:  # of both files, and of TLS
                raise ValueError(
                    f"ssl_certfile={self.certfile!r}: must be a certificate with its key ({error})"
                ) from None


def make_server(service: Service, bound: socket.socket, *, grace: float, surface: Surface = Surface()) -> "Server":
    """A server on a bound socket; `run(sockets=[bound])` serves until SIGTERM or SIGINT and closes the socket.

    It then takes no more requests, and cancels what still runs after `grace` seconds. The caller closes the engine.
    """
    # What is printed at the start.
    host, port = bound.getsockname()[:2]
    url = f"http{'s' if surface.certfile else ''}://{f'[{host}]' if ':' in host else host}:{port}"
    notes = [f"jspec: serving {service.name} on {url}/v1"]
    if service.has_page:
        notes.append(f"jspec: chat with it at {url}/")
    if not (service.has_keys or ipaddress.ip_address(host.partition("%")[0]).is_loopback):
        notes.append("jspec: no API key is set: everyone who reaches this address can use the model")
    # What is around the application.
    app: ASGIApp = service.app()
    if surface.origins:
        app = allow_origins(app, surface.origins)
    # The server.
    config = uvicorn.Config(
        Access(app, log=surface.access_log),
        ssl_certfile=surface.certfile,
        ssl_keyfile=surface.keyfile,
        loop="asyncio",
        http=Connection,
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=math.ceil(grace + _AFTER_GRACE_SECONDS),
    )
    return Server(config, service, grace, notes)


class Server(uvicorn.Server):
    """uvicorn, which also cancels the sequences of an engine when it is time."""

    def __init__(self, config: uvicorn.Config, service: Service, grace: float, notes: Sequence[str]):
        super().__init__(config)
        self._service, self._grace, self._notes = service, grace, notes
        self.interrupted = False
        """Whether SIGINT has ended it."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's; then prints the notes."""
        await super().startup(sockets)
        print(*self._notes, sep="\n", file=sys.stderr, flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """As uvicorn's, with a note of what it waits for; SIGINT is not raised again after the end."""
        if running := self._service.running:
            note = f"jspec: draining: {running} running sequences have {self._grace:g} seconds; Ctrl-C ends at once"
            print(note, file=sys.stderr, flush=True)
        if sig == signal.SIGINT and not self.should_exit:
            self.interrupted = self.should_exit = True
        else:
            super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, after whose beginning answers have `grace` seconds."""
        timer = asyncio.get_running_loop().call_later(self._grace, self._service.stop)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()
            self._service.stop()
