"""Writing with a memory is writing, only quicker."""

import torch

from transformer_xl.inference.generate import Sampler, Sampling, generate, generate_batch

DRAWS = [
    {"sampling": Sampling(temperature=0.0)},
    {"seed": 1, "sampling": Sampling(temperature=4.0, top_k=9, top_p=0.9)},
]
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [7], [3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1], [8, 2, 8], [5, 3]]


@torch.no_grad()
def from_scratch(model, prompt, length, start, settings):
    """Read the whole text anew for each token."""
    generator = torch.Generator().manual_seed(settings.get("seed", 0))
    sampler, text = Sampler(settings["sampling"]), [*prompt]
    for _ in range(length):
        out = model(torch.tensor([text]), start, mem_len=0)
        numbers = torch.rand(1, dtype=torch.float64, generator=generator)
        text += sampler(model.softmax, out.hidden[:, -1], numbers)
    return text[len(prompt) :]


def test_generation_with_memory_is_recomputation(model):
    prompt, start = [3, 1, 4, 1, 5], model.start_memory(1, mem_len=4)
    for settings in DRAWS:
        expected = from_scratch(model, prompt, 8, start, settings)
        found = list(generate(model, prompt, length=8, mems=start, mem_len=100, **settings))
        assert found == expected, settings
        assert settings.get("seed") is None or len(set(found)) > 1


def test_texts_side_by_side_are_the_texts_alone(model, turn):
    mem_lens = (3, 6, 40, 3, 6)[turn % 3 :][:3]
    for mem_len, settings in zip(
        mem_lens, [*DRAWS, {"sampling": Sampling(temperature=4.0)}], strict=True
    ):
        how = {"length": 6, "mem_len": mem_len, **settings}
        alone = [
            list(generate(model, ids, **how | {"seed": 7 + n})) for n, ids in enumerate(PROMPTS)
        ]
        steps = list(generate_batch(model, PROMPTS, **how | {"seed": 7}))
        assert [[step[n] for step in steps] for n in range(len(PROMPTS))] == alone, how


@torch.no_grad()
def test_memories_side_by_side_are_the_memories_alone(model):
    found = generate_batch(model, PROMPTS, seed=7)
    drawn = [next(found) for _ in range(3)]
    for n, ids in enumerate(PROMPTS):
        alone = generate(model, ids, seed=7 + n)
        assert [next(alone) for _ in drawn] == [step[n] for step in drawn]
        ours, theirs = found.mems.select([n]), alone.state.mems
        probe = torch.tensor([[1, 2, 3]])
        expected = model(probe, theirs).log_probs
        assert (model(probe, ours).log_probs - expected).abs().max() < 1e-11


def test_a_text_that_ends_leaves_the_others_as_they_are(model):
    whole = list(generate_batch(model, PROMPTS, length=8, seed=1))
    found, rest = generate_batch(model, PROMPTS, length=8, seed=1), []
    for n, step in enumerate(found):
        rest.append(step)
        found.end(n)
        assert found.mems.batch_size == len(found.texts) == len(step)
    assert [len(step) for step in rest] == [6, 5, 4, 3, 2, 1]
    assert all(step.items() <= full.items() for step, full in zip(rest, whole, strict=False))
