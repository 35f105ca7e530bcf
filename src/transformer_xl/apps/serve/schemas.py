"""What requests and answers look like."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Token = Annotated[int, Field(ge=0, le=2**31 - 1)]
SessionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
_Stop = Annotated[str, Field(min_length=1, max_length=256)]


class StreamOptions(BaseModel):
    """How an answer is streamed."""

    include_usage: bool = False


class CompletionRequest(BaseModel):
    """A text to be continued, as OpenAI's completions have it, and what only a memory can do."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    model: str | None = None
    prompt: str | list[str] | list[Token] | list[list[Token]] = ""
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = Field(
        None, description="None, as for top_p and top_k: as the model's folder says."
    )
    top_p: Annotated[float, Field(gt=0, le=1)] | None = Field(None, description="1: no cut.")
    top_k: Annotated[int, Field(ge=1)] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stop: _Stop | Annotated[list[_Stop], Field(max_length=16)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    session: SessionName | None = Field(
        None, description="Name of a session: the text goes on from its memory, which is kept."
    )
    attention: Annotated[int, Field(ge=0, le=64)] | None = Field(
        None, description="For each token, how many of the places it was predicted from are told."
    )
    # Of OpenAI's, these are taken where they ask for nothing.
    user: str | None = None
    suffix: None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    presence_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None


class Logprobs(BaseModel):
    """Log-probabilities, in nats, of the tokens of a text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class Choice(BaseModel):
    """A text, or a piece of one."""

    index: int
    text: str
    logprobs: Logprobs | None = None
    finish_reason: Literal["stop", "length"] | None
    token_ids: list[int] = Field(description="The tokens that were drawn.")
    attention: list[list[tuple[int, float]]] | None = Field(
        None,
        description="For each token that was drawn, how many tokens back (0: the one before it) "
        "and what share of the attention of all heads and layers was there.",
    )


class Usage(BaseModel):
    """How many tokens were read and drawn."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Drawing(BaseModel):
    """How texts are drawn: what the request asked for, and else what the model's folder says."""

    temperature: float
    top_k: int | None = Field(description="None: from all tokens.")
    top_p: float | None = Field(description="None: from all tokens.")
    seed: int | None = Field(
        description="Of the first text; text k has the seed plus k. None: the session's own random "
        "numbers went on."
    )
    max_tokens: int


class Completion(BaseModel):
    """An answer."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | None = None
    settings: Drawing | None = Field(None, description="In a stream, of the first event alone.")
    warnings: list[str] | None = Field(
        None,
        description="What of the prompts is not in the vocabulary and is read as <unk>, if any. In "
        "a stream, of the first event alone.",
    )


class Model(BaseModel):
    """A model that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "transformer-xl"
    about: str = Field(description="What it is, in words.")
    attention: bool = Field(description="Whether it can show what a token was predicted from.")


class ModelList(BaseModel):
    """All of them."""

    object: Literal["list"] = "list"
    data: list[Model]


class SessionInfo(BaseModel):
    """A session."""

    id: str
    object: Literal["session"] = "session"
    used: int = Field(description="When it was last used, in seconds since 1970.")
    is_busy: bool
    is_saved: bool
    in_memory: bool
    nbytes: int = Field(description="Its size in memory; 0 where it is on the disk alone.")


class SessionDetail(SessionInfo):
    """A session, and what it remembers."""

    remembered: int = Field(description="How many positions each layer remembers.")
    tokens: list[int] = Field(description="The tokens there, and the last one, not yet read.")
    texts: list[str] = Field(description="These tokens as text.")


class SessionList(BaseModel):
    """All sessions, those used last first."""

    object: Literal["list"] = "list"
    data: list[SessionInfo]


class Deleted(BaseModel):
    """A session that is no more."""

    id: str
    object: Literal["session"] = "session"
    deleted: Literal[True] = True


class Attention(BaseModel):
    """What the next token of a session will be predicted from."""

    session: str
    shares: list[float] = Field(
        description="Mean over the heads and layers, oldest place first, the last token last."
    )
    tokens: list[int] = Field(description="The tokens there; fewer where older ones are not known.")
    texts: list[str]


class Health(BaseModel):
    """Whether the server is well."""

    status: Literal["ok"]


class _About(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """What went wrong."""

    error: _About


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return what the description says of errors."""
    always = (400, 401, 408, 413, 415, 421, 422, 500)
    return {
        status: {"model": ErrorBody, "description": "An error"}
        for status in sorted({*always, *statuses})
    }
