"""Other people's formats and frameworks: transformers, lm-evaluation-harness, ONNX, checkpoints."""
