"""Inference: evaluation, scores, classification, generation and sessions."""
