"""`lamina demo`: a server and an engine as processes, and what four ways to load a hit cost."""
