"""Classification of documents of any length, with memory instead of truncation."""

from transformer_xl.inference.classify.classifier import (
    Fit,
    LongDocumentClassifier,
    Reading,
    accuracy,
    fit,
)

__all__ = ["Fit", "LongDocumentClassifier", "Reading", "accuracy", "fit"]
