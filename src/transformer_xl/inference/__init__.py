"""Reading a text (evaluation, scores, classification) and writing one (generation, sessions)."""
