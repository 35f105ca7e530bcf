"""Documents of any length, classified whole: the memory carries what the beginning said."""

from transformer_xl.inference.classify.classifier import (
    Fit,
    LongDocumentClassifier,
    Reading,
    accuracy,
    fit,
)

__all__ = ["Fit", "LongDocumentClassifier", "Reading", "accuracy", "fit"]
