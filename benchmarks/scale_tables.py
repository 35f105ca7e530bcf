"""Write the tables of docs/scale.md.

    python benchmarks/scale_tables.py            # whether they are up to date
    python benchmarks/scale_tables.py --write

Most are made by the estimate alone; those of how far it is right, of the files that
`benchmarks/estimating.py` and `benchmarks/estimating_ranks.py` have written.
"""

import json
from bisect import bisect
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from beyond import WAYS as GROUPS
from beyond import has_room, seconds
from marked_tables import main, row, table

from transformer_xl.apps.estimate import (
    HARDWARE,
    Assumed,
    Plan,
    count_weights,
    peak,
    sent_bytes,
    times,
    with_known_vocabulary,
)
from transformer_xl.apps.estimate.scaling import (
    bound_by_sending_from,
    largest_batch,
    most_gpus,
    step_flops,
)
from transformer_xl.config.recipes import load_recipe

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "scale.md"
RESULTS = ROOT / "benchmarks" / "results"
COMPARED = RESULTS / "estimating_cpu_epyc_202611.json"
RANKS = RESULTS / "estimating_ranks_cpu_epyc_202611.json"


def _line(case: Mapping[str, Any]) -> str:
    mb = [f"{case[name] / 1e6:,.0f}" for name in ("estimated", "allocated", "resident")]
    shares = [f"{case['estimated'] / case[name]:.2f}" for name in ("allocated", "resident")]
    cells = (case["case"], f"{case['parameters'] / 1e6:.1f} M", case["moment"], *mb, *shares)
    return row(*cells)


def _rank_line(case: Mapping[str, Any]) -> str:
    held, sent = case["estimated"] / case["allocated"], case["estimated_sent"] / case["sent"]
    return row(
        case["case"],
        case["parallel"].upper(),
        *(f"{case[name] / 1e6:,.0f}" for name in ("estimated", "allocated")),
        f"{held:.2f}",
        *(f"{case[name] / 1e6:,.1f}" for name in ("estimated_sent", "sent")),
        f"{sent:.2f}",
    )


