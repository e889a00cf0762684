"""Who asks: the command line, and the story of a run. Alone in importing Click and rich."""
