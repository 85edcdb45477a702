"""`margingate demo`: a real checkpoint, the project's own prompts, plain decoding and the gate side by side."""
