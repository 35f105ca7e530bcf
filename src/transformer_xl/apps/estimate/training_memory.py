"""How many bytes a process of a training run takes, counted from its settings.

Every function is a formula. Letters are those of the package: B streams of one process in one
part of a step, T tokens, M remembered positions, S = M + T keys, D, F, V and E widths, and here W
the width of all heads together. A number of the weights, of their gradients and of what the layers
hand on takes 4 bytes; an operand of a product takes as many as the precision says.

A step is looked at in four moments, because not everything is there at the same time: when the
loss has been computed, when the first gradient goes back through a layer, when it has reached the
word embeddings, and when the weights are updated. What a process needs is the largest of the four.

Not counted: the program itself, the room of the libraries of matrix products, the pieces that an
allocator cannot use, and with ``train.compile`` what the compiler decides to keep.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from transformer_xl.apps.estimate.plan import (
    Plan,
    count_weights,
    muon_weights,
    optimizer_numbers,
)
from transformer_xl.config import ModelConfig
from transformer_xl.model.needs import FLOAT, layer_matrices, state_bytes, table_numbers
from transformer_xl.ops.nll import chunk_rows
from transformer_xl.ops.skew import GROUP_BYTES, QUERY_BLOCK


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """What a process holds at one moment of a step, in bytes."""

    weights: int
    """Float32 weights, or its share of them."""
    gradients: int
    """Those that are there at this moment."""
    optimizer: int
    """What the optimizer keeps between two steps."""
    average: int
    """The average of the weights, where one is kept."""
    gathered: int
    """FSDP: whole units gathered for their use; DDP in bfloat16: rounded copies of weights."""
    memory: int
    """What the layers remember of its streams, the old and the new."""
    activations: int
    """What is kept for the backward pass, or still held after it."""
    temporary: int
    """The most that is held in between."""

    @property
    def total(self) -> int:
        """All of it."""
        return sum(asdict(self).values())


def moments(plan: Plan) -> Mapping[str, Moment]:
    """Return what a process holds at the four moments of a step."""
    config, weights = plan.config, count_weights(plan.config.model)
    shards = plan.ranks if plan.is_sharded else 1
    has_average = config.train.average != "none"
    is_tied = config.model.tie_embeddings
    whole, share = FLOAT * weights.total, FLOAT * weights.total // shards
    inside, outside = _inside(plan), outside_activations(plan)
    # Buckets of DDP stay. So do the sums of a step in parts: whole, also with FSDP.
    is_split = config.train.accumulate > 1
    held = whole if is_split else share * (plan.parallel == "ddp" and plan.ranks > 1)
    width = plan.operand if plan.is_sharded else FLOAT
    table = table_numbers(config.model)
    of_softmax = width * (table + config.model.vocab_size)
    # FSDP has the gradients of a unit whole, and once more in float32 to add them up.
    unit = (width + FLOAT) * plan.is_sharded
    fixed = {
        "weights": share,
        "optimizer": FLOAT * optimizer_numbers(config) // shards,
        "average": has_average * share,
    }
    memory, gathered = memory_bytes(plan), gathered_bytes(plan)
    again = layer_activations(plan) if plan.has_recompute else 0
    return {
        "loss": Moment(
            **fixed,
            memory=memory,
            gathered=gathered,
            gradients=held + of_softmax,
            activations=inside + outside,
            temporary=loss_temporary(plan),
        ),
        "backward": Moment(
            **fixed,
            memory=memory,
            gathered=gathered,
            gradients=held + of_softmax,
            activations=inside + outside,
            temporary=layer_temporary(plan) + again + unit * weights.layer,
        ),
        "embedding": Moment(
            **fixed,
            memory=memory,
            gathered=plan.operand * weights.root * plan.is_sharded,
            gradients=(held or share) + of_softmax * (is_split or plan.is_sharded),
            activations=outside,
            temporary=width * table * is_tied + FLOAT * weights.root * plan.is_sharded,
        ),
        "update": Moment(
            **fixed,
            gradients=share,
            gathered=0,
            memory=_states(plan, plan.streams + plan.B),
            activations=_left_over(plan),
            temporary=update_temporary(plan),
        ),
    }


def peak(plan: Plan) -> tuple[str, Moment]:
    """Return the moment in which a process holds the most, by name, and what that is."""
    found = moments(plan)
    name = max(found, key=lambda each: found[each].total)
    return name, found[name]


def memory_bytes(plan: Plan) -> int:
    """Count what the layers remember: 4 N M D for each stream, the old and the new.

    The old memory stays until the update is made.
    """
    return _states(plan, 2 * plan.streams)


def gathered_bytes(plan: Plan) -> int:
    """Count whole copies of weights that a process has for its products, beside the weights.

    FSDP: the root unit and the projections of positions, which stay, and three layers: the one in
    use, the next one, and the buffer through which it comes. DDP in bfloat16 on a GPU: autocast
    keeps a rounded copy of every matrix but those of queries, keys and values until the backward
    pass is over.
    """
    config, weights = plan.config.model, count_weights(plan.config.model)
    width = config.n_head * config.head_width
    if plan.is_sharded:
        positions = config.n_layer * width * config.d_model * (config.attn_type == 0)
        return plan.operand * (weights.root + positions + 3 * weights.layer)
    if plan.device == "cpu" or plan.precision == "float32":
        return 0
    own = sum(rows * columns for rows, columns in layer_matrices(config))
    return plan.operand * config.n_layer * (own - 3 * width * config.d_model)


def layer_activations(plan: Plan) -> int:
    """Count what a layer keeps for the backward pass.

    For each token of the segment, with c bytes an operand: the inputs of two normalizations, 4 D
    each; the inputs of the two blocks, c D each; queries and what was attended, 2 c W; inner units,
    c F for a ReLU. Keys and values, 2 c W for each token and each remembered position; the keys of
    positions, c S W. A memory that is normalized or rounded before it is projected: c D for each
    position. Scores of attention are computed again and not kept.
    """
    config, c = plan.config.model, plan.operand
    D, width = config.d_model, config.n_head * config.head_width
    tokens, past = plan.B * plan.T, plan.B * plan.M
    total = tokens * D * 2 * (FLOAT + c)
    total += c * width * (2 * tokens + 2 * (tokens + past))
    total += tokens * _inner_bytes(plan)
    total += _position_keys(plan)
    if config.norm_first or c < FLOAT or config.attn_type == 3:
        total += past * D * c
    if config.qk_norm:
        total += (2 * tokens + past) * width * FLOAT
    if config.gate == "gru":
        total += 2 * tokens * D * ((4 + (c < FLOAT)) * c + 2 * FLOAT)
    if config.attn_type in (2, 3):
        total += tokens * width * c
        if config.attn_dropout:
            # torch has no kernel for it on a processor, and keeps scores, weights and their share.
            total += 3 * plan.B * config.n_head * plan.T * (plan.M + plan.T) * FLOAT
    return total + _masks(plan)


def outside_activations(plan: Plan) -> int:
    """Count what is kept for the backward pass outside the layers.

    Encodings of positions, 4 S D; narrower embeddings before their projection; the last layer's
    output, before and after dropout, 4 D each for every token, and what the softmax keeps of it.
    """
    config, c = plan.config.model, plan.operand
    D, tokens = config.d_model, plan.B * plan.T
    dropped = bool(config.dropouts.output)
    total = tokens * D * FLOAT * (1 + dropped + config.final_norm)
    if config.attn_type == 0:
        total += (plan.M + plan.T) * D * FLOAT
    if plan.config.train.temporal_activation_reg:
        total += tokens * D * FLOAT
    if plan.device == "cuda" and not config.variational_dropout:
        total += tokens * D * (bool(config.dropouts.input) + dropped)
    # A token and a target drawn uniformly, as the operations are counted.
    head, *tails = config.clusters
    total += c * tokens * sum(_share(config, x) * x.width for x in config.clusters if x.has_proj)
    # The softmax keeps its input and, on a processor, the gradient of it.
    total += tokens * head.width * (c * head.has_proj + FLOAT)
    total += D * tokens * c * (head.has_proj and c < FLOAT)
    for x in tails:
        total += tokens * _share(config, x) * (D * c + x.width * (c * x.has_proj + FLOAT))
    if tails:
        total += FLOAT * (head.stop + len(tails)) * head.width
    if config.sample_softmax:
        total += tokens * FLOAT * (2 * config.embed_width + 4 * config.sample_softmax)
    return round(total)


def loss_temporary(plan: Plan) -> int:
    """Count what the softmax holds for a chunk of tokens, and for the product with it.

    For n logits in a chunk: 4 n, and once more their gradients rounded, or on a processor turned
    for the product; and the product itself, before it is added. The largest of the clusters.
    """
    config = plan.config.model
    if config.sample_softmax:
        return 0
    (head, *tails), tokens = config.clusters, plan.B * plan.T
    found = [_chunk_bytes(plan, head.stop + len(tails), head.width, tokens)]
    for x in tails:
        rows = round(tokens * _share(config, x))
        found.append(_chunk_bytes(plan, x.stop - x.start, x.width, rows))
    if tails and config.div_val == 1:
        # The gradients of the parts of one table are put together.
        found.append(FLOAT * table_numbers(config))
    return max(found)


def _chunk_bytes(plan: Plan, n_outputs: int, width: int, n_rows: int) -> int:
    c = plan.operand
    logits = min(n_rows, chunk_rows(plan.device, n_outputs)) * n_outputs
    if c < FLOAT:
        return logits * (FLOAT + 2 * c) + 2 * c * n_outputs * width
    return FLOAT * (logits + (logits + n_outputs * width) * (plan.device == "cpu"))


def layer_temporary(plan: Plan) -> int:
    """Count what the backward pass through a layer holds: the larger of its two blocks.

    Feed-forward: gradients of the units before and after their activation, and three of the
    states. Attention: gradients of queries, keys and values, the keys and values of a block, and
    three tables of scores of a group of heads, when what the feed-forward block kept is gone.
    """
    config, c = plan.config.model, plan.operand
    D, width = config.d_model, config.n_head * config.head_width
    tokens, keys = plan.B * plan.T, plan.B * (plan.M + plan.T)
    units = (2 + 2 * config.is_gated) * config.d_inner
    feed_forward = tokens * (units * c + 3 * D * FLOAT)
    attention = 4 * c * width * (tokens + keys) + 2 * tokens * D * FLOAT + 3 * _score_bytes(plan)
    return max(feed_forward, attention - tokens * (_inner_bytes(plan) + D * (c + FLOAT)))


def update_temporary(plan: Plan) -> int:
    """Count what an update holds: Muon's matrices, or two copies of what LAMB moves at once.

    LAMB: all weights on a GPU, the largest one on a processor.
    Muon: the momentum ahead of all its matrices, and of those of one shape three copies and two
    squares of the shorter side. With FSDP it works on whole matrices, and collects their changes.
    """
    config = plan.config
    if config.train.optimizer == "lamb":
        weights = count_weights(config.model)
        if plan.device == "cpu":
            return 2 * FLOAT * weights.largest
        return 2 * FLOAT * weights.total // (plan.ranks if plan.is_sharded else 1)
    if config.train.optimizer != "muon":
        return 0
    groups: dict[tuple[int, int], int] = {}
    for shape in layer_matrices(config.model):
        groups[shape] = groups.get(shape, 0) + config.model.n_layer
    stacks = (
        n * (3 * rows * columns + 2 * min(rows, columns) ** 2)
        for (rows, columns), n in groups.items()
    )
    matrices = FLOAT * (1 + plan.is_sharded) * muon_weights(config)
    return matrices + plan.operand * max(stacks)


def checkpoint_bytes(plan: Plan) -> int:
    """Count a checkpoint: weights, optimizer, average, and the memory of all streams."""
    config = plan.config
    n = count_weights(config.model).total
    numbers = n * (1 + (config.train.average != "none")) + optimizer_numbers(config)
    states = config.train.batch_size * plan.M * config.model.n_layer * config.model.d_model
    return FLOAT * (numbers + states)


def _inner_bytes(plan: Plan) -> int:
    """Bytes kept of a token's inner units."""
    config, c = plan.config.model, plan.operand
    F, drops = config.d_inner, config.dropouts.feed_forward > 0
    is_random = drops and not config.variational_dropout
    mask = F if is_random and plan.device == "cuda" else 0
    if config.activation == "relu":
        # Fused with dropout on a processor, and its own output without any.
        is_one = not drops or (plan.device == "cpu" and is_random)
        return F * c * (1 if is_one else 2) + mask
    return F * c * (4 if config.is_gated else 2) + mask


