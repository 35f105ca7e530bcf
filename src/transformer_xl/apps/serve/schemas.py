"""The schemas of requests."""

from types import UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    Optional,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    create_model,
)

from transformer_xl.config import GenerateConfig

# JSON can also hold half of a surrogate pair, which a text with a length cannot.
Text = Annotated[str, Field(min_length=0)]
Token = Annotated[StrictInt, Field(ge=0, le=2**31 - 1)]
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
"""The pattern of a name of a session."""
SessionName = Annotated[str, Field(pattern=NAME)]
_Stop = Annotated[str, Field(min_length=1, max_length=256)]


class StreamOptions(BaseModel):
    """Options of a streamed response."""

    model_config = ConfigDict(extra="forbid")

    include_usage: StrictBool = False


def _sampling() -> dict[str, Any]:
    """Return the settings of sampling, with their ranges, as fields that may be left out."""
    options: dict[str, Any] = {}
    hints: dict[str, Any] = get_type_hints(GenerateConfig, include_extras=True)
    for name, kind in hints.items():
        if name in ("prompt", "length", "stop", "seed"):
            continue
        kind = get_args(kind)[0] if get_origin(kind) in (Union, UnionType) else kind
        if get_origin(kind) is Annotated:
            number, limits = get_args(kind)
            most = 1e6 if number is float and limits.le is None else limits.le
            kind = Annotated[number, Field(strict=True, ge=limits.ge, gt=limits.gt, le=most)]
        options[name] = Optional[kind], None  # noqa: UP045  (a value, and no annotation)
    return options


_Sampling: Any = create_model("_Sampling", **_sampling())
SAMPLING = {*_Sampling.model_fields}
"""The fields of a request that are settings of sampling."""


class _Request(_Sampling):
    """What completions and chats have in common: OpenAI's fields, and sampling.

    Settings of sampling that are left out are those of the model folder.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    model: str | None = None
    max_tokens: StrictInt | None = Field(None, ge=0)
    n: StrictInt | None = Field(None, ge=1)
    stop: _Stop | Annotated[list[_Stop], Field(max_length=16)] | None = Field(
        None, description="None: the default of the model folder; []: none."
    )
    seed: StrictInt | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = Field(None, description="Only with stream.")
    # OpenAI's other fields are accepted if their values have no effect.
    user: str | None = None
    logit_bias: dict[str, float] | None = Field(None, max_length=0)
    presence_penalty: float | None = Field(None, ge=0, le=0)
    frequency_penalty: float | None = Field(None, ge=0, le=0)


class CompletionRequest(_Request):
    """A request for completions: OpenAI's fields, and those for sessions."""

    prompt: Text | list[Text] | list[Token] | list[list[Token]] | None = Field(
        None, description="May be left out where a session that has begun is continued."
    )
    echo: StrictBool | None = None
    logprobs: StrictInt | None = Field(None, ge=0, le=20)
    session: SessionName | None = Field(
        None, description="Name of a session: its text is continued, and its memory is kept."
    )
    session_turn: Annotated[StrictInt, Field(ge=0, lt=2**53)] | None = Field(
        None,
        description="How many answers the session has given before this request. If it has given "
        "another number, the request is refused, and appends nothing.",
    )


class TextPart(BaseModel):
    """A part of the content of a message."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text"]
    text: Text


class Message(BaseModel):
    """A message of a chat; one of a response can be sent back as it is."""

    model_config = ConfigDict(extra="forbid")

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[TextPart]
    name: Text | None = None


class ChatRequest(_Request):
    """A request for the next message of a chat."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)]
    max_completion_tokens: StrictInt | None = Field(
        None, ge=0, description="OpenAI's newer name of max_tokens."
    )
    logprobs: StrictBool | None = None
    top_logprobs: StrictInt | None = Field(None, ge=0, le=20, description="Only with logprobs.")


class ForkRequest(BaseModel):
    """A request for a session that goes on from the state of another one."""

    model_config = ConfigDict(extra="forbid")

    to: SessionName


class RewindRequest(BaseModel):
    """A request to take back the last tokens of a session."""

    model_config = ConfigDict(extra="forbid")

    tokens: StrictInt = Field(ge=0)


class _Error(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of an error response."""

    error: _Error
