"""docs/engines.md: the engine on it runs, and it names all that there is."""
