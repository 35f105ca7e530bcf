"""The schemas of requests and responses."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from transformer_xl.apps.serve.sessions import NAME
from transformer_xl.config.evaluation import MAX_HISTORY

Token = Annotated[int, Field(ge=0, le=2**31 - 1)]
SessionName = Annotated[str, Field(pattern=NAME)]
_Stop = Annotated[str, Field(min_length=1, max_length=256)]
_Breaker = Annotated[str, Field(min_length=1, max_length=64)]


class StreamOptions(BaseModel):
    """Options of a streamed response."""

    include_usage: bool = False


class CompletionRequest(BaseModel):
    """A request for completions: OpenAI's fields, and those for sessions and attention."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    model: str | None = None
    prompt: str | list[str] | list[Token] | list[list[Token]] = ""
    max_tokens: int | None = Field(None, ge=0)
    temperature: Annotated[float, Field(ge=0, le=100)] | None = Field(
        None,
        description="None, as for all settings of sampling: the default of the model folder.",
    )
    top_p: float | None = Field(None, gt=0, le=1, description="1: all tokens.")
    top_k: int | None = Field(None, ge=1)
    min_p: float | None = Field(None, ge=0, le=1, description="0: all tokens.")
    typical_p: float | None = Field(None, gt=0, le=1, description="1: all tokens.")
    frequency_penalty: float | None = Field(None, ge=-2, le=2, description="0: none.")
    presence_penalty: float | None = Field(None, ge=-2, le=2, description="0: none.")
    repetition_penalty: float | None = Field(None, gt=0, le=1e6, description="1: none.")
    penalty_window: int | None = Field(
        None,
        ge=1,
        le=MAX_HISTORY,
        description="How many of the last tokens, prompt and session included, penalties consider.",
    )
    dry_multiplier: float | None = Field(None, ge=0, le=1e6, description="0: no DRY.")
    dry_base: float | None = Field(None, ge=1, le=1e6)
    dry_allowed_length: int | None = Field(None, ge=1, le=64)
    dry_sequence_breakers: Annotated[list[_Breaker], Field(max_length=16)] | None = None
    on_loop: Literal["continue", "end", "break"] | None = Field(
        None,
        description="What to do once the sampled tokens repeat one sequence, of at most "
        "loop_max_period tokens, loop_min_count times or more and over loop_min_length tokens or "
        "more.",
    )
    loop_max_period: int | None = Field(None, ge=1, le=1024)
    loop_min_count: int | None = Field(None, ge=2, le=MAX_HISTORY)
    loop_min_length: int | None = Field(None, ge=1, le=MAX_HISTORY)
    n: int | None = Field(None, ge=1)
    stop: _Stop | Annotated[list[_Stop], Field(max_length=16)] | None = Field(
        None, description="None: the default of the model folder; []: none."
    )
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=20)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    session: SessionName | None = Field(
        None, description="Name of a session: its text is continued, and its memory is kept."
    )
    attention: Annotated[int, Field(ge=0, le=64)] | None = Field(
        None, description="For each token, how many positions of the largest attention to return."
    )
    # OpenAI's other fields are accepted if their values have no effect.
    user: str | None = None
    suffix: None = None
    best_of: int | None = Field(None, ge=1)
    logit_bias: dict[str, float] | None = Field(None, max_length=0)


class Logprobs(BaseModel):
    """Log-probabilities, in nats, of the tokens of a text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class Choice(BaseModel):
    """A text, or a part of one."""

    index: int
    text: str
    logprobs: Logprobs | None = None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: Literal["repetition"] | None = Field(
        None, description='"repetition": the text was ended because it loops.'
    )
    token_ids: list[int] = Field(description="The sampled tokens.")
    attention: list[list[tuple[int, float]]] | None = Field(
        None,
        description="For each sampled token, pairs of a distance in tokens (0: the token before) "
        "and its share of the attention, averaged over heads and layers.",
    )


class Usage(BaseModel):
    """Number of tokens read and sampled."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Drawing(BaseModel):
    """The settings of sampling: those of the request, else those of the model folder.

    Filters and penalties that are off are left out, but for ``top_k`` and ``top_p``.
    """

    temperature: float
    top_k: int | None = Field(description="None: from all tokens.")
    top_p: float | None = Field(description="None: from all tokens.")
    min_p: float | None = None
    typical_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    penalty_window: int | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_sequence_breakers: list[str] | None = None
    on_loop: str | None = None
    loop_max_period: int | None = None
    loop_min_count: int | None = None
    loop_min_length: int | None = None
    seed: int | None = Field(
        description="Of the first text; text k has the seed plus k. None: the session continued "
        "its own random numbers."
    )
    max_tokens: int


class Completion(BaseModel):
    """A response."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | None = None
    settings: Drawing | None = Field(None, description="In a stream, only in the first event.")
    warnings: list[str] | None = Field(
        None,
        description="Words or characters of the prompts that are not in the vocabulary and are "
        "read as <unk>. In a stream, only in the first event.",
    )


class Model(BaseModel):
    """A model that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "transformer-xl"
    about: str = Field(description="A description.")
    attention: bool = Field(description="Whether it has attention weights to return.")


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
    is_saved: bool
    in_memory: bool
    nbytes: int = Field(description="Its size in memory; 0 if it is only on the disk.")


class SessionDetail(SessionInfo):
    """A session, and the content of its memory."""

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


class Attention(BaseModel):
    """The attention with which the next token of a session is predicted."""

    session: str
    shares: list[float] = Field(
        description="Mean over heads and layers, oldest position first, the last token last."
    )
    tokens: list[int] = Field(description="The tokens there; fewer if older ones are not known.")
    texts: list[str]


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


SAMPLING = {*Drawing.model_fields} & {*CompletionRequest.model_fields} - {"seed", "max_tokens"}
"""The fields of a request that are settings of sampling."""


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return error responses for the OpenAPI description."""
    return {status: {"model": ErrorBody, "description": "An error"} for status in statuses}
