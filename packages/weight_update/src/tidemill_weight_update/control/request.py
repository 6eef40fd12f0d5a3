"""The request that an engine receives once per update: JSON, read by the tidemill loader in each engine rank."""

import json
from dataclasses import asdict, dataclass


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
        partial: whether parameters without a tensor keep their values; otherwise they are an error.
        timeout_s: longest wait without progress.
    """

    sequence: int
    mailboxes: tuple[str, ...]
    first_receiver: int
    num_receivers: int
    partial: bool
    timeout_s: float


def request_to_json(request: Request) -> str:
    """Return the text that is sent to the engine."""
    return json.dumps(asdict(request), separators=(",", ":"))


def request_from_json(text: str) -> Request:
    """Return the request inside `text`.

    Raises:
        ValueError: it is not the text of a request of this version of the package.
    """
    try:
        fields = json.loads(text)
        return Request(**fields | {"mailboxes": tuple(fields["mailboxes"])})
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"expected a weight update of this version of tidemill_weight_update, got {text[:80]!r}; install the same "
            f"version for the trainer and the engine"
        ) from error
