"""Which local address to listen on: names, interfaces, IPv6.

A listener is bound to one named address, never to all of them.
"""

import ipaddress
import socket
from urllib.parse import urlsplit

from reshard.errors import ReshardError


def listening_address(host: str) -> str:
    """The numeric address that `host` names, without brackets.

    Args:
        host: an address (IPv6 with or without brackets) or a host name.

    >>> listening_address("[::1]")
    '::1'

    Raises:
        ReshardError: no such host, or an address that stands for all interfaces.
    """
    bare = host.strip("[]")
    try:
        found = socket.getaddrinfo(bare, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ReshardError(
            f"host {host!r} has no address ({error}); name an address, a host name or an "
            f"interface: {', '.join(interfaces())}"
        ) from error
    address = str(found[0][4][0])
    if ipaddress.ip_address(address.partition("%")[0]).is_unspecified:
        raise ReshardError(
            f"host {host!r} stands for every interface; name the one address that peers reach"
        )
    return address


def interfaces() -> tuple[str, ...]:
    """Names of this machine's network interfaces."""
    return tuple(name for _, name in socket.if_nameindex())


def local_address_towards(address: str) -> str:
    """The address of this machine from which `address` (numeric or name) is reached.

    >>> local_address_towards("127.0.0.1")
    '127.0.0.1'
    """
    family, kind, protocol, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
    # Connecting a datagram socket sends nothing: it asks the routing table.
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def tcp(host: str, port: str) -> str:
    """A ZeroMQ endpoint; IPv6 gets its brackets.

    >>> tcp("::1", "4000")
    'tcp://[::1]:4000'
    """
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def host_of(endpoint: str) -> str:
    """The host of an endpoint, without brackets.

    >>> host_of("tcp://[::1]:4000")
    '::1'
    """
    return urlsplit(endpoint).hostname or ""
