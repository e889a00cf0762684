"""What the torch engine is made of: tensors in, tensors out, no job and no Arrow."""
