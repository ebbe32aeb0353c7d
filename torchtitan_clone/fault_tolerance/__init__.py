"""Surviving what happens to a run from outside."""
