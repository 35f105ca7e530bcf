"""Where two ways to write greedily first differ: the compiled step and the operations of torch.

Greedy text often falls into a loop, in which equality says little. With a text given, both read
that instead of what they write, and the likeliest token after each of its tokens is compared.
"""

from pathlib import Path

import torch
from shapes import Shape, model_config

from transformer_xl.data import load_vocab
from transformer_xl.model import TransformerXL
from transformer_xl.model.decoder import EagerDecoder, RingDecoder, choose_step
from transformer_xl.model.pretrained import find_model_folder
from transformer_xl.model.segment import Lengths
from transformer_xl.model.steps import CompiledStep

PROMPT = "import os\n\n\ndef "


@torch.no_grad()
def compare(source: Path | Shape, length: int, text: Path | None = None) -> None:
    """Write with both from the same prompt until they differ, and print what was found.

    Args:
        source: A folder with a model and its vocabulary, or the shape of a model with random
            weights.
        length: Tokens to write.
        text: A file that both read instead; to a model with random weights, bytes are tokens.
    """
    torch.manual_seed(0)
    given: list[int] = []
    if isinstance(source, Shape):
        model, prompt = TransformerXL(model_config(source)).eval(), [*range(16)]
        if text is not None:
            given = [byte % source.vocab for byte in text.read_bytes()]
    else:
        folder = find_model_folder(source)
        model = TransformerXL.from_pretrained(folder).eval()
        vocab = load_vocab(folder)
        prompt = vocab.encode(PROMPT)
        if text is not None:
            given = vocab.encode(text.read_text("utf-8"))
    assert isinstance(model, TransformerXL)
    step, reason = choose_step(model)
    if step is not CompiledStep:
        raise SystemExit(f"this model has no compiled step: {reason}")
    if text is not None:
        prompt, length = given[:1], min(length, len(given) - 1)
    lengths = Lengths.of(model.config)
    start = model.keep(model.start_memory(1))
    ways = [RingDecoder(model, lengths, start, step), EagerDecoder(model, lengths, start)]
    for token in prompt[:-1]:
        for decoder in ways:
            decoder(torch.tensor([token]))
    read, written, furthest, closest = prompt[-1], [], 0.0, float("inf")
    for n in range(1, length + 1):
        rows = torch.cat([model.head.log_probs(way(torch.tensor([read]))) for way in ways])
        furthest = max(furthest, float((rows[0] - rows[1]).abs().max()))
        best, tokens = rows.topk(2)
        margins = (best[:, 0] - best[:, 1]).tolist()
        closest = min(closest, *margins)
        if tokens[0, 0] != tokens[1, 0]:
            print(f"token {n} is the first that differs: {tokens[:, 0].tolist()}; there the best "
                  f"two are {margins[0]:.1e} and {margins[1]:.1e} nats apart")  # fmt: skip
            break
        written.append(int(tokens[0, 0]))
        read = written[-1] if text is None else given[n]
    else:
        print(f"all {length} tokens are equal")
    windows = {tuple(written[n : n + 32]) for n in range(max(len(written) - 31, 1))}
    print(f"M={lengths.mem_len}, {len(prompt)} tokens of prompt, {len({*written})} different "
          f"tokens, {len(windows)} different runs of 32; log-probabilities differ by at most "
          f"{furthest:.1e}, the best two tokens by at least {closest:.1e} nats")  # fmt: skip
