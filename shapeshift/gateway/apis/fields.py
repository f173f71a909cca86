"""What the requests of all routes share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, cast

import orjson
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

Int32 = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]

FORMS = TEXT, TEXT_LIST, TOKENS, LISTS, ITEMS = "<text>", "<texts>", "<tokens>", "<lists>", "<items>"
MOST_ITEMS, MOST_TOKENS = 2048, 1 << 17


def bounded(least: int = 0, most: int = MOST_ITEMS) -> Any:
    """Of a list or an object: how many items it has. The first wrong one ends its check."""
    return Field(fail_fast=True, min_length=least, max_length=most)


def form_of(value: Any) -> str | None:
    """Which of several forms a field has, by its first item: so it is held against one of them only."""
    if isinstance(value, str):
        return TEXT
    first = value[0] if isinstance(value, list) and value else None
    forms = {str: TEXT_LIST, int: TOKENS, list: LISTS}
    return forms.get(type(first))


def has_field(body: bytes, name: str) -> bool:
    """Whether a body is a JSON object with this field, which tells the request of one API from that of another."""
    if f'"{name}"'.encode() not in body:
        return False
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError:
        return False
    return isinstance(content, dict) and name in content


def text_or_items(value: Any) -> str | None:
    """As `form_of` for a field that is a text, or a list of objects."""
    return TEXT if isinstance(value, str) else ITEMS if isinstance(value, list) else None


TEXTS = "a text, a list of texts, the ids of a text's tokens, or a list of these; none of them empty"

Strings = Annotated[list[str], bounded()]
_Tokens = Annotated[list[TokenId], bounded(1, MOST_TOKENS)]
Texts = Annotated[
    Annotated[str, Tag(TEXT)]
    | Annotated[Strings, Tag(TEXT_LIST)]
    | Annotated[_Tokens, Tag(TOKENS)]
    | Annotated[list[_Tokens], bounded(), Tag(LISTS)],
    Discriminator(form_of, custom_error_type="form", custom_error_message=TEXTS),
]


class Item(BaseModel):
    """A text or an image, as Jina has them. image: a data URL, or base64."""

    model_config = ConfigDict(extra="forbid", strict=True)

    text: str | None = None
    image: str | None = None

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if (self.text is None) == (self.image is None):
            raise PydanticCustomError("one_of", "an object with either text or image")
        return self


def _item_form(value: Any) -> str:
    return TEXT if isinstance(value, str) else ITEMS


def form_of_items(value: Any) -> str | None:
    """As `form_of`, of a list in which objects may stand."""
    has_objects = isinstance(value, list) and any(isinstance(one, dict) for one in value)
    return ITEMS if has_objects else form_of(value)


Items = Annotated[
    list[Annotated[Annotated[str, Tag(TEXT)] | Annotated[Item, Tag(ITEMS)], Discriminator(_item_form)]],
    bounded(),
    Tag(ITEMS),
]
INPUTS = f"{TEXTS}; or a list of objects with a text or an image"
Inputs = Annotated[
    Annotated[str, Tag(TEXT)]
    | Annotated[Strings, Tag(TEXT_LIST)]
    | Annotated[_Tokens, Tag(TOKENS)]
    | Annotated[list[_Tokens], bounded(), Tag(LISTS)]
    | Items,
    Discriminator(form_of_items, custom_error_type="form", custom_error_message=INPUTS),
]


def listed(texts: Texts) -> list[str] | list[list[int]]:
    """Always a list: of texts, or of the tokens of each."""
    if isinstance(texts, str) or (texts and isinstance(texts[0], int)):
        return cast("list[str] | list[list[int]]", [texts])
    return cast("list[str] | list[list[int]]", texts)


_ROWS = "a text, a list of texts, or a list of lists with one text or one pair each"
Rows = Annotated[
    Annotated[str, Tag(TEXT)]
    | Annotated[Strings, Tag(TEXT_LIST)]
    | Annotated[list[Annotated[list[str], bounded(most=2)]], bounded(), Tag(LISTS)],
    Discriminator(form_of, custom_error_type="form", custom_error_message=_ROWS),
]


ROWS = f"{_ROWS}; or a list of objects with a text or an image"
RowsOrItems = Annotated[
    Annotated[str, Tag(TEXT)]
    | Annotated[Strings, Tag(TEXT_LIST)]
    | Annotated[list[Annotated[list[str], bounded(most=2)]], bounded(), Tag(LISTS)]
    | Items,
    Discriminator(form_of_items, custom_error_type="form", custom_error_message=ROWS),
]


def not_served(*neutral: Any) -> AfterValidator:
    """Refuses a field of OpenAI's that this gateway does not have, unless its value is one that changes nothing."""

    def check(value: Any) -> Any:
        if value is not None and value not in neutral:
            shown = ", ".join(map(repr, neutral))
            allowed = {"or_so": f" or send {shown}" if shown else ""}
            raise PydanticCustomError("unsupported_parameter", "leave it out{or_so}", allowed)
        return value

    return AfterValidator(check)


