"""The prompts of a request: texts, or tokens."""

from typing import Any

from transformer_xl.apps.serve.errors import ApiError
from transformer_xl.apps.serve.schemas import CompletionRequest
from transformer_xl.apps.serve.service import Service
from transformer_xl.data.unknown import unknown_warning


def read_prompts(
    service: Service, body: CompletionRequest
) -> tuple[list[tuple[str, list[int]]], list[str]]:
    """Cut the prompts of a request into tokens.

    Returns:
        For each, what an echo of it is, if that is asked for, and its tokens; then warnings of what
        is read as ``<unk>``.

    Raises:
        ApiError: One cannot be cut, is too long, or there is none.
    """
    vocab, limit = service.vocab, service.settings.max_prompt
    given = body.prompt
    one = isinstance(given, str) or (given and isinstance(given[0], int))
    prompts: list[Any] = [given] if one else list(given)
    found, warnings = [], []
    for prompt in prompts:
        if isinstance(prompt, str):
            try:
                ids = vocab.encode(prompt)
            except ValueError as error:
                raise ApiError(400, f"prompt: {error}", "unknown_symbol", "prompt") from error
            if warning := unknown_warning(vocab, prompt, ids):
                warnings.append(f"prompt: {warning}")
        else:
            ids = prompt
            wrong = next((token for token in ids if token >= len(vocab)), None)
            if wrong is not None:
                message = f"token {wrong} is outside the vocabulary of {len(vocab)}"
                raise ApiError(400, message, "unknown_token", "prompt")
        if len(ids) > limit:
            message = f"the prompt has {len(ids)} tokens; at most {limit} are read at once"
            raise ApiError(400, message, "too_long", "prompt")
        begin = ""
        if body.echo:
            begin = prompt if isinstance(prompt, str) else vocab.decode(ids)
        found.append((begin, ids))
    if not found:
        raise ApiError(400, "the list of prompts is empty: give one", "empty_prompt", "prompt")
    return found, warnings
