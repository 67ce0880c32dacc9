"""Invitations: what a process must hold to join a run's board."""

import msgspec


class Invitation(msgspec.Struct, frozen=True):
    """How to reach and to enter a board. Holds the run's secret: never log it.

    Attributes:
        address: `tcp://host:port`; IPv6 hosts in brackets.
        server_key: the board's public key (Z85), so that nobody can pose as the board.
        client_key: public key (Z85) that the board admits.
        client_secret: the secret that belongs to it.
    """

    address: str
    server_key: str
    client_key: str
    client_secret: str

    def __repr__(self) -> str:
        return f"Invitation(address={self.address!r}, keys hidden)"

    __str__ = __repr__
