"""Examples to copy (`encode_*`) and the open-loop trace replayer (`replay`)."""
