"""Variants of the model of the paper: components that are put in when a model is built."""
