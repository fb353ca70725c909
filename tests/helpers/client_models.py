"""Types and models as users of pydantic have them, whose schemas clients send."""

import datetime
import decimal
import enum
import typing
import uuid
from typing import Annotated, Literal

import pydantic

Field = pydantic.Field


class Color(enum.Enum):
    red, green, blue = "red", "green", "blue"


class Level(enum.IntEnum):
    low, high = 1, 2


class Point(pydantic.BaseModel):
    """A point."""

    x: float = Field(ge=-1, le=1)
    y: float = 0.5


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    lives: int = Field(9, ge=0, le=9)


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]
    name: str = Field(min_length=1, max_length=30)


Pet = Annotated[Cat | Dog, Field(discriminator="kind")]
Text = Annotated[str, Field(min_length=2, max_length=20)]
TYPES = {
    **{one.__name__: one for one in (str, int, float, bool, bytes, dict, list, tuple, set)},
    **{one.__name__: one for one in (uuid.UUID, decimal.Decimal, Color, Level, Point, Cat)},
    **{name: getattr(datetime, name) for name in ("date", "time", "datetime", "timedelta")},
    **{name: getattr(pydantic, name) for name in ("PositiveInt", "NegativeInt", "NonNegativeInt", "NonPositiveInt")},
    **{name: getattr(pydantic, name) for name in ("PositiveFloat", "NegativeFloat", "NonNegativeFloat", "FiniteFloat")},
    **{name: getattr(pydantic, name) for name in ("StrictStr", "StrictInt", "SecretStr", "SecretBytes", "Json")},
    **{name: getattr(pydantic, name) for name in ("HttpUrl", "AnyUrl", "AwareDatetime", "PastDate", "FutureDate")},
    **{name: getattr(pydantic, name) for name in ("IPvAnyAddress", "UUID4", "ByteSize", "FilePath", "Base64Str")},
    "bounded": Annotated[int, Field(ge=0, le=10)],
    "open": Annotated[float, Field(gt=0, lt=1)],
    "even": Annotated[int, Field(multiple_of=2)],
    "price": Annotated[decimal.Decimal, Field(max_digits=6, decimal_places=2)],
    "code": Annotated[str, Field(pattern=r"^[A-Z]{2}\\d{3}$")],
    "short code": Annotated[str, Field(pattern=r"[a-z]+", max_length=8)],
    "text": Text,
    "pair": tuple[int, str],
    "several": tuple[int, ...],
    "colors": set[Color],
    "names": set[str],
    "frozen": frozenset[Literal[1, 2, 3]],
    "some colors": Annotated[set[Color], Field(min_length=1, max_length=2)],
    "tags": Annotated[list[Text], Field(min_length=1, max_length=3)],
    "map": dict[str, int],
    "by color": dict[Literal["a", "b"], int],
    "by enum": dict[Color, float],
    "by pattern": dict[Annotated[str, Field(pattern="^[a-z]{1,5}$")], bool],
    "not empty": Annotated[dict[str, int], Field(min_length=1)],
    "optional": Point | None,
    "union": int | str | None,
    "pet": Pet,
    "pets": list[Pet],
    "any": typing.Any,
}
MEMBERS = [
    "PositiveInt",
    "open",
    "code",
    "colors",
    "pair",
    "by color",
    "pet",
    "optional",
    "date",
    "tags",
    "price",
    "HttpUrl",
]
"""Kinds of fields of the models, which have some of them each."""


def models() -> dict[str, type[pydantic.BaseModel]]:
    """60 models as applications have them: documented fields, some of them optional."""
    built = {}
    for i in range(60):
        members = [MEMBERS[(i * step + shift) % len(MEMBERS)] for step, shift in ((1, 0), (5, 1), (7, 3))]
        fields: dict[str, typing.Any] = {
            f"field_{j}": (TYPES[name], Field(description=f"the {name}")) if j else (TYPES[name] | None, None)
            for j, name in enumerate(dict.fromkeys(members))
        }
        built[f"model {i}"] = pydantic.create_model(f"Model{i}", __doc__="An answer.", **fields)
    return built
