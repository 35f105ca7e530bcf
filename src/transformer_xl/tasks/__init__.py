"""Downstream tasks: data as prompts and completions, recipes, metrics, baselines."""

from importlib import import_module

from transformer_xl.tasks.task import Task

TASKS = {
    "babi": "babi_answers:BabiAnswers",
    "digits": "spoken_digits:SpokenDigits",
    "digits-adapted": "spoken_digits:AdaptedDigits",
    "digits-raw": "spoken_digits:RawDigits",
    "series": "time_series:TimeSeries",
    "translation-de-en": "translation:GermanEnglish",
    "translation-en-fr": "translation:EnglishFrench",
    "sentiment": "sentiment:Sentiment",
    "polarity": "sentiment:Polarity",
    "logs": "logs_anomalies:Logs",
    "music": "chorales:Music",
    "poems": "poems:Poems",
}
"""By name, the module of a task in this package, and its class."""


def load_task(name: str) -> Task:
    """Return a task by its name.

    Raises:
        ValueError: There is no such task.
    """
    if name not in TASKS:
        raise ValueError(f"there is no task {name!r}: choose one of {', '.join(TASKS)}")
    module, _, task = TASKS[name].partition(":")
    return getattr(import_module(f"{__name__}.{module}"), task)()
