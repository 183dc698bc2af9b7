"""`python -m lamina.cli`: the same as `lamina`."""

from lamina.cli import main

main()
