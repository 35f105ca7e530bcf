"""Anomalies in synthetic logs."""
