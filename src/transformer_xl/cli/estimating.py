"""The command that estimates memory, compute and communication of a run: estimate."""

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from transformer_xl.cli.fitting import FittedRecipe
from transformer_xl.cli.given import Value
from transformer_xl.cli.printing import say, show
from transformer_xl.config import Config
from transformer_xl.config.recipes import load_recipe

if TYPE_CHECKING:
    from transformer_xl.apps.estimate import Plan

_MOMENTS = {
    "loss": "after the loss",
    "backward": "in the last layer's backward pass",
    "embedding": "at the word embeddings' gradient",
    "update": "in the update",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Assume:
    """Shares of the data sheet's figures that are reached; assumptions, not measurements."""

    products: float = 0.4
    """Utilization of the peak FLOP/s over a whole step (MFU)."""
    links: float = 0.8
    """Utilization of NVLink and network."""
    room: float = 0.9
    """Usable share of the GPU's memory."""


@dataclass(kw_only=True)
class Estimate(FittedRecipe):
    """Estimate memory, FLOPs and communication of a recipe on many GPUs, without running it.

    Memory and bytes are computed from the settings, seconds from a data sheet and assumed shares of
    it: estimates, not measurements. docs/scale.md has the formulas and how they were checked.

    Examples:
      txl estimate paper-wt103-large --gpus 64
      txl estimate paper-wt103-large --gpus 64 --train.parallel fsdp --gpu a100 --json
      txl estimate mine.toml --gpus 8 --model.vocab_size 30000 --train.accumulate 4
    """

    gpus: int = 1
    """Processes, each with a GPU; the streams of the recipe are divided over them."""
    gpu: Literal["a100", "h100", "h200"] = "h100"
    """Kind of GPU, in machines of eight with a network card each; figures of its data sheet."""
    assume: Annotated[Assume, Value] = field(default_factory=Assume)

    def config(self) -> Config:
        """Return the recipe with the given settings; evaluation and sampling are not counted."""
        recipe = load_recipe(self.recipe)
        return self.changed(Config(model=recipe.model, data=recipe.data, train=recipe.train))

    def run(self) -> None:
        """Compute the estimate and print it."""
        from transformer_xl.apps import estimate

        config = self.config()
        if not config.model.vocab_size:
            config = estimate.with_known_vocabulary(config)
            say(
                f"vocab_size={config.model.vocab_size} is that of the recipe's corpus; "
                "--model.vocab_size gives another"
            )
        settings = config.train
        precision = "bfloat16" if settings.precision == "auto" else settings.precision
        plan = estimate.Plan(
            config=config, ranks=self.gpus, parallel=settings.parallel, precision=precision
        )
        assumed = estimate.Assumed(**asdict(self.assume))
        result = estimate.summary(plan, estimate.HARDWARE[self.gpu], assumed)
        if settings.compile:
            say("train.compile: the compiler decides what is kept; this is the estimate without it")
        if self.json:
            show(result, as_json=True)
        else:
            _show(plan, result)


def _show(plan: "Plan", result: dict[str, Any]) -> None:
    model, settings = plan.config.model, plan.config.train
    print(
        f"an estimate, not a measurement: {result['parameters']:,} weights on {plan.ranks} x "
        f"{result['hardware']['name']}, {plan.parallel}, {plan.precision}\n"
        f"{settings.batch_size} streams, {plan.streams} on each GPU in {settings.accumulate} "
        f"part{'s' * (settings.accumulate > 1)}; {settings.segment_len} tokens and {model.mem_len} "
        "remembered\n"
    )
    memory = result["memory"]
    names = [name for name in _MOMENTS if name in memory["moments"]]
    print(f"MB on a GPU       {''.join(f'{name:>12}' for name in names)}")
    for part in memory["moments"][names[0]]:
        cells = (memory["moments"][name][part] / 1e6 for name in names)
        print(f"{part:18}{''.join(f'{x:12,.0f}' for x in cells)}")
    room = result["hardware"]["memory_gb"] * result["assumed"]["room"]
    print(
        f"most: {memory['most'] / 1e9:.2f} GB, {_MOMENTS[memory['moment']]}; "
        f"{'fits' if result['fits'] else 'does not fit'} into {room:.0f} GB\n"
        f"largest batch here: {result['largest_batch']:,} streams\n"
        f"checkpoint: {result['checkpoint'] / 1e9:.2f} GB in all\n"
    )
    for what, values, unit in (
        ("FLOPs of a GPU", result["flops"], (1e12, "TFLOP")),
        ("sent by a GPU", result["sent"], (1e6, "MB")),
    ):
        parts = [f"{name} {x / unit[0]:,.2f}" for name, x in values.items() if x]
        print(f"{what}, {unit[1]} a step: {', '.join(parts) or 'none'}")
    taken = result["seconds"]
    print(
        f"ms a step: {1e3 * taken['products']:,.1f} products, {1e3 * taken['update']:,.1f} update, "
        f"{1e3 * taken['sending']:,.1f} communication; together {1e3 * taken['hidden']:,.1f} if it "
        f"overlaps, {1e3 * taken['open']:,.1f} if not\n"
        f"tokens a second: {result['tokens_per_second']['open']:,.0f} to "
        f"{result['tokens_per_second']['hidden']:,.0f}"
    )
    bound = result["bound_by_sending_from"]
    limit = "never" if bound is None else f"from {bound} GPUs on"
    print(
        f"communication takes longer than computation: {limit}, of at most {result['most_gpus']} "
        "GPUs that these streams can be divided over"
    )
