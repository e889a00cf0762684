"""Models so small that their logits are known, saved as folders in Hugging Face's layout."""

from itertools import pairwise
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

WIDTH = 32


def constant_model(
    logits: list[float], *, eos: int | list[int] | None = None, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """Every step of every prompt has these logits, rounded to dtype."""
    model = _bare_llama(vocab_size=len(logits), hidden_size=4, eos=eos)
    with torch.no_grad():
        model.model.embed_tokens.weight.fill_(1.0)
        # The norm turns equal entries into ones, so a row of the head sums to its logit.
        model.lm_head.weight.copy_(torch.tensor(logits)[:, None].expand(-1, 4) / 4)
    return model.to(dtype)


def table_model(following: list[int], *, eos: int | list[int] | None = None) -> PreTrainedModel:
    """After token t comes following[t]: its logit is 10 * sqrt(V), and all others are 0."""
    size = len(following)
    model = _bare_llama(vocab_size=size, hidden_size=size, eos=eos)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        model.lm_head.weight.zero_()
        for token_id, successor in enumerate(following):
            model.lm_head.weight[successor, token_id] = 10.0
    return model


def successor_model(size: int = 12, *, eos: int | list[int] | None = None) -> PreTrainedModel:
    """Counts upwards, and from the last token back to 0."""
    return table_model([(token_id + 1) % size for token_id in range(size)], eos=eos)


def position_model() -> PreTrainedModel:
    """Random GPT-2, whose absolute positions betray every token of padding."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64, n_positions=64, n_embd=32, n_layer=2, n_head=2, initializer_range=0.5,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).float().eval()


def emoji_model() -> PreTrainedModel:
    """Spells U+1F642 after ">", byte by byte, and ends."""
    following = [256] * 257
    spelled = b">\xf0\x9f\x99\x82"
    for before, after in pairwise(spelled):
        following[before] = after
    return table_model(following, eos=256)


def random_model(config: PreTrainedConfig, *, scale: float = 0.3) -> PreTrainedModel:
    """Random weights, large enough that rows and positions make a difference."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=scale)
    return model


def byte_tokenizer(*, bos: bool = False) -> PreTrainedTokenizerFast:
    """Token id == byte; 256 is <eos>. With bos, 257 is put before every text."""
    alphabet = bytes_to_unicode()
    tokenizer = Tokenizer(models.BPE(vocab={alphabet[b]: b for b in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    if not bos:
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    from tokenizers.processors import TemplateProcessing

    tokenizer.add_special_tokens([AddedToken("<bos>", special=True)])
    tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 257)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", bos_token="<bos>")


def save(
    model: PreTrainedModel, folder: Path, *, tokenizer: PreTrainedTokenizerFast | None = None
) -> str:
    """Writes a model's folder and returns its path."""
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return str(folder)


def _bare_llama(
    *, vocab_size: int, hidden_size: int, eos: int | list[int] | None
) -> PreTrainedModel:
    """One layer that adds nothing: the head sees the normalised embedding of the last token."""
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=hidden_size, intermediate_size=hidden_size,
        num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1,
        head_dim=hidden_size + hidden_size % 2, max_position_embeddings=64, rms_norm_eps=0.0,
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=eos, pad_token_id=None,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.norm.weight.fill_(1.0)
    model.generation_config = GenerationConfig(eos_token_id=eos)
    return model
