"""One forward of somebody else's model: what it runs on, what it reads beside its tokens, its attention."""
