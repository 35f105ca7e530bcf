"""``python -m transformer_xl.harness``: lm-evaluation-harness with our type of model."""

from transformer_xl.interop.harness import run

if __name__ == "__main__":
    run()
