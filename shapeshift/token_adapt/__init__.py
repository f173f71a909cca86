"""One frozen vision transformer that computes more or fewer tokens, by load and deadline (OTAS)."""
