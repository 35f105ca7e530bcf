"""Spoken digits, as features."""
