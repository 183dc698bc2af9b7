"""What `lamina bench` runs: real processes, measured and checked byte for byte."""
