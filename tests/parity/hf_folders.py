"""Small models of transformers in folders, with tokenizers, for whatever reads such folders."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TEXT = [
    "The quick brown fox jumps over the lazy dog. It barks, and the fox runs away at once.",
    "A model reads a text and says what may come next; the likeliest word is not always right.",
    "Numbers such as 12, 345 and 6789 are made of several pieces, as are rare words: Ærøskøbing.",
]
END = "<|endoftext|>"
SIZES = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2}


def make_tokenizer(size: int = 320) -> Tokenizer:
    """Byte-level, so that every text comes back."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def make_gpt2(vocabulary: int, *, positions: int) -> transformers.PreTrainedModel:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=vocabulary,
            n_positions=positions,
            n_embd=48,
            n_layer=2,
            n_head=4,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def make_llama(vocabulary: int, *, positions: int) -> transformers.PreTrainedModel:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=vocabulary,
            max_position_embeddings=positions,
            num_attention_heads=4,
            num_key_value_heads=2,
            bos_token_id=0,
            eos_token_id=0,
            **SIZES,
        )
    )


FAMILIES = {"gpt2": make_gpt2, "llama": make_llama}


def write_folder(folder: Path, *, family: str = "gpt2", positions: int = 64) -> Path:
    """A folder with random weights of some size (nearly trained ones would hide mistakes)."""
    tokenizer = make_tokenizer()
    torch.manual_seed(3)
    model = FAMILIES[family](tokenizer.get_vocab_size(), positions=positions)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "bos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
