"""The schemas of requests and responses."""

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


class ResponseFormat(BaseModel):
    """The format of the message of a response."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text"]


class ChatRequest(_Request):
    """A request for the next message of a chat."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)]
    max_completion_tokens: StrictInt | None = Field(
        None, ge=0, description="OpenAI's newer name of max_tokens."
    )
    logprobs: StrictBool | None = None
    top_logprobs: StrictInt | None = Field(None, ge=0, le=20, description="Only with logprobs.")
    # As above: accepted if without effect.
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: StrictBool | None = None
    store: Literal[False] | None = None

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


class _Choice(BaseModel):
    """What a text of a completion and a message of a chat have in common."""

    index: int
    finish_reason: Literal["stop", "length"] | None
    stop_reason: Literal["repetition"] | None = Field(
        None, description='"repetition": the text was ended because it loops.'
    )
    token_ids: list[int] = Field(description="The sampled tokens.")
    logprobs: dict[str, Any] | None = Field(None, description="As OpenAI has them, in nats.")


class Choice(_Choice):
    """A text, or a part of one."""

    text: str


class ChatMessage(BaseModel):
    """The message of a response."""

    role: Literal["assistant"]
    content: str
    refusal: None = None


class ChatChoice(_Choice):
    """A message; in a stream a part of one, in ``delta``."""

    message: ChatMessage


class Usage(BaseModel):
    """Number of tokens read and sampled."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class _Response(BaseModel):
    """What responses have in common. In a stream, settings and warnings are in the first event."""

    id: str
    created: int
    model: str
    usage: Usage | None = None
    settings: dict[str, Any] | None = Field(
        None,
        description="The settings of sampling, those of the request or else of the model folder; "
        "what is off is left out, but for top_k and top_p. seed is that of the first text, text k "
        "has the seed plus k; null: the session continued its own random numbers. preface: tokens "
        "of the model folder that were read before the prompt.",
    )
    warnings: list[str] | None = Field(
        None,
        description="Words or characters of the prompts that are not in the vocabulary and are "
        "read as <unk>.",
    )


class Completion(_Response):
    """A response with completions. In a stream, only its first event has all keys."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[Choice]
    session_turn: int | None = Field(
        None, description="How many answers the session has given with this one."
    )
    repeated: Literal[True] | None = Field(
        None,
        description="The answer was given before, to a request with the same Idempotency-Key, and "
        "nothing was appended now.",
    )


class Chat(_Response):
    """A response with messages."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    chat_template: Literal["setting", "roles", "contents"] = Field(
        description="With what the messages became a prompt: the template of the server, or a "
        "plain one: 'role: content' on lines, or the contents alone."
    )


class Model(BaseModel):
    """A model that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "transformer-xl"
    about: str = Field(description="A description.")


class ModelList(BaseModel):
    """All models that are served."""

    object: Literal["list"] = "list"
    data: list[Model]


class SessionInfo(BaseModel):
    """A session."""

    id: str
    object: Literal["session"] = "session"
    used: int = Field(description="When it was last used, in seconds since 1970.")
    is_busy: bool
    in_memory: bool
    nbytes: int = Field(description="Its size in memory; 0 if it is only on the disk.")


class ForkRequest(BaseModel):
    """A request for a copy of a session."""

    model_config = ConfigDict(extra="forbid")

    name: SessionName = Field(description="Name of the new session; there must be none of it.")


class SessionDetail(SessionInfo):
    """A session, and the content of its memory."""

    turns: int = Field(description="How many answers it has given.")
    remembered: int = Field(description="Number of positions in the memory of each layer.")
    tokens: list[int] = Field(description="The tokens there, and the last one, not yet read.")
    texts: list[str] = Field(description="These tokens as text.")


class SessionList(BaseModel):
    """All sessions, the most recently used first."""

    object: Literal["list"] = "list"
    data: list[SessionInfo]


class Deleted(BaseModel):
    """A session that was deleted."""

    id: str
    object: Literal["session"] = "session"
    deleted: Literal[True] = True


class Health(BaseModel):
    """The health of the server."""

    status: Literal["ok"]


class _About(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of an error response."""

    error: _About


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return error responses for the OpenAPI description."""
    return {status: {"model": ErrorBody, "description": "An error"} for status in statuses}
