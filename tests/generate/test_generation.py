from itertools import chain, islice

import pytest
import torch

from transformer_xl.inference.generate import generate


def test_a_seed_decides_the_text_and_nothing_else_does(model):
    def text(seed):
        torch.rand(3)
        return list(generate(model, [1, 2], length=20, seed=seed))

    before = torch.get_rng_state()
    assert list(generate(model, [1, 2], length=20, seed=4)) == text(4)
    assert text(4) != text(5)
    assert text(None) != text(None)
    torch.set_rng_state(before)
    list(generate(model, [1], length=5))
    assert torch.equal(torch.get_rng_state(), before)


def test_as_many_tokens_come_as_were_asked_for(model):
    assert [len(list(generate(model, [1], length=n))) for n in (0, 1, 7)] == [0, 1, 7]
    assert len(list(islice(generate(model, [1]), 50))) == 50


def test_the_memory_has_read_all_but_the_last_token(model):
    generation = generate(model, [1, 2, 3], mem_len=50, seed=1)
    # Of the prompt, too, before a token is drawn.
    assert (generation.state.n_positions, [*generation.state.tokens]) == (2, [1, 2, 3])
    for n, token in enumerate(islice(generation, 4)):
        assert len(generation.state.mems) == generation.state.n_positions == 3 + n
        assert generation.state.last_token == token
        assert generation.state.n_tokens == 4 + n


def test_the_memory_given_is_read_and_left_as_it_was(model):
    mems = model(torch.tensor([[4, 5, 6]])).mems
    with torch.no_grad():
        kept = model.keep(mems)
    before = kept.state_dict()["keys"]
    first, second, third = (
        list(generate(model, [1], length=60, mems=given, seed=2)) for given in (mems, kept, kept)
    )
    assert first == second == third
    assert first != list(generate(model, [1], length=60, seed=2))
    assert torch.equal(kept.state_dict()["keys"], before)
    assert len(kept) == len(mems) == 3


def test_time_and_memory_for_a_token_do_not_grow(model):
    generation = generate(model, [1] * 30, seed=1)
    largest = []
    for _ in range(10):
        sizes = []
        for _ in islice(generation, model.config.mem_len):
            mems = generation.state.mems
            decoder = generation._batch.decoder()
            storages = [x.untyped_storage() for x in chain(*decoder.tensors)]
            sizes.append(sum({x.data_ptr(): x.nbytes() for x in storages}.values()))
            assert len(mems) <= model.config.mem_len
        largest.append(max(sizes))
    # The prompt was longer than the memory.
    assert len(set(largest)) == 1


def test_writing_makes_no_graph(model):
    generation = generate(model, [1], length=3)
    list(generation)
    assert torch.is_grad_enabled()
    assert not any(x.requires_grad for x in generation.state.mems.tensors)


def test_a_memory_of_several_streams_is_named_with_the_remedy(model):
    with pytest.raises(ValueError, match=r"mems holds 2 streams; select one: mems.select\(\[0\]\)"):
        generate(model, [1], mems=model.start_memory(2))
