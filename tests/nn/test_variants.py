"""The experimental settings, against a definition in loops over positions."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from transformer_xl.config import ModelConfig, TrainConfig
from transformer_xl.inference.evaluate import evaluate
from transformer_xl.model import TransformerXL
from transformer_xl.model.lengths import Lengths
from transformer_xl.model.stepper import CallingStepper, RingStepper, Stepper, choose_stepper
from transformer_xl.model.variants import ShortConv
from transformer_xl.ops import rel_attention, use_backend
from transformer_xl.train.optim import Optimizer

EXACT = {"rtol": 1e-9, "atol": 1e-11}
V, L = 23, 11
CONFIG = ModelConfig(
    vocab_size=V, n_layer=3, n_head=2, d_model=12, d_inner=20, mem_len=40, dropout=0.0, init_std=0.4
)
MODERN = {"norm_first": True, "final_norm": True, "norm": "rms", "qk_norm": True}
VARIANTS = {
    "value residual": {"value_residual": True},
    "short convolution": {"short_conv": 4},
    "rotary": {"rotary": 1.0},
    "partly rotary": {"rotary": 0.7},
    "gate by head": {"attn_gate": "head"},
    "gate by element": {"attn_gate": "element"},
    "embedding residual": {"embedding_residual": True},
    "softcap": {"logit_softcap": 2.0},
    "hash": {"hash_embedding": 50},
}
TOGETHER = {name: x for variant in VARIANTS.values() for name, x in variant.items()}
ALL = {
    **VARIANTS,
    "together": TOGETHER,
    "together, modern": MODERN | TOGETHER,
    "rotary, modern": MODERN | {"rotary": 0.7},
    "convolution, modern": MODERN | {"short_conv": 3},
    "values, biases of each layer": {"value_residual": True, "tie_biases": False},
}
IN_SEGMENTS = {name: x for name, x in ALL.items() if "hash_embedding" not in x}


def made(settings, seed=1):
    torch.manual_seed(seed)
    model = TransformerXL(replace(CONFIG, **settings)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # What begins as zero hides mistakes.
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@pytest.fixture(params=ALL)
def model(request):
    return made(ALL[request.param])


def rotation(n_rotated, position):
    matrix = torch.eye(CONFIG.head_width, dtype=torch.float64)
    for i in range(0, n_rotated, 2):
        angle = torch.tensor(position * 10_000.0 ** (-i / n_rotated), dtype=torch.float64)
        c, s = angle.cos(), angle.sin()
        matrix[i : i + 2, i : i + 2] = torch.stack([torch.stack([c, -s]), torch.stack([s, c])])
    return matrix


def naive(model, tokens, n_detached=0):
    """Return the log-probabilities of one text by the definitions, one position at a time."""
    config, n, H = model.config, len(tokens), CONFIG.n_head
    x = [model.embedding.weight[t] * config.d_model**0.5 for t in tokens]
    if config.hash_embedding:
        for i in range(1, n):
            pair = int(tokens[i - 1]) * V + int(tokens[i])
            row = (pair * 2_654_435_761 >> 12) % config.hash_embedding
            x[i] = x[i] + model.hash_embedding.weight[row] * config.d_model**0.5
    first = [e / (e.square().mean() + config.norm_eps).sqrt() for e in x]
    encoding = model._encoding(n, None)
    first_values = []
    for number, layer in enumerate(model.layers):
        attention, before = layer.attention, layer.norm_first
        if number and config.embedding_residual:
            own, other = model.embedding_own[number - 1], model.embedding_first[number - 1]
            x = [own * e + other * e0 for e, e0 in zip(x, first, strict=True)]
        x = [e.detach() if i < n_detached else e for i, e in enumerate(x)]
        normed = [layer.attention_norm(e) if before else e for e in x]
        if config.short_conv:
            weight = layer.short_conv.weight[:, 0]
            normed = [
                e
                + sum(weight[j - 1] * normed[i - j] for j in range(1, config.short_conv) if j <= i)
                for i, e in enumerate(normed)
            ]
        heads = [(attention.qkv_proj.weight @ e).view(3, H, -1) for e in normed]
        q, k, v = ([e[part] for e in heads] for part in range(3))
        if config.qk_norm:
            q, k = [attention.q_norm(e) for e in q], [attention.k_norm(e) for e in k]
        if config.value_residual:
            if number == 0:
                first_values = v
            else:
                own, other = model.value_own[number - 1], model.value_first[number - 1]
                v = [own * e + other * e0 for e, e0 in zip(v, first_values, strict=True)]
        biases = model.content_bias, model.position_bias
        u, w = (b[0] if config.tie_biases else b[number] for b in biases)
        turns = [rotation(2 * int(6 * config.rotary / 2), i) for i in range(n)]
        outputs = []
        for i in range(n):
            attended = []
            for h in range(H):
                scores = []
                for j in range(i + 1):
                    r = (attention.r_proj.weight @ encoding[n - 1 - (i - j)]).view(H, -1)[h]
                    content = (turns[i] @ (q[i][h] + u[h])) @ (turns[j] @ k[j][h])
                    scores.append((content + (q[i][h] + w[h]) @ r) * 6**-0.5)
                weights = torch.stack(scores).softmax(0)
                value = sum(weights[j] * v[j][h] for j in range(i + 1))
                if config.attn_gate != "none":
                    gates = (attention.gate_proj.weight @ normed[i]).view(H, -1)
                    value = value * gates[h].sigmoid()
                attended.append(value)
            y = x[i] + attention.o_proj.weight @ torch.cat(attended)
            y = y if before else layer.attention_norm(y)
            f = layer.feed_forward(layer.feed_forward_norm(y) if before else y)
            y = y + f
            outputs.append(y if before else layer.feed_forward_norm(y))
        x = outputs
    x = torch.stack(x)
    x = x if model.final_norm is None else model.final_norm(x)
    logits = x @ model.embedding.weight.T + model.softmax.bias
    if config.logit_softcap:
        logits = config.logit_softcap * (logits / config.logit_softcap).tanh()
    return logits.log_softmax(-1)


def some_text(n=L, B=None):
    return torch.randint(V, (n,) if B is None else (B, n))


def read(model, text, T, mems=None, **lengths):
    parts = []
    for segment in text.split(T, 1):
        out = model(segment, mems, **lengths)
        parts.append(out.log_probs)
        mems = out.mems
    return torch.cat(parts, 1)


@torch.no_grad()
def test_a_text_at_once_is_the_definition(model):
    text = some_text()
    torch.testing.assert_close(model(text[None]).log_probs[0], naive(model, text), **EXACT)


@pytest.mark.parametrize("T", [1, 4])
@pytest.mark.parametrize("name", IN_SEGMENTS)
@torch.no_grad()
def test_segments_with_a_long_memory_are_the_definition(name, T):
    model, text = made(IN_SEGMENTS[name]), some_text()
    torch.testing.assert_close(read(model, text[None], T)[0], naive(model, text), **EXACT)


@pytest.mark.parametrize("M", [0, 2, 6])
@pytest.mark.parametrize("name", IN_SEGMENTS)
def test_gradients_are_those_of_the_definition(name, M):
    model, text = made(IN_SEGMENTS[name]).train(), some_text()
    mems = model(text[None, :M]).mems if M else None
    targets = some_text(L - M)
    model(text[None, M:], mems, targets[None]).loss.backward()
    found = {key: x.grad.clone() for key, x in model.named_parameters()}
    model.zero_grad()
    F.nll_loss(naive(model, text, M)[M:], targets).backward()
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(found[key], parameter.grad, **EXACT, msg=key)


def test_a_hash_of_pairs_is_learned():
    model, text = made({"hash_embedding": 50}), some_text()
    targets = some_text()
    model(text[None], None, targets[None]).loss.backward()
    found = model.hash_embedding.weight.grad.clone()
    model.zero_grad()
    F.nll_loss(naive(model, text), targets).backward()
    torch.testing.assert_close(found, model.hash_embedding.weight.grad, **EXACT)


@pytest.mark.parametrize("name", IN_SEGMENTS)
@torch.no_grad()
def test_streams_that_are_reset_and_documents_see_nothing_before_them(name):
    model, text = made(IN_SEGMENTS[name]), some_text(7, 2)
    mems = model(some_text(5, 2)).mems
    alone = model(text).log_probs
    found = read(model, text, 3, mems.reset([0, 1]))
    torch.testing.assert_close(found, alone, **EXACT)
    starts = torch.zeros_like(text, dtype=torch.bool)
    starts[:, 2] = True
    found = model(text, mems, starts=starts).log_probs
    torch.testing.assert_close(found[:, 2:], model(text[:, 2:]).log_probs, **EXACT)
    torch.testing.assert_close(found[:, :2], model(text[:, :2], mems).log_probs, **EXACT)
    later = model(text, model(text, mems, starts=starts).mems).log_probs
    expected = model(text, model(text[:, 2:]).mems).log_probs
    torch.testing.assert_close(later, expected, **EXACT)


@torch.no_grad()
def test_documents_have_no_pair_with_what_is_before_them():
    model, text = made({"hash_embedding": 50}), some_text(7, 2)
    starts = torch.zeros_like(text, dtype=torch.bool)
    starts[:, 2] = True
    found = model(text, starts=starts).log_probs
    torch.testing.assert_close(found[:, 2:], model(text[:, 2:]).log_probs, **EXACT)


@pytest.mark.parametrize("name", IN_SEGMENTS)
@torch.no_grad()
def test_padding_changes_nothing(name):
    model, text = made(IN_SEGMENTS[name]), some_text(6, 2)
    mems = model(some_text(5, 2)).mems
    out = model(text, mems, lengths=torch.tensor([6, 3]))
    short = model(text[1:, :3], mems.select([1]))
    torch.testing.assert_close(out.log_probs[1:, :3], short.log_probs, **EXACT)
    after = some_text(4, 2)
    found = model(after, out.mems).log_probs[1:]
    torch.testing.assert_close(found, model(after[1:], short.mems).log_probs, **EXACT)


@torch.no_grad()
def test_evaluation_in_segments_is_the_definition(model):
    text = some_text(9)

    result = evaluate(model, text, segment_len=8, mem_len=20)
    expected = F.nll_loss(naive(model, text)[:-1], text[1:])
    assert result.nll == pytest.approx(float(expected), abs=1e-6)


@torch.no_grad()
def test_only_gates_and_the_softcap_keep_keys(model):
    config = model.config
    keeps = not any(
        getattr(config, name)
        for name in (
            *("value_residual", "short_conv", "rotary", "embedding_residual"),
            "hash_embedding",
        )
    )
    mems = model(some_text(4, 2)).mems
    assert model.keep(mems).has_keys == keeps
    kind, _ = choose_stepper(model)
    is_gated = config.attn_gate != "none"
    assert issubclass(kind, RingStepper if keeps else CallingStepper)
    if keeps and is_gated:
        assert kind is RingStepper
    stepper = Stepper.of(model, Lengths.of(config), mems)
    text = some_text(3, 2)
    found = torch.stack([stepper(token) for token in text.T], 1)
    hidden = []
    for token in text.T:
        out = model(token[:, None], mems)
        hidden.append(out.hidden)
        mems = out.mems
    torch.testing.assert_close(found, torch.cat(hidden, 1), **EXACT)


@pytest.mark.parametrize("backend", ["skew", "reference"])
@pytest.mark.parametrize("attn_len", [None, 4])
@pytest.mark.parametrize("distance", [False, True])
def test_position_queries_are_another_operand(backend, attn_len, distance):
    B, T, S, H, K = 2, 5, 9, 2, 4
    q, position_q = torch.randn(2, B, T, H, K, dtype=torch.float64).requires_grad_()
    k, v = torch.randn(2, B, S, H, K, dtype=torch.float64)
    r, bias = torch.randn(S, H, K, dtype=torch.float64), torch.randn(S, H, dtype=torch.float64)
    u, w = torch.randn(2, H, K, dtype=torch.float64)
    leaves = [x.detach().requires_grad_() for x in (q, position_q, k, v, r, u, w, bias)]

    def found(q, position_q, k, v, r, u, w, bias):
        own = bias if distance else None
        with use_backend(backend):
            return rel_attention(
                q, k, v, r, u, w, position_q=position_q, distance_bias=own, attn_len=attn_len
            )

    # The content term alone has q, the position term alone the others.
    expected = torch.stack([leaves[0], leaves[1]])
    q2 = torch.cat([expected[0] + leaves[5], expected[1] + leaves[6]], -1)
    k2 = torch.cat([leaves[2], torch.zeros_like(leaves[2])], -1) * 2**0.5
    r2 = torch.cat([torch.zeros_like(leaves[4]), leaves[4]], -1) * 2**0.5
    zero = torch.zeros(H, 2 * K, dtype=torch.float64)
    v2 = torch.cat([leaves[3], leaves[3]], -1)
    own = leaves[7] * 2**0.5 if distance else None
    with use_backend("reference"):
        doubled = rel_attention(q2, k2, v2, r2, zero, zero, distance_bias=own, attn_len=attn_len)[
            ..., :K
        ]
    out = found(*leaves)
    torch.testing.assert_close(out, doubled, **EXACT)
    weights = torch.randn_like(out)
    used = leaves if distance else leaves[:-1]
    grads = torch.autograd.grad((out * weights).sum(), used)
    for one, other in zip(grads, torch.autograd.grad((doubled * weights).sum(), used), strict=True):
        torch.testing.assert_close(one, other, **EXACT)


@pytest.mark.parametrize(("M", "T"), [(0, 1), (0, 5), (2, 1), (1, 3), (5, 4)])
def test_the_convolution_has_its_gradients(M, T):
    module = ShortConv(replace(CONFIG, short_conv=4)).double()
    memory = torch.randn(2, M, 12, dtype=torch.float64, requires_grad=True)
    x = torch.randn(2, T, 12, dtype=torch.float64, requires_grad=True)
    torch.nn.init.normal_(module.weight)

    def convolved(memory, x, weight):
        return torch.func.functional_call(module, {"weight": weight}, (memory, x))

    assert torch.autograd.gradcheck(convolved, (memory, x, module.weight.detach().requires_grad_()))
    # A stream that sees everything has the slow path.
    slow = module(memory, x, torch.zeros(2, dtype=torch.int64))
    for one, other in zip(module(memory, x), slow, strict=True):
        torch.testing.assert_close(one, other, **EXACT)


@pytest.mark.parametrize("name", ["short convolution", "embedding residual", "hash", "softcap"])
@torch.no_grad()
def test_some_begin_as_the_network_without_them(name):
    settings = VARIANTS[name] | ({"logit_softcap": 1e6} if name == "softcap" else {})
    one, other = TransformerXL(CONFIG), TransformerXL(replace(CONFIG, **settings))
    other.load_state_dict(one.state_dict(), strict=False)
    text = some_text(8, 2)
    expected = read(one, text, 3)
    torch.testing.assert_close(read(other, text, 3), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("init", ["scaled", "zero"])
@torch.no_grad()
def test_initial_weights_fit_their_inputs(init):
    config = replace(CONFIG, d_model=96, d_inner=256, init=init, init_std=0.02, attn_gate="head")
    model = TransformerXL(config)
    layer = model.layers[1]
    share = {"scaled": 1.0, "zero": 0.5}[init]
    for weight in (layer.attention.qkv_proj.weight, layer.feed_forward.inner.weight):
        assert float(weight.std()) == pytest.approx(share * 96**-0.5, rel=0.1)
    out = {"scaled": (96 * 6) ** -0.5, "zero": 0.0}[init]
    assert float(layer.attention.o_proj.weight.std()) == pytest.approx(out, rel=0.1)
    out = {"scaled": (256 * 6) ** -0.5, "zero": 0.0}[init]
    assert float(layer.feed_forward.outer.weight.std()) == pytest.approx(out, rel=0.1)
    assert bool((layer.attention_norm.weight == 1).all())
    assert float(model.embedding.weight.std()) == pytest.approx(0.02, rel=0.1)


def test_muon_takes_matrices_and_no_factors():
    model = TransformerXL(replace(CONFIG, **TOGETHER))
    optimizer = Optimizer(model, TrainConfig(optimizer="muon"))
    names = {id(x): name for name, x in model.named_parameters()}
    groups = optimizer.parts[1].param_groups
    of_muon = {names[id(x)] for group in groups for x in group["params"]}
    assert "layers.0.attention.gate_proj.weight" in of_muon
    assert not any("short_conv" in name or "hash" in name for name in of_muon)
    assert all(len(x.shape) == 2 for group in groups for x in group["params"])


@pytest.mark.parametrize("recompute", [False, True])
def test_training_is_finite_and_moves_every_weight(recompute):
    torch.manual_seed(2)
    model = TransformerXL(replace(CONFIG, **MODERN, **TOGETHER, init="zero", dropout=0.1))
    model.recompute = recompute
    before = {name: x.detach().clone() for name, x in model.named_parameters()}
    optimizer, mems = Optimizer(model, TrainConfig(optimizer="muon", lr=1e-3)), None
    for _ in range(6):
        text = some_text(9, 4)
        out = model(text[:, :-1], mems, text[:, 1:])
        mems = out.mems
        out.loss.backward()
        assert all(bool(x.grad.isfinite().all()) for x in model.parameters())
        optimizer.step(1.0)
    assert all(bool((x != before[name]).any()) for name, x in model.named_parameters())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"value_residual": True, "n_layer": 1}, "n_layer=1"),
        ({"short_conv": 1}, "short_conv=1"),
        ({"short_conv": 3, "attn_type": 2}, "attn_type=2"),
        ({"rotary": 0.1}, "rotary=0.1"),
        ({"logit_softcap": 30.0, "cutoffs": (5,)}, "logit_softcap=30.0"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        replace(CONFIG, **settings)


def test_vectors_have_no_hash():
    with pytest.raises(ValueError, match="hash_embedding=50"):
        made({"hash_embedding": 50})(inputs_embeds=torch.zeros(1, 3, 12, dtype=torch.float64))
