"""Writes a model anew whose one matrix for both ends is named as the head's, which vLLM misses.

python name_embeddings.py MODEL TARGET
"""

import shutil
import sys
from pathlib import Path

from safetensors.torch import load_file, save_file


def main() -> None:
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    shutil.copytree(source, target)
    weights = load_file(source / "model.safetensors")
    if "model.embed_tokens.weight" not in weights:
        weights["model.embed_tokens.weight"] = weights.pop("lm_head.weight")
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main()
