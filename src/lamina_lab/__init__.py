"""Lamina's laboratory: benchmarks, soak, simulator, demo and a reference engine.

It uses the product; nothing of the product imports it. `lamina` finds its commands by entry points.
"""

INSTALL_LAB = "In a checkout of Lamina: pip install '.[lab]'"