OfClient = Annotated[Any, Field(exclude=True)]
"""What clients add to a model's answer, and send back with it: no template reads it."""


# Parts of a conversation, by the names of OpenAI's and Anthropic's APIs, that no model here reads.
_MEDIA = frozenset(
    (
        *("image", "image_url", "input_image", "image_file", "document", "file", "input_file", "search_result"),
        *("input_audio", "audio_url", "video_url", "container_upload"),
    )
)


def _of_text(value: Any) -> Any:
    if isinstance(value, str) and value in _MEDIA:
        raise PydanticCustomError("unsupported_parameter", "its models read texts, no {type}", {"type": value})
    return value


OF_TEXT = BeforeValidator(_of_text)
"""Refuses the types of parts that are images, audio or files by their name."""


def _writable(value: dict[str, Any]) -> dict[str, Any]:
    try:
        orjson.dumps(value)
    except TypeError:
        raise PydanticCustomError("json_object", "whole numbers of at most 64 bits, nested at most 250 deep") from None
    return value


JsonObject = Annotated[dict[str, Any], AfterValidator(_writable)]
"""An object that goes on to a model, such as a schema."""


class ApiRequest(BaseModel):
    """A request: unknown fields are refused, and values are not converted."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=False)
    # Inputs of the models, and the fields that they are made of.
    made_of: ClassVar[Mapping[str, str]] = {}
    # The fields of all requests of a class that are request parameters of the models.
    common: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def class_of(cls, body: bytes) -> type[ApiRequest]:
        """Whose body this is, where a route has several classes."""
        return cls

    def field_of(self, name: str) -> str:
        """The field that an input or parameter of the model was made of; a text of `input` keeps its number."""
        base, bracket, place = name.partition("[")
        if base not in self.made_of:
            return name
        return self.made_of[base] + (bracket + place if base == "input" else "")

    def request_parameters(self, *more: str) -> dict[str, Any]:
        """The request parameters for the model, those of the fields `more` too."""
        return {name: value for name in (*self.common, *more) if (value := getattr(self, name)) is not None}


class SaidPart(ApiRequest):
    """A part of what was said: a text, or what an assistant said in place of one."""

    type: str
    text: str | None = None
    refusal: str | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.said is None:
            raise PydanticCustomError("no_text", "a part with its text, or of type refusal with its refusal")
        return self

    @property
    def said(self) -> str | None:
        """Its text."""
        return self.refusal if self.type == "refusal" else self.text


class ModelRequest(ApiRequest):
    """A request to one front.

    latency_ms, utility, slo_class and request_tag are the request parameters of the techniques' pages.
    """

    common = ("latency_ms", "utility", "slo_class", "request_tag")

    model: str = Field(min_length=1)
    user: str | None = None
    latency_ms: float | None = None
    utility: float | None = None
    slo_class: str | None = None
    request_tag: str | None = None


class TeiRequest(ApiRequest):
    """A request as TEI has it. model: which front is asked; None: the only one for the route."""

    common = ("truncate",)

    model: str | None = None
    truncate: bool | None = None
    truncation_direction: Annotated[Literal["Left", "Right"] | None, not_served("Right")] = None
