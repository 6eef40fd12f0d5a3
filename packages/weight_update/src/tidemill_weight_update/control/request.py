"""The request that an engine receives once per update: signed JSON, read by the tidemill loader in each engine rank."""

import hashlib
import hmac
import json
import os
import secrets
from dataclasses import asdict, dataclass
from typing import Any

TOKEN_VARIABLE = "TIDEMILL_WEIGHT_TOKEN"
"""Environment variable with a run's token, in the processes of the trainer and of its engines."""


class TokenError(Exception):
    """The run's token is missing, or a request was not signed with it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One update, addressed to the ranks of one engine.

    Attributes:
        sequence: number of the update; the mailboxes carry it too. A late request finds another number there, or that
            the trainer has excluded its ranks.
        mailboxes: paths of the mailboxes of the trainer ranks, in rank order; the engine ranks report in that of rank
            0.
        first_receiver: row of the engine's rank 0 in the mailboxes; rank r has row `first_receiver + r`.
        num_receivers: number of ranks of the engine.
        complete: whether all tensors are described before the first byte is copied, so that everything is checked
            first.
        partial: whether parameters without a tensor keep their values; otherwise they are an error.
        timeout_s: longest wait without progress.
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
    """Return the token from this process's environment.

    Raises:
        TokenError: it is not set.
    """
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token:
        raise TokenError(
            f"no run token: set {TOKEN_VARIABLE} to the same secret for the trainer and the engine, or launch the "
            f"engine with **sglang_launch_args(), which creates one"
        )
    return token


def sign(request: Request, token: str) -> str:
    """Return the signed text that is sent to the engine."""
    body = json.dumps(asdict(request), separators=(",", ":"))
    return f"{_mac(body, token)} {body}"


def verify(text: str, token: str) -> Request:
    """Return the request inside `text`.

    Raises:
        TokenError: it was not signed with `token`.
    """
    mac, _, body = text.partition(" ")
    if not hmac.compare_digest(mac.encode(), _mac(body, token).encode()):
        raise TokenError(
            f"refused a weight update that was not signed with this run's token; set {TOKEN_VARIABLE} to the same "
            f"value for the trainer and the engine"
        )
    fields: dict[str, Any] = json.loads(body)
    fields["mailboxes"] = tuple(fields["mailboxes"])
    return Request(**fields)


def _mac(body: str, token: str) -> str:
    return hmac.new(token.encode(), body.encode(), hashlib.sha256).hexdigest()
