"""How prompts become completions: one file an engine, each listed in workers.engine.ENGINES."""
