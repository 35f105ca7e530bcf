"""Documents of any length, classified whole: the memory carries what the beginning said."""

from transformer_xl.inference.classify.classifier import LongDocumentClassifier, Reading
from transformer_xl.inference.classify.fitting import Fit, accuracy, fit

__all__ = ["Fit", "LongDocumentClassifier", "Reading", "accuracy", "fit"]
