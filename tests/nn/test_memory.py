import copy
import pickle
import random
import threading
from dataclasses import dataclass, replace

import pytest
import torch

from transformer_xl.model import build_model
from transformer_xl.model.keys_and_values import KeysAndValues
from transformer_xl.model.memory import Memory

B, H, K, D, N = 3, 2, 4, 6, 2


def states(T, rows=B):
    return [torch.randn(rows, T, D) for _ in range(N)]


def memory(M, forgotten=None):
    return Memory(states(M), None if forgotten is None else torch.tensor(forgotten))


def kept(M, rows=B):
    shape = (H, rows, M, K)
    keys, values = ([torch.randn(shape) for _ in range(N)] for _ in range(2))
    return KeysAndValues(keys, values)


def write(memory, T, mem_len):
    """Continue a memory with random keys and values, as the model does; return those too."""
    roomy = memory.with_capacity(T, mem_len)
    new = torch.randn(2, N, memory.batch_size, T, H, K)
    for n in range(N):
        roomy.join(n, new[0, n], new[1, n])
    return roomy.extend([torch.empty(0)] * N, mem_len, T), new.permute(0, 1, 4, 2, 3, 5)


def contents(memory):
    """The keys and values that a memory holds, (2, N, H, B, M, K), as a copy."""
    state = memory.state_dict()
    return torch.stack([state["keys"], state["values"]])


@pytest.mark.parametrize(("M", "T"), [(0, 3), (4, 1), (4, 3), (2, 9)])
def test_a_memory_is_the_newest_positions_of_all_that_was_read(M, T):
    old, new = memory(M), states(T)
    for mem_len in (0, 1, 4, 5, 7, 100):
        extended = old.extend(new, mem_len)
        assert len(extended) == min(M + T, mem_len)
        for state, before, segment in zip(extended.states, old.states, new, strict=True):
            everything = torch.cat([before, segment], 1)
            assert torch.equal(state, everything[:, max(M + T - mem_len, 0) :]), mem_len
        assert len(old) == M


def test_the_memory_is_cut_from_the_graph():
    segment = [x.requires_grad_() for x in states(2)]
    extended = memory(3).extend(segment, 5)
    assert all(x.grad_fn is None and not x.requires_grad for x in extended.states)
    attached = Memory(segment)
    assert all(not x.requires_grad for x in attached.detach().states)
    assert kept(3).detach().state_dict()["keys"].requires_grad is False


@pytest.mark.parametrize("make", [memory, kept])
def test_reset_hides_the_past_of_these_streams_alone(make):
    before = make(4)
    for rows, expected in (
        ([], [0, 0, 0]),
        ([1], [0, 4, 0]),
        ([0, 2], [4, 0, 4]),
        (torch.tensor([2, 0]), [4, 0, 4]),
        (torch.tensor([True, False, True]), [4, 0, 4]),
        (torch.tensor([False, False, False]), [0, 0, 0]),
    ):
        after = before.reset(rows)
        assert after.forgotten.tolist() == expected, rows
        assert before.forgotten is None
        again = after.reset([1])
        assert again.forgotten.tolist() == [expected[0], 4, expected[2]]
        assert after.forgotten.tolist() == expected
    for rows, message in (
        ([B], f"the memory has the streams 0 to {B - 1}"),
        (torch.tensor([0.5]), "must be the numbers of streams, or a mask"),
        (torch.tensor([True]), f"a mask of 1 streams for a memory of {B}"),
    ):
        with pytest.raises(ValueError, match=message):
            before.reset(rows)


@pytest.mark.parametrize("is_reset", [False, True])
@pytest.mark.parametrize("M", [0, 4])
@pytest.mark.parametrize("make", [memory, kept])
def test_a_memory_is_the_same_after_saving(make, M, is_reset, tmp_path):
    before = make(M).reset([1]) if is_reset else make(M)
    torch.save(before.state_dict(), tmp_path / "memory")
    after = Memory.from_state_dict(torch.load(tmp_path / "memory", weights_only=True))
    assert len(after) == M
    for name, x in before.state_dict().items():
        y = after.state_dict()[name]
        assert (x is None and y is None) or torch.equal(x, y)


@dataclass
class Twin:
    """A memory, and plain copies of what it should hold."""

    memory: Memory
    expected: torch.Tensor
    forgotten: list[int]


