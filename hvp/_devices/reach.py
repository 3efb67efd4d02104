"""Whether a server listens at a network address, and whether it responds."""

from __future__ import annotations

import socket

# Seconds in which a server that is there takes a connection, and says something.
_CONNECTION_SECONDS, _ANSWER_SECONDS = 2.0, 1.0
# What a client of HTTP/2, and so of gRPC, says first; a server says something in return.
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


def takes_connections(address: str | None) -> bool:
    """Return whether a server listens at an address, such as `"10.0.0.1:2222"`."""
    try:
        with _connected(address):
            return True
    except OSError:
        return False


def answers(address: str | None) -> bool:
    """Return whether a server responds; a suspended one accepts connections, but does not."""
    try:
        with _connected(address) as one:
            one.settimeout(_ANSWER_SECONDS)
            one.sendall(_GREETING)
            return bool(one.recv(1))
    except OSError:
        return False


def has_ended(address: str | None) -> bool:
    """Return whether the machine refuses connections; one that is down does not respond at all."""
    try:
        with _connected(address):
            return False
    except ConnectionRefusedError:
        return True
    except OSError:
        return False


def _connected(address: str | None) -> socket.socket:
    host, _, port = (address or "").rpartition(":")
    try:
        return socket.create_connection((host.strip("[]"), int(port)), _CONNECTION_SECONDS)
    except ValueError as error:  # no port
        raise OSError(str(error)) from None
