"""Keys and values: the ragged cache, how a layer stores its entries, and the prefix cache."""
