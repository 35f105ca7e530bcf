"""Synthetic time series and forecasts."""
