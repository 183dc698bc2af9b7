"""Engines of known bytes: what benchmarks, soak and tests store, retrieve and check."""
