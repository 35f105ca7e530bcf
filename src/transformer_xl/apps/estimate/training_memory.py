"""The memory of a training process in bytes, computed from its settings.

Every function is a formula. Letters are those of the package: B streams of one process in one
part of a step, T tokens, M remembered positions, S = M + T keys, D, F, V and E widths, and here W
the width of all heads together. Weights, gradients and hidden states take 4 bytes a number; c is
the bytes of an operand of a matrix product, which depends on the precision.

Memory is computed at four moments of a step, any of which can be the peak: after the loss, in the
backward pass through the last layer, at the gradient of the word embeddings, and in the update of
the weights.

Not counted: the program itself, workspaces of the libraries of matrix products, fragmentation of
the allocator, and with ``train.compile`` the choices of the compiler.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from math import ceil, log2

from transformer_xl.apps.estimate.plan import Plan, count_weights, muon_weights, optimizer_numbers
from transformer_xl.config import ModelConfig
from transformer_xl.model.limits import FLOAT, layer_matrices, state_bytes, table_numbers
from transformer_xl.ops import triton
from transformer_xl.ops.nll import chunk_rows
from transformer_xl.ops.skew import GROUP_BYTES, QUERY_BLOCK


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """Allocated memory of a process at one moment of a step, in bytes."""

    weights: int
    """Float32 weights, or the shard of this process."""
    gradients: int
    """Gradients that are allocated at this moment."""
    optimizer: int
    """Optimizer state."""
    average: int
    """The average of the weights, if any."""
    gathered: int
    """FSDP: gathered units; DDP in bfloat16: rounded copies of weights."""
    memory: int
    """The memories of all layers and streams before and after the segment."""
    activations: int
    """Tensors saved for the backward pass, or not yet freed after it."""
    temporary: int
    """Peak of temporary tensors."""

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return sum(asdict(self).values())


def moments(plan: Plan) -> Mapping[str, Moment]:
    """Return the memory of a process at the four moments of a step."""
    config, weights = plan.config, count_weights(plan.config.model)
    shards = plan.ranks if plan.is_sharded else 1
    whole, share = FLOAT * weights.total, FLOAT * weights.total // shards
    outside = outside_activations(plan)
    # Buckets of DDP persist between steps. So do accumulated gradients: unsharded, also with FSDP.
    is_split = config.train.accumulate > 1
    held = whole if is_split else share * (plan.parallel == "ddp" and plan.ranks > 1)
    width = plan.operand if plan.is_sharded else FLOAT
    table = table_numbers(config.model)
    of_softmax = width * (table + config.model.vocab_size)
    # FSDP has the unsharded gradients of a unit, and a copy in float32 for the reduce-scatter.
    of_layer = (width + FLOAT) * weights.layer * plan.is_sharded
    again = layer_activations(plan) if config.train.recompute else 0
    loss = Moment(
        weights=share,
        optimizer=FLOAT * optimizer_numbers(config) // shards,
        average=(config.train.average != "none") * share,
        memory=memory_bytes(plan),
        gathered=gathered_bytes(plan),
        gradients=held + of_softmax,
        activations=_layers_bytes(plan) + outside,
        temporary=loss_temporary(plan),
    )
    n_outputs = 1 + bool(config.model.dropouts.output)
    return {
        "loss": loss,
        "backward": replace(loss, temporary=layer_temporary(plan) + again + of_layer),
        "embedding": replace(
            loss,
            gathered=plan.operand * weights.root * plan.is_sharded,
            gradients=(held or share) + of_softmax * (is_split or plan.is_sharded),
            activations=outside,
            temporary=width * table * config.model.tie_embeddings
            + FLOAT * weights.root * plan.is_sharded,
        ),
        "update": replace(
            loss,
            gathered=0,
            memory=state_bytes(config.model, plan.streams + plan.B, plan.M),
            gradients=share,
            # The model's output, which is freed when the next segment is read.
            activations=FLOAT * plan.B * plan.T * config.model.d_model * n_outputs,
            temporary=update_temporary(plan),
        ),
    }


def peak(plan: Plan) -> tuple[str, Moment]:
    """Return the moment of the peak memory, and the memory at this moment."""
    return max(moments(plan).items(), key=lambda item: item[1].total)


def memory_bytes(plan: Plan) -> int:
    """Count the memories of all layers, 4 N M D a stream; the old one is freed after the update."""
    return state_bytes(plan.config.model, 2 * plan.streams, plan.M)


def gathered_bytes(plan: Plan) -> int:
    """Count gathered or rounded copies of weights, besides the weights themselves.

    FSDP: the root unit and the projections of positions, which stay gathered, and three layers
    (current, prefetched, communication buffer). DDP in bfloat16 on a GPU: autocast caches a rounded
    copy of every matrix, except those of queries, keys and values.
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
    """Count the activations that a layer saves for the backward pass.

    For each token of the segment: the inputs of two normalizations, 4 D each; the inputs of the two
    blocks, c D each; queries and the output of attention, 2 c W; inner units, c F for a ReLU. Keys
    and values, 2 c W for each token and each remembered position; projected positions, c S W. A
    memory that is normalized or rounded before it is projected: c D for each position. Attention
    scores are recomputed instead of saved.
    """
    config, c = plan.config.model, plan.operand
    D, width = config.d_model, config.n_head * config.head_width
    tokens, past = plan.B * plan.T, plan.B * plan.M
    total = 2 * tokens * D * (FLOAT + c) + c * width * (4 * tokens + 2 * past)
    total += tokens * _inner_bytes(plan) + _position_keys(plan) + _masks(plan)
    if config.norm_first or c < FLOAT or config.attn_type == 3:
        total += past * D * c
    if config.qk_norm:
        total += (2 * tokens + past) * width * FLOAT
    if _has_kernels(plan):
        # Queries with each of the two biases, and keys by heads.
        total += c * width * (2 * tokens + past)
    if config.gate == "gru":
        total += 2 * tokens * D * ((4 + (c < FLOAT)) * c + 2 * FLOAT)
    if config.attn_type in (2, 3):
        total += tokens * width * c
        if config.attn_dropout:
            # torch has no fused kernel for it on the CPU: it saves scores, weights and the mask.
            total += 3 * plan.B * config.n_head * plan.T * (plan.M + plan.T) * FLOAT
    return total


