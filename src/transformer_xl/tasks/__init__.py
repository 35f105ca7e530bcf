"""Downstream tasks: data as prompts and completions, recipes, metrics, baselines."""

from importlib import import_module

from transformer_xl.errors import InputError
from transformer_xl.tasks.task import Task

TASKS = {
    "babi": "babi:BabiAnswers",
    "digits": "digits.task:SpokenDigits",
    "series": "series.task:TimeSeries",
    "logs": "logs.task:Logs",
    "music": "music.task:Music",
}
"""By name, the module of a task in this package, and its class."""
_GONE = (
    *("digits-adapted", "digits-raw", "poems", "polarity", "sentiment"),
    *("translation-de-en", "translation-en-fr"),
)


def load_task(name: str) -> Task:
    """Return a task by its name.

    Raises:
        InputError: There is no such task.
    """
    if name in _GONE:
        raise InputError(
            f"the task {name} is gone: it was in revision 47b3a2d of transformer_xl, and "
            f"docs/tasks/earlier.md has its figures; there are {', '.join(TASKS)}"
        )
    if name not in TASKS:
        raise InputError(f"there is no task {name!r}: choose one of {', '.join(TASKS)}")
    module, _, task = TASKS[name].partition(":")
    return getattr(import_module(f"{__name__}.{module}"), task)()