def grown(twin, draw):
    """One random operation, done to the memory and, naively, to the copies."""
    M, rows = len(twin.memory), twin.memory.batch_size
    kind = draw.choice(["write"] * 6 + ["last", "reset", "select", "to", "reload"])
    if kind in ("write", "last"):
        mem_len, T = draw.choice([0, 3, 6, 50]), draw.choice([1, 1, 2, 7])
        if kind == "last":
            T, after, expected = 0, twin.memory.last(mem_len), twin.expected
        else:
            after, new = write(twin.memory, T, mem_len)
            expected = torch.cat([twin.expected, new], -2)
        cut = max(M + T - mem_len, 0)
        return Twin(after, expected[..., cut:, :], [max(f - cut, 0) for f in twin.forgotten])
    if kind == "reset":
        row = draw.randrange(rows)
        forgotten = [M if n == row else f for n, f in enumerate(twin.forgotten)]
        return Twin(twin.memory.reset([row]), twin.expected, forgotten)
    if kind == "select":
        chosen = [draw.randrange(rows) for _ in range(draw.choice([1, 2, 3]))]
        forgotten = [twin.forgotten[row] for row in chosen]
        return Twin(twin.memory.select(chosen), twin.expected[:, :, :, chosen], forgotten)
    if kind == "to":
        return replace(twin, memory=twin.memory.to("cpu"))
    return replace(twin, memory=Memory.from_state_dict(twin.memory.state_dict()))


@pytest.mark.parametrize("seed", range(10))
def test_no_operation_changes_a_memory_that_was_handed_out(seed):
    draw = random.Random(seed)
    first = kept(draw.choice([0, 5]))
    twins = [Twin(first, contents(first), [0] * B)]
    for _ in range(60):
        # From any of them, so that several memories continue the same one.
        twins.append(grown(draw.choice(twins[-8:]), draw))
    for twin in twins:
        assert torch.equal(contents(twin.memory), twin.expected)
        found = twin.memory.forgotten
        assert (found.tolist() if found is not None else [0] * len(twin.forgotten)) == (
            twin.forgotten
        )


def test_threads_that_go_on_from_one_memory_do_not_change_each_other():
    barrier, after = threading.Barrier(4), {}

    def go_on(thread):
        barrier.wait()
        after[thread] = write(before, 1, 8)

    for _ in range(20):
        before, _ = write(kept(5), 1, 8)
        threads = [threading.Thread(target=go_on, args=(n,)) for n in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        for memory, new in after.values():
            assert torch.equal(contents(memory), torch.cat([contents(before), new], -2))


@pytest.mark.parametrize(
    "settings",
    [{}, {"attn_type": 2}, {"reset_at": 3}, {"kind": "lstm", "n_head": 8, "d_inner": 2048}],
)
def test_what_was_read_in_inference_mode_can_be_gone_on_from(tiny_config, settings):
    model = build_model(replace(tiny_config, **settings)).eval()
    segment = torch.randint(31, (2, 4))
    found = []
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            mems = model(segment, model.start_memory(2)).mems.reset([1])
            kept = model(segment, model.keep(mems)).mems
        model.zero_grad()
        model(segment, mems, segment).loss.backward()
        with torch.no_grad():
            out = model(segment, kept)
            # The other way round, too.
            with torch.inference_mode():
                after = model(segment, out.mems).hidden
        found.append([*(x.grad for x in model.parameters()), out.hidden, after])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copied_memory_goes_its_own_way(copied):
    before, _ = write(kept(5), 1, 8)
    other = copied(before)
    expected = contents(before)
    for memory in (before, other, before, other):
        after, new = write(memory, 1, 8)
        assert torch.equal(contents(after), torch.cat([expected, new], -2))
    assert torch.equal(contents(other), expected)


def test_most_steps_move_nothing_and_the_room_stays_bounded():
    mem_len, moves, memory = 16, 0, kept(0)
    for _ in range(10 * mem_len):
        places = {x.data_ptr() for x in memory.keys}
        memory, _ = write(memory, 1, mem_len)
        moves += places != {x.data_ptr() for x in memory.keys}
        assert memory.keys[0].shape[2] <= 2 * mem_len + 1
    assert moves <= 10 + 4


@pytest.mark.parametrize("make", [lambda M, rows: Memory(states(M, rows)), kept])
def test_joined_streams_keep_what_each_had(make):
    long, short, none = make(5, 2).reset([1]), make(3, 1), make(0, 1)
    joined = Memory.cat([long, short, none])
    assert type(joined) is type(long)
    assert (len(joined), joined.batch_size) == (5, 4)
    assert joined.forgotten.tolist() == [0, 5, 2, 5]
    for x, one, other in zip(joined.tensors, long.tensors, short.tensors, strict=True):
        assert torch.equal(x[..., :2, :, :], one)
        assert torch.equal(x[..., 2:3, 2:, :], other)
        assert x.isfinite().all()
