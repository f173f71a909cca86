"""Triton backends for transformers whose compute takes the shape of each request."""

__version__ = "0.2.0"
