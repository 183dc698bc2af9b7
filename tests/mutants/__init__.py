"""Guards taken away one by one: `make mutants`. Each must be noticed by a test."""
