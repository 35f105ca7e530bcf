"""The command models."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from transformer_xl.cli.printing import say, show
from transformer_xl.config import ShippedModel, newest_models, require_shipped


@dataclass(kw_only=True)
class Models:
    """List the models that come with the package, or show the card of one.

    Whatever takes a model folder takes the name of such a model, without a version or with one, as
    in python-code-1. A model folder or run folder of that name comes first; after both,
    OWNER/NAME is looked up on the Hugging Face hub.

    Examples:
      txl models
      txl models python-code
      txl models --json
    """

    name: Annotated[str, tyro.conf.Positional] = ""
    """The model to show, as python-code or python-code-1."""
    json: bool = False
    """Print one JSON object: all models by name, or the named one."""

    def run(self) -> int:
        """Print the list or the card; return 1 if a model cannot be read."""
        if self.name:
            model = require_shipped(self.name)
            if self.json:
                show(model.about(), as_json=True)
            else:
                print(model.text, end="")
            return 0
        models, about = newest_models(), {}
        if not models and not self.json:
            say("this installation has no models")
        for model in models:
            try:
                about[model.name] = model.about()
            except (OSError, RuntimeError, ValueError) as error:
                say(f"{model.full_name} cannot be read, install transformer-xl again: {error}")
            else:
                if not self.json:
                    _show(model)
        if self.json:
            show(about, as_json=True)
        return int(len(about) < len(models))


def _show(model: ShippedModel) -> None:
    card = model.card
    metric, value = next(iter(card.metrics.items()))
    print(f"{model.name} (version {model.version}): {card.summary}")
    size = f"{model.n_parameters / 1e6:.1f} M parameters, {model.n_bytes / 1e6:.1f} MB"
    facts = {"size": size, "figure": f"{value:g} {metric}", "data": card.data}
    for name, fact in (facts | {"licence": card.licence}).items():
        print(f"  {name:8} {fact}")
