"""Connections between the processes of an engine: ordered messages, and detection of lost processes.

Both sides of a connection prove that they know a secret. Then it carries pickled objects in plain text, as JAX's own
communication between processes does, so the network must be trusted.
"""

import contextlib
import hashlib
import hmac
import json
import pickle
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection

SILENCE_SECONDS = 30.0
"""Silence after which another process counts as lost."""
BEAT_SECONDS = 5.0
"""Time between two heartbeats."""
CONNECT_SECONDS = 60.0
"""Longest wait for the next process to connect."""
_ATTEMPT_SECONDS = 5.0
_LENGTH = struct.Struct("!Q")
_INDEX = struct.Struct("!I")
_NONCE = 16
_DIGEST = 32


class Wire:
    """A connection to another process.

    name: of the other process, for messages.
    """

    def __init__(self, connection: socket.socket, name: str):
        connection.settimeout(SILENCE_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.name = name
        self._socket, self._sending, self._closed = connection, threading.Lock(), threading.Event()
        self._reader: threading.Thread | None = None
        self._start(self._beat)

    def start(self, handle: Callable[[object], bool], lost: Callable[[str], None]) -> None:
        """Receives messages, in a thread of its own.

        handle: called with each message; returns False after the last one.
        lost: called with the reason if the connection ends before that, unless `close` was called.
        """

        def read() -> None:
            try:
                while handle(self._receive()):
                    pass
            except (OSError, EOFError, pickle.UnpicklingError) as error:
                if not self._closed.is_set():
                    # The process is lost: this side has not closed the connection.
                    silent = isinstance(error, TimeoutError)
                    reason = f"silent for {SILENCE_SECONDS:.0f} seconds" if silent else "it has closed the connection"
                    lost(f"{self.name} is gone: {reason}")

        self._reader = self._start(read)

    def send(self, message: object, timeout: float = -1) -> None:
        """Sends a message. May be called from any thread.

        timeout: seconds to wait while other threads send; -1: no limit.

        Raises:
          OSError: the connection has ended; TimeoutError on timeout.
        """
        self._send(pickle.dumps(message, pickle.HIGHEST_PROTOCOL), timeout)

    def join(self, timeout: float | None = None) -> None:
        """Waits until the last message is handled or the connection ends. timeout: seconds; None: no limit."""
        if self._reader is not None and self._reader is not threading.current_thread():
            self._reader.join(timeout)

    def close(self) -> None:
        """Closes the connection; the other process notices."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # ends reads and writes of other threads
        self._socket.close()

    def _send(self, data: bytes, timeout: float = -1) -> None:
        if not self._sending.acquire(timeout=timeout):
            raise TimeoutError(f"{self.name} takes nothing")
        try:
            self._socket.sendall(_LENGTH.pack(len(data)) + data)
        finally:
            self._sending.release()

    def _receive(self) -> object:
        while not (length := _LENGTH.unpack(_read(self._socket, _LENGTH.size))[0]):
            pass  # a heartbeat
        return pickle.loads(_read(self._socket, length))

    def _beat(self) -> None:
        with contextlib.suppress(OSError):  # The reader reports the loss.
            while not self._closed.wait(BEAT_SECONDS):
                self._send(b"")

    def _start(self, run: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=run, name="jspec wire", daemon=True)
        thread.start()
        return thread


class Listener:
    """Accepts connections of other processes.

    Attributes:
      invitation: addresses and secret for the other processes; confidential.
    """

    def __init__(self):
        if socket.has_dualstack_ipv6():
            self._socket = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
        else:
            self._socket = socket.create_server(("", 0))
        self._secret = secrets.token_bytes(_DIGEST)
        port = self._socket.getsockname()[1]
        self.invitation = json.dumps({"hosts": own_addresses(), "port": port, "secret": self._secret.hex()})

    def accept(self, processes: Collection[int]) -> dict[int, Wire]:
        """Waits until these processes have connected; rejects others. Returns their connections by process.

        Raises:
          TimeoutError: no process connects within `CONNECT_SECONDS`.
        """
        wires: dict[int, Wire] = {}
        until = time.monotonic() + CONNECT_SECONDS
        with self._socket:
            while missing := set(processes) - wires.keys():
                try:
                    # Rejected ones do not prolong the wait.
                    if (left := until - time.monotonic()) <= 0:
                        raise TimeoutError
                    self._socket.settimeout(left)
                    connection, _ = self._socket.accept()
                except TimeoutError:
                    for wire in wires.values():
                        wire.close()
                    names = ", ".join(map(str, sorted(missing)))
                    raise TimeoutError(
                        f"no connection from process {names} within {CONNECT_SECONDS:.0f} seconds"
                    ) from None
                try:
                    # Admit only expected processes with the secret.
                    index = self._admit(connection)
                except (OSError, EOFError):
                    connection.close()
                    continue
                if index in missing:
                    wires[index] = Wire(connection, f"process {index}")
                    until = time.monotonic() + CONNECT_SECONDS
                else:
                    connection.close()
        return wires

    def _admit(self, connection: socket.socket) -> int | None:
        """The index of the connecting process; None if it does not know the secret."""
        connection.settimeout(_ATTEMPT_SECONDS)
        nonce = secrets.token_bytes(_NONCE)
        connection.sendall(nonce)
        data, proof = _read(connection, _NONCE + _INDEX.size), _read(connection, _DIGEST)
        # Both sides prove the secret.
        if not hmac.compare_digest(proof, _proof(self._secret, b"joins", nonce + data)):
            return None
        connection.sendall(_proof(self._secret, b"leads", data))
        return _INDEX.unpack(data[_NONCE:])[0]


def connect(invitation: str, index: int) -> Wire:
    """Connects to the process of an invitation. index: of this process.

    Raises:
      ConnectionError: it cannot be reached.
    """
    peer = json.loads(invitation)
    problems = []
    # The first address that answers and proves the secret.
    for host in peer["hosts"]:
        try:
            connection = socket.create_connection((host, peer["port"]), timeout=_ATTEMPT_SECONDS)
        except OSError as error:
            problems.append(f"{host}: {error.strerror or error}")
            continue
        try:
            _join(connection, bytes.fromhex(peer["secret"]), index)
        except (OSError, EOFError):
            connection.close()
            problems.append(f"{host}: another program listens there")
            continue
        return Wire(connection, "process 0")
    raise ConnectionError(
        f"process {index} cannot reach process 0 on port {peer['port']} ({'; '.join(problems)}); the name of its host "
        "must stand for an address that the other hosts reach"
    )


def _join(connection: socket.socket, secret: bytes, index: int) -> None:
    """Proves the secret to the other process, and checks its proof.

    Raises:
      OSError, EOFError: the proof is wrong, or the connection fails.
    """
    data = secrets.token_bytes(_NONCE) + _INDEX.pack(index)
    connection.sendall(data + _proof(secret, b"joins", _read(connection, _NONCE) + data))
    if not hmac.compare_digest(_read(connection, _DIGEST), _proof(secret, b"leads", data)):
        raise ConnectionError("the secret differs")


def own_addresses() -> list[str]:
    """Addresses of this host for other processes, loopback last."""
    addresses: dict[str, None] = {}
    with contextlib.suppress(OSError, UnicodeError):
        # By the name of the host.
        for *_, address in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
            addresses[str(address[0])] = None
    # Connecting a datagram socket sends nothing, but chooses an interface. The addresses are examples.
    for family, example in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((example, 9))
            addresses[probe.getsockname()[0]] = None
    loops = [address for address in addresses if address.startswith("127.") or address == "::1"]
    return [*(address for address in addresses if address not in loops), *loops, "localhost"]


def _proof(secret: bytes, side: bytes, data: bytes) -> bytes:
    return hmac.digest(secret, side + data, hashlib.sha256)


def _read(connection: socket.socket, size: int) -> bytes:
    """Reads exactly `size` bytes.

    Raises:
      EOFError: the connection ends earlier.
    """
    # Read into one buffer.
    data = bytearray(size)
    view, have = memoryview(data), 0
    while have < size:
        count = connection.recv_into(view[have:])
        if not count:
            raise EOFError("the connection has ended")
        have += count
    return bytes(data)
