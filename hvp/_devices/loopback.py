"""Restricts servers to this machine.

TensorFlow's servers listen on all network interfaces, regardless of the address they are given.
Linux lets a process bind a socket that is already listening to one interface; it then accepts
connections from that interface alone. Workers load this module, which therefore imports nothing but
the standard library.
"""

from __future__ import annotations

import contextlib
import os
import socket

_INTERFACE = b"lo"


def listening() -> set[int]:
    """Return the file descriptors of this process that wait for network connections."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), _opened(int(name)) as one:
            internet = one.family in (socket.AF_INET, socket.AF_INET6)
            if internet and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found.add(int(name))
    return found


def restrict(descriptors: set[int]) -> None:
    """Restrict sockets to connections from this machine.

    Raise `OSError` if the system does not allow it.
    """
    for descriptor in descriptors:
        with _opened(descriptor) as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, _INTERFACE + b"\0")
            bound = one.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16)
            if bound.rstrip(b"\0") != _INTERFACE:
                raise OSError(f"socket {descriptor} is bound to {bound!r}")


def _opened(descriptor: int) -> socket.socket:
    """Return a separate socket for a descriptor; closing it leaves the original one open."""
    own = os.dup(descriptor)
    try:
        return socket.socket(fileno=own)
    except OSError:  # no socket
        os.close(own)
        raise
