"""All that is estimated of a recipe, as one value for people and programs."""

from dataclasses import asdict, replace
from typing import Any

from transformer_xl.apps.estimate.plan import Plan, count_weights
from transformer_xl.apps.estimate.scaling import (
    Assumed,
    Hardware,
    bound_by_sending_from,
    fits,
    largest_batch,
    most_gpus,
    sent_bytes,
    step_flops,
    times,
)
from transformer_xl.apps.estimate.training_memory import checkpoint_bytes, moments, peak
from transformer_xl.config import Config
from transformer_xl.data.catalogue import known_vocab_size


def with_known_vocabulary(config: Config) -> Config:
    """Return the recipe with the size of its vocabulary, where that is known without the text.

    Raises:
        ValueError: It depends on the text.
    """
    size = known_vocab_size(config.data)
    if size is None:
        raise ValueError(
            f"model.vocab_size=0 is left to the text, and how many {config.data.vocab} it has is "
            "not known before it is read: give the number with --model.vocab_size"
        )
    return replace(config, model=replace(config.model, vocab_size=size))


def summary(plan: Plan, hardware: Hardware, assumed: Assumed) -> dict[str, Any]:
    """Return everything that is estimated: bytes, operations and seconds of one GPU in a step."""
    moment, most = peak(plan)
    taken = times(plan, hardware, assumed)
    tokens = plan.config.train.batch_size * plan.config.train.segment_len
    return {
        "is_estimate": True,
        "parameters": count_weights(plan.config.model).total,
        "gpus": plan.ranks,
        "parallel": plan.parallel,
        "precision": plan.precision,
        "batch_size": plan.config.train.batch_size,
        "segment_len": plan.config.train.segment_len,
        "mem_len": plan.config.model.mem_len,
        "memory": {
            "most": most.total,
            "moment": moment,
            "moments": {name: asdict(x) | {"total": x.total} for name, x in moments(plan).items()},
        },
        "fits": fits(plan, hardware, assumed),
        "largest_batch": largest_batch(plan, hardware, assumed),
        "checkpoint": checkpoint_bytes(plan),
        "flops": dict(step_flops(plan)),
        "sent": dict(sent_bytes(plan)),
        "seconds": asdict(taken) | {"hidden": taken.hidden, "open": taken.open},
        "tokens_per_second": {"hidden": tokens / taken.hidden, "open": tokens / taken.open},
        "most_gpus": most_gpus(plan),
        "bound_by_sending_from": bound_by_sending_from(plan, hardware, assumed),
        "hardware": asdict(hardware),
        "assumed": asdict(assumed),
    }
