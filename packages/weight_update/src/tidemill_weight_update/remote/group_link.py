"""How engines on other machines are reached."""

import ipaddress
import socket
import urllib.parse
from dataclasses import dataclass
from typing import Self

_SCHEME = "tidemill-link"


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupLink:
    """Lets engines on other machines take part: `WeightUpdater(engines, link=GroupLink(host="10.0.0.1"))`.

    Trainer and engines then agree through a store that trainer rank 0 opens on `host`, and packed buckets go from
    each trainer rank to each engine rank, by NCCL between GPUs and by gloo between CPUs. Engines that share a machine
    with a trainer rank still read its arena where it is. All values in the store are signed with the run's token; the
    weights themselves are neither encrypted nor signed: use it inside a network that you trust.

    Attributes:
        host: an address of trainer rank 0's machine that engines and other trainer ranks reach. Nothing of ours
            listens on other addresses of it, nor, on other machines, on addresses other than the one that leads there.
        port: of the store; 0: any that is free. Buckets use further ports, which are chosen by the system.
    """

    host: str = "127.0.0.1"
    port: int = 0

    def __post_init__(self) -> None:
        if (
            not self.host
            or self.host == "*"
            or (_is_address(self.host) and ipaddress.ip_address(self.host).is_unspecified)
        ):
            raise ValueError(f"host must be the one address that engines connect to, got {self.host!r}")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkAddress:
    """Where the store of an open link is, and what tells it from others at the same place."""

    host: str
    port: int
    session: str

    def mailbox_path(self, rank: int) -> str:
        """The name by which engine ranks open trainer rank `rank`'s mailbox."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{_SCHEME}://{host}:{self.port}/{self.session}/{rank}"

    @staticmethod
    def is_path(path: str) -> bool:
        """Whether `path` was made by `mailbox_path`."""
        return path.startswith(f"{_SCHEME}://")

    @classmethod
    def from_path(cls, path: str) -> tuple[Self, int]:
        """The link and the trainer rank of a path."""
        parts = urllib.parse.urlsplit(path)
        session, rank = parts.path.strip("/").split("/")
        assert parts.hostname is not None
        assert parts.port is not None
        return cls(host=parts.hostname, port=parts.port, session=session), int(rank)

    def own_address(self) -> str:
        """The address of this machine from which the link's host is reached."""
        family, _, _, _, target = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing
            return probe.getsockname()[0]


def listen(link: GroupLink) -> socket.socket:
    """A socket that listens on the link's host and no other address.

    Raises:
        RuntimeError: it cannot: the host is not an address of this machine, or the port is in use.
    """
    try:
        family, _, _, _, target = socket.getaddrinfo(link.host, link.port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(target[:2], family=family)
    except OSError as error:
        raise RuntimeError(
            f"cannot listen on {link.host} port {link.port} ({error.strerror}): host must be an address of trainer "
            f"rank 0's machine, and the port free"
        ) from error