def _rows(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["rows"]


def tables() -> dict[str, str]:
    """Return the tables of the page by their names."""
    columns = "case|weights|most at|estimated, MB|tensors, MB|process, MB|estimated / tensors"
    return {
        "comparison": table(f"{columns}|/ process", map(_line, _rows(COMPARED)), n_texts=1),
        "ranks": table(
            "case|shared by|estimated, MB|tensors, MB|estimated / tensors"
            "|to be sent, MB|sent, MB|to be sent / sent",
            map(_rank_line, _rows(RANKS)),
            n_texts=2,
        ),
        "recipes": table(
            "recipe|GPUs|streams each|GB, DDP|GB, FSDP|TFLOP|MB sent, DDP|MB sent, FSDP"
            "|ms computing|ms sending, DDP|ms sending, FSDP",
            (_recipe_row(name, ranks) for name in RECIPES for ranks in (1, 8, 64, 512)),
            n_texts=1,
        ),
        "limits": table(
            "recipe|most GPUs|sending longer, DDP|sending longer, FSDP"
            "|largest batch on 8, DDP|on 8, FSDP|root unit",
            map(_limit_row, RECIPES),
            n_texts=1,
        ),
        "muon": table(
            "GPUs|TFLOP for the model|TFLOP for Muon|share|MB gathered for it, FSDP",
            map(_muon_row, (1, 8, 64, 128)),
        ),
        "memory": table(
            "remembered|GB remembered, old and new|keys and values, GB|all on one GPU, GB|fits",
            map(_memory_row, (384, 4096, 32_768, 131_072, 262_144)),
        ),
        "beyond": table(
            "divided|GPUs in a group|GPUs|GB|TFLOP|MB sent in the group|waiting|ms a step"
            "|longest memory",
            (_beyond_row(*each) for each in BEYOND),
            n_texts=1,
        ),
    }


RECIPES = ("paper-wt103-large-nvidia-multinode", "paper-wt103-large", "wikitext-103")
BEYOND = (
    ("data", 1),
    *((way, G) for G in (2, 8) for way in ("sequence", "tensor")),
    *(("pipeline", G) for G in (2, 6)),
)
GPU, ASSUMED = HARDWARE["h100"], Assumed()


def _plan(name: str, ranks: int, parallel: Any = "ddp", **model: Any) -> Plan:
    config = with_known_vocabulary(load_recipe(name))
    config = replace(config, model=replace(config.model, **model))
    return Plan(config=config, ranks=ranks, parallel=parallel)


def _recipe_row(name: str, ranks: int) -> str:
    streams = load_recipe(name).train.batch_size
    if streams % ranks:
        return row(f"`{name}`", ranks, f"{streams} in all", *["-"] * 8)
    plans = [_plan(name, ranks, parallel) for parallel in ("ddp", "fsdp")]
    taken = [times(plan, GPU, ASSUMED) for plan in plans]
    return row(
        f"`{name}`",
        ranks,
        plans[0].streams,
        *(f"{peak(plan)[1].total / 1e9:.2f}" for plan in plans),
        f"{sum(step_flops(plans[0]).values()) / 1e12:,.2f}",
        *(f"{sum(sent_bytes(plan).values()) / 1e6:,.0f}" for plan in plans),
        f"{1e3 * (taken[0].products + taken[0].update):,.1f}",
        *(f"{1e3 * each.sending:,.1f}" for each in taken),
    )


def _limit_row(name: str) -> str:
    plans = [_plan(name, 8, parallel) for parallel in ("ddp", "fsdp")]
    bounds = (bound_by_sending_from(plan, GPU, ASSUMED) for plan in plans)
    weights = count_weights(plans[0].config.model)
    return row(
        f"`{name}`",
        most_gpus(plans[0]),
        *("never" if bound is None else f"from {bound}" for bound in bounds),
        *(f"{largest_batch(plan, GPU, ASSUMED):,}" for plan in plans),
        f"{weights.root / weights.total:.0%} of {weights.total / 1e6:.0f} M",
    )


def _muon_row(ranks: int) -> str:
    plan = _plan("wikitext-103", ranks, "fsdp")
    flops = step_flops(plan)
    return row(
        ranks,
        f"{flops['model'] / 1e12:,.3f}",
        f"{flops['Muon'] / 1e12:,.3f}",
        f"{flops['Muon'] / sum(flops.values()):.0%}",
        f"{sent_bytes(plan).get('matrices of Muon', 0) / 1e6:,.0f}",
    )


def _memory_row(mem_len: int) -> str:
    plan = _plan("paper-wt103-large", 128, mem_len=mem_len)
    model, held = plan.config.model, peak(plan)[1]
    keys = 2 * plan.operand * model.n_layer * (plan.M + plan.T) * model.n_head * model.head_width
    is_room = held.total <= ASSUMED.room * 1e9 * GPU.memory_gb
    numbers = (f"{x / 1e9:,.2f}" for x in (held.memory, keys, held.total))
    return row(f"{mem_len:,}", *numbers, "yes" if is_room else "no")


def _beyond_row(way: str, G: int) -> str:
    plan = _plan("paper-wt103-large", 128)
    share = GROUPS[way](plan, G)

    def fits(n: int) -> bool:
        model = replace(plan.config.model, mem_len=n * 1024)
        other = replace(plan, config=replace(plan.config, model=model))
        return has_room(GROUPS[way](other, G), GPU, ASSUMED)

    # To be found by halving: what fits is all below it.
    longest = bisect(range(1 << 12), False, key=lambda n: not fits(n)) - 1
    return row(
        way,
        G,
        plan.ranks * G,
        f"{share.bytes_held / 1e9:.2f}",
        f"{share.flops / 1e12:.2f}",
        f"{share.bytes_in_group / 1e6:,.0f}",
        f"{share.idle:.0%}",
        f"{1e3 * seconds(share, plan, G, GPU, ASSUMED):.1f}",
        f"{longest:,} k",
    )


if __name__ == "__main__":
    main(PAGE, tables(), "scale_tables.py")
