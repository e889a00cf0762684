"""How it is done: one engine, many shards. Runs without Ray; imports jobs only."""
