"""The schemas of requests."""

from types import UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    LiteralString,
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
    StrictFloat,
    StrictInt,
    create_model,
    model_validator,
)
from pydantic_core import PydanticCustomError

from transformer_xl.apps.serve.session_store import NAME
from transformer_xl.config import GenerateConfig


def _require(holds: bool, message: str, param: str, code: LiteralString = "invalid_value") -> None:
    """Require what fields have in common; ``code`` and ``param`` are those of the response."""
    if not holds:
        raise PydanticCustomError(code, "{message}", {"message": message, "param": param})


# JSON can also hold half of a surrogate pair, which a text with a length cannot.
Text = Annotated[str, Field(min_length=0)]
Token = Annotated[StrictInt, Field(ge=0, le=2**31 - 1)]
KEY = r"^[!-~]{1,255}$"
"""The pattern of an Idempotency-Key."""
SessionName = Annotated[str, Field(pattern=NAME)]
_Stop = Annotated[str, Field(min_length=1, max_length=256)]
_Breaker = Annotated[str, Field(min_length=1, max_length=64)]


class StreamOptions(BaseModel):
    """Options of a streamed response."""

    model_config = ConfigDict(extra="forbid")

    include_usage: StrictBool = False
    # Accepted if without effect: no event is padded here.
    include_obfuscation: Literal[False] | None = None


def _sampling() -> dict[str, Any]:
    """Return the settings of sampling, with their ranges, as fields that may be left out."""
    options: dict[str, Any] = {}
    hints: dict[str, Any] = get_type_hints(GenerateConfig, include_extras=True)
    for name, kind in hints.items():
        if name in ("prompt", "length", "stop", "seed", "beam_size", "length_penalty"):
            continue
        kind = get_args(kind)[0] if get_origin(kind) in (Union, UnionType) else kind
        if get_origin(kind) is tuple:
            kind = Annotated[list[_Breaker], Field(max_length=16)]
        elif get_origin(kind) is Annotated:
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
    logit_bias: dict[str, StrictFloat] | None = Field(None, max_length=0)

    @model_validator(mode="after")
    def _require_stream(self) -> "_Request":
        message = "stream_options has no effect without stream: leave it out, or set stream"
        _require(bool(self.stream or not self.stream_options), message, "stream_options")
        return self


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
    suffix: None = None

    @model_validator(mode="after")
    def _require_no_echo(self) -> "CompletionRequest":
        message = (
            "echo and scores of prompts are gone: txl score scores a text, and "
            "transformer_xl.harness has the model type transformer-xl of lm-evaluation-harness"
        )
        _require(not self.echo, message, "echo", "unsupported")
        return self


class TextPart(BaseModel):
    """A part of the content of a message."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text"]
    text: Text


class Message(BaseModel):
    """A message of a chat. A message of a response can be sent back as it is."""

    model_config = ConfigDict(extra="forbid")

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[TextPart]
    name: Text | None = None
    refusal: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None


class ChatRequest(_Request):
    """A request for the next message of a chat."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)]
    max_completion_tokens: StrictInt | None = Field(
        None, ge=0, description="OpenAI's newer name of max_tokens."
    )
    logprobs: StrictBool | None = None
    top_logprobs: StrictInt | None = Field(None, ge=0, le=20, description="Only with logprobs.")

    @model_validator(mode="after")
    def _require_one_length(self) -> "ChatRequest":
        limits = self.max_tokens, self.max_completion_tokens
        _require(
            None in limits or limits[0] == limits[1],
            "max_tokens={} and max_completion_tokens={}: give one".format(*limits),
            "max_completion_tokens",
        )
        message = "top_logprobs has no effect without logprobs: leave it out, or set logprobs"
        _require(bool(self.top_logprobs is None or self.logprobs), message, "top_logprobs")
        return self


class _Error(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of an error response."""

    error: _Error
