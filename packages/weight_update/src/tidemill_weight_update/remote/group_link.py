"""The configuration of a link to engines on other machines, and its addresses."""

import ipaddress
import socket
import urllib.parse
from dataclasses import dataclass
from typing import Self

_SCHEME = "tidemill-link"


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupLink:
    """Connects engines on other machines: `WeightUpdater(engines, link=GroupLink(host="10.0.0.1"))`.

    Trainer and engines exchange control messages through a store that trainer rank 0 opens on `host`. Packed buckets
    are sent from each trainer rank to each engine rank, by NCCL between GPUs and by gloo between CPUs. Engines on the
    machine of a trainer rank still read its arena directly. Nothing is encrypted
    or signed: whoever can reach the ports can read and replace weights, so use a link inside a trusted network only.

    Attributes:
        host: address of trainer rank 0's machine that engines and other trainer ranks can reach. The package listens on
            no other address of that machine; on other machines it listens on the address from which `host` is reached.
        port: port of the store; 0 selects a free one. Buckets use further ports, selected by the system.
    """

    host: str = "127.0.0.1"
    port: int = 0

    def __post_init__(self) -> None:
        if (
            not self.host
            or self.host == "*"
            or (_is_address(self.host) and ipaddress.ip_address(self.host).is_unspecified)
        ):
            raise ValueError(
                f"host must be the single address that engines connect to, such as '10.0.0.1', got {self.host!r}"
            )


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkAddress:
    """The address of an open link's store, and the session ID that distinguishes it from other links at the same
    address.
    """

    host: str
    port: int
    session: str

    def mailbox_path(self, rank: int) -> str:
        """Return the path by which engine ranks open the mailbox of trainer rank `rank`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{_SCHEME}://{host}:{self.port}/{self.session}/{rank}"

    @staticmethod
    def is_path(path: str) -> bool:
        """Return whether `path` was made by `mailbox_path`."""
        return path.startswith(f"{_SCHEME}://")

    @classmethod
    def from_path(cls, path: str) -> tuple[Self, int]:
        """Return the link and the trainer rank of a path."""
        parts = urllib.parse.urlsplit(path)
        session, rank = parts.path.strip("/").split("/")
        assert parts.hostname is not None
        assert parts.port is not None
        return cls(host=parts.hostname, port=parts.port, session=session), int(rank)

    def own_address(self) -> str:
        """Return the address of this machine from which the link's host is reached."""
        family, _, _, _, target = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing
            return probe.getsockname()[0]


def listen(link: GroupLink) -> socket.socket:
    """Return a socket that listens on the link's host and no other address.

    Raises:
        RuntimeError: the host is not an address of this machine, or the port is in use.
    """
    try:
        family, _, _, _, target = socket.getaddrinfo(link.host, link.port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(target[:2], family=family)
    except OSError as error:
        raise RuntimeError(
            f"cannot listen on {link.host} port {link.port} ({error.strerror}): host must be an address of the machine "
            f"of trainer rank 0, and the port must be free"
        ) from error
