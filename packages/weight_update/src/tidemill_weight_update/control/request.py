"""What an engine is asked, once per update: a signed piece of JSON, read by our loader inside each engine rank."""

import hashlib
import hmac
import json
import os
import secrets
from dataclasses import asdict, dataclass
from typing import Any

TOKEN_VARIABLE = "TIDEMILL_WEIGHT_TOKEN"
"""Environment variable that holds a run's token, in the processes of the trainer and of its engines."""


class TokenError(Exception):
    """A request that was not signed with this run's token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One update, for the ranks of one engine.

    Attributes:
        sequence: of the update; the mailboxes carry it too. A request that arrives late finds another one there, or
            that the trainer has given up its ranks.
        mailboxes: of the trainer's ranks, in their order; rank 0's holds what the engine ranks report.
        first_receiver: row of the engine's rank 0 in the mailboxes; rank r has row `first_receiver + r`.
        num_receivers: ranks of the engine.
        complete: all names are described before the first byte moves, so everything is checked before it.
        partial: parameters that nothing writes keep their values instead of being an error.
        timeout_s: longest wait for anything to happen.
    """

    sequence: int
    mailboxes: tuple[str, ...]
    first_receiver: int
    num_receivers: int
    complete: bool
    partial: bool
    timeout_s: float


def new_token() -> str:
    return secrets.token_hex(32)


def run_token() -> str:
    """The token of this process's environment.

    Raises:
        TokenError: there is none.
    """
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token:
        raise TokenError(
            f"no run token: set {TOKEN_VARIABLE} to the same secret for the trainer and the engine, or launch the "
            f"engine with **sglang_launch_args(), which makes one"
        )
    return token


def sign(request: Request, token: str) -> str:
    """The text that travels."""
    body = json.dumps(asdict(request), separators=(",", ":"))
    return f"{_mac(body, token)} {body}"


def verify(text: str, token: str) -> Request:
    """The request inside `text`.

    Raises:
        TokenError: it was not signed with `token`.
    """
    mac, _, body = text.partition(" ")
    if not hmac.compare_digest(mac.encode(), _mac(body, token).encode()):
        raise TokenError(f"a weight update was not signed with this run's token ({TOKEN_VARIABLE}); refused")
    fields: dict[str, Any] = json.loads(body)
    fields["mailboxes"] = tuple(fields["mailboxes"])
    return Request(**fields)


def _mac(body: str, token: str) -> str:
    return hmac.new(token.encode(), body.encode(), hashlib.sha256).hexdigest()