def outside_activations(plan: Plan) -> int:
    """Count the activations that are saved for the backward pass outside the layers.

    Encodings of positions, 4 S D; narrower embeddings before their projection; the last layer's
    output, before and after dropout, 4 D each for every token, and the inputs of the softmax. A
    recurrence of the inputs saves 4 D for each of its log2(T) steps, embedding residuals 4 D for
    each layer.
    """
    config, c = plan.config.model, plan.operand
    D, tokens = config.d_model, plan.B * plan.T
    dropped = bool(config.dropouts.output)
    total = tokens * D * FLOAT * (1 + dropped + config.final_norm)
    if config.attn_type == 0:
        total += (plan.M + plan.T) * D * FLOAT
    if config.input_recurrence:
        total += tokens * D * FLOAT * ceil(log2(plan.T))
    if config.embedding_residual:
        total += tokens * D * FLOAT * config.n_layer
    if plan.config.train.temporal_activation_reg:
        total += tokens * D * FLOAT
    if plan.device == "cuda" and not config.variational_dropout:
        total += tokens * D * (bool(config.dropouts.input) + dropped)
    # Tokens and targets are assumed uniform over the vocabulary, as for FLOPs.
    head, *tails = config.clusters
    total += c * tokens * sum(_share(config, x) * x.width for x in config.clusters if x.has_proj)
    # The softmax saves its input and, on the CPU, the gradient of it.
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
    """Count the temporary tensors of the softmax for a chunk of tokens; the largest cluster counts.

    For n logits in a chunk: 4 n. In half precision also the product from which they are made, whose
    place their gradients take, the rounded weights and a product before it is accumulated. On
    a GPU, whose fused kernels are assumed, the logits are only that product.
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
        # The gradients of the parts of one table are concatenated.
        found.append(FLOAT * table_numbers(config))
    return max(found)


def _chunk_bytes(plan: Plan, n_outputs: int, width: int, n_rows: int) -> int:
    c = plan.operand
    logits = min(n_rows, chunk_rows(plan.device, n_outputs)) * n_outputs
    if c < FLOAT:
        return logits * (c + FLOAT * (plan.device == "cpu")) + 2 * c * n_outputs * width
    return FLOAT * logits


def layer_temporary(plan: Plan) -> int:
    """Count temporary tensors of the backward pass through a layer: the larger of its two blocks.

    Feed-forward: gradients of the units before and after their activation, and three of the
    states. Attention: gradients of queries, keys and values, the keys and values of a block, and
    three score matrices (of a group of heads; on a GPU whole ones), after the activations of the
    feed-forward block were freed.
    """
    config, c = plan.config.model, plan.operand
    D, width = config.d_model, config.n_head * config.head_width
    tokens, keys = plan.B * plan.T, plan.B * (plan.M + plan.T)
    units = (2 + 2 * config.is_gated) * config.d_inner
    feed_forward = tokens * (units * c + 3 * D * FLOAT)
    attention = 4 * c * width * (tokens + keys) + 2 * tokens * D * FLOAT + 3 * _score_bytes(plan)
    return max(feed_forward, attention - tokens * (_inner_bytes(plan) + D * (c + FLOAT)))


def update_temporary(plan: Plan) -> int:
    """Count temporary tensors of an update.

    LAMB: two copies of the weights that are updated at once, all on a GPU, the largest parameter on
    the CPU. Adagrad: the same, one copy on the CPU. Muon: of the matrices of one shape three copies
    and two squares of the shorter side. With FSDP it updates unsharded matrices: the Nesterov
    momentum of all of them, and their changes.
    """
    config = plan.config
    if config.train.optimizer in ("lamb", "adagrad"):
        weights = count_weights(config.model)
        if plan.device == "cpu":
            return (1 + (config.train.optimizer == "lamb")) * FLOAT * weights.largest
        return 2 * FLOAT * weights.total // (plan.ranks if plan.is_sharded else 1)
    if config.train.optimizer != "muon":
        return 0
    stack = config.model.n_layer * max(
        n * (3 * rows * columns + 2 * min(rows, columns) ** 2)
        for (rows, columns), n in Counter(layer_matrices(config.model)).items()
    )
    return 2 * FLOAT * plan.is_sharded * muon_weights(config) + plan.operand * stack


def checkpoint_bytes(plan: Plan) -> int:
    """Count the bytes of a checkpoint: weights, optimizer, average, memory of all streams."""
    config = plan.config
    n = count_weights(config.model).total
    numbers = n * (1 + (config.train.average != "none")) + optimizer_numbers(config)
    states = config.train.batch_size * plan.M * config.model.n_layer * config.model.d_model
    return FLOAT * (numbers + states)


def _inner_bytes(plan: Plan) -> int:
    """Count the bytes saved of a token's inner units."""
    config, c = plan.config.model, plan.operand
    F, drops = config.d_inner, config.dropouts.feed_forward > 0
    is_random = drops and not config.variational_dropout
    mask = F if is_random and plan.device == "cuda" else 0
    copies = 4 if config.is_gated else 2
    if config.activation == "relu" and (not drops or (plan.device == "cpu" and is_random)):
        # Fused with dropout on the CPU, and without dropout the output of ReLU.
        copies = 1
    return F * c * copies + mask


