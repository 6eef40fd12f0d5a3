"""Functions that make the tensors of an update."""

from collections.abc import Callable, Iterable, Iterator

from torch import Tensor


class WithEvent:
    """Function that makes the tensors; while they are sent, and not while they are described, `event` is called.

    Args:
        items: the tensors.
        count: number of tensors before the event.
        event: what happens.
    """

    def __init__(self, items: Iterable[tuple[str, Tensor]], count: int, event: Callable[[], object]) -> None:
        self._items = list(items)
        self._count = count
        self._event = event
        self._is_described = False

    def __call__(self) -> Iterator[tuple[str, Tensor]]:
        is_sending, self._is_described = self._is_described, True
        for number, item in enumerate(self._items):
            if is_sending and number == self._count:
                self._event()
            yield item


def fail(error: BaseException) -> Callable[[], None]:
    """Return an event that raises the error."""

    def event() -> None:
        raise error

    return event
