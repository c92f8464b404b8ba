"""Step 0: the transformer itself."""
