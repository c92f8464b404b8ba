"""minillm: LLM inference from scratch, one step at a time."""
