"""The cache server: one process per host, shared by the engines on it. Never imports torch."""