def _masks(plan: Plan) -> int:
    """Bytes of a layer for what was dropped, one for each number; none on a processor."""
    config = plan.config.model
    if plan.device == "cpu" or config.variational_dropout:
        return 0
    tokens, past = plan.B * plan.T, plan.B * plan.M
    width = config.n_head * config.head_width
    return 2 * tokens * config.d_model * bool(config.dropout) + (
        3 * tokens + 2 * past
    ) * width * bool(config.qkv_dropout)


def _position_keys(plan: Plan) -> int:
    """Bytes of a layer for the keys of positions; rounded, their encodings once more each."""
    config, c = plan.config.model, plan.operand
    if config.attn_type in (2, 3):
        return 0
    rounded = config.d_model * (c < FLOAT and config.attn_type == 0)
    return c * (plan.M + plan.T) * (config.n_head * config.head_width + rounded)


def _score_bytes(plan: Plan) -> int:
    """Bytes of the scores that are computed at once."""
    config, c = plan.config.model, plan.operand
    T, S = min(plan.T, QUERY_BLOCK), plan.M + plan.T
    head = c * plan.B * T * (S + 1)
    if plan.device == "cuda":
        return config.n_head * head
    return max(head, min(config.n_head * head, GROUP_BYTES))


def _inside(plan: Plan) -> int:
    """Bytes kept inside all layers, without what is the new memory itself.

    A segment as long as the memory is remembered whole; where its states are what the layers keep
    anyway, they are held once.
    """
    config = plan.config.model
    states = FLOAT * plan.B * plan.T * config.d_model
    kept = layer_activations(plan)
    if plan.has_recompute:
        kept = states + _position_keys(plan)
    is_whole = plan.T == plan.M and not config.ext_len and config.attn_type in (0, 1)
    is_kept = plan.has_recompute or plan.operand == FLOAT or config.norm_first
    if is_whole and is_kept and not config.enhanced_recurrence:
        kept -= states
    return config.n_layer * kept


def _states(plan: Plan, n_streams: int) -> int:
    """Bytes of the memory of some streams."""
    return state_bytes(plan.config.model, n_streams, plan.M)


def _left_over(plan: Plan) -> int:
    """Bytes of the model's output, which is held until the next segment is read."""
    config = plan.config.model
    n = 1 + bool(config.dropouts.output)
    return FLOAT * n * plan.B * plan.T * config.d_model


def _share(config: ModelConfig, cluster: tuple[int, int, int, bool, bool]) -> float:
    """The share of words in a cluster."""
    return (cluster[1] - cluster[0]) / config.vocab_size