def _masks(plan: Plan) -> int:
    """Count the bytes of the dropout masks of a layer, one for each number; none on the CPU."""
    config = plan.config.model
    if plan.device == "cpu" or config.variational_dropout:
        return 0
    tokens, past = plan.B * plan.T, plan.B * plan.M
    of_qkv = (3 * tokens + 2 * past) * config.n_head * config.head_width
    return 2 * tokens * config.d_model * bool(config.dropout) + of_qkv * bool(config.qkv_dropout)


def _position_keys(plan: Plan) -> int:
    """Count the bytes of a layer's projected positions, and of their rounded encodings."""
    config, c = plan.config.model, plan.operand
    if config.attn_type in (2, 3):
        return 0
    rounded = config.d_model * (c < FLOAT and config.attn_type == 0)
    return c * (plan.M + plan.T) * (config.n_head * config.head_width + rounded)


def _score_bytes(plan: Plan) -> int:
    """Count the bytes of the attention scores that are computed at once."""
    n_head = plan.config.model.n_head
    if _has_kernels(plan):
        width = -(-(plan.M + plan.T) // 16) * 16
        return plan.operand * plan.B * n_head * plan.T * width
    head = plan.operand * plan.B * min(plan.T, QUERY_BLOCK) * (plan.M + plan.T + 1)
    return n_head * head if plan.device == "cuda" else max(head, min(n_head * head, GROUP_BYTES))


def _has_kernels(plan: Plan) -> bool:
    """Whether the fused kernels of a GPU compute relative attention."""
    config = plan.config.model
    is_relative = config.attn_type not in (2, 3)
    return plan.device == "cuda" and is_relative and config.head_width <= triton.WIDEST


def _layers_bytes(plan: Plan) -> int:
    """Count the bytes saved inside all layers, without tensors that the new memory shares.

    A segment as long as the memory becomes the new memory as a whole; if the layers save its states
    anyway, they are allocated only once.
    """
    config, recompute = plan.config.model, plan.config.train.recompute
    states = FLOAT * plan.B * plan.T * config.d_model
    kept = states + _position_keys(plan) if recompute else layer_activations(plan)
    is_whole = plan.T == plan.M and not config.ext_len and config.attn_type in (0, 1)
    is_kept = recompute or plan.operand == FLOAT or config.norm_first
    if is_whole and is_kept and not config.enhanced_recurrence:
        kept -= states
    return config.n_layer * kept


def _share(config: ModelConfig, cluster: tuple[int, int, int, bool, bool]) -> float:
    """Return the fraction of the vocabulary in a cluster."""
    return (cluster[1] - cluster[0]) / config.vocab_size
