"""Parts of tensors that a rank holds."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One of `size` equal parts of a tensor."""

    rank: int = 0
    size: int = 1

    def of(self, length: int, what: str) -> tuple[int, int]:
        """Return start and length of this part of `length` items.

        Raises:
            ValueError: `length` is not divisible by `size`.
        """
        if length % self.size:
            raise ValueError(
                f"the number of {what} must be divisible by {self.size} ranks, got {length}; use another parallel size"
            )
        return self.rank * (length // self.size), length // self.size


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Parts that a rank holds.

    Attributes:
        tp: tensor-parallel part of tensors outside experts.
        etp: tensor-parallel part of the experts' tensors.
        ep: part of the experts.
    """

    tp: Part = Part()
    etp: Part = Part()
    ep: Part = Part()


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A part of a Hugging Face tensor that is stored in consecutive rows of a Megatron parameter.

    Attributes:
        name, global_shape: name and shape of the tensor.
        start, shape: start and shape of the part in the tensor.
        row: first row of the part in the parameter.
    """

    name: str
    global_shape: tuple[int, ...]
    start: tuple[int, ...]
    shape: tuple[int, ...]
    row: int

    @property
    def region(self) -> tuple[slice, ...]:
        """Slices of the part in the tensor."""
        return tuple(slice(at, at + size) for at, size in zip(self.start, self.shape, strict=True))
