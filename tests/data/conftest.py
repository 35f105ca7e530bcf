"""Fixtures of the tests of texts and corpora."""

import os

import pytest


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Corpora are prepared with one thread, unless more are asked for."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0}, raising=False)
