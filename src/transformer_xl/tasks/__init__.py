"""Downstream tasks: data as prompts and completions, recipes, metrics, baselines."""

from importlib import import_module

from transformer_xl.errors import InputError
from transformer_xl.tasks.task import Task

TASKS = {
    "babi": "babi:BabiAnswers",
    "digits": "digits.task:SpokenDigits",
    "digits-adapted": "digits.task:AdaptedDigits",
    "digits-raw": "digits.task:RawDigits",
    "series": "series.task:TimeSeries",
    "translation-de-en": "translation:GermanEnglish",
    "translation-en-fr": "translation:EnglishFrench",
    "sentiment": "sentiment:Sentiment",
    "polarity": "sentiment:Polarity",
    "logs": "logs.task:Logs",
    "music": "music.task:Music",
    "poems": "poems:Poems",
}
"""By name, the module of a task in this package, and its class."""


def load_task(name: str) -> Task:
    """Return a task by its name.

    Raises:
        ValueError: There is no such task.
    """
    if name not in TASKS:
        raise InputError(f"there is no task {name!r}: choose one of {', '.join(TASKS)}")
    module, _, task = TASKS[name].partition(":")
    return getattr(import_module(f"{__name__}.{module}"), task)()
