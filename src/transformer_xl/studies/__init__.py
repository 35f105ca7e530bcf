"""Studies of the paper: ablations and relative effective context length."""
