"""Other servers that ours is measured against, each in a virtual environment of its own."""
