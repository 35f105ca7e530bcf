"""What must not reach what: gradients the memory, the future a query, one stream another."""

import torch

EXACT = {"rtol": 0, "atol": 1e-12}


def some_text(B=3, length=9):
    return torch.randint(23, (B, length))


def test_no_gradient_enters_the_memory(isolating):
    model = isolating
    mems = model(some_text()).mems
    assert not any(state.requires_grad for state in mems.states)
    for state in mems.states:
        state.requires_grad_()
    model(some_text(), mems, some_text()).loss.backward()
    assert all(state.grad is None for state in mems.states)
    assert model.layers[0].attention.qkv_proj.weight.grad.any()


@torch.no_grad()
def test_no_query_sees_its_future(isolating):
    model, text = isolating, some_text()
    for before in (model.start_memory(3), model(some_text()).mems):
        one = model(text, before)
        for place in (0, 4, 8):
            changed = text.clone()
            changed[:, place] = (text[:, place] + 1) % 23
            other = model(changed, before)
            difference = (one.log_probs - other.log_probs).abs().amax(-1)
            assert (difference[:, :place] < 1e-12).all(), place
            assert (difference[:, place] > 1e-6).all(), place
            for old, new in zip(one.mems.states, other.mems.states, strict=True):
                # Of nine positions the memory holds the last six.
                untouched = max(0, place + len(one.mems) - 9)
                torch.testing.assert_close(new[:, :untouched], old[:, :untouched], **EXACT)


@torch.no_grad()
def test_streams_never_mix(positioned):
    model = positioned
    segments, order = [some_text() for _ in range(3)], [2, 0, 1]

    def read(segments, is_kept):
        mems, hidden = model.start_memory(3), []
        mems = model.keep(mems) if is_kept else mems
        for segment in segments:
            out = model(segment, mems)
            mems = out.mems
            hidden.append(out.hidden)
        return torch.cat(hidden, 1)

    changed = [segment.clone() for segment in segments]
    changed[0][1] = (changed[0][1] + 1) % 23
    is_limited = model.config.attn_len or model.config.layer_attn_lens
    for is_kept in (False, True):
        expected = read(segments, is_kept)
        permuted = read([segment[order] for segment in segments], is_kept)
        torch.testing.assert_close(permuted, expected[order], **EXACT)
        found = read(changed, is_kept)
        assert torch.equal(found[[0, 2]], expected[[0, 2]])
        assert (found[1] - expected[1]).abs().amax(-1).min() > 1e-9 or is_limited


@torch.no_grad()
def test_probabilities_sum_to_one_and_are_those_of_the_loss(model):
    mems, text, targets = model(some_text()).mems, some_text(), some_text()
    log_probs = model(text, mems).log_probs
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(3, 9).double(), **EXACT)
    expected = -log_probs.gather(-1, targets[..., None])[..., 0]
    torch.testing.assert_close(model(text, mems, targets).nll, expected, **EXACT)
