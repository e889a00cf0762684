"""Where it is done: workers as Ray actors. The only folder that imports Ray."""
