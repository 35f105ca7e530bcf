"""Transposed pieces stay in the range of each voice, and each is read equally often."""

from transformer_xl.tasks.music.transposing import keys_of, ranges_of, rounds_of, transposed


def test_a_transposition_keeps_intervals_and_rests():
    piece = [(60, 55, 52, -1), (62, -1, 53, 43)]
    assert transposed(piece, 3) == [(63, 58, 55, -1), (65, -1, 56, 46)]
    assert transposed(transposed(piece, 3), -3) == piece


def test_no_voice_leaves_its_range_and_every_key_within_it_is_one():
    pieces = [[(70, 60, 50, 40)], [(75, 66, 54, 45)], [(72, -1, 52, 42), (73, 62, 52, 42)]]
    ranges = ranges_of(pieces)
    assert ranges == [(70, 75), (60, 66), (50, 54), (40, 45)]
    assert [keys_of(piece, ranges) for piece in pieces] == [
        [0, 1, 2, 3, 4],
        [-4, -3, -2, -1, 0],
        [-2, -1, 0, 1, 2],
    ]


def test_a_round_has_every_piece_once_and_keys_come_again_after_all_others():
    pieces = [[(70, 60, 50, 40)], [(72, 61, 51, 42)] * 2, [(75, 66, 54, 45)] * 3]
    keys = [keys_of(piece, ranges_of(pieces)) for piece in pieces]
    found = rounds_of(pieces, 10, seed=1)
    rounds = [found[n : n + 3] for n in range(0, 30, 3)]
    for each in rounds:
        assert sorted(map(len, each)) == [1, 2, 3]
    for piece, own in zip(pieces, keys, strict=True):
        sung = [x for each in rounds for x in each if len(x) == len(piece)][: len(own)]
        assert sorted(sung) == sorted(transposed(piece, key) for key in own)
    assert found == rounds_of(pieces, 10, seed=1) != rounds_of(pieces, 10, seed=2)


def test_a_voice_that_only_rests_does_not_limit_the_keys():
    pieces = [[(60, -1)], [(62, 40)]]
    assert [keys_of(piece, ranges_of(pieces)) for piece in pieces] == [[0, 1, 2], [0]]
    assert keys_of([(-1, -1)], ranges_of(pieces)) == [0]
