"""Workloads: how long texts are, when they arrive, and what they say."""
