"""What is to be done: the vocabulary that every other folder shares. Imports nothing of ours."""
