"""Types of configuration values, with their ranges."""

from typing import Annotated

from pydantic import Field, FiniteFloat

Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
CountOrNone = Annotated[int, Field(ge=-1)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
Seed = Annotated[int, Field(ge=0, lt=2**64)]
NotNegative = Annotated[FiniteFloat, Field(ge=0)]
