"""The command task, which trains and measures models on a downstream task."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from transformer_xl.cli.given import LoadsModels, PrintsResult
from transformer_xl.cli.printing import say, show


@dataclass(kw_only=True)
class Task(LoadsModels, PrintsResult):
    """Train models on a downstream task, and measure them beside simple baselines.

    A task turns published data into texts, trains by its recipes, and scores the answers; its page
    in docs/tasks says where the data are and what was reached. Without a name, the tasks are
    listed. The same command goes on with what was stopped.

    Examples:
      txl task
      txl task babi data/babi --out runs/babi
      txl task babi data/babi --models txl lstm --seeds 1 2 3 --out runs/babi
      txl task babi data/babi --models mine.toml --out runs/mine
      txl task logs --models txl lstm
    """

    name: Annotated[str, tyro.conf.Positional] = ""
    """The task."""
    source: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")] = None
    """The folder or file with its data, as they are published; some tasks make theirs."""
    models: tuple[str, ...] = ("txl",)
    """Models: names that the list of tasks shows, or recipe files. With nothing after it, baselines
    only."""
    seeds: tuple[int, ...] = (1,)
    """Seeds; each model is trained once with each."""
    out: Path | None = None
    """Folder of the texts, the runs, results.json and results.md; default: runs/tasks/NAME."""

    def run(self) -> None:
        """List the tasks, or run one."""
        from transformer_xl.tasks import TASKS, load_task

        if not self.name:
            about = {x: load_task(x) for x in TASKS}
            show({x: f"{y.title}; models: {', '.join(y.models)}" for x, y in about.items()},
                 as_json=self.json)  # fmt: skip
            return
        task = load_task(self.name)
        from transformer_xl.config import prepare_process
        from transformer_xl.tasks.run import run_task

        prepare_process()
        self.out = self.out or Path("runs") / "tasks" / self.name
        results = run_task(
            task, self.source, self.out, models=self.models, seeds=self.seeds, say=say
        )
        (say if self.json else print)((self.out / "results.md").read_text())
        if self.json:
            show(results, as_json=True)
