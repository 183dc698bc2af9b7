"""`lamina demo`: a server and an engine as processes, and what four ways to retrieve a hit cost."""
