"""Every measurement that the documentation rests on; `evals/README.md` is the index."""
