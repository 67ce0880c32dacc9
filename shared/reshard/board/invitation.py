"""What a process needs to join the control board; the one value that holds the run's secret."""

import msgspec

from reshard.board.addresses import host_of


class Invitation(msgspec.Struct, frozen=True):
    """Who holds this may read and write the board.

    It travels once, through the engine's own control route. Its `repr` shows the address alone.

    Attributes:
        address: `tcp://host:port`, IPv6 in brackets.
        server_key: the board's public key (Z85), which the client insists on.
        client_key: the run's client public key (Z85).
        client_secret: the run's client secret key (Z85).
    """

    address: str
    server_key: str
    client_key: str
    client_secret: str

    def __repr__(self) -> str:
        return f"Invitation({self.address!r}, secret hidden)"

    def __rich_repr__(self) -> list[tuple[str, str]]:
        """What rich and pytest show: the address alone."""
        return [("address", self.address)]

    @property
    def host(self) -> str:
        """Host part of the address, without brackets.

        >>> Invitation("tcp://[::1]:4000", "", "", "").host
        '::1'
        """
        return host_of(self.address)
