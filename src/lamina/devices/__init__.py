"""Memory of engines: how it is exported, opened and copied. One module per kind of device."""
