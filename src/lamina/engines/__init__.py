"""Engines that use Lamina, one package each. Only `engines/X` imports engine X."""
