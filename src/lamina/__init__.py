"""Lamina: a KV-cache server that gives KV back layer by layer."""

__version__ = "0.1.0"
