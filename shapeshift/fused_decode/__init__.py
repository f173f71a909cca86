"""One decode loop shared by every running request (Flover)."""
